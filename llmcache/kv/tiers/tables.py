"""Page tables on disk, beside a spill file: which pages of which streams each sequence is made of.

A spill file alone tells of sequences that were never forked: sequence i is stream i. Else this small JSON file does. The
last run of a sequence is open while it is only added to: whatever its stream holds from there on belongs to it, so the
tables need not be written for every page. They are written before what they tell of changes: a page that is named and
not there (yet) is cut off when it is restored; one that is there and not named is taken away.
"""

from __future__ import annotations

import json
import re
import reprlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmcache import files
from llmcache.errors import DataError
from llmcache.kv.spill.raw import problem

OPEN = -1
"""Pages of a run that takes all that there are in its stream."""
SCHEMA = "llmcache.kv.tables/1"

_NAME = re.compile("[0-9a-f]*")

Runs = list[tuple[int, int]]


@dataclass(frozen=True)
class Tables:
    """Runs of each sequence: (stream, pages from its beginning on, or OPEN).

    `saved`: nothing is missing behind the last page, which may be partial. `beside`: what the caller calls the file of its
    own that belongs to what was saved last ("": none).
    """

    sequences: list[Runs]
    saved: bool = False
    beside: str = ""

    @staticmethod
    def plain(batch: int) -> Tables:
        """Returns the tables of sequences that were never forked."""
        return Tables([[(stream, OPEN)] for stream in range(batch)])

    @property
    def is_plain(self) -> bool:
        """True if the spill file alone tells as much."""
        alike = all(not runs or (len(runs) == 1 and runs[0][0] == b) for b, runs in enumerate(self.sequences))
        return alike and not self.saved and not self.beside

    def opened(self) -> Tables:
        """Returns them with the last run of each sequence open."""
        opened = [[*runs[:-1], (runs[-1][0], OPEN)] if runs else [] for runs in self.sequences]
        return replace(self, sequences=opened)


def path_of(spill: Path) -> Path:
    """Returns where the tables of a spill file are; the name ends like its own (--spill globs)."""
    return spill.with_name(f"tables-{spill.name}")


def write(spill: Path, tables: Tables) -> None:
    """Writes the tables of a spill file, in place of those that it has; on the disk when it returns."""
    path = path_of(spill)
    told = {"schema": SCHEMA, "saved": tables.saved, "sequences": tables.sequences, "beside": tables.beside}
    try:
        with files.replacing(path) as stream:
            stream.write(json.dumps(told).encode())
    except OSError as error:
        raise problem(path, "writing page tables", error) from None


def remove(spill: Path) -> None:
    """Takes the tables of a spill file away, if it has any; on the disk when it returns."""
    path = path_of(spill)
    try:
        files.remove(path)
    except OSError as error:
        raise problem(path, "removing page tables", error) from None


def read(spill: Path) -> Tables | None:
    """Returns the tables of a spill file, None if there are none; DataError if they are damaged."""
    path = path_of(spill)
    try:
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if told["schema"] != SCHEMA:
            raise ValueError(f"schema {reprlib.repr(told['schema'])}")
        if not _NAME.fullmatch(beside := told.get("beside", "")):
            raise ValueError(f"a file {reprlib.repr(beside)} beside it")
        return Tables([_checked(runs) for runs in told["sequences"]], bool(told["saved"]), beside)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise problem(path, "reading page tables", error) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: page tables: {error}", "they are damaged: compute the context again") from None


def _checked(runs: Any) -> Runs:
    """`runs` if a sequence can consist of them: a run begins where its stream does, so none has a stream twice."""
    found = [(stream, pages) for stream, pages in runs]
    for place, (stream, pages) in enumerate(found):
        is_open = pages == OPEN and place == len(found) - 1
        if type(stream) is not int or type(pages) is not int or not 0 <= stream < 1 << 32 or (pages < 0 and not is_open):
            raise ValueError(f"a run of {reprlib.repr(pages)} pages of stream {reprlib.repr(stream)}")
    if len({stream for stream, _ in found}) < len(found):
        raise ValueError("a sequence has a stream twice")
    return found
