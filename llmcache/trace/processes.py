"""The process to record, running or started as a command that waits until it is released."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

from llmcache.errors import MissingRequirement, UsageError, printable
from llmcache.procfs import check_process
from llmcache.run.child import Child, NotRunnable, resolve

_LIST = "list processes with: ps -e"
_MOST_LISTED, _LONGEST_LISTED = 8, 60


class Target:
    """A process to record. `child` is a command that waits for `release`."""

    def __init__(self, pid: int, command: str, child: Child | None = None) -> None:
        self.pid = pid
        self.command = command
        self._child = child

    def release(self) -> None:
        if self._child is not None:
            with _as_usage_error():
                self._child.release()

    def end(self) -> None:
        if self._child is not None:
            self._child.cancel()

    @property
    def ending(self) -> str | None:
        if self._child is None or not self._child.has_ended():
            return None
        code = self._child.exit_code
        return f"exit status {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"


def target_of(words: Sequence[str]) -> Target:
    """Return the process whose number or name is the only word, or start the command after `--` and let it wait.

    UsageError; MissingRequirement if the process does not exist.
    """
    if not words or words == ("--",):
        raise UsageError("PID: no process or command is given", "llmcache trace PID, or llmcache trace -- CMD…")
    if words[0] == "--":
        return _spawned(words[1:])
    if len(words) > 1:
        hint = f"its children are recorded as well; to start a command: llmcache trace -- {' '.join(words)}"
        raise UsageError(f"PID: give one process, not '{words[0]}' and '{words[1]}'", hint)
    pid = int(words[0]) if re.fullmatch("[0-9]{1,20}", words[0]) else _named(words[0])
    check_process("PID", pid)
    return Target(pid, _command_line(pid))


def _spawned(command: Sequence[str]) -> Target:
    with _as_usage_error():
        program = resolve(command[0], os.environ.get("PATH"))
    child = Child(command, program, os.environ)
    return Target(child.pid, " ".join(command), child)


@contextlib.contextmanager
def _as_usage_error() -> Iterator[None]:
    try:
        yield
    except NotRunnable as error:
        raise UsageError(f"CMD: {error.message}", error.hint) from error


def _named(name: str) -> int:
    found = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid != os.getpid() and name in _names(pid)]
    if not found:
        hint = f"{_LIST}; to start a command: llmcache trace -- {name}"
        raise MissingRequirement(f"PID: no process is called '{name}'", hint)
    if len(found) > 1:
        shown = [f"{pid} ({printable(_command_line(pid)[:_LONGEST_LISTED])})" for pid in sorted(found)[:_MOST_LISTED]]
        more = f" and {len(found) - len(shown)} more" if len(found) > len(shown) else ""
        message = f"PID: {len(found)} processes are called '{name}': {', '.join(shown)}{more}"
        raise UsageError(message, "give the number of one of them")
    return found[0]


def _names(pid: int) -> set[str]:
    try:
        command, own = Path(f"/proc/{pid}/cmdline").read_bytes(), Path(f"/proc/{pid}/comm").read_bytes()
    except OSError:  # it has ended
        return set()
    first = os.fsdecode(command.split(b"\0")[0])
    return {os.path.basename(first), os.fsdecode(own.rstrip(b"\n"))} if first else set()


def _command_line(pid: int) -> str:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return os.fsdecode(raw.rstrip(b"\0").replace(b"\0", b" "))
