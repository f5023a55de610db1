"""Helpers of the stories: commands as a user types them, and llama.cpp decoding over a mount in a small cgroup.

Every command and its output goes to stdout: pytest prints it for a failed story, and `-s` prints all of it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shlex
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmcache.cgroup import Cgroup
from tests.mount.live import llmcache as run
from tests.mount.live import wait_for
from tools.bench.runner import client
from tools.bench.sides import is_mounted

PATIENCE_S = 240.0


def llmcache(*words: object, group: Cgroup | None = None, code: int = 0) -> str:
    """Run `llmcache WORDS`, in `group` if given, and return its stdout; it must exit with `code`."""
    result = run(*map(str, words), wrap=list if group is None else group.wrap, timeout=PATIENCE_S)
    transcript = f"$ llmcache {shlex.join(map(str, words))}\n{result.stdout}{result.stderr}"
    print(transcript, flush=True)
    assert result.returncode == code, f"{result.returncode}: {transcript}"
    return str(result.stdout)


def run_json(*words: object, group: Cgroup | None = None, code: int = 0) -> dict[str, Any]:
    return dict(json.loads(llmcache(*words, "--json", group=group, code=code)))


@functools.cache
def realtime_prefix() -> tuple[str, ...]:
    """Return a command prefix that gives real-time priority; empty if that is not allowed.

    If storage limits a process, its duration is the same on a busy machine only if it runs as soon as storage answers.
    """
    words = ("chrt", "--rr", "1")
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        subprocess.run([*words, "true"], check=True, capture_output=True)
        return words
    print("no real-time priority here: the times are those of a shared machine", flush=True)
    return ()


class Decoding:
    """A llama.cpp process that decodes tokens until it is killed, with its output in a file."""

    def __init__(self, process: subprocess.Popen[bytes], lines: Path) -> None:
        self.pid = process.pid
        self._process, self._lines = process, lines

    def tokens(self) -> list[dict[str, Any]]:
        """Return the events of the tokens decoded until now, with `seconds` and the `crc` of the logits."""
        whole = self._lines.read_text().rpartition("\n")[0].splitlines()
        return [event for event in map(json.loads, whole) if event["event"] == "step"]

    def median_s(self, begin: int, end: int | None = None) -> float:
        seconds = [token["seconds"] for token in self.tokens()[begin:end]]
        print(f"seconds per token: {' '.join(f'{each:.3f}' for each in seconds)}", flush=True)
        return float(statistics.median(seconds))

    def next_seconds(self, count: int, skip: int) -> float:
        """Return the median seconds of `count` tokens after skipping `skip`."""
        begin = len(self.tokens()) + skip
        self.wait_for(begin + count)
        return self.median_s(begin, begin + count)

    def wait_for(self, count: int) -> None:
        """Return when `count` tokens have been decoded in total."""

        def decoded() -> bool:
            assert self._process.poll() is None, f"llama.cpp ended with {self._process.returncode}"
            return len(self.tokens()) >= count

        wait_for(decoded, f"{count} tokens", PATIENCE_S)


@contextmanager
def decoding(model: Path, group: Cgroup, compute_s: float, lines: Path) -> Iterator[Decoding]:
    """Yield llama.cpp decoding in `group`; the emulated processor takes `compute_s` per token."""
    command: Sequence[str] = [
        *realtime_prefix(),
        *client("llama_tokens", model, 250, "--threads", 1, "--compute", compute_s),
    ]
    with lines.open("wb") as sink:
        process = subprocess.Popen(group.wrap(command), stdin=subprocess.DEVNULL, stdout=sink, start_new_session=True)
    try:
        yield Decoding(process, lines)
    finally:
        process.kill()
        process.wait()


@contextmanager
def mounted(source: Path, point: Path, *options: object) -> Iterator[Path]:
    """Yield a background mount, made and ended by the commands; after a failure, it is unmounted by force."""
    point.mkdir(exist_ok=True)
    llmcache("mount", source, point, *options)
    try:
        yield point
        llmcache("umount", point)
    finally:
        if is_mounted(point):
            llmcache("umount", "--force", point)
