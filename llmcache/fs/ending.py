"""`llmcache umount`: through the daemon where there is one, else directly; with force whatever state the mount is in."""

from __future__ import annotations

import contextlib
import errno
import os
import signal

from llmcache.errors import MountProblem
from llmcache.fs import control, mountpoint

_STOP_TIMEOUT_S = 60.0
_KILL_AFTER_S = 10.0


def end_mount(path: str, *, force: bool) -> None:
    """Unmount and wait until the daemon is gone. MountProblem if nothing of ours is mounted, or it is busy or dead."""
    point = mountpoint.resolve(path)
    entry = mountpoint.find(point)
    if entry is None:
        if force and _leftover(point):
            return
        raise MountProblem(f"no llmcachefs is mounted on {path}", _hint())
    found = control.files(point, entry.owner)
    pid = control.daemon_pid(point, entry.owner)
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
    _finish(entry, found, pid, force)


def _hint() -> str | None:
    mounts = mountpoint.ours()
    return f"mounted are: {', '.join(mounts)}" if mounts else "`mount -t fuse.llmcachefs` lists the mounts there are"


def _end_directly(entry: mountpoint.MountEntry, force: bool) -> None:
    if not force and mountpoint.answers(entry.point) == errno.ENOTCONN:
        raise mountpoint.stale(entry.point)
    mountpoint.detach(entry.point, lazy=force)


def _finish(entry: mountpoint.MountEntry, found: control.Files, pid: int | None, force: bool) -> None:
    """Wait for the daemon's end; with force kill one that does not end, and detach what is still there."""
    if not control.wait_until_gone(found, _KILL_AFTER_S, pid):
        if not force or pid is None:
            raise MountProblem(f"{entry.point} is unmounted, but its daemon (pid {pid}) has not ended", f"see {found.log}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        control.wait_until_gone(found, _KILL_AFTER_S, pid)
    now = mountpoint.find(entry.point)
    if force and now is not None and now.mount_id == entry.mount_id:
        mountpoint.detach(entry.point, lazy=True)
    if not control.is_locked(found):
        found.remove()


def _leftover(point: str) -> bool:
    """True if a daemon without a mount, or only its files, had to be cleaned up."""
    found = control.files(point)
    pid = control.daemon_pid(point)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        if not control.wait_until_gone(found, _KILL_AFTER_S):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    known = bool(found.describe())
    found.remove()
    return known or pid is not None
