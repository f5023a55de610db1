"""How much memory there is: the machine's, the cgroup's (v1, v2), what may be locked, and what pressure leaves of it.

All functions read /proc and /sys at call time; `root` is there for tests on recorded trees.

Pressure gives budget back before the OOM killer comes, and takes it again when it is over. Locked pages count as used to
the OOM killer, so the margin is watched in every place that has a limit (machine, cgroups): four times a second, and thirty
times when little is left. Short of the margin: the limit drops by what is missing, at once. PSI (where the kernel has it)
says earlier that others stall: the limit then drops in steps. After a calm time it grows back, slowly.
"""

from __future__ import annotations

import itertools
import logging
import resource
import time
from dataclasses import dataclass
from pathlib import Path

from llmcache.errors import EnvironmentProblem
from llmcache.units import format_size

log = logging.getLogger(__name__)

MIN_BUDGET_BYTES = 16 << 20
DAEMON_BYTES = 40 << 20  # what daemon, helper, buffers and page tables still grow to, beside the budget
MACHINE_MARGIN_BYTES = 256 << 20
MACHINE_MARGIN_SHARE = 0.05
GROUP_MARGIN_BYTES = 8 << 20
GROUP_MARGIN_SHARE = 1 / 64
CAP_IPC_LOCK = 14
UNLIMITED = 1 << 60


@dataclass(frozen=True)
class Memory:
    """Memory in one place (the machine or a cgroup): bytes in all, bytes that can be had, bytes to keep free."""

    name: str
    total_bytes: int
    available_bytes: int
    margin_bytes: int
    free_bytes: int = 0  # of `available_bytes`: nothing is in it

    @property
    def spare_bytes(self) -> int:
        """What can be taken without touching the margin (negative when already short)."""
        return self.available_bytes - self.margin_bytes


def machine_memory(root: Path = Path("/")) -> Memory:
    """Returns MemTotal and MemAvailable of /proc/meminfo."""
    values = _pairs(root / "proc/meminfo")
    total, available = values["MemTotal"] * 1024, values["MemAvailable"] * 1024
    return _machine(total, available)


def machine_free(root: Path = Path("/")) -> int:
    """Returns MemFree of /proc/meminfo (bytes)."""
    return _pairs(root / "proc/meminfo")["MemFree"] * 1024


def _machine(total_bytes: int, available_bytes: int) -> Memory:
    margin = max(MACHINE_MARGIN_BYTES, int(total_bytes * MACHINE_MARGIN_SHARE))
    return Memory("machine", total_bytes, available_bytes, margin)


def cgroup_memory(root: Path = Path("/")) -> list[Memory]:
    """Returns the memory limits of this process's cgroup and of those above it, v1 and v2; empty without limits."""
    found: list[Memory] = []
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            bases = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
            files = ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            bases = [root / "sys/fs/cgroup/memory"]
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        for base in bases:
            group = base / path.lstrip("/")
            while True:
                memory = _limit_of(group, *files)
                if memory is not None:
                    found.append(memory)
                if group in (base, base.parent):
                    break
                group = group.parent
    return found


def cgroup_version(root: Path = Path("/")) -> int | None:
    """Returns the version of the cgroups that account this process's memory, None without."""
    lines = [line.split(":", 2)[1] for line in (root / "proc/self/cgroup").read_text().splitlines()]
    if any("memory" in controllers.split(",") for controllers in lines):
        return 1
    return 2 if "" in lines and (root / "sys/fs/cgroup/cgroup.controllers").exists() else None


def _limit_of(group: Path, limit_file: str, usage_file: str) -> Memory | None:
    try:
        text = (group / limit_file).read_text().strip()
        if text == "max" or int(text) >= UNLIMITED:
            return None
        limit, usage = int(text), int((group / usage_file).read_text())
        stat = _pairs(group / "memory.stat")
    except (OSError, ValueError, KeyError):
        return None  # no such controller here, or a group that is ending
    # v1 counts children under total_*; page cache on the LRU can be had back, locked pages cannot.
    cache = sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in ("inactive_file", "active_file"))
    margin = max(GROUP_MARGIN_BYTES, int(GROUP_MARGIN_SHARE * limit))
    return Memory(f"cgroup {group}", limit, limit - usage + cache, margin, limit - usage)


def _pairs(path: Path) -> dict[str, int]:
    pairs = {}
    for line in path.read_text().splitlines():
        fields = line.replace(":", " ").split()
        if len(fields) >= 2:
            pairs[fields[0]] = int(fields[1])
    return pairs


def tightest(root: Path = Path("/")) -> Memory:
    """Returns the place with the least spare memory."""
    return min([machine_memory(root), *cgroup_memory(root)], key=lambda memory: memory.spare_bytes)


def total_bytes(root: Path = Path("/")) -> int:
    """Returns how much memory programs here can have in all: the machine's, or the least limit of the cgroups."""
    return min(memory.total_bytes for memory in (machine_memory(root), *cgroup_memory(root)))


def budget_of(ram_bytes: int) -> int:
    """Returns the budget of a mount without --cache where `ram_bytes` of memory are otherwise free."""
    return max(0, _machine(ram_bytes, ram_bytes).spare_bytes - DAEMON_BYTES)


def ram_for(budget_bytes: int) -> int:
    """Returns the least memory of which `budget_of` is `budget_bytes`."""
    taken = budget_bytes + DAEMON_BYTES
    ram_bytes = max(taken + MACHINE_MARGIN_BYTES, int(taken / (1 - MACHINE_MARGIN_SHARE)))
    return next(size for size in itertools.count(ram_bytes) if budget_of(size) >= budget_bytes)


def lockable_bytes(root: Path = Path("/")) -> int:
    """Returns how much this process may mlock."""
    for line in (root / "proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:") and int(line.split()[1], 16) >> CAP_IPC_LOCK & 1:
            return UNLIMITED
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def settle_budget(cache_bytes: int | None, root: Path = Path("/")) -> int:
    """Returns the budget for `cache_bytes` (None: all that can be spared).

    More than there is in all is refused; more than can be spared now is reduced, with a message.
    """
    least = tightest(root)
    spare = least.spare_bytes - DAEMON_BYTES
    if spare < MIN_BUDGET_BYTES:
        raise EnvironmentProblem(
            f"no memory for a cache: {format_size(least.available_bytes)} available in the {least.name}",
            "end other programs, or raise the memory limit of the cgroup",
        )
    if cache_bytes is None:
        return spare
    if cache_bytes < MIN_BUDGET_BYTES:
        raise EnvironmentProblem(
            f"a budget of {format_size(cache_bytes)} is too small to stream through",
            f"give --cache at least {format_size(MIN_BUDGET_BYTES)}",
        )
    if cache_bytes > least.total_bytes - least.margin_bytes:
        raise EnvironmentProblem(
            f"a budget of {format_size(cache_bytes)} does not fit: the {least.name} has {format_size(least.total_bytes)}",
            f"--cache {spare} is possible now, or leave --cache out to use what can be spared",
        )
    if cache_bytes > spare:
        log.warning(
            "--cache reduced from %s to %s: that is what the %s can spare now",
            format_size(cache_bytes),
            format_size(spare),
            least.name,
        )
        return spare
    return cache_bytes


def settle_mode(mode: str, budget_bytes: int, root: Path = Path("/")) -> str:
    """Returns the mode to have over FUSE (auto steers where the whole budget may be locked), or inplace as it is."""
    lockable = lockable_bytes(root)
    if mode == "auto":
        chosen = "steer" if lockable >= budget_bytes else "arena"
        why = "memory can be locked" if chosen == "steer" else f"only {format_size(lockable)} may be locked"
        # Arena is slower: whoever could have steer by raising a limit should see it at once.
        log.log(logging.INFO if chosen == "steer" else logging.WARNING, "mode %s: %s", chosen, why)
        return chosen
    if mode == "steer" and lockable < budget_bytes:
        raise EnvironmentProblem(
            f"mode steer locks {format_size(budget_bytes)}, but RLIMIT_MEMLOCK allows {format_size(lockable)}",
            "run as root, raise `ulimit -l`, or use --mode arena",
        )
    return mode


PSI_SOME_LIMIT = 0.10  # share of the last interval in which some task stalled on memory
STEP_SHARE = 0.05
AHEAD_BYTES = 16 << 20  # given back beyond what is missing: who takes memory goes on taking
PAUSE_S = 0.25
PAUSE_NEAR_S = 0.03  # when little is left
NEAR_BYTES = 128 << 20
CALM_S = 3.0
MACHINE_RESERVE_BYTES, GROUP_RESERVE_BYTES = 192 << 20, 96 << 20  # that are left free
LEAST_LIMIT_BYTES = MIN_BUDGET_BYTES // 2


class PressureGauge:
    """Turns what the machine says into the limit that the budget has right now."""

    def __init__(self, budget_bytes: int, root: Path = Path("/")) -> None:
        self.budget_bytes = budget_bytes
        self._root = root
        self._limit = budget_bytes
        self._calm_since = 0.0
        self._stalled_us: int | None = None
        self._looked = 0.0
        self.pause_s = PAUSE_S

    def check(self, budget_bytes: int, used_bytes: int) -> None:
        """Raises EnvironmentProblem if a new budget cannot be had; `used_bytes` are ours already."""
        if budget_bytes < MIN_BUDGET_BYTES:
            raise EnvironmentProblem(f"a budget of {format_size(budget_bytes)} is less than {format_size(MIN_BUDGET_BYTES)}")
        least = tightest(self._root)
        if budget_bytes - used_bytes > least.spare_bytes:
            raise EnvironmentProblem(
                f"a budget of {format_size(budget_bytes)} does not fit: "
                f"the {least.name} can spare {format_size(max(0, used_bytes + least.spare_bytes))}",
                "take less, or free memory there",
            )

    def reset(self, budget_bytes: int) -> None:
        """Starts over with a new budget."""
        self.budget_bytes = self._limit = budget_bytes

    def limit(self, used_bytes: int) -> int:
        """Returns the bytes that may be used now."""
        now = time.monotonic()
        missing = -tightest(self._root).spare_bytes
        self.pause_s = PAUSE_NEAR_S if -missing < NEAR_BYTES else PAUSE_S
        stalls = self._stalls(now)
        if missing > 0:
            # From what is used, not from the limit: what is already on its way out is not asked for twice.
            self._lower(used_bytes - missing - AHEAD_BYTES, now, f"{format_size(missing)} short of the margin")
        elif stalls > PSI_SOME_LIMIT and self._scarce():
            step = int(STEP_SHARE * self.budget_bytes)
            self._lower(min(self._limit, used_bytes) - step, now, f"memory stalls {stalls:.0%} of the time")
        elif self._limit < self.budget_bytes and now - self._calm_since > CALM_S:
            self._raise(-missing)
        return self._limit

    def lost(self, pinned_bytes: int) -> None:
        """What was pinned is no more: start again from half of it."""
        self._lower(pinned_bytes // 2, time.monotonic(), "the pin helper was killed")

    def _lower(self, limit: int, now: float, why: str) -> None:
        limit = max(LEAST_LIMIT_BYTES, limit)
        self._calm_since = now
        if limit < self._limit:
            log.warning("memory pressure (%s): budget %s -> %s", why, format_size(self._limit), format_size(limit))
            self._limit = limit

    def _raise(self, spare_bytes: int) -> None:
        step = min(int(STEP_SHARE * self.budget_bytes), spare_bytes // 2, self.budget_bytes - self._limit)
        self._limit += max(0, step)
        if self._limit == self.budget_bytes:
            log.warning("memory pressure is over: budget %s again", format_size(self._limit))

    def _scarce(self) -> bool:
        """Stalls alone are no reason: a capped neighbour stalls too. The machine itself must be short."""
        memory: Memory = machine_memory(self._root)
        return memory.available_bytes < memory.margin_bytes * 2 + DAEMON_BYTES

    def _stalls(self, now: float) -> float:
        """Share of the time since the last call in which some task stalled on memory; 0 without PSI."""
        total_us = stalled_us(self._root)
        if total_us is None:
            return 0.0
        before, self._stalled_us = self._stalled_us, total_us
        elapsed, self._looked = now - self._looked, now
        return 0.0 if before is None or elapsed <= 0 else (total_us - before) / 1e6 / elapsed


def free_bytes(root: Path = Path("/")) -> int:
    """Memory that may be filled, without what could be had back: of the machine, or less where a cgroup has a limit."""
    of_groups = (memory.free_bytes - GROUP_RESERVE_BYTES for memory in cgroup_memory(root))
    return max(0, min([machine_free(root) - MACHINE_RESERVE_BYTES, *of_groups]))


def stalled_us(root: Path = Path("/")) -> int | None:
    """Microseconds since boot in which some task stalled on memory; None without PSI."""
    try:
        line = (root / "proc/pressure/memory").read_text().splitlines()[0]
    except OSError:
        return None
    return int(line.rpartition("total=")[2])
