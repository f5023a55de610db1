"""Runs the measured programs (`clients/`) in a cgroup and records the bytes that each step reads from storage.

Also creates the files that they read, and records programs with `llmcache trace`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from llmcache.cache.loops import RECENT
from llmcache.cgroup import Cgroup
from llmcache.errors import MissingRequirement
from llmcache.model.modelfile import model_bytes

from .clients.loop_reader import crcs
from .sides import Mounted, OpenedSide, Plain, environment

CLIENTS = Path(__file__).resolve().parent / "clients"
MIB = 1 << 20
# Page tables, and pages of programs and libraries: memory that a client needs besides its private memory and the loop.
ROOM_BYTES = 16 << 20


def forget(path: Path) -> None:
    """Drop the pages of a file, or of every file in a directory, from the page cache."""
    for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fdatasync(fd)  # dirty pages are not dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def loop_file(path: Path, size_bytes: int) -> Path:
    """Create a file of random bytes, unless a file of that size exists; return its path."""
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
    """Write the CRCs of `path` for --check of the loop reader; return the path of the JSON list."""
    target = scratch / f"{path.name}.crc.json"
    target.write_text(json.dumps(crcs(path)))
    return target


def loop_bytes(model: Path) -> int:
    """Return the bytes of the tensors that tokens read: all except the embedding; experts count in full."""
    return model_bytes(str(model)).loop_bytes


@dataclass
class ClientStep:
    """One token or pass: its duration, and the bytes that the cgroup read from storage during it."""

    seconds: float
    storage_bytes: int
    crc: int | None = None


@dataclass
class ClientRun:
    """The events and the outcome of one client."""

    steps: list[ClientStep] = field(default_factory=list)
    anon_bytes: int = 0
    wrong: int = 0
    hung: bool = False
    exit_code: int = 0
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.hung and self.exit_code == 0 and self.wrong == 0

    def measured(self, warmup: int) -> list[ClientStep]:
        """Return the steps after the warm-up; all steps if there are no more than `warmup`."""
        return self.steps[warmup:] or self.steps

    def undisturbed_s(self) -> float:
        """Return the median of the faster half of the steps after the first, which excludes disturbances by other load."""
        steps = sorted(step.seconds for step in self.measured(1))
        return statistics.median(steps[: (len(steps) + 1) // 2]) if steps else float("inf")


def problems_of(clients: Sequence[ClientRun], oom_kills: int) -> list[str]:
    found = []
    for one in clients:
        found += ["hung"] if one.hung else []
        found += [f"{one.wrong} MiB wrong"] if one.wrong else []
        if one.exit_code and not one.hung:
            found.append(f"exit {one.exit_code}: {one.error.strip()[-200:]}")
    return found + ([f"{oom_kills} OOM kills"] if oom_kills else [])


def client(name: str, *arguments: object) -> list[str]:
    return [sys.executable, str(CLIENTS / f"{name}.py"), *(str(a) for a in arguments)]


@contextmanager
def ready(
    side: Plain | Mounted, file: Path, scratch: Path, cache_bytes: int | None, memory_bytes: int | None = None,
    read_bps: int | None = None,
) -> Iterator[tuple[Cgroup, OpenedSide]]:  # fmt: skip
    """Yield a cgroup with these limits and a side opened in it, with nothing of `file` (or a directory) cached."""
    source = file if file.is_dir() else file.parent
    with (
        Cgroup(side.name, directory=file, memory_bytes=memory_bytes, read_bps=read_bps) as group,
        side.open(group, source, cache_bytes, scratch) as opened,
    ):
        # Drop the file only now. The host of a virtual machine reclaims free memory within seconds, and a client that
        # fills it again waits for the host. A side that is mounted first would pay for that second.
        forget(file)
        yield group, opened


def run_clients(
    group: Cgroup, commands: Sequence[Sequence[str]], timeout_s: float, stepped: Callable[[int], None] = lambda _done: None
) -> list[ClientRun]:
    """Run the clients at the same time in `group`; kill those that are not done after `timeout_s` and mark them as hung.

    `stepped` is called after each step of the first client, with the number of its steps.
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
    """Run one client in `group`; MissingRequirement if it exits before its first step."""
    run = run_clients(group, [command], timeout_s)[0]
    if not run.steps and not run.hung:
        raise MissingRequirement(f"{Path(command[1]).name} failed ({run.exit_code}): {run.error[-600:]}")
    return run


class _ClientProcess:
    """A started client; threads read its output."""

    def __init__(self, group: Cgroup, command: Sequence[str], stepped: Callable[[int], None] | None) -> None:
        self.group, self.run, self.stepped = group, ClientRun(), stepped
        self.process = subprocess.Popen(
            group.wrap(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            start_new_session=True,  # Ctrl-C reaches only the benchmark, which ends its clients
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
        try:
            self.run.exit_code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.run.hung = True

    def finish(self) -> ClientRun:
        """Return the run once the threads have read all output; a client stuck in a dead mount may never close it."""
        self.wait(10)
        for thread in self.threads:
            thread.join(10)
        return self.run


@dataclass(frozen=True)
class Recording:
    """A trace, the times at which the client's steps began (seconds), and the recorder's messages."""

    trace: Path
    starts: tuple[float, ...]
    said: str

    @property
    def step_s(self) -> float:
        """The median time from one step to the next, over as many of the last steps as `classify` uses for its period."""
        return statistics.median([after - before for before, after in pairwise(self.starts[-RECENT - 1 :])])


def cap_bytes(file: Path, command: Sequence[str], kept_bytes: int) -> int:
    """Run the client once without a limit; return the memory limit that leaves `kept_bytes` of `file` cached."""
    with Cgroup("uncapped", directory=file) as group:
        run = run_client(group, command, timeout_s=120)
    return run.anon_bytes + ROOM_BYTES + kept_bytes


def record(file: Path, command: Sequence[str], out: Path, memory_bytes: int | None, tier: str = "auto") -> Recording:
    """Record the reads of `file` by `command`, starting with none of it cached; MissingRequirement if that fails."""
    forget(file)
    with Cgroup("trace", directory=file, memory_bytes=memory_bytes) as group:
        words = ["trace", "-o", str(out), "--force", "--no-writes", "--path", file.name, "--tier", tier, "--"]
        result = subprocess.run(
            [sys.executable, "-m", "llmcache", *words, *group.wrap(command)],
            capture_output=True, text=True, timeout=300, check=False, env=environment(),
        )  # fmt: skip
    if result.returncode != 0:
        error, _, hint = result.stderr.strip().rpartition("llmcache: error: ")[2].partition("\nhint: ")
        raise MissingRequirement(f"llmcache trace: {error or result.returncode}", hint or None)
    events = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    starts = tuple(event["start"] for event in events if event["event"] == "step")
    if not starts:
        raise MissingRequirement(f"{Path(command[1]).name} failed: {result.stderr.strip()[-600:]}")
    return Recording(out, starts, result.stderr)
