"""What the stories are told with: commands as a user types them, and llama.cpp decoding over a mount in a small group.

Every command and what it printed goes to stdout: pytest shows it where a story fails, and `-s` shows all of it.
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
    """What `llmcache WORDS` prints on stdout, run in `group` where one is given; it must end with `code`."""
    result = run(*map(str, words), wrap=list if group is None else group.wrap, timeout=PATIENCE_S)
    told = f"$ llmcache {shlex.join(map(str, words))}\n{result.stdout}{result.stderr}"
    print(told, flush=True)
    assert result.returncode == code, f"{result.returncode}: {told}"
    return str(result.stdout)


def said(*words: object, group: Cgroup | None = None, code: int = 0) -> dict[str, Any]:
    """What a command says in JSON."""
    return dict(json.loads(llmcache(*words, "--json", group=group, code=code)))


@functools.cache
def first_served() -> tuple[str, ...]:
    """What goes before a command that other work on the machine shall not disturb; nothing where that is not allowed.

    A time that storage decides is the same on a busy machine if whoever waits for storage runs at once when it answers.
    """
    words = ("chrt", "--rr", "1")
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        subprocess.run([*words, "true"], check=True, capture_output=True)
        return words
    print("no real-time priority here: the times are those of a shared machine", flush=True)
    return ()


class Decoding:
    """llama.cpp, one token after the other until it is killed; its lines go to a file."""

    def __init__(self, process: subprocess.Popen[bytes], lines: Path) -> None:
        self.pid = process.pid
        self._process, self._lines = process, lines

    def tokens(self) -> list[dict[str, Any]]:
        """What it said of each token so far: `seconds`, and `crc` of the logits."""
        whole = self._lines.read_text().rpartition("\n")[0].splitlines()
        return [event for event in map(json.loads, whole) if event["event"] == "step"]

    def median_s(self, begin: int, end: int | None = None) -> float:
        """Median seconds of the tokens from number `begin` on."""
        seconds = [token["seconds"] for token in self.tokens()[begin:end]]
        print(f"seconds per token: {' '.join(f'{each:.3f}' for each in seconds)}", flush=True)
        return float(statistics.median(seconds))

    def next_seconds(self, count: int, skip: int) -> float:
        """Median seconds of the `count` tokens that come after the next `skip`."""
        begin = len(self.tokens()) + skip
        self.wait_for(begin + count)
        return self.median_s(begin, begin + count)

    def wait_for(self, count: int) -> None:
        """Return when it has decoded `count` tokens in all."""

        def there() -> bool:
            assert self._process.poll() is None, f"llama.cpp ended with {self._process.returncode}"
            return len(self.tokens()) >= count

        wait_for(there, f"{count} tokens", PATIENCE_S)


@contextmanager
def decoding(model: Path, group: Cgroup, compute_s: float, lines: Path) -> Iterator[Decoding]:
    """Yield llama.cpp decoding in `group`, on a processor that takes `compute_s` per token (emulated)."""
    command: Sequence[str] = [*first_served(), *client("llama_tokens", model, 250, "--threads", 1, "--compute", compute_s)]
    with lines.open("wb") as sink:
        process = subprocess.Popen(group.wrap(command), stdin=subprocess.DEVNULL, stdout=sink, start_new_session=True)
    try:
        yield Decoding(process, lines)
    finally:
        process.kill()
        process.wait()


@contextmanager
def mounted(source: Path, point: Path, *options: object) -> Iterator[Path]:
    """Yield a mount made and ended by the commands, in the background; one that a failure leaves is ended by force."""
    point.mkdir(exist_ok=True)
    llmcache("mount", source, point, *options)
    try:
        yield point
        llmcache("umount", point)
    finally:
        if is_mounted(point):
            llmcache("umount", "--force", point)
