"""`llmcache stats`, `resize`, `warmup`, `evict` and `umount`: requests to mounts, and the display of the results.

Progress is written to stderr, results to stdout.
"""

from __future__ import annotations

import errno
import itertools
import json
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from llmcache.errors import MountProblem, UsageError, printable, say
from llmcache.mount.client import control, mountpoint
from llmcache.mount.client.control import reply_errors
from llmcache.mount.client.mountpoint import ask
from llmcache.mount.readahead import restore_left
from llmcache.mount.stats import FileStats, LoopStats, MountStats, Prefetch, from_json, text
from llmcache.procfs import Mount
from llmcache.units import format_duration, format_percent, format_size

MOUNTS_SCHEMA = "llmcache.mounts/1"
UMOUNT_SCHEMA = "llmcache.umount/1"
_MOUNTS_LINE = "{:<10}{:>9}{:>9}{:>9}{:>12}{:>9}  {}"
_MOUNT_KEYS = ("mode", "uptime_s", "budget_bytes", "pinned_bytes", "resident_bytes", "read_bytes", "hit_ratio")
_WIDTH = 79
_NS = 1e9
_STOP_TIMEOUT_S = 60.0
_KILL_AFTER_S = 10.0
_END_S = 60.0  # without force: the daemon completes its access log


def fetch(mount: str) -> dict[str, Any]:
    """Return the stats document. MountProblem: no mount, or no living daemon."""
    return ask(mount, {"op": "stats"})


def show_openmetrics(mount: str) -> None:
    """Print the counters once as OpenMetrics text, with file names."""
    from llmcache.mount.daemon.openmetrics import exposition

    document = fetch(mount)
    with reply_errors(mount):
        exposed = exposition(from_json(MountStats, document), mountpoint.resolve(mount), paths=True)
    sys.stdout.write(exposed)


def show_stats(mount: str, *, pause_s: float | None, count: int | None, as_json: bool) -> None:
    """Print the counters once, or every `pause_s` seconds, `count` times or until Ctrl-C (which ends normally).

    UsageError: `pause_s` is not positive. MountProblem: no mount, or an invalid reply.
    """
    if pause_s is not None and pause_s <= 0:
        raise UsageError("INTERVAL: must be more than 0", "for example 250ms, 1s or 1m")
    before: MountStats | None = None
    with suppress(KeyboardInterrupt):
        for shown in itertools.count():
            document = fetch(mount)
            if as_json:
                print(json.dumps(document, indent=2 if pause_s is None else None), flush=True)
            else:
                with reply_errors(mount):
                    now = from_json(MountStats, document)
                if pause_s is None:
                    _print_table(mount, now)
                else:
                    _print_line(now, before, header=shown % 20 == 0)
                before = now
            if pause_s is None or shown + 1 == count:
                return
            time.sleep(pause_s)


def show_mounts(as_json: bool) -> None:
    """Print a row for each mount of this user (root: of all users)."""
    rows = [_mount_row(mount) for mount in mountpoint.of_user()]
    if as_json:
        print(json.dumps({"schema": MOUNTS_SCHEMA, "mounts": rows}, indent=2))
        return
    if not rows:
        print("no llmcachefs is mounted")
        return
    print(_MOUNTS_LINE.format("mode", "budget", "pinned", "resident", "to readers", "hits", "mount"))
    for row in rows:
        sizes = [row[f"{key}_bytes"] for key in ("budget", "pinned", "resident", "read")]
        texts = ["-" if size is None else format_size(size) for size in sizes]
        mode = "no answer" if row["problem"] else row["mode"]
        print(printable(_MOUNTS_LINE.format(mode, *texts, format_percent(row["hit_ratio"]), row["mount"])))
    for problem in filter(None, (row["problem"] for row in rows)):
        say(problem)


def _mount_row(mount: Mount) -> dict[str, Any]:
    info = control.files(mount.point, mount.owner).describe()
    row = {"mount": mount.point, "source": info.get("source"), "pid": info.get("pid"), "uid": mount.owner}
    try:
        document = fetch(mount.point)
        with reply_errors(mount.point):
            stats = from_json(MountStats, document)
    except MountProblem as problem:
        return {**row, "problem": problem.message, **dict.fromkeys(_MOUNT_KEYS)}
    return {**row, "problem": None, **{key: getattr(stats, key) for key in _MOUNT_KEYS}}


def _in_time(prefetch: Prefetch) -> str:
    return format_percent(prefetch.useful_bytes / prefetch.total_bytes if prefetch.total_bytes else None)


def _table(**columns: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, settings in columns.items():
        table.add_column(name.replace("_", " "), no_wrap=True, **settings)
    return table


_NAME: dict[str, Any] = {"overflow": "ellipsis"}
_NUMBER: dict[str, Any] = {"justify": "right"}


def _print_table(mount: str, stats: MountStats) -> None:
    console = Console(width=_WIDTH, file=sys.stdout, highlight=False, markup=False)
    budget = f"budget {format_size(stats.budget_bytes)}"
    if stats.limit_bytes < stats.budget_bytes:
        budget += f", limited to {format_size(stats.limit_bytes)} by memory pressure"
    console.print(Text(f"{printable(mount)}: mode {printable(stats.mode)}, {budget}"))
    if stats.metrics:
        console.print(Text(f"metrics on http://{printable(stats.metrics)}/metrics"))
    figures = Table(box=None, show_header=False, pad_edge=False)
    for column in ("", "right", "", "right"):
        figures.add_column(justify="right" if column else "left")
    size = format_size
    figures.add_row("pinned", size(stats.pinned_bytes), "   read by clients", size(stats.read_bytes))
    figures.add_row("window", size(stats.window_bytes), "   read from storage", size(stats.backing_read_bytes))
    figures.add_row("resident", size(stats.resident_bytes), "   written to storage", size(stats.backing_write_bytes))
    figures.add_row("daemon", size(stats.daemon_bytes), "   byte hit ratio", format_percent(stats.hit_ratio))
    figures.add_row("CPU", f"{stats.cpu_s:.1f} s", "   prefetch in time", _in_time(stats.prefetch))
    for label, amount in _special(stats):
        figures.add_row("", "", f"   {label}", printable(amount))
    if stats.beyond_bytes:
        figures.add_row("beyond budget", size(stats.beyond_bytes), "", "")
    console.print(figures)
    if stats.files:
        console.print(_file_table(stats.files))
    for file in stats.files:
        for note in (*(note for loop in file.loops for note in loop_notes(loop)), *_file_notes(file)):
            console.print(Text(printable(f"{file.shown_name}: {note}")))


def _special(stats: MountStats) -> Iterator[tuple[str, str]]:
    services = stats.services
    if services.failures:
        yield "service failures", str(services.failures)
    if services.ended:
        yield "ended services", ", ".join(services.ended)
    if services.lost_touches:
        yield "lost touches", str(services.lost_touches)
    if services.refused_advice:
        yield "refused advice", str(services.refused_advice)
    if log := stats.access_log:
        yield "logged references", f"{log.rows}, {log.lost_rows} lost"


def loop_notes(loop: LoopStats) -> Iterator[str]:
    """Yield why a loop is not fully steered, and whether a client has copied it."""
    if loop.left and loop.steered_pass_bytes is not None and loop.lru_pass_bytes is not None:
        steered, lru = format_size(loop.steered_pass_bytes), format_size(loop.lru_pass_bytes)
        yield f"left to the kernel: steering reads {steered} a pass, the page cache {lru}"
    elif loop.left:
        yield "left to the kernel"
    elif loop.unused_bytes:
        yield f"{format_size(loop.unused_bytes)} not in use"
    if loop.copied is not None:
        yield str(loop.copied)


def _file_notes(file: FileStats) -> Iterator[str]:
    if file.lacks_extents:
        yield f"not steered: no room for its {file.lacks_extents:,} extents next to those of files in use"
    if (experts := file.experts) is not None and experts.alone:
        yield "experts are left to the kernel"
    elif experts is not None:
        kept = f"{experts.kept} of {experts.count} experts cached"
        yield f"{kept}, {format_size(experts.kept_bytes)} of {format_size(experts.size_bytes)}"


def _file_table(files: Iterable[FileStats]) -> Table:
    table = _table(
        file=_NAME | {"max_width": 30}, size=_NUMBER, **{"class": {}}, loop=_NUMBER, period=_NUMBER, pinned=_NUMBER
    )
    for file in files:
        name = (Text(printable(file.shown_name)), format_size(file.size_bytes), printable(file.kind))
        for loop in file.loops:
            period = f"{loop.period_s:.2f} s" if loop.period_s else "-"
            table.add_row(*name, format_size(loop.size_bytes), period, format_size(loop.pinned_bytes))
            name = (Text(), "", "")
        if not file.loops:
            table.add_row(*name, "-", "-", "-")
    return table


def _print_line(now: MountStats, before: MountStats | None, *, header: bool) -> None:
    if header:
        columns = ("pinned", "window", "daemon", "read/s", "storage/s", "written/s", "in time")
        print("".join(f"{name:>11}" for name in columns), flush=True)
    # The daemon's clock, because it may reply late. Less than before: another mount on the same path.
    passed_s = 0.0 if before is None else now.uptime_s - before.uptime_s
    levels = [format_size(level) for level in (now.pinned_bytes, now.window_bytes, now.daemon_bytes)]
    rates = ["-"] * 3
    if before is not None and passed_s > 0:
        names = ("read_bytes", "backing_read_bytes", "backing_write_bytes")
        rates = [format_size((getattr(now, name) - getattr(before, name)) / passed_s) for name in names]
    print("".join(f"{cell:>11}" for cell in (*levels, *rates, _in_time(now.prefetch))), flush=True)


def resize(mount: str, size_bytes: int, *, as_json: bool) -> None:
    """Set the budget; return when the cache has shrunk to it."""
    with _progress("shrinking") as show:
        reply = ask(mount, {"op": "resize", "cache_bytes": size_bytes, "wait": True}, show)
    if as_json:
        print(json.dumps(reply))
        return
    with reply_errors(mount):
        before, now, used = (format_size(reply[key]) for key in ("before_bytes", "budget_bytes", "resident_bytes"))
    print(f"{printable(mount)}: budget {before} -> {now}, {used} resident")


def warmup(mount: str, globs: tuple[str, ...], *, check: bool, as_json: bool) -> None:
    """Prefetch files, or (`check`) report how much of them is cached.

    MountProblem, after the output: the daemon cannot read a file, or not all bytes that fit are cached.
    """
    with _progress("checking" if check else "warming") as show:
        reply = ask(mount, {"op": "warmup", "globs": list(globs), "check": check}, show)
    with reply_errors(mount):
        if as_json:
            print(json.dumps(reply))
        else:
            _print_warm(mount, reply, check)
        if reply["unreadable"]:
            names = ", ".join(map(printable, reply["unreadable"]))
            raise MountProblem(f"the daemon cannot read {names}", "check the permissions in SOURCE, and the storage")
        missing = reply["wanted_bytes"] - reply["warm_bytes"]
    if missing > 0:
        why = "memory pressure, resize or evict may have evicted it, or locking has failed: see the log of the mount"
        hint = f"llmcache warmup {mount}" if check else why
        raise MountProblem(f"{format_size(missing)} of {format_size(reply['wanted_bytes'])} is not cached", hint)


def _print_warm(mount: str, reply: dict[str, Any], check: bool) -> None:
    console = Console(width=_WIDTH, file=sys.stdout, highlight=False)
    table = _table(file=_NAME | {"max_width": 34}, size=_NUMBER, to_cache=_NUMBER, cached=_NUMBER)
    for row in reply["files"]:
        sizes = (format_size(row[key]) for key in ("size_bytes", "wanted_bytes", "warm_bytes"))
        name = text(row.get("name", row["path"])).lstrip("/")  # a daemon of version 1.0 does not send names
        table.add_row(Text(printable(name) + (" (pinned)" if row["pinned"] else "")), *sizes)
    console.print(table)
    kept, wanted = format_size(reply["warm_bytes"]), format_size(reply["wanted_bytes"])
    spent = "" if check else f", {format_size(reply['read_bytes'])} read in {format_duration(reply['seconds'] * _NS)}"
    console.print(Text(f"{printable(mount)}: {kept} of {wanted} cached{spent}"), soft_wrap=True)


def evict(mount: str, globs: tuple[str, ...], *, as_json: bool) -> None:
    """Evict cached files from a mount, except those of --pin."""
    with _progress("evicting") as show:
        reply = ask(mount, {"op": "evict", "globs": list(globs)}, show)
    if as_json:
        print(json.dumps(reply))
        return
    with reply_errors(mount):
        count = sum(len(group["paths"]) for group in reply["groups"])
        files = f"{count} {'file' if count == 1 else 'files'}"
        print(f"{printable(mount)}: {format_size(reply['evicted_bytes'])} of {files} evicted")
        for name in reply.get("pinned_names", reply["pinned"]):  # a daemon of version 1.0 does not send names
            say(f"{name} is pinned by --pin and stays cached")


@contextmanager
def _progress(what: str) -> Iterator[Callable[[dict[str, Any]], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda sizes: progress.update(task, completed=sizes.get("done_bytes", 0), total=sizes.get("total_bytes"))


@dataclass(frozen=True)
class Ended:
    """Result of an unmount. `pid`: of the daemon; `killed`: with SIGKILL."""

    mount: str
    mounted: bool
    pid: int | None
    killed: bool

    def document(self) -> dict[str, Any]:
        return {"schema": UMOUNT_SCHEMA, **asdict(self)}


def end_mount(path: str, *, force: bool) -> Ended:
    """Unmount and wait for the end of the daemon. MountProblem: there is no mount, or it is busy or dead.

    `force` also restores read_ahead_kb after a killed daemon.
    """
    try:
        return _end_mount(path, force=force)
    finally:
        if force:
            restore_left()


def _end_mount(path: str, *, force: bool) -> Ended:
    point = mountpoint.resolve(path)
    mount = mountpoint.find(point)
    if mount is None:
        if force and (ended := leftover(point)):
            return ended
        raise mountpoint.not_mounted(path, "llmcache stats lists your mounts")
    found = control.files(point, mount.owner)
    with control.daemon(point, mount.owner) as process:
        try:
            # The socket of a daemon that hangs still accepts connections: with force, the timeout is short.
            timeout_s = _KILL_AFTER_S if force else _STOP_TIMEOUT_S
            control.request(point, {"op": "stop", "force": force}, uid=mount.owner, timeout_s=timeout_s)
        except MountProblem as problem:
            if not force and not isinstance(problem, control.NoDaemon):
                raise
            if not force and mountpoint.answers(point) == errno.ENOTCONN:
                raise mountpoint.stale(point) from None
            mountpoint.detach(point, lazy=force)
        killed = False
        if not control.wait_until_gone(found, _KILL_AFTER_S if force else _END_S, process):
            if not force or process is None:
                pid_text = f" (pid {process.pid})" if process else ""
                hint = f"see its log: {found.log}"
                raise MountProblem(f"{point} is unmounted, but its daemon{pid_text} has not ended", hint)
            killed = process.signal(signal.SIGKILL)
            control.wait_until_gone(found, _KILL_AFTER_S, process)
        now = mountpoint.find(point)
        if force and now is not None and now.id == mount.id:
            mountpoint.detach(point, lazy=True)
        control.remove_left(found)
        return Ended(point, True, process.pid if process else None, killed)


def leftover(point: str) -> Ended | None:
    """Clean up after a mount that no longer exists, if necessary."""
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
