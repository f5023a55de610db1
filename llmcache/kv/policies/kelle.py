"""Kelle: each key head keeps the tokens that have drawn the most attention; what it drops once, it never sees again."""

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

    `evicted`: "lost" as in the paper, or "spilled": dropped tokens stay candidates, on the ssd if there is one, and come
    back when tokens that rank lower than they did are all there is beside. That is seldom: nobody attends to what is
    dropped, so its sum stays as it is while others grow. Policies that ask the query call more back.
    """

    evicted: str = one_of("lost", ("lost", "spilled"))


class Recorder(Protocol):
    """What a policy shows its rows to, once a step; `edram.refresh.RunRecorder` is one."""

    def observe(self, layer: Hashable, kind: str, ids: Int64s, high: Flags) -> None:
        """Takes the rows of one layer of a sequence: what tells them apart (-1: free), and which are high-score tokens."""

    def end_step(self, duration_ns: float | None = None) -> None:
        """The step that was observed is over."""


class Kelle(H2O):
    """Attention-based eviction (AEP of Kelle), per key head and for good.

        prefilled: sums[token] += attention of every query of the prompt to it
        select:    of the tokens not dropped before, those of the middle with the largest sums; of equal ones the newer
        attended:  the rest is dropped; sums[token] += attention of this step's queries to it

    Source: kelle.txt, section 4.1.1. Differs from the paper: sink and window are whole pages; dropped tokens still lie in
    the store's file, and a later prompt, which is attended as a whole, sees them. Not here is recomputation (section
    4.1.2): a store gets keys and values of a model, never the x that they are computed from; `edram.aerp` has it. Nor are
    lost bits: `edram.accuracy` has them. With pages of one token it drops what `edram.aerp.Slots` drops.

    `record` shows what is kept to whoever accounts for it: `edram.kelle`, for `llmcache edram report`.
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
        """Returns the tokens to keep, whatever the queries are; dropped ones only if nothing else is left (after a crop)."""
        start, stop = self.inside.start, self.inside.stop
        newest_first = []
        for sequence in range(len(queries)):
            sums = self.sums.rows(layer, sequence, stop)[start:]
            dropped = self._dropped.rows(layer, sequence, stop)[start:]
            newest_first.append(np.where(dropped, -np.inf, sums)[::-1].T.astype(np.float32))
        # Of equal sums `top` takes the first, which is the newest here.
        return Selection(stop - 1 - top(np.stack(newest_first), tokens)[:, :, ::-1])

    def attended(self, layer: int, selection: Selection, weights: Floats | None = None) -> None:
        """Drops what was not attended to, and adds up the attention of a step."""
        super().attended(layer, selection, weights)
        if self.settings.evicted == "lost":
            for sequence, by_head in enumerate(selection.positions):
                dropped = self._dropped.rows(layer, sequence, self.inside.stop)
                dropped[self.inside.start :] = True
                for head, own in enumerate(by_head):
                    dropped[own, head] = False
        if self._recorder is not None:
            self._show(layer, self.store.attended_positions(layer, selection))

    def victims(self, layer: int, sequence: int, pages: Int64s, count: int) -> Int64s:
        """Returns which `count` of `pages` leave the host's pool: of which the fewest tokens are kept, the first first.

        The signature is the store's `Victims`.
        """
        tokens = self._dropped.rows(layer, sequence, (int(pages[-1]) + 1) * self.page_tokens)
        kept = (~tokens).reshape(-1, self.page_tokens * self.kv_heads).sum(axis=1)[pages]
        return np.sort(pages[np.argsort(kept, kind="stable")[:count]])

    # What is kept, step by step

    def record(self, recorder: Recorder, step_ns: float | None = None) -> None:
        """Shows `recorder` from now on which keys and values are kept, by score group, until `end_record`.

        `step_ns`: how long a step takes on the *modelled* accelerator (None: whoever reads the record says).
        """
        self._recorder, self._recorded_step, self._places, self._step_ns = recorder, -1, 0, step_ns

    def end_record(self) -> None:
        """Ends the last step that is shown. ValueError if there was none since `record`."""
        if self._recorder is None or self._recorded_step < 0:
            raise ValueError("end_record: nothing was recorded, call record() before the steps")
        recorder, self._recorder = self._recorder, None
        recorder.end_step(self._step_ns)

    def _show(self, layer: int, positions: Int64s) -> None:
        """Shows the recorder what `layer` attended to, the new token included; a row's place is its token."""
        assert self._recorder is not None
        if self._recorded_step not in (-1, self.store.step):
            self._recorder.end_step(self._step_ns)
        self._recorded_step = self.store.step
        length, middle = self.store.layer_length(layer), self.inside
        self._places = max(self._places, length)  # places do not vanish where a store is cropped
        for sequence, by_head in enumerate(positions):
            tokens = by_head.T
            own = np.take_along_axis(self.sums.rows(layer, sequence, length), tokens, axis=0)
            inside = (tokens >= middle.start) & (tokens < middle.stop)
            ids, high = np.full((self._places, self.kv_heads), -1), np.zeros((self._places, self.kv_heads), np.bool_)
            np.put_along_axis(ids, tokens, tokens, axis=0)
            np.put_along_axis(high, tokens, ~inside | (own >= np.median(own, axis=0)), axis=0)
            self._recorder.observe((layer, sequence), "kv", ids, high)
