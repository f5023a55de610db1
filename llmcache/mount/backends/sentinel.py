"""The sentinel: a small process that frees the readers of a mount whose daemon was killed.

A killed daemon with a thread in STORE or INVAL that waits for a page of an unanswered READ cannot exit, and the kernel
aborts the FUSE connection only after the exit. The sentinel aborts it through fusectl; the mount then returns ENOTCONN.

It uses only the standard library: `python sentinel.py DAEMON_PID DEVICE_MINOR`. The daemon kills it at a regular end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

CONNECTIONS = "/sys/fs/fuse/connections"
FSOPEN, FSCONFIG, FSMOUNT = 430, 431, 432  # on every architecture; Linux 5.2
FSCONFIG_CMD_CREATE = 6
PR_SET_PDEATHSIG = 1
KILLED = 1 << (signal.SIGKILL - 1)
LOOK_S = 2.0

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def is_dead(pid: int) -> bool:
    """Return True if a process has ended, is a zombie, or was killed and cannot exit."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return fields["State"].split()[0] in "ZX" or bool(int(fields["SigPnd"], 16) & KILLED)


def abort(minor: int) -> None:
    """Abort the FUSE connection of device 0:`minor`.

    Without a mounted fusectl, it needs CAP_SYS_ADMIN and Linux 5.2, else OSError.
    """
    mounted = os.path.exists(f"{CONNECTIONS}/{minor}")
    directory = os.open(CONNECTIONS, os.O_PATH | os.O_DIRECTORY) if mounted else fusectl()
    try:
        with open(os.open(f"{minor}/abort", os.O_WRONLY, dir_fd=directory), "w", encoding="ascii") as file:
            file.write("1")
    except FileNotFoundError:  # the mount has ended
        pass
    finally:
        os.close(directory)


def fusectl() -> int:
    """Return a descriptor of a detached fusectl mount."""
    context = _call(FSOPEN, b"fusectl", ctypes.c_uint(0))
    try:
        _call(FSCONFIG, ctypes.c_int(context), ctypes.c_uint(FSCONFIG_CMD_CREATE), None, None, ctypes.c_int(0))
        return _call(FSMOUNT, ctypes.c_int(context), ctypes.c_uint(0), ctypes.c_uint(0))
    finally:
        os.close(context)


def _call(number: int, *arguments: object) -> int:
    done = int(libc.syscall(ctypes.c_long(number), *arguments))
    if done < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return done


def main() -> int:
    """Wait for the daemon's death, then abort the connection."""
    pid, minor = int(sys.argv[1]), int(sys.argv[2])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    while not is_dead(pid):
        signal.sigtimedwait({signal.SIGTERM}, LOOK_S)
    try:
        abort(minor)
    except OSError as error:
        print(f"cannot abort the FUSE connection {minor}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
