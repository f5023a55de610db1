"""Page faults by perf_event_open and its ring buffers: the kernel's own event interface, without BPF or privilege."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform

import numpy as np

from llmcache.arrays import Bytes, Uint64s
from llmcache.units import PAGE_BYTES

_SOFTWARE, _PAGE_FAULTS = 1, 2
_TID, _TIME, _ADDR = 1 << 1, 1 << 2, 1 << 3
_LOST, _SAMPLE = 2, 9
_INHERIT, _EXCLUDE_KERNEL, _EXCLUDE_HYPERVISOR, _WATERMARK = 1 << 1, 1 << 5, 1 << 6, 1 << 14
_USE_CLOCK, _INHERIT_THREADS_ONLY = 1 << 25, 1 << 35
# mmap, task, mmap_data, sample_id_all, mmap2
_TELL_MAPPINGS = 1 << 8 | 1 << 13 | 1 << 17 | 1 << 18 | 1 << 23
_CLOSE_ON_EXEC = 8
_SET_OUTPUT, _DISABLE = 0x2405, 0x2401
_NUMBERS = {"x86_64": 298, "aarch64": 241}
_HEAD, _TAIL = 128, 129  # words of the control page
_HEADER = 8
_libc = ctypes.CDLL(None, use_errno=True)


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("config", ctypes.c_uint64),
        ("sample_period", ctypes.c_uint64),
        ("sample_type", ctypes.c_uint64),
        ("read_format", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("wakeup_watermark", ctypes.c_uint32),
        ("bp_type", ctypes.c_uint32),
        ("config1_to_sample_stack", ctypes.c_uint64 * 4),
        ("sample_stack_user", ctypes.c_uint32),
        ("clockid", ctypes.c_int32),
        ("rest", ctypes.c_uint8 * 40),
    )


def supported() -> str | None:
    """Why there are no perf events on this machine, or None."""
    return None if platform.machine() in _NUMBERS else f"the processor is {platform.machine()}; x86-64 or arm64 is needed"


def open_faults(tid: int, cpu: int, follow: bool) -> int:
    """Returns a descriptor of the page faults of thread `tid` on `cpu` and of all threads (`follow`: processes) it starts.

    Only those of the program, not those in the kernel's own code; new mappings and forks are told as well. OSError.
    """
    flags = _INHERIT | _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR | _WATERMARK | _USE_CLOCK | _TELL_MAPPINGS
    attributes = _Attributes(
        type=_SOFTWARE,
        size=ctypes.sizeof(_Attributes),
        config=_PAGE_FAULTS,
        sample_period=1,
        sample_type=_TID | _TIME | _ADDR,
        flags=flags if follow else flags | _INHERIT_THREADS_ONLY,
        wakeup_watermark=1 << 30,  # nobody waits for it: it is read at intervals
        clockid=1,  # CLOCK_MONOTONIC
    )
    arguments = (ctypes.byref(attributes), ctypes.c_int(tid), ctypes.c_int(cpu), ctypes.c_int(-1))
    fd = int(_libc.syscall(ctypes.c_long(_NUMBERS[platform.machine()]), *arguments, ctypes.c_ulong(_CLOSE_ON_EXEC)))
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


class EventRing:
    """The buffer of one event on one CPU, which any number of threads share."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """`size_bytes`: a power of two. OSError where the kernel gives no memory."""
        self.lost = 0
        self.others: list[tuple[int, bytes]] = []  # kind and contents of records that are no samples
        self._fds = [fd]
        self._size = size_bytes
        self._map = mmap.mmap(fd, PAGE_BYTES + size_bytes)
        self._control = np.frombuffer(self._map, np.uint64, PAGE_BYTES // 8)
        self._data = np.frombuffer(self._map, np.uint8, size_bytes, PAGE_BYTES)
        self._seen = 0

    def add(self, fd: int) -> None:
        """Send the events of descriptor `fd`, of the same CPU, to this buffer as well."""
        self._fds.append(fd)
        if _libc.ioctl(fd, ctypes.c_ulong(_SET_OUTPUT), ctypes.c_int(self._fds[0])):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def read(self, finished: bool = False) -> list[Bytes]:
        """Returns the samples since the last call, arrays of shape (samples, bytes of one), each without its header."""
        head, tail = int(self._control[_HEAD]), int(self._control[_TAIL])
        if platform.machine() != "x86_64" and not finished:
            # Loads may be reordered there: what was complete a round ago certainly is now.
            head, self._seen = max(self._seen, tail), head
        if head == tail:
            return []
        raw = self._copied(tail, head)
        self._control[_TAIL] = head
        return list(self._samples(raw))

    def _copied(self, tail: int, head: int) -> Bytes:
        start, length = tail % self._size, head - tail
        first = self._data[start : start + length]
        return np.concatenate((first, self._data[: length - len(first)])) if len(first) < length else first.copy()

    def _samples(self, raw: Bytes) -> list[Bytes]:
        found, at = [], 0
        while at < len(raw):
            kind, size = int(raw[at : at + 4].view(np.uint32)[0]), int(raw[at + 6 : at + 8].view(np.uint16)[0])
            if kind != _SAMPLE:
                if kind == _LOST:
                    self.lost += int(raw[at + 16 : at + 24].view(np.uint64)[0])
                else:
                    self.others.append((kind, raw[at + _HEADER : at + size].tobytes()))
                at += size
                continue
            # Samples of one event have one size: a run of them is taken apart at once.
            rows = raw[at : at + (len(raw) - at) // size * size].reshape(-1, size)
            kinds = np.ascontiguousarray(rows[:, :4]).view(np.uint32)[:, 0]
            other = np.flatnonzero(kinds != _SAMPLE)
            count = int(other[0]) if len(other) else len(rows)
            found.append(rows[:count, _HEADER:])
            at += count * size
        return found

    def stop(self) -> None:
        """Count no more; what is there can still be read."""
        for fd in self._fds:
            _libc.ioctl(fd, ctypes.c_ulong(_DISABLE), 0)

    def close(self) -> None:
        """Give everything back."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []
        del self._control, self._data
        self._map.close()


def field(rows: Bytes, offset: int, size: int) -> Uint64s:
    """Returns a field of each sample, `size` bytes (1, 2, 4 or 8) at `offset`."""
    column = np.ascontiguousarray(rows[:, offset : offset + size])
    return column.view(np.dtype(f"<u{size}"))[:, 0].astype(np.uint64)
