"""Commands that keep gigabytes in temporary files remove them also when they are told to end."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmcache.cli import base

LIMIT_S = 120


def until_it_spills(process: subprocess.Popen[bytes], directory: Path) -> None:
    end = time.monotonic() + LIMIT_S
    while not any(path.suffix == ".kv" for path in directory.rglob("*")):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)


BENCH = ("bench", "--context", "64k", "--policy", "hillinfer", "--path")


@pytest.mark.parametrize(
    ("command", "number", "code"),
    [
        (BENCH, signal.SIGTERM, 143),
        (("profile",), signal.SIGHUP, 129),
        (("profile",), signal.SIGINT, 0),
    ],
)
def test_what_is_temporary_goes_when_a_command_is_told_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], number: signal.Signals, code: int
) -> None:
    spill = tmp_path / "spill"
    spill.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    started = [sys.executable, "-m", "llmcache", "kv", *command, str(spill)]
    with subprocess.Popen(started, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        until_it_spills(process, spill)
        process.send_signal(number)
        _, told = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code and b"Traceback" not in told, told
    assert not list(spill.iterdir())


def test_what_is_ignored_stays_so_and_all_is_as_before_in_the_end() -> None:
    before = {number: signal.getsignal(number) for number in base.ENDING_SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with base.orderly_end():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            with pytest.raises(SystemExit, match="143"):
                signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
