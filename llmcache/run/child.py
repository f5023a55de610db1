"""The command that `llmcache run` starts."""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from llmcache.cgroup import Cgroup
from llmcache.errors import LlmcacheError, MissingRequirement, UsageError
from llmcache.run.namespaces import die_with_parent, enter_private, no_new_privileges

NOT_EXECUTABLE, NOT_FOUND = 126, 127
FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
"""Signals that the command gets if `llmcache run` gets them, unless they are ignored (`nohup`)."""
KEYS = (signal.SIGINT, signal.SIGQUIT)
"""Signals of keys: the terminal sends them to the command as well, so those of others alone are forwarded."""
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


class NotRunnable(LlmcacheError):
    """A command that does not exist (exit code 127) or cannot be executed (126), as shells report it."""

    def __init__(self, command: str, code: int, reason: str, hint: str | None = None) -> None:
        usual = (
            "check the name, or give the path of the program"
            if code == NOT_FOUND
            else "make it executable (chmod +x), or run it with its interpreter"
        )
        hint = hint or usual
        super().__init__(f"cannot run '{command}': {reason}", hint)
        self.exit_code = code


def resolve(command: str, path: str | None) -> str:
    """Return the path of the program that `command` names. NotRunnable."""
    found = shutil.which(command, path=path)
    if found is not None:
        return found
    exists = os.path.lexists(command) if "/" in command else shutil.which(command, os.F_OK, path) is not None
    if not exists or ("/" in command and not os.path.exists(command)):
        raise NotRunnable(command, NOT_FOUND, "no such program")
    raise NotRunnable(command, NOT_EXECUTABLE, "it is a directory" if os.path.isdir(command) else "it is not executable")


@dataclass(frozen=True)
class User:
    """The user that a command of root runs as."""

    name: str
    uid: int
    gid: int
    home: str
    shell: str

    def environment(self, own: Mapping[str, str]) -> dict[str, str]:
        changed = {"HOME": self.home, "USER": self.name, "LOGNAME": self.name, "SHELL": self.shell}
        kept = {name: value for name, value in own.items() if name not in ("XDG_RUNTIME_DIR", "MAIL")}
        if os.path.isdir(runtime := f"/run/user/{self.uid}"):
            changed["XDG_RUNTIME_DIR"] = runtime
        return kept | changed

    def become(self) -> None:
        os.initgroups(self.name, self.gid)
        os.setresgid(self.gid, self.gid, self.gid)
        os.setresuid(self.uid, self.uid, self.uid)


def user_of(name: str | None, environment: Mapping[str, str]) -> User | None:
    """Return the user to run the command as, None for this process's own; UsageError.

    Root's commands run as the caller of sudo by default.
    """
    is_root, chosen, named_by = os.geteuid() == 0, name, "--user"
    if chosen is None and is_root:
        chosen, named_by = environment.get("SUDO_USER") or None, "SUDO_USER"
    if chosen is None or (is_root and chosen == "root"):
        return None
    try:
        entry = pwd.getpwuid(int(chosen)) if chosen.isascii() and chosen.isdigit() else pwd.getpwnam(chosen)
    except KeyError:
        hint = "list users with: getent passwd" if name is not None else "unset SUDO_USER to run the command as root"
        raise UsageError(f"{named_by}: user '{chosen}' does not exist", hint) from None
    if entry.pw_uid == os.geteuid():
        return None
    if not is_root:
        raise UsageError(f"--user: only root can run a command as '{chosen}'", "use sudo")
    return User(entry.pw_name, entry.pw_uid, entry.pw_gid, entry.pw_dir, entry.pw_shell)


class Child:
    """The command as a process that waits until `release`; it ends unexecuted if this process ends before that."""

    def __init__(
        self,
        words: Sequence[str],
        program: str,
        environment: Mapping[str, str],
        *,
        user: User | None = None,
        group: Cgroup | None = None,
        private: bool = False,
        dies_with_parent: bool = False,
    ) -> None:
        """Raise OSError if the kernel refuses a `private` mount namespace.

        This process must have a single thread, because the new one runs Python until it executes the program.
        """
        self.words, self.program, self.environment = list(words), program, dict(environment)
        self.user, self.group = user, group
        self.dies_with_parent, parent = dies_with_parent, os.getpid()
        self.status: int | None = None
        gate, held = os.pipe2(os.O_CLOEXEC)
        self._gate: int | None = held
        self._report, report = os.pipe2(os.O_CLOEXEC)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(held)
            os.close(self._report)
            self._become(gate, report, private, parent)
        os.close(gate)
        os.close(report)
        if failed := self._read_report():
            self.wait()
            self._close_gate()
            os.close(self._report)
            raise OSError(failed, os.strerror(failed))

    def _become(self, gate: int, report: int, private: bool, parent: int) -> NoReturn:
        code = NOT_EXECUTABLE
        try:
            for number in (*FORWARDED, *KEYS):
                if not _is_ignored(number):
                    signal.signal(number, signal.SIG_DFL)
            for number in _IGNORED_BY_PYTHON:
                signal.signal(number, signal.SIG_DFL)
            if self.group is not None:
                self.group.add(os.getpid())
            if private:
                enter_private()
                no_new_privileges()
            os.write(report, b"0\n")
            if not os.read(gate, 1):
                os._exit(0)
            if self.user is not None:
                self._change_user(self.user, report)
            if self.dies_with_parent:  # the kernel forgets it where the user changes
                die_with_parent(parent)
            if private:  # a mount covers the working directory, or one above it, by now
                with contextlib.suppress(OSError):
                    os.chdir(os.getcwd())
            os.execve(self.program, self.words, self.environment)
        except OSError as error:
            code = NOT_FOUND if error.errno == errno.ENOENT else NOT_EXECUTABLE
            with contextlib.suppress(OSError):
                os.write(report, f"{error.errno or errno.EIO}\n".encode())
        finally:
            os._exit(code)

    @staticmethod
    def _change_user(user: User, report: int) -> None:
        try:
            user.become()
        except OSError as error:
            os.write(report, f"{-(error.errno or errno.EIO)}\n".encode())
            os._exit(NOT_EXECUTABLE)

    def _read_report(self) -> int:
        """Return the next errno of the new process: 0 if it is ready, negative if the user cannot be changed."""
        text = b""
        while not text.endswith(b"\n"):
            if not (more := os.read(self._report, 1)):
                return 0
            text += more
        return int(text)

    def release(self) -> None:
        """Let the command execute the program, unless a signal has ended it. NotRunnable; MissingRequirement."""
        assert self._gate is not None
        with contextlib.suppress(BrokenPipeError):
            os.write(self._gate, b"\n")
        self._close_gate()
        failed = self._read_report()
        os.close(self._report)
        if failed:
            self.wait()
            if failed < 0 and self.user is not None:
                hint = "this needs CAP_SETUID and CAP_SETGID; unset SUDO_USER to run the command as root"
                raise MissingRequirement(f"cannot become user '{self.user.name}': {os.strerror(-failed)}", hint)
            if failed == errno.ENOENT:  # the program itself was found
                hint = "the first line of a script (#!) names its interpreter; file(1) shows the loader of a program"
                raise NotRunnable(self.words[0], NOT_FOUND, "its interpreter or loader does not exist", hint)
            raise NotRunnable(self.words[0], NOT_EXECUTABLE, os.strerror(failed))

    def _close_gate(self) -> None:
        if self._gate is not None:
            os.close(self._gate)
            self._gate = None

    def has_ended(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = status
        return self.status is not None

    def wait(self) -> None:
        if self.status is None:
            _, self.status = os.waitpid(self.pid, 0)

    def cancel(self) -> None:
        self._close_gate()
        if not self.has_ended():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
                os.kill(self.pid, signal.SIGCONT)  # it may be stopped
            self.wait()

    @contextlib.contextmanager
    def forwarding(self) -> Iterator[None]:
        """Send signals for this process to the command. This process ends after the command."""
        before = {number: signal.signal(number, self._forward) for number in (*FORWARDED, *KEYS) if not _is_ignored(number)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        if self.status is None and not (number in KEYS and _has_terminal()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    @property
    def exit_code(self) -> int:
        assert self.status is not None
        return os.waitstatus_to_exitcode(self.status)

    def end_alike(self) -> int:
        """Return the exit code of the command, or end this process by the same signal."""
        return self.exit_code if self.exit_code >= 0 else _end_by_signal(-self.exit_code)


def _end_by_signal(number: int) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # SIGKILL
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    time.sleep(1.0)  # until the signal arrives
    return 128 + number


def _is_ignored(number: signal.Signals) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN


def _has_terminal() -> bool:
    """Return whether this process is in the foreground of a terminal, whose keys send signals to all its processes."""
    try:
        fd = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:  # the terminal is closed
        return False
    finally:
        os.close(fd)
