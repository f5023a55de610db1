"""Which layer and which experts the threads of a pass waited for. Pure: pages of files in, layers out."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmcache.fs.layout.tensors import Experts, ModelLayout
from llmcache.tokens.passes import Wait
from llmcache.units import PAGE_BYTES

_NUMBER = re.compile(r"([0-9]+)$")
Key = tuple[int, int]


class _File:
    def __init__(self, layout: ModelLayout) -> None:
        self.starts = [tensor.offset for tensor in layout.tensors]
        self.layers = [tensor.layer for tensor in layout.tensors]
        self.experts = Experts(layout)

    def layer_at(self, page: int) -> str:
        """The layer with most of a page; pages at a boundary count for the tensor in their middle."""
        at = bisect_right(self.starts, page * PAGE_BYTES + PAGE_BYTES // 2) - 1
        return self.layers[at] if at >= 0 else "header"

    def expert_at(self, page: int) -> int | None:
        byte = page * PAGE_BYTES + PAGE_BYTES // 2
        at = bisect_right(self.experts.starts, byte) - 1
        if at < 0 or byte >= self.experts.starts[at] + self.experts.sizes[at]:
            return None
        return int(self.experts.expert_of[at])


@dataclass(frozen=True)
class Causes:
    """`experts_missed`: those that a thread waited for; None for a dense model. `slowest`: layer and part of the time."""

    experts_missed: int | None
    slowest: tuple[str, int] | None


class Attribution:
    """The layers and experts of one model, by the pages of its files."""

    def __init__(self, layouts: Mapping[Key, ModelLayout]) -> None:
        self._files = {key: _File(layout) for key, layout in layouts.items()}
        self._by_inode = {inode: file for (_, inode), file in self._files.items()}  # overlayfs shows another device
        self.experts_used = sum(file.experts.token_uses for file in self._files.values()) or None
        self._is_moe = any(file.experts.count for file in self._files.values())

    def causes(self, waits: Sequence[Wait], storage_ns: int) -> Causes:
        """Return what the waits of a pass were for. The waits of parallel threads overlap: layers share `storage_ns`."""
        layers: dict[str, int] = {}
        missed: set[tuple[int, int]] = set()
        for wait in waits:
            file = self._files.get((wait.dev, wait.inode)) or self._by_inode.get(wait.inode)
            if file is None:
                continue
            layer = file.layer_at(wait.page)
            layers[layer] = layers.get(layer, 0) + wait.wait_ns
            expert = file.expert_at(wait.page) if self._is_moe else None
            if expert is not None:
                missed.add((wait.inode, expert))
        slowest = max(layers.items(), key=lambda one: one[1], default=None)
        total = sum(wait.wait_ns for wait in waits)
        if slowest is not None and total:
            slowest = short_layer(slowest[0]), slowest[1] * storage_ns // total
        return Causes(len(missed) if self._is_moe else None, slowest)


def short_layer(name: str) -> str:
    """Return the number of a layer ("31" of "blk.31"), or the name of what is in none, without ".weight"."""
    number = _NUMBER.search(name)
    return number[1] if number else name.removesuffix(".weight")
