"""`llmcache top` on real mounts: as text, as JSON, and on a terminal with keys, resizes, signals and the end of a mount."""

from __future__ import annotations

import codecs
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmcache.mount.client import control
from tests.mount.conftest import Mounted, Mounter
from tests.mount.live import MIB, by_read, llmcache, wait_for
from tests.mount.test_operating import write_model
from tools.bench.sides import environment

ALTERNATE, BACK, CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"
PATIENCE_S = 120.0
MARK = "<end of the output>"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """`llmcache top` on its own terminal."""

    def __init__(self, *words: str | Path, columns: int = 80, rows: int = 24, **variables: str) -> None:
        self._ours, self._theirs = pty.openpty()
        self.resize(columns, rows)
        self.before = termios.tcgetattr(self._theirs)
        self.output = ""
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode  # a signal may cut a character
        # pytest's readline may export COLUMNS and LINES, which override the size of the terminal.
        unsized = {name: value for name, value in environment().items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "llmcache", "top", *map(str, words)],
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            env={**unsized, "TERM": "xterm-256color", **variables},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that control keys send signals
        )

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def wait_for(self, text: str) -> str:
        """Return and clear the output once it contains the pattern `text`."""
        deadline = time.monotonic() + PATIENCE_S
        while re.search(text, ESCAPES.sub("", self.output)) is None:
            assert time.monotonic() < deadline, f"{text!r} does not come ({self._state()}): {self.output[-8000:]!r}"
            self._receive(0.2)
        output, self.output = self.output, ""
        return output

    def _receive(self, patience_s: float) -> bool:
        if not select.select([self._ours], [], [], patience_s)[0]:
            return False
        self.output += self._decode(os.read(self._ours, 1 << 16))
        return True

    def _state(self) -> str:
        details = [Path(f"/proc/{self.process.pid}/{name}").read_text() for name in ("wchan", "stack", "environ")]
        sizes = [fcntl.ioctl(fd, termios.TIOCGWINSZ, bytes(8)) for fd in (self._ours, self._theirs)]
        return f"{self.process.poll()}, {sizes}, foreground {os.tcgetpgrp(self._ours)} of {self.process.pid}, {details}"

    def end(self) -> tuple[int, str]:
        """Return the exit code and the last output."""
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "it does not end"
            self._receive(0.05)
        self.drain()
        return self.process.returncode, self.output

    def drain(self) -> None:
        """Read the remaining output: write MARK to the terminal and read up to it."""
        os.write(self._theirs, MARK.encode())
        deadline = time.monotonic() + PATIENCE_S
        while MARK not in self.output:
            assert time.monotonic() < deadline, "the output does not arrive"
            self._receive(0.2)
        self.output = self.output.replace(MARK, "")

    def is_restored(self) -> bool:
        """Return whether the terminal has its old settings and its old screen."""
        tail = self.output[self.output.rindex(BACK) :] if BACK in self.output else ""
        return termios.tcgetattr(self._theirs) == self.before and CURSOR in self.output and ALTERNATE not in tail

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


@pytest.fixture
def mounted(mount: Mounter, tmp_path: Path) -> Mounted:
    """A mount with a model, after three reads of the model."""
    source = tmp_path / "source"
    source.mkdir()
    write_model(source / "model.safetensors", "model.layers.0.mlp.weight", 48 * MIB)
    found = mount(source=source)
    for _ in range(3):
        by_read(found.point / "model.safetensors")
    return found


@pytest.fixture
def watch(mounted: Mounted) -> Iterator[Terminal]:
    """A terminal with a running `top` that has drawn a first frame."""
    terminal = Terminal(mounted.point, "0.2s")
    terminal.wait_for("model.layers.0")
    yield terminal
    terminal.close()


def test_without_a_terminal_top_prints_text(mounted: Mounted) -> None:
    done = llmcache("top", mounted.point, "0.2s", "2")
    assert done.returncode == 0 and "\x1b" not in done.stdout, done.stderr
    assert done.stdout.count("model.layers.0") == done.stdout.count("byte hit ratio") == 2


def test_json_has_a_line_per_sample(mounted: Mounted) -> None:
    found: list[dict[str, Any]] = []
    counters: dict[str, Any] = {}

    def at_rest() -> bool:
        """Return whether counters and pins are stable: the last pins may be added between two commands."""
        before = mounted.stats()
        done = llmcache("top", mounted.point, "0.2s", "3", "--json")
        found[:] = [json.loads(line) for line in done.stdout.splitlines()]
        counters.update(mounted.stats())
        is_counted = before["read_bytes"] == counters["read_bytes"]  # hits of the last pass are counted a little later
        pinned = {each["budget"]["pinned_bytes"] for each in [*found, {"budget": before}]}
        return is_counted and pinned == {counters["pinned_bytes"]}

    wait_for(at_rest, "the counters are the same before and after")
    assert [each["schema"] for each in found] == ["llmcache.top/1"] * 3
    last = found[-1]
    assert last["total"]["read_bytes"] == counters["read_bytes"] and last["interval"]["read_bytes"] == 0
    (file,) = last["heat"]
    (header, layer) = file["layers"]
    assert (header["name"], layer["name"], layer["size_bytes"]) == ("header", "model.layers.0", 48 * MIB)
    assert abs(header["pinned_bytes"] + layer["pinned_bytes"] - counters["pinned_bytes"]) <= 2 * MIB
    assert 0 < layer["age_s"] < 300


@pytest.mark.parametrize("key", ["xyzq", "\x03"])
def test_a_key_ends_top_and_restores_the_terminal(watch: Terminal, key: str) -> None:
    watch.type(key)
    code, output = watch.end()
    assert code == 0 and watch.is_restored() and "Traceback" not in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_top_and_restores_the_terminal(watch: Terminal, number: signal.Signals) -> None:
    watch.process.send_signal(number)
    assert watch.end()[0] == 128 + number and watch.is_restored()


def test_top_follows_the_size_of_the_terminal(mounted: Mounted) -> None:
    """After each resize, `top` draws a whole frame of the new size, even if the resize interrupted a write."""
    terminal = Terminal(mounted.point, "60s", PYTHONUNBUFFERED="1")
    try:
        terminal.wait_for("model.layers.0")
        for columns, rows in ((120, 40), (80, 16), (40, 6), (200, 60)):
            terminal.resize(columns, rows)
            line = f"budget [^\r\n]{{{columns - 8}}}[^ \r\n]"  # to the last column, and not beyond
            terminal.wait_for(f"{line}\r?\n")
        terminal.type("q")
        assert terminal.end()[0] == 0
    finally:
        terminal.close()


@pytest.mark.parametrize("way", ["umount", "kill"])
def test_the_end_of_the_mount_ends_top_with_a_message(watch: Terminal, mounted: Mounted, way: str) -> None:
    if way == "umount":
        assert llmcache("umount", mounted.point).returncode == 0
    else:
        os.kill(mounted.pid, signal.SIGKILL)
    code, output = watch.end()
    assert code == 4 and watch.is_restored()
    message = ESCAPES.sub("", output[output.rindex(BACK) :])
    assert f"error: {mounted.point} can no longer be watched: " in " ".join(message.split())
    if way == "kill":
        control.wait_until_gone(mounted.files, PATIENCE_S)


def test_a_dumb_terminal_gets_text(mounted: Mounted) -> None:
    terminal = Terminal(mounted.point, "0.2s", TERM="dumb", NO_COLOR="1")
    try:
        code, output = terminal.end()
        assert code == 0 and "\x1b" not in output and "model.layers.0" in output
    finally:
        terminal.close()
