"""What a mount may hold: free memory, the right to lock it, cgroups, and pressure stall information."""

from __future__ import annotations

from pathlib import Path

from llmcache import memory
from llmcache.doctor import FAILED, LIMITED, OK, Check
from llmcache.errors import EnvironmentProblem
from llmcache.fs.engine.budget import settle_budget
from llmcache.units import format_size


def examine(root: Path = Path("/")) -> list[Check]:
    """Findings on memory, RLIMIT_MEMLOCK, cgroups and PSI. `root` is there for tests on made-up trees."""
    return [_free(root), _lockable(root), _cgroup(root), _stalls(root)]


def _free(root: Path) -> Check:
    machine, least = memory.machine_memory(root), memory.tightest(root)
    said = f"{format_size(machine.available_bytes)} of {format_size(machine.total_bytes)} available"
    facts = {"total_bytes": machine.total_bytes, "available_bytes": machine.available_bytes}
    try:
        size = settle_budget(None, root)
    except EnvironmentProblem as problem:
        return Check("free memory", FAILED, problem.message, problem.hint, facts)
    where = "" if least.name == machine.name else f" ({least.name})"
    said += f"; a mount would take {format_size(size)}{where} without --cache"
    return Check("free memory", OK, said, facts=facts | {"budget_bytes": size})


def _lockable(root: Path) -> Check:
    size = memory.lockable_bytes(root)
    if size >= memory.UNLIMITED:
        return Check("RLIMIT_MEMLOCK", OK, "memory may be locked without limit: mode steer", facts={"unlimited": True})
    said = f"{format_size(size)} may be locked: budgets beyond that take mode arena"
    remedy = "for mode steer: run as root, or '* - memlock unlimited' in /etc/security/limits.conf and log in again"
    return Check("RLIMIT_MEMLOCK", LIMITED, said, remedy, {"unlimited": False, "limit_bytes": size})


def _cgroup(root: Path) -> Check:
    version = memory.cgroup_version(root)
    limits = memory.cgroup_memory(root)
    if version is None:
        remedy = "mount cgroup2 on /sys/fs/cgroup to have memory limits of groups respected and measured"
        return Check("cgroup", LIMITED, "no memory controller", remedy)
    said = f"version {version}, " + (f"{len(limits)} memory limits above this process" if limits else "no memory limit here")
    least = min((limit.total_bytes for limit in limits), default=None)
    if least is not None:
        said += f", the smallest {format_size(least)}"
    return Check("cgroup", OK, said, facts={"version": version, "limit_bytes": least})


def _stalls(root: Path) -> Check:
    if memory.stalled_us(root) is not None:
        return Check("PSI", OK, "memory stalls can be seen")
    remedy = "boot with psi=1 (kernels with CONFIG_PSI); the margin of free memory is watched without it, too"
    return Check("PSI", LIMITED, "no /proc/pressure/memory: a mount notices pressure later", remedy)
