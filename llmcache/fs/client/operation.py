"""`llmcache resize`, `warmup`, `evict` and `umount`: what is asked of a mount that serves, and what came of it.

Progress goes to stderr, results to stdout. `umount` goes through the daemon where there is one, else directly; with force
whatever state the mount is in.
"""

from __future__ import annotations

import errno
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from llmcache.errors import MountProblem, printable
from llmcache.fs.client import control, mountpoint
from llmcache.fs.client.control import ask, understood
from llmcache.units import format_duration, format_size

_WIDTH = 79
_NS = 1e9


def resize(mount: str, size_bytes: int, *, as_json: bool) -> None:
    """Gives a mount another budget; returns when what it keeps has shrunk to it."""
    with _progress("shrinking") as show:
        reply = ask(mount, {"op": "resize", "cache_bytes": size_bytes, "wait": True}, show)
    if as_json:
        print(json.dumps(reply))
        return
    with understood(mount):
        before, now, used = (format_size(reply[key]) for key in ("before_bytes", "budget_bytes", "resident_bytes"))
    print(f"{printable(mount)}: budget {before} -> {now}, {used} resident")


def warmup(mount: str, globs: tuple[str, ...], *, check: bool, as_json: bool) -> None:
    """Brings files in, or (`check`) looks how much of them is there.

    MountProblem, after the output, if something that should be there is not.
    """
    with _progress("checking" if check else "warming") as show:
        reply = ask(mount, {"op": "warmup", "globs": list(globs), "check": check}, show)
    with understood(mount):
        if as_json:
            print(json.dumps(reply))
        else:
            _print_warm(mount, reply, check)
        _refuse_cold(mount, reply, check)


def _print_warm(mount: str, reply: dict[str, Any], check: bool) -> None:
    console = Console(width=_WIDTH, file=sys.stdout, highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("file", overflow="ellipsis", no_wrap=True, max_width=34)
    for name in ("size", "to be kept", "kept"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in reply["files"]:
        sizes = (format_size(row[key]) for key in ("size_bytes", "wanted_bytes", "warm_bytes"))
        table.add_row(Text(printable(row["path"].lstrip("/")) + (" (pinned)" if row["pinned"] else "")), *sizes)
    console.print(table)
    kept, wanted = format_size(reply["warm_bytes"]), format_size(reply["wanted_bytes"])
    spent = "" if check else f", {format_size(reply['read_bytes'])} read in {format_duration(reply['seconds'] * _NS)}"
    console.print(Text(f"{printable(mount)}: {kept} of {wanted} kept{spent}"), soft_wrap=True)


def _refuse_cold(mount: str, reply: dict[str, Any], check: bool) -> None:
    if reply["unreadable"]:
        said = ", ".join(map(printable, reply["unreadable"]))
        raise MountProblem(f"cannot be read: {said}", "its permissions in SOURCE, or its storage?")
    missing = reply["wanted_bytes"] - reply["warm_bytes"]
    if missing > 0:
        why = "given up meanwhile? by memory pressure, resize or evict; or locks failed: see its log"
        hint = f"llmcache warmup {mount}" if check else why
        raise MountProblem(f"{format_size(missing)} of what should be kept is not there", hint)


def evict(mount: str, globs: tuple[str, ...], *, as_json: bool) -> None:
    """Gives up what a mount keeps of files; those of --pin stay."""
    with _progress("evicting") as show:
        reply = ask(mount, {"op": "evict", "globs": list(globs)}, show)
    if as_json:
        print(json.dumps(reply))
        return
    with understood(mount):
        count = sum(len(group["paths"]) for group in reply["groups"])
        files = f"{count} {'file' if count == 1 else 'files'}"
        print(f"{printable(mount)}: {format_size(reply['evicted_bytes'])} of {files} evicted")
        for path in reply["pinned"]:
            print(f"llmcache: {printable(path)} is pinned by --pin and stays", file=sys.stderr)


@contextmanager
def _progress(what: str) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar on stderr, where that is a terminal, for progress in bytes."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda told: progress.update(task, completed=told.get("done_bytes", 0), total=told.get("total_bytes"))


UMOUNT_SCHEMA = "llmcache.umount/1"
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
        return {"schema": UMOUNT_SCHEMA, **asdict(self)}


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


def _finish(entry: mountpoint.MountEntry, found: control.Files, process: control.Process | None, force: bool) -> bool:
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
