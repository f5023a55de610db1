"""perf_event_open(2): page faults as events, and hardware breakpoints on memory of other processes."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform

_NUMBERS = {"x86_64": 298, "aarch64": 241}
_BREAKPOINT, _READ_OR_WRITE, _WORD_BYTES = 5, 3, 8  # x86 has no breakpoints for reads only
_INHERIT, _EXCLUDE_KERNEL, _EXCLUDE_HYPERVISOR = 1 << 1, 1 << 5, 1 << 6
_INHERIT_THREADS_ONLY, _REMOVE_ON_EXEC = 1 << 35, 1 << 36
_CLOSE_ON_EXEC = 8
_SET_BPF = 0x40042408
_libc = ctypes.CDLL(None, use_errno=True)


class Attributes(ctypes.Structure):
    """struct perf_event_attr; `rest` has the unused fields."""

    _fields_ = (
        ("type", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("config", ctypes.c_uint64),
        ("sample_period", ctypes.c_uint64),
        ("sample_type", ctypes.c_uint64),
        ("read_format", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("wakeup_watermark", ctypes.c_uint32),
        ("breakpoint_type", ctypes.c_uint32),
        ("breakpoint_address", ctypes.c_uint64),
        ("breakpoint_bytes", ctypes.c_uint64),
        ("branches_and_registers", ctypes.c_uint64 * 2),
        ("sample_stack_user", ctypes.c_uint32),
        ("clockid", ctypes.c_int32),
        ("rest", ctypes.c_uint8 * 40),
    )


def is_known_processor() -> bool:
    """Return whether the number of the system call is known for this processor."""
    return platform.machine() in _NUMBERS


def open_event(attributes: Attributes, tid: int, cpu: int = -1) -> int:
    """Return a descriptor of an event of thread `tid`. OSError."""
    attributes.size = ctypes.sizeof(attributes)
    arguments = (ctypes.byref(attributes), ctypes.c_int(tid), ctypes.c_int(cpu), ctypes.c_int(-1))
    fd = int(_libc.syscall(ctypes.c_long(_NUMBERS[platform.machine()]), *arguments, ctypes.c_ulong(_CLOSE_ON_EXEC)))
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


def open_breakpoint(tid: int, address: int, program_fd: int) -> int:
    """Return a descriptor of a hardware breakpoint that runs a BPF program; closing it removes the breakpoint. OSError.

    It covers 8 bytes at `address` (a multiple of 8) in a thread and the threads that it starts, and ignores the kernel's
    accesses.
    """
    flags = _INHERIT | _INHERIT_THREADS_ONLY | _REMOVE_ON_EXEC | _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR
    attributes = Attributes(
        type=_BREAKPOINT,
        sample_period=1,
        flags=flags,
        breakpoint_type=_READ_OR_WRITE,
        breakpoint_address=address,
        breakpoint_bytes=_WORD_BYTES,
    )
    fd = open_event(attributes, tid)
    try:
        fcntl.ioctl(fd, _SET_BPF, program_fd)
    except OSError:
        os.close(fd)
        raise
    return fd
