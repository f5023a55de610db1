"""KvEngine: the decode steps of a policy over a store, with the next layer chosen and fetched while this one computes.

Source: hillinfer.txt, section 3.3, "Adaptive Prefetch-based Pipeline": "overlaps importance evaluation and KV prefetching
for layer i+1 while the GPU computes layer i".

Concurrency. Without look-ahead (`app` False) there is no thread but the caller's. With it there is one worker, and it
alone evaluates, fetches and updates, in the order in which it was asked to: the store's device takes one command at a
time, and a policy's tables and the pools change only there. What the caller's thread does with the store meanwhile is
what a store allows beside (see `KvStore`): to add tokens to a layer that the worker has left, and to complete staged rows
of such a layer with sink, window and tail. `finish_step` waits for the worker, so that every step finds tables and pools
as the one before has left them: what is chosen does not depend on how fast which thread is.

Errors of an evaluation or a fetch are raised by the `step` of their layer, those of an update by `finish_step`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmcache.kv.pipeline.merging import merged, missing
from llmcache.kv.pipeline.timeline import CPU, EVALUATE, FETCH, LINK, NO_TIMELINE, UPDATE, Span, Timeline
from llmcache.kv.tiers import FastTier, Gathered, KvStore, Selection, Staged

if TYPE_CHECKING:
    from llmcache.kv.policies.base import KvPolicy

Floats = NDArray[np.float32]
Rows = NDArray[Any]
Result = TypeVar("Result")


class Chosen(NamedTuple):
    """What was chosen for a layer, and its rows. `corrected`: after looking ahead, which has missed the rows `more`."""

    selection: Selection
    staged: Staged
    corrected: bool = False
    more: Staged | None = None


class KvEngine:
    """Runs `policy` over `store`, layer by layer; a context manager, which leaves the store open.

    `app`: the next layer is evaluated and fetched ahead, on `ahead`. `exact`: a layer that was is evaluated again with
    its true queries, and only what is missing is fetched then. `fast`: steps take what they attend to from there, without
    look-ahead. Spans go to `timeline`.
    """

    def __init__(
        self,
        store: KvStore,
        policy: KvPolicy,
        *,
        app: bool = True,
        exact: bool = False,
        fast: FastTier | None = None,
        timeline: Timeline = NO_TIMELINE,
    ) -> None:
        self.store, self.policy, self.app, self.exact = store, policy, app, exact
        self.timeline, self._fast = timeline, fast
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="llmcache-kv-ahead") if app else None
        self._ahead: dict[int, Future[Chosen]] = {}
        self._updates: list[Future[None]] = []
        self._chosen: dict[int, Selection] = {}

    # Prefill

    def prefill(self, layer: int, queries: Floats | None, keys: Rows, values: Rows) -> None:
        """Takes the tokens of a prompt, or of a part of it, for one layer; `finish_step` follows after the last layer.

        `queries` [batch, heads, rows, dim] float32 of the last `rows` of the tokens, None if the policy needs none;
        `keys` and `values` [batch, kv_heads, tokens, dim]. The policy takes note while the caller computes the next layer.
        """
        start = self.store.length + keys.shape[2]
        self.store.append(layer, keys, values)
        if queries is not None:
            asked = queries
            self._later(lambda: self.policy.prefilled(layer, asked, start - asked.shape[2]))

    # A decode step

    def ahead(self, layer: int, queries: Floats) -> None:
        """Starts to evaluate and fetch for `layer` by an estimate of its queries [batch, heads, dim]; returns at once.

        Nothing happens without look-ahead. The estimate is the caller's: from the input of the layer before, through the
        query projection of this one.
        """
        if self._worker is not None:
            self._ahead[layer] = self._worker.submit(self._evaluate, layer, queries, self.store.step)

    def step(self, layer: int, queries: Floats, keys: Rows, values: Rows) -> Gathered:
        """Adds the newest token to `layer` and returns what its queries attend to, the token itself included.

        `queries` [batch, heads, dim] float32, `keys` and `values` [batch, kv_heads, 1, dim]. What was looked ahead for is
        taken, else it is evaluated and fetched now. After any error it may be called again: a token that the store has
        already taken (it was the spilling that failed) is not added twice. Of a fast tier the rows are what it gives.
        """
        step = self.store.step
        chosen = self._choose(layer, queries) if self._fast is None else None
        selection = self._select(layer, queries, step) if chosen is None else chosen.selection
        if self.store.layer_length(layer) == self.store.length:
            self.store.append(layer, keys, values)
        self._chosen[layer] = selection
        if chosen is None:
            assert self._fast is not None
            with self.timeline.span(LINK, FETCH, layer, step):
                return self.store.gather_fast(layer, selection, self._fast)
        found = self.store.gather(layer, staged=chosen.staged)
        return self._completed(layer, chosen, found) if chosen.corrected else found

    def _choose(self, layer: int, queries: Floats) -> Chosen:
        started, step = self._ahead.pop(layer, None), self.store.step
        if started is None:
            return self._now(lambda: self._evaluate(layer, queries, step))
        early = started.result()
        return self._now(lambda: self._corrected(layer, queries, step, early)) if self.exact else early

    def _evaluate(self, layer: int, queries: Floats, step: int) -> Chosen:
        selection = self._select(layer, queries, step)
        return Chosen(selection, self._stage(layer, selection, step))

    def _select(self, layer: int, queries: Floats, step: int) -> Selection:
        begin_ns = self.timeline.now_ns()
        selection = self.policy.select(layer, queries)
        if not self.timeline.has(EVALUATE, layer, step, begin_ns):  # a policy of several resources records its own
            self.timeline.add(Span(CPU, EVALUATE, layer, step, begin_ns, self.timeline.now_ns()))
        return selection

    def _stage(self, layer: int, selection: Selection, step: int) -> Staged:
        with self.timeline.span(LINK, FETCH, layer, step):
            return self.store.stage(layer, selection)

    def _corrected(self, layer: int, queries: Floats, step: int, early: Chosen) -> Chosen:
        """Returns the choice by the true queries, with what `early` has fetched of it."""
        selection = self._select(layer, queries, step)
        lacking = missing(selection.positions, early.staged.positions)
        more = self._stage(layer, Selection(lacking), step) if lacking.shape[2] else None
        return Chosen(selection, early.staged, True, more)

    def _completed(self, layer: int, chosen: Chosen, early: Gathered) -> Gathered:
        """Returns the rows of a corrected choice, from those that were fetched early and those that were missing."""
        lead = chosen.staged.middle.start * self.store.shape.page_tokens
        behind = lead + chosen.staged.positions.shape[2]
        around = early.positions[..., :lead], chosen.selection.positions, early.positions[..., behind:]
        wanted = np.concatenate(around, axis=2)
        parts = [early] if chosen.more is None else [early, self.store.gather(layer, staged=chosen.more)]
        keys, values = merged(wanted, parts)
        for part in parts:
            part.release()
        return Gathered(keys, values, wanted)

    def attended(self, layer: int, weights: Floats | None = None) -> None:
        """Tells the policy that `layer` has attended, so that it updates tables and pools; not waited for.

        `weights` [batch, heads, tokens]: of all that `step` returned, for policies that need them.
        """
        selection, step = self._chosen.pop(layer), self.store.step
        self._later(lambda: self._update(layer, selection, weights, step))

    def _update(self, layer: int, selection: Selection, weights: Floats | None, step: int) -> None:
        with self.timeline.span(CPU, UPDATE, layer, step):
            self.policy.attended(layer, selection, weights)

    def finish_step(self, ids: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        """Waits for all updates and ends the step, or the prefill; `ids` and `positions` [batch, tokens] of its tokens."""
        self._wait_for_updates()
        self.store.commit(ids, positions)

    # The worker

    def _now(self, job: Callable[[], Result]) -> Result:
        """Runs what only the worker may do, after all that it was asked for before, and returns its result."""
        return job() if self._worker is None else self._worker.submit(job).result()

    def _later(self, job: Callable[[], None]) -> None:
        if self._worker is None:
            job()
        else:
            self._updates.append(self._worker.submit(job))

    def _wait_for_updates(self) -> None:
        updates, self._updates = self._updates, []
        wait(updates)
        for update in updates:
            update.result()

    def rest(self) -> None:
        """Returns when the worker does nothing, and forgets what it looked ahead for: before the store is cropped or so."""
        started, self._ahead = list(self._ahead.values()), {}
        for one in started:
            if not one.cancel():
                one.exception()
        self._wait_for_updates()

    def close(self) -> None:
        """Ends the worker after the job that it is at; what was not begun is dropped, and so are errors not raised yet."""
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)
        self._ahead.clear()
        self._updates.clear()
        self._chosen.clear()

    def __enter__(self) -> KvEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
