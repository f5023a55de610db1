"""Daemonise late: the parent waits until the mount serves, and everything that goes wrong before that is its own error.

The child reports over a pipe, one JSON line each: a note (a warning logged on the way, such as a reduced budget), an
error, or ready. Its stdout and stderr are the log from the start, so no helper it starts keeps the caller's pipes open.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import sys
import time
from typing import IO, Any

from llmcache.errors import EXIT_BUG, LlmcacheError, MountProblem, printable
from llmcache.fs.client import control
from llmcache.fs.daemon import logs
from llmcache.fs.daemon.daemon import Daemon, MountRequest, check_serves, rotation_of, tune_process

_START_TIMEOUT_S = 120.0
_LOG_BYTES = 1 << 20


class _Reported(LlmcacheError):
    """An error of the child, shown by the parent."""

    def __init__(self, message: str, hint: str | None, exit_code: int) -> None:
        super().__init__(message, hint)
        self.exit_code = exit_code


class _Reporter(logging.Handler):
    """Sends the child's events, and warnings logged before it is ready, to the parent."""

    def __init__(self, fd: int) -> None:
        super().__init__(logging.WARNING)
        self._pipe: IO[str] | None = os.fdopen(fd, "w", encoding="utf-8", errors="surrogateescape")

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a warning on as a note."""
        self.send(note=record.getMessage())

    def send(self, **event: Any) -> None:
        """One line to the parent, if it still waits."""
        self.acquire()  # another thread may come to the end
        try:
            if self._pipe is not None:
                self._pipe.write(json.dumps(event) + "\n")
                self._pipe.flush()
        except OSError:  # it was killed
            self._pipe = None
        finally:
            self.release()

    def finish(self) -> None:
        """Close the pipe: from now on warnings go to the log alone."""
        self.acquire()
        try:
            if self._pipe is not None:
                self._pipe.close()
        except OSError:  # the parent was killed
            pass
        finally:
            self._pipe = None
            self.release()


def serve_background(request: MountRequest, source: str, point: str) -> None:
    """Start a daemon; returns when its mount serves, raises what kept it from doing so."""
    control.make_directory()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os._exit(_child(request, source, point, writing))
    os.close(writing)
    with os.fdopen(reading, "r", encoding="utf-8", errors="surrogateescape") as events:
        try:
            _wait_ready(events, child, _log_path(request, point))
        except KeyboardInterrupt:  # no mount, then; the daemon has a session of its own
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)
            os.waitpid(child, 0)
            raise
    check_serves(point)


def _wait_ready(events: IO[str], child: int, log_path: str) -> None:
    end = time.monotonic() + _START_TIMEOUT_S
    while True:
        ready, _, _ = select.select([events], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            raise MountProblem(f"the daemon (pid {child}) does not serve after {_START_TIMEOUT_S:.0f} s", f"see {log_path}")
        line = events.readline()
        if not line:
            _, status = os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(status)
            raise MountProblem(f"the daemon ended with status {code} before it served", f"see {log_path}")
        event = json.loads(line)
        if "note" in event:
            print(f"llmcache: {printable(event['note'])}", file=sys.stderr)
        elif "error" in event:
            os.waitpid(child, 0)
            raise _Reported(event["error"], event["hint"], event["exit_code"])
        else:
            return


def _child(request: MountRequest, source: str, point: str, pipe: int) -> int:
    """Life of the daemon process; its exit code."""
    reporter = _Reporter(pipe)
    log_path = _log_path(request, point)
    try:
        os.setsid()
        begin = _redirect(log_path, shorten=request.log is None)
        handler = _log_to(request.log, log_path, reporter)
        tune_process()
        Daemon(request, source, point, rotation_of(handler)).run(lambda: _ready(reporter))
    except LlmcacheError as error:
        logging.getLogger().removeHandler(reporter)  # the error goes to the parent whole, not as a note
        logging.getLogger("llmcache").error("ends with exit code %d", error.exit_code)  # why is told to who made the mount
        said = _said(log_path, begin) if isinstance(error, MountProblem) else ""
        message = f"{error.message}{said}"
        reporter.send(error=message, hint=error.hint, exit_code=error.exit_code)
        return error.exit_code
    except BaseException as error:  # noqa: BLE001 - the outermost frame of the daemon: shown whole, in its log
        print(logs.without_text(error), file=sys.stderr, flush=True)
        reporter.send(error=f"{type(error).__name__}: {error}", hint=f"a bug; see {log_path}", exit_code=EXIT_BUG)
        return EXIT_BUG
    return 0


def _ready(reporter: _Reporter) -> None:
    reporter.send(ready=True)
    logging.getLogger().removeHandler(reporter)
    reporter.finish()


def _log_path(request: MountRequest, point: str) -> str:
    """The file that the daemon's stdout and stderr go to; its log as well, unless that is the journal."""
    return control.files(point).log if request.log in (None, logs.JOURNAL) else str(request.log)


def _redirect(log_path: str, *, shorten: bool) -> int:
    """Make the log this process' stdout and stderr; returns where it ends now."""
    try:
        fd = logs.open_own(log_path)
    except OSError as error:
        raise logs.problem(log_path, error) from error
    if shorten and os.fstat(fd).st_size > _LOG_BYTES:
        os.ftruncate(fd, 0)
    null = os.open(os.devnull, os.O_RDONLY)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(null, 0)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(null)
    os.close(fd)
    return os.fstat(1).st_size


def _log_to(target: str | None, path: str, reporter: _Reporter) -> logging.Handler:
    """Logs to the journal, or to the file at `path`: of the daemon's own, which is kept short, or the user's."""
    if target == logs.JOURNAL:
        handler: logging.Handler = logs.Journal()
    else:
        handler = logs.LogFile(path, _LOG_BYTES if target is None else 0, streams=True)
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    root.addHandler(handler)
    root.addHandler(reporter)
    logs.catch_all()
    return handler


def _said(log_path: str, begin: int) -> str:
    """What libfuse and fusermount3 wrote about a failed mount."""
    with open(log_path, encoding="utf-8", errors="replace") as file:
        file.seek(begin)
        lines = [line.strip() for line in file if line.startswith(("fuse", "mount"))]
    return ": " + "; ".join(lines) if lines else ""
