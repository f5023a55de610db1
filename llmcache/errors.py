"""The errors that a user can cause or fix, and their exit codes: `EXIT_CODES`."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TextIO

EXIT_OK = 0
EXIT_BUG = 1
EXIT_INTERRUPTED = 130
# code: (a word for help, a sentence for manuals)
EXIT_CODES: dict[int, tuple[str, str]] = {
    EXIT_OK: ("success (also Ctrl-C)", "success, also after Ctrl-C, or when the reader of the output has closed it"),
    EXIT_BUG: ("bug", "a bug in llmcache: it prints a traceback; please report it"),
    2: ("usage", "the command line or a setting is wrong"),
    3: ("environment", "this machine lacks something: a package, a device, a privilege or memory"),
    4: ("mount", "a mount cannot be made, reached or unmounted"),
    5: ("bad data", "a file is damaged or has the wrong format"),
}


def exit_codes(interrupted: int) -> dict[int, tuple[str, str]]:
    """Return the exit codes of a command that exits with `interrupted` after Ctrl-C."""
    if interrupted == EXIT_OK:
        return EXIT_CODES
    success = "success, also when the reader of the output has closed it"
    return {**EXIT_CODES, EXIT_OK: ("success", success), interrupted: ("Ctrl-C", "Ctrl-C ended the command")}


class LlmcacheError(Exception):
    """A problem outside of the program; `hint` says how to fix it."""

    exit_code: int = 3

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint:
            self.__notes__ = [f"hint: {hint}"]  # as add_note() does, so that tracebacks show the hint but str() does not


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def with_hints(hook: Hook) -> Hook:
    """Return an excepthook that also prints the hint of an LlmcacheError."""

    def shown(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        hook(kind, error, trace)
        if isinstance(error, LlmcacheError) and error.hint:
            with droppable(sys.stderr):
                print(f"hint: {printable(error.hint)}", file=sys.stderr)

    return shown


if sys.version_info < (3, 11):  # its tracebacks do not show notes
    sys.excepthook = with_hints(sys.excepthook)


class UsageError(LlmcacheError):
    """The command line or a setting is wrong (exit code 2)."""

    exit_code = 2


class MissingRequirement(LlmcacheError):
    """The machine lacks a package, a device, a privilege or memory (exit code 3)."""

    exit_code = 3


EnvironmentProblem = MissingRequirement  # the name in versions before 1.1


class MountProblem(LlmcacheError):
    """A mount cannot be made, reached or unmounted (exit code 4)."""

    exit_code = 4


class DataError(LlmcacheError):
    """A file is damaged or has the wrong format (exit code 5)."""

    exit_code = 5


def printable(text: str) -> str:
    r"""Return `text` with control and invalid characters as `\x1b`."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1].replace("udc", "x") for char in str(text))


def report(error: LlmcacheError) -> None:
    """Print `error` and its hint on stderr, one line each."""
    with droppable(sys.stderr):
        print(wrapped(f"llmcache: error: {printable(error.message)}", sys.stderr), file=sys.stderr)
        if error.hint:
            print(f"hint: {printable(error.hint)}", file=sys.stderr)


def say(text: str) -> None:
    """Print a line on stderr with the prefix of llmcache."""
    with droppable(sys.stderr):
        print(wrapped(f"llmcache: {printable(text)}", sys.stderr), file=sys.stderr, flush=True)


def wrapped(text: str, stream: TextIO) -> str:
    """Return `text`, wrapped if `stream` is a terminal. Hints are not wrapped, because users copy their commands."""
    if not stream.isatty():
        return text
    return "\n".join(broken(text, os.get_terminal_size(stream.fileno()).columns or 80))


def broken(text: str, width: int, indent: int = 2) -> list[str]:
    """Break lines at spaces, but not between a number and its unit; longer words stay whole."""
    import re  # here: most runs print nothing to a terminal
    import textwrap

    text = re.sub(r"(?<=\d) (?=[^\W\d_]{1,4}\b|%)", "\0", text)
    lines = textwrap.wrap(text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


@contextlib.contextmanager
def droppable(stream: TextIO) -> Iterator[None]:
    """Drop the output to `stream`, now and later, if a write in the with block fails (closed pipe, full disk)."""
    try:
        yield
    except OSError:
        drop_output(stream)


def drop_output(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, so that the flush of its buffer at exit does not fail."""
    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(null, stream.fileno())
    os.close(null)


def is_interrupt(error: BaseException) -> bool:
    """Return whether Ctrl-C caused `error`; compiled code may wrap the KeyboardInterrupt in SystemErrors."""
    while isinstance(error, SystemError) and error.__cause__ is not None:
        error = error.__cause__
    return isinstance(error, KeyboardInterrupt)


def run_cli(command: Callable[[], int]) -> int:
    """Run `command`; return its exit code or that of its error. Any unexpected error is a bug (1)."""
    try:
        return command()
    except LlmcacheError as error:
        report(error)
        return error.exit_code
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the outermost frame: any other error is a bug
        if is_interrupt(error):
            return EXIT_INTERRUPTED
        traceback.print_exc()
        return EXIT_BUG
