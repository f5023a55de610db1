"""Private mount namespaces: only the command sees a FUSE mount over its model's directory.

An ordinary user gets one together with a user namespace. There the daemon has CAP_SYS_ADMIN and mounts without help; the
command has no capability, because `execve` of a user other than root clears them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_REC, _MS_SLAVE = 1 << 14, 1 << 19
_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 47, 2
_CAPABILITY_VERSION_3 = 0x20080522
_CAP_SYS_ADMIN = 21

_libc = ctypes.CDLL(None, use_errno=True)


def enter_private() -> None:
    """Give this process, which has a single thread, a mount namespace of its own; OSError.

    Mounts and unmounts of other namespaces still arrive. A process without the right gets a user namespace too.
    """
    uid, gid = os.geteuid(), os.getegid()
    if _libc.unshare(_CLONE_NEWNS) != 0:
        _check(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWUSER), "unshare")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _check(_libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_SLAVE), None), "mount")


def no_new_privileges() -> None:
    """Have `execve` grant nothing: a mount in this namespace must not mislead a set-user-id program. OSError."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, *(ctypes.c_ulong(word) for word in (1, 0, 0, 0))), "prctl")


def die_with_parent(parent: int) -> None:
    """Have the kernel send SIGTERM to this process when its parent ends. OSError if it has ended already."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, *(ctypes.c_ulong(word) for word in (signal.SIGTERM, 0, 0, 0))), "prctl")
    if os.getppid() != parent:
        raise OSError(errno.ESRCH, "the parent has ended")


class Namespaces:
    """The mount namespace of a process, and its user namespace if it differs from ours."""

    def __init__(self, pid: int) -> None:
        self._fds: list[int] = []
        for name in ("user", "mnt"):
            path = f"/proc/{pid}/ns/{name}"
            if os.readlink(path) != os.readlink(f"/proc/self/ns/{name}"):
                self._fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))

    def join(self) -> None:
        """Enter them, in a process with a single thread, and keep the right to mount across `execve`. OSError."""
        for fd in self._fds:
            _check(_libc.setns(fd, 0), "setns")
        if os.geteuid() != 0:
            _keep_capabilities(_CAP_SYS_ADMIN)

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()


def _keep_capabilities(*capabilities: int) -> None:
    """Keep capabilities across `execve` of an ordinary user."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; the same for capabilities from 32 on
    _check(_libc.capget(header, data), "capget")
    for capability in capabilities:
        data[2 + 3 * (capability // 32)] |= 1 << capability % 32
    _check(_libc.capset(header, data), "capset")
    for capability in capabilities:
        words = (ctypes.c_ulong(word) for word in (_PR_CAP_AMBIENT_RAISE, capability, 0, 0))
        _check(_libc.prctl(_PR_CAP_AMBIENT, *words), "prctl")


def _check(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
