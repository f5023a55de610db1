"""System calls of running processes through strace, the tool of the paper: slow, but it needs no privilege."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from llmcache.arrays import Records
from llmcache.errors import EnvironmentProblem
from llmcache.trace.formats.strace import Calls, LoggedFile, StraceLog
from llmcache.trace.record import MAP, UNKNOWN, WRITE
from llmcache.trace.sources.base import ACCESS, RECORD
from llmcache.units import BLOCK_BYTES

ATTACH_S = 60.0  # of one that neither attaches nor says why not: only a machine that stands still
_PIPE_BYTES = 1 << 20
_GONE = (0, 0)


def installed() -> bool:
    """Whether there is a strace."""
    return shutil.which("strace") is not None


class Strace:
    """Follows `targets` with strace; `drain` gives what they read (and with `writes` wrote) by call."""

    def __init__(self, targets: Sequence[int], follow: bool, writes: bool) -> None:
        """Returns when strace has them; EnvironmentProblem if it may not, or another debugger has them."""
        self.lost = 0
        self._only = None if follow else set(targets)
        self._writes = writes
        self._rows: list[tuple[int, ...]] = []
        self._keys: dict[int, tuple[int, int]] = {}
        self.paths: dict[tuple[int, int], str] = {}
        self._rest = b""
        self._log, self._calls = StraceLog(), Calls(self._note)
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        with tempfile.TemporaryDirectory(prefix="llmcache-") as directory:
            fifo = Path(directory) / "log"
            os.mkfifo(fifo, 0o600)
            self._pipe = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            # Threads that it does not know are attributed to processes only with -f, which threads need anyway.
            attach = [word for pid in targets for word in ("-p", str(pid))]
            self._process = subprocess.Popen(
                ["strace", "-f", "-q", "-ttt", "-y", "-s", "0", "-e", "trace=desc,process", "-o", str(fifo), *attach],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the recorder, which ends strace
            )
            try:
                self._wait(targets)
            except BaseException:
                self.stop()
                os.close(self._pipe)
                raise

    def _wait(self, targets: Sequence[int]) -> None:
        deadline = time.monotonic() + ATTACH_S
        while any(_tracer(pid) != self._process.pid for pid in targets):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                said = self._process.communicate()[1].decode(errors="replace").strip()
                reason = said.splitlines()[0] if said else "it does not attach"
                raise EnvironmentProblem(f"strace: {reason}", "only your own processes without root, and no other debugger")
            time.sleep(0.005)

    @property
    def guessed(self) -> int:
        """Accesses whose offset was not told: of files that were open before, read where the process was."""
        return self._calls.guessed

    def drain(self) -> Records:
        """What was logged since the last call, in the order of the log."""
        self._read_log()
        rows, self._rows = self._rows, []
        records = np.zeros(len(rows), RECORD)
        for name, column in zip(
            ("t_ns", "first", "count", "pid", "op", "dev", "inode"), zip(*rows, strict=True), strict=bool(rows)
        ):
            records[name] = column
        records["aux"], records["miss"], records["kind"] = 1, UNKNOWN, ACCESS
        return records

    def _lines(self) -> Iterator[str]:
        while True:
            try:
                data = os.read(self._pipe, _PIPE_BYTES)
            except BlockingIOError:
                return
            if not data:
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            yield from (os.fsdecode(line) for line in lines)

    def _note(self, t_ns: int, file: LoggedFile, offset: int, length: int, op: int, pid: int) -> None:
        # What was touched of a mapping is told by page faults.
        if op == MAP or (op == WRITE and not self._writes) or (self._only is not None and pid not in self._only):
            return
        dev, inode = self._key(file)
        if (dev, inode) == _GONE:
            self.lost += 1
            return
        first = offset // BLOCK_BYTES
        count = (offset + length - 1) // BLOCK_BYTES - first + 1
        self._rows.append((max(0, t_ns - self._offset_ns), first, count, pid, op, dev, inode))

    def _key(self, file: LoggedFile) -> tuple[int, int]:
        """Device and inode of a file that strace knows by its path; `_GONE` if there is none by that name any more."""
        if file.number not in self._keys:
            try:
                stat = os.stat(file.path)
                self._keys[file.number] = (stat.st_dev, stat.st_ino)
                self.paths[stat.st_dev, stat.st_ino] = file.path
            except OSError:
                self._keys[file.number] = _GONE
        return self._keys[file.number]

    def stop(self) -> None:
        """End strace, which lets the processes go on; what it has logged can still be drained."""
        if self._process.poll() is None:
            self._process.terminate()
            # It may wait for room in the pipe.
            while self._process.poll() is None:
                self._read_log()
                time.sleep(0.002)
        if self._process.stderr is not None:
            self._process.stderr.close()

    def _read_log(self) -> None:
        for event in self._log.events(self._lines()):
            self._calls.take(event)

    def close(self) -> None:
        """Give the pipe back."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1


def _tracer(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/status") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("TracerPid:"))
    except (OSError, StopIteration):
        return 0
