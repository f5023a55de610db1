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

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmcache.arrays import Flags, Floats, Int64s
from llmcache.kv.pipeline.timeline import CPU, EVALUATE, FETCH, LINK, NO_TIMELINE, UPDATE, Span, Timeline
from llmcache.kv.tiers import FastTier, Gathered, KvStore, Selection, Staged

if TYPE_CHECKING:
    from llmcache.kv.policies.base import KvPolicy

Rows = NDArray[Any]
Result = TypeVar("Result")


class Choice(NamedTuple):
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
        self._jobs: list[Future[Any]] = []  # not done, when the last of them was begun
        self.looked_ahead: dict[int, Future[Choice]] = {}  # by layer, until its step
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
            step = self.store.step
            self.looked_ahead[layer] = self._submit(self._worker, lambda: self._evaluate(layer, queries, step))

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
        found = self.store.complete(chosen.staged)
        return self._completed(chosen, found) if chosen.corrected else found

    def _choose(self, layer: int, queries: Floats) -> Choice:
        started, step = self.looked_ahead.pop(layer, None), self.store.step
        if started is None:
            return self._now(lambda: self._evaluate(layer, queries, step))
        early = started.result()
        return self._now(lambda: self._corrected(layer, queries, step, early)) if self.exact else early

    def _evaluate(self, layer: int, queries: Floats, step: int) -> Choice:
        selection = self._select(layer, queries, step)
        return Choice(selection, self._stage(layer, selection, step))

    def _select(self, layer: int, queries: Floats, step: int) -> Selection:
        begin_ns = self.timeline.now_ns()
        selection = self.policy.select(layer, queries)
        if not self.timeline.has(EVALUATE, layer, step, begin_ns):  # a policy of several resources records its own
            self.timeline.add(Span(CPU, EVALUATE, layer, step, begin_ns, self.timeline.now_ns()))
        return selection

    def _stage(self, layer: int, selection: Selection, step: int) -> Staged:
        with self.timeline.span(LINK, FETCH, layer, step):
            return self.store.stage(layer, selection)

    def _corrected(self, layer: int, queries: Floats, step: int, early: Choice) -> Choice:
        """Returns the choice by the true queries, with what `early` has fetched of it."""
        selection = self._select(layer, queries, step)
        lacking = missing(selection.positions, early.staged.positions)
        more = self._stage(layer, Selection(lacking), step) if lacking.shape[2] else None
        return Choice(selection, early.staged, True, more)

    def _completed(self, chosen: Choice, early: Gathered) -> Gathered:
        """Returns the rows of a corrected choice, from those that were fetched early and those that were missing."""
        lead = chosen.staged.middle.start * self.store.shape.page_tokens
        behind = lead + chosen.staged.positions.shape[2]
        around = early.positions[..., :lead], chosen.selection.positions, early.positions[..., behind:]
        wanted = np.concatenate(around, axis=2)
        parts = [early] if chosen.more is None else [early, self.store.complete(chosen.more)]
        keys, values = merged(wanted, parts)
        for part in parts:
            part.release()
        return Gathered(keys, values, wanted)

    def unseen(self, layer: int, queries: Floats, keys: Rows) -> tuple[Floats, Floats] | None:
        """Returns what stands for what `step` of these `queries` and `keys` left out of `layer`, until it has `attended`.

        See `KvPolicy.unseen`.
        """
        return self.policy.unseen(layer, self._chosen[layer], queries, keys)

    def attended(self, layer: int, weights: Floats | None = None) -> None:
        """Tells the policy that `layer` has attended, so that it updates tables and pools; not waited for.

        `weights` [batch, heads, tokens]: of all that `step` returned, for policies that need them.
        """
        selection, step = self._chosen.pop(layer), self.store.step
        self._later(lambda: self._update(layer, selection, weights, step))

    def _update(self, layer: int, selection: Selection, weights: Floats | None, step: int) -> None:
        with self.timeline.span(CPU, UPDATE, layer, step):
            self.policy.attended(layer, selection, weights)

    def finish_step(self, ids: Int64s, positions: Int64s) -> None:
        """Waits for all updates and ends the step, or the prefill; `ids` and `positions` [batch, tokens] of its tokens."""
        self._wait_for_updates()
        self.store.commit(ids, positions)

    # The worker

    def _submit(self, worker: ThreadPoolExecutor, job: Callable[[], Result]) -> Future[Result]:
        begun = worker.submit(job)
        self._jobs = [*(one for one in self._jobs if not one.done()), begun]
        return begun

    def _now(self, job: Callable[[], Result]) -> Result:
        """Runs what only the worker may do, after all that it was asked for before, and returns its result."""
        return job() if self._worker is None else self._submit(self._worker, job).result()

    def _later(self, job: Callable[[], None]) -> None:
        if self._worker is None:
            job()
        else:
            self._updates.append(self._submit(self._worker, job))

    def _wait_for_updates(self) -> None:
        updates, self._updates = self._updates, []
        wait(updates)
        for update in updates:
            update.result()

    def rest(self) -> None:
        """Returns when the worker does nothing, and forgets what it looked ahead for: before the store is cropped or so."""
        started, self.looked_ahead = list(self.looked_ahead.values()), {}
        for one in started:
            if not one.cancel():
                one.exception()
        self._wait_for_updates()

    def close(self) -> None:
        """Ends the worker after the job that it is at; what was not begun is dropped, and so are errors not raised yet."""
        if self._worker is not None:
            # Not joined: a cache may be collected amid the start of another thread, which holds a lock that a join needs.
            self._worker.shutdown(wait=False)
            wait([one for one in self._jobs if not one.cancel()])
        self.looked_ahead.clear()
        self._updates.clear()
        self._chosen.clear()

    def __enter__(self) -> KvEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


# Rows of several gatherings, put together as one selection wants them: what was looked ahead for is not read twice


def missing(wanted: Int64s, have: Int64s) -> Int64s:
    """Returns what of `wanted` [batch, kv_heads, k] is not in `have` [.., m], int64 [batch, kv_heads, n], ascending.

    n is the most that one head misses; a head that misses fewer gets others of `wanted`, or its last again and again.
    """
    batch, heads, _ = wanted.shape
    found = [[np.setdiff1d(wanted[b, h], have[b, h]) for h in range(heads)] for b in range(batch)]
    most = max((len(head) for row in found for head in row), default=0)
    out = np.empty((batch, heads, most), np.int64)
    for b in range(batch):
        for h in range(heads):
            others = np.setdiff1d(wanted[b, h], found[b][h])
            row = np.sort(np.concatenate([found[b][h], others[: most - len(found[b][h])]]))
            out[b, h, : len(row)], out[b, h, len(row) :] = row, row[-1:]
    return out


def merged(wanted: Int64s, parts: Sequence[Gathered]) -> tuple[Rows, Rows]:
    """Returns keys and values [batch, kv_heads, k, dim] of the positions `wanted` [batch, kv_heads, k] from `parts`.

    Each position must be in one of the parts at least.
    """
    positions = np.concatenate([part.positions for part in parts], axis=2)
    order = np.argsort(positions, axis=2, kind="stable")
    ordered = np.take_along_axis(positions, order, axis=2)
    places = np.empty(wanted.shape, np.int64)
    for index in np.ndindex(wanted.shape[:2]):
        places[index] = np.searchsorted(ordered[index], wanted[index])
    rows = np.take_along_axis(order, places, axis=2)[..., None]
    keys, values = (
        np.take_along_axis(np.concatenate(sides, axis=2), rows, axis=2)
        for sides in ([part.keys for part in parts], [part.values for part in parts])
    )
    return keys, values


# The reference for what selections lose


def widened(rows: Rows) -> Floats:
    """Returns keys or values as float32; uint16 are the bits of bfloat16."""
    if rows.dtype == np.uint16:
        wide: Floats = (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return wide
    return rows.astype(np.float32, copy=False)


def attention(queries: Floats, keys: Rows, values: Rows, hidden: Flags | None = None) -> tuple[Floats, Floats]:
    """Attention of one decode step: the outputs [batch, heads, value_dim], the weights [batch, heads, tokens], of sum 1.

    Rows that are `hidden` [batch, kv_heads, tokens] are not attended to: weights of 0.

    `queries` [batch, heads, dim] float32; `keys` [batch, kv_heads, tokens, dim] and `values` likewise, float32, float16
    or the bits of bfloat16; heads is a multiple of kv_heads (GQA). The same rows in the same order give the same bits.
    """
    batch, heads, dim = queries.shape
    grouped = queries.reshape(batch, keys.shape[1], -1, dim) * np.float32(1 / math.sqrt(dim))
    # Not by matrix products: these few rows are no work for the threads of a BLAS, which wait by spinning.
    logits: Floats = np.einsum("bhgd,bhtd->bhgt", grouped, widened(keys))
    if hidden is not None:
        np.copyto(logits, -np.inf, where=hidden[:, :, None])
    logits -= logits.max(axis=3, keepdims=True)
    weights = np.exp(logits, out=logits)
    weights /= weights.sum(axis=3, keepdims=True)
    out: Floats = np.einsum("bhgt,bhtd->bhgd", weights, widened(values))
    return out.reshape(batch, heads, -1), weights.reshape(batch, heads, -1)
