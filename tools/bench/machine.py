"""Describes the machine of a result: CPU, memory, kernel, the disk that cgroups throttle, and package versions."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from llmcache.procfs import status_of
from llmcache.storage import PROC, SYSFS, disk_of

from .clients.server_tokens import SITE

PACKAGES = ("llama-cpp-python", "xllamacpp", "gguf", "mfusepy", "numpy", "numba", "pyarrow", "llmcache-toolkit")


def describe(directory: Path) -> dict[str, Any]:
    """Return a description of the machine, the disk of `directory`, and versions."""
    disk = disk_of(directory)
    scheduler = SYSFS / "block" / disk.name / "queue" / "scheduler"
    return {
        "cpu": _first("cpuinfo", "model name"),
        "cpus": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "device": {
            "name": disk.name,
            "number": disk.number,
            "read_ahead_kb": int(disk.read_ahead_file.read_text()) if disk.read_ahead_file.exists() else None,
            "scheduler": scheduler.read_text().strip() if scheduler.exists() else "",
        },
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": commit(),
    }


def commit() -> str | None:
    """Return the commit of this tree, with "-dirty" if files differ from it; None without git.

    Results, and the texts that show them, may differ, so that several benchmarks can be recorded one after another.
    """
    root = Path(__file__).resolve().parents[2]

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "-uno", "--", ".", ":!tools/bench/results", ":!docs", ":!README.md")
    found = git("rev-parse", "--short=8", "HEAD")
    return f"{found}-dirty" if found and changed else found or None


def peak_bytes(pid: int | str = "self") -> int:
    """Return the largest memory of a process (VmHWM, which, unlike ru_maxrss, starts again at execve)."""
    return 1024 * int(status_of(pid)["VmHWM"].split()[0])


def _first(file: str, key: str) -> str:
    """Return the value of the first line with `key` in a file of /proc; "0" if there is none."""
    lines = (line.partition(":") for line in (PROC / file).read_text().splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == key), "0")


def _version(package: str) -> str | None:
    found = next(iter(metadata.distributions(name=package, path=[*sys.path, str(SITE)])), None)
    return None if found is None else found.version
