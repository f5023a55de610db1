"""Tasks in English, for models that have a tokenizer: those of the recall model, more of RULER's kinds, and how texts go on.

Source: the words of passkey retrieval are those of Mohtashami and Jaggi (2023); the needles, tracking of variables, common
and frequent words follow RULER (Hsieh et al. 2024, section 3); icecache.txt, sections 5.2 and 5.5, asks needles. Differs
from all: contexts have an exact number of tokens; of the common and the frequent words only the first is asked for, and
the variables in their order, so that an answer is right or wrong word for word.

Texts are those on the machine: what Debian's packages document, their licences, and manual pages as they are written. Which
ones depends on what is installed, so each says where it is from; with the same packages the same seed gives the same.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmcache.arrays import Int64s
from llmcache.errors import EnvironmentProblem, UsageError
from llmcache.kv.tasks.recall import BINS, DEPTHS, Probe

Encode = Callable[[str], Sequence[int]]
"""Text to tokens, without a beginning or an end of text."""

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
INTRODUCTION = (
    "There is important information hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about it.\n"
)
KINDS = [
    "amber", "birch", "cedar", "dune", "ember", "fjord", "grove", "heath", "iris", "juniper",
    "kelp", "lotus", "maple", "north", "opal", "pearl", "quartz", "river", "slate", "tulip",
]  # fmt: skip
RECALLED = 16
"""Numbers in a context of the task recall, all of which are asked for; of the task needle, one."""
ASSIGNED = 5
"""Variables that have the value that is asked for. Source: RULER, section 3.2: a chain of 4 hops."""
OFTEN, SELDOM = 30, 3
"""How often the common word comes for each time that each of the others does. Source: RULER, section 3.3."""
ZIPF = 2.0
"""The made-up word of rank k comes k^-ZIPF as often as the first. Source: RULER, section 3.3."""
ALPHABET = list("abcdefghijklmnopqrstuvwxyz")
ROOT = Path("/usr/share")
PATTERNS = ("doc/*/README*", "doc/*/NEWS*", "doc/*/*.txt*", "doc/*/*.md*", "common-licenses/*", "man/man[1578]/*.gz")
TOKEN_LETTERS = 8
"""Letters for which there is hardly ever less than a token."""
FOLLOWING = 65
"""Tokens that a text goes on with: the first is given, each other is to be told from those before it."""


def texts(
    task: str, rng: np.random.Generator, tokens: int, cases: int, encode: Encode, first: Sequence[int]
) -> Iterator[Probe]:
    """Yields probes of one context of `tokens` each; `first`: what a text begins with.

    UsageError: the task is not one in English, or `tokens` are too few for it.
    """
    writer = _Author(rng, tokens, encode, first)
    tasks: dict[str, Callable[[], Probe]] = {
        "recall": lambda: writer.numbers(single=False),
        "needle": lambda: writer.numbers(single=True),
        "variables": writer.variables,
        "common": lambda: writer.words(made_up=False),
        "frequent": lambda: writer.words(made_up=True),
    }
    if task == "passkey":
        for depth in DEPTHS:
            for _ in range(cases):
                number = str(rng.integers(10000, 100000))
                needle = f"The pass key is {number}. Remember it. {number} is the pass key. "
                asked = "\nWhat is the pass key? The pass key is"
                yield writer.probe([(needle, depth)], [(asked, number)], depth)
    elif task in tasks:
        for _ in range(cases):
            yield tasks[task]()
    else:
        raise UsageError(f"--task: '{task}' is not a task in English", "omit --model to use the recall model")


@dataclass(frozen=True)
class _Author:
    """Writes contexts of `tokens`, which begin with `first`."""

    rng: np.random.Generator
    tokens: int
    encode: Encode
    first: Sequence[int]

    def numbers(self, single: bool) -> Probe:
        """Numbers of different kinds, of which a `single` one or all are asked for."""
        kinds = self.rng.permutation(KINDS)[:RECALLED]
        numbers = [str(number) for number in self.rng.choice(np.arange(1000000, 10000000), RECALLED, replace=False)]
        depths = np.sort(self.rng.random(RECALLED))
        needles = [
            (f"One of the special magic numbers for {kind} is: {number}. ", float(depth))
            for kind, number, depth in zip(kinds, numbers, depths, strict=True)
        ]
        wanted = self.rng.permutation(RECALLED)[: 1 if single else RECALLED]
        asked = [(f"\nThe special magic number for {kinds[one]} is:", numbers[one]) for one in wanted]
        return self.probe(needles, asked, int(BINS * depths[wanted[0]]) / BINS if single else None)

    def variables(self) -> Probe:
        """Two chains of assignments, of which one is asked for, variable by variable."""
        names = ["".join(self.rng.choice(ALPHABET, 5)).upper() for _ in range(2 * ASSIGNED)]
        values = self.rng.choice(np.arange(10000, 100000), 2, replace=False)
        needles = []
        for chain, value in zip((names[:ASSIGNED], names[ASSIGNED:]), values, strict=True):
            told = [str(value), *(f"VAR {name}" for name in chain[:-1])]
            depths = np.sort(self.rng.random(ASSIGNED))
            needles += [(f"VAR {name} = {of}. ", float(at)) for name, of, at in zip(chain, told, depths, strict=True)]
        needles.sort(key=lambda needle: needle[1])
        lead = f"\nQuestion: Find all variables that are assigned the value {values[0]}.\nAnswer: They are:"
        return self.probe(needles, [(lead if number == 0 else ",", name) for number, name in enumerate(names[:ASSIGNED])])

    def words(self, made_up: bool) -> Probe:
        """A list of words by chance, one of which comes most."""
        if made_up:
            known = ["".join(self.rng.choice(ALPHABET, 6)) for _ in KINDS]
            weights = np.arange(1, len(known) + 1) ** -ZIPF
        else:
            known = [str(kind) for kind in self.rng.permutation(KINDS)]
            weights = np.array([OFTEN] + [SELDOM] * (len(known) - 1), float)
        lead = "Read the following list of words and memorize those that appear most often.\n"
        head = [*self.first, *self.encode(lead)]
        if len(head) + OFTEN > self.tokens:
            raise UsageError(
                f"--context: must be at least {len(head) + OFTEN} tokens for the words, not {self.tokens}",
                "increase --context",
            )
        words = self.rng.choice(known, self.tokens, p=weights / weights.sum())  # of a token at least
        ids = [*head, *self.encode(" ".join(words))][: self.tokens]
        asked = _row(self.encode("\nThe word that appears most often in the list is:"))
        return Probe(_row(ids), [asked], [_row(self.encode(f" {known[0]}"))])

    def probe(
        self, needles: Sequence[tuple[str, float]], asked: Sequence[tuple[str, str]], depth: float | None = None
    ) -> Probe:
        """A context with `needles` (text, depth) in noise, and questions with their answers."""
        ids = [*self.first, *self.encode(INTRODUCTION)]
        parts = [list(self.encode(text)) for text, _ in needles]
        room = self.tokens - len(ids) - sum(map(len, parts))
        if room < 0:
            least = self.tokens - room
            raise UsageError(
                f"--context: must be at least {least} tokens for this task, not {self.tokens}", "increase --context"
            )
        sentence, done = list(self.encode(NOISE)), 0
        start = int(self.rng.integers(len(NOISE))) % len(sentence)
        noise = (sentence * (1 + (start + room) // len(sentence)))[start : start + room]
        for part, (_, at) in zip(parts, needles, strict=True):
            ids = [*ids, *noise[done : round(at * room)], *part]
            done = round(at * room)
        ids = [*ids, *noise[done:]]
        questions = [_row(self.encode(question)) for question, _ in asked]
        answers = [_row(self.encode(f" {answer}")) for _, answer in asked]
        return Probe(_row(ids), questions, answers, None if depth is None else [depth])


def _row(ids: Sequence[int]) -> Int64s:
    return np.array([ids], np.int64)


# Texts


@dataclass(frozen=True)
class Document:
    """A text `ids` [1, tokens], how it goes on, `following` [1, n], and where it is from, `source`."""

    ids: Int64s
    following: Int64s
    source: str


def documents(
    rng: np.random.Generator, tokens: int, cases: int, encode: Encode, first: Sequence[int], root: Path = ROOT
) -> Iterator[Document]:
    """Yields `cases` texts of `tokens` and FOLLOWING more, each from somewhere in another file, one of a package.

    `first`: what a text begins with. EnvironmentProblem: so many files of that length are not there.
    """
    found_all = (path for pattern in PATTERNS for path in root.glob(pattern) if path.is_file() and not path.is_symlink())
    paths = sorted(found_all, key=lambda path: path.parts)  # as paths compare themselves, slowly
    whole = tokens + FOLLOWING
    packages: set[Path] = set()
    found = 0
    for place in rng.permutation(len(paths)):
        if found == cases:
            return
        path = paths[place]
        package = path if "man" in path.parts else path.parent
        written = "" if package in packages else _written(path)
        room = len(written) - TOKEN_LETTERS * whole
        if room < 0:
            continue
        at = int(rng.integers(room + 1))
        ids = np.array([[*first, *encode(written[at : at + TOKEN_LETTERS * whole])][:whole]], np.int64)
        if ids.shape[1] == whole:
            packages.add(package)
            found += 1
            yield Document(ids[:, :tokens], ids[:, tokens:], f"{path} from letter {at}")
    if found < cases:
        hint = "install documentation (apt-get install manpages), or reduce --cases or --context"
        raise EnvironmentProblem(f"{root}: has only {found} of the {cases} texts of {whole} tokens that are needed", hint)


def _written(path: Path) -> str:
    """What a file says; nothing where it is no text."""
    data = path.read_bytes()
    try:
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (UnicodeDecodeError, OSError, EOFError):
        return ""
