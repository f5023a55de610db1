"""A mount that ends, or continues, while files change and storage is slow: no process waits forever."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from llmcache.mount.backends import sentinel
from llmcache.mount.client import control, mountpoint
from tests.mount.fault_rig import faulty
from tests.mount.faulty import Rule, held_by, write_rules
from tests.mount.live import Live, live, random_file
from tests.property.kernel import wait_until

SIZE = 1 << 20
SLOW_S = 3.0
READ_ON_REQUEST = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
print("open", flush=True)
sys.stdin.readline()
os.pread(fd, 4096, 0)
"""
PAIRS = 80  # more than the daemon's threads, and more than the kernel's slots for background requests
TWO_NAMES = """
import mmap, os, sys, threading
root, pairs = sys.argv[1], range(int(sys.argv[2]))
written = [os.open(f"{root}/a{number}.kv", os.O_RDWR) for number in pairs]
read = [os.open(f"{root}/b{number}.kv", os.O_RDONLY) for number in pairs]
maps = [mmap.mmap(fd, 4096) for fd in written]
for pages in maps:
    pages[:] = b"2" * 4096
jobs = [lambda fd=fd: os.fsync(fd) for fd in written], [lambda fd=fd: os.pread(fd, 1, 0) for fd in read]
threads = []
for each in jobs:
    print("ready", flush=True)
    sys.stdin.readline()
    threads += [threading.Thread(target=job) for job in each]
    for thread in threads[-len(each):]:
        thread.start()
for thread in threads:
    thread.join()
for number in pairs:
    with open(f"{root}/b{number}.kv", "rb") as file:
        assert file.read() == b"2" * 4096, number
"""


@contextmanager
def reader(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that has opened a file and reads a page after `resume`."""
    with client(READ_ON_REQUEST, str(path)) as process:
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        yield process


@contextmanager
def client(code: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that runs `code`; kill it at the end."""
    command = [sys.executable, "-I", "-S", "-c", code, *words]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process: subprocess.Popen[str] = subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def resume(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def change(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(os.urandom(10))


def ends(mount: Live, minor: int) -> bool:
    """Return whether the daemon ends; if it does not, abort its connection so that no process keeps waiting."""
    try:
        return mount.daemon.wait(120) == 0
    except subprocess.TimeoutExpired:
        mount.daemon.kill()
        sentinel.abort(minor)
        return False


def test_a_killed_process_that_waits_in_the_kernel_is_dead(tmp_path: Path) -> None:
    """Like the main thread of a daemon that uses its own mount, it waits in the kernel for a reply."""
    files, source, rules = tmp_path / "files", tmp_path / "source", tmp_path / "rules.json"
    files.mkdir()
    random_file(files / "slow.bin", SIZE)
    with faulty(files, source, rules), reader(source / "slow.bin") as process:
        assert not sentinel.is_dead(process.pid)
        write_rules(rules, [Rule("slow", "read", "slow.bin", seconds=SLOW_S / 2)])
        resume(process)
        time.sleep(SLOW_S / 8)  # it waits now
        process.kill()
        assert sentinel.is_dead(process.pid)


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system for others needs root")
def test_sigterm_while_pages_of_changed_files_are_dropped(tmp_path: Path) -> None:
    """An invalidation waits for a slow read; reads after the signal do not delay the next invalidation."""
    files, source, rules = tmp_path / "files", tmp_path / "source", tmp_path / "rules.json"
    files.mkdir()
    for name in ("slow.bin", "slower.bin", "other.bin"):
        random_file(files / name, SIZE)
    with faulty(files, source, rules), live(source, tmp_path / "mnt", "32Mi", "--mode", "steer") as mount:
        entry = mountpoint.find(str(mount.mountpoint))
        assert entry is not None
        # without the helper's report of inodes, the thread that an open wakes drops the pages
        for helper in mount.helpers():
            helper.suspend()
        with ExitStack() as stack:
            slow, slower, other = (
                stack.enter_context(reader(mount.mountpoint / name)) for name in ("slow.bin", "slower.bin", "other.bin")
            )
            write_rules(
                rules,
                [Rule("slow", "read", "slow.bin", seconds=SLOW_S), Rule("slow", "read", "slower.bin", seconds=2 * SLOW_S)],
            )
            resume(slow)
            resume(slower)
            time.sleep(SLOW_S / 8)  # they wait for storage now
            for name in ("slow.bin", "other.bin"):
                change(files / name)
            opener = subprocess.Popen(["head", "-c", "0", str(mount.mountpoint / "slow.bin")])
            with (mount.mountpoint / "other.bin").open("rb"):
                pass
            mount.daemon.send_signal(signal.SIGTERM)
            time.sleep(SLOW_S / 3)  # the signal has arrived
            resume(other)
            assert ends(mount, os.minor(entry.dev))
            for process in (slow, slower, other, opener):
                process.wait(120)


# Calls that storage may delay, on an open file: (descriptor, path)
CALLS: dict[str, Callable[[int, Path], object]] = {
    "fsync": lambda fd, _path: os.fsync(fd),
    "write": lambda fd, _path: os.pwrite(fd, b"x", 0),
    "truncate": lambda fd, _path: os.ftruncate(fd, 5000),
    "fallocate": lambda fd, _path: os.posix_fallocate(fd, 0, 9000),
    "open direct": lambda _fd, path: os.close(os.open(path, os.O_RDONLY)),
}


def use_other_files(path: Path) -> None:
    """Open, write and read other files while storage delays one."""
    for number in range(6):
        (path / f"other{number % 3}.kv").write_bytes(b"1")
    assert (path / "other1.kv").read_bytes() == b"1"


def started(*jobs: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=job, daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    return threads


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system for others needs root")
def test_slow_storage_of_one_file_does_not_delay_others(tmp_path: Path) -> None:
    files, source, rules = tmp_path / "files", tmp_path / "source", tmp_path / "rules.json"
    files.mkdir()
    with faulty(files, source, rules), live(source, tmp_path / "mnt", "32Mi") as mount:
        point = mount.mountpoint
        for call, do in CALLS.items():
            slow = point / f"{call}.kv"
            slow.write_bytes(b"1" * 4096)
            with contextlib.ExitStack() as stack:
                fd = -1
                if call != "open direct":
                    fd = os.open(slow, os.O_RDWR)
                    stack.callback(os.close, fd)
                write_rules(rules, [Rule("held", call, slow.name)])
                stack.callback(lambda: wait_until(lambda: not held_by(rules).exists(), "it continues"))
                stack.callback(write_rules, rules, [])
                threads = started(lambda do=do, fd=fd, slow=slow: do(fd, slow))  # type: ignore[misc]
                wait_until(held_by(rules).exists, f"storage is busy with {call}")
                again = started(lambda slow=slow: slow.read_bytes())  # type: ignore[misc]
                others = started(lambda: use_other_files(point))
                others[0].join(60)
                assert not others[0].is_alive(), f"other calls continue during a slow {call}"
                if call == "fsync":
                    again[0].join(60)
                    assert not again[0].is_alive(), "a file is opened while it is synced"
                assert threads[0].is_alive()
            for thread in (*threads, *again):
                thread.join(60)


def in_kernel(pid: int) -> int:
    """Return how many threads of a process wait for a file system."""
    found = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            waits = (task / "wchan").read_text()
            found += not any(word in waits for word in ("futex", "pipe", "poll")) and waits != "0"
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can read wchan of other processes")
@pytest.mark.parametrize("ending", [False, True], ids=["continues", "ends"])
def test_invalidating_other_names_waits_for_reads_queued_behind_writes(tmp_path: Path, ending: bool) -> None:
    """A write invalidates pages of the file's other names, which stay locked until reads queued behind it are answered."""
    source = tmp_path / "source"
    source.mkdir()
    for number in range(PAIRS):
        (source / f"a{number}.kv").write_bytes(b"1" * 4096)
        os.link(source / f"a{number}.kv", source / f"b{number}.kv")
    with live(source, tmp_path / "mnt", "32Mi") as mount, client(TWO_NAMES, str(mount.mountpoint), str(PAIRS)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        mount.daemon.send_signal(signal.SIGSTOP)
        try:
            for waiting in (PAIRS, 2 * PAIRS):
                resume(process)
                wait_until(lambda least=waiting: in_kernel(process.pid) >= least, "all requests wait")  # type: ignore[misc]
            mount.daemon.send_signal(signal.SIGCONT)
            if ending:
                control.request(str(mount.mountpoint), {"op": "stop", "force": True})
                assert mount.daemon.wait(60) == 0
            assert process.wait(60) == 0 or ending
        except BaseException:
            mount.daemon.kill()  # the sentinel then ends all waiting
            raise
