"""Runs a command without a system call: `python -m tests.seccomp NUMBER ERRNO COMMAND...`, in which the call fails."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Sequence

PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, FAIL = 0x7FFF0000, 0x00050000


def without(number: int, error: int, command: Sequence[str]) -> list[str]:
    """Return the command that runs `command`, in which system call `number` fails with `error`."""
    return [sys.executable, "-m", "tests.seccomp", str(number), str(error), *command]


def main(number: int, error: int, *command: str) -> None:
    """Refuse a system call, then run the command."""
    libc = ctypes.CDLL(None, use_errno=True)
    code = [(LOAD, 0, 0, 0), (JUMP_IF_EQUAL, 0, 1, number), (RETURN, 0, 0, FAIL | error), (RETURN, 0, 0, ALLOW)]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *each) for each in code))
    program = struct.pack("<H6xQ", len(code), ctypes.addressof(filters))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0):
        sys.exit("seccomp is not available")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
