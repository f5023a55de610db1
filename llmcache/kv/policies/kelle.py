"""Kelle: each key head keeps the tokens with the most attention; a dropped token is never used again."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from llmcache.arrays import Flags, Floats, Int64s
from llmcache.kv.kernels import top
from llmcache.kv.policies.base import PolicySettings, TokenTable, one_of
from llmcache.kv.policies.h2o import H2O
from llmcache.kv.tiers import Selection


@dataclass(frozen=True)
class KelleSettings(PolicySettings):
    """Settings of Kelle; N' is `token_budget`.

    `evicted`: "lost" as in the paper, or "spilled": dropped tokens remain candidates, on the ssd tier if there is one, and
    return if only tokens of lower rank are left. That is rare, because the sum of a dropped token stays constant while
    others grow; policies that use the query recall more tokens.
    """

    evicted: str = one_of("lost", ("lost", "spilled"))


class Recorder(Protocol):
    """Receives the rows that a policy keeps, once per step; for instance `edram.refresh.RunRecorder`."""

    def observe(self, layer: Hashable, kind: str, ids: Int64s, high: Flags) -> None:
        """Receive the rows of a layer of a sequence: their ids (-1: free), and which of them are high-score tokens."""

    def end_step(self, duration_ns: float | None = None) -> None:
        """End the observed step."""


class Kelle(H2O):
    """Attention-based eviction (AEP of Kelle), permanent and separate for each key head.

        prefilled: sums[token] += attention of every query of the prompt
        select:    the tokens of the middle with the largest sums that were not dropped; of equal sums, the newer
        attended:  the rest is dropped; sums[token] += attention of this step's queries

    Source: kelle.txt, section 4.1.1. Differs from the paper: sink and window are whole pages; dropped tokens remain in the
    store's file, and a later prompt, which has full attention, uses them. Recomputation (section 4.1.2) is in `edram.aerp`
    only, because a store gets keys and values, not the x from which they are computed; lost bits are in `edram.accuracy`
    only. With pages of one token, it drops the same tokens as `edram.aerp.Slots`.

    `record` passes the kept rows to a recorder: `edram.kelle`, for `llmcache edram report`.
    """

    name = "kelle"
    title = "Kelle"
    settings_class = KelleSettings
    settings: KelleSettings

    def begin(self) -> None:
        """See `KvPolicy.begin`."""
        super().begin()
        self._dropped = TokenTable(self.store.shape.layers, self.store.batch, (self.kv_heads,), np.bool_)
        self.remembered.append(self._dropped)
        self._recorder: Recorder | None = None
        if self.store.config.cpu_pages is not None:
            self.store.victims = self.victims

    def choose(self, layer: int, queries: Floats, tokens: int) -> Selection:
        """Return the tokens to keep, regardless of the queries; dropped ones only if no others are left (after a crop)."""
        start, stop = self.inside.start, self.inside.stop
        newest_first = []
        for sequence in range(len(queries)):
            sums = self.sums.rows(layer, sequence, stop)[start:]
            dropped = self._dropped.rows(layer, sequence, stop)[start:]
            newest_first.append(np.where(dropped, -np.inf, sums)[::-1].T.astype(np.float32))
        # Of equal sums, `top` takes the first, which is the newest in this order.
        return Selection(stop - 1 - top(np.stack(newest_first), tokens)[:, :, ::-1])

    def attended(self, layer: int, selection: Selection, weights: Floats | None = None) -> None:
        """Drop the tokens that were not attended to, and add the attention of a step."""
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
        """Return the `count` of `pages` to drop from the host's pool: those with the fewest kept tokens, earlier first.

        Has the signature of the store's `Victims`.
        """
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
        """End the last recorded step. ValueError if there was none since `record`."""
        if self._recorder is None or self._recorded_step < 0:
            raise ValueError("end_record: nothing was recorded, call record() before the steps")
        recorder, self._recorder = self._recorder, None
        recorder.end_step(self._step_ns)

    def _record_rows(self, layer: int, positions: Int64s) -> None:
        """Pass the tokens that `layer` attended to, including the new one, to the recorder; a row's place is its token."""
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
