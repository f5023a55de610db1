"""One trace through a plan: the space of its blocks, its cells in groups that fit in memory, the rows they give."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from llmcache.cache.cachesizes import resolved
from llmcache.cache.grid import (
    BATCH_ROWS,
    Cell,
    CurveCell,
    Interrupted,
    PolicyCell,
    Stop,
    TotalsCell,
    ahead,
    parts_of,
    replay,
)
from llmcache.cache.latency import check_times
from llmcache.cache.plan import Plan, Progress
from llmcache.cache.policies import policy_class
from llmcache.cache.results import Result, Simulation, Summary, TraceCurve
from llmcache.errors import DataError
from llmcache.trace.record import BlockSpace
from llmcache.units import BLOCK_BYTES

if TYPE_CHECKING:
    from llmcache.cache.models import Models
    from llmcache.trace.record import Trace, TraceReader


class TraceRun:
    """Runs `plan` on one trace. Cells whose states together need more than `memory_bytes` take turns."""

    def __init__(
        self,
        plan: Plan,
        name: str,
        source: Trace | TraceReader,
        models: Models,
        *,
        pool: Executor,
        stop: Stop,
        progress: Progress | None,
        memory_bytes: int,
    ) -> None:
        self._plan = plan
        self._name = name
        self._source = source
        self._models = models
        self._pool = pool
        self._stop = stop
        self._progress = progress
        self._memory_bytes = memory_bytes
        self._rows = 0
        self._first_ns = self._last_ns = 0
        self._done = 0
        self._in_all = 0

    def run(self) -> Simulation:
        """Returns the rows; `Interrupted` once `stop` is set, DataError where the trace does not serve the plan."""
        plan = self._plan
        self._refuse_inexact()
        space = self._space()
        sizes = resolved(plan.sizes, space.footprint)
        self._in_all = self._rows * (1 + plan.curves + len(plan.policies) * len(sizes))
        totals = TotalsCell(space.blocks, plan.meter())
        curve = CurveCell(space.blocks) if plan.curves else None
        firsts: list[Cell] = [totals] if curve is None else [totals, curve]
        todo = [(policy, size) for policy in plan.policies for size in sizes]
        results: list[Result] = []
        summary = None
        while summary is None or todo:
            cells = self._next_cells(todo, space, sum(cell.state_bytes() for cell in firsts))
            self._replay(space, firsts, [cell for _, cell in cells])
            summary = summary or self._summary(space, totals)
            results += [self._result(summary, size, cell) for size, cell in cells]
            firsts = []
        curves = () if curve is None else (TraceCurve(self._name, curve.distances.curve()),)
        return Simulation(plan.model, plan.period_ns, (summary,), tuple(results), curves)

    def _refuse_inexact(self) -> None:
        offline = [name for name in self._plan.policies if policy_class(name).offline]
        if not offline:
            return
        from llmcache.cache.policies.belady import why_not_exact

        reason = why_not_exact(self._source.provenance)
        if reason is not None:
            raise DataError(
                f"provenance: {offline[0]} cannot be exact on '{self._name}': {reason}",
                f"leave {offline[0]} out of --policy",
            )

    def _space(self) -> BlockSpace:
        """Reads the trace once: its blocks, the number of its rows, and whether its times serve the plan."""
        space = BlockSpace.of(self._seen(self._source.batches(BATCH_ROWS)))
        if self._plan.period_ns is not None and self._rows > 1:
            check_times(self._first_ns, self._last_ns)
        return space

    def _seen(self, batches: Iterable[Trace]) -> Iterator[Trace]:
        for batch in ahead(iter(batches)):
            if self._stop.is_set:
                raise Interrupted
            if self._rows == 0 and len(batch):
                self._first_ns = int(batch.t_ns[0])
            if len(batch):
                self._last_ns = int(batch.t_ns[-1])
            self._rows += len(batch)
            yield batch

    def _next_cells(self, todo: list[tuple[str, int]], space: BlockSpace, used_bytes: int) -> list[tuple[int, PolicyCell]]:
        """Takes from `todo` what fits in memory, one at least, and returns it as (size in bytes, cell)."""
        cells: list[tuple[int, PolicyCell]] = []
        while todo and (not cells or used_bytes < self._memory_bytes):
            policy, size = todo.pop(0)
            cell = PolicyCell(policy_class(policy)(size // BLOCK_BYTES, space.blocks), self._plan.meter())
            cell.policy.describe(space, self._source.files, self._source.provenance, self._models)
            cells.append((size, cell))
            used_bytes += cell.state_bytes()
        return cells

    def _replay(self, space: BlockSpace, firsts: list[Cell], cells: list[PolicyCell]) -> None:
        online = [cell for cell in cells if not cell.policy.offline]
        offline = [cell for cell in cells if cell.policy.offline]
        parts = parts_of(self._source.batches(BATCH_ROWS), space)
        replay(parts, [*firsts, *online], offline, self._pool, self._stop, self._advance)

    def _advance(self, work: int) -> None:
        self._done += work
        if self._progress is not None:
            self._progress(self._name, self._done, self._in_all)

    def _summary(self, space: BlockSpace, totals: TotalsCell) -> Summary:
        return Summary(
            trace=self._name,
            rows=self._rows,
            accesses=totals.reads + totals.writes,
            reads=totals.reads,
            writes=totals.writes,
            footprint_blocks=space.footprint,
            footprint_bytes=space.footprint * BLOCK_BYTES,
            tier=self._source.provenance.tier,
            lost_events=self._source.provenance.lost_events,
            cold_stalls=tuple(totals.meter.stalls()) if totals.meter is not None else (),
        )

    def _result(self, summary: Summary, size: int, cell: PolicyCell) -> Result:
        return Result.of(
            summary,
            self._plan.model,
            policy=cell.policy.name,
            title=cell.policy.title,
            cache_bytes=size,
            hits=cell.hits,
            read_hits=cell.read_hits,
            evictions=cell.policy.evictions,
            stalls=cell.meter.stalls() if cell.meter is not None else (),
        )
