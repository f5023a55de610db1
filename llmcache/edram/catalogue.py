"""All that a command can name: models, workloads, systems and profiles, the paper's own and the user's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from llmcache.edram.constants import PROFILES, Profile
from llmcache.edram.models import MODELS, LlmShape
from llmcache.edram.systems import BASELINE, SYSTEMS, System
from llmcache.edram.workloads import WORKLOADS, Workload
from llmcache.errors import UsageError

Named = TypeVar("Named", LlmShape, Workload, System, Profile)


@dataclass(frozen=True)
class Catalogue:
    """What there is, by name. Look-ups ignore case and raise UsageError with the names that there are."""

    models: Mapping[str, LlmShape] = field(default_factory=lambda: MODELS)
    workloads: Mapping[str, Workload] = field(default_factory=lambda: WORKLOADS)
    systems: Mapping[str, System] = field(default_factory=lambda: SYSTEMS)
    profiles: Mapping[str, Profile] = field(default_factory=lambda: PROFILES)

    def model(self, name: str) -> LlmShape:
        """Returns the language model called `name`."""
        return _found("model", self.models, name)

    def workload(self, name: str) -> Workload:
        """Returns the workload called `name`."""
        return _found("workload", self.workloads, name)

    def system(self, name: str) -> System:
        """Returns the system called `name`."""
        return _found("system", self.systems, name)

    def profile(self, name: str) -> Profile:
        """Returns the profile of energies called `name`."""
        return _found("profile", self.profiles, name)

    @property
    def baseline(self) -> System:
        """The system that others are compared with."""
        return self.systems[BASELINE]


def _found(kind: str, known: Mapping[str, Named], name: str) -> Named:
    for key, value in known.items():
        if key.lower() == name.strip().lower():
            return value
    raise UsageError(f"there is no {kind} '{name.strip()}'", f"one of: {', '.join(known)}")
