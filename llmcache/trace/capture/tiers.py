"""Which source records: the best that works here and grants what is asked for, or the one that is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmcache.errors import EnvironmentProblem, UsageError
from llmcache.trace.sources import SOURCES, source_class
from llmcache.trace.sources.base import Source, Wish

AUTO = "auto"
# Parts of a wish that must be granted; the others are granted where they can be. Field: (option, what it records).
_DEMANDS = {"block": ("--block", "block requests"), "rerefs_s": ("--mmap-rerefs", "touches of mapped pages")}


@dataclass(frozen=True)
class Choice:
    """A source, and why each better one was passed over: name to reason."""

    source: Source
    passed_over: Mapping[str, str]

    @property
    def reason(self) -> str:
        """The better ones and why not, in one line; empty for the best."""
        return "; ".join(f"{name}: {why}" for name, why in self.passed_over.items())


def choose(tier: str, wish: Wish) -> Choice:
    """Returns the source called `tier`, for "auto" the best.

    UsageError for an unknown name; EnvironmentProblem, saying why and what would work, if it cannot record here.
    """
    if tier == AUTO:
        return _best(wish)
    if tier not in SOURCES:
        raise UsageError(f"--tier: '{tier}' is unknown", f"known are: {', '.join([AUTO, *SOURCES])}")
    found = source_class(tier)
    if reason := _refusal(found, wish):
        raise EnvironmentProblem(f"--tier: {tier} cannot record here: {reason}", _alternative(tier, wish))
    return Choice(found(), {})


def _best(wish: Wish) -> Choice:
    passed_over: dict[str, str] = {}
    for name in SOURCES:
        found = source_class(name)
        reason = _refusal(found, wish)
        if reason is None:
            return Choice(found(), passed_over)
        passed_over[name] = reason
    reasons = "".join(f"\n  {name}: {reason}" for name, reason in passed_over.items())
    raise EnvironmentProblem(
        f"nothing on this machine can record this:{reasons}", "most tiers need root: sudo llmcache trace …"
    )


def _refusal(found: type[Source], wish: Wish) -> str | None:
    for field, (option, what) in _DEMANDS.items():
        if getattr(wish, field) and field not in found.offers:
            return f"it cannot see {what} ({option})"
    return found.probe()


def _alternative(tier: str, wish: Wish) -> str:
    works = next((name for name in SOURCES if name != tier and _refusal(source_class(name), wish) is None), None)
    return f"--tier {works} works here" if works else "no other tier works here either: most need root"
