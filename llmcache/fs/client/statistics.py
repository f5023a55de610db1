"""`llmcache stats`: a daemon's counters as a table for people, or as the JSON they came in; and the list of mounts."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from llmcache.errors import MountProblem, UsageError, printable
from llmcache.fs.client import control, mountpoint
from llmcache.fs.client.control import ask, understood
from llmcache.units import format_size

MOUNTS_SCHEMA = "llmcache.mounts/1"
_WIDTH = 79
_MOUNTS_LINE = "{:<10}{:>9}{:>9}{:>9}{:>12}{:>9}  {}"


def fetch(mount: str) -> dict[str, Any]:
    """The counters of the mount on a path; MountProblem if there is no mount or no living daemon."""
    return ask(mount, {"op": "stats"})


def show_openmetrics(mount: str) -> None:
    """Print the counters once as OpenMetrics text, with the names of looping files: this is for the mount's own user."""
    from llmcache.fs.daemon.openmetrics import exposition

    stats = fetch(mount)
    with understood(mount):
        text = exposition(stats, mountpoint.resolve(mount), paths=True)
    sys.stdout.write(text)


def show(mount: str, *, pause_s: float | None, count: int | None, as_json: bool) -> None:
    """Print the counters once, or every `pause_s` seconds, `count` times or until Ctrl-C (which ends normally).

    UsageError: a pause of nothing. MountProblem: no mount, or one that tells what cannot be understood.
    """
    if pause_s is not None and pause_s <= 0:
        raise UsageError("INTERVAL: must be more than nothing", "write 250ms, 1s, 1m")
    before: dict[str, Any] | None = None
    shown = 0
    try:
        while True:
            now = fetch(mount)
            with understood(mount):
                if as_json:
                    print(json.dumps(now, indent=2 if pause_s is None else None), flush=True)
                elif pause_s is None:
                    _print_table(mount, now)
                else:
                    _print_line(now, before, header=shown % 20 == 0)
            before = now
            shown += 1
            if pause_s is None or (count is not None and shown >= count):
                return
            time.sleep(pause_s)
    except KeyboardInterrupt:
        return


def show_mounts(as_json: bool) -> None:
    """Print a row for each mount of this user (root: of all), whether its daemon answers or not."""
    rows = [_mount_row(entry) for entry in mountpoint.of_user()]
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
        print(printable(_MOUNTS_LINE.format(mode, *texts, _percent(row["hit_ratio"]), row["mount"])))
    for problem in filter(None, (row["problem"] for row in rows)):
        print(f"llmcache: {printable(problem)}", file=sys.stderr)


def _mount_row(entry: mountpoint.MountEntry) -> dict[str, Any]:
    told = control.files(entry.point, entry.owner).describe()
    row = {"mount": entry.point, "source": told.get("source"), "pid": told.get("pid"), "uid": entry.owner}
    measured = dict.fromkeys(("mode", "uptime_s", "budget_bytes", "pinned_bytes", "resident_bytes", "read_bytes"))
    try:
        stats = fetch(entry.point)
        with understood(entry.point):
            answered = {key: stats[key] for key in measured}
            return {**row, "problem": None, **answered, "hit_ratio": hit_ratio(stats)}
    except MountProblem as problem:
        return {**row, "problem": problem.message, **measured, "hit_ratio": None}


def hit_ratio(stats: dict[str, Any]) -> float | None:
    """Byte hit ratio (0..1): share of the bytes that readers got which came from memory; None before any.

    In steer the pinned part of a loop is read without a request: it is counted once for each pass that was seen.
    """
    got = float(stats.get("read_bytes", 0))
    return float(stats.get("hit_bytes", 0)) / got if got else None


def _prefetch(stats: dict[str, Any], kind: str) -> int:
    return int(stats.get("prefetch", {}).get(f"{kind}_bytes", 0))


def useful_ratio(stats: dict[str, Any]) -> float | None:
    """Share of prefetched bytes that were read in time; None before any."""
    total = sum(_prefetch(stats, kind) for kind in ("useful", "late", "wasted"))
    return _prefetch(stats, "useful") / total if total else None


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:.1f} %"


def _print_table(mount: str, stats: dict[str, Any]) -> None:
    console = Console(width=_WIDTH, file=sys.stdout, highlight=False, markup=False)
    console.print(Text(f"{printable(mount)}: mode {printable(stats['mode'])}, budget {format_size(stats['budget_bytes'])}"))
    if stats.get("metrics"):
        console.print(Text(f"metrics on http://{printable(stats['metrics'])}/metrics"))
    facts = Table(box=None, show_header=False, pad_edge=False)
    for column in ("", "right", "", "right"):
        facts.add_column(justify="right" if column else "left")
    rows = [
        ("pinned", "pinned_bytes", "given to readers", "read_bytes"),
        ("window", "window_bytes", "read from storage", "backing_read_bytes"),
        ("resident", "resident_bytes", "written to storage", "backing_write_bytes"),
    ]
    for left, left_key, right, right_key in rows:
        facts.add_row(left, format_size(stats.get(left_key, 0)), f"   {right}", format_size(stats.get(right_key, 0)))
    facts.add_row("daemon", format_size(stats.get("daemon_bytes", 0)), "   byte hit ratio", _percent(hit_ratio(stats)))
    facts.add_row("CPU", f"{stats.get('cpu_s', 0):.1f} s", "   prefetch in time", _percent(useful_ratio(stats)))
    if stats.get("beyond_bytes"):
        facts.add_row("beyond", format_size(stats["beyond_bytes"]), "", "")
    if log := stats.get("access_log"):
        facts.add_row("", "", "   logged references", printable(f"{log['rows']}, {log['lost_rows']} lost"))
    console.print(facts)
    if stats.get("files"):
        console.print(_file_table(stats["files"]))
    for file in stats.get("files", ()):
        if experts := file.get("experts"):
            kept = f"{experts['kept']} of {experts['count']} experts kept, {format_size(experts['kept_bytes'])}"
            console.print(Text(f"{printable(file['path']).lstrip('/')}: {kept} of {format_size(experts['bytes'])}"))


def _file_table(files: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("file", overflow="ellipsis", no_wrap=True, max_width=30)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("class", no_wrap=True)
    table.add_column("loop", justify="right", no_wrap=True)
    table.add_column("period", justify="right", no_wrap=True)
    table.add_column("pinned", justify="right", no_wrap=True)
    for file in files:
        loops = file.get("loops") or [{}]
        for number, loop in enumerate(loops):
            name = (Text(printable(file["path"]).lstrip("/")), format_size(file["size_bytes"]), printable(file["class"]))
            period = loop.get("period_s")
            table.add_row(
                *(name if number == 0 else ("", "", "")),
                format_size(loop["bytes"]) if loop else "-",
                f"{period:.2f} s" if period else "-",
                format_size(loop["pinned_bytes"]) if loop else "-",
            )
    return table


def _print_line(now: dict[str, Any], before: dict[str, Any] | None, *, header: bool) -> None:
    """One sample of an interval: levels as they are, counters as rates since the last sample."""
    columns = ("pinned", "window", "daemon", "read/s", "storage/s", "written/s", "in time")
    if header:
        print("".join(f"{name:>11}" for name in columns), flush=True)

    passed_s = 0.0 if before is None else now["uptime_s"] - before["uptime_s"]  # a busy daemon answers late

    def rate(key: str) -> str:
        if before is None or passed_s <= 0:  # another mount on the same path
            return "-"
        return format_size((now.get(key, 0) - before.get(key, 0)) / passed_s)

    cells = [format_size(now.get(f"{key}_bytes", 0)) for key in ("pinned", "window", "daemon")]
    cells += [rate("read_bytes"), rate("backing_read_bytes"), rate("backing_write_bytes"), _percent(useful_ratio(now))]
    print("".join(f"{cell:>11}" for cell in cells), flush=True)
