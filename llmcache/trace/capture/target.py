"""What is recorded: a running process, or a command that waits until the recorder is ready."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

from llmcache.errors import EnvironmentProblem, UsageError

_KERNEL_THREAD = 0x00200000  # PF_KTHREAD
_LIST = "list processes with: ps -e"
_GATE = 9
# Waits for a line at the gate, then becomes the command. If the recorder dies first, the gate ends, and so does this.
_WAITER = f'read -r _ <&{_GATE} || exit 1; exec {_GATE}<&-; exec "$@"'


class Running:
    """A process that runs already."""

    def __init__(self, text: str) -> None:
        """`text`: its number. EnvironmentProblem if there is no such process, or it has no files."""
        self.pid = int(text)
        if self.pid == os.getpid():
            raise UsageError(f"PID: {text} is llmcache itself", _LIST)
        _check(self.pid)
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
    """Returns the process whose number is the only word, or the command that the words are, started but waiting."""
    if not words:
        raise UsageError("PID: what is to be recorded?", "llmcache trace PID, or llmcache trace -- CMD…")
    if not (words[0].isascii() and words[0].isdigit()):
        return Spawned(words)
    if len(words) > 1:
        raise UsageError(f"PID: '{words[1]}' after process {words[0]}: one process is recorded", "with its children")
    return Running(words[0])


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
