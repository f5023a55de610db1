"""Cgroup v1: one directory per controller, limits that apply to the whole subtree."""

from __future__ import annotations

from pathlib import Path

# blk-throttle counts a group's bytes only for disks that have a limit in it
UNLIMITED_BPS = 1 << 50


def set_memory(group: Path, size_bytes: int | None) -> None:
    """Cap memory (page cache included) at `size_bytes`; None removes the cap."""
    (group / "memory.limit_in_bytes").write_text(str(-1 if size_bytes is None else size_bytes))


def set_read_bps(group: Path, disk: str, bps: int | None) -> None:
    """Limit reads from `disk`; None leaves only the counter running."""
    (group / "blkio.throttle.read_bps_device").write_text(f"{disk} {UNLIMITED_BPS if bps is None else bps}")


def reclaim(group: Path, _size_bytes: int) -> None:
    """Drop as much of the group's page cache as can go."""
    (group / "memory.force_empty").write_text("0")


def memory_stat(group: Path) -> dict[str, int]:
    """Return current, peak, anon, file, limit_hits and oom_kills of the group."""
    stat = pairs(group / "memory.stat")
    return {
        "current": int((group / "memory.usage_in_bytes").read_text()),
        "peak": int((group / "memory.max_usage_in_bytes").read_text()),
        "anon": stat.get("total_rss", 0),
        "file": stat.get("total_cache", 0),
        "limit_hits": int((group / "memory.failcnt").read_text()),
        "oom_kills": pairs(group / "memory.oom_control").get("oom_kill", 0),
    }


def io_bytes(group: Path, disk: str) -> tuple[int, int]:
    """Return (read, written) bytes of the group on `disk`."""
    counts = {"Read": 0, "Write": 0}
    for line in (group / "blkio.throttle.io_service_bytes").read_text().splitlines():
        words = line.split()
        if len(words) == 3 and words[0] == disk and words[1] in counts:
            counts[words[1]] = int(words[2])
    return counts["Read"], counts["Write"]


def pairs(file: Path) -> dict[str, int]:
    """Return the numbers of a "key value" file."""
    rows = (line.split() for line in file.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2}
