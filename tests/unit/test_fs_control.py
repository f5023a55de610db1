"""The control socket: replies, refusals with their exit codes, progress, and clients that go away."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmcache.errors import EnvironmentProblem, MountProblem, UsageError
from llmcache.fs import control

Tell = Callable[[dict[str, Any]], None]


@pytest.fixture
def point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A mount point whose files lie in the test's directory."""
    monkeypatch.setattr(control, "directory", lambda _uid: str(tmp_path))
    return "/nowhere"


def serve(point: str, answer: Callable[[dict[str, Any], Tell], dict[str, Any]]) -> control.ControlServer:
    return control.ControlServer(control.files(point), answer)


def test_progress_comes_before_the_reply(point: str) -> None:
    def answer(request: dict[str, Any], tell: Tell) -> dict[str, Any]:
        for number in range(3):
            tell({"done": number})
        return {"echo": request}

    told: list[dict[str, Any]] = []
    server = serve(point, answer)
    reply = control.request(point, {"op": "x"}, on_progress=told.append)
    assert reply == {"echo": {"op": "x"}}
    assert told == [{"done": 0}, {"done": 1}, {"done": 2}]
    assert os.stat(control.files(point).socket).st_mode & 0o777 == 0o600
    server.close()


@pytest.mark.parametrize(("error", "code"), [(UsageError("no", "do"), 2), (EnvironmentProblem("no", "do"), 3)])
def test_a_refusal_keeps_its_exit_code_and_hint(point: str, error: Exception, code: int) -> None:
    def refuse(_request: dict[str, Any], _tell: Tell) -> dict[str, Any]:
        raise error

    server = serve(point, refuse)
    with pytest.raises(MountProblem, match="no") as caught:
        control.request(point, {"op": "x"})
    assert (caught.value.exit_code, caught.value.hint) == (code, "do")
    server.close()


def test_an_operation_ends_when_its_client_has_gone(point: str, caplog: pytest.LogCaptureFixture) -> None:
    ended: list[BaseException] = []
    begun, over = threading.Event(), threading.Event()

    def answer(_request: dict[str, Any], tell: Tell) -> dict[str, Any]:
        begun.set()
        try:
            while not over.wait(0.01):
                tell({})
        except BaseException as error:
            ended.append(error)
            over.set()
            raise
        return {}

    server = serve(point, answer)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(control.files(point).socket)
        client.sendall(b'{"op": "x"}\n')
        assert begun.wait(10)
    assert over.wait(10)
    server.close()
    assert [type(error) for error in ended] == [control.ClientGone]
    assert not caplog.records  # Ctrl-C is nobody's fault


def test_without_a_daemon(point: str) -> None:
    with pytest.raises(control.NoDaemon):
        control.request(point, {"op": "stats"})
