"""`llmcache mount`: checks, then a daemon in the background or this process in the foreground."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from llmcache.errors import UsageError
from llmcache.fs import libfuse, mountpoint, options
from llmcache.fs.accesslog import check_path
from llmcache.fs.daemon import MountRequest, serve_foreground
from llmcache.fs.policy import DEFAULT_SPILL

MODES = ("auto", "steer", "arena")


def request_of(
    source: str,
    mount: str,
    *,
    cache_bytes: int | None,
    mode: str,
    writable: bool,
    spill: Iterable[str],
    option_values: Iterable[str],
    access_log: str | None = None,
) -> MountRequest:
    """The arguments of a mount, checked among themselves. An empty --spill switches spill files off."""
    given = options.parse(option_values)
    if writable and "ro" in given:
        raise UsageError("--rw and -o ro contradict each other")
    globs = tuple(spill)
    chosen = tuple(glob for glob in globs if glob) if globs else DEFAULT_SPILL
    wanted = options.for_libfuse(given, read_only=not writable and not chosen)
    return MountRequest(source, mount, cache_bytes, mode, writable, chosen, wanted, access_log)


def mount(request: MountRequest, *, foreground: bool) -> None:
    """Serve `request`: returns at the end of the mount (foreground), or once it serves (a daemon)."""
    source, point = mountpoint.check(request.source, request.mount)
    if request.access_log is not None:
        request = replace(request, access_log=check_path(request.access_log, point))
    libfuse.binding()
    mountpoint.check_machine()
    if foreground:
        serve_foreground(request, source, point)
    else:
        from llmcache.fs.background import serve_background

        serve_background(request, source, point)
