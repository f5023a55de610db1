"""Which bytes of a model file belong to which expert of a mixture: a token uses a few experts of each layer, each whole.

A *slice* is one expert's part of one tensor: GGUF stacks the experts of a layer in one tensor (`*_exps`, last dimension),
safetensors too (fused), or has a tensor for each. The slices of one expert (gate, up and down) are used together.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from llmcache.fs.layout.tensors import ModelLayout, Tensor, is_expert

MOST_SLICES = 1 << 16  # of one file: DeepSeek V3 has 44 544
_NUMBERED = re.compile(r"\.experts\.([0-9]{1,5})\.")


@dataclass(frozen=True)
class SliceRun:
    """Slices of one size that lie side by side: `count` of them from `first_byte` on, the first is number `first`."""

    first_byte: int
    slice_bytes: int
    count: int
    first: int


class Experts:
    """The experts of a file, numbered layer by layer, and their slices, numbered as they lie.

    `layers`: (name, first expert, how many), in the order of computation. `used`: of a layer's, by a token; None where the
    header does not say it.
    """

    def __init__(self, layout: ModelLayout) -> None:
        slices = sorted(_slices(layout), key=lambda slice_: slice_[0])
        counts: dict[str, int] = {}
        for _, _, layer, expert in slices:
            counts[layer] = max(counts.get(layer, 0), expert + 1)
        names = sorted(counts, key=_layer_key)
        self.layers: list[tuple[str, int, int]] = []
        self.used = layout.experts_used
        self.count = 0
        for name in names:
            self.layers.append((name, self.count, counts[name]))
            self.count += counts[name]
        first = {name: begin for name, begin, _ in self.layers}
        self.starts = array("Q", (start for start, _, _, _ in slices))
        self.sizes = array("L", (size for _, size, _, _ in slices))
        self.expert_of = array("L", (first[layer] + expert for _, _, layer, expert in slices))
        self.runs = tuple(self._runs())
        self._slices: list[tuple[int, ...]] = [()] * self.count
        for number, expert in enumerate(self.expert_of):
            self._slices[expert] += (number,)

    def _runs(self) -> Iterator[SliceRun]:
        begin = 0
        for number in range(1, len(self.starts) + 1):
            if number < len(self.starts):
                size, behind = self.sizes[number - 1], self.starts[number - 1] + self.sizes[number - 1]
                if self.starts[number] == behind and self.sizes[number] == size:
                    continue
            if number > begin:
                yield SliceRun(self.starts[begin], self.sizes[begin], number - begin, begin)
            begin = number

    def ranges(self, expert: int) -> list[tuple[int, int]]:
        """(offset, bytes) of the slices of an expert, as they lie."""
        return [(self.starts[number], self.sizes[number]) for number in self._slices[expert]]

    def layer_of(self, expert: int) -> tuple[str, int, int]:
        """The layer that an expert is in."""
        return self.layers[bisect_right(self.layers, expert, key=lambda layer: layer[1]) - 1]

    def bytes_of(self, expert: int) -> int:
        """Bytes of all slices of an expert."""
        return sum(self.sizes[number] for number in self._slices[expert])


def _slices(layout: ModelLayout) -> Iterator[tuple[int, int, str, int]]:
    """(first byte, bytes, layer, expert of that) of all slices; of none where there would be more than any model has."""
    found = 0
    for tensor in layout.tensors:
        if not is_expert(tensor.name) or not tensor.size_bytes:
            continue
        found += tensor.experts
        if found > MOST_SLICES:
            return
        yield from _of(tensor)


def _of(tensor: Tensor) -> Iterator[tuple[int, int, str, int]]:
    numbered = _NUMBERED.search(tensor.name)
    if numbered is not None:
        yield tensor.offset, tensor.size_bytes, tensor.layer, int(numbered[1])
        return
    if tensor.experts > 1:
        size = tensor.size_bytes // tensor.experts
        for expert in range(tensor.experts):
            yield tensor.offset + expert * size, size, tensor.layer, expert


def _layer_key(name: str) -> tuple[int, str]:
    digits = re.findall(r"[0-9]+", name)
    return (int(digits[-1]) if digits else -1, name)
