"""Fuzz target: the control socket. What a daemon is asked, byte for byte and field for field; and what clients are told."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmcache.errors import MountProblem
from llmcache.fs.client import control
from llmcache.fs.daemon.controlserver import ControlServer, Requests
from llmcache.fs.engine import warmup
from llmcache.fs.engine.warmup import Warmer
from llmcache.fs.vfs.operations import LlmcacheOperations
from llmcache.fs.vfs.source import SourceTree, WritePolicy
from tests.conftest import examples
from tests.fuzz.mutations import ODD, documents, mutated, written
from tests.fuzz.target import Target, bounded, refusal
from tests.property.kernel import open_backing
from tests.property.rig import running

POINT = "/nowhere"
SMALL = {"a.gguf": 9000, "b.kv": 1, "empty.bin": 0, "é ü.json": 300}
MIB = 1 << 20
REQUESTS: list[dict[str, Any]] = [
    {"op": "stats"},
    {"op": "resize", "cache_bytes": 64 * MIB, "wait": False},
    {"op": "warmup", "globs": ["*.gguf"], "check": True},
    {"op": "warmup", "globs": [], "check": False},
    {"op": "evict", "globs": ["a*", "b.kv"]},
]
REPLIES: list[dict[str, Any]] = [
    {"schema": "x", "budget_bytes": 3},
    {"progress": {"done_bytes": 1, "total_bytes": 2}},
    {"error": "no", "hint": "do", "exit_code": 3},
    {"error": "no", "hint": None},
]
GLOBS = ["*", "[", "[!", "[z-a]", "*[[]" * 200, "*a" * 2000, "?" * 5000, "\0", "\ud800", "[[:x:]]", "(?P<a>", "\\"]


@dataclass
class Service:
    """A server of a real engine over real files, and what either logged as an error."""

    directory: Path
    errors: list[str]


class _Errors(logging.Handler):
    """Collects what is logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


_running: list[Service] = []


@contextlib.contextmanager
def serving() -> Iterator[None]:
    """A with block in which there is a service that all inputs are sent to; its kernel is a modelled one."""
    errors, log = _Errors(), logging.getLogger("llmcache")
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        directory = Path(name)
        source = directory / "source"
        source.mkdir()
        for file, size in SMALL.items():
            (source / file).write_bytes(b"x" * size)
        patch.setattr(control, "directory", lambda _uid: name)
        patch.setattr(warmup, "ATTACH_S", 0.02)  # the modelled kernel has no page of what nobody reads
        log.addHandler(errors)
        with running(source, "arena", patch) as rig:
            for file in SMALL:
                rig.kernel.add(open_backing(f"/{file}", source / file))
            tree = SourceTree(str(source))
            operations = LlmcacheOperations(tree, rig.engine, rig.reader, WritePolicy())
            answer = Requests(rig.engine, Warmer(rig.engine, operations)).answer
            server = ControlServer(control.files(POINT), answer)
            try:
                _running.append(Service(directory, errors.texts))
                yield
            finally:
                _running.clear()
                server.close()
                log.removeHandler(errors)


@pytest.fixture(scope="module", autouse=True)
def _serving() -> Iterator[None]:
    with serving():
        yield


def shared() -> Service:
    """The service of this block."""
    (one,) = _running
    return one


def ask(line: bytes, ends: bool = True) -> list[bytes]:
    """Lines that are answered to `line`; `ends`: the client closes its half."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(control.files(POINT).socket)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the server may refuse before it has read all
            client.sendall(line)
            if ends:
                client.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError), client.makefile("rb") as answers:
            return answers.read().splitlines(keepends=True)
    return []


def is_well() -> None:
    """The service answers, with a budget that it can have, and has met nothing that it did not expect."""
    (line,) = ask(b'{"op": "stats"}\n')
    stats = json.loads(line)
    assert stats["schema"] == "llmcache.stats/1" and 0 <= stats["budget_bytes"] < 1 << 63
    assert not shared().errors, shared().errors


def check_line(line: bytes) -> None:
    """Any bytes on the socket: lines of progress, then one of an answer."""
    *progress, last = ask(line) or [b'{"error": ""}\n']
    assert all("progress" in json.loads(one) for one in progress)
    reply = json.loads(last)
    assert last.endswith(b"\n") and ("error" in reply or "schema" in reply)
    assert len(reply.get("error") or "") < 4096
    is_well()


def check_reply(answer: bytes) -> None:
    """Any bytes from a daemon: a reply, or a MountProblem; never more told than was sent."""
    told: list[dict[str, Any]] = []
    with bounded(), refusal(MountProblem), answering(answer):
        reply = control.request(POINT, {"op": "stats"}, timeout_s=120, on_progress=told.append)
        assert isinstance(reply, dict) and "error" not in reply and "progress" not in reply
    assert len(told) <= answer.count(b"\n")
    assert all(isinstance(progress, dict) for progress in told)


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[None]:
    """A with block in which a daemon answers the first request with these bytes, and ends."""
    path = shared().directory / "other.sock"
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as server, pytest.MonkeyPatch.context() as patch:
        other = control.files(POINT)
        other.socket = str(path)
        patch.setattr(control, "files", lambda *_: other)
        server.bind(str(path))
        server.listen(1)
        thread = threading.Thread(target=_answer_once, args=(server, answer))
        thread.start()
        try:
            yield
        finally:
            thread.join(120)


def _answer_once(server: socket.socket, answer: bytes) -> None:
    connection, _ = server.accept()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError), connection:
        connection.recv(1 << 16)
        connection.sendall(answer)


LINES = mutated([written(request) + b"\n" for request in REQUESTS]) | documents(REQUESTS, [*ODD, *GLOBS]).map(
    lambda one: written(one) + b"\n"
)
ANSWERS = documents(REPLIES).map(lambda one: written(one) + b"\n") | mutated([written(one) + b"\n" for one in REPLIES])
TARGET = Target("control-lines", LINES.filter(lambda line: b'"wait": true' not in line), check_line, serving)
CLIENT = Target("control-client", st.lists(ANSWERS, max_size=3).map(b"".join), check_reply, serving)


def test_the_seeds_are_answered() -> None:
    for request in REQUESTS:
        (*_, last) = ask(written(request) + b"\n")
        assert str(json.loads(last)["schema"]).startswith("llmcache.")
    is_well()


@given(TARGET.inputs)
@settings(max_examples=examples(120))
@example(b"")
@example(b"\n")
@example(b'{"op": "stats"}')
@example(b"[" * 200_000 + b"\n")
@example(b'{"op":' * 200_000 + b"\n")
@example(b"x" * (2 << 20))
@example(b"x" * (2 << 20) + b"\n")
@example(b'["stats"]\n')
@example(b'{"op": "resize", "cache_bytes": ' + b"9" * 5000 + b"}\n")
@example(b'{"op": "resize", "cache_bytes": 1' + b"0" * 400 + b"}\n")
@example(b'{"op": "resize", "cache_bytes": -1}\n')
@example(b'{"op": "evict", "globs": ["["]}\n')
@example(b'{"op": "warmup", "globs": ["\\ud800"]}\n')
@example(written({"op": "warmup", "globs": ["x" * 4000] * 5}) + b"\n")
def test_any_line(line: bytes) -> None:
    check_line(line)


@given(CLIENT.inputs)
@settings(max_examples=examples(120))
@example(b"")
@example(b"5\n")
@example(b"nonsense\n")
@example(b'{"budget_bytes": 1}')
@example(b"[" * 200_000 + b"\n")
@example(b'{"progress": 5}\n{}\n')
@example(b'{"error": ["x"]}\n')
@example(b'{"error": "x", "hint": 5, "exit_code": "y"}\n')
def test_any_reply(answer: bytes) -> None:
    check_reply(answer)
