"""`llmcache umount`: through the daemon where there is one, else directly; with force whatever state the mount is in."""

from __future__ import annotations

import errno
import signal
from dataclasses import dataclass
from typing import Any

from llmcache.errors import MountProblem
from llmcache.fs.client import control, mountpoint

SCHEMA = "llmcache.umount/1"
_STOP_TIMEOUT_S = 60.0
_KILL_AFTER_S = 10.0
_END_S = 60.0  # for a daemon that is not killed: it completes its access log


@dataclass(frozen=True)
class Ended:
    """What an unmounting ended. `pid`: its daemon, None if there was none; `killed`: it had to be (SIGKILL)."""

    mount: str
    mounted: bool
    pid: int | None
    killed: bool

    def document(self) -> dict[str, Any]:
        """Returns the JSON-ready document of `llmcache umount --json`."""
        return {"schema": SCHEMA, "mount": self.mount, "mounted": self.mounted, "pid": self.pid, "killed": self.killed}


def end_mount(path: str, *, force: bool) -> Ended:
    """Unmount and wait until the daemon is gone. MountProblem if nothing of ours is mounted, or it is busy or dead."""
    point = mountpoint.resolve(path)
    entry = mountpoint.find(point)
    if entry is None:
        if force and (ended := _leftover(point)):
            return ended
        raise MountProblem(f"no llmcachefs is mounted on {path}", _hint())
    with control.daemon(point, entry.owner) as process:
        try:
            # the socket of a daemon that cannot even die still accepts: force does not wait long for an answer
            patience = _KILL_AFTER_S if force else _STOP_TIMEOUT_S
            control.request(point, {"op": "stop", "force": force}, uid=entry.owner, timeout_s=patience)
        except control.NoDaemon:
            _end_directly(entry, force)
        except MountProblem:
            if not force:
                raise
            _end_directly(entry, force)
        killed = _finish(entry, control.files(point, entry.owner), process, force)
        return Ended(point, True, process.pid if process else None, killed)


def _hint() -> str | None:
    mounts = mountpoint.ours()
    return f"mounted are: {', '.join(mounts)}" if mounts else "`mount -t fuse.llmcachefs` lists the mounts there are"


def _end_directly(entry: mountpoint.MountEntry, force: bool) -> None:
    if not force and mountpoint.answers(entry.point) == errno.ENOTCONN:
        raise mountpoint.stale(entry.point)
    mountpoint.detach(entry.point, lazy=force)


def _finish(
    entry: mountpoint.MountEntry, found: control.Files, process: control.Process | None, force: bool
) -> bool:
    """Wait for the daemon's end; with force kill one that does not end (True), and detach what is still there."""
    killed = False
    if not control.wait_until_gone(found, _KILL_AFTER_S if force else _END_S, process):
        if not force or process is None:
            who = f" (pid {process.pid})" if process else ""
            raise MountProblem(f"{entry.point} is unmounted, but its daemon{who} has not ended", f"see {found.log}")
        killed = process.signal(signal.SIGKILL)
        control.wait_until_gone(found, _KILL_AFTER_S, process)
    now = mountpoint.find(entry.point)
    if force and now is not None and now.mount_id == entry.mount_id:
        mountpoint.detach(entry.point, lazy=True)
    control.remove_left(found)
    return killed


def _leftover(point: str) -> Ended | None:
    """What there was to clean up: a daemon without a mount, or only its files; None if there was neither."""
    found = control.files(point)
    with control.daemon(point) as process:
        killed = False
        if process is not None:
            process.signal(signal.SIGTERM)
            if not control.wait_until_gone(found, _KILL_AFTER_S):
                killed = process.signal(signal.SIGKILL)
                control.wait_until_gone(found, _KILL_AFTER_S, process)
        known = bool(found.describe())
        control.remove_left(found)
        pid = process.pid if process else None
        return Ended(point, False, pid, killed) if known or pid is not None else None
