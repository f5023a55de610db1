"""What `llmcache mount` prints once the mount serves: one line for people, or the document of --json."""

from __future__ import annotations

import json
from typing import Any

from llmcache.errors import printable
from llmcache.fs import control, mountpoint
from llmcache.fs.asking import ask
from llmcache.fs.daemon import MountRequest
from llmcache.fs.settings import DEFAULT
from llmcache.units import format_size

SCHEMA = "llmcache.mount/1"


def announce(point: str, request: MountRequest, log: str | None, as_json: bool) -> None:
    """Print it on stdout, at once. MountProblem if no daemon answers."""
    told = document(point, request, log)
    print(json.dumps(told) if as_json else line(told), flush=True)


def document(point: str, request: MountRequest, log: str | None) -> dict[str, Any]:
    """Returns what the mount on a real path does, as its daemon tells; `log`: where its log goes, None for a terminal."""
    stats = ask(point, {"op": "stats"})
    told = control.files(point).describe()
    entry = mountpoint.find(point)  # not statvfs: in the foreground this is the daemon, which never waits for its own mount
    read_only = entry is not None and "ro" in entry.options.split(",")
    return {
        "schema": SCHEMA,
        "pid": told.get("pid"),
        "source": told.get("source"),
        "mount": point,
        **{key: stats[key] for key in ("mode", "budget_bytes", "helper_pid")},
        "budget_origin": request.cache_origin,
        "writable": [] if read_only else ["*"] if request.writable else list(request.spill),
        "log": log,
    }


def line(told: dict[str, Any]) -> str:
    """Returns the document as one line: mode, budget and where that comes from, what may be written, how to see more."""
    origin, globs, point = told["budget_origin"], told["writable"], told["mount"]
    why = "what memory can spare; --cache sets it" if origin == DEFAULT else origin
    budget = f"{format_size(told['budget_bytes'])} ({why})"
    writes = "writable" if globs == ["*"] else f"read-only except {', '.join(globs)}" if globs else "read-only"
    return printable(f"llmcachefs: {point}: {told['mode']}, {budget}, {writes}; see: llmcache stats {point}")
