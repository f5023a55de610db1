"""From the options of `llmcache kv bench`, as typed, to a benchmark; every error names its option."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from llmcache.errors import UsageError
from llmcache.kv.bench import measured, modelled
from llmcache.kv.bench.accelerator import Accelerator, Processor, fixed
from llmcache.kv.bench.accelerator import modelled as modelled_accelerator
from llmcache.kv.bench.results import Bench
from llmcache.kv.bench.session import Setup
from llmcache.kv.bench.variants import PARTS, Variant, variants_of
from llmcache.kv.csd import PROFILES
from llmcache.kv.planning import MACHINES, MODELS, PAPER_PC, ModelShape, Workload
from llmcache.kv.planning.config import read_config
from llmcache.kv.planning.plan import parse_context
from llmcache.kv.policies import POLICIES
from llmcache.kv.workload import StreamSpec
from llmcache.units import parse_duration, parse_size

GQA_8B = ModelShape("an 8B model with 8 key heads", 32, 4096, 32, 8, 128, 14336, 128256)
"""What is measured unless a model is named: the shape of Llama-3-8B."""
LAYERS = 4
"""Layers that are measured unless it is said how many: all are alike, and each takes a file of its own."""
ALPHA = 0.2
DEFAULT_POLICIES, DEFAULT_CONTEXT = "full,h2o,prefetch,leoam,hillinfer", "32k"
BETAS = tuple(2.0**power for power in range(-4, 8))
"""Of a modelled sweep."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """The options as typed; None where one was not given."""

    policy: str | None
    profile: str
    context: str | None
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
    alpha: str | None = None
    budget: str | None = None
    beta: str | None = None
    ram: str | None = None
    threads: int | None = None

    @property
    def without(self) -> list[str]:
        """Designs that are left out of HillInfer."""
        return [part for part in PARTS if getattr(self, f"no_{part}")]


def run(options: Options, progress: Progress = lambda _: None) -> Bench:
    """Returns the benchmark that is asked for, after it has run. UsageError names the option that is wrong."""
    variants = variants_of(DEFAULT_POLICIES if options.policy is None else options.policy, options.without)
    for variant in variants:
        if variant.policy not in POLICIES:
            raise UsageError(f"--policy: there is no '{variant.policy}'", f"there are: {', '.join(POLICIES)}")
    if options.sweep_beta and len(variants) > 1:
        raise UsageError("--sweep-beta: it is of one policy", "for instance: --policy hillinfer --sweep-beta")
    return _modelled(options, variants) if options.profile == "paper" else _measured(options, variants, progress)


def _modelled(options: Options, variants: list[Variant]) -> Bench:
    _refuse(options, "with --profile paper nothing runs", "layers", "budget", "beta", "threads")
    context = parse_context(DEFAULT_CONTEXT if options.context is None else options.context)
    workload = Workload(context, batch=options.batch, alpha=_alpha(options) or ALPHA)
    hardware = PAPER_PC.with_sizes(host_bytes=_ram(options))
    model = MODELS["Qwen-7B"] if options.model is None else _model(options.model)
    systems = [modelled.system_of(one.policy, one.hie, one.bkp, one.app) for one in variants]
    if options.sweep_beta:
        return modelled.sweep(systems[0], hardware, model, workload, BETAS)
    return modelled.compare(systems, hardware, model, workload)


def _refuse(options: Options, why: str, *names: str) -> None:
    for name in names:
        if getattr(options, name) is not None:
            raise UsageError(f"--{name}: {why}", "leave it out, or choose --profile measured")


def _measured(options: Options, variants: list[Variant], progress: Progress) -> Bench:
    setup = setup_of(options)
    files = len(measured.FACTORS) if options.sweep_beta else len(variants)
    measured.check_space(setup, files)
    if options.sweep_beta:
        if options.beta is not None:
            raise UsageError("--beta: --sweep-beta tries several", "give one of the two")
        return measured.sweep(setup, variants[0], progress)
    if options.beta == "auto":
        with measured.workplace(setup.directory) as directory:
            marks = measured.marks_of(replace(setup, directory=directory), Variant("hillinfer"), progress)
        setup = replace(setup, beta=marks.expected)
    return measured.compare(setup, variants, progress)


def setup_of(options: Options) -> Setup:
    """Returns what all policies of a measured benchmark have in common. UsageError names the option that is wrong."""
    model = GQA_8B if options.model is None else _model(options.model)
    layers = min(LAYERS, model.layers) if options.layers is None else options.layers
    context = parse_context(DEFAULT_CONTEXT if options.context is None else options.context)
    spec = StreamSpec(
        layers, model.kv_heads, model.heads, model.head_dim, context, options.batch, model.kv_dtype, options.seed
    )
    alpha = _alpha(options)
    budgets = parse_budgets(options.budget)
    if len(budgets) > 1:
        raise UsageError(f"--budget: '{options.budget}' are several", "give one; only --task takes several")
    if alpha is not None and budgets:
        raise UsageError("--budget: given together with --alpha", "give one of the two")
    if options.csd not in PROFILES:
        raise UsageError(f"--csd: there is no profile '{options.csd}'", f"there are: {', '.join(PROFILES)}")
    return Setup(
        spec=spec,
        accelerator=_accelerator(options, model),
        directory=directory_of(options.path),
        steps=options.steps,
        alpha=ALPHA if alpha is None and not budgets else alpha,
        token_budget=budgets[0] if budgets else None,
        block_tokens=options.block,
        beta=_beta(options.beta),
        memory_bytes=_ram(options),
        device=options.device,
        csd=replace(PROFILES[options.csd], throttle=options.throttle),
        threads=options.threads,
        exact=options.exact,
    )


def parse_budgets(text: str | None) -> list[int]:
    """Returns the budgets in `text`, tokens joined by commas; none for None. UsageError if one is no number above 0."""
    parts = [] if text is None else [part.strip() for part in text.split(",")]
    for part in parts:
        if not part.isdecimal() or int(part) < 1:
            raise UsageError(f"--budget: '{part}' is no number of tokens", "for instance: --budget 64,128,256")
    return [int(part) for part in parts]


def directory_of(path: str) -> Path:
    """Returns the directory of --path; UsageError if it is none."""
    if not Path(path).is_dir():
        raise UsageError(f"--path: {path} is not a directory", "give one on the storage that is to be measured")
    return Path(path)


def _model(text: str) -> ModelShape:
    """The model of that name, else the one whose config.json it is."""
    return MODELS[text] if text in MODELS else read_config(text)


def _alpha(options: Options) -> float | None:
    if options.alpha is None:
        return None
    return _number("--alpha", options.alpha, "the share of the tokens that is attended, above 0, at most 1: 0.2", 1.0)


def _beta(text: str | None) -> float:
    if text is None or text == "auto":
        return 1.0
    return _number("--beta", text, "pages in memory to pages on the SSD, above 0: 0.5; or auto")


def _number(option: str, text: str, hint: str, most: float = math.inf) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (0 < value <= most and math.isfinite(value)):
        raise UsageError(f"{option}: '{text}' is out of range", f"write {hint}")
    return value


def _ram(options: Options) -> int | None:
    if options.ram is None:
        return None
    size = parse_size(options.ram)
    if not size:
        raise UsageError(f"--ram: '{options.ram}' is no memory at all", "write a size: 4G")
    return size


def _accelerator(options: Options, model: ModelShape) -> Accelerator:
    if options.compute == "cpu":
        return Processor()
    if options.compute in MACHINES:
        return modelled_accelerator(MACHINES[options.compute], model, options.batch)
    try:
        return fixed(parse_duration(options.compute))
    except UsageError:
        known = ", ".join(MACHINES)
        raise UsageError(
            f"--compute: '{options.compute}' is no accelerator", f"one of {known}, cpu, or the time of a layer: 20ms"
        ) from None
