"""One decode step of each policy over a *synthetic* stream, *measured* on this machine; the policies alternate.

The accelerator and the computational SSD are *emulated*. The computation of keys, values and queries is not timed, nor
that of weights for policies that need them, because an accelerator has the weights anyway.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from llmcache.arrays import Floats
from llmcache.errors import MissingRequirement, UsageError
from llmcache.kv.bench.results import MEASURED, Bench, Marks, Observed, Row
from llmcache.kv.pipeline import KvEngine, Timeline, attention
from llmcache.kv.pipeline.timeline import ATTEND, COMPUTE, DEVICE, STAGES
from llmcache.kv.planning.hardware import Hardware
from llmcache.kv.planning.latency import DESIGNS, Variant
from llmcache.kv.policies import policy_class
from llmcache.kv.tiers import Gathered, KvStore, StoreConfig, Traffic, repeated
from llmcache.kv.workload import StreamSpec, SyntheticStream
from llmcache.memory import machine_memory
from llmcache.model.shapes import ModelShape
from llmcache.papers.csd import PROFILES, CsdProfile, Report
from llmcache.units import format_duration, format_size

FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)  # betas of a sweep, as multiples of the expected best one
SPARE_SHARE = 0.5  # share of the available memory that pools of alternating policies may use together
SPEED_RUNS = 15
CHUNK_TOKENS = 2048  # tokens of a prompt that are computed and stored at a time
_NS = 1e9

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Accelerator:
    """Computes a layer: sleeps for the ns that `layer_ns` returns for a number of attended tokens (*emulated*).

    Without `layer_ns`, the processor computes only the attention, in float32 with numpy.
    """

    title: str = "this processor, attention alone, numpy float32"
    layer_ns: Callable[[int], float] | None = None

    def compute(self, queries: Floats, gathered: Gathered) -> None:
        """Attend with `queries` [batch, heads, dim]; return when the layer is computed."""
        if self.layer_ns is None:
            attention(queries, gathered.keys, gathered.values, repeated(gathered.positions))
        else:
            time.sleep(self.layer_ns(gathered.positions.shape[2]) / _NS)


def modelled(hardware: Hardware, model: ModelShape, batch: int) -> Accelerator:
    """Return an emulated accelerator with the roofline of `hardware` (see `planning.latency`), without its host link."""

    def layer_ns(tokens: int) -> float:
        attended = 2.0 * model.key_bytes * tokens * batch
        flops = batch * (2.0 * model.layer_parameters + 4.0 * model.heads * model.head_dim * tokens)
        reading = (model.layer_weight_bytes(batch) + attended) / hardware.gpu_bytes_per_s
        return _NS * max(reading, flops / hardware.gpu_flops)

    return Accelerator(f"emulated, that of {hardware.title}, with {model.name}", layer_ns)


def fixed(duration_ns: int) -> Accelerator:
    """Return an emulated accelerator that takes `duration_ns` for every layer."""
    return Accelerator(f"emulated, {format_duration(duration_ns)} per layer", lambda tokens: duration_ns)


def variants_of(text: str, without: Sequence[str] = ()) -> list[Variant]:
    """Return the variants in the comma-separated `text`; `without`: designs to leave out of every HillInfer.

    UsageError: none, a duplicate, an unknown design, or a design of another policy.
    """
    found: list[Variant] = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        policy, *left_out = name.split("-no-")
        if left_out and (policy != "hillinfer" or not set(left_out) <= set(DESIGNS)):
            known = ", ".join(f"hillinfer-no-{part}" for part in DESIGNS)
            raise UsageError(f"--policy: there is no policy '{name}'", f"variants: {known}")
        left_out_parts = {*left_out, *(without if policy == "hillinfer" else ())}
        variant = Variant(policy, tuple(part for part in DESIGNS if part in left_out_parts))
        if variant in found:
            raise UsageError(f"--policy: '{name}' is named twice", "name each policy once")
        found.append(variant)
    if not found:
        raise UsageError(f"--policy: '{text}' names no policy", "for example: --policy full,hillinfer")
    return found


@dataclass(frozen=True)
class Setup:
    """Settings that all policies of a benchmark share.

    `beta`: Mc / Ms. `memory_bytes`: M0, of all layers and sequences. `exact`: a layer that was evaluated ahead is evaluated
    again with its true queries. `device`: "csd" (*emulated*, with the speeds of `csd`) or "file", for policies designed for
    a device; all others read the file.
    """

    spec: StreamSpec
    accelerator: Accelerator
    directory: Path
    steps: int = 16
    warm_up: int = 4
    alpha: float | None = None
    token_budget: int | None = None
    block_tokens: int = 256
    beta: float = 1.0
    memory_bytes: int | None = None
    device: str = "csd"
    csd: CsdProfile = field(default_factory=lambda: PROFILES["smartssd"])
    threads: int | None = None
    exact: bool = False

    @property
    def cpu_pages(self) -> int:
        """Capacity of the processor's pool, in pages per layer and sequence: as much as M0 allows.

        Source: hillinfer.txt, section 3.3, equation 1, which only says that Mc is below M0.
        """
        pages = self.spec.shape.pages_of(self.spec.context + self.warm_up + self.steps)
        pages = math.floor(pages * self.beta / (1 + self.beta))
        return pages if self.memory_bytes is None else min(pages, self.memory_bytes // self.page_bytes)

    @property
    def page_bytes(self) -> int:
        shape = self.spec.shape
        return shape.token_bytes * shape.page_tokens * shape.layers * self.spec.batch

    def conditions(self) -> dict[str, Any]:
        return {
            "stream": {"synthetic": True, **asdict(self.spec)},
            "context": self.spec.context,
            "batch": self.spec.batch,
            "layers": self.spec.layers,
            "steps": self.steps,
            "alpha": self.alpha,
            "token_budget": self.token_budget,
            "score block": self.block_tokens,
            "exact": self.exact or None,
            "compute": self.accelerator.title,
            "device": f"emulated, profile {self.csd.name}" if self.device == "csd" else "none, the host reads the file",
            "directory": str(self.directory),
        }


class PolicySession:
    """One policy over its own store, in a file that is removed at the end; a context manager."""

    def __init__(self, setup: Setup, variant: Variant) -> None:
        self.setup, self.variant = setup, variant
        kind = policy_class(variant.policy)
        ssd = setup.device if kind.ssd == "csd" else "file"
        emulated = [name for name, on in ((COMPUTE, setup.accelerator.layer_ns is not None), (DEVICE, ssd == "csd")) if on]
        self.timeline = Timeline(emulated)
        self.stream = SyntheticStream(setup.spec)
        self._steps_ns: list[int] = []
        self._prefill_ns = self._attended = 0
        settings = kind.settings_class(setup.alpha, setup.token_budget, setup.block_tokens)
        if variant.without:
            settings = replace(settings, **{part: False for part in variant.without if part != "app"})  # type: ignore[arg-type]
        with contextlib.ExitStack() as stack:
            path = stack.enter_context(workplace(setup.directory)) / f"{variant.name}.kv"
            config = StoreConfig(
                setup.spec.shape, setup.spec.batch, cpu_pages=setup.cpu_pages, path=path, ssd=ssd, profile=setup.csd,
                threads=setup.threads, interleaved=kind.interleaved,
            )  # fmt: skip
            self.store = KvStore(config)
            stack.callback(self.store.discard)
            self.policy = kind(self.store, settings, self.timeline)
            app = "app" not in variant.without and kind.ahead
            engine = KvEngine(self.store, self.policy, app=app, exact=setup.exact, timeline=self.timeline)
            self.engine = stack.enter_context(engine)
            self._open = stack.pop_all()
        self._traffic, self._device = Traffic(), Report()

    def prefill(self) -> None:
        begin_ns = time.perf_counter_ns()
        spec = self.setup.spec
        for first in range(0, spec.context, CHUNK_TOKENS):
            part = range(first, min(spec.context, first + CHUNK_TOKENS))
            last = part.stop == spec.context
            for layer in range(spec.layers):
                asked = self.stream.prompt_queries(layer) if last and self.policy.needs_weights else None
                self.engine.prefill(layer, asked, *self.stream.keys_values(layer, part))
            self._finish(part)
        self._prefill_ns = time.perf_counter_ns() - begin_ns

    def _finish(self, part: range) -> None:
        ids = np.tile(self.stream.ids(part), (self.setup.spec.batch, 1))
        self.engine.finish_step(ids, np.tile(np.arange(part.start, part.stop), (len(ids), 1)))

    def decode(self, step: int) -> None:
        if step == self.setup.warm_up:  # traffic of prefill and warm-up does not count
            self._traffic, report = since(Traffic(), self.store.traffic), self.store.device_report
            self._device = Report() if report is None else replace(report)
            self.timeline.clear()
        at, layers = self.setup.spec.context + step, range(self.setup.spec.layers)
        queries = [self.stream.queries(layer, step) for layer in layers]
        estimates = [self.stream.estimate(layer, step) for layer in layers]
        rows = [self.stream.keys_values(layer, range(at, at + 1)) for layer in layers]
        held: list[Gathered] = []
        begin_ns = self.timeline.now_ns()
        for layer in layers:
            held.append(self.engine.step(layer, queries[layer], *rows[layer]))
            if layer + 1 < len(layers):
                self.engine.ahead(layer + 1, estimates[layer + 1])
            with self.timeline.span(COMPUTE, ATTEND, layer, self.store.step):
                self.setup.accelerator.compute(queries[layer], held[-1])
            self._attended = int((~repeated(held[-1].positions)).sum(2).mean())
            if not self.policy.needs_weights:
                held.pop().release()
                self.engine.attended(layer)
        with self.timeline.paused():
            pairs = zip(queries, held, strict=False)  # empty for a policy that needs no weights
            weights = [attention(asked, found.keys, found.values)[1] for asked, found in pairs]
        for layer, own in enumerate(weights):
            self.engine.attended(layer, own)
        self._finish(range(self.store.length, self.store.length + 1))
        if step >= self.setup.warm_up:
            self._steps_ns.append(self.timeline.now_ns() - begin_ns)

    def row(self) -> Row:
        steps, store = self.timeline.steps, self.store
        token_ns = statistics.median(self._steps_ns)
        moved = since(self._traffic, store.traffic)
        pool, pages = self.setup.cpu_pages, self.setup.spec.shape.pages_of(store.length)
        device, report = None, store.device_report
        if report is not None:
            taken = {one.name: getattr(report, one.name) - getattr(self._device, one.name) for one in fields(Report)}
            device = {"emulated": True, "profile": self.setup.csd.name, **taken}
        return Row(
            policy=self.variant.name,
            title=self.variant.titled(self.policy.title),
            token_ns=token_ns,
            stages_ns={stage: self._median_ns(stage) for stage in STAGES},
            exposed_ns=token_ns - self._median_ns(ATTEND),
            idle_share=1 - sum(self.timeline.busy_ns(step, COMPUTE) for step in steps) / sum(self._steps_ns),
            moved_bytes=per_step(moved, len(steps)),
            beta=None if pool >= pages else pool / (pages - pool),  # the actual value, in whole pages
            observed=Observed(
                steps_ns=tuple(self._steps_ns),
                prefill_ns=self._prefill_ns,
                attended_tokens=self._attended,
                hit_ratio=moved.hit_ratio,
                pages_up=moved.pages_up,
                pages_down=moved.pages_down,
                ping_pong_pages=moved.ping_pong_pages,
                ping_pong_share=moved.ping_pong_share,
                device=device,
                timeline=self.timeline.last_step().to_json(),
            ),
        )

    def _median_ns(self, stage: str) -> float:
        return statistics.median(self.timeline.busy_ns(step, stage=stage) for step in self.timeline.steps)

    def __enter__(self) -> PolicySession:
        return self

    def __exit__(self, *_error: object) -> None:
        self._open.close()


def since(before: Traffic, now: Traffic) -> Traffic:
    """Return the counts after `before`."""
    counted = {
        name: getattr(now, name) - getattr(before, name)
        for name in ("pages_up", "pages_down", "ping_pong_pages", "hits_cpu", "hits_ssd")
    }
    return Traffic(now.moved_bytes - before.moved_bytes, **counted)


def per_step(traffic: Traffic, steps: int) -> dict[str, float]:
    """Return the bytes moved per step, by link and reason."""
    return {f"{a} to {b}, {why}": size / steps for (a, b, why), size in sorted(traffic.moved_bytes.items())}


# Alternating policies


def compare(setup: Setup, variants: Sequence[Variant], progress: Progress = lambda _: None) -> Bench:
    """Return a row for each of `variants`, which alternate if their pools fit in memory together."""
    rows, notes = _rows([(setup, variant) for variant in variants], progress)
    return Bench(MEASURED, setup.conditions(), tuple(rows), notes=notes)


def sweep(setup: Setup, variant: Variant, progress: Progress = lambda _: None, factors: Sequence[float] = FACTORS) -> Bench:
    """Return a row for each beta around the expected one, without those at which sink and window would fill the pool."""
    marks = marks_of(setup, variant, progress)
    betas = sorted({marks.expected * factor for factor in factors if marks.m0 is None or factor <= 1})
    todo = [replace(setup, beta=beta) for beta in betas]
    pinned = sum(setup.spec.shape.pages_of(tokens) for tokens in (StoreConfig.sink_tokens, StoreConfig.window_tokens))
    rows, notes = _rows([(one, variant) for one in todo if one.cpu_pages > pinned], progress)
    return Bench(MEASURED, setup.conditions(), tuple(rows), marks, notes)


def marks_of(setup: Setup, variant: Variant, progress: Progress = lambda _: None) -> Marks:
    """Return the expected best beta: f_c and f_s *measured* by the engine's own scoring, with half the pages each."""
    progress("measuring the scoring speed of processor and device")
    with PolicySession(replace(setup, beta=1.0, memory_bytes=None, steps=1, warm_up=0), variant) as session:
        session.prefill()
        f_c, f_s = speeds(session)
    shape, spec = setup.spec.shape, setup.spec
    kv_bytes = shape.token_bytes * shape.layers * spec.batch * spec.context
    m0 = setup.memory_bytes
    return Marks(f_c, f_s, None if m0 is None or m0 >= kv_bytes else m0 / (kv_bytes - m0))


def speeds(session: PolicySession) -> tuple[float, float]:
    """Return the bytes/s of keys that processor and device score, each alone; medians."""
    spec, store = session.setup.spec, session.store
    asked = session.stream.queries(0, 0)[0]
    key_bytes = spec.head_dim * spec.shape.numpy_dtype.itemsize
    rates: tuple[list[float], list[float]] = ([], [])
    for _ in range(SPEED_RUNS + 1):
        begin = time.perf_counter()
        scored = store.score_cpu(0, 0, asked)[1].size
        middle = time.perf_counter()
        device = sum(len(block.positions) for block in store.score_ssd(0, 0, asked, None, "max", session.setup.block_tokens))
        rates[0].append(scored * key_bytes / (middle - begin))
        rates[1].append(device * key_bytes / (time.perf_counter() - middle))
    f_c, f_s = (statistics.median(rate[1:]) for rate in rates)  # the first runs compile
    return f_c, f_s


def _rows(todo: Sequence[tuple[Setup, Variant]], progress: Progress) -> tuple[list[Row], tuple[str, ...]]:
    if sum(setup.cpu_pages * setup.page_bytes for setup, _ in todo) <= SPARE_SHARE * machine_memory().available_bytes:
        return _in_turns(todo, progress), ()
    rows = [row for one in todo for row in _in_turns([one], progress)]
    return rows, ("the policies ran one after another, because their pools do not fit in memory together",)


def _in_turns(todo: Sequence[tuple[Setup, Variant]], progress: Progress) -> list[Row]:
    with contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(PolicySession(setup, variant)) for setup, variant in todo]
        for session in sessions:
            progress(f"{session.variant.name}: storing the prompt")
            session.prefill()
        setup = todo[0][0]
        for step in range(setup.warm_up + setup.steps):
            progress(f"decode step {step + 1} of {setup.warm_up + setup.steps}")
            # In random order, so that no session always follows the same one.
            for place in np.random.default_rng(step).permutation(len(sessions)):
                sessions[place].decode(step)
        return [session.row() for session in sessions]


@contextlib.contextmanager
def workplace(directory: Path) -> Iterator[Path]:
    """Yield a new directory below `directory`, which is removed at the end."""
    try:
        made = tempfile.TemporaryDirectory(prefix="llmcache-bench-", dir=directory, ignore_cleanup_errors=True)
    except OSError as error:
        hint = "name a writable directory"
        raise MissingRequirement(f"--path: {directory}: {error.strerror}", hint) from error
    with made as name:
        yield Path(name)


def check_space(setup: Setup, files: int) -> None:
    """Raise MissingRequirement if the spill files of `files` policies do not fit below the setup's directory."""
    shape, spec = setup.spec.shape, setup.spec
    needed = files * spec.batch * shape.layers * shape.pages_of(spec.context) * sum(shape.slot_sizes)
    free = shutil.disk_usage(setup.directory).free
    if needed > free:
        hint = "use a shorter context, fewer layers or fewer policies"
        lacks = f"spill files need {format_size(needed)}, but only {format_size(free)} is free"
        raise MissingRequirement(f"--path: {setup.directory}: {lacks}", hint)
