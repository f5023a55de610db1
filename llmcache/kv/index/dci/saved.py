"""Indexes beside a spill file: one file with the arrays of all trees, bound to what the spill file holds.

0   magic, version, length of the header, its CRC
20  header, JSON: the identity; for each index where it belongs, its settings, its scale and its arrays with their
    types, shapes, offsets and CRCs
    the arrays as they lie in memory, each from a multiple of 64 on
"""

from __future__ import annotations

import json
import math
import reprlib
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.errors import DataError
from llmcache.files import replacing
from llmcache.kv.index.dci.checking import fault_of, misfit_of
from llmcache.kv.index.dci.index import DciIndex
from llmcache.kv.index.dci.settings import DciSettings
from llmcache.kv.index.dci.transforms import Scale
from llmcache.kv.index.dci.tree import BASE, DIM, Tree, trimmed
from llmcache.kv.spill.raw import problem

MAGIC = b"LLMDCI\r\n"
VERSION = 1
_START = struct.Struct("<8sIII")
_ALIGN = 64
_HINT = "delete it: the index is built anew from the keys"

Place = tuple[int, ...]
"""Where an index belongs: layer, sequence, head."""


def path_of(spill: Path) -> Path:
    """Returns where the indexes of a spill file are; the name ends like its own (--spill globs)."""
    return spill.with_name(f"dci-{spill.name}")


def save_indexes(path: Path, indexes: Mapping[Any, DciIndex], identity: Mapping[str, Any]) -> int:
    """Writes indexes in place of those that are there, as a whole; returns the bytes. EnvironmentProblem if it cannot.

    `indexes`: by their places. `identity`: what must be the same when they are restored, as plain data.
    """
    entries, arrays, at = [], [], 0
    for place, index in indexes.items():
        tree, told = trimmed(index.tree), {}
        for name, array in zip(Tree._fields, tree, strict=True):
            data = np.ascontiguousarray(array)
            told[name] = [data.dtype.str, list(data.shape), at, zlib.crc32(data.tobytes())]
            arrays.append(data)
            at += -(-data.nbytes // _ALIGN) * _ALIGN
        scale = [index.scale.unit.hex(), index.scale.bound.hex()]
        entries.append({"place": list(place), "settings": index.settings.to_json(), "scale": scale, "arrays": told})
    header = json.dumps({"identity": dict(identity), "indexes": entries, "bytes": at}).encode()
    start = _START.pack(MAGIC, VERSION, len(header), zlib.crc32(header)) + header
    _write(path, [start, *arrays])
    return _data_at(len(header)) + at


def _write(path: Path, parts: list[Any]) -> None:
    try:
        with replacing(path) as stream:
            for part in parts:
                stream.write(part)
                stream.write(bytes(-stream.tell() % _ALIGN))
    except OSError as error:
        raise problem(path, "writing an index", error) from None


def load_indexes(path: Path, identity: Mapping[str, Any]) -> dict[Place, DciIndex]:
    """Returns what `save_indexes` has written. DataError: damaged, of another version, or of another spill file.

    EnvironmentProblem: not there, or it cannot be read.
    """
    try:
        data = np.fromfile(path, np.uint8)
    except OSError as error:
        raise problem(path, "reading an index", error) from None
    told, first = _header(path, data)
    try:
        _check_identity(path, told["identity"], identity)
        if len(data) < first + told["bytes"]:
            raise DataError(f"{path}: ends at {len(data)}, the index needs {first + told['bytes']} bytes", _HINT)
        return {tuple(entry["place"]): _index(path, entry, data[first:]) for entry in told["indexes"]}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise DataError(f"{path}: header: {reprlib.repr(error)}", _HINT) from None


def _check_identity(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for field, value in wanted.items():
        if (has := found.get(field)) != value:
            raise DataError(f"{path}: {field}: the index is of {reprlib.repr(has)}, the spill file of {value!r}", _HINT)


def _header(path: Path, data: NDArray[np.uint8]) -> tuple[dict[str, Any], int]:
    if len(data) < _START.size or bytes(data[:8]) != MAGIC:
        raise DataError(f"{path}: magic: this is not an index", _HINT)
    _, version, size, crc = _START.unpack(bytes(data[: _START.size]))
    if version != VERSION:
        raise DataError(f"{path}: version: {version}, this is {VERSION}", _HINT)
    header = bytes(data[_START.size : _START.size + size])
    if zlib.crc32(header) != crc or len(header) != size:
        raise DataError(f"{path}: header: damaged", _HINT)
    try:
        told = json.loads(header)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        raise DataError(f"{path}: header: not a JSON object", _HINT)
    return told, _data_at(size)


def _data_at(header_bytes: int) -> int:
    return -(-(_START.size + header_bytes) // _ALIGN) * _ALIGN


def _index(path: Path, entry: dict[str, Any], data: NDArray[np.uint8]) -> DciIndex:
    where, settings = f"in the index of {reprlib.repr(entry['place'])}", DciSettings(**entry["settings"])
    found: dict[str, NDArray[Any]] = {}
    for name, (dtype, shape, at, crc) in entry["arrays"].items():
        size = math.prod(shape) * np.dtype(dtype).itemsize
        part = data[at : at + size]
        if at < 0 or len(part) != size or zlib.crc32(part.tobytes()) != crc:
            raise DataError(f"{path}: {reprlib.repr(name)}: damaged {where}", _HINT)
        found[name] = part.view(dtype).reshape(shape).copy()
    tree = Tree(**found)
    # Compiled loops go through these arrays without looking at their ends.
    fault = misfit_of(tree, settings) or fault_of(tree)
    if fault:
        raise DataError(f"{path}: tree: {fault} {where}", _HINT)
    index = DciIndex(int(tree.state[DIM]), settings, int(tree.state[BASE]))
    index.tree = tree
    index.scale = Scale(*map(float.fromhex, entry["scale"]))
    return index
