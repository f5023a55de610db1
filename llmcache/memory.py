"""How much memory there is: the machine's, the cgroup's (v1, v2), what may be locked, and whether others stall for it.

All functions read /proc and /sys at call time; `root` is there for tests on recorded trees.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

MACHINE_MARGIN_BYTES = 256 << 20
MACHINE_MARGIN_SHARE = 0.05
GROUP_MARGIN_BYTES = 8 << 20
GROUP_MARGIN_SHARE = 1 / 64
MACHINE_RESERVE_BYTES, GROUP_RESERVE_BYTES = 192 << 20, 96 << 20  # that are left free
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
    values = pairs(root / "proc/meminfo")
    total, available = values["MemTotal"] * 1024, values["MemAvailable"] * 1024
    return machine_of(total, available)


def machine_free(root: Path = Path("/")) -> int:
    """Returns MemFree of /proc/meminfo (bytes)."""
    return pairs(root / "proc/meminfo")["MemFree"] * 1024


def machine_of(total_bytes: int, available_bytes: int) -> Memory:
    """Returns a machine of so much memory, of which so much can be had."""
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
        stat = pairs(group / "memory.stat")
    except (OSError, ValueError, KeyError):
        return None  # no such controller here, or a group that is ending
    # v1 counts children under total_*; page cache on the LRU can be had back, locked pages cannot.
    cache = sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in ("inactive_file", "active_file"))
    margin = max(GROUP_MARGIN_BYTES, int(GROUP_MARGIN_SHARE * limit))
    return Memory(f"cgroup {group}", limit, limit - usage + cache, margin, limit - usage)


def pairs(path: Path) -> dict[str, int]:
    """Returns the numbers of a file of lines "key value"; what follows them (units) is left out."""
    found = {}
    for line in path.read_text().splitlines():
        fields = line.replace(":", " ").split()
        if len(fields) >= 2:
            found[fields[0]] = int(fields[1])
    return found


def tightest(root: Path = Path("/")) -> Memory:
    """Returns the place with the least spare memory."""
    return min([machine_memory(root), *cgroup_memory(root)], key=lambda memory: memory.spare_bytes)


def total_bytes(root: Path = Path("/")) -> int:
    """Returns how much memory programs here can have in all: the machine's, or the least limit of the cgroups."""
    return min(memory.total_bytes for memory in (machine_memory(root), *cgroup_memory(root)))


def free_bytes(root: Path = Path("/")) -> int:
    """Memory that may be filled, without what could be had back: of the machine, or less where a cgroup has a limit."""
    of_groups = (memory.free_bytes - GROUP_RESERVE_BYTES for memory in cgroup_memory(root))
    return max(0, min([machine_free(root) - MACHINE_RESERVE_BYTES, *of_groups]))


def lockable_bytes(root: Path = Path("/")) -> int:
    """Returns how much this process may mlock."""
    for line in (root / "proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:") and int(line.split()[1], 16) >> CAP_IPC_LOCK & 1:
            return UNLIMITED
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def stalled_us(root: Path = Path("/")) -> int | None:
    """Microseconds since boot in which some task stalled on memory; None without PSI."""
    try:
        line = (root / "proc/pressure/memory").read_text().splitlines()[0]
    except OSError:
        return None
    return int(line.rpartition("total=")[2])
