"""What is recorded: a running process, by number or name, or a command that waits until the recorder is ready."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

from llmcache.errors import EnvironmentProblem, UsageError, printable

_KERNEL_THREAD = 0x00200000  # PF_KTHREAD
_LIST = "list processes with: ps -e"
_MOST_LISTED, _LONGEST_LISTED = 8, 60
_GATE = 9
# Waits for a line at the gate, then becomes the command. If the recorder dies first, the gate ends, and so does this.
_WAITER = f'read -r _ <&{_GATE} || exit 1; exec {_GATE}<&-; exec "$@"'


class Running:
    """A process that runs already."""

    def __init__(self, pid: int) -> None:
        """EnvironmentProblem if there is no such process, or it has no files."""
        self.pid = pid
        if pid == os.getpid():
            raise UsageError(f"PID: {pid} is llmcache itself", _LIST)
        _check(pid)
        self.command = _command_line(self.pid)

    def release(self) -> None:
        """It runs already."""

    def end(self) -> None:
        """It is not ours to end."""

    @property
    def ending(self) -> str | None:
        """How it ended: not known of a process that is not ours."""
        return None


class Spawned:
    """A command, started but waiting; its process number does not change when it is released."""

    def __init__(self, command: Sequence[str]) -> None:
        """UsageError if there is no such command."""
        if shutil.which(command[0]) is None:
            problem = "cannot be executed" if os.path.exists(command[0]) else "not found"
            raise UsageError(f"CMD: '{command[0]}' {problem}", "a process is given by its number, a command by name or path")
        self.command = " ".join(command)
        self._status: int | None = None
        waiting, self._gate = os.pipe()
        try:
            self.pid = os.posix_spawn(
                "/bin/sh",
                ["sh", "-c", _WAITER, "llmcache", *command],
                os.environ,
                file_actions=[(os.POSIX_SPAWN_DUP2, waiting, _GATE)],
                setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE],  # Python ignores some
            )
        finally:
            os.close(waiting)

    def release(self) -> None:
        """Let the command run."""
        os.write(self._gate, b"\n")
        os.close(self._gate)

    def end(self) -> None:
        """End the command, if it still runs, and take its status."""
        if self.ending is None:
            os.kill(self.pid, signal.SIGTERM)
            os.kill(self.pid, signal.SIGCONT)
            self._status = os.waitpid(self.pid, 0)[1]

    @property
    def ending(self) -> str | None:
        """How it ended, in words; None while it runs."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = status if pid else None
        if self._status is None:
            return None
        code = os.waitstatus_to_exitcode(self._status)
        return f"exit status {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"


Target = Running | Spawned


def target_of(words: Sequence[str]) -> Target:
    """Returns the process whose number or name is the only word, or the command that stands after `--`, waiting.

    UsageError: no process, or several; EnvironmentProblem: there is none.
    """
    if not words or words == ("--",):
        raise UsageError("PID: what is to be recorded?", "llmcache trace PID, or llmcache trace -- CMD…")
    if words[0] == "--":
        return Spawned(words[1:])
    if len(words) > 1:
        hint = f"with its children; a command goes after --: llmcache trace -- {' '.join(words)}"
        raise UsageError(f"PID: '{words[1]}' after process {words[0]}: one process is recorded", hint)
    is_number = words[0].isascii() and words[0].isdigit()
    return Running(int(words[0]) if is_number else _named(words[0]))


def _named(name: str) -> int:
    """Number of the one process that is called `name`, by the kernel or by its command line."""
    found = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid != os.getpid() and name in _names(pid)]
    if not found:
        hint = f"{_LIST}; a command that is to be started goes after --: llmcache trace -- {name}"
        raise EnvironmentProblem(f"PID: no process is called '{name}'", hint)
    if len(found) > 1:
        shown = [f"{pid} ({printable(_command_line(pid)[:_LONGEST_LISTED])})" for pid in sorted(found)[:_MOST_LISTED]]
        more = f" and {len(found) - len(shown)} more" if len(found) > len(shown) else ""
        said = f"PID: {len(found)} processes are called '{name}': {', '.join(shown)}{more}"
        raise UsageError(said, "give the number of one")
    return found[0]


def _names(pid: int) -> set[str]:
    """What a process is called: none for one that has no command line, as threads of the kernel and dead ones."""
    try:
        command, own = Path(f"/proc/{pid}/cmdline").read_bytes(), Path(f"/proc/{pid}/comm").read_bytes()
    except OSError:  # it has ended
        return set()
    first = os.fsdecode(command.split(b"\0")[0])
    return {os.path.basename(first), os.fsdecode(own.rstrip(b"\n"))} if first else set()


def _check(pid: int) -> None:
    process = Path("/proc") / str(pid)
    try:
        status = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines() if ":\t" in line)
        flags = int((process / "stat").read_text().rpartition(")")[2].split()[6])
    except (OSError, IndexError) as error:
        raise EnvironmentProblem(f"PID: process {pid} is not there", _LIST) from error
    if int(status["Tgid"]) != pid:
        raise EnvironmentProblem(f"PID: {pid} is a thread of process {status['Tgid']}", f"record {status['Tgid']}")
    if flags & _KERNEL_THREAD:
        raise EnvironmentProblem(f"PID: {pid} ({status['Name']}) is a thread of the kernel: it has no files", _LIST)
    if status["State"].startswith(("Z", "X")):
        raise EnvironmentProblem(f"PID: process {pid} ({status['Name']}) has ended", _LIST)


def _command_line(pid: int) -> str:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return os.fsdecode(raw.rstrip(b"\0").replace(b"\0", b" "))
