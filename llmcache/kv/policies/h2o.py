"""H2O and Kelle: policies that keep the tokens with the most attention, summed over all queries.

The attention matrix of a prompt is never stored. Compiled loops add up four rows at a time, because matrix products took
25 times as long with busy CPUs (4096 queries of 32 heads, measured). The loops call only `single_power` outside this file.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numba import njit

from llmcache.arrays import Flags, Floats, Int64s
from llmcache.kv.kernels import top
from llmcache.kv.kernels.scores import single_power
from llmcache.kv.kernels.threads import Job, processors, run_all
from llmcache.kv.pipeline import widened
from llmcache.kv.policies.base import KvPolicy, PolicySettings, TokenTable, one_of
from llmcache.kv.tiers import Selection

ROWS = 4  # rows computed at a time, so that a key is loaded once for all of them
_LOG2_E = np.float32(1.4426950408889634)


class H2O(KvPolicy):
    """H2O-like: heavy hitters, the tokens with the largest attention summed over all queries.

        prefilled: sums[token] += attention of every query of the prompt
        select:    the tokens of the middle with the largest sums
        attended:  sums[token] += attention of this step's queries, if the token was attended to

    Source: Zhang et al., H2O, NeurIPS 2023, section 4 and algorithm 1; hillinfer.txt, section 4.2, baseline (2). Differs
    from H2O: a token that is not chosen keeps its sum and may return; recent tokens are the store's window.

    `sums`: rows [tokens, kv_heads] float32.
    """

    name = "h2o"
    title = "H2O-like"
    needs_weights = True

    def begin(self) -> None:
        self.sums = TokenTable(self.store.shape.layers, self.store.batch, (self.kv_heads,), np.float32)
        self.remembered.append(self.sums)

    def prefilled(self, layer: int, queries: Floats, start: int) -> None:
        everything = widened(self.store.gather(layer, self.store.everything).keys)
        for sequence, (of_sequence, keys) in enumerate(zip(queries, everything, strict=True)):
            rows = self.sums.rows(layer, sequence, keys.shape[1])
            rows += column_sums(of_sequence, keys, start, int(self.first[sequence]), self.scale).T

    def choose(self, layer: int, queries: Floats, tokens: int) -> Selection:
        inside = self.inside
        sums = [self.sums.rows(layer, sequence, inside.stop)[inside.start :].T for sequence in range(len(queries))]
        return Selection(top(np.stack(sums), tokens) + inside.start)

    def attended(self, layer: int, selection: Selection, weights: Floats | None = None) -> None:
        assert weights is not None, "it needs_weights"
        positions = self.store.attended_positions(layer, selection)
        by_head = weights.reshape(*positions.shape[:2], -1, positions.shape[2]).sum(axis=2)
        for sequence, added in enumerate(by_head):
            rows = self.sums.rows(layer, sequence, self.store.layer_length(layer))
            for head, (own, by_token) in enumerate(zip(positions[sequence], added, strict=True)):
                rows[own, head] += by_token


def column_sums(queries: Floats, keys: Floats, start: int, first: int, scale: float) -> Floats:
    """Return the column sums [kv_heads, tokens], float32, of causal softmax(queries keys^T scale), by key head (GQA).

    `queries` [heads, rows, dim] float32 have the positions from `start` on; `keys` [kv_heads, tokens, dim] float32 those
    from 0 to the last query's. Tokens before `first` are padding and are ignored.

    Source: Zhang et al., H2O, NeurIPS 2023, section 4.1 (accumulated attention); kelle.txt, section 4.1.
    """
    kv_heads, tokens, _ = keys.shape
    group = len(queries) // kv_heads
    scaled = np.ascontiguousarray(queries) * np.float32(scale)
    keys = np.ascontiguousarray(keys)
    begin = max(start, first)
    # Later rows are longer, so each thread gets some of them, to balance the load.
    parts = max(1, min(-(-2 * processors() // len(queries)), (tokens - begin) // (16 * ROWS)))
    sums = np.zeros((parts, len(queries), tokens), np.float32)
    jobs: list[Job] = []
    for head, rows in enumerate(scaled):
        for part in range(parts):
            place = (begin - first, part, parts)
            of_head = keys[head // group, first:]
            jobs.append(partial(_add_rows, rows[begin - start :], of_head, *place, sums[part, head, first:]))
    run_all(jobs)
    found: Floats = sums.sum(axis=0).reshape(kv_heads, group, tokens).sum(axis=1)
    return found


@njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"}, error_model="numpy")
def _add_rows(queries, keys, begin, part, parts, sums):  # type: ignore[no-untyped-def]
    logits = np.empty((ROWS, len(keys)), np.float32)
    dim = keys.shape[1]
    for above in range(part * ROWS, len(queries), parts * ROWS):
        count = min(ROWS, len(queries) - above)
        last = above + count - 1  # repeated and ignored if there are fewer than four rows
        one, two, three, four = queries[above], queries[min(above + 1, last)], queries[min(above + 2, last)], queries[last]
        for key in range(begin + above + count):
            a = b = c = d = np.float32(0)
            for j in range(dim):
                number = keys[key, j]
                a += one[j] * number
                b += two[j] * number
                c += three[j] * number
                d += four[j] * number
            logits[0, key], logits[1, key], logits[2, key], logits[3, key] = a, b, c, d
        for row in range(count):
            _add_softmax(logits[row, : begin + above + row + 1], sums)


@njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
def _add_softmax(logits, sums):  # type: ignore[no-untyped-def]
    most = logits[0]
    for i in range(logits.size):
        most = max(most, logits[i])
    total = np.float32(0)
    for i in range(logits.size):
        logits[i] = single_power((logits[i] - most) * _LOG2_E)
        total += logits[i]
    share = np.float32(1) / total
    for i in range(logits.size):
        sums[i] += logits[i] * share


@dataclass(frozen=True)
class KelleSettings(PolicySettings):
    """Settings of Kelle; N' is `token_budget`.

    `evicted`: "lost" as in the paper, or "spilled": dropped tokens remain candidates, on the ssd tier if there is one, and
    return if all others have lower ranks, which is rare.
    """

    evicted: str = one_of("lost", ("lost", "spilled"))


class Recorder(Protocol):
    """Receives the rows that a policy keeps, once per step; for instance `edram.refresh.RunRecorder`."""

    def observe(self, layer: Hashable, kind: str, ids: Int64s, high: Flags) -> None:
        """Receive the rows of a layer of a sequence: their ids (-1: free), and which are high-score tokens."""

    def end_step(self, duration_ns: float | None = None) -> None: ...


class Kelle(H2O):
    """Attention-based eviction (AEP of Kelle), permanent and separate for each key head.

        prefilled: sums[token] += attention of every query of the prompt
        select:    the tokens of the middle with the largest sums that were not dropped; of equal sums, the newer
        attended:  the rest is dropped; sums[token] += attention of this step's queries

    Source: kelle.txt, section 4.1.1. Differs from the paper: sink and window are whole pages, and a later prompt uses
    dropped tokens, which remain in the store's file. Recomputation (section 4.1.2) and lost bits are in `edram.aerp` and
    `edram.accuracy` only. With pages of one token, it drops the same tokens as `edram.aerp.Slots`.
    """

    name = "kelle"
    title = "Kelle"
    settings_class = KelleSettings
    settings: KelleSettings

    def begin(self) -> None:
        super().begin()
        self._dropped = TokenTable(self.store.shape.layers, self.store.batch, (self.kv_heads,), np.bool_)
        self.remembered.append(self._dropped)
        self._recorder: Recorder | None = None
        if self.store.config.cpu_pages is not None:
            self.store.victims = self.victims

    def choose(self, layer: int, queries: Floats, tokens: int) -> Selection:
        """Return the tokens to keep; dropped ones only if no others are left (after a crop)."""
        start, stop = self.inside.start, self.inside.stop
        newest_first = []
        for sequence in range(len(queries)):
            sums = self.sums.rows(layer, sequence, stop)[start:]
            dropped = self._dropped.rows(layer, sequence, stop)[start:]
            newest_first.append(np.where(dropped, -np.inf, sums)[::-1].T.astype(np.float32))
        # Of equal sums, `top` takes the first, which is the newest in this order.
        return Selection(stop - 1 - top(np.stack(newest_first), tokens)[:, :, ::-1])

    def attended(self, layer: int, selection: Selection, weights: Floats | None = None) -> None:
        super().attended(layer, selection, weights)
        if self.settings.evicted == "lost":
            for sequence, by_head in enumerate(selection.positions):
                dropped = self._dropped.rows(layer, sequence, self.inside.stop)
                dropped[self.inside.start :] = True
                for head, own in enumerate(by_head):
                    dropped[own, head] = False
        if self._recorder is not None:
            self._record_rows(layer, self.store.attended_positions(layer, selection))

    def victims(self, layer: int, sequence: int, pages: Int64s, count: int) -> Int64s:
        tokens = self._dropped.rows(layer, sequence, (int(pages[-1]) + 1) * self.page_tokens)
        kept = (~tokens).reshape(-1, self.page_tokens * self.kv_heads).sum(axis=1)[pages]
        return np.sort(pages[np.argsort(kept, kind="stable")[:count]])

    # Recording the kept rows of each step

    def record(self, recorder: Recorder, step_ns: float | None = None) -> None:
        """Pass the kept keys and values of each step to `recorder`, by score group, until `end_record`.

        `step_ns`: duration of a step on the *modelled* accelerator; None if the reader of the record sets it.
        """
        self._recorder, self._recorded_step, self._places, self._step_ns = recorder, -1, 0, step_ns

    def end_record(self) -> None:
        if self._recorder is None or self._recorded_step < 0:
            raise ValueError("end_record: nothing was recorded, call record() before the steps")
        recorder, self._recorder = self._recorder, None
        recorder.end_step(self._step_ns)

    def _record_rows(self, layer: int, positions: Int64s) -> None:
        assert self._recorder is not None
        if self._recorded_step not in (-1, self.store.step):
            self._recorder.end_step(self._step_ns)
        self._recorded_step = self.store.step
        length, middle = self.store.layer_length(layer), self.inside
        self._places = max(self._places, length)  # a crop does not remove places
        for sequence, by_head in enumerate(positions):
            tokens = by_head.T
            own = np.take_along_axis(self.sums.rows(layer, sequence, length), tokens, axis=0)
            inside = (tokens >= middle.start) & (tokens < middle.stop)
            ids, high = np.full((self._places, self.kv_heads), -1), np.zeros((self._places, self.kv_heads), np.bool_)
            np.put_along_axis(ids, tokens, tokens, axis=0)
            np.put_along_axis(high, tokens, ~inside | (own >= np.median(own, axis=0)), axis=0)
            self._recorder.observe((layer, sequence), "kv", ids, high)
