"""What a figure was measured on: goes into every JSON file."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from .blockdev import disk_of

PACKAGES = ("llama-cpp-python", "gguf", "mfusepy", "numpy", "llmcache-toolkit")


def describe(directory: Path) -> dict[str, Any]:
    """Return machine, kernel, device and versions."""
    disk = disk_of(directory)
    queue = Path("/sys/block") / disk.name / "queue"
    return {
        "cpu": _first("/proc/cpuinfo", "model name"),
        "cpus": os.cpu_count(),
        "memory_bytes": int(_first("/proc/meminfo", "MemTotal").split()[0]) * 1024,
        "kernel": platform.release(),
        "device": {
            "name": disk.name,
            "number": disk.number,
            "read_ahead_kb": _number(queue / "read_ahead_kb"),
            "scheduler": (queue / "scheduler").read_text().strip() if (queue / "scheduler").exists() else "",
        },
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def _first(file: str, key: str) -> str:
    for line in Path(file).read_text().splitlines():
        if line.startswith(key):
            return line.split(":", 1)[1].strip()
    return "0"


def _number(file: Path) -> int | None:
    return int(file.read_text()) if file.exists() else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    here = Path(__file__).resolve().parent
    result = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True, check=False
    )
    return result.stdout.strip() or None
