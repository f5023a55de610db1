"""Which bytes of a model file belong to which layer, small enough to be kept for every file that is open.

A layer here is what `Tensor.layer` says; the header is the first one. A file of more than LAYERS_MAX of them (names of no
known convention) has its later ones, in the order of computation, under one name; so has one of more than RUNS_MAX runs of
tensors of one layer those behind.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from llmcache.fs.layout.order import compute_key
from llmcache.fs.layout.tensors import ModelLayout

LAYERS_MAX = 512
RUNS_MAX = 1 << 13
NAME_MAX = 80  # characters of a layer's name
HEADER = "header"
OTHERS = "others"


@dataclass(frozen=True)
class Part:
    """One layer: its tensors' number, and their bytes as stretches (first, end) of the file."""

    name: str
    tensors: int
    stretches: tuple[tuple[int, int], ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all stretches."""
        return sum(end - first for first, end in self.stretches)


class Anatomy:
    """The layers of one file, in the order in which a decoder computes them."""

    def __init__(self, layout: ModelLayout) -> None:
        in_order = sorted(layout.tensors, key=lambda tensor: (compute_key(tensor.name), tensor.offset))
        layers = list(dict.fromkeys(tensor.layer for tensor in in_order))
        self._names = [HEADER, *(layer[:NAME_MAX] for layer in layers[: LAYERS_MAX - 1]), OTHERS]
        others = len(self._names) - 1
        numbers = {layer: min(1 + place, others) for place, layer in enumerate(layers)}
        self._tensors = array("L", [0] * len(self._names))
        # Runs of tensors of one layer: its number, first byte, end; three numbers a run.
        self._runs = array("L", (0, 0, layout.header_bytes))
        for tensor in layout.tensors:
            number = numbers[tensor.layer] if len(self._runs) < 3 * RUNS_MAX else others
            self._tensors[number] += 1
            if self._runs[-3] == number:
                self._runs[-1] = max(self._runs[-1], tensor.end)
            else:
                self._runs.extend((number, tensor.offset, tensor.end))

    def parts(self) -> Iterator[Part]:
        """Yields the layers; padding within a stretch belongs to it."""
        stretches: list[list[tuple[int, int]]] = [[] for _ in self._names]
        for at in range(0, len(self._runs), 3):
            number, first, end = self._runs[at : at + 3]
            if end > first:
                stretches[number].append((first, end))
        for name, tensors, found in zip(self._names, self._tensors, stretches, strict=True):
            if found:
                yield Part(name, tensors, tuple(found))
