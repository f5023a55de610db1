"""KvEngine: decode steps of a policy over a store; the next layer is evaluated and fetched while the current one computes.

Source: hillinfer.txt, section 3.3, "Adaptive Prefetch-based Pipeline".

Concurrency: with lookahead (`app`), a single worker thread evaluates, fetches and updates, in the order of submission,
so only it uses the store's device and changes the pools and the policy's tables. The caller's thread appends tokens to
layers that the worker has finished, and completes their staged rows. `finish_step` waits for the worker, so that choices
do not depend on the speed of the threads, and raises the errors of updates.
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
    """The selection for a layer, and its rows; `more`: rows that lookahead had not fetched for a `corrected` selection."""

    selection: Selection
    staged: Staged
    corrected: bool = False
    more: Staged | None = None


class KvEngine:
    """Runs `policy` over `store`, layer by layer; a context manager, which leaves the store open.

    `app`: enable lookahead. `exact`: evaluate a layer that was looked at ahead again with its true queries, and fetch the
    missing rows. `fast`: a tier from which steps gather rows, without lookahead.
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
        self._jobs: list[Future[Any]] = []  # jobs that were not done at the last submission
        self.looked_ahead: dict[int, Future[Choice]] = {}  # by layer, until its step
        self._updates: list[Future[None]] = []
        self._chosen: dict[int, Selection] = {}

    # Prefill

    def prefill(self, layer: int, queries: Floats | None, keys: Rows, values: Rows) -> None:
        """Append a part of a prompt to a layer; call `finish_step` after the last layer.

        `queries` [batch, heads, rows, dim] float32 of the last `rows` tokens, or None if the policy needs none; `keys` and
        `values` [batch, kv_heads, tokens, dim].
        """
        start = self.store.length + keys.shape[2]
        self.store.append(layer, keys, values)
        if queries is not None:
            last_queries = queries
            self._later(lambda: self.policy.prefilled(layer, last_queries, start - last_queries.shape[2]))

    # A decode step

    def ahead(self, layer: int, queries: Floats) -> None:
        """Start the evaluation and fetch for `layer` with estimated queries [batch, heads, dim], if lookahead is enabled."""
        if self._worker is not None:
            step = self.store.step
            self.looked_ahead[layer] = self._submit(self._worker, lambda: self._evaluate(layer, queries, step))

    def step(self, layer: int, queries: Floats, keys: Rows, values: Rows) -> Gathered:
        """Append the newest token to `layer`, and return the rows that its queries attend to, including its own.

        `queries` [batch, heads, dim] float32, `keys` and `values` [batch, kv_heads, 1, dim]. It raises the errors of the
        layer's evaluation and fetch, and can be called again: a token that the store has is not appended twice. With a fast
        tier, the rows are those of `FastTier.rows`.
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
        if not self.timeline.has(EVALUATE, layer, step, begin_ns):  # a policy with several resources records its own spans
            self.timeline.add(Span(CPU, EVALUATE, layer, step, begin_ns, self.timeline.now_ns()))
        return selection

    def _stage(self, layer: int, selection: Selection, step: int) -> Staged:
        with self.timeline.span(LINK, FETCH, layer, step):
            return self.store.stage(layer, selection)

    def _corrected(self, layer: int, queries: Floats, step: int, early: Choice) -> Choice:
        selection = self._select(layer, queries, step)
        not_fetched = missing(selection.positions, early.staged.positions)
        more = self._stage(layer, Selection(not_fetched), step) if not_fetched.shape[2] else None
        return Choice(selection, early.staged, True, more)

    def _completed(self, chosen: Choice, early: Gathered) -> Gathered:
        lead = chosen.staged.middle.start * self.store.shape.page_tokens
        end = lead + chosen.staged.positions.shape[2]
        positions = early.positions[..., :lead], chosen.selection.positions, early.positions[..., end:]
        wanted = np.concatenate(positions, axis=2)
        parts = [early] if chosen.more is None else [early, self.store.complete(chosen.more)]
        keys, values = merged(wanted, parts)
        for part in parts:
            part.release()
        return Gathered(keys, values, wanted)

    def unseen(self, layer: int, queries: Floats, keys: Rows) -> tuple[Floats, Floats] | None:
        """Return `KvPolicy.unseen` for the last `step` of `layer`; valid until `attended`."""
        return self.policy.unseen(layer, self._chosen[layer], queries, keys)

    def attended(self, layer: int, weights: Floats | None = None) -> None:
        """Update the policy's tables and the pools after the attention of `layer`; with lookahead, in the background.

        `weights` [batch, heads, tokens] of all rows that `step` returned, for policies that need them.
        """
        selection, step = self._chosen.pop(layer), self.store.step

        def update() -> None:
            with self.timeline.span(CPU, UPDATE, layer, step):
                self.policy.attended(layer, selection, weights)

        self._later(update)

    def finish_step(self, ids: Int64s, positions: Int64s) -> None:
        """Wait for all updates, and commit the ids and positions [batch, tokens] of the step or the prefill."""
        self._wait_for_updates()
        self.store.commit(ids, positions)

    # The worker

    def _submit(self, worker: ThreadPoolExecutor, job: Callable[[], Result]) -> Future[Result]:
        submitted = worker.submit(job)
        self._jobs = [*(future for future in self._jobs if not future.done()), submitted]
        return submitted

    def _now(self, job: Callable[[], Result]) -> Result:
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
        """Wait until the worker is idle, and discard lookahead results, before the store is cropped or reordered."""
        started, self.looked_ahead = list(self.looked_ahead.values()), {}
        for future in started:
            if not future.cancel():
                future.exception()
        self._wait_for_updates()

    def close(self) -> None:
        """Stop the worker after its current job; drop queued jobs, and errors that were not raised yet."""
        if self._worker is not None:
            # No join: it needs a lock that a starting thread has, and a garbage collection in that thread may call this.
            self._worker.shutdown(wait=False)
            wait([future for future in self._jobs if not future.cancel()])
        self.looked_ahead.clear()
        self._updates.clear()
        self._chosen.clear()

    def __enter__(self) -> KvEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


# Merging rows of several gathers, so that rows fetched ahead are not read twice


def missing(wanted: Int64s, have: Int64s) -> Int64s:
    """Return the positions of `wanted` [batch, kv_heads, k] that are not in `have` [..., m], as int64 [batch, kv_heads, n].

    n is the largest number for a head; heads with fewer get other positions of `wanted`, or their last one repeated.
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
    """Return keys and values [batch, kv_heads, k, dim] of `wanted` [batch, kv_heads, k], which `parts` must contain."""
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


# Attention in numpy: the reference for the error of selections


def widened(rows: Rows) -> Floats:
    """Return keys or values as float32; uint16 are the bits of bfloat16."""
    if rows.dtype == np.uint16:
        wide: Floats = (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return wide
    return rows.astype(np.float32, copy=False)


def attention(queries: Floats, keys: Rows, values: Rows, hidden: Flags | None = None) -> tuple[Floats, Floats]:
    """Return the outputs [batch, heads, value_dim] and weights [batch, heads, tokens] of attention in a decode step.

    `queries` [batch, heads, dim] float32; `keys` and `values` [batch, kv_heads, tokens, dim], float32, float16 or the bits
    of bfloat16; `hidden` [batch, kv_heads, tokens]: rows of weight 0. The same rows in the same order give identical bits.
    """
    batch, heads, dim = queries.shape
    grouped = queries.reshape(batch, keys.shape[1], -1, dim) * np.float32(1 / math.sqrt(dim))
    # Not by matrix products: for a few rows, the threads of a BLAS cost more, because they spin while they wait.
    logits: Floats = np.einsum("bhgd,bhtd->bhgt", grouped, widened(keys))
    if hidden is not None:
        np.copyto(logits, -np.inf, where=hidden[:, :, None])
    logits -= logits.max(axis=3, keepdims=True)
    weights = np.exp(logits, out=logits)
    weights /= weights.sum(axis=3, keepdims=True)
    out: Floats = np.einsum("bhgt,bhtd->bhgd", weights, widened(values))
    return out.reshape(batch, heads, -1), weights.reshape(batch, heads, -1)
