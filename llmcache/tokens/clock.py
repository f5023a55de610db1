"""Which tensors show the passes over a model: candidates, best first.

The tensor of a clock must be read from the file's mapping in each pass. Engines copy some tensors: llama.cpp repacks weights
of some types, and copies what a GPU computes. Norms are small, in float32, and stay in the mapping; a norm is also read once
for each row of a batch, so its reads count the tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmcache.fs.layout.tensors import ModelLayout, Tensor, compute_key, is_embedding, is_expert
from llmcache.tokens.passes import Role

Key = tuple[int, int]  # device and inode
_WORD_BYTES = 8  # that a breakpoint watches
_LAYER_STAGE = 1  # of `compute_key`
_LEAST_BYTES = 64


@dataclass(frozen=True)
class Place:
    """Eight bytes of a tensor of a file."""

    file: Key
    offset: int
    name: str


@dataclass(frozen=True)
class Clock:
    """Tensors to watch at a time. `are_rows_tokens`: each read of the first one is a row of the batch."""

    places: Mapping[Role, Place]
    are_rows_tokens: bool


def candidates(layouts: Mapping[Key, ModelLayout]) -> list[Clock]:
    """Return the clocks of the model in these files to try, best first; none if it has no layers."""
    is_gguf = all(layout.kind == "gguf" for layout in layouts.values())
    dense = [
        (compute_key(tensor.name), key, tensor)
        for key, layout in layouts.items()
        for tensor in layout.tensors
        if not is_expert(tensor.name) and not is_embedding(tensor.name) and tensor.size_bytes >= _LEAST_BYTES
    ]
    dense.sort(key=lambda one: (one[0], one[1], one[2].offset))
    part = max((order[0] for order, _, _ in dense), default=1)  # the decoder, where there is an encoder as well
    layers: dict[int, list[tuple[Key, Tensor]]] = {}
    after: list[tuple[Key, Tensor]] = []
    for order, key, tensor in dense:
        if order[0] == part and order[1] == _LAYER_STAGE:
            layers.setdefault(order[2], []).append((key, tensor))
        elif order[0] == part and order[1] > _LAYER_STAGE:
            after.append((key, tensor))
    if not layers:
        return []
    numbers = sorted(layers)
    ends = [layers[numbers[-1]], layers[numbers[len(numbers) // 2]], layers[numbers[min(1, len(numbers) - 1)]]]
    has_last = len(numbers) > 1
    found: list[Clock] = []
    for first in _norms_first(layers[numbers[0]]):
        for last in ends if _is_norm(first[1]) else ends[:1]:
            places = {Role.FIRST: _place(*first)}
            if has_last:
                places[Role.LAST] = _place(*_alike(first[1], last))
            if after:
                places[Role.AFTER] = _place(*_norms_first(after)[0 if len(found) % 2 == 0 else -1])
            clock = Clock(places, is_gguf and _is_norm(first[1]))
            if clock not in found:
                found.append(clock)
    # All first tensors are tried with the best of the others before the others are.
    best = [clock for number, clock in enumerate(found) if clock.places[Role.FIRST] not in _firsts(found[:number])]
    return [*best, *(clock for clock in found if clock not in best)]


def _firsts(clocks: Sequence[Clock]) -> list[Place]:
    return [clock.places[Role.FIRST] for clock in clocks]


def _is_norm(tensor: Tensor) -> bool:
    return "norm" in tensor.name and not tensor.name.endswith(".bias")


def _norms_first(tensors: Sequence[tuple[Key, Tensor]]) -> list[tuple[Key, Tensor]]:
    return sorted(tensors, key=lambda one: not _is_norm(one[1]))


def _alike(tensor: Tensor, layer: Sequence[tuple[Key, Tensor]]) -> tuple[Key, Tensor]:
    """The tensor of a layer that has the same part in it; any if it has none."""
    suffix = tensor.name.removeprefix(tensor.layer)
    return next((one for one in layer if one[1].name.removeprefix(one[1].layer) == suffix), layer[0])


def _place(file: Key, tensor: Tensor) -> Place:
    offset = tensor.offset + tensor.size_bytes // 2
    return Place(file, offset // _WORD_BYTES * _WORD_BYTES, tensor.name)
