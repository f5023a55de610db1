"""The clients' end of the control socket: one request to the mount on a path."""

from __future__ import annotations

from collections.abc import Callable
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
        raise mountpoint.stale(point) from None
