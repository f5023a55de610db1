"""The process that writes an access log: it reads the frames of `accesslog` from stdin and writes a Parquet trace.

Run as `python -m llmcache.mount.daemon.logwriter PATH`. It prints {"ready": true} or {"error": …} as one line on stdout. At
the end of stdin, it completes the file. If storage runs out, it removes the file.

Provenance: `extra["mount"]` names this scheme. `extra["events"]` has [row, event] pairs: the event happened before that row.
`llmcache.cache.steering` lists the events; "file" [id, space, member] maps a file to a loop space and its number in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from llmcache.errors import LlmcacheError, report
from llmcache.mount.daemon.accesslog import FRAME, ROWS
from llmcache.procfs import status_of
from llmcache.trace.record import COLUMNS, Provenance, TraceFile, TraceWriter

SCHEME = "llmcache.mount/2"
DTYPE = np.dtype([(name, dtype.newbyteorder("<")) for name, dtype in COLUMNS.items()])  # as accesslog.ROW
EVENTS_MAX = 1 << 20
THREADS_MAX = 4096  # size of the cache of thread ids, which the kernel reuses
NICE = 10


class LogWriter:
    """Writer of one log."""

    def __init__(self, path: str) -> None:
        self._writer = TraceWriter(path, provenance=Provenance(tier="mount"))
        self._events: list[tuple[int, list[Any]]] = []
        self._about: dict[str, Any] = {}
        self._lost = 0
        self._end = ""
        self._process_of: dict[int, int] = {}

    def take(self, kind: int, payload: bytes) -> None:
        if kind == ROWS:
            rows = np.frombuffer(payload, DTYPE)
            columns = {name: np.ascontiguousarray(rows[name]) for name in COLUMNS}
            self._writer.append({**columns, "pid": self._processes(columns["pid"])})
            return
        message: dict[str, Any] = json.loads(payload)
        if "event" in message:
            if len(self._events) < EVENTS_MAX:
                self._events.append((self._writer.rows, message["event"]))
            else:
                self._lost += 1
        elif "file" in message:
            self._writer.add_file(TraceFile(**message["file"]))
        else:
            self._lost = message.get("lost_rows", self._lost)
            self._end = message.get("end", self._end)
            self._about = message.get("about", self._about)

    def _processes(self, threads: NDArray[np.uint32]) -> NDArray[np.uint32]:
        ids, index = np.unique(threads, return_inverse=True)
        if len(self._process_of) > THREADS_MAX:
            self._process_of.clear()
        for thread in ids.tolist():
            if thread not in self._process_of:
                self._process_of[thread] = process_of(thread)
        return np.array([self._process_of[thread] for thread in ids.tolist()], np.uint32)[index]

    def finish(self) -> None:
        """Complete the file, or remove it if the daemon has discarded the log."""
        if self._end == "discard":
            self.discard()
            return
        notes = [str(self._about.get("note", ""))]
        if not self._end:
            notes.append("the daemon was killed: the last rows may be missing")
        extra = {name: str(value) for name, value in self._about.get("extra", {}).items()}
        extra |= {"mount": SCHEME, "rows": str(self._writer.rows), "events": json.dumps(self._events, separators=(",", ":"))}
        self._writer.provenance = Provenance(
            tier="mount",
            clock="monotonic",
            kernel=os.uname().release,
            lost_events=self._lost,
            command=str(self._about.get("command", "")),
            note="; ".join(filter(None, notes)),
            extra=extra,
        )
        self._writer.close()

    def discard(self) -> None:
        self._writer.discard()


def process_of(thread: int) -> int:
    """Return the process of a thread; `thread` itself if it has ended."""
    try:
        return int(status_of(thread)["Tgid"])
    except OSError:
        return thread


def frames(stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield (kind, payload); ignore an incomplete last frame."""
    while len(head := stream.read(FRAME.size)) == FRAME.size:
        kind, length = FRAME.unpack(head)
        payload = stream.read(length)
        if len(payload) < length:
            return
        yield kind, payload


def main() -> int:
    """Write until stdin closes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.umask(0o077)  # the log contains file names
    with contextlib.suppress(OSError):  # the process has inherited the daemon's priority and does not need it
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
    try:
        writer = LogWriter(sys.argv[1])
    except LlmcacheError as error:
        reply = {"error": f"--access-log: {error.message}", "hint": error.hint, "exit_code": error.exit_code}
        print(json.dumps(reply), flush=True)
        return error.exit_code
    try:
        os.write(sys.stdout.fileno(), b'{"ready": true}\n')
        for kind, payload in frames(sys.stdin.buffer):
            writer.take(kind, payload)
        writer.finish()
    except LlmcacheError as error:  # a full disk: a Parquet file without its end cannot be read
        writer.discard()
        report(error)  # stderr is the daemon's log
        return error.exit_code
    except BrokenPipeError:  # the daemon was killed before it served
        writer.discard()
    return 0


if __name__ == "__main__":
    sys.exit(main())
