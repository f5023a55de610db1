"""A measured run of one policy: store, engine and stream, decode step by decode step; only the step is on the clock.

Keys, values and queries of a step are made before its clock starts. While weights for policies that need them are
computed, it is stopped: an accelerator has them anyway.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmcache.kv.bench.accelerator import Accelerator
from llmcache.kv.bench.results import Observed, Row
from llmcache.kv.bench.variants import Variant
from llmcache.kv.csd import PROFILES, CsdProfile, Report
from llmcache.kv.importance.bkp import cpu_pages_for
from llmcache.kv.pipeline import KvEngine, Timeline, attention
from llmcache.kv.pipeline.timeline import ATTEND, COMPUTE, DEVICE, STAGES
from llmcache.kv.policies import policy_class
from llmcache.kv.policies.base import KvPolicy
from llmcache.kv.tiers import Gathered, KvStore, StoreConfig, Traffic
from llmcache.kv.workload import StreamSpec, SyntheticStream

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Setup:
    """What all policies of a benchmark have in common.

    `steps` decode steps are measured, after `warm_up` that are not. `beta`: Mc / Ms; None: all in memory.
    `memory_bytes`: M0, of all layers and sequences. `exact`: a layer that was looked ahead for is evaluated again with its
    true queries. `device`: "csd" (*emulated*, with the speeds of `csd`) or "file", for
    policies that are meant for a device; all others read the file.
    """

    spec: StreamSpec
    accelerator: Accelerator
    directory: Path
    steps: int = 16
    warm_up: int = 4
    alpha: float | None = None
    token_budget: int | None = None
    block_tokens: int = 256
    beta: float | None = 1.0
    memory_bytes: int | None = None
    sink_tokens: int = 16
    window_tokens: int = 32
    device: str = "csd"
    csd: CsdProfile = field(default_factory=lambda: PROFILES["smartssd"])
    threads: int | None = None
    exact: bool = False

    @property
    def cpu_pages(self) -> int | None:
        """Capacity of the processor's pool, pages of a layer and sequence; None: no bound."""
        if self.beta is None and self.memory_bytes is None:
            return None
        shape, spec = self.spec.shape, self.spec
        length = spec.context + self.warm_up + self.steps
        return cpu_pages_for(shape, length, self.beta, self.memory_bytes, spec.batch)

    def conditions(self) -> dict[str, Any]:
        """Returns what was set, in base units, for tables and JSON."""
        return {
            "stream": self.spec.to_json(),
            "context": self.spec.context,
            "batch": self.spec.batch,
            "layers": self.spec.layers,
            "steps": self.steps,
            "alpha": self.alpha,
            "token_budget": self.token_budget,
            "score block": self.block_tokens,
            "exact": self.exact or None,
            "compute": self.accelerator.title,
            "device": f"emulated, profile {self.csd.name}" if self.device == "csd" else "none: the file is read",
            "directory": str(self.directory),
        }


class Inputs(NamedTuple):
    """What a layer is given in one step."""

    queries: Floats
    estimate: Floats
    keys: NDArray[Any]
    values: NDArray[Any]


class Session:
    """One policy over a store of its own, in a file that is removed at the end; a context manager."""

    def __init__(self, setup: Setup, variant: Variant) -> None:
        self.setup, self.variant = setup, variant
        kind = policy_class(variant.policy)
        ssd = setup.device if kind.ssd == "csd" else "file"
        emulated = [name for name, on in ((COMPUTE, setup.accelerator.emulated), (DEVICE, ssd == "csd")) if on]
        self.timeline = Timeline(emulated)
        self.stream = SyntheticStream(setup.spec)
        self._path = setup.directory / f"{variant.name}-{id(self):x}.kv"
        self._steps_ns: list[int] = []
        self._prefill_ns = self._attended = 0
        with contextlib.ExitStack() as stack:
            self.store = KvStore(self._config(ssd))
            stack.callback(self.store.discard)
            self.policy = self._policy(kind)
            app = variant.app and getattr(kind, "ahead", False)
            self.engine = stack.enter_context(self._engine(app))
            self._open = stack.pop_all()
        self._traffic, self._device = Traffic(), Report()

    def _config(self, ssd: str) -> StoreConfig:
        setup = self.setup
        bounded = setup.cpu_pages is not None
        return StoreConfig(
            setup.spec.shape, setup.spec.batch, setup.sink_tokens, setup.window_tokens, setup.cpu_pages,
            self._path if bounded else None, ssd, setup.csd, threads=setup.threads,
        )  # fmt: skip

    def _policy(self, kind: type[KvPolicy]) -> KvPolicy:
        setup = self.setup
        settings = kind.settings_class(setup.alpha, setup.token_budget, setup.block_tokens, seed=setup.spec.seed)
        if self.variant.without:
            settings = replace(settings, **{part: False for part in self.variant.without})  # type: ignore[arg-type]
        return kind(self.store, settings, self.timeline)

    def _engine(self, app: bool) -> KvEngine:
        return KvEngine(self.store, self.policy, app=app, exact=self.setup.exact, timeline=self.timeline)

    def prefill(self) -> None:
        """Stores the prompt; the policy takes note of its last queries."""
        begin_ns = time.perf_counter_ns()
        spec = self.setup.spec
        chunks = list(self.stream.chunks())
        for part in chunks:
            for layer in range(spec.layers):
                asked = self.stream.prompt_queries(layer) if part is chunks[-1] and self.policy.needs_weights else None
                self.engine.prefill(layer, asked, *self.stream.keys_values(layer, part))
            self._finish(part)
        self._prefill_ns = time.perf_counter_ns() - begin_ns

    def _finish(self, part: range) -> None:
        ids = np.tile(self.stream.ids(part), (self.setup.spec.batch, 1))
        self.engine.finish_step(ids, np.tile(np.arange(part.start, part.stop), (len(ids), 1)))

    def _inputs(self, step: int) -> list[Inputs]:
        at = range(self.setup.spec.context + step, self.setup.spec.context + step + 1)
        return [
            Inputs(self.stream.queries(layer, step), self.stream.estimate(layer, step), *self.stream.keys_values(layer, at))
            for layer in range(self.setup.spec.layers)
        ]

    def decode(self, step: int) -> int:
        """Does decode step `step` (from 0, in order); returns how long it took, ns, and notes it after the warm-up."""
        if step == self.setup.warm_up:
            self._begin()
        inputs = self._inputs(step)
        held: list[Gathered] = []
        begin_ns = self.timeline.now_ns()
        for layer, given in enumerate(inputs):
            held.append(self.engine.step(layer, given.queries, given.keys, given.values))
            if layer + 1 < len(inputs):
                self.engine.ahead(layer + 1, inputs[layer + 1].estimate)
            with self.timeline.span(COMPUTE, ATTEND, layer, self.store.step):
                self.setup.accelerator.compute(given.queries, held[-1])
            self._attended = held[-1].positions.shape[2]
            if not self.policy.needs_weights:
                held.pop().release()
                self.engine.attended(layer)
        with self.timeline.paused():
            weights = [attention(inputs[at].queries, found.keys, found.values)[1] for at, found in enumerate(held)]
        for layer, own in enumerate(weights):
            self.engine.attended(layer, own)
        self._finish(range(self.store.length, self.store.length + 1))
        taken_ns = self.timeline.now_ns() - begin_ns
        if step >= self.setup.warm_up:
            self._steps_ns.append(taken_ns)
        return taken_ns

    def _begin(self) -> None:
        """Notes what prefill and warm-up have moved, so that only the measured steps count."""
        self._traffic = snapshot(self.store.traffic)
        report = self.store.device_report
        self._device = Report() if report is None else replace(report)
        self.timeline.clear()

    def row(self) -> Row:
        """Returns what the steps after the warm-up took, medians and means a step."""
        steps = self.timeline.steps
        token_ns = statistics.median(self._steps_ns)
        moved = since(self._traffic, self.store.traffic)
        return Row(
            policy=self.variant.name,
            title=self.variant.titled(self.policy.title),
            token_ns=token_ns,
            stages_ns={stage: self._median_ns(stage) for stage in STAGES},
            exposed_ns=token_ns - self._median_ns(ATTEND),
            idle_share=1 - sum(self.timeline.busy_ns(step, COMPUTE) for step in steps) / sum(self._steps_ns),
            moved_bytes={
                f"{source} to {target}, {why}": size / len(steps)
                for (source, target, why), size in sorted(moved.moved_bytes.items())
            },
            beta=self._beta(),
            observed=self._observed(moved),
        )

    def _median_ns(self, stage: str) -> float:
        return statistics.median(self.timeline.busy_ns(step, stage=stage) for step in self.timeline.steps)

    def _beta(self) -> float | None:
        """Mc / Ms as it came out, in whole pages."""
        pool, pages = self.setup.cpu_pages, self.setup.spec.shape.pages_of(self.store.length)
        return None if pool is None or pool >= pages else pool / (pages - pool)

    def _observed(self, moved: Traffic) -> Observed:
        return Observed(
            steps_ns=tuple(self._steps_ns),
            prefill_ns=self._prefill_ns,
            attended_tokens=self._attended,
            hit_ratio=moved.hit_ratio,
            pages_up=moved.pages_up,
            pages_down=moved.pages_down,
            ping_pong_pages=moved.ping_pong_pages,
            ping_pong_share=moved.ping_pong_share,
            device=self._device_since(),
            timeline=self.timeline.last_step().to_json(),
        )

    def _device_since(self) -> dict[str, Any] | None:
        now = self.store.device_report
        if now is None:
            return None
        taken = {one.name: getattr(now, one.name) - getattr(self._device, one.name) for one in fields(Report)}
        return {"emulated": True, "profile": self.setup.csd.name, **taken}

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.__exit__(kind, error, trace)


def snapshot(traffic: Traffic) -> Traffic:
    """Returns a copy of the counters as they are."""
    return since(Traffic(), traffic)


def since(before: Traffic, now: Traffic) -> Traffic:
    """Returns what was counted after `before`."""
    counted = {
        name: getattr(now, name) - getattr(before, name)
        for name in ("pages_up", "pages_down", "ping_pong_pages", "hits_cpu", "hits_ssd")
    }
    return Traffic(now.moved_bytes - before.moved_bytes, **counted)
