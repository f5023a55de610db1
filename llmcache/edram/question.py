"""From the options of `llmcache edram model` and `sweep`, as typed, to configurations; every error names its option."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from llmcache.cache.question import parse_bandwidth
from llmcache.edram.accelerator import Axes
from llmcache.edram.catalogue import Catalogue, read_constants
from llmcache.edram.constants import Profile
from llmcache.edram.systems import RECOMPUTE_MODES, Configuration, LlmShape, System, Workload
from llmcache.errors import UsageError
from llmcache.units import parse_size

ALL = "all"
Found = TypeVar("Found")


@dataclass(frozen=True)
class Options:
    """The options as typed; None where one was not given. Lists are separated by commas."""

    model: str = "llama2-7b"
    workload: str = "PG19"
    system: str = ALL
    profile: str = "paper,silicon"
    constants: str | None = None
    recompute: str | None = None
    context: str | None = None
    decode: str | None = None
    batch: str | None = None
    budget: str | None = None
    window: str | None = None
    interval_scale: str | None = None
    dram_bw: str | None = None
    kv_memory: str | None = None

    @classmethod
    def given(cls, options: Mapping[str, str | None]) -> Options:
        """Returns the options that have a value; ValueError for one that there is not."""
        unknown = set(options) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"options: {', '.join(sorted(unknown))} are not known")
        return replace(cls(), **{name: text for name, text in options.items() if text is not None})


@dataclass(frozen=True)
class Question:
    """What is asked: every system with every profile, for one model and one workload; and what they are compared with."""

    model: LlmShape
    workload: Workload
    systems: tuple[System, ...]
    profiles: tuple[Profile, ...]
    baseline: System

    def configurations(self) -> list[Configuration]:
        """Returns the configurations, by profile, then by system."""
        return [
            Configuration(self.model, self.workload, system, profile) for profile in self.profiles for system in self.systems
        ]


def ask_model(options: Options) -> Question:
    """The question of `llmcache edram model`; UsageError names the option that is wrong."""
    known = _catalogue(options)
    workload = _named("--workload", known.workload, options.workload)
    changes = {
        name: _number(f"--{name}", text, least)
        for name, text, least in (
            ("context", options.context, 1),
            ("decode", options.decode, 1),
            ("batch", options.batch, 1),
            ("budget", options.budget, 1),
            ("window", options.window, 0),
        )
        if text is not None
    }
    if "budget" in changes and "window" not in changes:
        changes["window"] = min(workload.window, max(0, changes["budget"] - workload.sinks))
    name = workload.name if not changes else f"{workload.name}, changed"
    try:
        workload = replace(workload, name=name, **changes)
    except ValueError as error:
        raise UsageError(f"--{error}") from error
    return Question(
        _named("--model", known.model, options.model),
        workload,
        _systems(known, options),
        tuple(chosen("--profile", known.profile, known.profiles, options.profile)),
        known.baseline,
    )


def ask_sweep(options: Options) -> tuple[Axes, System]:
    """The axes of `llmcache edram sweep` and the system to compare with; UsageError names the option that is wrong."""
    known = _catalogue(options)
    return Axes(
        models=chosen("--model", known.model, known.models, options.model),
        workloads=chosen("--workload", known.workload, known.workloads, options.workload),
        systems=_systems(known, options),
        profiles=chosen("--profile", known.profile, known.profiles, options.profile),
        contexts=_numbers("--context", options.context),
        decodes=_numbers("--decode", options.decode),
        batches=_numbers("--batch", options.batch),
        budgets=_numbers("--budget", options.budget),
        interval_factors=_several("--interval-scale", options.interval_scale, _factor),
        dram_rates=_several("--dram-bw", options.dram_bw, parse_bandwidth),
        kv_capacities=_several("--kv-memory", options.kv_memory, lambda option, text: _parsed(option, text, parse_size)),
    ), known.baseline


def _catalogue(options: Options) -> Catalogue:
    return Catalogue() if options.constants is None else read_constants(options.constants)


def _systems(known: Catalogue, options: Options) -> tuple[System, ...]:
    systems = chosen("--system", known.system, known.systems, options.system)
    if options.recompute is None:
        return tuple(systems)
    if options.recompute not in RECOMPUTE_MODES:
        raise UsageError(f"--recompute: there is no mode '{options.recompute}'", f"one of: {', '.join(RECOMPUTE_MODES)}")
    return tuple(system.with_recompute(options.recompute) for system in systems)


def _named(option: str, look_up: Callable[[str], Found], text: str) -> Found:
    try:
        return look_up(text)
    except UsageError as error:
        raise UsageError(f"{option}: {error.message}", error.hint) from error


def chosen(option: str, look_up: Callable[[str], Found], known: Mapping[str, object], text: str) -> list[Found]:
    """Returns what `text` names, a list with commas or "all", each once; UsageError names `option`."""
    names = list(known) if text.strip().lower() == ALL else text.split(",")
    return list(dict.fromkeys(_named(option, look_up, name) for name in names))


def _several(option: str, text: str | None, parse: Callable[[str, str], Found]) -> Sequence[Found]:
    return () if text is None else list(dict.fromkeys(parse(option, part.strip()) for part in text.split(",")))


def _numbers(option: str, text: str | None) -> Sequence[int]:
    return _several(option, text, lambda option, part: _number(option, part, 1))


def _number(option: str, text: str, least: int) -> int:
    digits = text.strip().replace("_", "")
    if not digits.isascii() or not digits.isdigit() or len(digits) > 12:
        raise UsageError(f"{option}: '{text}' is not a whole number", "write tokens or sequences: 2048")
    if int(digits) < least:
        raise UsageError(f"{option}: {digits} is too small: at least {least}")
    return int(digits)


def _factor(option: str, text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 0 < factor < 1e9:
        raise UsageError(f"{option}: '{text}' is not a factor", "write numbers above 0: 0.5,1,2")
    return factor


def positive(option: str, text: str, parse: Callable[[str], int]) -> float:
    """Returns what `parse` makes of `text`; UsageError, naming `option`, if that is nothing or 0."""
    value = _parsed(option, text, parse)
    if not value:
        raise UsageError(f"{option}: '{text}', more than 0 is needed")
    return value


def _parsed(option: str, text: str, parse: Callable[[str], int]) -> float:
    """Returns what `parse` makes of `text`; its UsageError names `option`."""
    try:
        return float(parse(text))
    except UsageError as error:
        raise UsageError(f"{option}: {error.message}", error.hint) from error
