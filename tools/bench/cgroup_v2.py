"""Cgroup v2: one tree, controllers handed down by `cgroup.subtree_control`.

A group other than the real root may hold processes or hand controllers down, not both. So a parent with
processes of its own (a container's root, a delegated scope) first has them moved to a leaf beside the new
group; `Delegation.undo` moves them back.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path

from .cgroup_v1 import pairs


@dataclass
class Delegation:
    """What was changed in `parent` so that its children have the controllers."""

    parent: Path
    enabled: list[str] = field(default_factory=list)
    leaf: Path | None = None

    def undo(self) -> None:
        """Give everything back; the reverse order of `delegate`."""
        if self.leaf is None:
            # the real root's setting is shared with everyone else and harmless: it stays
            return
        for name in self.enabled:
            (self.parent / "cgroup.subtree_control").write_text(f"-{name}")
        move_all(self.leaf, self.parent)
        self.leaf.rmdir()


def delegate(parent: Path, controllers: list[str]) -> Delegation:
    """Enable `controllers` for the children of `parent`; raises OSError if the kernel refuses."""
    have = (parent / "cgroup.subtree_control").read_text().split()
    done = Delegation(parent)
    try:
        for name in (c for c in controllers if c not in have):
            _hand_down(done, name)
    except OSError:
        done.undo()
        raise
    return done


def _hand_down(done: Delegation, name: str) -> None:
    try:
        _enable(done.parent, name)
    except OSError as error:
        # EBUSY: the parent has processes of its own
        if done.leaf is not None or error.errno != errno.EBUSY:
            raise
        done.leaf = _evacuate(done.parent)
        _enable(done.parent, name)
    done.enabled.append(name)


def _enable(parent: Path, name: str) -> None:
    (parent / "cgroup.subtree_control").write_text(f"+{name}")


def _evacuate(parent: Path) -> Path:
    leaf = parent / f"llmcache-rest-{os.getpid()}"
    leaf.mkdir()
    move_all(parent, leaf)
    return leaf


def move_all(source: Path, target: Path) -> None:
    """Move every process; one that ends meanwhile is no error."""
    for pid in (source / "cgroup.procs").read_text().split():
        try:
            (target / "cgroup.procs").write_text(pid)
        except ProcessLookupError:
            continue


def set_memory(group: Path, size_bytes: int | None) -> None:
    """Cap memory (page cache included) at `size_bytes`; None removes the cap."""
    (group / "memory.max").write_text("max" if size_bytes is None else str(size_bytes))


def set_read_bps(group: Path, disk: str, bps: int | None) -> None:
    """Limit reads from `disk`; None removes the limit."""
    (group / "io.max").write_text(f"{disk} rbps={'max' if bps is None else bps}")


def reclaim(group: Path, size_bytes: int) -> None:
    """Drop up to `size_bytes` of the group's memory; less than that is the kernel's EAGAIN, no error."""
    try:
        (group / "memory.reclaim").write_text(str(size_bytes))
    except (BlockingIOError, FileNotFoundError):  # the file is from Linux 5.19
        return


def memory_stat(group: Path) -> dict[str, int]:
    """Return current, peak, anon, file, limit_hits and oom_kills of the group."""
    stat, events = pairs(group / "memory.stat"), pairs(group / "memory.events")
    current = int((group / "memory.current").read_text())
    peak = group / "memory.peak"  # from Linux 5.19
    return {
        "current": current,
        "peak": int(peak.read_text()) if peak.exists() else current,
        "anon": stat.get("anon", 0),
        "file": stat.get("file", 0),
        "limit_hits": events.get("max", 0),
        "oom_kills": events.get("oom_kill", 0),
    }


def io_bytes(group: Path, disk: str) -> tuple[int, int]:
    """Return (read, written) bytes of the group on `disk`."""
    for line in (group / "io.stat").read_text().splitlines():
        words = line.split()
        if words[:1] == [disk]:
            row = dict(word.split("=", 1) for word in words[1:])
            return int(row.get("rbytes", 0)), int(row.get("wbytes", 0))
    return 0, 0
