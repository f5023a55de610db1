"""`--access-log`: passes rows and events to the child process that writes the trace (`logwriter.py`).

The daemon must not load the Parquet library. Appending never waits: entries that find the queue full are counted as lost.

Stream: frames of (kind u8, length u32) and a payload: ROWS (packed `ROW`s) or MESSAGE (JSON).
"""

from __future__ import annotations

import json
import logging
import os
import select
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmcache.errors import MissingRequirement, UsageError
from llmcache.files import is_below

log = logging.getLogger(__name__)

ROW = struct.Struct("<QIQIBBI")  # t_ns, file, first, count, op, miss, pid
FRAME = struct.Struct("<BI")
ROWS, MESSAGE = 0, 1
QUEUE_MAX = 1 << 15  # entries; about 3 MB
PAUSE_S = 0.1
BATCH_ROWS = 4096
START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 25.0  # applied twice, which is less than the timeout of `llmcache umount`


def check_path(path: str, point: str) -> str:
    """Return the absolute path of the log; UsageError if a mount on `point` cannot write it."""
    found = os.path.realpath(path)
    if not found.endswith(".parquet"):
        raise UsageError(
            f"--access-log: '{path}' does not end in .parquet",
            "the log is a Parquet trace: choose a name that ends in .parquet",
        )
    if os.path.exists(found):
        raise UsageError(f"--access-log: '{path}' already exists", "choose another name, or remove the file")
    if not os.path.isdir(os.path.dirname(found)):
        raise UsageError(f"--access-log: '{os.path.dirname(found)}' is not a directory", "create it first")
    if is_below(found, point):
        raise UsageError(f"--access-log: '{path}' is below the mount point", "choose a place outside the mount")
    return found


class AccessLog:
    """The daemon's end of one log. LlmcacheError: the file cannot be made."""

    def __init__(self, path: str, about: dict[str, Any]) -> None:
        self.path = path
        self.rows = 0
        self.lost = 0
        self._queue: deque[tuple[int, bytes]] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._broken = False
        self._lost_sent = 0
        self._child = start_writer(path)
        assert self._child.stdin is not None
        self._pipe = self._child.stdin
        self._message({"about": about})
        self._thread = threading.Thread(target=self._feed, name="access-log", daemon=True)
        self._thread.start()

    # These methods never wait: they are called with the engine's lock held.

    def row(self, file: int, first: int, count: int, op: int, miss: int, pid: int) -> None:
        if len(self._queue) >= QUEUE_MAX or self._broken:
            self.lost += 1
            return
        self.rows += 1
        self._queue.append((ROWS, ROW.pack(time.monotonic_ns(), file, first, count, op, miss, pid)))

    def event(self, event: Sequence[Any]) -> None:
        """Append an event that happened before the next row."""
        self._message({"event": list(event)})

    def file(self, number: int, path: str, dev: int, inode: int, generation: int, size_bytes: int) -> None:
        names = ("id", "path", "dev", "inode", "generation", "size_bytes")
        self._message({"file": dict(zip(names, (number, path, dev, inode, generation, size_bytes), strict=True))})

    def _message(self, message: dict[str, Any]) -> None:
        if len(self._queue) >= 2 * QUEUE_MAX or self._broken:  # messages, which are few, have the other half
            self.lost += 1
            return
        self._queue.append((MESSAGE, json.dumps(message).encode()))

    # The feeding thread

    def _feed(self) -> None:
        try:
            while not (self._closing and not self._queue):
                if not self._queue:
                    self._wake.wait(PAUSE_S)
                self._feed_batch()
        except OSError as error:
            self._broken = True
            self.lost += len(self._queue)
            self._queue.clear()
            log.error("cannot continue the access log: %s", error.strerror)

    def _feed_batch(self) -> None:
        if self.lost != self._lost_sent:
            self._lost_sent = self.lost
            self._send(MESSAGE, json.dumps({"lost_rows": self._lost_sent}).encode())
        rows: list[bytes] = []
        while self._queue and len(rows) < BATCH_ROWS:
            kind, payload = self._queue[0]
            if kind == MESSAGE and rows:
                break  # keep the order: send the rows before it first
            self._queue.popleft()
            if kind == MESSAGE:
                self._send(kind, payload)
            else:
                rows.append(payload)
        if rows:
            try:
                self._send(ROWS, b"".join(rows))
            except OSError:
                self.lost += len(rows)
                raise

    def _send(self, kind: int, payload: bytes) -> None:
        self._pipe.write(FRAME.pack(kind, len(payload)) + payload)
        self._pipe.flush()

    def close(self, keep: bool = True) -> None:
        """Wait until the child has completed the file, or, without `keep`, removed it."""
        self._message({"end": "keep" if keep else "discard"})
        self._closing = True
        self._wake.set()
        self._thread.join(END_TIMEOUT_S)
        try:
            if not self._thread.is_alive():
                self._pipe.close()
            status = self._child.wait(END_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            self._child.kill()
            status = self._child.wait()
            log.error("the access log is incomplete: %s", type(error).__name__)
        if status != 0:
            log.error("the access log is incomplete: its writer ended with status %d", status)


def start_writer(path: str) -> subprocess.Popen[bytes]:
    """Start the child and wait until it is ready."""
    # The child must import this very package, even if it is not installed.
    places = [str(Path(__file__).resolve().parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    child = subprocess.Popen(
        [sys.executable, "-m", "llmcache.mount.daemon.logwriter", path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd="/",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        start_new_session=True,  # only the daemon receives Ctrl-C, and then closes the log
    )
    assert child.stdout is not None
    ready, _, _ = select.select([child.stdout], [], [], START_TIMEOUT_S)
    line = child.stdout.readline() if ready else b""
    reply: dict[str, Any] = {"error": f"--access-log: the process that writes '{path}' did not start", "hint": None}
    if line:
        reply = json.loads(line)
    if "error" in reply:
        child.kill()
        child.wait()
        kind = UsageError if reply.get("exit_code") == UsageError.exit_code else MissingRequirement
        raise kind(reply["error"], reply["hint"])
    return child
