"""Prompts over a Redis-compatible server: what one process stores, another restores; whatever the server does is no harm."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import redis_server
from tests.e2e.test_prefix import ROOT, Open, answer, free_port, prompt, reused, stored
from tests.e2e.test_prefix import identities as identities
from tests.e2e.test_prefix import opened as opened
from tests.e2e.test_prefix import tiny as tiny

pytestmark = [pytest.mark.llama, pytest.mark.redis]


class Server:
    """A server on loopback, that keeps nothing on disk."""

    def __init__(self, directory: Path, *settings: str) -> None:
        import redis

        self.port = free_port()
        program = redis_server()
        assert program
        words = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(directory)]
        self.process = subprocess.Popen([*words, *settings], executable=program, stdout=subprocess.DEVNULL)
        password = settings[1] if settings[:1] == ("--requirepass",) else None
        self.client: Any = redis.Redis(port=self.port, password=password)
        deadline = time.monotonic() + 20
        while True:
            try:
                self.client.ping()
                return
            except redis.ConnectionError:
                assert time.monotonic() < deadline and self.process.poll() is None
                time.sleep(0.05)

    @property
    def address(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def names(self) -> list[bytes]:
        return list(self.client.scan_iter())

    def kinds(self) -> set[bytes]:
        return {key.rpartition(b".")[2] for key in self.names()}

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    running: list[Server] = []

    def start(*settings: str) -> Server:
        running.append(Server(tmp_path, *settings))
        return running[-1]

    yield start
    for one in running:
        one.close()


def test_another_machines_first_prompt_is_restored_and_kept(
    tiny: Path, opened: Open, server: Callable[..., Server], tmp_path: Path
) -> None:
    shared = server()
    with stored(tmp_path / "one", shared=shared.address) as one:
        answer(opened(tiny, one), prompt(600))
        assert one.shared and one.shared.pushed_blocks == 4 and shared.kinds() == {b"kv", b"part", b"next"}
    plain = reused(opened(tiny), prompt(600), prompt(600), 600)
    with stored(tmp_path / "two", shared=shared.address) as two:
        assert answer(opened(tiny, two), prompt(600)) == plain
        assert two.counters.restored_tokens == 600 and two.shared and two.shared.fetched_blocks == 3
        assert len(two.store.entries()) >= 3
        other = prompt(550) + prompt(50, seed=1)
        answer(opened(tiny, two), other)
        assert two.counters.restored_tokens == 600 + 550
    shared.close()
    with stored(tmp_path / "two") as alone:
        answer(opened(tiny, alone), prompt(550))
        assert alone.counters.restored_tokens == 550, "what was fetched is kept"


@pytest.mark.parametrize("wrong", [b"x" * 5000, None])
def test_wrong_bytes_are_evaluated(
    tiny: Path, opened: Open, server: Callable[..., Server], tmp_path: Path, wrong: bytes | None
) -> None:
    shared = server()
    with stored(tmp_path / "one", shared=shared.address) as one:
        answer(opened(tiny, one), prompt(600))
    plain = answer(opened(tiny), prompt(600))
    for key in shared.names():
        value = shared.client.get(key)
        if not key.endswith(b".next"):
            shared.client.set(key, value[:-9] + b"9" + value[-8:] if wrong is None else wrong)
    with stored(tmp_path / "two", shared=shared.address) as two:
        assert answer(opened(tiny, two), prompt(600)) == plain
        assert two.counters.hits == 0 and two.shared and two.shared.failures == 2


@pytest.mark.parametrize("turn", ["down", "deaf", "full", "locked"])
def test_a_server_that_fails_costs_the_hit_and_the_deadline(
    tiny: Path, opened: Open, server: Callable[..., Server], tmp_path: Path, turn: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = answer(opened(tiny), prompt(600))
    listening = socket.create_server(("127.0.0.1", 0))  # accepts, and never answers
    address = {"down": f"redis://127.0.0.1:{free_port()}", "deaf": f"redis://127.0.0.1:{listening.getsockname()[1]}"}.get(
        turn
    )
    if turn == "full":
        address = server("--maxmemory", "1", "--maxmemory-policy", "noeviction").address
    if turn == "locked":
        address = server("--requirepass", "secret").address
    with stored(tmp_path / "kv", shared=address, deadline=0.2) as cache:
        begin = time.monotonic()
        assert cache.restore(opened(tiny), prompt(600)) == 0
        assert time.monotonic() - begin < 10  # for ever, without the deadline
        assert answer(opened(tiny, cache), prompt(600)) == plain
        assert cache.counters.stored_blocks == 4 and len(caplog.messages) == 1
    listening.close()


def test_a_server_that_dribbles_is_cut_off(tiny: Path, opened: Open, tmp_path: Path) -> None:
    """Each byte comes within the time-out of the socket, the answer never."""
    listening = socket.create_server(("127.0.0.1", 0))

    def dribble() -> None:
        with listening.accept()[0] as connection:
            connection.recv(10_000)
            for byte in b"$1000000\r\n" + b"x" * 1000:
                time.sleep(0.05)
                connection.send(bytes([byte]))

    def dribbled() -> None:
        with contextlib.suppress(OSError):  # cut off
            dribble()

    thread = threading.Thread(target=dribbled, daemon=True)
    thread.start()
    with stored(tmp_path / "kv", shared=f"redis://127.0.0.1:{listening.getsockname()[1]}", deadline=0.3) as cache:
        begin = time.monotonic()
        assert cache.restore(opened(tiny), prompt(600)) == 0
        assert 0.2 < time.monotonic() - begin < 20  # of the 50 s that the answer takes
    thread.join(10)
    assert not thread.is_alive()
    listening.close()


@pytest.mark.parametrize(
    "reply",
    [b":5\r\n", b"*1\r\n:5\r\n", b"*-1\r\n", b"*1\r\n" * 5000, b"$4\r\nabcd\r\n", b"-ERR\r\n"],
    ids=lambda one: one[:8],
)
def test_answers_of_another_kind_are_none(tiny: Path, opened: Open, tmp_path: Path, reply: bytes) -> None:
    listening = socket.create_server(("127.0.0.1", 0))

    def reply_to_all() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection = listening.accept()[0]
                while told := connection.recv(10_000):
                    connection.sendall(reply if b"GET" in told else b"+OK\r\n" * told.count(b"*"))

    threading.Thread(target=reply_to_all, daemon=True).start()
    with stored(tmp_path / "kv", shared=f"redis://127.0.0.1:{listening.getsockname()[1]}?protocol=2", deadline=0.5) as cache:
        assert cache.restore(opened(tiny), prompt(600)) == 0
    listening.close()


def test_an_interpreter_that_ends_asks_nobody(
    tiny: Path, opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From Python 3.12 on it starts no more threads; what waits is written all the same."""
    cache = stored(tmp_path / "kv", shared=f"redis://127.0.0.1:{free_port()}")
    model, start = opened(tiny, cache), threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "llmcache-shared":
            raise RuntimeError("can't start new thread at interpreter shutdown")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    answer(model, prompt(600), 1)
    cache.close()
    assert cache.counters.stored_blocks == 3 and not caplog.messages


def test_a_password_is_given_and_a_ttl(tiny: Path, opened: Open, server: Callable[..., Server], tmp_path: Path) -> None:
    shared = server("--requirepass", "secret")
    address = f"redis://:secret@127.0.0.1:{shared.port}/0"
    with stored(tmp_path / "one", shared=address) as one:
        answer(opened(tiny, one), prompt(300))
    with stored(tmp_path / "two", shared=address, ttl="1h") as two:
        answer(opened(tiny, two), prompt(300))
        assert two.counters.hits == 1
        answer(opened(tiny, two), prompt(300, seed=1))
    assert any(3500 < shared.client.ttl(key) <= 3600 for key in shared.names()), "the server forgets them, too"


def test_an_address_that_is_none_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "llmcache", "serve-llama", str(tmp_path)]
    told = {**os.environ, "LLMCACHE_SHARED": "nonsense"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=told, check=False)
    assert result.returncode == 2 and "redis://" in result.stderr
