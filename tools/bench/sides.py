"""The sides of every comparison: the plain directory with the kernel's page cache, and the same directory with llmcachefs.

A side runs inside a cgroup, so that the daemon and its helper share memory and storage bandwidth with the client.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcache.cgroup import Cgroup
from llmcache.errors import LlmcacheError, MissingRequirement
from llmcache.mount.client.operation import fetch
from llmcache.mount.readahead import SMALL_READ_AHEAD_KB, ReadAhead
from llmcache.procfs import mounts
from llmcache.storage import disk_of

from .harness import ROOT

# memory that a mount may use besides its budget, as `--cache` documents
MOUNT_OVERHEAD_BYTES = 64 << 20


@dataclass(frozen=True)
class OpenedSide:
    """A side that is ready for clients, with the directory of its files."""

    root: Path
    is_mount: bool = False

    def stats(self) -> dict[str, Any] | None:
        """Return the data of `llmcache stats --json`; None for a plain directory, or if the daemon does not reply."""
        try:
            return fetch(str(self.root)) if self.is_mount else None
        except (LlmcacheError, OSError):
            return None


@dataclass(frozen=True)
class Plain:
    """The source directory itself, with the machine's own read-ahead or with `read_ahead_kb`."""

    name: str = "kernel"
    read_ahead_kb: int | None = None

    @contextmanager
    def open(self, _group: Cgroup, source: Path, _cache_bytes: int | None, _scratch: Path) -> Iterator[OpenedSide]:
        with nullcontext() if self.read_ahead_kb is None else read_ahead(source, self.read_ahead_kb):
            yield OpenedSide(source)


@contextmanager
def read_ahead(directory: Path, kb: int) -> Iterator[None]:
    """Set the kernel's read-ahead for files that are opened in the with block.

    The last process that has set it on this storage, mounts included, restores the previous value.
    """
    setting = ReadAhead(str(directory), kb << 10)
    setting.set()
    try:
        yield
    finally:
        setting.restore()


def kernels(source: Path, more_kb: Sequence[int] = ()) -> tuple[Plain, ...]:
    """Return the page cache with the machine's own read-ahead and, if it can be changed, with 128 KiB and `more_kb`."""
    file = disk_of(source).read_ahead_file
    own_kb = int(file.read_text())
    others_kb = [kb for kb in (SMALL_READ_AHEAD_KB, *more_kb) if kb != own_kb] if os.access(file, os.W_OK) else []
    return Plain(), *(Plain(f"kernel-{kb}", kb) for kb in others_kb)


@dataclass(frozen=True)
class Mounted:
    """llmcachefs on the source. `command` replaces the program; `options` are added to its command line."""

    command: tuple[str, ...] = (sys.executable, "-m", "llmcache", "mount")
    options: tuple[str, ...] = ()
    name: str = "mount"

    @contextmanager
    def open(self, group: Cgroup, source: Path, cache_bytes: int | None, scratch: Path) -> Iterator[OpenedSide]:
        """Start the daemon in `group`, yield its mount, and unmount at the end, also after an error.

        Without `cache_bytes` the mount chooses its budget from the memory that the cgroup can spare.
        """
        mountpoint = scratch / f"mnt-{os.getpid()}-{time.monotonic_ns()}"
        mountpoint.mkdir(parents=True)
        log = mountpoint.with_suffix(".log")
        budget = [] if cache_bytes is None else ["--cache", str(cache_bytes)]
        argv = [*self.command, str(source), str(mountpoint), *budget, "-f", *self.options]
        with serving(group.wrap(argv), mountpoint, log):
            yield OpenedSide(mountpoint, is_mount=True)
        log.unlink()
        mountpoint.rmdir()


def environment() -> dict[str, str]:
    """Return an environment in which programs import this tree first and write no byte code."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


@contextmanager
def serving(command: Sequence[str], mountpoint: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Yield the daemon that `command` runs in the foreground, once its mount replies; unmount at the end, also after an
    error.
    """
    with log.open("ab") as sink:
        daemon = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=environment(), start_new_session=True
        )
    try:
        wait_mounted(mountpoint, daemon, log)
        yield daemon
    finally:
        end_mount(mountpoint, daemon)


def wait_mounted(mountpoint: Path, daemon: subprocess.Popen[bytes], log: Path) -> None:
    """Return when the mount replies; MissingRequirement with the end of the log if the daemon exits or needs more than 120
    s.
    """
    deadline = time.monotonic() + 120
    while not is_mounted(mountpoint):
        if daemon.poll() is not None or time.monotonic() > deadline:
            what = f"ended with {daemon.returncode}" if daemon.poll() is not None else "did not start within 120 s"
            raise MissingRequirement(f"llmcachefs {what}: {log.read_text()[-2000:].strip()}")
        time.sleep(0.02)
    # A mount appears in the mount table before its control socket exists. The first request waits until it serves.
    os.stat(mountpoint)


def is_mounted(path: Path) -> bool:
    """Return whether the mount table has a file system on exactly this directory. Does not access the mount."""
    return any(mount.point == str(path) for mount in mounts().values())


def end_mount(mountpoint: Path, daemon: subprocess.Popen[bytes]) -> None:
    """End the daemon by SIGTERM, then SIGKILL; unmount lazily if the mount is left over."""
    if daemon.poll() is None:
        daemon.send_signal(signal.SIGTERM)
    try:
        daemon.wait(60)
    except subprocess.TimeoutExpired:
        daemon.kill()
        # a thread that waits in the kernel keeps a killed daemon alive until the connection is aborted
        subprocess.run(["umount", "-f", str(mountpoint)], capture_output=True, check=False)
        daemon.wait(60)
    while is_mounted(mountpoint):
        # left over only if the daemon was killed
        subprocess.run(["umount", "-l", str(mountpoint)], capture_output=True, check=True)
