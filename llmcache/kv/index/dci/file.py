"""Index files next to spill files: the arrays of all trees, with the identity of the spill file.

0   magic, version, length of the header, its CRC
20  header, JSON: the identity; for each index its place, settings, scale and arrays with types, shapes, offsets and
    CRCs
    the arrays as in memory, each aligned to 64 bytes
"""

from __future__ import annotations

import json
import math
import reprlib
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.arrays import Bytes, Int64s
from llmcache.errors import DataError
from llmcache.files import replacing
from llmcache.kv.index.dci.index import DciIndex, DciSettings, Scale
from llmcache.kv.index.dci.tree import (
    BASE,
    COUNT,
    DIM,
    FOLLOW,
    HEAD,
    HOME,
    KEYS,
    LEVEL,
    LEVELS,
    LIVE_PAGES,
    NODES,
    NONE,
    OWNER,
    PAGES,
    ROOT,
    SIZE,
    SLOTS,
    Ints,
    Tree,
    empty_tree,
    sizes_of,
    trimmed,
)
from llmcache.kv.spill.raw import explained

MAGIC = b"LLMDCI\r\n"
VERSION = 1
_START = struct.Struct("<8sIII")
_ALIGN = 64
_HINT = "delete it: the index is rebuilt from the keys"

Place = tuple[int, ...]  # the layer, sequence and head of an index


def path_of(spill: Path) -> Path:
    """Return the path of the indexes, which ends with the spill file's name, as `--spill` patterns expect."""
    return spill.with_name(f"dci-{spill.name}")


def save_indexes(path: Path, indexes: Mapping[Any, DciIndex], identity: Mapping[str, Any]) -> None:
    """Write `indexes`, by their places, atomically; a restore needs the same `identity`. MissingRequirement."""
    entries, arrays, at = [], [], 0
    for place, index in indexes.items():
        tree, described = trimmed(index.tree), {}
        for name, array in zip(Tree._fields, tree, strict=True):
            data = np.ascontiguousarray(array)
            described[name] = [data.dtype.str, list(data.shape), at, zlib.crc32(data.tobytes())]
            arrays.append(data)
            at += -(-data.nbytes // _ALIGN) * _ALIGN
        scale = [index.scale.unit.hex(), index.scale.bound.hex()]
        entries.append({"place": list(place), "settings": asdict(index.settings), "scale": scale, "arrays": described})
    header = json.dumps({"identity": dict(identity), "indexes": entries, "bytes": at}).encode()
    parts: list[Any] = [_START.pack(MAGIC, VERSION, len(header), zlib.crc32(header)) + header, *arrays]
    with explained(path, "writing an index"), replacing(path) as stream:
        for part in parts:
            stream.write(part)
            stream.write(bytes(-stream.tell() % _ALIGN))


def load_indexes(path: Path, identity: Mapping[str, Any]) -> dict[Place, DciIndex]:
    """Return the indexes in a file of `save_indexes`. DataError: damaged, of another version, or of another spill file.

    MissingRequirement: the file does not exist, or cannot be read.
    """
    with explained(path, "reading an index"):
        data = np.fromfile(path, np.uint8)
    header, first = _header(path, data)
    try:
        for field, value in identity.items():
            if (has := header["identity"].get(field)) != value:
                raise DataError(f"{path}: {field}: the index has {reprlib.repr(has)}, but the spill file {value!r}", _HINT)
        if len(data) < first + header["bytes"]:
            raise DataError(f"{path}: the file has {len(data)} bytes, but the index {first + header['bytes']}", _HINT)
        return {tuple(entry["place"]): _index(path, entry, data[first:]) for entry in header["indexes"]}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise DataError(f"{path}: header: {reprlib.repr(error)}", _HINT) from None


def _header(path: Path, data: Bytes) -> tuple[dict[str, Any], int]:
    if len(data) < _START.size or bytes(data[:8]) != MAGIC:
        raise DataError(f"{path}: magic: not an index", _HINT)
    _, version, size, crc = _START.unpack(bytes(data[: _START.size]))
    if version != VERSION:
        raise DataError(f"{path}: version: must be {VERSION}, not {version}", _HINT)
    header = bytes(data[_START.size : _START.size + size])
    if zlib.crc32(header) != crc or len(header) != size:
        raise DataError(f"{path}: header: damaged", _HINT)
    try:
        found = json.loads(header)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise DataError(f"{path}: header: not a JSON object", _HINT)
    return found, -(-(_START.size + size) // _ALIGN) * _ALIGN


def _index(path: Path, entry: dict[str, Any], data: Bytes) -> DciIndex:
    where, settings = f"in the index of {reprlib.repr(entry['place'])}", DciSettings(**entry["settings"])
    found: dict[str, NDArray[Any]] = {}
    for name, (dtype, shape, at, crc) in entry["arrays"].items():
        size = math.prod(shape) * np.dtype(dtype).itemsize
        part = data[at : at + size]
        if at < 0 or len(part) != size or zlib.crc32(part.tobytes()) != crc:
            raise DataError(f"{path}: {reprlib.repr(name)}: damaged {where}", _HINT)
        found[name] = part.view(dtype).reshape(shape).copy()
    tree = Tree(**found)
    # Compiled loops do not check the bounds of these arrays.
    fault = misfit_of(tree, settings) or fault_of(tree)
    if fault:
        raise DataError(f"{path}: tree: {fault} {where}", _HINT)
    index = DciIndex(int(tree.state[DIM]), settings, int(tree.state[BASE]))
    index.tree = tree
    index.scale = Scale(*map(float.fromhex, entry["scale"]))
    return index


def misfit_of(tree: Tree, settings: DciSettings) -> str | None:
    """Return a message about an array whose type or size contradicts the tree's state, or None."""
    one = empty_tree(1, 1, 0, np.zeros((1, 2), np.float32))
    for name in Tree._fields:
        array, wanted = getattr(tree, name), getattr(one, name)
        if array.dtype != wanted.dtype or array.ndim != wanted.ndim:
            return f"{name}: must have {wanted.ndim} dimensions of {wanted.dtype}, not {array.ndim} of {array.dtype}"
    if tree.state.shape != one.state.shape or tree.population.shape != one.population.shape:
        return "state, population: wrong size"
    dim, slots, pages = int(tree.state[DIM]), int(tree.state[SLOTS]), len(tree.pages)
    if slots != settings.page_slots or not 0 < dim < 1 << 16 or pages != tree.state[PAGES]:
        return f"state: impossible sizes of {pages} pages of {slots} slots, keys of {dim} numbers"
    if tree.directions.shape != (settings.directions, dim + 1):
        return "directions: wrong size"
    sizes = sizes_of(tree, pages, int(tree.state[NODES]), len(tree.where))
    shapes = ((name, (size, *getattr(one, name).shape[1:])) for name, size in sizes.items())
    return next((f"{name}: wrong size" for name, shape in shapes if getattr(tree, name).shape != shape), None)


def fault_of(tree: Tree) -> str | None:
    """Return a message about an inconsistency of points, pages, nodes, levels or places of tokens, or None."""
    return next((fault for check in (_records, _chains, _tokens, _levels) for fault in check(tree)), None)


def _records(tree: Tree) -> Iterator[str]:
    """Yield faults of single pages and nodes. The other checks require that there are none."""
    slots, used_pages, used_nodes = (int(tree.state[at]) for at in (SLOTS, PAGES, NODES))
    if not (1 <= used_nodes <= len(tree.nodes) and 0 <= used_pages <= len(tree.pages) and slots >= 1):
        yield "more pages or nodes are in use than exist"
    pages, nodes = tree.pages[:used_pages], tree.nodes[:used_nodes]
    if not ((nodes[:, LEVEL] >= 0) & (nodes[:, LEVEL] < len(tree.population))).all():
        yield "a node has an impossible level"
    live = nodes[:, LEVEL] > 0
    if not ((pages[:, COUNT] >= 0) & (pages[:, COUNT] <= slots)).all():
        yield "a page has more tokens than slots"
    if not ((pages[:, FOLLOW] >= NONE) & (pages[:, FOLLOW] < used_pages)).all():
        yield "the page after a page does not exist"
    homes = pages[pages[:, COUNT] > 0, HOME]
    if not ((homes >= 0) & (homes < used_nodes)).all() or not live[homes].all():
        yield "the node of a page does not exist"
    if (nodes[:, HEAD] < NONE).any() or (nodes[live, HEAD] >= used_pages).any():
        yield "the first page of a node does not exist"


def _chains(tree: Tree) -> Iterator[str]:
    pages, nodes = tree.pages[: tree.state[PAGES]], tree.nodes[: tree.state[NODES]]
    used, live = np.flatnonzero(pages[:, COUNT] > 0), np.flatnonzero(nodes[:, LEVEL] > 0)
    seen, points = np.zeros(len(pages), np.int64), np.zeros(len(nodes), np.int64)
    owners = live[nodes[live, HEAD] != NONE]
    at = nodes[owners, HEAD]
    for _ in range(len(pages) + 1):  # follow all chains together
        if not len(at):
            break
        if (pages[at, HOME] != owners).any():
            yield "a chain of pages leads into another node"
        np.add.at(seen, at, 1)
        np.add.at(points, owners, pages[at, COUNT])
        continues = pages[at, FOLLOW] != NONE
        owners, at = owners[continues], pages[at, FOLLOW][continues]
    if len(at) or (seen[used] != 1).any() or seen.sum() != len(used) or len(used) != tree.state[LIVE_PAGES]:
        yield "a page is on no chain, or on two"
    if (points[live] != nodes[live, SIZE]).any():
        yield "a node has a wrong number of points"


def _filled(tree: Tree) -> tuple[Int64s, Ints]:
    slots = int(tree.state[SLOTS])
    filled = np.flatnonzero(np.arange(slots) < tree.pages[: tree.state[PAGES], COUNT, None])
    return filled, tree.nodes[tree.pages[filled // slots, HOME], LEVEL]


def _tokens(tree: Tree) -> Iterator[str]:
    filled, levels = _filled(tree)
    tokens = tree.tokens[filled]
    places = tokens.astype(np.int64) - int(tree.state[BASE])
    if (places < 0).any() or (places >= len(tree.where)).any() or (tree.where[places] != filled).any():
        yield "the recorded place of a token is wrong"
    if not len(filled) == (tree.where >= 0).sum() == tree.state[KEYS]:
        yield "a token has no place"
    if not np.isfinite(tree.lifts[filled]).all():
        yield "a lift is not finite"
    above, children = levels > 1, tree.children[filled]
    if (children[levels == 1] != NONE).any():
        yield "a point of the lowest level has points below it"
    own = children[above]
    if not ((own > ROOT) & (own < tree.state[NODES])).all() or len(np.unique(own)) < len(own):
        yield "a point has no node below it, or that of another point"
    if (tree.nodes[own, OWNER] != tokens[above]).any() or (tree.nodes[own, LEVEL] != levels[above] - 1).any():
        yield "a node is below a point that does not own it"
    if (tree.nodes[: tree.state[NODES], LEVEL] > 0).sum() != 1 + len(own):
        yield "a node is not connected"


def _levels(tree: Tree) -> Iterator[str]:
    top, (filled, levels) = int(tree.state[LEVELS]), _filled(tree)
    found = np.bincount(levels, minlength=len(tree.population))
    if len(found) > len(tree.population) or (found != tree.population).any():
        yield "a level has a wrong number of points"
    if tree.nodes[ROOT, LEVEL] != top or (len(filled) and not found[1 : top + 1].all()) or found[top + 1 :].any():
        yield "a level is empty"
