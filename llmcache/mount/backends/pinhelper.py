"""The pin helper: a small process that maps files of the mount and locks ranges of them with mlock.

In the daemon, mlock would fault pages in through the mount while it holds the memory map lock that serving threads need. The
helper uses only the standard library: `python pinhelper.py MOUNT DAEMON_PID`, with a JSON request per line on stdin and a
reply per line on stdout. It dies with the daemon, and the kernel then releases its locks. Open handles keep nodes valid.

Requests and their replies; a request that fails has the reply {"errno"}:
- {"op": "attach", "path"} -> {"node", "size"}. For a link, "target", "dev" and "ino" describe the file that it leads to.
- {"op": "detach", "path"}; {"op": "rename", "path", "new"}; {"op": "unlock", "path", "offset", "length"} -> {}
- {"op": "lock", "path", "offset", "length", "free"} -> {"charged"}: [offset, bytes, inode of a memory cgroup] of locked
  pages charged to cgroups that are not in "free"; null if the kernel does not show it.
- {"op": "check", "look"} -> {"again"}: bytes that had to be locked again, if "look" is true.

Beyond memory.high, the kernel suspends allocating threads, so the daemon may unlock too late. This process then unlocks the
excess, and the next reply reports it in "given": [path, offset, bytes]. To avoid allocations itself, it locks its program in
memory, makes each call once at the start, and unlocks with one call for each file.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import signal
import stat
import sys
import threading
import time
from array import array
from bisect import bisect_left
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

OPEN_TREE, OPEN_TREE_CLONE = 428, 1  # on every architecture; Linux 5.2
AT_FDCWD = -100
PR_SET_PDEATHSIG = 1
PROT_READ = 1
MAP_SHARED = 1
MADV_DONTNEED = 4
MCL_CURRENT = 1
MAP_FAILED = ctypes.c_void_p(-1).value
PAGE = os.sysconf("SC_PAGE_SIZE")
FRAME_MASK = (1 << 55) - 1  # of an entry of /proc/self/pagemap
MAPPED = 1 << 63
BATCH_BYTES = 16 << 20  # locked in one call, so that an unlock under pressure does not wait for gigabytes of locks
LOOK_BYTES, LOOKS = 16 << 20, 60  # one "check" covers at least LOOK_BYTES; LOOKS of them cover all locked bytes
PAUSE_S = 0.25  # between checks of memory.high
STAT_BYTES = 1 << 14  # more than the length of a memory.stat
GIVEN_AHEAD_BYTES = 16 << 20  # unlocked beyond the excess

Run = tuple[int, int]
"""A range of a file: (offset, bytes)."""

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.mlock.argtypes = libc.munlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.syscall.restype = ctypes.c_long


def unlock(address: int, length: int) -> int:
    """Unlock and unmap pages, which are not dropped while mapped. Return 0, or -1 and errno."""
    code: int = libc.munlock(address, length)
    return code or int(libc.madvise(address, length, MADV_DONTNEED))


def overlap(runs: list[Run], offset: int, length: int) -> list[Run]:
    """Return the parts of `runs` that are in a range."""
    end = offset + length
    first, last = bisect_left(runs, (offset,)), bisect_left(runs, (end,))
    first -= bool(first and sum(runs[first - 1]) > offset)
    return [(max(start, offset), min(start + size, end) - max(start, offset)) for start, size in runs[first:last]]


def add_run(runs: list[Run], offset: int, length: int) -> int:
    """Add a range to `runs`; return how many bytes are new."""
    added = length + take_out(runs, offset, length)
    at, end = bisect_left(runs, (offset,)), offset + length
    if at < len(runs) and runs[at][0] == end:
        end = sum(runs.pop(at))
    if at and sum(runs[at - 1]) == offset:
        at -= 1
        offset = runs.pop(at)[0]
    runs.insert(at, (offset, end - offset))
    return added


def take_out(runs: list[Run], offset: int, length: int) -> int:
    """Remove a range from `runs`; return minus the bytes removed."""
    removed = overlap(runs, offset, length)
    if not removed:
        return 0
    end = offset + length
    first, last = bisect_left(runs, (offset,)), bisect_left(runs, (end,))
    first -= bool(first and sum(runs[first - 1]) > offset)
    low, high = runs[first][0], sum(runs[last - 1])
    rest = [(low, offset - low)] if low < offset else []
    rest += [(end, high - end)] if high > end else []
    runs[first:last] = rest
    return -sum(size for _, size in removed)


def pieces(offset: int, length: int) -> Iterator[Run]:
    """Yield a range in runs of at most BATCH_BYTES."""
    for start in range(offset, offset + length, BATCH_BYTES):
        yield start, min(BATCH_BYTES, offset + length - start)


class Mapping:
    """An attached file and its mapping."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        status = os.fstat(self.fd)
        self.node, self.size, self.address = status.st_ino, status.st_size, 0
        self.locked: list[Run] = []  # sorted and merged

    def map(self) -> int:
        if not self.address:
            address = libc.mmap(None, self.size, PROT_READ, MAP_SHARED, self.fd, 0)
            if address == MAP_FAILED:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))
            self.address = address
        return self.address

    def close(self) -> None:
        self.locked.clear()
        if self.address:
            libc.munmap(self.address, self.size)
        os.close(self.fd)


class Helper:
    """Files by path. `lock` serializes requests with the thread that watches memory.high."""

    def __init__(self, mountpoint: str) -> None:
        self.mountpoint = mountpoint
        self.clone = clone_mount(mountpoint)
        self.files: dict[str, Mapping] = {}
        self.lock = threading.Lock()
        self.given: list[tuple[str, int, int]] = []  # ranges unlocked without a request, not reported yet
        self.charges = Charges()
        self.runs: list[tuple[Mapping, int, int]] = []  # to be checked in this round

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            operation, path = request["op"], request["path"]
            if operation in ("lock", "unlock"):
                reply = self.change(operation, path, request)
            else:
                with self.lock:
                    reply = self.attach_or_detach(operation, path, request)
        except OSError as error:
            reply = {"errno": error.errno or errno.EIO}
        with self.lock:
            if self.given:
                reply["given"], self.given = self.given, []
        return reply

    def attach_or_detach(self, operation: str, path: str, request: dict[str, Any]) -> dict[str, Any]:
        if operation == "attach":
            return self.attach(path, request)
        if operation == "detach":
            return self.detach(path)
        if operation == "rename":
            return self.rename(path, request["new"])
        return {"again": self.lock_again() if request["look"] else 0}

    def lock_again(self) -> int:
        """Lock unmapped pages of the next part again; return the bytes of those ranges.

        The kernel may unmap locked pages when it replaces them (seen on Linux 7.3).
        """
        left = LOOK_BYTES + sum(size for each in self.files.values() for _, size in each.locked) // LOOKS
        if not self.runs:
            self.runs = [(each, *part) for each in self.files.values() for run in each.locked for part in pieces(*run)]
        locked_bytes = 0
        while self.runs and left > 0:
            mapping, start, size = self.runs.pop()
            left -= size
            for offset, length in overlap(mapping.locked, start, size):  # the part that is locked now
                if not self.charges.all_mapped(mapping.address + offset, length):
                    libc.mlock(mapping.address + offset, length)
                    locked_bytes += length
        return locked_bytes

    def change(self, operation: str, path: str, request: dict[str, Any]) -> dict[str, Any]:
        """No lock is needed, because only this thread unmaps files."""
        mapping = self.files.get(path)
        if mapping is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        offset, length = request["offset"], request["length"]
        address = mapping.map() + offset
        if operation == "unlock":
            succeed(unlock(address, length))
            with self.lock:
                take_out(mapping.locked, offset, length)
            return {}
        succeed(libc.mlock(address, length))
        with self.lock:
            add_run(mapping.locked, offset, length)
        runs = self.charges.runs(address, length, {0, *request["free"]})
        return {"charged": runs and [(offset + at - address, size, inode) for at, size, inode in runs]}

    def give(self, size_bytes: int) -> None:
        """Unlock `size_bytes` or more, from the end of each file."""
        with self.lock:
            for path, mapping in self.files.items():
                if size_bytes <= 0 or not mapping.locked:
                    continue
                start = end = sum(mapping.locked[-1])
                left = size_bytes
                for offset, length in reversed(mapping.locked):
                    start = max(offset, (offset + length - left) // PAGE * PAGE)
                    left -= offset + length - start
                    if left <= 0:
                        break
                if unlock(mapping.address + start, end - start):
                    start = 0  # the kernel may refuse to split a range
                    if unlock(mapping.address, end):
                        continue
                self.given.append((path, start, end - start))
                size_bytes += take_out(mapping.locked, start, end - start)

    def attach(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        self.detach(path)
        if "target" in request:
            fd = open_target(request["target"], request["dev"], request["ino"])
        else:
            fd = open_below(self.mountpoint, path, self.clone)
        mapping = self.files[path] = Mapping(fd)
        return {"node": mapping.node, "size": mapping.size}

    def detach(self, path: str) -> dict[str, Any]:
        mapping = self.files.pop(path, None)
        if mapping is not None:
            mapping.close()
        return {}

    def rename(self, old: str, new: str) -> dict[str, Any]:
        if old in self.files:
            self.detach(new)
            self.files[new] = self.files.pop(old)
        return {}


def succeed(code: int) -> None:
    """Raise OSError if a system call has failed."""
    if code:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Charges:
    """The memory cgroups of pages, from /proc/self/pagemap and /proc/kpagecgroup, which need CAP_SYS_ADMIN."""

    def __init__(self) -> None:
        self.pagemap = self.payers = -1
        with contextlib.suppress(OSError):  # no privilege, or a kernel without memory cgroups
            self.pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            self.payers = os.open("/proc/kpagecgroup", os.O_RDONLY | os.O_CLOEXEC)

    def all_mapped(self, address: int, length: int) -> bool:
        first = address // PAGE
        count = -(-(address + length) // PAGE) - first
        entries = array("Q", os.pread(self.pagemap, 8 * count, 8 * first)) if self.pagemap >= 0 else array("Q")
        return not entries or min(entries) >= MAPPED

    def runs(self, address: int, length: int, free: set[int]) -> list[tuple[int, int, int]] | None:
        """Return (address, bytes, cgroup inode) for cgroups not in `free`; None: unknown."""
        if self.payers < 0:
            return None if os.path.exists("/proc/kpagecgroup") else []
        first = address // PAGE
        count = -(-(address + length) // PAGE) - first
        frames = array("Q", os.pread(self.pagemap, 8 * count, 8 * first))
        charged: list[tuple[int, int, int]] = []
        at = 0
        while at < len(frames):
            frame = frames[at] & FRAME_MASK
            end = at + 1
            while end < len(frames) and frames[end] & FRAME_MASK == frame + end - at:
                end += 1
            if not frame:
                return None  # the kernel hides page frame numbers
            payers = array("Q", os.pread(self.payers, 8 * (end - at), 8 * frame))
            for page, inode in enumerate(payers if not free.issuperset(payers) else (), at):
                if inode not in free:
                    start = (first + page) * PAGE
                    if charged and charged[-1][2] == inode and sum(charged[-1][:2]) == start:
                        start = charged.pop()[0]
                    charged.append((start, (first + page + 1) * PAGE - start, inode))
            at = end
        return charged


class HighLimits:
    """memory.high of this process's cgroup and of those above it (cgroup v2)."""

    FILES = ("memory.high", "memory.current", "memory.stat")

    def __init__(self) -> None:
        self.spaces: list[list[int]] = []
        with open("/proc/self/cgroup") as stream:
            cgroup = next((line[3:].strip() for line in stream if line.startswith("0::")), "/")
        while cgroup != "/":
            directory = "/sys/fs/cgroup" + cgroup
            with contextlib.suppress(OSError):  # no memory controller, or cgroup v1, which has no such limit
                self.spaces.append([os.open(f"{directory}/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in self.FILES])
            cgroup = os.path.dirname(cgroup)

    def excess(self) -> int:
        """Return the largest excess, in unreclaimable bytes; negative below the limits."""
        worst = -1
        for high, current, stat_fd in self.spaces:
            with contextlib.suppress(OSError):  # the cgroup was removed
                limit = os.pread(high, 64, 0).strip()
                if limit != b"max":
                    worst = max(worst, self.used(current, stat_fd) - int(limit))
        return worst

    def used(self, current: int, stat_fd: int) -> int:
        fields = dict(line.split() for line in os.pread(stat_fd, STAT_BYTES, 0).splitlines())
        return int(os.pread(current, 64, 0)) - int(fields[b"inactive_file"]) - int(fields[b"active_file"])


def watch(helper: Helper, limits: HighLimits) -> None:
    """Keep the locked memory within memory.high; never returns."""
    # Each call once now, so that its memory, in the kernel too, is allocated before the limit is exceeded.
    for _, current, stat_fd in limits.spaces:
        with contextlib.suppress(OSError):
            limits.used(current, stat_fd)
    unlock(0, 0)
    while True:
        time.sleep(PAUSE_S)
        if (excess := limits.excess()) > 0:
            helper.give(excess + GIVEN_AHEAD_BYTES)


def open_below(directory: str, path: str, clone: int | None = None) -> int:
    """Return a descriptor of the regular file at `path` below `directory`, or below its `clone`.

    Links are not followed: they could lead root anywhere.
    """
    *above, name = path.strip("/").split("/")
    fd = os.open(directory if clone is None else ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=clone)
    try:
        for step in above:
            below = os.open(step, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            os.close(fd)
            fd = below
        file_fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
    finally:
        os.close(fd)
    if stat.S_ISREG(os.fstat(file_fd).st_mode):
        return file_fd
    os.close(file_fd)
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def open_target(path: str, dev: int, ino: int) -> int:
    """Return a descriptor of the file; OSError if another file is at its real path."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and (status.st_dev, status.st_ino) == (dev, ino):
        return fd
    os.close(fd)
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def clone_mount(directory: str) -> int | None:
    """Return a descriptor of a detached clone of the mount of `directory`; None if the kernel refuses.

    Files opened through the clone do not make the mount point busy. It needs CAP_SYS_ADMIN and Linux 5.2.
    """
    flags = ctypes.c_uint(OPEN_TREE_CLONE | os.O_CLOEXEC)
    fd = libc.syscall(ctypes.c_long(OPEN_TREE), ctypes.c_int(AT_FDCWD), os.fsencode(directory), flags)
    return None if fd < 0 else int(fd)


def main() -> int:
    """Serve requests until stdin closes."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[2]):  # the daemon died before prctl; in a container, the daemon may be process 1
        return 0
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the pipe of a killed daemon may close before prctl's signal arrives
    helper = Helper(sys.argv[1])
    limits = HighLimits()
    if limits.spaces:
        if os.geteuid() == 0:  # otherwise it would count towards RLIMIT_MEMLOCK
            libc.mlockall(MCL_CURRENT)
        threading.Thread(target=watch, args=(helper, limits), daemon=True).start()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(helper.handle(json.loads(line))) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
