"""The names that options take, for shells to offer: each from the table of the part that has them, read when asked for."""

from __future__ import annotations

from collections.abc import Iterable


def policies() -> Iterable[str]:
    """Policies of `simulate`."""
    from llmcache.cache.policies import POLICIES

    return POLICIES


def tiers() -> Iterable[str]:
    """Tiers of `trace`."""
    from llmcache.trace.sources import SOURCES

    return ("auto", *SOURCES)


def kv_policies() -> Iterable[str]:
    """Policies of `kv bench`."""
    from llmcache.kv.policies import POLICIES

    return POLICIES


def kv_tasks() -> Iterable[str]:
    """Tasks of `kv bench`; a test compares them with the table, which loads numpy."""
    return ("passkey", "recall", "needle", "variables", "common", "frequent", "loss", "chain")


def edram_models() -> Iterable[str]:
    """Language models of `edram`."""
    from llmcache.edram.models import MODELS

    return (*MODELS, "all")


def edram_workloads() -> Iterable[str]:
    """Workloads of `edram`."""
    from llmcache.edram.workloads import WORKLOADS

    return (*WORKLOADS, "all")


def edram_systems() -> Iterable[str]:
    """Systems of `edram`."""
    from llmcache.edram.systems import SYSTEMS

    return (*SYSTEMS, "all")


def edram_profiles() -> Iterable[str]:
    """Profiles of energies of `edram`."""
    from llmcache.edram.constants import PROFILES

    return (*PROFILES, "all")


def papers() -> Iterable[str]:
    """What `reproduce` recomputes."""
    from llmcache.report.reproduce import REPRODUCTIONS

    return (*REPRODUCTIONS, "all")
