"""Which layer and which experts the threads of a pass waited for."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from llmcache.model.tensors import Experts, ModelLayout
from llmcache.tokens.clock import Key
from llmcache.tokens.passes import Where
from llmcache.units import PAGE_BYTES

_NUMBER = re.compile(r"([0-9]+)$")


class _File:
    def __init__(self, layout: ModelLayout) -> None:
        self.starts = [tensor.offset for tensor in layout.tensors]
        self.layers = [tensor.layer for tensor in layout.tensors]
        self.experts = Experts(layout)

    def where(self, page: int) -> Where:
        """Return the owner of the middle of a page, which at a boundary has most of it."""
        byte = page * PAGE_BYTES + PAGE_BYTES // 2
        at = bisect_right(self.starts, byte) - 1
        layer = self.layers[at] if at >= 0 else "header"
        at = bisect_right(self.experts.starts, byte) - 1
        if at < 0 or byte >= self.experts.starts[at] + self.experts.sizes[at]:
            return Where(layer)
        return Where(layer, int(self.experts.expert_of[at]))


@dataclass(frozen=True)
class Causes:
    """`slowest` has a layer and its part of the time; `experts_missed` is None for a dense model."""

    experts_missed: int | None
    slowest: tuple[str, int] | None


class Attribution:
    """The layers and experts of one model, by the pages of its files."""

    def __init__(self, layouts: Mapping[Key, ModelLayout]) -> None:
        self._files = {key: _File(layout) for key, layout in layouts.items()}
        self._by_inode = {inode: file for (_, inode), file in self._files.items()}  # overlayfs shows another device
        self.experts_used = sum(file.experts.token_uses for file in self._files.values()) or None
        self._is_moe = any(file.experts.count for file in self._files.values())

    def where(self, dev: int, inode: int, page: int) -> Where | None:
        file = self._files.get((dev, inode)) or self._by_inode.get(inode)
        return None if file is None else file.where(page)

    def causes(self, waits: Mapping[Where, int], storage_ns: int) -> Causes:
        """Return the causes of the waits of a pass. The waits of parallel threads overlap: layers share `storage_ns`."""
        layers: dict[str, int] = {}
        for where, wait_ns in waits.items():
            layers[where.layer] = layers.get(where.layer, 0) + wait_ns
        missed = sum(where.expert is not None for where in waits)
        slowest = max(layers.items(), key=lambda one: one[1], default=None)
        if slowest is not None:
            slowest = short_layer(slowest[0]), slowest[1] * storage_ns // max(1, sum(layers.values()))
        return Causes(missed if self._is_moe else None, slowest)


def short_layer(name: str) -> str:
    """Return the number of a layer ("31" of "blk.31"), or the name of another tensor without ".weight"."""
    number = _NUMBER.search(name)
    return number[1] if number else name.removesuffix(".weight")
