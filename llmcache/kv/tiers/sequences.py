"""Cropping, reordering and copying sequences: whole pages are shared, the page that is being filled is everyone's own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from llmcache.kv.tiers.core import Core
from llmcache.kv.tiers.moving import Mover
from llmcache.kv.tiers.spilling import Spiller

Numbers = NDArray[np.int64]


class Sequences:
    """Changes the sequences of one store; `drop` tells others of pages that are no more."""

    def __init__(self, core: Core, spiller: Spiller | None, mover: Mover | None, drop: Callable[[Numbers], None]) -> None:
        self._core, self._spiller, self._mover, self._drop = core, spiller, mover, drop

    def crop(self, tokens: int) -> None:
        """Cuts every sequence to its first `tokens` tokens, in layers that are further too."""
        core = self._core
        if not 0 <= tokens <= core.tokens.length:
            raise ValueError(f"tokens: {tokens}, between 0 and {core.tokens.length} is needed")
        if (core.lengths == tokens).all():
            return
        full, rest = divmod(tokens, core.shape.page_tokens)
        before = dict(core.table.ends)
        self._bring_ends(full, bool(rest))
        core.tokens.length = tokens
        core.lengths[:] = tokens
        self._forget(core.table.cut(core.shape.pages_of(tokens)))
        if rest:
            # What was full and is not any more may be shared, and will be another page.
            self._choose(np.arange(core.table.batch))
            core.table.unsettle(full)
            self._drop(core.table.table[:, full])
        self._shrink(before)
        if self._mover is not None:
            for layer in range(core.shape.layers):
                self._mover.trim(layer, tokens)

    def _bring_ends(self, full: int, partial: bool) -> None:
        """Has in memory what will be sink, window and tail when there are `full` pages, and one that is `partial`."""
        if self._mover is None:
            return
        config = self._core.config
        sink = range(min(full, config.sink_pages))
        last = range(max(sink.stop, full - config.window_pages), full + partial)
        for layer in range(self._core.shape.layers):
            self._mover.bring(layer, self._core.table.table[:, [*sink, *last]].reshape(-1))

    def select(self, index: Numbers) -> None:
        """Makes a batch of the sequences `index`; free if it is the batch that there is."""
        core = self._core
        index = np.asarray(index, np.int64)
        if index.ndim != 1 or not len(index) or index.min() < 0 or index.max() >= core.table.batch:
            raise ValueError(f"index: {index.tolist()}, sequences 0 to {core.table.batch - 1} can be named")
        core.check_between_steps()
        if len(index) != core.table.batch or (index != np.arange(core.table.batch)).any():
            before = dict(core.table.ends)
            self._choose(index)
            core.tokens.choose(index)
            self._shrink(before)

    def _choose(self, index: Numbers) -> None:
        core = self._core
        gone, copies = core.table.choose(index, bool(core.tokens.length % core.shape.page_tokens))
        for pool in core.pools:
            with pool.lock:
                pool.know(core.table.numbers)
                for source, target in copies:
                    pool.copy(source, target)
        core.bound_pools()
        self._forget(gone)

    def _forget(self, numbers: Numbers) -> None:
        for pool in self._core.pools:
            with pool.lock:
                pool.forget(numbers)
        self._drop(numbers)

    def _shrink(self, before: dict[int, int]) -> None:
        """Takes away in the file what no sequence refers to any more."""
        if self._spiller is not None:
            self._spiller.shrink(before)
