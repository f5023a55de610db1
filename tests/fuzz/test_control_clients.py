"""Clients that a control socket must survive: slow ones, half lines, too many at a time, and no descriptors left."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmcache.fs.client import control
from llmcache.fs.daemon import controlserver

POINT = "/nowhere"
QUEUE = 16
Asked = list[dict[str, Any]]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    """A server that notes what it is asked, and answers so."""
    monkeypatch.setattr(control, "directory", lambda _uid: str(tmp_path))
    monkeypatch.setattr(controlserver, "_REQUEST_S", 240.0)
    for module in (control, controlserver):
        monkeypatch.setattr(module, "_RETRY_S", 0.01)
    seen: Asked = []

    def answer(request: dict[str, Any], _tell: Any) -> dict[str, Any]:
        seen.append(request)
        return {"asked": request}

    server = controlserver.ControlServer(control.files(POINT), answer)
    yield seen
    server.close()


@pytest.fixture
def hurried(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The same, but a client may take little time to ask: what a machine does not stand still for."""
    monkeypatch.setattr(controlserver, "_REQUEST_S", 2.0)
    return asked


def connected() -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.connect(control.files(POINT).socket)  # blocks while the queue is full
    client.settimeout(120)
    return client


def answered(client: socket.socket) -> dict[str, Any]:
    with client.makefile("rb") as lines:
        return dict(json.loads(lines.readline() or b"{}"))


def is_served() -> bool:
    return control.request(POINT, {"op": "x"}, timeout_s=120) == {"asked": {"op": "x"}}


@pytest.mark.parametrize("sent", [b'{"op": "stop"}', b'{"op": "stop", "force": tru', b'{"op": "st'])
def test_half_a_line_asks_for_nothing(asked: Asked, sent: bytes) -> None:
    with connected() as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        assert "does not end" in answered(client)["error"]
    assert not asked and is_served()


def test_a_line_in_many_pieces_is_one(asked: Asked) -> None:
    with connected() as client:
        for byte in b'{"op": "y"}\n':
            client.sendall(bytes([byte]))
        assert answered(client) == {"asked": {"op": "y"}}
    assert asked == [{"op": "y"}]


def test_a_client_that_dawdles_is_let_go(hurried: Asked) -> None:
    """However often it sends a byte: its time is for the line, not from byte to byte."""
    with connected() as client, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while True:
            client.sendall(b" ")
            threading.Event().wait(0.01)
    assert not hurried and is_served()


def test_more_clients_than_places(hurried: Asked) -> None:
    """The others wait, be the queue full as well, until those that say nothing were let go; they are served then."""
    with contextlib.ExitStack() as stack:
        before = threading.active_count()
        for _ in range(controlserver._MOST_CONNECTIONS + QUEUE):
            stack.enter_context(connected())
        assert is_served()
        assert threading.active_count() <= before + controlserver._MOST_CONNECTIONS
    assert len(hurried) == 1


def test_without_descriptors_for_a_while(asked: Asked) -> None:
    """A daemon that has none left goes on serving when it has some again: it used to be deaf from then on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX) as idle, socket.socket(socket.AF_UNIX) as client:
        taken = [os.open("/dev/null", os.O_RDONLY)]
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken[0] + 1, client.fileno() + 1), hard))
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open("/dev/null", os.O_RDONLY))
            for one in (idle, client):  # a server that waits has a descriptor for the first
                one.connect(control.files(POINT).socket)
            client.sendall(b'{"op": "z"}\n')
            threading.Event().wait(0.1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for fd in taken:
                os.close(fd)
        client.settimeout(120)
        assert answered(client) == {"asked": {"op": "z"}}
    assert is_served() and asked[0] == {"op": "z"}
