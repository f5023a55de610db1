"""A cgroup (v1, v2 or hybrid) with a memory limit and a read throttle, removed at the end of a with block.

v1 charges a read to the task that submits it, so the daemon of a FUSE mount must be in the throttled group. A v2 group other
than the root can either contain processes or enable controllers for its children. If the parent has processes (the root of a
container, a delegated scope), they are moved to a sibling of the new group, and back at the end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import final

from llmcache import storage
from llmcache.errors import MissingRequirement
from llmcache.procfs import mounts

MARK = "LLMCACHE_CGROUP"
UNLIMITED_BPS = 1 << 50  # v1 counts a group's bytes only for disks that have a limit in it
V1_NAMES = {"memory": "memory", "io": "blkio"}
_JOIN = 'while [ "$1" != -- ]; do echo $$ > "$1" || exit 125; shift; done; shift; exec "$@"'
_ROOT_HINT = "run the command as root (sudo), or inside `systemd-run --user --scope -p Delegate=yes`"
_REMOVAL_S = 60.0
_EXEC_S = 1.0  # during execve, a process has no environment for an instant


@dataclass(frozen=True)
class Usage:
    """The current use of a group: memory, OOM kills, bytes read from the disk."""

    current_bytes: int = 0
    anon_bytes: int = 0
    oom_kills: int = 0
    read_bytes: int = 0


@dataclass(frozen=True)
class Controllers:
    """A group's directory. Limits apply to the whole subtree."""

    version: int
    path: Path

    def set_memory(self, size_bytes: int | None) -> None:
        name, unlimited = ("memory.limit_in_bytes", "-1") if self.version == 1 else ("memory.max", "max")
        (self.path / name).write_text(unlimited if size_bytes is None else str(size_bytes))

    def set_read_bps(self, disk: str, bps: int | None) -> None:
        if self.version == 1:
            file, text = "blkio.throttle.read_bps_device", f"{disk} {UNLIMITED_BPS if bps is None else bps}"
        else:
            file, text = "io.max", f"{disk} rbps={'max' if bps is None else bps}"
        (self.path / file).write_text(text)

    def memory(self) -> dict[str, int]:
        v1, v2 = ("memory.usage_in_bytes", "total_rss", "memory.oom_control"), ("memory.current", "anon", "memory.events")
        current, anon, events = v1 if self.version == 1 else v2
        files = (self.path / name for name in ("memory.stat", events))
        stat, counted = (dict(line.split() for line in file.read_text().splitlines()) for file in files)
        return {
            "current_bytes": int((self.path / current).read_text()),
            "anon_bytes": int(stat.get(anon, 0)),
            "oom_kills": int(counted.get("oom_kill", 0)),
        }

    def read_bytes(self, disk: str) -> int:
        v1, v2 = ("blkio.throttle.io_service_bytes", r" Read (\d+)"), ("io.stat", r" .*\brbytes=(\d+)")
        file, counter = v1 if self.version == 1 else v2
        found = re.search(rf"^{disk}{counter}", (self.path / file).read_text(), re.MULTILINE)
        return int(found[1]) if found else 0


@dataclass(frozen=True)
class Hierarchy:
    """A mounted hierarchy; this process's group in it is `own`."""

    version: int
    root: Path
    own: Path


def find(controller: str) -> Hierarchy:
    """Return the hierarchy of `controller` ("memory" or "io"); MissingRequirement if none has it."""
    where: dict[str, str] = {}  # the path of this process per controller; the key of v2 is the empty string
    for line in (storage.PROC / "self" / "cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        where |= dict.fromkeys(names.split(","), path.lstrip("/"))

    def standing(version: int, root: Path, path: str) -> Hierarchy:
        # Inside a cgroup namespace, the mount may not contain the path.
        return Hierarchy(version, root, root / path if (root / path).is_dir() else root)

    v1, mounted = V1_NAMES[controller], list(mounts(proc=str(storage.PROC)).values())
    for mount in mounted:
        if mount.fstype == "cgroup" and v1 in mount.options.split(","):
            return standing(1, Path(mount.point), where.get(v1, ""))
    for mount in mounted:
        controllers = Path(mount.point) / "cgroup.controllers"
        if mount.fstype == "cgroup2" and controllers.exists() and controller in controllers.read_text().split():
            return standing(2, Path(mount.point), where.get("", ""))
    raise MissingRequirement(
        f"no mounted cgroup hierarchy has the {controller} controller",
        "a container needs --privileged or a delegated cgroup; some kernels need cgroup_enable=memory at boot",
    )


@dataclass
class Delegation:
    """The controllers (v2) enabled for the children of `parent`, and the leaf that its processes were moved to."""

    parent: Path
    enabled: list[str] = field(default_factory=list)
    leaf: Path | None = None

    def hand_down(self, controllers: Sequence[str]) -> None:
        """Enable `controllers` for the children; after an OSError, all changes are undone."""
        control = self.parent / "cgroup.subtree_control"
        have = control.read_text().split()
        try:
            for name in (one for one in controllers if one not in have):
                try:
                    control.write_text(f"+{name}")
                except OSError as error:
                    # EBUSY: the parent has processes of its own
                    if self.leaf is not None or error.errno != errno.EBUSY:
                        raise
                    self.leaf = self.parent / f"llmcache-rest-{os.getpid()}"
                    self.leaf.mkdir()
                    _move_all(self.parent, self.leaf)
                    control.write_text(f"+{name}")
                self.enabled.append(name)
        except OSError:
            self._disable()
            self.undo()
            raise

    def undo(self) -> None:
        """If processes were moved, disable the controllers, which other groups may use otherwise, and move them back."""
        if self.leaf is None:
            return
        self._disable()
        _move_all(self.leaf, self.parent)
        self.leaf.rmdir()

    def _disable(self) -> None:
        while self.enabled:
            (self.parent / "cgroup.subtree_control").write_text(f"-{self.enabled.pop()}")


def _move_all(source: Path, target: Path) -> None:
    for pid in (source / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            (target / "cgroup.procs").write_text(pid)


@final
class Cgroup:
    """One cgroup over memory and, with a `directory`, I/O."""

    def __init__(
        self, name: str, *, directory: Path | None, memory_bytes: int | None = None, read_bps: int | None = None
    ) -> None:
        self.name = f"llmcache-{name}-{os.getpid()}"
        self.disk = None if directory is None else storage.disk_of(directory)
        self._memory_bytes, self._read_bps = memory_bytes, read_bps
        self._controllers: dict[str, Controllers] = {}
        self._delegations: list[Delegation] = []

    def __enter__(self) -> Cgroup:
        try:
            trees: dict[Hierarchy, list[str]] = {}
            for controller in ("memory",) if self.disk is None else ("memory", "io"):
                trees.setdefault(find(controller), []).append(controller)
            for tree, controllers in trees.items():
                self._make(tree, controllers)
            self.set_memory(self._memory_bytes)
            if self.disk is not None:
                self.set_read_bps(self._read_bps)
        except OSError as error:
            self.close()
            raise MissingRequirement(f"cannot set up cgroup {self.name}: {error}", _ROOT_HINT) from error
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _make(self, tree: Hierarchy, controllers: list[str]) -> None:
        _remove_abandoned(tree)
        refused: OSError | None = None
        for parent in dict.fromkeys((tree.root, tree.own)):  # best first
            path = parent / self.name
            try:
                if tree.version == 2:
                    delegation = Delegation(parent)
                    delegation.hand_down(controllers)
                    self._delegations.append(delegation)
                path.mkdir()
            except OSError as error:
                refused = error
                continue
            self._controllers |= dict.fromkeys(controllers, Controllers(tree.version, path))
            return
        raise MissingRequirement(f"cannot create a cgroup below {tree.root}: {refused}", _ROOT_HINT)

    @property
    def paths(self) -> list[Path]:
        return list(dict.fromkeys(one.path for one in self._controllers.values()))

    def wrap(self, command: Sequence[str | os.PathLike[str]]) -> list[str]:
        """Return a shell command line that enters the group before it executes `command`, so that all memory is charged."""
        procs = [str(path / "cgroup.procs") for path in self.paths]
        argv = [os.fspath(word) for word in command]
        return ["/usr/bin/env", f"{MARK}={self.name}", "/bin/sh", "-c", _JOIN, "join", *procs, "--", *argv]

    def add(self, pid: int) -> None:
        for path in self.paths:
            (path / "cgroup.procs").write_text(str(pid))

    def set_memory(self, size_bytes: int | None) -> None:
        """Change the limit. OSError (EBUSY) if the kernel cannot reclaim enough memory."""
        self._controllers["memory"].set_memory(size_bytes)

    def set_read_bps(self, bps: int | None) -> None:
        assert self.disk is not None
        self._controllers["io"].set_read_bps(self.disk.number, bps)

    def usage(self) -> Usage:
        return Usage(**self._controllers["memory"].memory(), read_bytes=0 if self.disk is None else self.read_bytes())

    def read_bytes(self) -> int:
        assert self.disk is not None
        return self._controllers["io"].read_bytes(self.disk.number)

    def processes(self) -> list[int]:
        return sorted({int(word) for path in self.paths for word in (path / "cgroup.procs").read_text().split()})

    def close(self) -> None:
        """Kill the processes started with `wrap`, move others to the parent, and remove the group."""
        for path in self.paths:
            if path.is_dir():
                self._remove(path)
        self._controllers.clear()
        while self._delegations:
            self._delegations.pop().undo()

    def _remove(self, path: Path) -> None:
        began = time.monotonic()
        while True:
            for word in (path / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    environment = environment_of(int(word))
                    if f"{MARK}={self.name}".encode() in environment:
                        os.kill(int(word), signal.SIGKILL)
                    elif environment or time.monotonic() > began + _EXEC_S:
                        (path.parent / "cgroup.procs").write_text(word)
            try:
                path.rmdir()
                return
            except OSError as error:
                # A killed process stays in its group until it has exited.
                if error.errno != errno.EBUSY or time.monotonic() > began + _REMOVAL_S:
                    raise MissingRequirement(
                        f"cannot remove cgroup {path}: {error}", f"remove it when it is empty: rmdir {path}"
                    ) from error
            time.sleep(0.05)


def _remove_abandoned(tree: Hierarchy) -> None:
    for parent in {tree.root, tree.own}:
        for path in parent.glob("llmcache-*-*"):
            pid = path.name.rpartition("-")[2]
            if pid.isdecimal() and not (storage.PROC / pid).exists():
                with contextlib.suppress(OSError):  # a command still runs in it
                    path.rmdir()


def environment_of(pid: int) -> list[bytes]:
    """Return the initial environment of a process; empty if it has none, has ended or is inside execve."""
    try:
        environment = (storage.PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return []
    return [word for word in environment.split(b"\0") if word]
