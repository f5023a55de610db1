"""Policies as a benchmark names them: `hillinfer-no-app` is HillInfer without its pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmcache.errors import UsageError

PARTS = ("hie", "bkp", "app")
"""Designs of HillInfer that can be left out. Source: hillinfer.txt, sections 3.2 and 3.3."""


@dataclass(frozen=True)
class Variant:
    """A policy and, for HillInfer, which of its designs it has."""

    policy: str
    hie: bool = True
    bkp: bool = True
    app: bool = True

    @property
    def without(self) -> tuple[str, ...]:
        """The designs that are left out."""
        return tuple(part for part in PARTS if not getattr(self, part))

    @property
    def name(self) -> str:
        """As it is given: policy, and "no-" and its name for each design that is left out."""
        return "-no-".join([self.policy, *self.without])

    def titled(self, title: str) -> str:
        """Returns the title of the policy with what is left out of it."""
        return title + (f" without {', '.join(part.upper() for part in self.without)}" if self.without else "")


def variants_of(text: str, without: Sequence[str] = ()) -> list[Variant]:
    """Returns the variants in `text`, names joined by commas; `without`: designs that no HillInfer has.

    UsageError: none, one twice, a design that there is not, or one of another policy.
    """
    found: list[Variant] = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        policy, *left_out = name.split("-no-")
        if left_out and (policy != "hillinfer" or not set(left_out) <= set(PARTS)):
            known = ", ".join(f"hillinfer-no-{part}" for part in PARTS)
            raise UsageError(f"--policy: there is no '{name}'", f"what can be left out: {known}")
        gone = {*left_out, *(without if policy == "hillinfer" else ())}
        variant = Variant(policy, *(part not in gone for part in PARTS))
        if variant in found:
            raise UsageError(f"--policy: '{name}' is there twice", "name each once")
        found.append(variant)
    if not found:
        raise UsageError(f"--policy: '{text}' names none", "for instance: --policy full,hillinfer")
    return found
