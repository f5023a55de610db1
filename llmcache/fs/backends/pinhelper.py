"""The pin helper: a small process of its own that maps files through the mount and mlocks ranges of them.

It is separate because locking faults the pages in through the mount: done in the daemon, that would hold the memory map
that serving threads need. It keeps an open handle on each file, so that the kernel's node id (`st_ino`) stays valid.
Standard library only; run as `python pinhelper.py MOUNT DAEMON_PID`, one JSON request a line on stdin, one reply a line on stdout. It
dies with the daemon (PR_SET_PDEATHSIG) and its locks with it.

Requests: {"op": "attach", "path"} -> {"node", "size"} · {"op": "lock" | "unlock", "path", "offset", "length"} ·
{"op": "detach", "path"} · {"op": "rename", "path", "new"}. What fails has the reply {"errno"}.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import signal
import stat
import sys
from collections.abc import Callable
from typing import Any

CLONE_NEWNS = 0x00020000
MS_REC_PRIVATE = 0x4000 | 0x40000
MNT_DETACH = 2
PR_SET_PDEATHSIG = 1
PROT_READ = 1
MAP_SHARED = 1
MADV_DONTNEED = 4
MAP_FAILED = ctypes.c_void_p(-1).value

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.mlock.argtypes = libc.munlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def unlock(address: int, length: int) -> int:
    """Unlocks and unmaps: what is mapped here too cannot be dropped from under another's mapping. 0, or -1 and errno."""
    code: int = libc.munlock(address, length)
    return code or int(libc.madvise(address, length, MADV_DONTNEED))


class Mapping:
    """One attached file: open handle and a read-only shared mapping of it."""

    def __init__(self, directory: str, path: str) -> None:
        self.fd = open_below(directory, path)
        status = os.fstat(self.fd)
        self.node, self.size, self.address = status.st_ino, status.st_size, 0

    def map(self) -> int:
        """Returns the address of the mapping, made at first use."""
        if not self.address:
            address = libc.mmap(None, self.size, PROT_READ, MAP_SHARED, self.fd, 0)
            if address == MAP_FAILED:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))
            self.address = address
        return self.address

    def close(self) -> None:
        """Unmaps (which unlocks) and closes."""
        if self.address:
            libc.munmap(self.address, self.size)
        os.close(self.fd)


class Helper:
    """The request loop's state: files by their path below the mount."""

    def __init__(self, mountpoint: str) -> None:
        self.mountpoint = mountpoint
        self.files: dict[str, Mapping] = {}

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns the reply to one request; an OSError becomes {"errno"}."""
        try:
            operation = request["op"]
            path = request["path"]
            if operation == "attach":
                return self.attach(path)
            if operation == "detach":
                return self.detach(path)
            if operation == "rename":
                return self.rename(path, request["new"])
            call = libc.mlock if operation == "lock" else unlock
            return self.change(call, path, request["offset"], request["length"])
        except OSError as error:
            return {"errno": error.errno or errno.EIO}

    def attach(self, path: str) -> dict[str, Any]:
        """Opens `path` through the mount, anew if it was attached before."""
        self.detach(path)
        mapping = self.files[path] = Mapping(self.mountpoint, path)
        return {"node": mapping.node, "size": mapping.size}

    def detach(self, path: str) -> dict[str, Any]:
        """Closes `path`; unknown paths are fine."""
        mapping = self.files.pop(path, None)
        if mapping is not None:
            mapping.close()
        return {}

    def rename(self, old: str, new: str) -> dict[str, Any]:
        """Knows an attached file by its new path."""
        if old in self.files:
            self.detach(new)
            self.files[new] = self.files.pop(old)
        return {}

    def change(self, call: Callable[[int, int], int], path: str, offset: int, length: int) -> dict[str, Any]:
        """Locks or unlocks a range. OSError."""
        mapping = self.files.get(path)
        if mapping is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        if call(mapping.map() + offset, length):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return {}


def open_below(directory: str, path: str) -> int:
    """Returns a descriptor of the regular file at `path` below `directory`.

    No link is followed, and no pipe waited for: what has taken a file's place meanwhile could lead root anywhere.
    """
    *above, name = path.strip("/").split("/")
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
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


def own_namespace(mountpoint: str) -> None:
    """Leaves the mount namespace where allowed: our open files then do not make the mount point busy.

    The new namespace starts with a copy of every mount there is. A copy keeps a file system alive that others unmount:
    another llmcachefs could not end, a disk not be taken away. So all but the way to our mount point are given up here.
    """
    if libc.unshare(CLONE_NEWNS) == 0:
        libc.mount(None, b"/", None, MS_REC_PRIVATE, None)
        with open("/proc/self/mountinfo", "rb") as file:
            mounts = file.read()
        for point in others(mounts, os.fsencode(mountpoint)):
            libc.umount2(point, MNT_DETACH)


def others(mountinfo: bytes, mountpoint: bytes) -> list[bytes]:
    """Returns the mount points in `mountinfo` that do not lie on the way to `mountpoint`, the last one first."""
    points = [
        re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), line.split()[4]) for line in mountinfo.splitlines()
    ]
    return [point for point in reversed(points) if not (mountpoint + b"/").startswith(point.rstrip(b"/") + b"/")]


def main() -> int:
    """Serves requests until stdin closes."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[2]):  # the daemon died before prctl; it may be process 1 itself, in a container
        return 0
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a daemon that is killed closes its files before prctl's signal comes
    own_namespace(sys.argv[1])
    helper = Helper(sys.argv[1])
    for line in sys.stdin:
        sys.stdout.write(json.dumps(helper.handle(json.loads(line))) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
