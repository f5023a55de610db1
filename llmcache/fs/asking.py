"""The clients' end of the control socket: one request to the mount on a path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llmcache.errors import MountProblem
from llmcache.fs import control, mountpoint


def ask(
    mount: str, message: dict[str, Any], on_progress: Callable[[dict[str, Any]], None] = lambda _progress: None
) -> dict[str, Any]:
    """Reply of the daemon of the mount on a path; MountProblem if there is no mount, no living daemon, or it says no."""
    point = mountpoint.resolve(mount)
    entry = mountpoint.find(point)
    if entry is None:
        mounts = mountpoint.ours()
        hint = f"mounted are: {', '.join(mounts)}" if mounts else None
        raise MountProblem(f"no llmcachefs is mounted on {mount}", hint)
    try:
        return control.request(point, message, uid=entry.owner, on_progress=on_progress)
    except control.NoDaemon:
        if entry.fstype == mountpoint.IN_PLACE:
            hint = f"its files can be read, nothing steers them; mount again, or: llmcache umount {point}"
            raise MountProblem(f"the daemon of {point} has ended", hint) from None
        if mountpoint.answers(point) == 0:  # it serves
            socket = control.files(point, entry.owner).socket
            hint = "set XDG_RUNTIME_DIR as it was when the mount was made"
            raise MountProblem(f"{point} is served, but nothing listens at {socket}", hint) from None
        raise mountpoint.stale(point) from None


@contextmanager
def understood(mount: str) -> Iterator[None]:
    """While a reply of the mount on a path is read: MountProblem if it is not what this version knows."""
    try:
        yield
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        hint = "it may be of another version: unmount and mount again"
        raise MountProblem(f"{mount}: its daemon tells what this version does not understand", hint) from error
