"""Runs a client process inside a cgroup and collects its events with the storage bytes of each step."""

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
from pathlib import Path
from typing import Any

from .cgroup import Group
from .errors import BenchError

CLIENTS = Path(__file__).resolve().parent / "clients"


@dataclass
class Step:
    """One token or one pass: time of the client, and what the whole group read from the disk meanwhile."""

    seconds: float
    storage_bytes: int
    crc: int | None = None


@dataclass
class ClientRun:
    """Everything one client said."""

    load_s: float = 0.0
    steps: list[Step] = field(default_factory=list)
    anon_bytes: int = 0
    wrong: int = 0
    hung: bool = False
    exit_code: int = 0
    error: str = ""

    @property
    def ok(self) -> bool:
        """Return whether it ended by itself, without an error and without a wrong byte."""
        return not self.hung and self.exit_code == 0 and self.wrong == 0

    def measured(self, warmup: int) -> list[Step]:
        """Return the steps after the warm-up; all of them if there are no more than that."""
        return self.steps[warmup:] or self.steps

    def median_s(self, warmup: int) -> float:
        """Return the median seconds of the measured steps; infinite where there is none."""
        steps = self.measured(warmup)
        return statistics.median(step.seconds for step in steps) if steps else float("inf")

    def undisturbed_s(self) -> float:
        """Return the median of the faster half of the steps after the first: the client's own time, without bursts."""
        steps = sorted(step.seconds for step in self.measured(1))
        return statistics.median(steps[: (len(steps) + 1) // 2]) if steps else float("inf")


def client(name: str, *arguments: object) -> list[str]:
    """Return the command line of a client script."""
    return [sys.executable, str(CLIENTS / f"{name}.py"), *(str(a) for a in arguments)]


def run_clients(
    group: Group, commands: Sequence[Sequence[str]], timeout_s: float, stepped: Callable[[int], None] = lambda _done: None
) -> list[ClientRun]:
    """Run the clients at the same time in `group`; one that is not done after `timeout_s` is killed and marked hung.

    `stepped` is told how many steps the first of them has done, after each.
    """
    running = [_Client(group, command, stepped if at == 0 else None) for at, command in enumerate(commands)]
    try:
        deadline = time.monotonic() + timeout_s
        for item in running:
            item.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for item in running:
            item.kill()
    return [item.finish() for item in running]


def run_client(group: Group, command: Sequence[str], timeout_s: float) -> ClientRun:
    """Run one client in `group`; raises BenchError if it fails for another reason than a hang or wrong bytes."""
    run = run_clients(group, [command], timeout_s)[0]
    if not run.steps and not run.hung:
        raise BenchError(f"{Path(command[1]).name} failed ({run.exit_code}): {run.error[-600:]}")
    return run


class _Client:
    """A started client; a thread reads its lines as they come."""

    def __init__(self, group: Group, command: Sequence[str], stepped: Callable[[int], None] | None) -> None:
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
        self.threads = [threading.Thread(target=work, daemon=True) for work in (self._events, self._errors)]
        for thread in self.threads:
            thread.start()

    def _events(self) -> None:
        assert self.process.stdout is not None
        last = self.group.read_bytes()
        for line in self.process.stdout:
            now = self.group.read_bytes()
            self._event(json.loads(line), now - last)
            last = now

    def _event(self, event: dict[str, Any], storage_bytes: int) -> None:
        if event["event"] == "load":
            self.run.load_s = event["seconds"]
        elif event["event"] == "step":
            self.run.steps.append(Step(event["seconds"], storage_bytes, event.get("crc")))
            if self.stepped is not None:
                self.stepped(len(self.run.steps))
        else:
            self.run.anon_bytes, self.run.wrong = event["anon_bytes"], event["wrong"]

    def _errors(self) -> None:
        assert self.process.stderr is not None
        self.run.error = self.process.stderr.read()

    def wait(self, timeout_s: float) -> None:
        """Wait; running out of time marks the run as hung."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.run.hung = True

    def kill(self) -> None:
        """End the process if it still runs; a reader stuck in a dead mount goes when that is aborted."""
        if self.process.poll() is None:
            self.process.kill()

    def finish(self) -> ClientRun:
        """Return the run, after the reading threads have seen the end."""
        try:
            self.run.exit_code = self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.run.hung = True
        for thread in self.threads:
            thread.join(10)
        return self.run
