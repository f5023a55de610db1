"""The machine that figures are of: its disks, as cgroups throttle and count them, and what every JSON file tells of it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from llmcache.errors import EnvironmentProblem
from llmcache.procfs import mounts, status_of

from .clients.server_tokens import SITE

PROC, SYSFS = Path("/proc"), Path("/sys")
PACKAGES = ("llama-cpp-python", "xllamacpp", "gguf", "mfusepy", "numpy", "numba", "pyarrow", "llmcache-toolkit")


@dataclass(frozen=True)
class Disk:
    """A whole disk: `major:minor` as cgroup files want it, and its kernel name."""

    number: str
    name: str

    @property
    def read_ahead_file(self) -> Path:
        """Return where the KiB stand that the kernel reads ahead."""
        return SYSFS / "dev" / "block" / self.number / "queue" / "read_ahead_kb"


def disk_of(path: Path) -> Disk:
    """Return the whole disk that holds `path`; a partition is resolved to its disk. EnvironmentProblem if there is none."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    entry = SYSFS / "dev" / "block" / number
    if not entry.exists():  # btrfs and others have anonymous ones
        mount = next((one for one in mounts(proc=str(PROC)).values() if one.dev == device), None)
        if mount is None:
            said = f"device {number} of {path} is not in {SYSFS}/dev/block"
            raise EnvironmentProblem(said, "use a directory on a local disk")
        entry = SYSFS / "class" / "block" / Path(mount.source).name
        if not (mount.source.startswith("/dev/") and entry.exists()):
            raise EnvironmentProblem(
                f"{path} is on {mount.fstype} ({mount.source}), which has no block device to throttle",
                "use a directory on a disk file system (ext4, xfs, btrfs), for example --dir /var/tmp/llmcache",
            )
    real = entry.resolve()
    if (real / "partition").exists():
        real = real.parent
    return Disk(number=(real / "dev").read_text().strip(), name=real.name)


def describe(directory: Path) -> dict[str, Any]:
    """Return machine, kernel, the device of `directory`, and versions."""
    disk = disk_of(directory)
    scheduler = SYSFS / "block" / disk.name / "queue" / "scheduler"
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
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
        "commit": commit.stdout.strip() or None,
    }


def peak_bytes(pid: int | str = "self") -> int:
    """Most memory that a process has held (VmHWM: unlike ru_maxrss it begins anew with the program)."""
    return 1024 * int(status_of(pid)["VmHWM"].split()[0])


def _first(file: str, key: str) -> str:
    """Return the value of `key` in a file of /proc with a line each; "0" where it has none."""
    lines = (line.partition(":") for line in (PROC / file).read_text().splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == key), "0")


def _version(package: str) -> str | None:
    found = next(iter(metadata.distributions(name=package, path=[*sys.path, str(SITE)])), None)
    return None if found is None else found.version
