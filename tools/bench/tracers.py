"""The tracers that are compared: how each is attached to a process, and how to see that it is."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .errors import BenchError
from .sides import environment

ATTACH_S = 20.0
Attached = Callable[[int], bool]
"""Whether a process is being traced now, by the looks of it."""


@dataclass(frozen=True)
class Tracer:
    """`command` with PID and OUT in place of the process and of where the output goes; empty: none."""

    name: str
    command: Sequence[str] = ()
    said: str = ""  # what it says on stderr when it has begun
    attached: Attached | None = None
    env: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def on(self, pid: int, out: Path) -> Iterator[subprocess.Popen[str] | None]:
        """Trace `pid` during the with block; yields the tracer, which is asked to end after it."""
        if not self.command:
            yield None
            return
        words = [word.replace("PID", str(pid)).replace("OUT", str(out)) for word in self.command]
        log = out.with_suffix(".log")
        with log.open("w") as stderr:
            process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment() | self.env)
        try:
            self._wait(process, pid, log)
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()

    def _wait(self, process: subprocess.Popen[str], pid: int, log: Path) -> None:
        deadline = time.monotonic() + ATTACH_S
        while not (self.said in log.read_text() if self.attached is None else self.attached(pid)):
            if process.poll() is not None or time.monotonic() > deadline:
                raise BenchError(f"{self.name} does not attach: {log.read_text().strip()[-300:]}")
            time.sleep(0.01)


def llmcache(name: str, *options: str) -> Tracer:
    """Returns the recorder of this project with some options."""
    command = [sys.executable, "-m", "llmcache", "trace", "PID", "-o", "OUT.parquet", "--force", *options]
    return Tracer(name, command, said="recording")


def ptraced(pid: int) -> bool:
    """Whether a debugger has the process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in lines)


def tracers() -> list[Tracer]:
    """Returns what can be compared on this machine, the process without a tracer first."""
    found = [
        Tracer("none"),
        llmcache("llmcache"),
        llmcache("llmcache --no-writes", "--no-writes"),
        llmcache("llmcache --no-coalesce", "--no-coalesce"),
    ]
    if shutil.which("strace"):
        command = ["strace", "-f", "-q", "-ttt", "-e", "trace=desc", "-o", "OUT.strace", "-p", "PID"]
        found.append(Tracer("strace", command, attached=ptraced))
    if shutil.which("perf"):
        found.append(
            Tracer("perf trace", ["perf", "trace", "-e", "pread64", "-o", "OUT.perf", "-p", "PID"], attached=_slept())
        )
    if shutil.which("bpftrace"):
        program = 'tracepoint:syscalls:sys_enter_pread64 /pid == PID/ { printf("%d %d\\n", args->pos, args->count); }'
        found.append(Tracer("bpftrace", ["bpftrace", "-o", "OUT.bpftrace", "-e", program], said="Attaching"))
    return found


def _slept() -> Attached:
    """perf says nothing: it is given two seconds."""
    begun: dict[int, float] = {}

    def attached(pid: int) -> bool:
        return time.monotonic() - begun.setdefault(pid, time.monotonic()) > 2

    return attached
