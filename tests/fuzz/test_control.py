"""Fuzz target: the control socket. Arbitrary request lines for the daemon, and arbitrary replies for clients."""

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
from llmcache.mount.client import control
from llmcache.mount.daemon.controlserver import ControlServer, Requests
from llmcache.mount.engine import warmup
from llmcache.mount.engine.warmup import Warmup
from llmcache.mount.source.tree import SourceTree, WritePolicy
from llmcache.mount.vfs.operations import LlmcacheOperations
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
    """A server with a real engine over real files, and the errors that either logged."""

    directory: Path
    errors: list[str]


class _Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


_running: list[Service] = []


@contextlib.contextmanager
def serving() -> Iterator[None]:
    """Run a service that receives all inputs; its kernel is a model."""
    errors, log = _Errors(), logging.getLogger("llmcache")
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        directory = Path(name)
        source = directory / "source"
        source.mkdir()
        for file, size in SMALL.items():
            (source / file).write_bytes(b"x" * size)
        patch.setattr(control, "directory", lambda _uid: name)
        patch.setattr(warmup, "ATTACH_S", 0.02)  # the modeled kernel has no pages of unread files
        log.addHandler(errors)
        with running(source, "arena", patch) as rig:
            for file in SMALL:
                rig.kernel.add(open_backing(f"/{file}", source / file))
            tree = SourceTree(str(source))
            operations = LlmcacheOperations(tree, rig.engine, rig.reader, WritePolicy())
            answer = Requests(rig.engine, Warmup(rig.engine, operations)).answer
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
    (service,) = _running
    return service


def ask(line: bytes, ends: bool = True) -> list[bytes]:
    """Return the lines of the reply to `line`; `ends`: the client closes its sending side."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(control.files(POINT).socket)
        # the server may refuse a line before it has read all of it
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            client.sendall(line)
            if ends:
                client.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError), client.makefile("rb") as answers:
            return answers.read().splitlines(keepends=True)
    return []


def is_well() -> None:
    """Check that the service answers, with a possible budget, and has logged no unexpected error."""
    (line,) = ask(b'{"op": "stats"}\n')
    stats = json.loads(line)
    assert stats["schema"] == "llmcache.stats/1" and 0 <= stats["budget_bytes"] < 1 << 63
    assert not shared().errors, shared().errors


def check_line(line: bytes) -> None:
    """For any bytes, the server sends lines of progress and then one reply."""
    *progress, last = ask(line) or [b'{"error": ""}\n']
    assert all("progress" in json.loads(line) for line in progress)
    reply = json.loads(last)
    assert last.endswith(b"\n") and ("error" in reply or "schema" in reply)
    assert len(reply.get("error") or "") < 4096
    is_well()


def check_reply(answer: bytes) -> None:
    """For any bytes from a daemon, the client returns a reply or raises MountProblem, with plausible progress."""
    progress_reports: list[dict[str, Any]] = []
    with bounded(), refusal(MountProblem), answering(answer):
        reply = control.request(POINT, {"op": "stats"}, timeout_s=120, on_progress=progress_reports.append)
        assert isinstance(reply, dict) and "error" not in reply and "progress" not in reply
    assert len(progress_reports) <= answer.count(b"\n")
    assert all(isinstance(progress, dict) for progress in progress_reports)


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[None]:
    """Run a daemon that answers the first request with these bytes and ends."""
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
    lambda request: written(request) + b"\n"
)
ANSWERS = documents(REPLIES).map(lambda reply: written(reply) + b"\n") | mutated(
    [written(reply) + b"\n" for reply in REPLIES]
)
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
