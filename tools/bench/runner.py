"""The programs that are measured (`clients/`), and the files they read: started in a cgroup, their events collected with the
storage bytes of each step; or recorded by `llmcache trace`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from llmcache.cache.loops import RECENT
from llmcache.cgroup import Cgroup
from llmcache.errors import EnvironmentProblem
from llmcache.fs.layout.modelfile import model_bytes

from .clients.loop_reader import crcs
from .sides import environment

CLIENTS = Path(__file__).resolve().parent / "clients"
MIB = 1 << 20
# What a client needs beside its own memory and the share of the loop: pages of programs and libraries, page tables.
ROOM_BYTES = 16 << 20


def forget(path: Path) -> None:
    """Drop the pages of one file from the page cache, or those of every file in a directory."""
    for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fdatasync(fd)  # dirty pages would stay
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def loop_file(path: Path, size_bytes: int) -> Path:
    """Make (or keep, if it has the size already) a file of random bytes."""
    if path.exists() and path.stat().st_size == size_bytes:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for offset in range(0, size_bytes, MIB):
            file.write(os.urandom(min(MIB, size_bytes - offset)))
        file.flush()
        os.fsync(file.fileno())
    return path


def crc_file(path: Path, scratch: Path) -> Path:
    """Write the CRCs of `path` as the JSON list that the loop reader's --check wants."""
    target = scratch / f"{path.name}.crc.json"
    target.write_text(json.dumps(crcs(path)))
    return target


def loop_bytes(model: Path) -> int:
    """Return what one token reads of a model: all tensors but the embedding, of which it needs one row; experts whole."""
    return model_bytes(str(model)).loop_bytes


@dataclass
class ClientStep:
    """One token or one pass: time of the client, and what the whole group read from the disk meanwhile."""

    seconds: float
    storage_bytes: int
    crc: int | None = None


@dataclass
class ClientRun:
    """Everything one client said."""

    steps: list[ClientStep] = field(default_factory=list)
    anon_bytes: int = 0
    wrong: int = 0
    hung: bool = False
    exit_code: int = 0
    error: str = ""

    @property
    def ok(self) -> bool:
        """Return whether it ended by itself, without an error and without a wrong byte."""
        return not self.hung and self.exit_code == 0 and self.wrong == 0

    def measured(self, warmup: int) -> list[ClientStep]:
        """Return the steps after the warm-up; all of them if there are no more than that."""
        return self.steps[warmup:] or self.steps

    def undisturbed_s(self) -> float:
        """Return the median of the faster half of the steps after the first: the client's own time, without bursts."""
        steps = sorted(step.seconds for step in self.measured(1))
        return statistics.median(steps[: (len(steps) + 1) // 2]) if steps else float("inf")


def client(name: str, *arguments: object) -> list[str]:
    """Return the command line of a client script."""
    return [sys.executable, str(CLIENTS / f"{name}.py"), *(str(a) for a in arguments)]


def run_clients(
    group: Cgroup, commands: Sequence[Sequence[str]], timeout_s: float, stepped: Callable[[int], None] = lambda _done: None
) -> list[ClientRun]:
    """Run the clients at the same time in `group`; one that is not done after `timeout_s` is killed and marked hung.

    `stepped` is told how many steps the first of them has done, after each.
    """
    running = [_ClientProcess(group, command, stepped if at == 0 else None) for at, command in enumerate(commands)]
    try:
        deadline = time.monotonic() + timeout_s
        for item in running:
            item.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for item in running:
            item.process.kill()
    return [item.finish() for item in running]


def run_client(group: Cgroup, command: Sequence[str], timeout_s: float) -> ClientRun:
    """Run one client in `group`; raises EnvironmentProblem if it fails for another reason than a hang or wrong bytes."""
    run = run_clients(group, [command], timeout_s)[0]
    if not run.steps and not run.hung:
        raise EnvironmentProblem(f"{Path(command[1]).name} failed ({run.exit_code}): {run.error[-600:]}")
    return run


class _ClientProcess:
    """A started client; a thread reads its lines as they come."""

    def __init__(self, group: Cgroup, command: Sequence[str], stepped: Callable[[int], None] | None) -> None:
        self.group, self.run, self.stepped = group, ClientRun(), stepped
        self.process = subprocess.Popen(
            group.wrap(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            start_new_session=True,  # Ctrl-C is for the benchmark, which ends its clients itself
        )
        self.threads = [threading.Thread(target=work, daemon=True) for work in (self._read_events, self._read_errors)]
        for thread in self.threads:
            thread.start()

    def _read_events(self) -> None:
        assert self.process.stdout is not None
        last = self.group.read_bytes()
        for line in self.process.stdout:
            now, event = self.group.read_bytes(), json.loads(line)
            if event["event"] == "step":
                self.run.steps.append(ClientStep(event["seconds"], now - last, event.get("crc")))
                if self.stepped is not None:
                    self.stepped(len(self.run.steps))
            elif event["event"] == "end":
                self.run.anon_bytes, self.run.wrong = event["anon_bytes"], event["wrong"]
            last = now

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.run.error = self.process.stderr.read()

    def wait(self, timeout_s: float) -> None:
        """Wait; running out of time marks the run as hung."""
        try:
            self.run.exit_code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.run.hung = True

    def finish(self) -> ClientRun:
        """Return the run, after the reading threads have seen the end; a reader stuck in a dead mount never comes to its."""
        self.wait(10)
        for thread in self.threads:
            thread.join(10)
        return self.run


@dataclass(frozen=True)
class Recording:
    """A trace, when each step of the client began (seconds), and what the recorder said."""

    trace: Path
    starts: tuple[float, ...]
    said: str

    @property
    def step_s(self) -> float:
        """The median time from a step (token, pass) to the next, of the last as many as `classify` takes a period from."""
        return statistics.median([after - before for before, after in pairwise(self.starts[-RECENT - 1 :])])


def cap_bytes(file: Path, command: Sequence[str], kept_bytes: int) -> int:
    """Run the client once, uncapped, and returns the memory in which it can keep `kept_bytes` of `file` cached."""
    with Cgroup("uncapped", directory=file) as group:
        run = run_client(group, command, timeout_s=120)
    return run.anon_bytes + ROOM_BYTES + kept_bytes


def record(file: Path, command: Sequence[str], out: Path, memory_bytes: int | None, tier: str = "auto") -> Recording:
    """Record what `command` reads of `file`, which starts out of the page cache; EnvironmentProblem if that fails."""
    forget(file)
    with Cgroup("trace", directory=file, memory_bytes=memory_bytes) as group:
        words = ["trace", "-o", str(out), "--force", "--no-writes", "--path", file.name, "--tier", tier, "--"]
        result = subprocess.run(
            [sys.executable, "-m", "llmcache", *words, *group.wrap(command)],
            capture_output=True, text=True, timeout=300, check=False, env=environment(),
        )  # fmt: skip
    if result.returncode != 0:
        error, _, hint = result.stderr.strip().rpartition("llmcache: error: ")[2].partition("\nhint: ")
        raise EnvironmentProblem(f"llmcache trace: {error or result.returncode}", hint or None)
    events = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    starts = tuple(event["start"] for event in events if event["event"] == "step")
    if not starts:
        raise EnvironmentProblem(f"{Path(command[1]).name} failed: {result.stderr.strip()[-600:]}")
    return Recording(out, starts, result.stderr)
