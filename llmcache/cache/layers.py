"""Reads by layer of a model: bytes read, share from storage, and the order in which a pass visits the layers."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from llmcache.arrays import Bytes, Int64s, Uint64s
from llmcache.cache.loops import PassRecorder
from llmcache.model.modelfile import Models
from llmcache.model.tensors import Tensor
from llmcache.trace.record import WRITE, Trace, TraceFile
from llmcache.units import BLOCK_BYTES

_NUMBER = re.compile(r".*\.([0-9]+)")
_MOST_PASSES = 1000


def json_of(row: object, *left_out: str, **names: str) -> dict[str, Any]:
    """Return the fields of a dataclass without `left_out`, renamed as `names` (field name to JSON key)."""
    return {names.get(name, name): value for name, value in vars(row).items() if name not in left_out}


@dataclass(frozen=True)
class Layer:
    """Reads (mapped ones included) of one layer, or of a tensor outside of the layers; in blocks, repeats included.

    `known`: accesses for which the trace records hit or miss. `place`: position in a pass, from 0; None for layers that most
    passes leave out. A block that two layers share counts for the layer that contains its middle.
    """

    file: int
    path: str
    name: str
    tensors: int
    size_bytes: int
    accesses: int
    known: int
    missed: int
    place: int | None

    @property
    def miss_ratio(self) -> float | None:
        return self.missed / self.known if self.known else None

    def row(self) -> dict[str, Any]:
        missed = self.missed if self.known else None
        return json_of(self, "missed", name="layer", size_bytes="bytes", known="accesses_known") | {
            "missed_blocks": missed,
            "missed_bytes": None if missed is None else missed * BLOCK_BYTES,
            "miss_ratio": self.miss_ratio,
        }


class Turns:
    """Tells a new visit of a layer from threads that interleave accesses to two layers."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._recent: OrderedDict[int, None] = OrderedDict()

    def is_new_visit(self, number: int) -> bool:
        """Return whether half of the layers were accessed since the last access to layer `number`, or there was none."""
        self._seen.add(number)
        is_new = number not in self._recent
        self._recent[number] = None
        self._recent.move_to_end(number)
        while len(self._recent) > len(self._seen) // 2:
            self._recent.popitem(last=False)
        return is_new


def nearest_blocks(offsets: Int64s) -> Int64s:
    """Return, for each of `offsets` (bytes), the first block whose middle is at or after it."""
    return -(-(offsets - BLOCK_BYTES // 2) // BLOCK_BYTES)


def cut(edges: Int64s, first: Int64s, end: Int64s) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Return (run, stretch, first block, end block) of the parts into which `edges` cut the runs first[i] .. end[i] - 1.

    `edges`: the first blocks of stretches, ascending from 0; the last stretch has no end.
    """
    lowest = np.searchsorted(edges, first, "right") - 1
    parts = np.searchsorted(edges, end - 1, "right") - lowest
    run = np.repeat(np.arange(len(first)), parts)
    stretch = lowest[run] + np.arange(len(run)) - np.repeat(np.cumsum(parts) - parts, parts)
    ends = np.append(edges[1:], np.iinfo(np.int64).max)
    return run, stretch, np.maximum(first[run], edges[stretch]), np.minimum(end[run], ends[stretch])


class Layers:
    """Counts reads by layer over the batches of a trace, in order."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._tallies: dict[int, _LayerCounts | None] = {}

    def count(self, batch: Trace) -> None:
        is_read = batch.op != WRITE
        files = {file.id: file for file in batch.files}
        for number in np.unique(batch.file[is_read]).tolist():
            if number not in self._tallies:
                named = self._models(files[number])
                self._tallies[number] = _LayerCounts(files[number], named) if named else None
            tally = self._tallies[number]
            if tally is not None:
                of_file = is_read & (batch.file == number)
                first, end = batch.first[of_file].astype(np.int64), batch.end[of_file].astype(np.int64)
                tally.count(first, end, batch.miss[of_file], batch.t_ns[of_file])

    def found(self) -> tuple[Layer, ...]:
        """Return the layers, most accessed file first, in the order of a pass, or else of the file."""
        tallies = [tally for tally in self._tallies.values() if tally is not None]
        tallies.sort(key=lambda tally: (-tally.accesses, tally.file.path))
        return tuple(layer for tally in tallies for layer in tally.layers())


class _LayerCounts:
    """Counts of one file, by stretch: a run of tensors of one layer. `edges`: the first blocks of stretches."""

    def __init__(self, file: TraceFile, named: Sequence[Tensor]) -> None:
        self.file = file
        self._tensors = [(name, list(parts)) for name, parts in groupby(named, lambda each: each.layer)]
        numbers: dict[str, int] = {}
        layer_of = [numbers.setdefault(name, len(numbers)) for name, _ in self._tensors]
        self._layer_of = np.array(layer_of, np.int64)
        self._names = tuple(numbers)
        self._edges = nearest_blocks(np.array([parts[0].offset for _, parts in self._tensors], np.int64))
        self._edges[0] = 0
        # By layer: hits, misses, unknown.
        self._counts = np.zeros((len(numbers), 3), np.int64)
        self._recorder = PassRecorder()
        self._turns = Turns()
        self._loaded = False
        self._passes: deque[Sequence[int]] = deque(maxlen=_MOST_PASSES)

    @property
    def accesses(self) -> int:
        return int(self._counts.sum())

    def count(self, first: Int64s, end: Int64s, miss: Bytes, t_ns: Uint64s) -> None:
        run, stretch, low, high = cut(self._edges, first, end)
        layer = self._layer_of[stretch]
        np.add.at(self._counts, (layer, miss[run]), high - low)
        turns = np.flatnonzero(np.diff(layer, prepend=-1))
        for number, now in zip(layer[turns].tolist(), t_ns[run[turns]].tolist(), strict=True):
            if self._turns.is_new_visit(number):
                done = self._recorder.record_access(number, now)
                if done is not None and self._loaded:
                    self._passes.append(done.extents)
                self._loaded = self._loaded or done is not None  # the order of loading may differ from the order of use

    def layers(self) -> list[Layer]:
        places = {number: place for place, number in enumerate(self._order())}
        found = [self._layer(number, name, places.get(number)) for number, name in enumerate(self._names)]
        return sorted(found, key=lambda layer: len(found) if layer.place is None else layer.place)

    def _order(self) -> list[int]:
        """Return the fullest pass, starting at the lowest numbered layer. Threads that run ahead, or cached data, cut
        passes short.
        """
        fullest = max(reversed(self._passes), key=len, default=())
        whole = [each for each in self._passes if 2 * len(each) >= len(fullest)]
        visits = Counter(number for each in whole for number in each)
        order = [number for number in fullest if 2 * visits[number] >= len(whole)]
        _, start = min((layer_number(self._names[number]), at) for at, number in enumerate(order)) if order else (0, 0)
        return order[start:] + order[:start]

    def _layer(self, number: int, name: str, place: int | None) -> Layer:
        tensors = [tensor for stem, parts in self._tensors if stem == name for tensor in parts]
        hits, misses, unknown = self._counts[number].tolist()
        return Layer(
            file=self.file.id,
            path=self.file.path,
            name=name,
            tensors=len(tensors),
            size_bytes=sum(tensor.size_bytes for tensor in tensors),
            accesses=hits + misses + unknown,
            known=hits + misses,
            missed=misses,
            place=place,
        )


def layer_number(name: str) -> float:
    """Return the number at the end of a layer's name, or infinity."""
    match = _NUMBER.fullmatch(name)
    return int(match[1]) if match else float("inf")
