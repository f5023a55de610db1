"""A mount that is told to end while files change and storage is slow: it ends, and nobody waits for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from llmcache.fs import mountpoint, sentinel
from tests.mount.fault_rig import faulty
from tests.mount.faulty import Rule, write_rules
from tests.mount.live import Live, live, random_file

SIZE = 1 << 20
SLOW_S = 3.0
AT_ONCE = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
print("open", flush=True)
sys.stdin.readline()
os.pread(fd, 4096, 0)
"""


@contextmanager
def reader(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that has opened a file, and reads a page once it is told to."""
    command = [sys.executable, "-I", "-S", "-c", AT_ONCE, str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]
    try:
        assert process.stdout.readline() == "open\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def tell(process: subprocess.Popen[str]) -> None:
    """Let a reader read."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def change(path: Path) -> None:
    """Change a file behind the mount."""
    with path.open("r+b") as file:
        file.write(os.urandom(10))


def ends(mount: Live, minor: int) -> bool:
    """Return whether the daemon ends; if not, nobody is left waiting."""
    try:
        return mount.daemon.wait(120) == 0
    except subprocess.TimeoutExpired:
        mount.daemon.kill()
        sentinel.abort(minor)
        return False


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system for others needs root")
def test_the_end_while_pages_of_changed_files_are_dropped(tmp_path: Path) -> None:
    """Dropping waits for a slow read; what comes after the signal is not what the next drop waits for."""
    files, source, rules = tmp_path / "files", tmp_path / "source", tmp_path / "rules.json"
    files.mkdir()
    for name in ("slow.bin", "slower.bin", "other.bin"):
        random_file(files / name, SIZE)
    with faulty(files, source, rules), live(source, tmp_path / "mnt", "32Mi", "--mode", "steer") as mount:
        entry = mountpoint.find(str(mount.mountpoint))
        assert entry is not None
        for helper in mount.helpers():  # it tells of no node: what drops pages is the thread that an open has told to
            helper.suspend()
        with ExitStack() as stack:
            slow, slower, other = (
                stack.enter_context(reader(mount.mountpoint / name)) for name in ("slow.bin", "slower.bin", "other.bin")
            )
            write_rules(
                rules,
                [Rule("slow", "read", "slow.bin", seconds=SLOW_S), Rule("slow", "read", "slower.bin", seconds=2 * SLOW_S)],
            )
            tell(slow)
            tell(slower)
            time.sleep(SLOW_S / 8)  # they wait for storage now
            for name in ("slow.bin", "other.bin"):
                change(files / name)
            opener = subprocess.Popen(["head", "-c", "0", str(mount.mountpoint / "slow.bin")])
            with (mount.mountpoint / "other.bin").open("rb"):
                pass
            mount.daemon.send_signal(signal.SIGTERM)
            time.sleep(SLOW_S / 3)  # the signal has arrived
            tell(other)
            assert ends(mount, int(entry.device.partition(":")[2]))
            for process in (slow, slower, other, opener):
                process.wait(120)
