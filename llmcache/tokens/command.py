"""`llmcache tokens`: processes, lines while they run, and the summary."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from llmcache.errors import EXIT_OK, UsageError, droppable, printable, say
from llmcache.files import Output, writing
from llmcache.mount.client import control, mountpoint
from llmcache.procfs import RunningProcesses
from llmcache.run.child import Child, resolve, user_of
from llmcache.run.models import check_process
from llmcache.tokens.models import Find, ProcessTree
from llmcache.tokens.render import HEADING, INTERVAL_HEADING, interval_line, summary_lines, token_line
from llmcache.tokens.summary import Interval, Token, TokenSummary
from llmcache.tokens.watch import TokenWatch

LINES_PER_HEADING = 40
_EXAMPLE = "llmcache tokens PID, llmcache tokens MOUNT, or llmcache tokens -- COMMAND"


@dataclass(frozen=True)
class Settings:
    """The options of `llmcache tokens`."""

    seconds: float | None = None
    output: str | None = None
    force: bool = False
    as_json: bool = False

    def __post_init__(self) -> None:
        if self.seconds is not None and self.seconds <= 0:
            raise UsageError("-d: the duration must be more than 0", "omit -d to observe until the process ends")


def observe(words: Sequence[str], settings: Settings) -> int:
    """Print the tokens of what `words` name; return the exit code. LlmcacheError."""
    if not words or list(words) == ["--"]:
        raise UsageError("PID: no process, mount or command is given", _EXAMPLE)
    if words[0] == "--":
        return _observe_command(words[1:], settings)
    if len(words) > 1:
        raise UsageError(f"PID: give one process or mount, not '{words[0]}' and '{words[1]}'", _EXAMPLE)
    is_mount = not words[0].isdecimal()
    find = _clients_of(words[0]) if is_mount else ProcessTree(_checked(words[0]))
    with _Lines(settings, sys.stdout) as lines:
        watch = lines.watch(find, is_lasting=is_mount)
        watch.start()
        try:
            watch.wait(settings.seconds)
        finally:  # also after Ctrl-C or SIGTERM
            lines.close(watch.stop())
    return EXIT_OK


def _observe_command(command: Sequence[str], settings: Settings) -> int:
    environment = dict(os.environ)
    user = user_of(None, environment)
    program = resolve(command[0], environment.get("PATH"))
    if user is not None:
        environment = user.environment(environment)
    with _Lines(settings, sys.stderr) as lines, contextlib.ExitStack() as stack:
        child = Child(command, program, environment, user=user)
        stack.callback(child.cancel)
        watch = lines.watch(ProcessTree(child.pid))
        watch.start()
        stack.callback(watch.stop)
        with child.forwarding():
            child.release()
            with RunningProcesses([child.pid]) as running:
                running.wait(settings.seconds)
            try:
                lines.close(watch.stop())
            finally:  # also if the observation has failed
                child.wait()
    return child.end_alike()


def _checked(word: str) -> int:
    check_process("PID", int(word[:10]))
    return int(word)


def _clients_of(path: str) -> Find:
    point = mountpoint.resolve(path)
    mount = mountpoint.find(point)
    if mount is None:
        if not os.path.isdir(point):
            raise UsageError(f"PID: '{path}' is neither the number of a process nor a mount point", _EXAMPLE)
        raise mountpoint.not_mounted(path, f"mount it first, or use {_EXAMPLE}")
    mountpoint.ask(path, {"op": "stats"})
    source = control.files(point, mount.owner).describe().get("source") if mount.fstype == mountpoint.IN_PLACE else None
    directories = {point, *([source] if isinstance(source, str) else [])}

    def find() -> set[int]:
        daemon = control.daemon_pid(point, mount.owner)
        own = {os.getpid(), *([] if daemon is None else ProcessTree(daemon)())}
        return {pid for directory in directories for pid, _ in mountpoint.users_of(directory)} - own

    return find


class _Lines:
    """Prints tokens as text or as JSON, to `stream` or to the file of the settings."""

    def __init__(self, settings: Settings, stream: TextIO) -> None:
        self._as_json = settings.as_json
        self._stream = sys.stdout if settings.as_json and settings.output is None else stream
        if settings.output is not None:
            path = Output(settings.output, settings.force, "-o").path  # refuses what exists
            with writing(path):
                self._stream = path.open("w", encoding="utf-8")
        self._is_file = settings.output is not None
        self._printed = 0
        self._watch: TokenWatch | None = None

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_file:
            self._stream.close()

    def watch(self, find: Find, *, is_lasting: bool = False) -> TokenWatch:
        """Return a watch that prints here, and ends when nothing reads the lines any more."""
        self._watch = TokenWatch(find, on_token=self._token, on_interval=self._interval, on_note=say, is_lasting=is_lasting)
        return self._watch

    def close(self, summary: TokenSummary) -> None:
        if self._as_json:
            self._print(json.dumps(summary.document()))
        else:
            self._print("")
            for line in map(printable, summary_lines(summary)):
                self._print(f"llmcache: {line}" if self._stream is sys.stderr else line)

    def _token(self, token: Token) -> None:
        self._line(json.dumps(token.document()) if self._as_json else token_line(token), HEADING)

    def _interval(self, interval: Interval) -> None:
        self._line(json.dumps(interval.document()) if self._as_json else interval_line(interval), INTERVAL_HEADING)

    def _line(self, text: str, heading: str) -> None:
        if not self._as_json and self._printed % LINES_PER_HEADING == 0:
            self._print(heading)
        self._printed += 1
        self._print(text)

    def _print(self, text: str) -> None:
        try:
            with droppable(sys.stderr) if self._stream is sys.stderr else contextlib.nullcontext():
                print(text, file=self._stream, flush=True)
        except BrokenPipeError:
            if self._watch is not None:
                self._watch.cancel()
