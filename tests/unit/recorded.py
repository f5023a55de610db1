"""Writes small /proc and /sys trees as the kernel would show them."""

from __future__ import annotations

from pathlib import Path

MIB = 1 << 20
GIB = 1 << 30


def write_machine(root: Path, total: int, available: int) -> None:
    """proc/meminfo, and a process outside of all cgroups."""
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    meminfo = f"MemTotal: {total // 1024:>12} kB\nMemFree: 1 kB\nMemAvailable: {available // 1024:>12} kB\n"
    (root / "proc/meminfo").write_text(meminfo + "HugePages_Total: 0\n")
    if not (root / "proc/self/cgroup").exists():
        (root / "proc/self/cgroup").write_text("0::/\n")


def write_stalls(root: Path, total_us: int) -> None:
    """proc/pressure/memory."""
    (root / "proc/pressure").mkdir(parents=True, exist_ok=True)
    lines = [f"{kind} avg10=0.00 avg60=0.00 avg300=0.00 total={total_us}\n" for kind in ("some", "full")]
    (root / "proc/pressure/memory").write_text("".join(lines))


def v1_group(root: Path, path: str, limit: int, usage: int, stat: dict[str, int]) -> None:
    """A memory cgroup of version 1."""
    _group(root / "sys/fs/cgroup/memory" / path, stat, {"limit_in_bytes": str(limit), "usage_in_bytes": str(usage)})


def v2_group(root: Path, path: str, limit: str, usage: int, stat: dict[str, int]) -> None:
    """A cgroup of version 2."""
    _group(root / "sys/fs/cgroup" / path, stat, {"max": limit, "current": str(usage)})


def _group(directory: Path, stat: dict[str, int], values: dict[str, str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (directory / f"memory.{name}").write_text(value + "\n")
    (directory / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in stat.items()))
