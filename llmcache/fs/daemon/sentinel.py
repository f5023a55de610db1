"""The sentinel: a tiny process that frees the readers of a mount whose daemon was killed.

A daemon that dies by SIGKILL while one of its threads waits in the kernel (STORE or INVAL, for a page of a READ that now
nobody answers) cannot go: the thread waits for the reply, and the FUSE connection is not aborted before the thread has
gone. Everyone who reads the mount hangs with it. The sentinel notices the death and aborts the connection from outside,
through the fusectl file that belongs to the mount's owner. The mount stays, and answers ENOTCONN.

Standard library only; run as `python sentinel.py DAEMON_PID DEVICE_MINOR`. The daemon kills it when it ends in order.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

CONNECTIONS = Path("/sys/fs/fuse/connections")
CLONE_NEWNS = 0x00020000
MS_REC_PRIVATE = 0x4000 | 0x40000
PR_SET_PDEATHSIG = 1
KILLED = 1 << (signal.SIGKILL - 1)
LOOK_S = 2.0


def is_dead(pid: int) -> bool:
    """True for a process that is gone, a zombie (its other threads may hang in the kernel), or killed and hangs there."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return fields["State"].split()[0] in "ZX" or bool(int(fields["SigPnd"], 16) & KILLED)


def abort(minor: int) -> None:
    """Aborts the FUSE connection of device 0:`minor`; mounts fusectl where the system has not (root only)."""
    if not (CONNECTIONS / str(minor)).exists():
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNS) == 0:
            libc.mount(None, b"/", None, MS_REC_PRIVATE, None)
            libc.mount(b"none", os.fsencode(CONNECTIONS), b"fusectl", 0, None)
    with contextlib.suppress(OSError):  # unmounted meanwhile
        (CONNECTIONS / str(minor) / "abort").write_text("1")


def main() -> int:
    """Waits for the daemon's death: told by the kernel when its main thread dies, and looked for in between."""
    pid, minor = int(sys.argv[1]), int(sys.argv[2])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    while not is_dead(pid):
        signal.sigtimedwait({signal.SIGTERM}, LOOK_S)
    abort(minor)
    return 0


if __name__ == "__main__":
    sys.exit(main())
