"""Prompts over a Redis-compatible server: one process restores what another stored, and server failures do no harm."""

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
from tests.e2e.test_prefix import ROOT, Open, answer, prompt, reused, stored
from tests.e2e.test_prefix import identities as identities
from tests.e2e.test_prefix import open_model as open_model
from tests.e2e.test_prefix import tiny as tiny
from tests.e2e.test_proxy import free_port

pytestmark = [pytest.mark.llama, pytest.mark.redis]


class Server:
    """A server on loopback without persistence."""

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


def test_a_prompt_stored_by_another_machine_is_restored_and_stored(
    tiny: Path, open_model: Open, server: Callable[..., Server], tmp_path: Path
) -> None:
    shared = server()
    with stored(tmp_path / "one", shared=shared.address) as one:
        answer(open_model(tiny, one), prompt(600))
        assert one.shared and one.shared.pushed_blocks == 4 and shared.kinds() == {b"kv", b"part", b"next"}
    plain = reused(open_model(tiny), prompt(600), prompt(600), 600)
    with stored(tmp_path / "two", shared=shared.address) as two:
        assert answer(open_model(tiny, two), prompt(600)) == plain
        assert two.counters.restored_tokens == 600 and two.shared and two.shared.fetched_blocks == 3
        assert len(two.store.entries()) >= 3
        other = prompt(550) + prompt(50, seed=1)
        answer(open_model(tiny, two), other)
        assert two.counters.restored_tokens == 600 + 550
    shared.close()
    with stored(tmp_path / "two") as alone:
        answer(open_model(tiny, alone), prompt(550))
        assert alone.counters.restored_tokens == 550, "fetched blocks are stored locally"


@pytest.mark.parametrize("wrong", [b"x" * 5000, None])
def test_prompts_with_wrong_bytes_are_evaluated(
    tiny: Path, open_model: Open, server: Callable[..., Server], tmp_path: Path, wrong: bytes | None
) -> None:
    shared = server()
    with stored(tmp_path / "one", shared=shared.address) as one:
        answer(open_model(tiny, one), prompt(600))
    plain = answer(open_model(tiny), prompt(600))
    for key in shared.names():
        value = shared.client.get(key)
        if not key.endswith(b".next"):
            shared.client.set(key, value[:-9] + b"9" + value[-8:] if wrong is None else wrong)
    with stored(tmp_path / "two", shared=shared.address) as two:
        assert answer(open_model(tiny, two), prompt(600)) == plain
        assert two.counters.hits == 0 and two.shared and two.shared.failures == 2


@pytest.mark.parametrize("fault", ["down", "deaf", "full", "locked"])
def test_a_failing_server_costs_only_the_hit_and_the_deadline(
    tiny: Path, open_model: Open, server: Callable[..., Server], tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = answer(open_model(tiny), prompt(600))
    listening = socket.create_server(("127.0.0.1", 0))  # accepts, and never answers
    address = {"down": f"redis://127.0.0.1:{free_port()}", "deaf": f"redis://127.0.0.1:{listening.getsockname()[1]}"}.get(
        fault
    )
    if fault == "full":
        address = server("--maxmemory", "1", "--maxmemory-policy", "noeviction").address
    if fault == "locked":
        address = server("--requirepass", "secret").address
    with stored(tmp_path / "kv", shared=address, deadline=0.2) as cache:
        begin = time.monotonic()
        assert cache.restore(open_model(tiny), prompt(600)) == 0
        assert time.monotonic() - begin < 10  # forever, without the deadline
        assert answer(open_model(tiny, cache), prompt(600)) == plain
        assert cache.counters.stored_blocks == 4 and len(caplog.messages) == 1
    listening.close()


def test_a_server_that_sends_too_slowly_is_cut_off(tiny: Path, open_model: Open, tmp_path: Path) -> None:
    """Each byte arrives within the time-out of the socket, but the reply never ends."""
    listening = socket.create_server(("127.0.0.1", 0))

    def dribble() -> None:
        with listening.accept()[0] as connection:
            connection.recv(10_000)
            for byte in b"$1000000\r\n" + b"x" * 1000:
                time.sleep(0.05)
                connection.send(bytes([byte]))

    def dribble_until_closed() -> None:
        with contextlib.suppress(OSError):  # the client closed the connection
            dribble()

    thread = threading.Thread(target=dribble_until_closed, daemon=True)
    thread.start()
    with stored(tmp_path / "kv", shared=f"redis://127.0.0.1:{listening.getsockname()[1]}", deadline=0.3) as cache:
        begin = time.monotonic()
        assert cache.restore(open_model(tiny), prompt(600)) == 0
        assert 0.2 < time.monotonic() - begin < 20  # the complete reply would take 50 s
    thread.join(10)
    assert not thread.is_alive()
    listening.close()


@pytest.mark.parametrize(
    "reply",
    [b":5\r\n", b"*1\r\n:5\r\n", b"*-1\r\n", b"*1\r\n" * 5000, b"$4\r\nabcd\r\n", b"-ERR\r\n"],
    ids=lambda one: one[:8],
)
def test_replies_of_another_type_are_ignored(tiny: Path, open_model: Open, tmp_path: Path, reply: bytes) -> None:
    listening = socket.create_server(("127.0.0.1", 0))

    def reply_to_all() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection = listening.accept()[0]
                while request := connection.recv(10_000):
                    connection.sendall(reply if b"GET" in request else b"+OK\r\n" * request.count(b"*"))

    threading.Thread(target=reply_to_all, daemon=True).start()
    with stored(tmp_path / "kv", shared=f"redis://127.0.0.1:{listening.getsockname()[1]}?protocol=2", deadline=0.5) as cache:
        assert cache.restore(open_model(tiny), prompt(600)) == 0
    listening.close()


def test_an_exiting_interpreter_does_not_use_the_server(
    tiny: Path, open_model: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From Python 3.12 on, an interpreter that exits starts no more threads; the queue is written nevertheless."""
    cache = stored(tmp_path / "kv", shared=f"redis://127.0.0.1:{free_port()}")
    model, start = open_model(tiny, cache), threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "llmcache-shared":
            raise RuntimeError("can't start new thread at interpreter shutdown")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    answer(model, prompt(600), 1)
    cache.close()
    assert cache.counters.stored_blocks == 3 and not caplog.messages


def test_a_password_and_a_ttl_are_used(tiny: Path, open_model: Open, server: Callable[..., Server], tmp_path: Path) -> None:
    shared = server("--requirepass", "secret")
    address = f"redis://:secret@127.0.0.1:{shared.port}/0"
    with stored(tmp_path / "one", shared=address) as one:
        answer(open_model(tiny, one), prompt(300))
    with stored(tmp_path / "two", shared=address, ttl="1h") as two:
        answer(open_model(tiny, two), prompt(300))
        assert two.counters.hits == 1
        answer(open_model(tiny, two), prompt(300, seed=1))
    assert any(3500 < shared.client.ttl(key) <= 3600 for key in shared.names()), "the server expires them, too"


def test_an_invalid_address_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "llmcache", "serve-llama", str(tmp_path)]
    environ = {**os.environ, "LLMCACHE_SHARED": "nonsense"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environ, check=False)
    assert result.returncode == 2 and "redis://" in result.stderr
