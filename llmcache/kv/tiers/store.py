"""KvStore: the keys and values of a batch of equally long sequences, in tiers.

A sequence is sink pages, middle pages, window pages and a tail that fills no page yet. Sink, window and tail are always in
memory; policies choose among the middle. Every page that is full is written to the ssd tier once, in order, so that tier
is inclusive: moving down only drops the copy in memory, moving up reads it. Differs from hillinfer.txt, section 3.3, whose
pools are exclusive; there a page that moves down is written. Moves are counted all the same.

Concurrency: one thread appends, commits, crops and reorders. Another may, meanwhile, score, stage and move pages of
*other* layers, or of the same layer what was committed: each layer's pool has a lock, held only while memory is looked
at; the device has one too, and nobody who holds a pool waits for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache import files
from llmcache.errors import LlmcacheError, UsageError
from llmcache.kv.csd import Report, ScoreBlock
from llmcache.kv.csd.blocks import BLOCK_TOKENS
from llmcache.kv.spill import KvShape
from llmcache.kv.tiers import restoring, tables
from llmcache.kv.tiers.accelerating import FastGatherer
from llmcache.kv.tiers.appending import Appender, checked_rows
from llmcache.kv.tiers.config import Gathered, Selection, StoreConfig, Victims
from llmcache.kv.tiers.core import Core
from llmcache.kv.tiers.fast import FastTier
from llmcache.kv.tiers.fetching import Fetcher
from llmcache.kv.tiers.gathering import Gatherer, Staged
from llmcache.kv.tiers.moving import Mover
from llmcache.kv.tiers.restoring import Found, Restored
from llmcache.kv.tiers.scoring import score_slots, score_streams
from llmcache.kv.tiers.sequences import Sequences
from llmcache.kv.tiers.spilling import Spiller
from llmcache.kv.tiers.ssd import CsdTier, KeyRows, open_tier
from llmcache.kv.tiers.traffic import Traffic

Numbers = NDArray[np.int64]
Floats = NDArray[np.float32]


class KvStore:
    """Keys and values of `config.batch` sequences of one length; a context manager."""

    def __init__(self, config: StoreConfig, found: Found | None = None) -> None:
        """Makes an empty store and its spill file. `found` is for `restore`."""
        self._core = core = Core(config)
        ssd, recovery = open_tier(config, core.traffic, create=found is None)
        self._spiller = None if ssd is None else Spiller(core, ssd, None if found is None else found.told)
        self._mover = None if self._spiller is None else Mover(core, self._spiller)
        fetcher = None if ssd is None or self._mover is None else Fetcher(core, self._mover, ssd)
        self._appender = Appender(core, self._spiller, self._mover)
        self._gatherer = Gatherer(core, fetcher)
        self._fast = FastGatherer(core, self._gatherer, self._mover)
        self._sequences = Sequences(core, self._spiller, self._mover, self._fast.drop)
        self.restored: Restored | None = None
        try:
            if found is None:
                self._remove_tables()
            elif self._spiller is not None and self._mover is not None:
                restoring.adopt(core, self._spiller, self._mover, found)
                self.restored = restoring.told_of(core, found, recovery)
        except BaseException:
            self.close()
            raise

    @classmethod
    def restore(cls, path: str | Path, config: StoreConfig) -> KvStore:
        """Goes on with the spill file at `path`, as its last writer left it; `restored` tells what may be missing.

        `config`: as for a new store; path and batch are those of the file. DataError: another model's file, or damaged.
        """
        found = restoring.look(Path(path), config.shape)
        return cls(restoring.config_for(config, Path(path), found), found)

    def _remove_tables(self) -> None:
        """Takes away the page tables of a file that was replaced."""
        if self.config.path is not None:
            tables.remove(self.config.path)

    # What it is

    @property
    def config(self) -> StoreConfig:
        """What it was made from; `batch` is that of the beginning."""
        return self._core.config

    @property
    def shape(self) -> KvShape:
        """Whose keys and values it holds."""
        return self._core.shape

    @property
    def batch(self) -> int:
        """Sequences."""
        return self._core.table.batch

    @property
    def length(self) -> int:
        """Tokens of every sequence, left padding included, whose step is over (`commit`)."""
        return self._core.tokens.length

    def layer_length(self, layer: int) -> int:
        """Returns the tokens a layer has, those of a step that is under way included."""
        self._core.checked(layer)
        return int(self._core.lengths[layer])

    @property
    def step(self) -> int:
        """Steps so far: how often `commit` was called."""
        return self._core.step

    @property
    def middle(self) -> range:
        """Pages that may be chosen now: between sink and window, counted in tokens whose step is over."""
        return self._core.middle

    @property
    def traffic(self) -> Traffic:
        """What moved so far."""
        return self._core.traffic

    @property
    def device_report(self) -> Report | None:
        """What the commands to the *emulated* device took so far, bytes, modelled and wall time; None without a device."""
        tier = None if self._spiller is None else self._spiller.ssd
        return tier.device.report if isinstance(tier, CsdTier) else None

    @property
    def ids(self) -> Numbers:
        """Ids of all tokens, [batch, length], as they were committed."""
        return self._core.tokens.ids

    @property
    def positions(self) -> Numbers:
        """Positions of all tokens, [batch, length], as they were committed."""
        return self._core.tokens.positions

    @property
    def memory_bytes(self) -> int:
        """Memory of the cpu pools of all layers, used or not."""
        return sum(pool.size_bytes for pool in self._core.pools)

    @property
    def victims(self) -> Victims | None:
        """Who chooses the pages that go down when the window moves on and the pool is full; None: the longest there."""
        return self._core.victims

    @victims.setter
    def victims(self, choose: Victims | None) -> None:
        self._core.victims = choose

    # Adding tokens

    def append(
        self,
        layer: int,
        keys: NDArray[Any],
        values: NDArray[Any],
        key_scales: Floats | None = None,
        value_scales: Floats | None = None,
    ) -> None:
        """Adds tokens to a layer: keys and values [batch, kv_heads, tokens, dim] in the shape's numpy type.

        Scales, float32 [batch, kv_heads, tokens], belong to int8. Layers of a step come in any order; `commit` ends it.
        EnvironmentProblem (disk full, device dead): the tokens are in memory all the same, must not be appended again, and
        are written with the next page, or by `spill`.
        """
        self._core.checked(layer)
        self._appender.append(layer, checked_rows(self._core, keys, values, (key_scales, value_scales)))

    def commit(self, ids: Numbers, positions: Numbers) -> None:
        """Ends a step after all layers: takes the ids and positions [batch, tokens] of its tokens. Errors as `append`."""
        self._appender.commit(ids, positions)

    def spill(self) -> None:
        """Writes what could not be written before; EnvironmentProblem if it still cannot."""
        if self._spiller is not None:
            self._spiller.resume()

    # Looking and bringing

    def in_cpu(self, layer: int, sequence: int) -> NDArray[np.bool_]:
        """Returns for each whole page of a sequence, [length // page_tokens], whether it is in the cpu pool of a layer."""
        pool = self._core.checked(layer, sequence)
        pages = self.length // self.shape.page_tokens
        with pool.lock:
            return pool.slot_of[self._core.table.table[sequence, :pages]] >= 0

    def score_cpu(
        self, layer: int, sequence: int, queries: Floats, pages: Numbers | None = None, combine: str = "max"
    ) -> tuple[Numbers, Floats]:
        """Returns pages in the pool, int64 [n] ascending, and scores float32 [kv_heads, n * page_tokens] of their tokens.

        `queries` [heads, head_dim] float32. `pages`: score no others; None: those of the middle.
        """
        core, pool = self._core, self._core.checked(layer, sequence)
        wanted = np.arange(core.middle.start, core.middle.stop) if pages is None else np.sort(pages)
        wanted, numbers = core.checked_pages(sequence, wanted, range(self.length // self.shape.page_tokens))
        with pool.lock:
            slots = pool.slot_of[numbers]
            here = slots >= 0
            return wanted[here], score_slots(pool.keys, slots[here], queries, combine, core.config.threads)

    def score_ssd(
        self,
        layer: int,
        sequence: int,
        queries: Floats,
        pages: Numbers | None = None,
        combine: str = "max",
        block_tokens: int = BLOCK_TOKENS,
    ) -> Iterator[ScoreBlock]:
        """Yields score blocks of pages on the ssd tier as they come, each of one key head.

        `pages`: None for those of the middle that are not in the pool. A device scores near its data, at its own pace, and
        rounds to halves: take all blocks before anything else is asked of the store's device. Keys of a file come to the
        host. Errors (DataError: a page is damaged; EnvironmentProblem: the device died) come from the iteration.
        """
        core, pool = self._core, self._core.checked(layer, sequence)
        wanted = np.arange(core.middle.start, core.middle.stop) if pages is None else np.sort(pages)
        wanted, numbers = core.checked_pages(sequence, wanted, range(self.length // self.shape.page_tokens))
        if pages is None:
            with pool.lock:
                wanted = wanted[pool.slot_of[numbers] < 0]
        if self._spiller is None:
            return iter(())
        return score_streams(core, self._spiller.ssd, layer, sequence, wanted, queries, combine, block_tokens)

    def read_keys(self, layer: int, sequence: int, pages: Numbers) -> KeyRows:
        """Returns copies of the keys [n, kv_heads, page_tokens, head_dim] of whole pages, and for int8 their scales.

        For indexes and page summaries; bytes from the ssd tier are counted as "index".
        """
        core, pool = self._core, self._core.checked(layer, sequence)
        pages, numbers = core.checked_pages(sequence, pages, range(self.length // self.shape.page_tokens))
        with pool.lock:
            slots = pool.slot_of[numbers]
            keys = pool.keys.pages[slots]
            scales = None if pool.keys.scales is None else pool.keys.scales[slots]
        missing = np.flatnonzero(slots < 0)
        if self._mover is not None and self._spiller is not None and len(missing):
            for stream, found in self._mover.by_stream(np.unique(numbers[missing])):
                places = core.table.place[found].astype(np.int64)
                rows, row_scales = self._spiller.ssd.read_keys(stream, layer, places, "index")
                for index, number in enumerate(found):
                    keys[numbers == number] = rows[index]
                    if scales is not None and row_scales is not None:
                        scales[numbers == number] = row_scales[index]
        return keys, scales

    def stage(self, layer: int, selection: Selection) -> Staged:
        """Fetches what is chosen ahead of time, for a later `gather`; ValueError if it is not all in the middle."""
        return self._gatherer.stage(layer, selection)

    def gather(self, layer: int, selection: Selection | None = None, *, staged: Staged | None = None) -> Gathered:
        """Returns sink, chosen tokens, window and tail of a layer, as far as it was appended.

        Either a `selection` or what `stage` made of one. Staged rows keep: what has left the window meanwhile comes along.
        """
        if (selection is None) == (staged is None):
            raise ValueError("selection: either a selection or what was staged is needed")
        chosen = staged if selection is None else selection
        assert chosen is not None
        return self._gatherer.gather(layer, chosen)

    def gather_fast(self, layer: int, selection: Selection, fast: FastTier) -> Gathered:
        """As `gather`, but keys and values come from `fast`, to which only pages are sent that are not there yet.

        They are what its `rows` returns, for instance tensors on a gpu; int8 as float32. Bytes are counted as "attend".
        """
        return self._fast.gather(layer, selection, fast)

    # Moving pages

    def move_up(self, layer: int, sequence: int, pages: Numbers) -> None:
        """Reads pages of the middle into the cpu pool; ValueError if it has no room, or one is not of the middle."""
        self._tier().up(layer, sequence, pages)

    def move_down(self, layer: int, sequence: int, pages: Numbers) -> None:
        """Drops pages of the middle from the cpu pool; ValueError if one is pinned (sink, window)."""
        self._tier().down(layer, sequence, pages)

    def _tier(self) -> Mover:
        if self._mover is None:
            raise ValueError("path: the store has no ssd tier that pages could move to")
        return self._mover

    # Changing sequences

    def crop(self, tokens: int) -> None:
        """Cuts every sequence to its first `tokens` tokens; takes a step that is under way back."""
        self._sequences.crop(tokens)

    def reorder(self, index: Numbers) -> None:
        """Makes sequence i what sequence `index[i]` was (beam search); shares whole pages, copies tails."""
        if len(index) != self.batch:
            raise ValueError(f"index: {len(index)} sequences, the batch has {self.batch}")
        self._sequences.select(index)

    def repeat(self, times: int) -> None:
        """Makes `times` of every sequence, one after the other; shares whole pages, copies tails."""
        if times < 1:
            raise ValueError(f"times: {times}, at least 1 is needed")
        self._sequences.select(np.repeat(np.arange(self.batch), times))

    def select(self, index: Numbers) -> None:
        """Makes a batch of the sequences `index`, any of them any number of times; shares whole pages, copies tails.

        Between steps only, as `reorder` and `repeat`. What nobody refers to any more is taken away in the file.
        """
        self._sequences.select(index)

    # Beginning and end

    @property
    def beside(self) -> str:
        """What the last `save` was given, also that of whoever had the spill file before; "" if there was none."""
        return "" if self._spiller is None else self._spiller.beside

    def tail(self) -> tuple[Numbers, Numbers, list[list[NDArray[Any]]]]:
        """Returns the ids and positions [batch, n] of the tokens that fill no page, and the rows of each layer.

        Rows: keys, values and for int8 their scales, [batch, kv_heads, n, ..], as `append` takes them. Between steps only.
        """
        core = self._core
        core.check_between_steps()
        full, rest = divmod(self.length, self.shape.page_tokens)
        rows: list[list[NDArray[Any]]] = []
        for pool in core.pools if rest else ():
            with pool.lock:
                pages = [pool.rows(int(number)) for number in core.table.table[:, full]]
                rows.append([np.stack([side[:, :rest] for side in sides]) for sides in zip(*pages, strict=True)])
        return self.ids[:, self.length - rest :], self.positions[:, self.length - rest :], rows

    def save(self, beside: str = "") -> None:
        """Writes all, the last page too, though it is not full: `restore` then loses nothing. Between steps only.

        `beside`: name (hexadecimal) of what else belongs to this save; it is told with it, or not at all.
        """
        if self._spiller is None:
            raise UsageError("path: the store has no spill file to save to", "make it with one")
        self._core.check_between_steps()
        self._spiller.save(beside)

    def restart_device(self) -> None:
        """Starts the *emulated* device anew after it has died, and writes what it had not acknowledged.

        DataError if something is missing that it had.
        """
        if self._spiller is None:
            raise UsageError("path: the store has no device", "make it with ssd='csd'")
        self._spiller.ssd.restart()
        self._spiller.resume()

    def close(self) -> None:
        """Flushes and closes the spill file; what fills no page is not in it, unless `save` was called."""
        if self._spiller is not None:
            self._spiller.ssd.close()

    def discard(self) -> None:
        """Closes it and deletes its spill file and page tables."""
        try:
            self.close()
        finally:
            if self.config.path is not None:
                files.remove(self.config.path)
                self._remove_tables()

    def __enter__(self) -> KvStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:  # the error that is under way says more than one that follows from it
            with contextlib.suppress(LlmcacheError):
                self.close()
