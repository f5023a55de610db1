"""Checks of the memory for a mount."""

from __future__ import annotations

from pathlib import Path

from llmcache import memory
from llmcache.doctor.check import FAILED, LIMITED, OK, Check
from llmcache.errors import MissingRequirement
from llmcache.mount.budget import settle_budget
from llmcache.units import format_size


def examine(root: Path = Path("/")) -> list[Check]:
    """Check memory, RLIMIT_MEMLOCK, cgroups and PSI."""
    return [_free(root), _lockable(root), _cgroup(root), _stalls(root)]


def _free(root: Path) -> Check:
    machine, least = memory.machine_memory(root), memory.tightest(root)
    said = f"{format_size(machine.available_bytes)} of {format_size(machine.total_bytes)} available"
    facts = {"total_bytes": machine.total_bytes, "available_bytes": machine.available_bytes}
    try:
        size = settle_budget(None, root)
    except MissingRequirement as problem:
        return Check("free memory", FAILED, problem.message, problem.hint, facts)
    where = "" if least.name == machine.name else f" ({least.name})"
    said += f"; a mount without --cache would take {format_size(size)}{where}"
    return Check("free memory", OK, said, facts=facts | {"budget_bytes": size})


def _lockable(root: Path) -> Check:
    size = memory.lockable_bytes(root)
    if size >= memory.UNLIMITED:
        return Check("RLIMIT_MEMLOCK", OK, "unlimited: mode steer is possible", facts={"unlimited": True})
    said = f"{format_size(size)} may be locked; larger budgets use mode arena"
    remedy = "for mode steer: run as root, or set '* - memlock unlimited' in /etc/security/limits.conf and log in again"
    return Check("RLIMIT_MEMLOCK", LIMITED, said, remedy, {"unlimited": False, "limit_bytes": size})


def _cgroup(root: Path) -> Check:
    version = memory.cgroup_version(root)
    limits = memory.cgroup_memory(root)
    if version is None:
        remedy = "mount cgroup2 on /sys/fs/cgroup, so that mounts respect memory limits"
        return Check("cgroup", LIMITED, "no memory controller", remedy)
    said = f"version {version}, " + (f"memory limits of this process: {len(limits)}" if limits else "no memory limit")
    least = min((limit.total_bytes for limit in limits), default=None)
    if least is not None:
        said += f", the smallest {format_size(least)}"
    return Check("cgroup", OK, said, facts={"version": version, "limit_bytes": least})


def _stalls(root: Path) -> Check:
    if memory.stalled_us(root) is not None:
        return Check("PSI", OK, "reports memory stalls")
    remedy = "boot with psi=1 (a kernel with CONFIG_PSI); a mount watches the free memory in any case"
    return Check("PSI", LIMITED, "no /proc/pressure/memory: a mount notices memory pressure later", remedy)
