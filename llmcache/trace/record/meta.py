"""What a trace says beside its rows: the files and where the rows come from. JSON in the Parquet schema's metadata."""

from __future__ import annotations

import itertools
import json
import os
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

from llmcache.errors import DataError

SCHEMA = "llmcache.trace/1"
KEY = b"llmcache.trace"
LOCKED = "locked_bytes"
_HINT = "the file was changed or is damaged: record or convert it again"
_LIMITS = {"id": 1 << 32, "dev": 1 << 64, "inode": 1 << 64, "generation": 1 << 64, "size_bytes": 1 << 63}


@dataclass(frozen=True)
class TraceFile:
    """A file of a trace. `size_bytes` is the largest size known while it was traced, 0 if unknown.

    `dev`, `inode` and `generation` are 0 where the source of the trace does not tell them.
    """

    id: int
    path: str
    dev: int
    inode: int
    generation: int
    size_bytes: int

    def __post_init__(self) -> None:
        """DataError, naming the field, for a number or a path that no file has."""
        for name, limit in _LIMITS.items():
            value = getattr(self, name)
            if not 0 <= value < limit:
                raise DataError(f"files: {name} of '{self.path}' is {value}, must be 0 to {limit - 1}", _HINT)
        try:
            os.fsencode(self.path)
        except UnicodeEncodeError:
            raise DataError(f"files: path {self.path!a} is not what any bytes are read as", _HINT) from None

    @property
    def identity(self) -> tuple[int, int, int, str]:
        """What makes two entries of two traces the same file."""
        return self.dev, self.inode, self.generation, self.path


@dataclass(frozen=True)
class Provenance:
    """Where a trace comes from: `tier` is the source (a capture tier, an importer, "synthetic"), `clock` that of `t_ns`.

    `lost_events` counts accesses known to be missing; `note` says what a reader of results must know.
    """

    tier: str
    clock: str = ""
    kernel: str = ""
    lost_events: int = 0
    command: str = ""
    note: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """DataError for a negative number of lost events."""
        if self.lost_events < 0:
            raise DataError(f"provenance: lost_events is {self.lost_events}, must be at least 0", _HINT)


def locked_extra(locked: Mapping[int, int]) -> str:
    """Returns how `Provenance.extra` says, under LOCKED, how many bytes of which file (id) were locked all the time."""
    return json.dumps({str(file): size_bytes for file, size_bytes in locked.items()}) if locked else ""


def locked_bytes(provenance: Provenance) -> dict[int, int]:
    """Returns the bytes by file id that a mount kept locked, so that no fault showed them; DataError if it is not that."""
    text = provenance.extra.get(LOCKED)
    if text is None:
        return {}
    try:
        return {int(file): int(size_bytes) for file, size_bytes in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        raise DataError(f"provenance: {LOCKED} is {reprlib.repr(text)}", _HINT) from None


def file_table(files: Iterable[TraceFile]) -> tuple[TraceFile, ...]:
    """Returns `files` in the order of their ids; DataError if two have the same."""
    table = tuple(sorted(files, key=lambda file: file.id))
    for before, after in itertools.pairwise(table):
        if before.id == after.id:
            raise DataError(f"files: id {after.id} stands for '{before.path}' and for '{after.path}'", _HINT)
    return table


def encode(files: Iterable[TraceFile], provenance: Provenance) -> bytes:
    """Returns the JSON that `decode` reads."""
    described = asdict(provenance) | {"extra": dict(provenance.extra)}
    document = {"schema": SCHEMA, "provenance": described, "files": [asdict(file) for file in files]}
    return json.dumps(document, separators=(",", ":")).encode()


def decode(text: bytes) -> tuple[tuple[TraceFile, ...], Provenance]:
    """Returns the file table and the provenance in `text`; DataError, naming the field, if it holds something else."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"metadata: not JSON: {error}", _HINT) from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else None
        raise DataError(f"schema: {reprlib.repr(found)}, not '{SCHEMA}'", "written by another version of llmcache")
    table = file_table(files_of(document.get("files")))
    return table, _entry(Provenance, document.get("provenance"), "provenance")


def files_of(entries: object) -> list[TraceFile]:
    """Returns the files that a JSON list tells of; DataError, naming the field, if it is none."""
    if not isinstance(entries, list):
        raise DataError("files: the metadata has no file table", _HINT)
    return [_entry(TraceFile, entry, "files") for entry in entries]


_Entry = TypeVar("_Entry", TraceFile, Provenance)


def _entry(kind: type[_Entry], values: Any, where: str) -> _Entry:
    if not isinstance(values, dict):
        raise DataError(f"{where}: {reprlib.repr(values)} is not an object", _HINT)
    types = {entry.name: entry.type for entry in fields(kind)}
    for name, value in values.items():
        if name not in types:
            raise DataError(f"{where}: {reprlib.repr(name)} is unknown", _HINT)
        if not _suits(value, str(types[name])):
            raise DataError(f"{where}: {name} is {reprlib.repr(value)}", _HINT)
    try:
        return kind(**values)
    except TypeError as error:
        raise DataError(f"{where}: {error}".replace("__init__() ", ""), _HINT) from error


def _suits(value: Any, annotation: str) -> bool:
    if annotation == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    if annotation == "str":
        return isinstance(value, str)
    return isinstance(value, dict) and all(isinstance(item, str) for pair in value.items() for item in pair)
