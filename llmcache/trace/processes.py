"""The process to record: found by number or name, or started as a command that waits until it is released."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

from llmcache.errors import MissingRequirement, UsageError, printable
from llmcache.procfs import status_of

_KERNEL_THREAD = 0x00200000  # PF_KTHREAD
_LIST = "list processes with: ps -e"
_MOST_LISTED, _LONGEST_LISTED = 8, 60
_GATE = 9
# The shell waits for a line on the gate, a pipe, then executes the command. If the recorder dies, the pipe is closed and the
# shell exits.
_WAITER = f'read -r _ <&{_GATE} || exit 1; exec {_GATE}<&-; exec "$@"'


class Target:
    """A process to record. With `gate` (a pipe) it is a command that llmcache started; it waits there for `release`."""

    def __init__(self, pid: int, command: str, gate: int | None = None) -> None:
        self.pid = pid
        self.command = command
        self._gate = gate
        self._status: int | None = None

    def release(self) -> None:
        """Let the command run, if llmcache started it."""
        if self._gate is not None:
            os.write(self._gate, b"\n")
            os.close(self._gate)

    def end(self) -> None:
        """Terminate the command if llmcache started it and it still runs; other processes are left alone."""
        if self._gate is not None and self.ending is None:
            os.kill(self.pid, signal.SIGTERM)
            os.kill(self.pid, signal.SIGCONT)
            self._status = os.waitpid(self.pid, 0)[1]

    @property
    def ending(self) -> str | None:
        """Return how the command ended, in words; None while it runs, and for a process that llmcache did not start."""
        if self._gate is None:
            return None
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if not pid:
                return None
            self._status = status
        code = os.waitstatus_to_exitcode(self._status)
        return f"exit status {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"


def target_of(words: Sequence[str]) -> Target:
    """Return the process whose number or name is the only word, or start the command after `--` and let it wait.

    UsageError if no process or several are named, MissingRequirement if the process does not exist.
    """
    if not words or words == ("--",):
        raise UsageError("PID: no process or command is given", "llmcache trace PID, or llmcache trace -- CMD…")
    if words[0] == "--":
        return _spawned(words[1:])
    if len(words) > 1:
        hint = f"its children are recorded as well; to start a command: llmcache trace -- {' '.join(words)}"
        raise UsageError(f"PID: give one process, not '{words[0]}' and '{words[1]}'", hint)
    pid = int(words[0]) if re.fullmatch("[0-9]{1,20}", words[0]) else _named(words[0])
    if pid == os.getpid():
        raise UsageError(f"PID: {pid} is llmcache itself", _LIST)
    _check(pid)
    return Target(pid, _command_line(pid))


def _spawned(command: Sequence[str]) -> Target:
    """Start a shell that waits, then becomes `command` with the same process number."""
    if shutil.which(command[0]) is None:
        problem = "cannot be executed" if os.path.exists(command[0]) else "not found"
        raise UsageError(f"CMD: '{command[0]}' {problem}", "give a command by its name or path")
    waiting, gate = os.pipe()
    try:
        pid = os.posix_spawn(
            "/bin/sh",
            ["sh", "-c", _WAITER, "llmcache", *command],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, waiting, _GATE)],
            setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE],  # Python ignores some
        )
    finally:
        os.close(waiting)
    return Target(pid, " ".join(command), gate)


def _named(name: str) -> int:
    """Return the number of the only process with this name, in `comm` or at the beginning of its command line."""
    found = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid != os.getpid() and name in _names(pid)]
    if not found:
        hint = f"{_LIST}; to start a command: llmcache trace -- {name}"
        raise MissingRequirement(f"PID: no process is called '{name}'", hint)
    if len(found) > 1:
        shown = [f"{pid} ({printable(_command_line(pid)[:_LONGEST_LISTED])})" for pid in sorted(found)[:_MOST_LISTED]]
        more = f" and {len(found) - len(shown)} more" if len(found) > len(shown) else ""
        said = f"PID: {len(found)} processes are called '{name}': {', '.join(shown)}{more}"
        raise UsageError(said, "give the number of one of them")
    return found[0]


def _names(pid: int) -> set[str]:
    """Return the names of a process; none for kernel threads and zombies, which have no command line."""
    try:
        command, own = Path(f"/proc/{pid}/cmdline").read_bytes(), Path(f"/proc/{pid}/comm").read_bytes()
    except OSError:  # it has ended
        return set()
    first = os.fsdecode(command.split(b"\0")[0])
    return {os.path.basename(first), os.fsdecode(own.rstrip(b"\n"))} if first else set()


def _check(pid: int) -> None:
    try:
        fields = status_of(pid)
        flags = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[6])
    except (OSError, IndexError) as error:
        raise MissingRequirement(f"PID: process {pid} does not exist", _LIST) from error
    if int(fields["Tgid"]) != pid:
        raise MissingRequirement(f"PID: {pid} is a thread of process {fields['Tgid']}", f"record process {fields['Tgid']}")
    if flags & _KERNEL_THREAD:
        raise MissingRequirement(f"PID: {pid} ({fields['Name']}) is a kernel thread, which has no files", _LIST)
    if fields["State"].startswith(("Z", "X")):
        raise MissingRequirement(f"PID: process {pid} ({fields['Name']}) has ended", _LIST)


def _command_line(pid: int) -> str:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return os.fsdecode(raw.rstrip(b"\0").replace(b"\0", b" "))
