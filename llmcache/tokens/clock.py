"""Which tensors show the passes over a model: candidates, best first.

These must be read from the file's mapping in each pass. llama.cpp repacks some weights, and copies layers to a GPU. Norms
are small, in float32, and stay in the mapping; a norm is read once for each row of a batch, so its reads count the tokens of
a prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from llmcache.model.tensors import ModelLayout, Tensor, compute_key, is_embedding, is_expert
from llmcache.tokens.passes import Role

Key = tuple[int, int]  # device and inode
_Found = tuple[Key, Tensor]
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
    """Two tensors to watch, because a processor has four breakpoints and another observer may use the others.

    `are_rows_tokens`: each read of the first one is a row of the batch. `shows_end`: only the output follows the later one.
    """

    places: Mapping[Role, Place]
    are_rows_tokens: bool
    shows_end: bool


def candidates(layouts: Mapping[Key, ModelLayout]) -> list[Clock]:
    """Return the clocks of the model in these files, best first; none if it has no layers."""
    is_gguf = all(layout.kind == "gguf" for layout in layouts.values())
    dense = [
        (compute_key(tensor.name), key, tensor)
        for key, layout in layouts.items()
        for tensor in layout.tensors
        if not is_expert(tensor.name) and not is_embedding(tensor.name) and tensor.size_bytes >= _LEAST_BYTES
    ]
    dense.sort(key=lambda one: (one[0], one[1], one[2].offset))
    part = max((order[0] for order, _, _ in dense), default=1)  # the decoder, where there is an encoder as well
    layers: dict[int, list[_Found]] = {}
    after: list[_Found] = []
    for order, key, tensor in dense:
        if order[0] == part and order[1] == _LAYER_STAGE:
            layers.setdefault(order[2], []).append((key, tensor))
        elif order[0] == part and order[1] > _LAYER_STAGE:
            after.append((key, tensor))
    found: list[list[Clock]] = []
    numbers = sorted(layers)
    for key, first in _norms_first(layers[numbers[0]]) if layers else ():
        are_rows_tokens = is_gguf and _is_norm(first)
        found.append([])
        for later, shows_end in _later(first, [layers[number] for number in numbers[1:]], after):
            places = {Role.FIRST: _place(key, first), Role.LATER: _place(*later)}
            found[-1].append(Clock(places, are_rows_tokens, shows_end))
        if not found[-1]:
            found[-1].append(Clock({Role.FIRST: _place(key, first)}, are_rows_tokens, False))
    # All first tensors are tried with the best later one before other later ones are.
    return [clocks[0] for clocks in found] + [clock for clocks in found for clock in clocks[1:]]


def _later(first: Tensor, layers: Sequence[Sequence[_Found]], after: Sequence[_Found]) -> Iterator[tuple[_Found, bool]]:
    ends = _norms_first(after) if _is_norm(first) else after[::-1]
    if ends:
        yield ends[0], True
    if layers:
        yield _alike(first, layers[-1]), True
    if len(ends) > 1:
        yield ends[-1], True
    if len(layers) > 2:
        yield _alike(first, layers[len(layers) // 2]), False
    if len(layers) > 1:
        yield _alike(first, layers[0]), False


def _is_norm(tensor: Tensor) -> bool:
    return "norm" in tensor.name and not tensor.name.endswith(".bias")


def _norms_first(tensors: Sequence[_Found]) -> list[_Found]:
    return sorted(tensors, key=lambda one: not _is_norm(one[1]))


def _alike(tensor: Tensor, layer: Sequence[_Found]) -> _Found:
    suffix = tensor.name.removeprefix(tensor.layer)
    return next((one for one in layer if one[1].name.removeprefix(one[1].layer) == suffix), layer[0])


def _place(file: Key, tensor: Tensor) -> Place:
    offset = tensor.offset + tensor.size_bytes // 2
    return Place(file, offset // _WORD_BYTES * _WORD_BYTES, tensor.name)
