"""Tasks in English, for models with a tokenizer: those of the recall model, more from RULER, and continuations of texts.

Source: passkey retrieval is from Mohtashami and Jaggi (2023); the needles, variable tracking, common and frequent words
follow RULER (Hsieh et al. 2024, section 3); icecache.txt, sections 5.2 and 5.5, uses needles. Differs from all:
contexts have an exact number of tokens, and each answer is right or wrong word for word.

Texts are files of installed Debian packages; with the same packages, the same seed gives the same texts.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmcache.arrays import Int64s
from llmcache.errors import MissingRequirement, UsageError
from llmcache.kv.tasks.recall import BINS, DEPTHS, Probe

Encode = Callable[[str], Sequence[int]]  # text to tokens, without tokens for the beginning or end of the text

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
INTRODUCTION = (
    "There is important information hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about it.\n"
)
KINDS = [
    "amber", "birch", "cedar", "dune", "ember", "fjord", "grove", "heath", "iris", "juniper",
    "kelp", "lotus", "maple", "north", "opal", "pearl", "quartz", "river", "slate", "tulip",
]  # fmt: skip
RECALLED = 16  # numbers in a context; the task recall has a question about each, the task needle about one
ASSIGNED = 5  # variables with the requested value. Source: RULER, section 3.2: a chain of 4 hops.
OFTEN, SELDOM = 30, 3  # frequency of the common word and of each of the others. Source: RULER, section 3.3.
ZIPF = 2.0  # the made-up word of rank k is k^-ZIPF as frequent as the first. Source: RULER, section 3.3.
ALPHABET = list("abcdefghijklmnopqrstuvwxyz")
ROOT = Path("/usr/share")
PATTERNS = ("doc/*/README*", "doc/*/NEWS*", "doc/*/*.txt*", "doc/*/*.md*", "common-licenses/*", "man/man[1578]/*.gz")
TOKEN_LETTERS = 8  # letters that give at least one token, with very few exceptions
FOLLOWING = 65  # tokens that follow a text: the first is given, each other is predicted from those before it


def texts(
    task: str, rng: np.random.Generator, tokens: int, cases: int, encode: Encode, first: Sequence[int]
) -> Iterator[Probe]:
    """Yield probes of one context of `tokens` each; `first`: the tokens that begin a text.

    UsageError: the task is not one in English, or `tokens` are too few for it.
    """
    writer = _Writer(rng, tokens, encode, first)
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
class _Writer:
    rng: np.random.Generator
    tokens: int
    encode: Encode
    first: Sequence[int]

    def numbers(self, single: bool) -> Probe:
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
        names = ["".join(self.rng.choice(ALPHABET, 5)).upper() for _ in range(2 * ASSIGNED)]
        values = self.rng.choice(np.arange(10000, 100000), 2, replace=False)
        needles = []
        for chain, value in zip((names[:ASSIGNED], names[ASSIGNED:]), values, strict=True):
            sources = [str(value), *(f"VAR {name}" for name in chain[:-1])]
            depths = np.sort(self.rng.random(ASSIGNED))
            needles += [(f"VAR {name} = {of}. ", float(at)) for name, of, at in zip(chain, sources, depths, strict=True)]
        needles.sort(key=lambda needle: needle[1])
        lead = f"\nQuestion: Find all variables that are assigned the value {values[0]}.\nAnswer: They are:"
        return self.probe(needles, [(lead if number == 0 else ",", name) for number, name in enumerate(names[:ASSIGNED])])

    def words(self, made_up: bool) -> Probe:
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
        words = self.rng.choice(known, self.tokens, p=weights / weights.sum())  # at least one token each
        ids = [*head, *self.encode(" ".join(words))][: self.tokens]
        asked = _row(self.encode("\nThe word that appears most often in the list is:"))
        return Probe(_row(ids), [asked], [_row(self.encode(f" {known[0]}"))])

    def probe(
        self, needles: Sequence[tuple[str, float]], asked: Sequence[tuple[str, str]], depth: float | None = None
    ) -> Probe:
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
    """A text `ids` [1, tokens], the tokens `following` it [1, n], and its `source`."""

    ids: Int64s
    following: Int64s
    source: str


def documents(
    rng: np.random.Generator, tokens: int, cases: int, encode: Encode, first: Sequence[int], root: Path = ROOT
) -> Iterator[Document]:
    """Yield `cases` texts of `tokens` and FOLLOWING more, each from a random position in a file of another package.

    MissingRequirement: there are too few files of that length.
    """
    found_all = (path for pattern in PATTERNS for path in root.glob(pattern) if path.is_file() and not path.is_symlink())
    paths = sorted(found_all, key=lambda path: path.parts)  # the order of Path comparison, which is slow
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
        raise MissingRequirement(f"{root}: has only {found} of the {cases} texts of {whole} tokens that are needed", hint)


def _written(path: Path) -> str:
    data = path.read_bytes()
    try:
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (UnicodeDecodeError, OSError, EOFError):
        return ""
