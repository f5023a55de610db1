"""Run a real daemon over a real directory in the foreground, and always end and unmount it."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from llmcache.mount.client import control, operation
from tools.bench.sides import environment, serving

MIB = 1 << 20
# memory that a mount may use in addition to --cache, according to the documentation
OVERHEAD_BYTES = 64 * MIB
Wrap = Callable[[Sequence[str]], list[str]]
LOOP_READER = Path(__file__).resolve().parents[2] / "tools" / "bench" / "clients" / "loop_reader.py"


@dataclass
class Live:
    """A serving mount."""

    source: Path
    mountpoint: Path
    daemon: subprocess.Popen[bytes]
    log: Path

    def stats(self) -> dict[str, Any]:
        """Return the counters as `llmcache stats --json` gets them."""
        return operation.fetch(str(self.mountpoint))

    def know(self) -> None:
        """Return once the mount has found every file: it does not count earlier reads, whose pages stay cached."""
        control.request(str(self.mountpoint), {"op": "warmup", "check": True})

    def resize(self, cache_bytes: int) -> dict[str, Any]:
        return control.request(str(self.mountpoint), {"op": "resize", "cache_bytes": cache_bytes})

    def pinned_bytes(self, *names: str) -> int:
        """Return how many bytes of the loops of files are pinned, in one sample."""
        found = [entry for entry in self.stats()["files"] if entry["path"].lstrip("/") in names]
        return sum(int(loop["pinned_bytes"]) for entry in found for loop in entry["loops"])

    def helpers(self) -> list[psutil.Process]:
        """Return the daemon's child processes (the pin helper)."""
        return list(psutil.Process(self.daemon.pid).children(recursive=True))

    def memory_bytes(self) -> int:
        """Return the private memory of the daemon and its helpers, as the kernel counts it."""
        pids = [self.daemon.pid, *(child.pid for child in self.helpers())]
        return sum(private_bytes(pid) for pid in pids)


def llmcache(*words: str | Path, wrap: Wrap = list, **more: object) -> subprocess.CompletedProcess[str]:
    """Run `llmcache WORDS` and return the completed process; `wrap` puts it into a cgroup."""
    command = wrap([sys.executable, "-m", "llmcache", *map(str, words)])
    settings: dict[str, object] = {"env": environment(), "timeout": 150, "check": False, **more}
    return subprocess.run(command, capture_output=True, text=True, **settings)  # type: ignore[call-overload, no-any-return]


def run_json(*words: str | Path, code: int = 0) -> dict[str, Any]:
    """Return the JSON document that `llmcache WORDS` prints; it must exit with `code`."""
    done = llmcache(*words, "--json")
    assert done.returncode == code, done.stderr
    return dict(json.loads(done.stdout))


@contextmanager
def live(
    source: Path,
    mountpoint: Path,
    cache: str,
    *options: str,
    wrap: Wrap = list,
) -> Iterator[Live]:
    """Yield a serving mount, in mode steer unless `options` set another; `wrap` puts the daemon into a cgroup.

    A traceback in the log fails the test.
    """
    mountpoint.mkdir(exist_ok=True)
    log = mountpoint.with_suffix(".log")
    words = ["mount", str(source), str(mountpoint), "--cache", cache, "-f"]
    mode = () if "--mode" in options else ("--mode", "steer")
    with serving(wrap([sys.executable, "-m", "llmcache", *words, *mode, *options]), mountpoint, log) as daemon:
        # an in-place mount point works before the daemon serves
        wait_for(lambda: bool(control.files(str(mountpoint)).describe()), "the daemon serves")
        yield Live(source, mountpoint, daemon, log)
    assert "Traceback" not in log.read_text(), log.read_text()


def is_busy(pid: int) -> bool:
    """Return whether a thread of a process runs, is runnable, or waits for storage; idle threads sleep."""
    states = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    return "R" in states or "D" in states


def private_bytes(pid: int) -> int:
    """Return the private memory of a process, 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    rows = (line.split() for line in text.splitlines())
    return 1024 * sum(int(row[1]) for row in rows if row[0] in ("Pss_Anon:", "Pss_Shmem:"))


def resident_bytes(*paths: Path) -> int:
    """Return how many bytes of `paths` are in the page cache, as mincore() counts them.

    All files are mapped first and then examined together, so that memory that moves between files is rarely counted
    twice.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    looks = []
    with contextlib.ExitStack() as opened:
        for path in paths:
            file = opened.enter_context(path.open("rb"))
            if size := os.fstat(file.fileno()).st_size:
                address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
                opened.callback(libc.munmap, address, size)
                looks.append((address, size, ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))))
        for address, size, pages in looks:
            assert libc.mincore(address, size, pages) == 0, os.strerror(ctypes.get_errno())
    return mmap.PAGESIZE * sum(int((np.frombuffer(bytes(pages), np.uint8) & 1).sum()) for *_, pages in looks)


def random_file(path: Path, size: int) -> Path:
    """Write a file of random bytes without equal pages to the disk, and drop it from the page cache."""
    drawn = np.frombuffer(os.urandom(MIB), np.uint64)  # draw only one MiB: os.urandom takes seconds for some hundred
    with path.open("wb") as file:
        for offset in range(0, size, MIB):
            other = drawn ^ np.uint64(offset // MIB * 0x9E3779B97F4A7C15 % (1 << 64))
            file.write(other.tobytes()[: size - offset])
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def by_read(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(MIB):
            digest.update(block)
    return digest.hexdigest()


def by_odd_pread(path: Path) -> str:
    """Hash a file through pread() of 65521 bytes (a prime), so that no request is aligned."""
    digest, offset = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while block := os.pread(file.fileno(), 65521, offset):
            digest.update(block)
            offset += len(block)
    return digest.hexdigest()


def by_mmap(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size:
            with mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as pages:
                digest.update(pages)
    return digest.hexdigest()


def by_sendfile(path: Path) -> str:
    fd, out = os.open(path, os.O_RDONLY), os.memfd_create("sendfile")
    try:
        while os.sendfile(out, fd, None, MIB):
            pass
        os.lseek(out, 0, os.SEEK_SET)
        return by_read(Path(f"/proc/self/fd/{out}"))
    finally:
        os.close(fd)
        os.close(out)


WAYS: dict[str, Callable[[Path], str]] = {
    "read": by_read,
    "odd_pread": by_odd_pread,
    "mmap": by_mmap,
    "sendfile": by_sendfile,
}


class Reader(subprocess.Popen[str]):
    """A checking reader; its output goes to files, because the test reads it only at the end."""

    def __init__(self, words: Sequence[str]) -> None:
        self.out, self.err = (tempfile.TemporaryFile("w+") for _ in range(2))  # noqa: SIM115 - closed by `readers`
        command = [sys.executable, str(LOOP_READER), *words]
        super().__init__(command, stdout=self.out, stderr=self.err, text=True, env=environment())


def start_reader(path: Path, crc: Path, how: str, seconds: float) -> Reader:
    """Start a process that reads a file in a loop and checks every MiB; its last line reports how many were wrong."""
    return Reader([str(path), "--how", how, "--passes", "1000000", "--seconds", str(seconds), "--check", str(crc)])


def finish_reader(reader: Reader, timeout_s: float) -> tuple[int, int]:
    """Return (passes, wrong MiB) of a reader that must exit by itself without an error."""
    reader.wait(timeout_s)
    reader.out.seek(0)
    reader.err.seek(0)
    assert reader.returncode == 0, reader.err.read()
    events = [json.loads(line) for line in reader.out]
    return sum(event["event"] == "step" for event in events), events[-1]["wrong"]


def wait_for(
    condition: Callable[[], bool], what: str, timeout_s: float = 120.0, state: Callable[[], object] = lambda: ""
) -> None:
    """Return once `condition()` holds; after `timeout_s`, which only a hang takes, fail with `what` and `state()`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"did not happen: {what} {state()}"
        time.sleep(0.1)


@contextmanager
def readers(jobs: Sequence[tuple[Path, Path, str]], seconds: float) -> Iterator[list[Reader]]:
    """Run a checking reader per job (file, CRCs, how) during the body; kill those still running."""
    running = [start_reader(path, crc, how, seconds) for path, crc, how in jobs]
    try:
        yield running
    finally:
        for reader in running:
            if reader.poll() is None:
                reader.kill()
            reader.wait()
            reader.out.close()
            reader.err.close()
