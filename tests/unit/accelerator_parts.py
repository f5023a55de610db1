"""Configurations of the accelerator model, for its tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from llmcache.edram.accelerator import Outcome, evaluate
from llmcache.edram.constants import PAPER, Profile
from llmcache.edram.systems import MODELS, SYSTEMS, WORKLOADS, AcceleratorSystem, Configuration

AVERAGED = ("llama2-7b", "llama2-13b", "llama3.2-3b")
TASKS = tuple(WORKLOADS)


def with_hardware(system: AcceleratorSystem, **changes: Any) -> AcceleratorSystem:
    return replace(system, hardware=replace(system.hardware, **changes))


def configuration(
    model: str = "llama2-7b",
    task: str = "PG19",
    system: str | AcceleratorSystem = "Kelle+eDRAM",
    profile: Profile = PAPER,
    **workload: Any,
) -> Configuration:
    found = SYSTEMS[system] if isinstance(system, str) else system
    return Configuration(MODELS[model], replace(WORKLOADS[task], **workload), found, profile)


def outcome(*args: Any, **kwargs: Any) -> Outcome:
    return evaluate([configuration(*args, **kwargs)])[0]


def mean_gain(
    over: str | AcceleratorSystem, of: str | AcceleratorSystem, profile: Profile = PAPER, models: tuple[str, ...] = AVERAGED
) -> tuple[float, float]:
    """How many times less latency and energy `of` needs than `over`: means over models and tasks."""
    pairs = [(model, task) for model in models for task in TASKS]
    asked = [configuration(model, task, system, profile) for system in (over, of) for model, task in pairs]
    found = evaluate(asked)
    latency_s, energy_j = found.latency_s.reshape(2, -1), found.energy_j.reshape(2, -1)
    return float(np.mean(latency_s[0] / latency_s[1])), float(np.mean(energy_j[0] / energy_j[1]))
