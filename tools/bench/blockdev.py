"""From a path to the whole disk below it: the device that a cgroup can throttle and count; and how far it reads ahead."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .errors import BenchError


@dataclass(frozen=True)
class Disk:
    """A whole disk: `major:minor` as cgroup files want it, and its kernel name."""

    number: str
    name: str


def disk_of(path: Path, sysfs: Path = Path("/sys"), mountinfo: Path = Path("/proc/self/mountinfo")) -> Disk:
    """Return the whole disk that holds `path`; a partition is resolved to its disk."""
    device = os.stat(path).st_dev
    return disk_from_number(f"{os.major(device)}:{os.minor(device)}", path, sysfs, mountinfo)


def disk_from_number(number: str, path: Path, sysfs: Path, mountinfo: Path) -> Disk:
    """Return the whole disk of device `number`; btrfs and others with anonymous numbers go through mountinfo."""
    entry = sysfs / "dev" / "block" / number
    if not entry.exists():
        entry = _entry_from_mount(number, path, sysfs, mountinfo)
    real = entry.resolve()
    if (real / "partition").exists():
        real = real.parent
    return Disk(number=(real / "dev").read_text().strip(), name=real.name)


def read_ahead_file(disk: Disk, sysfs: Path = Path("/sys")) -> Path:
    """Return where the KiB stand that the kernel reads ahead on a disk."""
    return sysfs / "dev" / "block" / disk.number / "queue" / "read_ahead_kb"


@contextmanager
def read_ahead(disk: Disk, kb: int, sysfs: Path = Path("/sys")) -> Iterator[None]:
    """Have the kernel read ahead `kb` KiB in files that are opened meanwhile; what was set before is put back."""
    file = read_ahead_file(disk, sysfs)
    before = file.read_text()
    try:
        file.write_text(f"{kb}\n")
        yield
    finally:
        file.write_text(before)


def _entry_from_mount(number: str, path: Path, sysfs: Path, mountinfo: Path) -> Path:
    for line in mountinfo.read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2:3] != [number]:
            continue
        kind, source = after.split()[:2]
        entry = sysfs / "class" / "block" / Path(source).name
        if source.startswith("/dev/") and entry.exists():
            return entry
        raise BenchError(
            f"{path} is on {kind} ({source}), which has no block device to throttle",
            "use a directory on a disk file system (ext4, xfs, btrfs), for example --dir /var/tmp/llmcache",
        )
    raise BenchError(f"device {number} of {path} is not in {sysfs}/dev/block", "use a directory on a local disk")
