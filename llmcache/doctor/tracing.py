"""Checks of the requirements of `llmcache trace`."""

from __future__ import annotations

from llmcache.bpf import libbpf
from llmcache.bpf.filemap import TRACEPOINTS
from llmcache.doctor.check import LIMITED, OK, Check
from llmcache.errors import MissingRequirement
from llmcache.trace.kernel import SOURCES, supported


def examine() -> list[Check]:
    """Check BTF, libbpf, tracepoints, and the tiers until one works."""
    return [_btf(), _libbpf(), _tracepoints(), _tier()]


def _btf() -> Check:
    reason = supported()
    if reason is None:
        return Check("BTF", OK, "available")
    remedy = "use Linux 6.1 or later with CONFIG_DEBUG_INFO_BTF=y, as in Debian 12 and Ubuntu 24.04"
    return Check("BTF", LIMITED, reason, remedy)


def _libbpf() -> Check:
    try:
        libbpf.library()
    except MissingRequirement as problem:
        return Check("libbpf", LIMITED, problem.message, problem.hint)
    return Check("libbpf", OK, "version 1")


def _tracepoints() -> Check:
    try:
        missing = [name for name in TRACEPOINTS if not libbpf.has_tracepoint(name)]
    except MissingRequirement as problem:
        return Check("tracepoints", LIMITED, f"unknown: {problem.message}", problem.hint)
    facts = {"missing": missing}
    if missing:
        return Check("tracepoints", LIMITED, f"the kernel lacks {', '.join(missing)}", "use Linux 6.12 or later", facts)
    return Check("tracepoints", OK, "the page cache has tracepoints", facts=facts)


def _tier() -> Check:
    tier, reasons = None, dict[str, str]()
    for name, source in SOURCES.items():
        if (reason := source.probe()) is None:
            tier = name
            break
        reasons[name] = reason
    facts = {"tier": tier, "passed_over": reasons}
    passed_over = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    if tier is None:
        return Check("tier", LIMITED, f"none works: {passed_over}", "run as root", facts)
    if not reasons:
        return Check("tier", OK, f"{tier}, the best tier", facts=facts)
    remedy = f"{next(iter(SOURCES))} needs root, Linux 6.12 with BTF, and libbpf 1"
    return Check("tier", LIMITED, f"{tier}, because {passed_over}", remedy, facts)
