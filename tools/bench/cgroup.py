"""A real cgroup (v1, v2 or hybrid) with a memory cap and a read throttle, removed on exit whatever happens.

    with Group("bench", directory=Path("/data"), memory_bytes=500_000_000, read_bps=200_000_000) as group:
        subprocess.run(group.wrap(["llmcachefs", ...]))
        print(group.usage())

Processes join by themselves: `wrap` puts a one-line shell in front that enters the group and execs the program,
so that not a byte is charged elsewhere and no Python runs between fork and exec. It also marks the environment,
by which leftovers (daemons that detached) are known as ours when the group is removed.

v1 charges a read to the group of the task that submits it, so for a FUSE mount it is the daemon that must be in the
throttled group; buffered reads count as well as direct ones.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import final

from . import cgroup_v1, cgroup_v2, hierarchy
from .blockdev import Disk, disk_of
from .errors import BenchError

MARK = "LLMCACHE_CGROUP"
_JOIN = 'while [ "$1" != -- ]; do echo $$ > "$1" || exit 125; shift; done; shift; exec "$@"'
_ROOT_HINT = "run it as root (sudo), or inside `systemd-run --user --scope -p Delegate=yes`"


@dataclass(frozen=True)
class Usage:
    """A snapshot of a group: memory in bytes now and at its peak, limit hits, OOM kills, bytes to and from the disk."""

    current_bytes: int
    peak_bytes: int
    anon_bytes: int
    file_bytes: int
    limit_hits: int
    oom_kills: int
    read_bytes: int
    write_bytes: int


@final
class Group:
    """One cgroup over memory and I/O; on v1 two directories, on v2 one."""

    def __init__(
        self,
        name: str,
        *,
        directory: Path,
        memory_bytes: int | None = None,
        read_bps: int | None = None,
        system: hierarchy.System | None = None,
        disk: Disk | None = None,
    ) -> None:
        """Nothing is made until `with`; `directory` decides which disk is throttled and counted."""
        self.name = f"llmcache-{name}-{os.getpid()}"
        self.system = system or hierarchy.System()
        self.disk = disk or disk_of(directory, self.system.sysfs, self.system.mountinfo)
        self._memory_bytes, self._read_bps = memory_bytes, read_bps
        self._paths: dict[str, Path] = {}
        self._api: dict[str, ModuleType] = {}
        self._delegations: list[cgroup_v2.Delegation] = []

    def __enter__(self) -> Group:
        """Make the group with its limits; what was made before a failure is removed again."""
        if self._paths:
            raise ValueError(f"cgroup {self.name} exists already")
        try:
            self._make()
            self.set_memory(self._memory_bytes)
            self.set_read_bps(self._read_bps)
        except OSError as error:
            self.close()
            raise BenchError(f"cannot set up cgroup {self.name}: {error}", _ROOT_HINT) from error
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the group."""
        self.close()

    def _make(self) -> None:
        found = {name: hierarchy.find(name, self.system) for name in ("memory", "io")}
        if found["memory"] == found["io"]:
            self._make_in(found["memory"], ["memory", "io"])
        else:
            for name, tree in found.items():
                self._make_in(tree, [name])

    def _make_in(self, tree: hierarchy.Hierarchy, controllers: list[str]) -> None:
        refused: OSError | None = None
        for parent in tree.parents():
            path = parent / self.name
            try:
                if tree.version == 2:
                    self._delegations.append(cgroup_v2.delegate(parent, controllers))
                path.mkdir()
            except OSError as error:
                refused = error
                continue
            for name in controllers:
                self._paths[name] = path
                self._api[name] = cgroup_v1 if tree.version == 1 else cgroup_v2
            return
        raise BenchError(f"cannot make a cgroup below {tree.root}: {refused}", _ROOT_HINT)

    @property
    def paths(self) -> list[Path]:
        """Return the group's directories (two on v1, one on v2)."""
        return list(dict.fromkeys(self._paths.values()))

    def wrap(self, command: Sequence[str | os.PathLike[str]]) -> list[str]:
        """Return the command line that enters the group and then becomes `command`."""
        procs = [str(path / "cgroup.procs") for path in self.paths]
        argv = [os.fspath(word) for word in command]
        return ["/usr/bin/env", f"{MARK}={self.name}", "/bin/sh", "-c", _JOIN, "join", *procs, "--", *argv]

    def add(self, pid: int) -> None:
        """Move a running process here; what it used before stays charged elsewhere."""
        for path in self.paths:
            (path / "cgroup.procs").write_text(str(pid))

    def set_memory(self, size_bytes: int | None) -> None:
        """Change the cap; the kernel reclaims at once, or raises OSError (EBUSY) where it cannot."""
        self._api["memory"].set_memory(self._paths["memory"], size_bytes)

    def set_read_bps(self, bps: int | None) -> None:
        """Change the throttle; None means none."""
        self._api["io"].set_read_bps(self._paths["io"], self.disk.number, bps)

    def reclaim(self) -> None:
        """Drop the group's page cache as far as it goes (mlocked and dirty pages stay)."""
        size = self.usage().file_bytes
        if size:
            try:
                self._api["memory"].reclaim(self._paths["memory"], size)
            except OSError as error:
                if error.errno not in (errno.EBUSY, errno.EINTR, errno.EAGAIN):
                    raise

    def usage(self) -> Usage:
        """Return what the group uses now."""
        memory = self._api["memory"].memory_stat(self._paths["memory"])
        read, written = self._api["io"].io_bytes(self._paths["io"], self.disk.number)
        return Usage(
            current_bytes=memory["current"],
            peak_bytes=memory["peak"],
            anon_bytes=memory["anon"],
            file_bytes=memory["file"],
            limit_hits=memory["limit_hits"],
            oom_kills=memory["oom_kills"],
            read_bytes=read,
            write_bytes=written,
        )

    def read_bytes(self) -> int:
        """Return the bytes that the group has read from the disk."""
        read, _ = self._api["io"].io_bytes(self._paths["io"], self.disk.number)
        return int(read)

    def processes(self) -> list[int]:
        """Return the pids in the group."""
        pids: set[int] = set()
        for path in self.paths:
            pids.update(int(word) for word in (path / "cgroup.procs").read_text().split())
        return sorted(pids)

    def close(self) -> None:
        """Remove the group: our leftovers are killed, others moved to the parent; safe to call twice."""
        paths = [path for path in self.paths if path.is_dir()]
        for path in paths:
            _remove(path, self.name, self.system.proc)
        self._paths.clear()
        while self._delegations:
            self._delegations.pop().undo()


def _remove(path: Path, name: str, proc: Path, patience_s: float = 60.0) -> None:
    deadline = time.monotonic() + patience_s
    while True:
        _empty(path, name, proc)
        try:
            path.rmdir()
            return
        except OSError as error:
            # a process that is being killed holds its group for a moment
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise BenchError(f"cannot remove cgroup {path}: {error}", f"rmdir {path} when it is empty") from error
        time.sleep(0.05)


def _empty(path: Path, name: str, proc: Path) -> None:
    for word in (path / "cgroup.procs").read_text().split():
        pid = int(word)
        try:
            if is_ours(pid, name, proc):
                os.kill(pid, signal.SIGKILL)
            else:
                (path.parent / "cgroup.procs").write_text(word)
        except ProcessLookupError:
            continue


def is_ours(pid: int, name: str, proc: Path = Path("/proc")) -> bool:
    """Return whether process `pid` was started through `Group.wrap` of the group `name`."""
    try:
        environment = (proc / str(pid) / "environ").read_bytes()
    except OSError:
        return False
    return f"{MARK}={name}".encode() in environment.split(b"\0")
