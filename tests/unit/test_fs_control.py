"""The control socket: replies, refusals with their exit codes, progress, and clients that go away."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmcache.errors import EnvironmentProblem, MountProblem, UsageError
from llmcache.fs import control
from tests.mount.live import wait_for

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
        assert begun.wait(120)
    assert over.wait(120)
    server.close()
    assert [type(error) for error in ended] == [control.ClientGone]
    assert not caplog.records  # Ctrl-C is nobody's fault


def test_without_a_daemon(point: str) -> None:
    with pytest.raises(control.NoDaemon):
        control.request(point, {"op": "stats"})


# Who is trusted (only root can put files of other users where they do not belong)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make other users' files")
OTHER = 65534


def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int) -> control.Files:
    """Files of OTHER's mount, in a directory of `owner`."""
    directory = tmp_path / "llmcache-other"
    directory.mkdir()
    os.chown(directory, owner, owner)
    monkeypatch.setattr(control, "directory", lambda _uid: str(directory))
    return control.files("/nowhere", OTHER)


@needs_root
def test_a_users_files_name_no_process_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = planted(tmp_path, monkeypatch, OTHER)
    found.tell({"pid": os.getpid()})
    lock = control.take_lock(found, "/nowhere")
    for path in (found.info, found.lock):
        assert control.daemon_pid("/nowhere", OTHER) is None  # the files are root's, then the process is
        os.chown(path, OTHER, OTHER)
    assert control.is_locked(found) and found.describe() == {"pid": os.getpid()}
    assert control.daemon_pid("/nowhere", OTHER) is None
    with subprocess.Popen(["setpriv", f"--reuid={OTHER}", "--clear-groups", "sleep", "600"]) as theirs:
        wait_for(lambda: os.stat(f"/proc/{theirs.pid}").st_uid == OTHER, "it is another user's")
        Path(found.info).write_text(json.dumps({"pid": theirs.pid}))
        assert control.daemon_pid("/nowhere", OTHER) == theirs.pid
        theirs.kill()
    os.close(lock)


def test_who_looks_at_the_lock_at_the_same_time_is_no_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "directory", lambda _uid: str(tmp_path))
    found = control.files("/nowhere")
    os.close(control.take_lock(found, "/nowhere"))
    looking: list[bool] = []
    plain = fcntl.flock

    def look_twice(fd: int, how: int) -> None:
        plain(fd, how)
        if not looking:
            looking.append(True)
            looking.append(control.is_locked(found))

    monkeypatch.setattr(fcntl, "flock", look_twice)
    assert not control.is_locked(found) and looking == [True, False]


@needs_root
def test_links_and_pipes_in_place_of_files_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = planted(tmp_path, monkeypatch, OTHER)
    target = tmp_path / "target"
    target.write_text('{"pid": 1}')
    os.chown(target, OTHER, OTHER)
    for path in (found.info, found.lock):
        os.symlink(target, path)
    assert found.describe() == {} and not control.is_locked(found)
    found.remove()
    assert not os.path.lexists(found.info) and target.exists()
    for path in (found.info, found.lock):  # neither hangs
        os.mkfifo(path)
        os.chown(path, OTHER, OTHER)
    assert found.describe() == {} and not control.is_locked(found)


@needs_root
def test_nothing_is_removed_in_somebody_elses_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = planted(tmp_path, monkeypatch, OTHER + 1)
    Path(found.info).touch()
    found.remove()
    assert os.path.exists(found.info)


@needs_root
def test_a_socket_of_somebody_else_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(tmp_path, monkeypatch, OTHER)
    server = serve("/nowhere", lambda _request, _tell: {"believed": True})
    assert control.request("/nowhere", {"op": "x"}, uid=OTHER) == {"believed": True}  # root's, who may
    monkeypatch.setattr(control, "_peer", lambda _connection: OTHER + 1)
    with pytest.raises(MountProblem, match="not the daemon of its user"):
        control.request("/nowhere", {"op": "x"}, uid=OTHER)
    monkeypatch.setattr(control, "_peer", lambda connection: OTHER + 1 if threading.current_thread().daemon else OTHER)
    with pytest.raises(control.NoDaemon):  # the daemon does not answer another user
        control.request("/nowhere", {"op": "x"}, uid=OTHER)
    server.close()


@needs_root
@pytest.mark.parametrize("kind", ["another user's", "a link", "a file"])
def test_a_directory_that_is_not_ones_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    path = tmp_path / "llmcache"
    if kind == "a link":
        (tmp_path / "elsewhere").mkdir()
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "a file":
        path.touch()
    else:
        path.mkdir()
        os.chown(path, OTHER, OTHER)
    monkeypatch.setattr(control, "directory", lambda _uid: str(path))
    with pytest.raises(EnvironmentProblem, match="not a directory of this user"):
        control.make_directory()
    monkeypatch.setattr(control, "directory", lambda _uid: "/proc/nowhere")
    with pytest.raises(EnvironmentProblem, match="cannot be made"):
        control.make_directory()
