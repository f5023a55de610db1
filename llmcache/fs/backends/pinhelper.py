"""The pin helper: a small process of its own that maps files of the mount and mlocks ranges of them.

It is separate because locking faults the pages in through the mount: done in the daemon, that would hold the memory map
that serving threads need. It keeps an open handle on each file, so that the kernel's node id (`st_ino`) stays valid.
Standard library only; run as `python pinhelper.py MOUNT DAEMON_PID`, with one JSON request a line on stdin and one reply a
line on stdout. It dies with the daemon (PR_SET_PDEATHSIG), and the kernel releases its locks.

Requests: {"op": "attach", "path"} -> {"node", "size"} · {"op": "lock" | "unlock", "path", "offset", "length"} ·
{"op": "detach", "path"} · {"op": "rename", "path", "new"}. A request that fails has the reply {"errno"}.
To attach the file that a link leads to, its real path, device and inode come with the request ("target", "dev", "ino").
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import stat
import sys
from collections.abc import Callable
from typing import Any

OPEN_TREE, OPEN_TREE_CLONE = 428, 1  # on every architecture; Linux 5.2
AT_FDCWD = -100
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
libc.syscall.restype = ctypes.c_long


def unlock(address: int, length: int) -> int:
    """Unlock and unmap pages; the kernel does not drop pages that this process maps. Returns 0, or -1 and sets errno."""
    code: int = libc.munlock(address, length)
    return code or int(libc.madvise(address, length, MADV_DONTNEED))


class Mapping:
    """One attached file: open handle and a read-only shared mapping of it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        status = os.fstat(self.fd)
        self.node, self.size, self.address = status.st_ino, status.st_size, 0

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
        if self.address:
            libc.munmap(self.address, self.size)
        os.close(self.fd)


class Helper:
    """The request loop's state: files by their path below the mount."""

    def __init__(self, mountpoint: str) -> None:
        self.mountpoint = mountpoint
        self.clone = clone_mount(mountpoint)
        self.files: dict[str, Mapping] = {}

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to one request; an OSError becomes {"errno"}."""
        try:
            operation = request["op"]
            path = request["path"]
            if operation == "attach":
                return self.attach(path, request)
            if operation == "detach":
                return self.detach(path)
            if operation == "rename":
                return self.rename(path, request["new"])
            call = libc.mlock if operation == "lock" else unlock
            return self.change(call, path, request["offset"], request["length"])
        except OSError as error:
            return {"errno": error.errno or errno.EIO}

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

    def change(self, call: Callable[[int, int], int], path: str, offset: int, length: int) -> dict[str, Any]:
        """Lock or unlock a range. OSError."""
        mapping = self.files.get(path)
        if mapping is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        if call(mapping.map() + offset, length):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return {}


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
    for line in sys.stdin:
        sys.stdout.write(json.dumps(helper.handle(json.loads(line))) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
