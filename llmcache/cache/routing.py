"""Use of the experts of MoE models in a trace: popularity, reuse, and the hit ratios of a cache of whole experts.

A *visit* is a layer's turn in a pass: all accesses to its experts until half of the layers have been accessed since. A *use*
is one expert in one visit, with any number of accesses to its tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcache.arrays import Int64s
from llmcache.cache.layers import Turns, cut, json_of, layer_number, nearest_blocks
from llmcache.cache.plan import why_not_exact
from llmcache.model.modelfile import Models
from llmcache.model.tensors import Experts
from llmcache.trace.record import MAP, WRITE, Provenance, Trace, TraceFile

CACHE_PERCENTS = (5, 10, 12, 20, 30, 50, 80)  # of the bytes of all experts
MAPPED_AROUND = 16  # blocks that the kernel maps around a fault (64 KiB): they may extend into the neighboring slices
_DENSE, _UNSURE = -1, -2
_NUMBER_BITS = 17  # of an expert's code, below the number of its layer; expert numbers have at most five digits
_CODE_BITS = 34


@dataclass(frozen=True)
class Slice:
    """The slice of one expert in one tensor."""

    layer: str
    number: int
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class ExpertLayer:
    """The use of the experts of one layer. `popularity`: uses of each expert, by its number.

    `again`: share (0..1) of the experts of a visit that were also used in the next one; None with a single visit.
    """

    name: str
    experts: int
    visits: int
    popularity: tuple[int, ...]
    again: float | None

    @property
    def uses(self) -> int:
        return sum(self.popularity)

    @property
    def used(self) -> int:
        return sum(uses > 0 for uses in self.popularity)

    def top(self, parts: int) -> float | None:
        """Return the share (0..1) of the uses that belong to the most used 1 / `parts` of the experts."""
        most = sorted(self.popularity, reverse=True)[: -(-self.experts // parts)]
        return sum(most) / self.uses if self.uses else None

    def row(self) -> dict[str, Any]:
        sums = {"used": self.used, "uses": self.uses, "top_tenth": self.top(10), "top_quarter": self.top(4)}
        return json_of(self, name="layer") | sums


@dataclass(frozen=True)
class ExpertCache:
    """Hit ratios (0..1) of a cache of `experts` whole experts that starts empty, with LRU and with Belady's policy.

    `share`: capacity as a share of the bytes of all experts. `experts` assumes that experts have the mean size.
    """

    share: float
    experts: int
    size_bytes: int
    lru: float
    belady: float


@dataclass(frozen=True)
class MoeUses:
    """Use of the experts of one model in a trace; `size_bytes` and `experts` cover all its files in the trace.

    `incomplete`: reasons why the trace may lack uses, so that `belady` is no upper bound; None if it is complete.
    """

    model: str
    files: tuple[int, ...]
    experts: int
    size_bytes: int
    equal: bool
    layers: tuple[ExpertLayer, ...]
    caches: tuple[ExpertCache, ...]
    incomplete: str | None

    @property
    def uses(self) -> int:
        return sum(layer.uses for layer in self.layers)

    def document(self) -> dict[str, Any]:
        renamed = {"size_bytes": "bytes", "lru": "lru_hit_ratio", "belady": "belady_hit_ratio"}
        return json_of(self, size_bytes="bytes", equal="equal_sizes") | {
            "used": sum(layer.used for layer in self.layers),
            "uses": self.uses,
            "layers": [layer.row() for layer in self.layers],
            "caches": [json_of(cache, **renamed) for cache in self.caches],
        }


class ExpertCounter:
    """Collects the uses of experts from the batches of a trace; 8 bytes for each use."""

    def __init__(self, models: Models) -> None:
        self._known = models
        self._models: dict[str, _ModelUses] = {}
        self._files: dict[int, _ModelUses | None] = {}

    def count(self, batch: Trace) -> None:
        files = {file.id: file for file in batch.files}
        touched: dict[str, _ModelUses] = {}
        for number in np.unique(batch.file[batch.op != WRITE]).tolist():
            model = self._model_of(files[number])
            if model is not None:
                touched[model.path] = model
        for model in touched.values():
            model.count(batch)

    def _model_of(self, file: TraceFile) -> _ModelUses | None:
        if file.id not in self._files:
            found = self._known.experts(file)
            self._files[file.id] = None if found is None else self._models.setdefault(found[0], _ModelUses(found[0]))
            if found is not None:
                self._models[found[0]].add(file.id, found[1])
        return self._files[file.id]

    def slices(self, file: int) -> list[Slice] | None:
        model = self._files.get(file)
        return None if model is None else list(model.slices(file))

    def found(self, provenance: Provenance) -> tuple[MoeUses, ...]:
        found = [uses for model in self._models.values() if (uses := model.uses(provenance)) is not None]
        return tuple(sorted(found, key=lambda moe: (-moe.uses, moe.model)))


@dataclass(frozen=True)
class _Map:
    """For each block of a file, the expert whose use an access proves: `codes[i]` from block `edges[i]` on."""

    slices: Experts
    edges: Int64s
    codes: Int64s


class _ModelUses:
    def __init__(self, path: str) -> None:
        self.path = path
        self._files: dict[int, _Map] = {}
        self._numbers: dict[str, int] = {}  # layer name -> number
        self._bytes: dict[int, int] = {}  # expert code -> bytes
        self._turns = Turns()
        self._visit: dict[int, int] = {}  # layer number -> its latest visit
        self._visits = 0
        self._uses: list[Int64s] = []  # visit and code in one number
        self._mapped = False

    def add(self, file: int, slices: Experts) -> None:
        experts = []
        for name, _, count in slices.layers:
            layer = self._numbers.setdefault(name, len(self._numbers))
            experts.append((layer << _NUMBER_BITS) + np.arange(count, dtype=np.int64))
        expert_of = np.array(slices.expert_of, np.int64)
        code = np.concatenate(experts)[expert_of]
        for expert, size_bytes in zip(code.tolist(), slices.sizes, strict=True):
            self._bytes[expert] = self._bytes.get(expert, 0) + size_bytes
        starts, sizes = np.array(slices.starts, np.int64), np.array(slices.sizes, np.int64)
        first, end = nearest_blocks(starts), nearest_blocks(starts + sizes)
        # The ends of a slice are also accessed when only a neighboring slice is used, so only its middle proves a use.
        # A slice much smaller than others of its expert (a bias) proves nothing.
        blocks = end - first
        longest = np.zeros(int(expert_of.max()) + 1, np.int64)
        np.maximum.at(longest, expert_of, blocks)
        ends = np.minimum(MAPPED_AROUND, np.maximum(0, blocks - 1) // 2)
        unsure, dense = np.full_like(code, _UNSURE), np.full_like(code, _DENSE)
        proving = np.where(2 * blocks >= longest[expert_of], code, _UNSURE)
        edges = np.append(0, np.stack((first, first + ends, end - ends, end), 1))
        codes = np.append(_DENSE, np.stack((unsure, proving, unsure, dense), 1))
        real = np.append(edges[1:] > edges[:-1], True)
        self._files[file] = _Map(slices, edges[real], codes[real])

    def slices(self, file: int) -> Iterator[Slice]:
        held = self._files[file].slices
        experts = [(name, number) for name, _, count in held.layers for number in range(count)]
        for expert, start, size_bytes in zip(held.expert_of, held.starts, held.sizes, strict=True):
            yield Slice(*experts[expert], start, size_bytes)

    def count(self, batch: Trace) -> None:
        rows, codes = [], []
        for file, blocks in self._files.items():
            of_file = np.flatnonzero((batch.file == file) & (batch.op != WRITE))
            first, end = batch.first[of_file].astype(np.int64), batch.end[of_file].astype(np.int64)
            run, stretch, _, _ = cut(blocks.edges, first, end)
            rows.append(of_file[run])
            codes.append(blocks.codes[stretch])
        row, code = np.concatenate(rows), np.concatenate(codes)
        order = np.argsort(row, kind="stable")
        row, code = row[order], code[order]
        row, code = row[code != _UNSURE], code[code != _UNSURE]
        visit = self._visits_of(code >> _NUMBER_BITS)
        row, uses = row[code != _DENSE], ((visit << _CODE_BITS) + code)[code != _DENSE]
        self._mapped = self._mapped or bool(np.any(batch.op[row] == MAP))
        self._uses.append(_first(uses))

    def _visits_of(self, layer: Int64s) -> Int64s:
        turns = np.flatnonzero(np.diff(layer, prepend=_UNSURE))
        visits = []
        for number in layer[turns].tolist():
            if self._turns.is_new_visit(number) and number != _DENSE:
                self._visit[number] = self._visits
                self._visits += 1
            visits.append(self._visit.get(number, _DENSE))
        return np.repeat(np.array(visits, np.int64), np.diff(np.append(turns, len(layer))))

    def uses(self, provenance: Provenance) -> MoeUses | None:
        uses = _first(np.concatenate([np.zeros(0, np.int64), *self._uses]))
        if not len(uses):
            return None
        uses = uses[np.argsort(uses >> _CODE_BITS, kind="stable")]
        visits, used = uses >> _CODE_BITS, uses & ((1 << _CODE_BITS) - 1)
        codes = np.array(sorted(self._bytes), np.int64)
        sizes = [self._bytes[code] for code in codes.tolist()]
        names = sorted(self._numbers, key=lambda name: (layer_number(name), name))
        return MoeUses(
            model=self.path,
            files=tuple(self._files),
            experts=len(codes),
            size_bytes=sum(sizes),
            equal=len(set(sizes)) == 1,
            layers=tuple(_layer(name, self._numbers[name], codes, visits, used) for name in names),
            caches=tuple(_caches(np.searchsorted(codes, used), len(codes), sum(sizes))),
            incomplete=self._incomplete(provenance),
        )

    def _incomplete(self, provenance: Provenance) -> str | None:
        mapped = (
            "experts are read through mmap, and reads of pages that stay mapped are not recorded" if self._mapped else None
        )
        return "; ".join(reason for reason in (why_not_exact(provenance), mapped) if reason) or None


def _first(uses: Int64s) -> Int64s:
    _, places = np.unique(uses, return_index=True)
    return uses[np.sort(places)]


def _layer(name: str, layer: int, codes: Int64s, visits: Int64s, used: Int64s) -> ExpertLayer:
    inside = used >> _NUMBER_BITS == layer
    numbers = used[inside] & ((1 << _NUMBER_BITS) - 1)
    experts = codes[codes >> _NUMBER_BITS == layer] & ((1 << _NUMBER_BITS) - 1)
    turns, turn = np.unique(visits[inside], return_inverse=True)
    keys = (turn << _NUMBER_BITS) + numbers
    before = keys[turn < len(turns) - 1]
    return ExpertLayer(
        name=name,
        experts=len(experts),
        visits=len(turns),
        popularity=tuple(np.bincount(numbers, minlength=int(experts.max()) + 1).tolist()),
        again=float(np.mean(np.isin(before + (1 << _NUMBER_BITS), keys))) if len(before) else None,
    )


def _caches(used: Int64s, experts: int, size_bytes: int) -> Iterator[ExpertCache]:
    from llmcache.cache.curves import StackDistances
    from llmcache.cache.policies.belady import Belady

    each = np.ones(len(used), np.int64)
    distances = StackDistances(experts)
    distances.feed(used, each, each == 1)
    curve = distances.curve()
    for percent in CACHE_PERCENTS:
        room = percent * experts // 100
        yield ExpertCache(
            share=percent / 100,
            experts=room,
            size_bytes=room * size_bytes // experts,
            lru=int(curve.hits[min(room, len(curve.hits) - 1)]) / len(used),
            belady=int(Belady(room, experts).replay(used, each).sum()) / len(used) if room else 0.0,
        )
