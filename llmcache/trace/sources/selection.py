"""Which source records: the best that works here and grants what is asked for, or the one that is named.

A source is tried by starting it; only one that fails is asked why (`probe`), which takes as long as starting does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmcache.errors import EnvironmentProblem, UsageError
from llmcache.trace.sources import AUTO, SOURCES, source_class
from llmcache.trace.sources.base import Scope, Source

# Parts of a scope that must be granted; the others are granted where they can be. Field: (option, what it records).
_DEMANDS = {"block": ("--block", "block requests"), "rerefs_s": ("--mmap-rerefs", "touches of mapped pages")}


@dataclass(frozen=True)
class ChosenSource:
    """A source that has been started, and why each better one was passed over: name to reason."""

    source: Source
    passed_over: Mapping[str, str]

    @property
    def reason(self) -> str:
        """The better ones and why not, in one line; empty for the best."""
        return "; ".join(f"{name}: {why}" for name, why in self.passed_over.items())


def start_source(tier: str, scope: Scope) -> ChosenSource:
    """Returns the source called `tier`, for "auto" the best, recording `scope`.

    UsageError for an unknown name; EnvironmentProblem, saying why and what would work, if it cannot record here, or if
    the processes cannot be recorded by any.
    """
    if tier not in (AUTO, *SOURCES):
        raise UsageError(f"--tier: '{tier}' is unknown", f"known are: {', '.join([AUTO, *SOURCES])}")
    passed_over: dict[str, str] = {}
    for name in SOURCES if tier == AUTO else [tier]:
        source = _started(source_class(name), scope)
        if isinstance(source, Source):
            return ChosenSource(source, passed_over)
        passed_over[name] = source
    if tier != AUTO:
        raise EnvironmentProblem(f"--tier: {tier} cannot record here: {passed_over[tier]}", _alternative(tier, scope))
    reasons = "".join(f"\n  {name}: {reason}" for name, reason in passed_over.items())
    raise EnvironmentProblem(
        f"nothing on this machine can record this:{reasons}", "most tiers need root: sudo llmcache trace …"
    )


def _started(found: type[Source], scope: Scope) -> Source | str:
    """Returns a source that records, or why this kind cannot do so here; EnvironmentProblem if that is not the reason."""
    if reason := _not_offered(found, scope):
        return reason
    source = found()
    try:
        source.start(scope)
    except EnvironmentProblem:
        if reason := found.probe():
            return reason
        raise
    return source


def _not_offered(found: type[Source], scope: Scope) -> str | None:
    for field, (option, what) in _DEMANDS.items():
        if getattr(scope, field) and field not in found.offers:
            return f"it cannot see {what} ({option})"
    return None


def _alternative(tier: str, scope: Scope) -> str:
    others = (name for name in SOURCES if name != tier and not _not_offered(source_class(name), scope))
    works = next((name for name in others if source_class(name).probe() is None), None)
    return f"--tier {works} works here" if works else "no other tier works here either: most need root"
