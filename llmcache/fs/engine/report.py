"""The picture of a mount that `llmcache stats` shows. Base units; ratios are left to the reader."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcache.fs.engine.group import SINGLE, Group, Member

if TYPE_CHECKING:
    from llmcache.fs.engine.references import References
    from llmcache.fs.engine.state import CacheState

SCHEMA = "llmcache.stats/1"


def snapshot(state: CacheState, mode: str, helper_pid: int) -> dict[str, Any]:
    """Returns everything as JSON-ready values. Takes the lock."""
    with state.lock:
        counters = state.counters.as_dict()
        result: dict[str, Any] = {
            "schema": SCHEMA,
            "mode": mode,
            "uptime_s": (time.monotonic_ns() - state.began_ns) / 1e9,
            "budget_bytes": state.budget_bytes,
            "limit_bytes": state.pin_limit_bytes,
            "pinned_bytes": state.pinned_bytes(),
            "window_bytes": state.window_bytes(),
            "pages_bytes": _pages_bytes(state),
            "resident_bytes": state.used_bytes,
            "read_bytes": counters["hit_bytes"] + counters["miss_bytes"],
            "hit_bytes": counters["hit_bytes"],
            "miss_bytes": counters["miss_bytes"],
            "requested_bytes": counters["requested_bytes"],
            "backing_read_bytes": counters["backing_read_bytes"],
            "backing_write_bytes": counters["backing_write_bytes"],
            "prefetch": {
                "useful_bytes": counters["prefetch_useful_bytes"],
                "late_bytes": counters["prefetch_late_bytes"],
                "wasted_bytes": counters["prefetch_wasted_bytes"],
            },
            "waits": {"late": state.late_waits.as_dict(), "demand": state.demand_waits.as_dict()},
            "stored_bytes": counters["stored_bytes"],
            "invalidated_bytes": counters["invalidated_bytes"],
            "refault_bytes": counters["refault_bytes"],
            "beyond_bytes": max(0, state.used_bytes - state.limit_bytes) if state.slack_bytes else 0,
            "helper_pid": helper_pid,
            "arena": _arena(state.references),
            "access_log": _access_log(state.references),
            "files": _files(state),
        }
        held_bytes = state.held_bytes
    helper_bytes = private_bytes(str(helper_pid)) if helper_pid else 0
    result["cpu_s"] = cpu_s("self") + (cpu_s(str(helper_pid)) if helper_pid else 0.0)
    result["daemon_bytes"] = max(0, private_bytes("self") - held_bytes) + helper_bytes
    return result


def _arena(references: References) -> dict[str, int] | None:
    """What the deterministic core counts, in blocks of 4 KiB of fetched extents; None in mode steer."""
    core = references.core
    if core is None:
        return None
    return {
        "references": core.clock,
        "hit_blocks": core.hit_blocks,
        "miss_blocks": core.miss_blocks,
        "evicted_blocks": core.evicted_blocks,
        "held_blocks": core.held_blocks,
    }


def _access_log(references: References) -> dict[str, Any] | None:
    log = references.log
    return None if log is None else {"path": log.path, "rows": log.rows, "lost_rows": log.lost}


def _pages_bytes(state: CacheState) -> int:
    """What is charged for single pages: of headers, embedding rows, small files and written ones."""
    return sum(group.charge[extent] for group in state.groups.values() for extent in group.strays)


def _files(state: CacheState) -> list[dict[str, Any]]:
    owners = state.owners.items()
    in_use = {member for backing, (_, member) in owners if state.opens.get(backing)}
    return [_file(group, member, member in in_use) for group in state.groups.values() for member in group.members]


def _file(group: Group, member: Member, is_open: bool) -> dict[str, Any]:
    return {
        "path": member.path,
        "size_bytes": member.size_bytes,
        "class": _class(group),
        "open": is_open,
        "loops": [_loop(group)] if group.looping and member is group.members[0] else [],
    }


def _class(group: Group) -> str:
    if group.looping:
        return "loop"
    if group.paged:
        return "paged"
    return "hot" if SINGLE in group.status and group.hot else "sequential"


def _loop(group: Group) -> dict[str, Any]:
    learner = group.learner
    return {
        "bytes": group.loop_bytes,
        "period_s": None if learner.period is None else learner.period / 1e9,
        "pinned_bytes": group.pinned_bytes,
        "window_bytes": group.window_bytes,
        "passes": learner.passes,
        "readers": [cursor.head / group.count for cursor in group.cursors.live],
        "guessed": learner.guessed,
    }


def cpu_s(pid: str) -> float:
    """Returns the processor time that a process has used (seconds), 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def private_bytes(pid: str) -> int:
    """Returns the anonymous memory of a process (resident and swapped), 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    kilobytes = [int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "VmSwap:"))]
    return 1024 * sum(kilobytes)
