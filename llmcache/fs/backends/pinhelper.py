"""The pin helper: a small process of its own that maps files of the mount and mlocks ranges of them.

It is separate because locking faults the pages in through the mount: done in the daemon, that would hold the memory map
that serving threads need. It keeps an open handle on each file, so that the kernel's node id (`st_ino`) stays valid.
Standard library only; run as `python pinhelper.py MOUNT DAEMON_PID`, with one JSON request a line on stdin and one reply a
line on stdout. It dies with the daemon (PR_SET_PDEATHSIG), and the kernel releases its locks.

Requests: {"op": "attach", "path"} -> {"node", "size"} · {"op": "lock", "path", "offset", "length", "free"} -> {"charged"} ·
{"op": "unlock", "path", "offset", "length"} · {"op": "detach", "path"} · {"op": "rename", "path", "new"} ·
{"op": "check", "look"} -> {"again"}: bytes that had to be locked again, if "look" is true.
A request that fails has the reply {"errno"}.
To attach the file that a link leads to, its real path, device and inode come with the request ("target", "dev", "ino").

"charged": [offset, bytes, inode of a memory cgroup] of the locked pages that are charged to other cgroups than those in
"free" (a page is charged to the cgroup of the process for which it was first read); null where the kernel does not show it.
Such a cgroup cannot reclaim them any more, so that a client may be killed for want of memory: the daemon decides.

When the daemon's cgroup exceeds a memory.high, the kernel suspends threads that allocate for seconds at a time: the daemon
may be too late to unlock anything. This process watches that limit too, and unlocks what exceeds it. The next reply reports
that in "given": [path, offset, bytes]. A page fault or system call that allocates memory may get it suspended as well. So it
keeps its own program in memory, makes each call once at the start, and unlocks by one call for each file.
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
BATCH_BYTES = 16 << 20  # so that an unlock under pressure never waits behind gigabytes of locks
LOOK_BYTES, LOOKS = 16 << 20, 60  # locked bytes that one "check" looks at, at least, and checks that look at all
PAUSE_S = 0.25  # between looks at memory.high
STAT_BYTES = 1 << 14  # more than a memory.stat has
GIVEN_AHEAD_BYTES = 16 << 20  # unlocked beyond the excess

Run = tuple[int, int]
"""A stretch of a file, (offset, bytes)."""

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.mlock.argtypes = libc.munlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.syscall.restype = ctypes.c_long


def unlock(address: int, length: int) -> int:
    """Unlock and unmap pages; the kernel does not drop pages that this process maps. Returns 0, or -1 and sets errno."""
    code: int = libc.munlock(address, length)
    return code or int(libc.madvise(address, length, MADV_DONTNEED))


def overlap(runs: list[Run], offset: int, length: int) -> list[Run]:
    """Return the parts of `runs` that lie in a range."""
    end = offset + length
    first, last = bisect_left(runs, (offset,)), bisect_left(runs, (end,))
    first -= bool(first and sum(runs[first - 1]) > offset)
    return [(max(start, offset), min(start + size, end) - max(start, offset)) for start, size in runs[first:last]]


def add_run(runs: list[Run], offset: int, length: int) -> int:
    """Add a range to `runs`, merged with those that it overlaps or touches; returns how many bytes are new."""
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
    """Take a range out of `runs`; returns how many bytes are new, so minus those of it that were in there."""
    found = overlap(runs, offset, length)
    if not found:
        return 0
    end = offset + length
    first, last = bisect_left(runs, (offset,)), bisect_left(runs, (end,))
    first -= bool(first and sum(runs[first - 1]) > offset)
    low, high = runs[first][0], sum(runs[last - 1])
    rest = [(low, offset - low)] if low < offset else []
    rest += [(end, high - end)] if high > end else []
    runs[first:last] = rest
    return -sum(size for _, size in found)


def pieces(offset: int, length: int) -> Iterator[Run]:
    """Yield a range in runs of BATCH_BYTES at most."""
    for start in range(offset, offset + length, BATCH_BYTES):
        yield start, min(BATCH_BYTES, offset + length - start)


class Mapping:
    """One attached file: open handle and a read-only shared mapping of it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        status = os.fstat(self.fd)
        self.node, self.size, self.address = status.st_ino, status.st_size, 0
        self.locked: list[Run] = []  # in order; they neither overlap nor touch

    def map(self) -> int:
        """Return the address of the mapping, made at first use."""
        if not self.address:
            address = libc.mmap(None, self.size, PROT_READ, MAP_SHARED, self.fd, 0)
            if address == MAP_FAILED:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))
            self.address = address
        return self.address

    def close(self) -> None:
        """Unmap (which unlocks) and close."""
        self.locked.clear()
        if self.address:
            libc.munmap(self.address, self.size)
        os.close(self.fd)


class Helper:
    """The request loop's state: files by their path below the mount. `lock`: for the thread that watches memory.high."""

    def __init__(self, mountpoint: str) -> None:
        self.mountpoint = mountpoint
        self.clone = clone_mount(mountpoint)
        self.files: dict[str, Mapping] = {}
        self.lock = threading.Lock()
        self.given: list[tuple[str, int, int]] = []  # unlocked without a request, not reported yet
        self.charges = Charges()
        self.runs: list[tuple[Mapping, int, int]] = []  # that are still to be looked at in this round

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to one request; an OSError becomes {"errno"}."""
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
        """Return the reply to a request that concerns a whole file. OSError."""
        if operation == "attach":
            return self.attach(path, request)
        if operation == "detach":
            return self.detach(path)
        if operation == "rename":
            return self.rename(path, request["new"])
        return {"again": self.lock_again() if request["look"] else 0}

    def lock_again(self) -> int:
        """Look at the next part of the locked ranges, and lock unmapped pages again; returns the bytes of those ranges.

        A kernel may unmap locked pages when it replaces them in the page cache (seen on Linux 7.3).
        """
        left = LOOK_BYTES + sum(size for each in self.files.values() for _, size in each.locked) // LOOKS
        if not self.runs:
            self.runs = [(each, *part) for each in self.files.values() for run in each.locked for part in pieces(*run)]
        found = 0
        while self.runs and left > 0:
            mapping, start, size = self.runs.pop()
            left -= size
            for offset, length in overlap(mapping.locked, start, size):  # the part that is still locked
                if not self.charges.all_mapped(mapping.address + offset, length):
                    libc.mlock(mapping.address + offset, length)
                    found += length
        return found

    def change(self, operation: str, path: str, request: dict[str, Any]) -> dict[str, Any]:
        """Lock or unlock a range. Only this thread unmaps files, so it needs no lock for the calls, which may take long."""
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
        """Unlock at least `size_bytes`, from the end of each file."""
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
        """Open `path` through the mount, or the target of the link that it is; again if it is attached already."""
        self.detach(path)
        if "target" in request:
            fd = open_target(request["target"], request["dev"], request["ino"])
        else:
            fd = open_below(self.mountpoint, path, self.clone)
        mapping = self.files[path] = Mapping(fd)
        return {"node": mapping.node, "size": mapping.size}

    def detach(self, path: str) -> dict[str, Any]:
        """Close `path`; unknown paths are fine."""
        mapping = self.files.pop(path, None)
        if mapping is not None:
            mapping.close()
        return {}

    def rename(self, old: str, new: str) -> dict[str, Any]:
        """Rename an attached file."""
        if old in self.files:
            self.detach(new)
            self.files[new] = self.files.pop(old)
        return {}


def succeed(code: int) -> None:
    """Raise the OSError of a system call that has failed."""
    if code:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Charges:
    """Which memory cgroups pages are charged to: /proc/self/pagemap and /proc/kpagecgroup, which need CAP_SYS_ADMIN."""

    def __init__(self) -> None:
        self.pagemap = self.payers = -1
        with contextlib.suppress(OSError):  # no privilege, or a kernel without memory cgroups
            self.pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            self.payers = os.open("/proc/kpagecgroup", os.O_RDONLY | os.O_CLOEXEC)

    def all_mapped(self, address: int, length: int) -> bool:
        """Return True if all pages of a range are in this process's page tables, which locked pages are."""
        first = address // PAGE
        count = -(-(address + length) // PAGE) - first
        entries = array("Q", os.pread(self.pagemap, 8 * count, 8 * first)) if self.pagemap >= 0 else array("Q")
        return not entries or min(entries) >= MAPPED

    def runs(self, address: int, length: int, free: set[int]) -> list[tuple[int, int, int]] | None:
        """Return (address, bytes, cgroup inode) of mapped pages that are charged to cgroups not in `free`; None: unknown."""
        if self.payers < 0:
            return None if os.path.exists("/proc/kpagecgroup") else []
        first = address // PAGE
        count = -(-(address + length) // PAGE) - first
        frames = array("Q", os.pread(self.pagemap, 8 * count, 8 * first))
        found: list[tuple[int, int, int]] = []
        at = 0
        while at < len(frames):
            frame = frames[at] & FRAME_MASK
            end = at + 1
            while end < len(frames) and frames[end] & FRAME_MASK == frame + end - at:
                end += 1
            if not frame:
                return None  # the kernel hides the numbers of page frames
            payers = array("Q", os.pread(self.payers, 8 * (end - at), 8 * frame))
            for page, inode in enumerate(payers if not free.issuperset(payers) else (), at):
                if inode not in free:
                    start = (first + page) * PAGE
                    if found and found[-1][2] == inode and sum(found[-1][:2]) == start:
                        start = found.pop()[0]
                    found.append((start, (first + page + 1) * PAGE - start, inode))
            at = end
        return found


class HighLimits:
    """memory.high of this process's cgroup and of those above it (cgroup v2), through files that stay open."""

    FILES = ("memory.high", "memory.current", "memory.stat")

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        with open("/proc/self/cgroup") as stream:
            own = next((line[3:].strip() for line in stream if line.startswith("0::")), "/")
        while own != "/":
            directory = "/sys/fs/cgroup" + own
            with contextlib.suppress(OSError):  # no memory controller there, or version 1, which has no such limit
                self.groups.append([os.open(f"{directory}/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in self.FILES])
            own = os.path.dirname(own)

    def excess(self) -> int:
        """Return by how many bytes that cannot be reclaimed the worst of the limits is exceeded; negative if by none."""
        worst = -1
        for high, current, stat_fd in self.groups:
            with contextlib.suppress(OSError):  # the cgroup is gone
                limit = os.pread(high, 64, 0).strip()
                if limit != b"max":
                    worst = max(worst, self.used(current, stat_fd) - int(limit))
        return worst

    def used(self, current: int, stat_fd: int) -> int:
        """Return the bytes of a cgroup that cannot be reclaimed. OSError."""
        fields = dict(line.split() for line in os.pread(stat_fd, STAT_BYTES, 0).splitlines())
        return int(os.pread(current, 64, 0)) - int(fields[b"inactive_file"]) - int(fields[b"active_file"])


def watch(helper: Helper, limits: HighLimits) -> None:
    """Keep the locked memory within memory.high, for as long as this process lives."""
    # All of it once now, so that the memory that it takes, in the kernel too, is there when the limit is exceeded.
    for _, current, stat_fd in limits.groups:
        with contextlib.suppress(OSError):
            limits.used(current, stat_fd)
    unlock(0, 0)
    while True:
        time.sleep(PAUSE_S)
        if (excess := limits.excess()) > 0:
            helper.give(excess + GIVEN_AHEAD_BYTES)


def open_below(directory: str, path: str, clone: int | None = None) -> int:
    """Return a descriptor of the regular file at `path` below `directory`, or below its `clone`.

    No link is followed, and no open waits for a pipe: a link that took a file's place could lead root anywhere.
    """
    *above, name = path.strip("/").split("/")
    fd = os.open(directory if clone is None else ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=clone)
    try:
        for step in above:
            below = os.open(step, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            os.close(fd)
            fd = below
        found = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
    finally:
        os.close(fd)
    if stat.S_ISREG(os.fstat(found).st_mode):
        return found
    os.close(found)
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def open_target(path: str, dev: int, ino: int) -> int:
    """Return a descriptor of the regular file at a real path; OSError if another file is there now."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and (status.st_dev, status.st_ino) == (dev, ino):
        return fd
    os.close(fd)
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def clone_mount(directory: str) -> int | None:
    """Return a descriptor of a detached copy of the mount that `directory` is in, or None where the kernel refuses.

    Files that are opened through the copy do not make the mount point busy, and the copy ends with this process. Refused:
    without CAP_SYS_ADMIN, before Linux 5.2, and for mounts that may not be bound. `umount MOUNT` then finds the mount busy
    while files are attached; `llmcache umount` ends this process first.
    """
    flags = ctypes.c_uint(OPEN_TREE_CLONE | os.O_CLOEXEC)
    fd = libc.syscall(ctypes.c_long(OPEN_TREE), ctypes.c_int(AT_FDCWD), os.fsencode(directory), flags)
    return None if fd < 0 else int(fd)


def main() -> int:
    """Serve requests until stdin closes."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[2]):  # the daemon died before prctl; it may be process 1 itself, in a container
        return 0
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a daemon that is killed closes its files before prctl's signal comes
    helper = Helper(sys.argv[1])
    limits = HighLimits()
    if limits.groups:
        if os.geteuid() == 0:  # else it would count towards RLIMIT_MEMLOCK
            libc.mlockall(MCL_CURRENT)
        threading.Thread(target=watch, args=(helper, limits), daemon=True).start()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(helper.handle(json.loads(line))) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
