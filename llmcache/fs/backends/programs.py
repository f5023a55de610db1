"""Programs that read a steered file: where they have mapped it, and dropping pages from under their mappings.

A page that a program has mapped leaves the page cache only through that mapping: `process_madvise(MADV_PAGEOUT)` on it,
as root or with CAP_SYS_PTRACE and CAP_SYS_NICE. Pages that several programs have mapped the kernel does not take on that
word; they are made the first ones for it to take (MADV_COLD). The program notices nothing but a fault when it comes back.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import time

from llmcache.fs import syscalls

_LOOK_NS = 100_000_000  # a program's mappings are read again at the earliest


class Program:
    """A process that was seen to read; OSError if it is gone. `ended` once it is."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.refused = 0  # errno of the last advice that was refused
        self._fd = os.pidfd_open(pid)
        self._end = select.poll()
        self._end.register(self._fd, select.POLLIN)
        self._parts: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        self._looked_ns = 0

    @property
    def ended(self) -> bool:
        """True once the process is no more."""
        return bool(self._end.poll(0))

    def close(self) -> None:
        """Lets go of the process."""
        os.close(self._fd)

    def maps(self, dev: int, ino: int) -> bool:
        """True if it has mapped the file, when it was last looked at."""
        return (dev, ino) in self._parts

    def has(self, dev: int, ino: int) -> bool:
        """True if it has the file mapped or open now, as far as can be seen."""
        self.look(again=True)
        if self.maps(dev, ino):
            return True
        with contextlib.suppress(OSError):
            for number in os.listdir(f"/proc/{self.pid}/fd"):
                with contextlib.suppress(OSError):
                    status = os.stat(f"/proc/{self.pid}/fd/{number}")
                    if (status.st_dev, status.st_ino) == (dev, ino):
                        return True
        return False

    def look(self, *, again: bool = False) -> None:
        """Reads its mappings, unless that was done just now."""
        now_ns = time.monotonic_ns()
        if now_ns - self._looked_ns < _LOOK_NS and not again:
            return
        self._looked_ns = now_ns
        found: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        with contextlib.suppress(OSError), open(f"/proc/{self.pid}/maps", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                span, _, offset, device, inode = line.split(None, 5)[:5]
                if inode == "0":
                    continue
                start, end = (int(part, 16) for part in span.split("-"))
                major, minor = (int(part, 16) for part in device.split(":"))
                found.setdefault((os.makedev(major, minor), int(inode)), []).append((int(offset, 16), start, end - start))
        self._parts = found

    def advise(self, dev: int, ino: int, offset: int, length: int, advice: int) -> bool:
        """Gives advice on a part of a file wherever it is mapped; False if it is mapped nowhere."""
        if not self._parts.get((dev, ino)):
            self.look()
        mapped = False
        for at, address, size in self._parts.get((dev, ino), ()):
            start, end = max(offset, at), min(offset + length, at + size)
            if start >= end:
                continue
            mapped = True
            try:
                syscalls.process_madvise(self._fd, address + start - at, end - start, advice)
            except OSError as error:
                if error.errno in (errno.ENOMEM, errno.EFAULT, errno.EINVAL):  # it has changed its mappings
                    self.look()
                else:
                    self.refused = error.errno or errno.EIO
        return mapped
