"""Texts that are on the machine: what Debian's packages document, their licences, and manual pages as they are written.

Which ones depends on what is installed, so each says where it is from; with the same packages the same seed gives the same.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from llmcache.errors import EnvironmentProblem
from llmcache.kv.tasks.probes import Text
from llmcache.kv.tasks.texts import Encode

ROOT = Path("/usr/share")
PATTERNS = ("doc/*/README*", "doc/*/NEWS*", "doc/*/*.txt*", "doc/*/*.md*", "common-licenses/*", "man/man[1578]/*.gz")
LETTERS = 8
"""Letters for which there is hardly ever less than a token."""
FOLLOWING = 65
"""Tokens that a text goes on with: the first is given, each other is to be told from those before it."""


def documents(
    rng: np.random.Generator, tokens: int, cases: int, encode: Encode, first: Sequence[int], root: Path = ROOT
) -> Iterator[Text]:
    """Yields `cases` texts of `tokens` and FOLLOWING more, each from somewhere in another file, one of a package.

    `first`: what a text begins with. EnvironmentProblem: so many files of that length are not there.
    """
    paths = sorted(path for pattern in PATTERNS for path in root.glob(pattern) if path.is_file() and not path.is_symlink())
    whole = tokens + FOLLOWING
    packages: set[Path] = set()
    found = 0
    for place in rng.permutation(len(paths)):
        if found == cases:
            return
        path = paths[place]
        package = path if "man" in path.parts else path.parent
        written = "" if package in packages else _written(path)
        room = len(written) - LETTERS * whole
        if room < 0:
            continue
        at = int(rng.integers(room + 1))
        ids = np.array([[*first, *encode(written[at : at + LETTERS * whole])][:whole]], np.int64)
        if ids.shape[1] == whole:
            packages.add(package)
            found += 1
            yield Text(ids[:, :tokens], ids[:, tokens:], f"{path} from letter {at}")
    if found < cases:
        hint = "install documentation (apt-get install manpages), or ask for fewer --cases or a shorter --context"
        raise EnvironmentProblem(f"{root}: {found} texts of {whole} tokens, {cases} are needed", hint)


def _written(path: Path) -> str:
    """What a file says; nothing where it is no text."""
    data = path.read_bytes()
    try:
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (UnicodeDecodeError, OSError, EOFError):
        return ""
