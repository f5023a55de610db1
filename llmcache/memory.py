"""Memory of the machine and of cgroups, the limit of locked memory, and memory stalls.

All functions read /proc and /sys at call time. Tests set `root` to a recorded tree.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from llmcache.procfs import status_of

MACHINE_MARGIN_BYTES = 256 << 20
MACHINE_MARGIN_SHARE = 0.05
GROUP_MARGIN_BYTES = 8 << 20
GROUP_MARGIN_SHARE = 1 / 64
MACHINE_RESERVE_BYTES, GROUP_RESERVE_BYTES = 192 << 20, 96 << 20
CAP_IPC_LOCK = 14
UNLIMITED = 1 << 60
OOM_FIRST, OOM_NEVER = 1000, -1000


@dataclass(frozen=True)
class Memory:
    """The memory of the machine or of a cgroup. `margin_bytes` of the available memory should stay available.

    Data that can be dropped at any time may fill `free_bytes`, except for `reserve_bytes`.
    """

    name: str
    total_bytes: int
    available_bytes: int
    margin_bytes: int
    free_bytes: int = 0
    reserve_bytes: int = 0

    @property
    def spare_bytes(self) -> int:
        return self.available_bytes - self.margin_bytes

    @property
    def slack_bytes(self) -> int:
        return self.free_bytes - self.reserve_bytes


def machine_memory(root: Path = Path("/")) -> Memory:
    """Return the memory of /proc/meminfo."""
    content = read(root / "proc/meminfo")
    return machine_of(*(_number(content, name) * 1024 for name in ("MemTotal", "MemAvailable", "MemFree")))


def machine_of(total_bytes: int, available_bytes: int, free_bytes: int = 0) -> Memory:
    """Return a machine with this memory, with margin and reserve set."""
    margin = max(MACHINE_MARGIN_BYTES, int(total_bytes * MACHINE_MARGIN_SHARE))
    return Memory("machine", total_bytes, available_bytes, margin, free_bytes, MACHINE_RESERVE_BYTES)


def cgroup_memory(root: Path = Path("/")) -> list[Memory]:
    """Return the memory limits of this process's cgroup and its ancestors."""
    return _limits(_groups(read(root / "proc/self/cgroup"), root))


def limits_apart(inode: int, root: Path = Path("/")) -> list[Memory] | None:
    """Return the limits of the cgroup with this inode that do not apply to this process; None if it is not visible.

    Without a cgroup file system (in a chroot without /sys), the list is empty.
    """
    base, files = root / "sys/fs/cgroup", _V2_FILES
    if cgroup_version(root) == 1:
        base, files = base / "memory", _V1_FILES
    if not base.is_dir():
        return []
    for directory, _, _ in os.walk(base):
        if os.stat(directory).st_ino == inode:
            group = Path(directory)
            chain = [group, *(above for above in group.parents if above.is_relative_to(base))]
            return _limits(_apart([(str(part), *files) for part in chain], root))
    return None


def limits_of_process_apart(pid: int, root: Path = Path("/")) -> list[Memory]:
    """Return the memory limits that apply to another process but not to this one."""
    return _limits(_apart(_groups(read(root / f"proc/{pid}/cgroup"), root), root))


def _apart(groups: Iterable[tuple[str, ...]], root: Path) -> list[tuple[str, ...]]:
    own = {group for group, *_ in _groups(read(root / "proc/self/cgroup"), root)}
    return [group for group in groups if group[0] not in own]


def _limits(groups: Iterable[tuple[str, ...]]) -> list[Memory]:
    found = (_limit_of(*group) for group in groups)
    return [memory for memory in found if memory is not None]


_V1_FILES: tuple[str, ...] = ("memory.usage_in_bytes", "memory.limit_in_bytes")
_V2_FILES: tuple[str, ...] = ("memory.current", "memory.max", "memory.high")


@functools.lru_cache(maxsize=8)
def _groups(lines: bytes, root: Path) -> tuple[tuple[str, ...], ...]:
    """Return (directory, usage file, limit files) of the groups in /proc/PID/cgroup and their ancestors.

    Above memory.high of v2, the kernel throttles the group.
    """
    found: dict[Path, tuple[str, ...]] = {}
    for line in lines.decode(errors="surrogateescape").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            bases = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
            files = _V2_FILES
        elif "memory" in controllers.split(","):
            bases = [root / "sys/fs/cgroup/memory"]
            files = _V1_FILES
        else:
            continue
        own = Path(path.lstrip("/"))
        for base in bases:
            for part in (own, *own.parents):
                found.setdefault(base / part, files)
    return tuple((str(group), *files) for group, files in found.items())


def oom_kills(root: Path = Path("/")) -> int:
    """Return how many processes the OOM killer has ended since boot, including kills in cgroups."""
    return _number(read(root / "proc/vmstat"), "oom_kill")


def set_oom_score(score: int, pid: int | str = "self") -> None:
    """Set when the OOM killer chooses a process: OOM_FIRST, or OOM_NEVER, which needs root. Children inherit it.

    Without permission, nothing changes.
    """
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(score))


def cgroup_version(root: Path = Path("/")) -> int | None:
    """Return the cgroup version that accounts this process's memory; None if none does."""
    lines = [line.split(":", 2)[1] for line in (root / "proc/self/cgroup").read_text().splitlines()]
    if any("memory" in controllers.split(",") for controllers in lines):
        return 1
    return 2 if "" in lines and (root / "sys/fs/cgroup/cgroup.controllers").exists() else None


def _limit_of(group: str, usage_file: str, *limit_files: str) -> Memory | None:
    try:
        values = [read(f"{group}/{file}").strip() for file in limit_files]
        limit = min(UNLIMITED if text == b"max" else int(text) for text in values)
        if limit >= UNLIMITED:
            return None
        usage = int(read(f"{group}/{usage_file}"))
        stat = read(f"{group}/memory.stat")
        # total_* in v1 includes the children. Page cache on these lists can be reclaimed; locked pages cannot.
        prefix = "total_" if usage_file == _V1_FILES[0] else ""
        cache = sum(_number(stat, f"{prefix}{name}") for name in ("inactive_file", "active_file"))
    except (OSError, ValueError):
        return None  # the controller is missing, or the group was removed
    margin = max(GROUP_MARGIN_BYTES, int(GROUP_MARGIN_SHARE * limit))
    return Memory(f"cgroup {group}", limit, limit - usage + cache, margin, limit - usage, GROUP_RESERVE_BYTES)


def read(path: str | Path) -> bytes:
    """Return the content of a small kernel file; OSError. It is faster than `open`, for many reads a second."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)


def _number(content: bytes, name: str) -> int:
    at = (b"\n" + content).find(b"\n%s" % name.encode())
    return 0 if at < 0 else int(content[at:].split(None, 2)[1])


def places(root: Path = Path("/")) -> list[Memory]:
    """Return the memory of the machine, and of the cgroups that have a limit."""
    return [machine_memory(root), *cgroup_memory(root)]


def tightest(root: Path = Path("/")) -> Memory:
    """Return the machine or cgroup with the least spare memory."""
    return min(places(root), key=lambda memory: memory.spare_bytes)


def total_bytes() -> int:
    """Return the memory of the machine, or the smallest limit of the cgroups."""
    return min(memory.total_bytes for memory in places())


def lockable_bytes(root: Path = Path("/")) -> int:
    """Return how many bytes this process may mlock."""
    if int(status_of(proc=root / "proc")["CapEff"], 16) >> CAP_IPC_LOCK & 1:
        return UNLIMITED
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def stalled_us(root: Path = Path("/"), resource: str = "memory") -> int | None:
    """Return how long some task stalled on a resource ("memory", "io") since boot; None without PSI."""
    try:
        line = read(root / f"proc/pressure/{resource}").splitlines()[0]
    except OSError:
        return None
    return int(line.rpartition(b"total=")[2])
