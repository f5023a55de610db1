"""A client process that reads and writes files on request, so that a hang or SIGBUS hits this process and not the test.

Run as `python fault_client.py LOCK`; the process opens files while it holds LOCK (see `locked`). A request is one JSON
line on stdin, followed by "size" bytes of data if it is a write. The reply is one JSON line on stdout, followed by
"bytes" bytes of data if it is a read. "errno" in the reply reports an OSError. `Client` is the test's side. Standard
library only.
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

HANG_S = 150.0  # no request takes this long: faults last seconds
PIECE = 256 << 10
HELD_S = 3.0  # how long a file stays open
LOCK_S = 15.0
FOREVER = float("inf")


@dataclass(frozen=True)
class Reply:
    """The result of a request between `began` and `ended` (time.monotonic()); `dead` if SIGBUS killed the client."""

    began: float
    ended: float
    errno: int = 0
    data: bytes = b""
    size: int = 0
    dead: bool = False
    opened: float = FOREVER  # when the file was opened, for files that stay open between requests

    @property
    def first(self) -> float:
        """Return the time from which on contents may appear in this read."""
        return min(self.began, self.opened)


class Hung(AssertionError):
    """A request got no reply in time."""


class Client:
    """A client process, restarted after its death. `lock` is the path of the lock file, see `locked`."""

    def __init__(self, name: str, lock: str) -> None:
        self.name, self._lock = name, lock
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, data: bytes = b"", **request: Any) -> Reply:
        """Return the reply to a request, or raise Hung."""
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
        reply = json.loads(line)
        got = process.stdout.read(reply.get("bytes", 0))
        return Reply(began, time.monotonic(), reply["errno"], got, reply["size"], opened=reply.get("opened", FOREVER))

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
        if self._process is not None:
            self._process.kill()
            self._process.wait(HANG_S)
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()
            self._process = None


def waits_for(pid: int) -> str:
    """Return the kernel stacks of a process's threads, for the message of Hung."""
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{task}/stack", encoding="utf-8") as file:
                found.append(" < ".join(line.split()[1].split("+")[0] for line in file if " " in line))
        except OSError as error:
            found.append(str(error.strerror))
    return "; ".join(sorted(set(found)))


@contextlib.contextmanager
def locked(path: str, operation: int) -> Iterator[None]:
    """Hold the lock of `path`: LOCK_SH while a file is opened, LOCK_EX while another file takes over its name.

    The faulty file system uses libfuse's interface by paths. If a file is replaced just after it was opened, reads of the
    descriptor return the old file, but fstat() and /proc/self/fd describe the new one: the daemon would see a mix of
    both. Real file systems have no such state. While storage is suspended, no open returns, so waiting for the lock has a
    limit.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        end = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(fd, operation | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    break
                time.sleep(0.001)
        yield
    finally:
        os.close(fd)


# The client process


def opened(path: str, flags: int = os.O_RDONLY) -> int:
    """Open a file of the mount and return its descriptor."""
    with locked(sys.argv[1], fcntl.LOCK_SH):
        return os.open(path, flags, 0o600)


def pread(path: str, offset: int, size: int, flags: int = 0) -> bytes:
    """Return up to `size` bytes; fewer at the end of the file or in front of an unreadable range."""
    fd = opened(path, os.O_RDONLY | flags)
    try:
        return os.pread(fd, size, offset)
    finally:
        os.close(fd)


def direct(path: str, offset: int, size: int) -> bytes:
    fd = opened(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, size) as buffer:
            return buffer[: os.preadv(fd, [buffer], offset)]
    finally:
        os.close(fd)


def mapped(path: str, offset: int, size: int) -> bytes:
    """Read through a shared mapping; unreadable pages raise SIGBUS."""
    fd = opened(path)
    try:
        while (end := min(os.fstat(fd).st_size, offset + size)) > offset:
            # ValueError if the file has shrunk
            with contextlib.suppress(ValueError), mmap.mmap(fd, end, prot=mmap.PROT_READ) as pages:
                return pages[offset:end]
        return b""
    finally:
        os.close(fd)


def whole(path: str, offset: int, size: int) -> bytes:
    """Return everything from `offset` to the end, read sequentially."""
    fd, parts = opened(path), []
    try:
        while block := os.pread(fd, PIECE, offset):
            parts.append(block)
            offset += len(block)
    finally:
        os.close(fd)
    return b"".join(parts)


def sent(path: str, offset: int, size: int) -> bytes:
    fd, out = opened(path), os.memfd_create("sent")
    try:
        count = os.sendfile(out, fd, offset, size)
        return os.pread(out, count, 0)
    finally:
        os.close(fd)
        os.close(out)


class Held:
    """Files that stay open for HELD_S seconds, even if they are replaced."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[int, float]] = {}

    def read(self, path: str, offset: int, size: int) -> tuple[bytes, float]:
        """Return the bytes read, and when the file was opened."""
        fd, since = self._open.pop(path, (-1, -HELD_S))
        if time.monotonic() - since > HELD_S:
            if fd >= 0:
                os.close(fd)
            since = time.monotonic()
            fd = opened(path)
        self._open[path] = fd, since
        return os.pread(fd, size, offset), since

    def since(self, path: str) -> float:
        return self._open.get(path, (-1, time.monotonic()))[1]


READS: dict[str, Callable[[str, int, int], bytes]] = {
    "pread": pread,
    "direct": direct,
    "mapped": mapped,
    "whole": whole,
    "sent": sent,
}


def write(path: str, offset: int, data: bytes, sync: bool) -> int:
    """Write, with fsync if `sync`; return the number of bytes written (a full disk may accept only part)."""
    fd = opened(path, os.O_RDWR | os.O_CREAT)
    try:
        count = os.pwrite(fd, data, offset)
        if sync:
            os.fsync(fd)
        return count
    finally:
        os.close(fd)


def change(request: dict[str, Any], data: bytes) -> int:
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
