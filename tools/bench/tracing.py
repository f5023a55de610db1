"""Recording a client with `llmcache trace`: over the plain page cache, capped by a cgroup or not.

The recorder stays outside of the group, so that its memory is not the client's.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from llmcache.cache.loops import RECENT

from .cgroup import Group
from .errors import BenchError
from .files import forget
from .runner import run_client
from .sides import environment

# What a client needs beside its own memory and the share of the loop: pages of programs and libraries, page tables.
ROOM_BYTES = 16 << 20


@dataclass(frozen=True)
class Recorded:
    """A trace, what the client measured of itself, and what the recorder said.

    `seconds`: how long each step took; `starts`: when it began, if the client tells.
    """

    trace: Path
    seconds: tuple[float, ...]
    starts: tuple[float, ...]
    cap_bytes: int | None
    said: str

    @property
    def step_s(self) -> float:
        """The median time from a step (token, pass) to the next, of the last as many as `classify` takes a period from."""
        if len(self.starts) > 1:
            return statistics.median([after - before for before, after in pairwise(self.starts[-RECENT - 1 :])])
        return statistics.median(self.seconds[-RECENT:])


def cap_bytes(file: Path, command: Sequence[str], kept_bytes: int) -> int:
    """Runs the client once, uncapped, and returns the memory in which it can keep `kept_bytes` of `file` cached."""
    with Group("uncapped", directory=file) as group:
        run = run_client(group, command, timeout_s=120)
    return run.anon_bytes + ROOM_BYTES + kept_bytes


def record(
    file: Path, command: Sequence[str], out: Path, memory_bytes: int | None, read_bps: int | None = None, tier: str = "auto"
) -> Recorded:
    """Record what `command` reads of `file`, which starts out of the page cache; BenchError if that fails."""
    forget(file)
    with Group("trace", directory=file, memory_bytes=memory_bytes, read_bps=read_bps) as group:
        words = ["trace", "-o", str(out), "--force", "--no-writes", "--path", file.name, "--tier", tier, "--"]
        result = subprocess.run(
            [sys.executable, "-m", "llmcache", *words, *group.wrap(command)],
            capture_output=True, text=True, timeout=300, check=False, env=environment(),
        )  # fmt: skip
    if result.returncode != 0:
        error, _, hint = result.stderr.strip().rpartition("llmcache: error: ")[2].partition("\nhint: ")
        raise BenchError(f"llmcache trace: {error or result.returncode}", hint or None)
    events = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    steps = [event for event in events if event["event"] == "step"]
    seconds = tuple(step["seconds"] for step in steps)
    if not seconds:
        raise BenchError(f"{Path(command[1]).name} failed: {result.stderr.strip()[-600:]}")
    starts = tuple(step["start"] for step in steps if "start" in step)
    return Recorded(out, seconds, starts, memory_bytes, result.stderr)
