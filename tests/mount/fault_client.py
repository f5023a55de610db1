"""A process that reads and writes files as it is asked to; what hangs, or dies of SIGBUS, is this process and no test.

Run as `python fault_client.py LOCK`; files are opened with LOCK held (`locked`). A request is one JSON line on stdin (for a
write followed by as many bytes as "size" says), the reply one JSON line on stdout, for reads followed by "size" bytes. An
OSError is "errno" in the reply. Standard library only. `Client` is the other end.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

HANG_S = 150.0  # nothing takes so long: faults last seconds
PIECE = 256 << 10
HELD_S = 3.0  # until a file is opened anew
LOCK_S = 15.0
FOREVER = float("inf")


@dataclass(frozen=True)
class Reply:
    """What came of a request between `began` and `ended` (time.monotonic()); `dead` by SIGBUS, with no errno."""

    began: float
    ended: float
    errno: int = 0
    data: bytes = b""
    size: int = 0
    dead: bool = False
    opened: float = FOREVER  # when the file was, if it was before

    @property
    def first(self) -> float:
        """The time from which on contents of the file may be seen."""
        return min(self.began, self.opened)


class Hung(AssertionError):
    """A request that was not answered."""


class Client:
    """A client process; started again after it has died. `lock`: a file, see `locked`."""

    def __init__(self, name: str, lock: str) -> None:
        self.name, self._lock = name, lock
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, data: bytes = b"", **request: Any) -> Reply:
        """Return the reply to a request; Hung if there is none."""
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        began = time.monotonic()
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n" + data)
            process.stdin.flush()
            line = self._line(process)
        except BrokenPipeError:
            line = b""
        if not line:
            code = process.wait(HANG_S)
            assert code == -7, f"{self.name} ended with {code}: {request}"
            self._process = None
            return Reply(began, time.monotonic(), dead=True)
        told = json.loads(line)
        got = process.stdout.read(told.get("bytes", 0))
        return Reply(began, time.monotonic(), told["errno"], got, told["size"], opened=told.get("opened", FOREVER))

    def _line(self, process: subprocess.Popen[bytes]) -> bytes:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], HANG_S)
        if not ready:
            raise Hung(f"{self.name} (pid {process.pid}) waits: {waits_for(process.pid)}")
        return process.stdout.readline()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            command = [sys.executable, "-I", "-S", __file__, self._lock]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/")
        return self._process

    def end(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(HANG_S)
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()
            self._process = None


def waits_for(pid: int) -> str:
    """Return where in the kernel the threads of a process are."""
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{task}/stack", encoding="utf-8") as file:
                found.append(" < ".join(line.split()[1].split("+")[0] for line in file if " " in line))
        except OSError as error:
            found.append(str(error.strerror))
    return "; ".join(sorted(set(found)))


@contextlib.contextmanager
def locked(path: str, how: int) -> Iterator[None]:
    """A with block with the lock of `path`: LOCK_SH where a file is opened, LOCK_EX where another one takes its name.

    The faulty file system is libfuse's, which finds files by their paths: a descriptor that was opened before another
    file took the name reads the old one, while fstat() and /proc/self/fd know the new one. What a daemon opens just then
    is half of each; file systems of disks have no such moment. Storage that has been stopped answers no open before it
    goes on, so the lock is waited for only so long.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        end = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(fd, how | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    break
                time.sleep(0.001)
        yield
    finally:
        os.close(fd)


# The process


def opened(path: str, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of a file of the mount."""
    with locked(sys.argv[1], fcntl.LOCK_SH):
        return os.open(path, flags, 0o600)


def pread(path: str, offset: int, size: int, flags: int = 0) -> bytes:
    """Return up to `size` bytes; fewer at the end of the file, or before what cannot be read."""
    fd = opened(path, os.O_RDONLY | flags)
    try:
        return os.pread(fd, size, offset)
    finally:
        os.close(fd)


def direct(path: str, offset: int, size: int) -> bytes:
    """As `pread`, around the page cache."""
    fd = opened(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, size) as buffer:
            return buffer[: os.preadv(fd, [buffer], offset)]
    finally:
        os.close(fd)


def mapped(path: str, offset: int, size: int) -> bytes:
    """Return bytes of a shared mapping; SIGBUS where they cannot be read."""
    fd = opened(path)
    try:
        while (end := min(os.fstat(fd).st_size, offset + size)) > offset:
            with contextlib.suppress(ValueError), mmap.mmap(fd, end, prot=mmap.PROT_READ) as pages:  # or it has shrunk
                return pages[offset:end]
        return b""
    finally:
        os.close(fd)


def whole(path: str, offset: int, size: int) -> bytes:
    """Return everything from `offset` on, read in a row."""
    fd, parts = opened(path), []
    try:
        while block := os.pread(fd, PIECE, offset):
            parts.append(block)
            offset += len(block)
    finally:
        os.close(fd)
    return b"".join(parts)


def sent(path: str, offset: int, size: int) -> bytes:
    """Return bytes that sendfile() has put into memory."""
    fd, out = opened(path), os.memfd_create("sent")
    try:
        count = os.sendfile(out, fd, offset, size)
        return os.pread(out, count, 0)
    finally:
        os.close(fd)
        os.close(out)


class Held:
    """Files that stay open for a while, whatever becomes of them."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[int, float]] = {}

    def read(self, path: str, offset: int, size: int) -> tuple[bytes, float]:
        """Return bytes, and when the file was opened."""
        fd, since = self._open.pop(path, (-1, -HELD_S))
        if time.monotonic() - since > HELD_S:
            if fd >= 0:
                os.close(fd)
            since = time.monotonic()
            fd = opened(path)
        self._open[path] = fd, since
        return os.pread(fd, size, offset), since

    def since(self, path: str) -> float:
        """Return when a file was opened."""
        return self._open.get(path, (-1, time.monotonic()))[1]


READS: dict[str, Callable[[str, int, int], bytes]] = {
    "pread": pread,
    "direct": direct,
    "mapped": mapped,
    "whole": whole,
    "sent": sent,
}


def write(path: str, offset: int, data: bytes, sync: bool) -> int:
    """Write, with fsync if so wanted; return the bytes written (a full disk may have taken a part of them)."""
    fd = opened(path, os.O_RDWR | os.O_CREAT)
    try:
        count = os.pwrite(fd, data, offset)
        if sync:
            os.fsync(fd)
        return count
    finally:
        os.close(fd)


def change(request: dict[str, Any], data: bytes) -> int:
    """Do one change."""
    path, operation = request["path"], request["op"]
    if operation == "write":
        return write(path, request["offset"], data, request["sync"])
    if operation == "truncate":
        os.truncate(path, request["offset"])
    elif operation == "rename":
        os.rename(path, request["new"])
    elif operation == "unlink":
        os.unlink(path)
    else:
        raise ValueError(f"op: {operation}")
    return 0


def main() -> None:
    """Answer until stdin ends."""
    requests, replies, held = sys.stdin.buffer, sys.stdout.buffer, Held()
    for line in requests:
        request = json.loads(line)
        reply: dict[str, Any] = {"errno": 0, "size": 0}
        got = b""
        data = requests.read(request["size"]) if request["op"] == "write" else b""
        try:
            if request["op"] == "held":
                reply["opened"] = held.since(request["path"])
                got, reply["opened"] = held.read(request["path"], request["offset"], request["size"])
            elif request["op"] in READS:
                got = READS[request["op"]](request["path"], request["offset"], request["size"])
            else:
                reply["size"] = change(request, data)
        except OSError as error:
            reply["errno"] = error.errno
        replies.write(json.dumps({**reply, "bytes": len(got)}).encode() + b"\n")
        replies.write(got)
        replies.flush()


if __name__ == "__main__":
    main()
