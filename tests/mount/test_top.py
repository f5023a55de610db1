"""`llmcache top` on real mounts: as text, as JSON, and on a terminal with keys, another size, signals, and an end."""

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

from llmcache.fs.client import control
from tests.mount.conftest import Mounted, Mounter
from tests.mount.live import MIB, by_read, llmcache, said, wait_for
from tests.mount.test_operating import write_model
from tools.bench.sides import environment

ALTERNATE, BACK, CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"
PATIENCE_S = 120.0
MARK = "<all that it wrote stands before this>"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """`llmcache top` on a terminal of its own."""

    def __init__(self, *words: str | Path, columns: int = 80, rows: int = 24, **variables: str) -> None:
        self._ours, self._theirs = pty.openpty()
        self.resize(columns, rows)
        self.before = termios.tcgetattr(self._theirs)
        self.said = ""
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode  # a signal may cut a character
        # readline, where pytest has it, exports the size that it finds, and programs believe that before the terminal.
        unsized = {name: value for name, value in environment().items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "llmcache", "top", *map(str, words)],
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            env={**unsized, "TERM": "xterm-256color", **variables},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that keys are signals
        )

    def resize(self, columns: int, rows: int) -> None:
        """Another size, of which the kernel tells the program."""
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._ours, keys.encode())

    def wait_for(self, text: str) -> str:
        """Everything that was written until `text` (a pattern) came; it is forgotten then."""
        deadline = time.monotonic() + PATIENCE_S
        while re.search(text, ESCAPES.sub("", self.said)) is None:
            assert time.monotonic() < deadline, f"{text!r} does not come ({self._state()}): {self.said[-8000:]!r}"
            self._take(0.2)
        said, self.said = self.said, ""
        return said

    def _take(self, patience_s: float) -> bool:
        if not select.select([self._ours], [], [], patience_s)[0]:
            return False
        self.said += self._decode(os.read(self._ours, 1 << 16))
        return True

    def _state(self) -> str:
        """What the program is doing, as the kernel tells."""
        told = [Path(f"/proc/{self.process.pid}/{name}").read_text() for name in ("wchan", "stack", "environ")]
        sizes = [fcntl.ioctl(fd, termios.TIOCGWINSZ, bytes(8)) for fd in (self._ours, self._theirs)]
        return f"{self.process.poll()}, {sizes}, foreground {os.tcgetpgrp(self._ours)} of {self.process.pid}, {told}"

    def end(self) -> tuple[int, str]:
        """(exit code, what was written last)."""
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "it does not end"
            self._take(0.05)
        self.drain()
        return self.process.returncode, self.said

    def drain(self) -> None:
        """Take what it has written, which the kernel hands over when it gets to it: until what we write after it."""
        os.write(self._theirs, MARK.encode())
        deadline = time.monotonic() + PATIENCE_S
        while MARK not in self.said:
            assert time.monotonic() < deadline, "what it has written does not come"
            self._take(0.2)
        self.said = self.said.replace(MARK, "")

    def is_restored(self) -> bool:
        """True if keys are shown and gathered in lines as before, and the screen is the one from before."""
        tail = self.said[self.said.rindex(BACK) :] if BACK in self.said else ""
        return termios.tcgetattr(self._theirs) == self.before and CURSOR in self.said and ALTERNATE not in tail

    def close(self) -> None:
        """End it, whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


@pytest.fixture
def mounted(mount: Mounter, tmp_path: Path) -> Mounted:
    """A mount with a model that was read three times; it has six layers."""
    source = tmp_path / "source"
    source.mkdir()
    write_model(source / "model.safetensors", "model.layers.0.mlp.weight", 48 * MIB)
    found = mount(source=source)
    for _ in range(3):
        by_read(found.point / "model.safetensors")
    return found


@pytest.fixture
def watch(mounted: Mounted) -> Iterator[Terminal]:
    """It watches, and has drawn."""
    terminal = Terminal(mounted.point, "0.2s")
    terminal.wait_for("model.layers.0")
    yield terminal
    terminal.close()


def test_as_text_it_tells_what_the_counters_tell(mounted: Mounted) -> None:
    done = llmcache("top", mounted.point, "0.3s")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout and max(map(len, done.stdout.splitlines())) <= 80
    for words in ("/mnt ", "budget ", "model.safetensors", "model.layers.0", "byte hit ratio"):
        assert words in done.stdout
    passed = re.search(r"last ([0-9.]+) s", done.stdout)
    assert passed and 0.3 <= float(passed[1]) < PATIENCE_S  # the interval that there was, on a busy machine a longer one
    assert done.stdout.count("to readers") == 1
    assert llmcache("top", mounted.point, "0.2s", "2").stdout.count("to readers") == 2


def test_as_json_each_sample_is_a_line(mounted: Mounted) -> None:
    found: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}

    def at_rest() -> bool:
        """What was read last may still be pinned between one command and the next."""
        before = said("stats", mounted.point)
        done = llmcache("top", mounted.point, "0.2s", "3", "--json")
        found[:] = [json.loads(line) for line in done.stdout.splitlines()]
        facts.update(said("stats", mounted.point))
        is_counted = before["read_bytes"] == facts["read_bytes"]  # hits of the last pass are counted a little later
        pinned = {each["budget"]["pinned_bytes"] for each in [*found, {"budget": before}]}
        return is_counted and pinned == {facts["pinned_bytes"]}

    wait_for(at_rest, "it says the same before and after")
    assert [each["schema"] for each in found] == ["llmcache.top/1"] * 3
    last = found[-1]
    assert last["total"]["read_bytes"] == facts["read_bytes"] and last["interval"]["read_bytes"] == 0
    (file,) = last["heat"]
    (header, layer) = file["layers"]
    assert (header["name"], layer["name"], layer["size_bytes"]) == ("header", "model.layers.0", 48 * MIB)
    assert abs(header["pinned_bytes"] + layer["pinned_bytes"] - facts["pinned_bytes"]) <= 2 * MIB
    assert 0 < layer["age_s"] < 300


def test_wrong_words(tmp_path: Path) -> None:
    for interval in ("0", "1ms", "soon"):
        assert llmcache("top", tmp_path, interval).returncode == 2


@pytest.mark.parametrize("key", ["xyzq", "\x03"])
def test_a_key_ends_it_and_the_terminal_is_as_before(watch: Terminal, key: str) -> None:
    watch.type(key)
    code, said = watch.end()
    assert code == 0 and watch.is_restored() and "Traceback" not in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_and_the_terminal_is_as_before(watch: Terminal, number: signal.Signals) -> None:
    watch.process.send_signal(number)
    assert watch.end()[0] == 128 + number and watch.is_restored()


def test_it_follows_the_size_of_the_terminal(mounted: Mounted) -> None:
    """What is drawn anew is drawn for the size; and whole, whatever a change of size cuts short while it is written."""
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
def test_a_mount_that_ends_ends_it_with_a_message(watch: Terminal, mounted: Mounted, way: str) -> None:
    if way == "umount":
        assert llmcache("umount", mounted.point).returncode == 0
    else:
        os.kill(mounted.pid, signal.SIGKILL)
    code, said = watch.end()
    assert code == 4 and watch.is_restored()
    message = ESCAPES.sub("", said[said.rindex(BACK) :])
    assert f"error: {mounted.point} can no longer be watched: " in " ".join(message.split())
    if way == "kill":
        control.wait_until_gone(mounted.files, PATIENCE_S)


def test_a_terminal_that_can_do_nothing_gets_text(mounted: Mounted) -> None:
    terminal = Terminal(mounted.point, "0.2s", TERM="dumb", NO_COLOR="1")
    try:
        code, said = terminal.end()
        assert code == 0 and "\x1b" not in said and "model.layers.0" in said
    finally:
        terminal.close()
