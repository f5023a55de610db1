"""The options of `llmcache kv bench`; every error names its option."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from platformdirs import user_cache_path

from llmcache.errors import MissingRequirement, UsageError
from llmcache.kv.bench import synthetic
from llmcache.kv.bench.results import MODELLED, Bench, Marks, Row
from llmcache.kv.bench.synthetic import Accelerator, Progress, Setup, variants_of
from llmcache.kv.bench.task import TaskSetup
from llmcache.kv.planning.hardware import MACHINES, PAPER_PC
from llmcache.kv.planning.latency import DESIGNS, SYSTEMS, Latency, System, Variant, hillinfer, latency
from llmcache.kv.planning.placement import Placement, Workload, by_beta, room
from llmcache.kv.policies import POLICIES
from llmcache.kv.tasks.recall import RECALL_MODEL
from llmcache.kv.workload import StreamSpec
from llmcache.model.shapes import MODELS, ModelShape, read_config
from llmcache.papers.csd import PROFILES
from llmcache.units import parse_duration

GQA_8B = ModelShape("an 8B model with 8 KV heads", 32, 4096, 32, 8, 128, 14336, 128256)
"""The measured model by default: the shape of Llama-3-8B."""
LAYERS = 4  # measured layers by default: all are alike, and each takes a file of its own
ALPHA = 0.2
DEFAULT_POLICIES, DEFAULT_CONTEXT = "full,h2o,prefetch,leoam,hillinfer", 32 << 10
TASK_POLICIES, TASK_CONTEXT, TASK_BUDGETS = "mass,icecache,quest,h2o,window", 4 << 10, (64, 128, 256)
BETAS = tuple(2.0**power for power in range(-4, 8))  # values of beta in a modelled sweep
TASK_MODELS = {"smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf", "gemma3": "gemma-3-270m-q4_k_m.gguf"}
"""Models that `tools/test` downloads, by name; Gemma's use is subject to Google's Gemma Terms of Use."""


@dataclass(frozen=True)
class BenchOptions:
    """The options, in tokens and bytes; None if an option was not given. `beta` is a ratio, or "auto"."""

    policy: str | None
    profile: str
    context: Sequence[int] | None
    batch: int
    steps: int
    block: int
    device: str
    csd: str
    path: str
    compute: str
    seed: int
    throttle: bool = False
    no_hie: bool = False
    no_bkp: bool = False
    no_app: bool = False
    exact: bool = False
    sweep_beta: bool = False
    model: str | None = None
    layers: int | None = None
    alpha: float | None = None
    budget: Sequence[int] | None = None
    beta: float | str | None = None
    ram: int | None = None
    threads: int | None = None

    @property
    def without(self) -> list[str]:
        return [part for part in DESIGNS if getattr(self, f"no_{part}")]

    @property
    def tokens(self) -> int:
        return DEFAULT_CONTEXT if self.context is None else _only("--context", self.context)

    @property
    def shape(self) -> ModelShape | None:
        return None if self.model is None else MODELS[self.model] if self.model in MODELS else read_config(self.model)

    @property
    def directory(self) -> Path:
        if not Path(self.path).is_dir():
            raise UsageError(f"--path: {self.path} is not a directory", "name a directory on the storage to measure")
        return Path(self.path)


def _only(option: str, values: Sequence[int]) -> int:
    if len(values) > 1:
        raise UsageError(
            f"{option}: takes one value without --task, not {','.join(map(str, values))}", "give one value, or add --task"
        )
    return values[0]


def run(options: BenchOptions, progress: Progress = lambda _: None, drawn: bool = False) -> Bench:
    """Run the benchmark; `drawn`: the results will be drawn."""
    if drawn and options.profile == "paper" and not options.sweep_beta:
        raise UsageError("--plot: a modelled run has no timeline", "add --sweep-beta, or use --profile measured")
    variants = variants_of(DEFAULT_POLICIES if options.policy is None else options.policy, options.without)
    for variant in variants:
        if variant.policy not in POLICIES:
            raise UsageError(f"--policy: there is no policy '{variant.policy}'", f"one or more of: {','.join(POLICIES)}")
    if options.sweep_beta and len(variants) > 1:
        raise UsageError("--sweep-beta needs exactly one policy", "for example: --policy hillinfer --sweep-beta")
    return _modelled(options, variants) if options.profile == "paper" else _measured(options, variants, progress)


def _measured(options: BenchOptions, variants: list[Variant], progress: Progress) -> Bench:
    setup = setup_of(options)
    synthetic.check_space(setup, len(synthetic.FACTORS) if options.sweep_beta else len(variants))
    if options.sweep_beta:
        if options.beta is not None:
            raise UsageError("--beta: cannot be combined with --sweep-beta", "give only one of them")
        return synthetic.sweep(setup, variants[0], progress)
    if options.beta == "auto":
        setup = replace(setup, beta=synthetic.marks_of(setup, Variant("hillinfer"), progress).expected)
    return synthetic.compare(setup, variants, progress)


def setup_of(options: BenchOptions) -> Setup:
    """Return the settings that all policies of a measured benchmark share."""
    model = options.shape or GQA_8B
    layers = min(LAYERS, model.layers) if options.layers is None else options.layers
    spec = StreamSpec(
        layers, model.kv_heads, model.heads, model.head_dim, options.tokens, options.batch, model.kv_dtype, options.seed
    )
    budget = None if options.budget is None else _only("--budget", options.budget)
    if options.alpha is not None and budget is not None:
        raise UsageError("--budget: cannot be combined with --alpha", "give only one of them")
    if options.csd not in PROFILES:
        raise UsageError(f"--csd: there is no profile '{options.csd}'", f"one of: {', '.join(PROFILES)}")
    return Setup(
        spec=spec,
        accelerator=_accelerator(options, model),
        directory=options.directory,
        steps=options.steps,
        alpha=ALPHA if options.alpha is None and budget is None else options.alpha,
        token_budget=budget,
        block_tokens=options.block,
        beta=options.beta if isinstance(options.beta, float) else 1.0,
        memory_bytes=options.ram,
        device=options.device,
        csd=replace(PROFILES[options.csd], throttle=options.throttle),
        threads=options.threads,
        exact=options.exact,
    )


def _accelerator(options: BenchOptions, model: ModelShape) -> Accelerator:
    if options.compute == "cpu":
        return Accelerator()
    if options.compute in MACHINES:
        return synthetic.modelled(MACHINES[options.compute], model, options.batch)
    try:
        return synthetic.fixed(parse_duration(options.compute))
    except UsageError:
        hint = f"one of: {', '.join(MACHINES)}, cpu; or the time of a layer: 20ms"
        raise UsageError(f"--compute: there is no accelerator '{options.compute}'", hint) from None


# The paper's machine


def _modelled(options: BenchOptions, variants: list[Variant]) -> Bench:
    for name in ("layers", "budget", "beta", "threads"):
        if getattr(options, name) is not None:
            hint = "remove it, or use --profile measured"
            raise UsageError(f"--{name}: has no effect with --profile paper, which runs nothing", hint)
    workload = Workload(options.tokens, batch=options.batch, alpha=options.alpha or ALPHA)
    hardware = PAPER_PC.with_sizes(host_bytes=options.ram)
    model = options.shape or MODELS["Qwen-7B"]
    systems = [_system(variant) for variant in variants]
    places: list[Placement | None] = [None]
    marks = None
    if options.sweep_beta:
        found = room(hardware, model, workload, workload.alpha if systems[0].sparse else 1.0)
        kv_bytes = model.kv_bytes(workload.context, workload.batch)
        m0 = found.host_kv / (kv_bytes - found.host_kv) if found.host_kv < kv_bytes else None
        marks = Marks(hardware.score_bytes_per_s, hardware.device_bytes_per_s, m0)
        places = [by_beta(kv_bytes, beta) for beta in sorted({beta if m0 is None else min(beta, m0) for beta in BETAS})]
    rows = (_row(latency(system, hardware, model, workload, at)) for system in systems for at in places)
    return Bench(MODELLED, {"machine": hardware.title, "model": model.name, **asdict(workload)}, tuple(rows), marks)


def _row(one: Latency) -> Row:
    return Row(
        policy=one.system.name,
        title=one.system.title,
        token_ns=one.token_ns,
        stages_ns={**one.stages, "update": 0.0},  # moves between the pools are not modelled
        exposed_ns=one.exposed_ns,
        idle_share=one.idle_share,
        moved_bytes=dict(one.moved),
        beta=one.places.beta if one.places.ssd else None,
    )


def _system(variant: Variant) -> System:
    if variant.policy == "hillinfer":
        return hillinfer(*variant.without)
    if variant.policy not in SYSTEMS:
        known = f"policies with --profile paper: {','.join(SYSTEMS)}"
        raise UsageError(f"--policy: '{variant.policy}' has no latency model", known)
    return SYSTEMS[variant.policy]


# Tasks


def task_of(name: str, cases: int, options: BenchOptions) -> TaskSetup:
    """Return the task `name` with its settings from `options`."""
    for other in ("alpha", "beta", "ram", "layers"):
        if getattr(options, other) is not None:
            raise UsageError(f"--{other}: cannot be combined with --task", "remove it; --budget sets the attended tokens")
    if options.batch != 1:
        hint = "remove it; --cases sets the number of contexts"
        raise UsageError("--batch: cannot be combined with --task, which runs as many contexts at a time as fit", hint)
    if options.sweep_beta or options.without or options.throttle or options.profile != "measured":
        raise UsageError(
            "--task: runs a real model on this machine", "remove --sweep-beta, --no-..., --throttle and --profile"
        )
    policies = [part.strip() for part in (options.policy or TASK_POLICIES).split(",") if part.strip()]
    if not policies or len(set(policies)) < len(policies):
        hint = f"for example: --policy {TASK_POLICIES}"
        raise UsageError(f"--policy: '{options.policy}' names no policy, or one twice", hint)
    return TaskSetup(
        name,
        model_of(options.model),
        options.context or [TASK_CONTEXT],
        policies,
        options.budget or TASK_BUDGETS,
        options.directory,
        cases=cases,
        steps=options.steps,
        seed=options.seed,
        threads=options.threads,
    )


def model_of(name: str | None) -> Path:
    """Return the path of the model `name` (one of `TASK_MODELS`, or a path), or of the recall model for None."""
    if name is None:
        return RECALL_MODEL
    if name not in TASK_MODELS:
        return Path(name)
    path = user_cache_path("llmcache") / "models" / TASK_MODELS[name]
    if not path.exists():
        raise MissingRequirement(
            f"--model: {path} does not exist", "run tools/test, which downloads it, or name the path of a model"
        )
    unpacked = path.with_suffix("")  # tools/test unpacks it as well, because transformers takes 10 to 30 s to read the file
    return unpacked if unpacked.is_dir() else path
