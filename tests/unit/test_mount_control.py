"""The control socket: replies, errors with exit codes, progress, hostile files, and slow, silent or numerous clients."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import resource
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from llmcache.errors import MissingRequirement, MountProblem, UsageError
from llmcache.mount.client import control, mountpoint
from llmcache.mount.daemon import controlserver
from llmcache.procfs import mounts
from tests.mount.live import wait_for
from tools.bench.sides import environment

POINT = "/nowhere"
Tell = Callable[[dict[str, Any]], None]


@pytest.fixture
def point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a mount point whose control files are in the test's directory."""
    monkeypatch.setattr(control, "directory", lambda _uid: str(tmp_path))
    return POINT


def serve(point: str, answer: Callable[[dict[str, Any], Tell], dict[str, Any]]) -> controlserver.ControlServer:
    return controlserver.ControlServer(control.files(point), answer)


def test_progress_comes_before_the_reply(point: str) -> None:
    def answer(request: dict[str, Any], tell: Tell) -> dict[str, Any]:
        for number in range(3):
            tell({"done": number})
        return {"echo": request}

    progress: list[dict[str, Any]] = []
    server = serve(point, answer)
    reply = control.request(point, {"op": "x"}, on_progress=progress.append)
    assert reply == {"echo": {"op": "x"}}
    assert progress == [{"done": 0}, {"done": 1}, {"done": 2}]
    assert os.stat(control.files(point).socket).st_mode & 0o777 == 0o600
    server.close()


@pytest.mark.parametrize(("error", "code"), [(UsageError("no", "do"), 2), (MissingRequirement("no", "do"), 3)])
def test_an_error_keeps_its_exit_code_and_hint(point: str, error: Exception, code: int) -> None:
    with pytest.raises(control.NoDaemon):
        control.request(point, {"op": "x"})
    server = serve(point, Mock(side_effect=error))
    with pytest.raises(MountProblem, match="no") as caught:
        control.request(point, {"op": "x"})
    assert (caught.value.exit_code, caught.value.hint) == (code, "do")
    server.close()


def test_an_operation_ends_when_its_client_disconnects(point: str, caplog: pytest.LogCaptureFixture) -> None:
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
    assert [type(error) for error in ended] == [controlserver.ClientGone]
    assert not caplog.records  # Ctrl-C of a client is not an error


# Trust between users; only root can create files of other users

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make other users' files")
OTHER = 65534


@contextlib.contextmanager
def acting_as(uid: int) -> Iterator[None]:
    """Run the block as that user, so that its new files and sockets belong to the user."""
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Path]]:
    """Yield the control directories of root, of OTHER and of a third user, below a directory that all can reach."""
    with tempfile.TemporaryDirectory(prefix="llmcache-control-") as name:
        os.chmod(name, 0o755)
        made = {uid: Path(name) / str(uid) for uid in (0, OTHER, OTHER + 1)}
        for uid, path in made.items():
            path.mkdir(0o700)
            os.chown(path, uid, uid)
        monkeypatch.setattr(control, "directory", lambda uid: str(made[uid]))
        yield made


@needs_root
def test_the_info_file_of_a_user_cannot_name_a_process_of_another(places: dict[int, Path]) -> None:
    found = control.files("/nowhere", OTHER)
    with acting_as(OTHER):
        lock = controlserver.take_lock(found, "/nowhere")
        found.write_info({"pid": os.getpid()})
    for path in (found.info, found.lock):
        os.chown(path, 0, 0)
        assert control.daemon_pid("/nowhere", OTHER) is None
        os.chown(path, OTHER, OTHER)
    assert control.is_locked(found) and found.describe() == {"pid": os.getpid()}
    assert control.daemon_pid("/nowhere", OTHER) is None  # this process belongs to root
    with subprocess.Popen(["setpriv", f"--reuid={OTHER}", "--clear-groups", "sleep", "600"]) as theirs:
        wait_for(lambda: os.stat(f"/proc/{theirs.pid}").st_uid == OTHER, "it is another user's")
        Path(found.info).write_text(json.dumps({"pid": theirs.pid}))
        assert control.daemon_pid("/nowhere", OTHER) == theirs.pid
        theirs.kill()
    for pid in (10**400, -1, 0, 2**31, True, [1], "1"):
        Path(found.info).write_text(json.dumps({"pid": pid}))
        assert control.daemon_pid("/nowhere", OTHER) is None
    os.close(lock)


def test_a_concurrent_check_of_the_lock_is_not_taken_for_a_daemon(point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = control.files(point)
    os.close(controlserver.take_lock(found, point))
    looking: list[bool] = []
    plain = fcntl.flock

    def look_twice(fd: int, how: int) -> None:
        plain(fd, how)
        if not looking:
            looking.append(True)
            looking.append(control.is_locked(found))

    monkeypatch.setattr(fcntl, "flock", look_twice)
    assert not control.is_locked(found) and looking == [True, False]


def test_taking_the_lock_discards_the_info_of_a_dead_daemon(point: str) -> None:
    """Its pid may belong to another process, which `umount --force` would end."""
    found = control.files(point)
    found.write_info({"pid": os.getpid()})
    lock = controlserver.take_lock(found, point)
    assert control.is_locked(found) and control.daemon_pid(point) is None
    os.close(lock)


# Runs in its own pid namespace, where the next pid can be chosen: the daemon ends late and its pid is reused.
REUSED = """
import subprocess, sys
from llmcache.mount.client import control
from llmcache.mount.client import operation
from llmcache.mount.daemon import controlserver
control.directory = lambda _uid: sys.argv[1]
found, later = control.files("/nowhere"), []
lock = controlserver.take_lock(found, "/nowhere")
daemon = subprocess.Popen(["sleep", "600"])
found.write_info({"pid": daemon.pid})
def wait_until_gone(*_):
    if not later:
        daemon.kill()
        daemon.wait()
        with open("/proc/sys/kernel/ns_last_pid", "w") as last:
            last.write(str(daemon.pid - 1))
        later.append(subprocess.Popen(["sleep", "600"]))
    return False
control.wait_until_gone = wait_until_gone
ended = operation.leftover("/nowhere")
print(ended.pid == daemon.pid == later[0].pid, ended.killed, later[0].poll())
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="a pid namespace needs root and util-linux")
def test_umount_does_not_end_a_process_that_reuses_the_pid(tmp_path: Path) -> None:
    inside = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", REUSED, str(tmp_path)]
    done = subprocess.run(inside, capture_output=True, text=True, timeout=120, env=environment(), check=False)
    assert done.stdout == "True False None\n", done.stderr


def test_remove_left_spares_the_files_of_a_starting_daemon(point: str) -> None:
    found = control.files(point)
    lock = controlserver.take_lock(found, point)
    found.write_info({"pid": os.getpid()})
    control.remove_left(found)
    assert control.daemon_pid(point) == os.getpid()  # this daemon is running
    os.unlink(found.lock)
    newer = controlserver.take_lock(found, point)
    os.close(lock)
    found.write_info({"pid": os.getpid()})
    control.remove_left(found)
    assert control.daemon_pid(point) == os.getpid()
    os.close(newer)
    control.remove_left(found)
    assert not os.path.lexists(found.info) and not os.path.lexists(found.lock)
    found.write_info({})  # a daemon that has no lock yet
    control.remove_left(found)
    assert os.path.lexists(found.info)


def test_files_of_dead_daemons_and_old_logs_are_removed(tmp_path: Path, point: str) -> None:
    def left(point: str, number: int, **facts: Any) -> control.ControlFiles:
        found = control.files(point)
        found.write_info({"pid": 1 << 21, "mount": point, **facts})
        for path in (found.lock, found.socket, found.log):
            Path(path).touch(0o600)
        os.utime(found.log, (number, number))
        return found

    dead = [left(f"/dead/{number}", number) for number in range(mountpoint.KEPT_LOGS + 3)]
    root = next(mount for mount in mounts().values() if mount.point == "/proc")
    mounted = left("/proc", 0, inplace=root.id)  # a bind mount whose daemon has died
    serving = left(point, 0)
    rotated = Path(f"{dead[-1].log}.1")
    rotated.touch()
    other = tmp_path / "read-ahead-sda"
    other.touch()
    left_lock = Path(control.directory(os.geteuid())) / "source-fe00-1.lock"
    left_lock.touch()
    lock, source_locks = controlserver.take_lock(serving, point), controlserver.lock_source(str(tmp_path))
    held = [os.readlink(f"/proc/self/fd/{fd}") for fd in source_locks]
    try:
        mountpoint.remove_dead()
        assert not left_lock.exists() and all(map(os.path.exists, held))
    finally:
        os.close(lock)
        controlserver.unlock_source(source_locks)
    assert all(Path(path).exists() for path in (mounted.info, mounted.lock, mounted.log, serving.lock, serving.log, other))
    assert not any(Path(path).exists() for found in dead for path in (found.info, found.lock, found.socket))
    kept = [number for number, found in enumerate(dead) if Path(found.log).exists()]
    assert kept == list(range(4, len(dead))) and rotated.exists()


def test_no_daemon_starts_while_leftover_files_are_removed(point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = control.files(point)
    os.close(controlserver.take_lock(found, point))
    monkeypatch.setattr(controlserver, "ENDING_S", 0.0)
    begun: list[str] = []
    plain = control.ControlFiles.remove

    def remove(files: control.ControlFiles) -> None:
        try:
            os.close(controlserver.take_lock(files, point))
        except MountProblem as error:
            begun.append(error.message)
        plain(files)

    monkeypatch.setattr(control.ControlFiles, "remove", remove)
    control.remove_left(found)
    assert len(begun) == 1 and "already served" in begun[0]
    os.close(controlserver.take_lock(found, point))


# Ways to plant a file at the path of a daemon's directory or file, given the path of root's counterpart.
HOSTILE: dict[str, Callable[[str, str], object]] = {
    "a link to root's": os.symlink,
    "a link to nothing": lambda root, path: os.symlink(root + "-gone", path),
    "a hard link to root's": os.link,
    "root's, moved there": os.rename,
    "a third user's": lambda root, path: proper(path, OTHER + 1),
    "open to all": lambda root, path: os.chmod(proper(path, OTHER), 0o777),
    "a pipe": lambda root, path: os.mkfifo(path),
    "a device": lambda root, path: os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5)),  # /dev/zero: it never ends
    "a file": lambda root, path: os.mknod(path, 0o600 | stat.S_IFREG),
    "a directory": lambda root, path: os.mkdir(path, 0o700),
    "endless": lambda root, path: os.truncate(proper(path, OTHER), 1 << 40),
    "deep": lambda root, path: Path(proper(path, OTHER)).write_text("[" * 60_000),
}
PLANTED = [
    *(("directory", kind) for kind in HOSTILE if kind not in ("a hard link to root's", "a directory", "endless", "deep")),
    *(("socket", kind) for kind in HOSTILE if kind not in ("endless", "deep")),
    *(("lock", kind) for kind in HOSTILE if kind not in ("a file", "endless", "deep")),
    *(("info", kind) for kind in HOSTILE if kind != "a file"),
]


def proper(path: str, uid: int) -> str:
    """Create a valid directory or file of a daemon at `path`, owned by `uid`; return the path."""
    if path.endswith(".sock"):
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path)
    elif path.endswith((".lock", ".json")):
        Path(path).write_text(json.dumps({"pid": os.getpid()}))
    else:
        os.mkdir(path)
    os.chmod(path, 0o700)
    os.chown(path, uid, uid)
    return path


@needs_root
@pytest.mark.parametrize(("name", "kind"), PLANTED)
def test_files_planted_for_root_are_not_taken_for_a_daemon(places: dict[int, Path], name: str, kind: str) -> None:
    """Root queries, ends and cleans up a user's mount after the user planted a file at one of its names."""
    own, found = control.files("/nowhere"), control.files("/nowhere", OTHER)
    asked: list[dict[str, Any]] = []

    def answer(request: dict[str, Any], _tell: Tell) -> dict[str, Any]:
        asked.append(request)
        return {}

    server = controlserver.ControlServer(own, answer)
    lock = controlserver.take_lock(own, "/nowhere")
    own.write_info({"pid": os.getpid()})
    base = os.path.dirname(own.base)
    held = {entry.inode(): entry.name for entry in os.scandir(base)}
    if name == "directory":
        places[OTHER].rmdir()
        HOSTILE[kind](base, str(places[OTHER]))
    else:
        HOSTILE[kind](getattr(own, name), getattr(found, name))
    try:
        with pytest.raises(
            MountProblem, match="is not the daemon of the mount's user" if name in ("directory", "socket") else None
        ):
            control.request("/nowhere", {"op": "stop", "force": True}, uid=OTHER, timeout_s=60)
        assert control.daemon_pid("/nowhere", OTHER) is None and not control.is_locked(found) and not found.describe()
        control.remove_left(found)
        assert not asked
        here = Path(base) if os.path.isdir(base) else places[OTHER]  # the directory was moved
        left = {entry.inode(): entry.name for entry in os.scandir(here)}
        assert left == {inode: was for inode, was in held.items() if kind != "root's, moved there" or inode in left}
    finally:
        server.close()
        os.close(lock)


@needs_root
@pytest.mark.parametrize("name", ["socket", "lock", "info"])
@pytest.mark.parametrize("kind", [kind for kind in HOSTILE if kind not in ("endless", "deep", "root's, moved there")])
def test_a_daemon_does_not_write_through_planted_files(places: dict[int, Path], name: str, kind: str) -> None:
    """The directory may have been open to others earlier: files that they planted are replaced or refused."""
    found = control.files("/nowhere", OTHER)
    target = proper(control.files("/elsewhere").base + os.path.splitext(getattr(found, name))[1], 0)
    before = os.lstat(target)
    HOSTILE[kind](target, getattr(found, name))
    with acting_as(OTHER):
        try:
            lock = controlserver.take_lock(found, "/nowhere")
            with control.file_errors(found.info):
                found.write_info({"pid": os.getpid()})
            server = controlserver.ControlServer(found, lambda request, _tell: request)
        except MissingRequirement as error:
            refused = name == "lock" or kind == "a directory"
            assert (
                refused
                and getattr(found, name) in error.message
                and error.hint == "remove the file or directory of this name"
            )
        else:
            assert name != "lock"
            assert control.request("/nowhere", {"op": "x"}) == {"op": "x"}
            assert control.daemon_pid("/nowhere") == os.getpid()
            server.close()
            os.close(lock)
    assert os.path.samestat(os.lstat(target), before) and os.lstat(target).st_size == before.st_size


@needs_root
def test_a_daemon_answers_only_its_own_user_and_root(places: dict[int, Path]) -> None:
    found = control.files("/nowhere", OTHER)
    with acting_as(OTHER):
        server = controlserver.ControlServer(found, lambda request, _tell: {"asked": request["op"]})
    assert control.request("/nowhere", {"op": "x"}, uid=OTHER) == {"asked": "x"}
    places[OTHER].chmod(0o711)
    os.chmod(found.socket, 0o777)
    ask = """
import socket, sys
client = socket.socket(socket.AF_UNIX)
client.connect(sys.argv[1])
try:
    client.sendall(b'{"op": "x"}' + bytes([10]))
    print(client.recv(100))
except (BrokenPipeError, ConnectionResetError):
    print(b"")
"""
    python = str(shutil.which("python3", path="/usr/bin:/bin"))  # the test's Python may be unreachable for a third user
    third = ["setpriv", f"--reuid={OTHER + 1}", "--clear-groups", python, "-c", ask, found.socket]
    assert subprocess.run(third, capture_output=True, text=True, timeout=120).stdout == "b''\n"
    places[OTHER].chmod(0o700)
    with acting_as(OTHER + 1), pytest.raises(MountProblem, match="belongs to another user"):
        control.request("/nowhere", {"op": "x"}, uid=OTHER)
    server.close()
    server = controlserver.ControlServer(found, lambda request, _tell: {"asked": request["op"]})
    os.chown(found.socket, OTHER, OTHER)  # but root is listening
    with pytest.raises(MountProblem, match="is not the daemon of the mount's user"):
        control.request("/nowhere", {"op": "x"}, uid=OTHER)
    server.close()


@needs_root
@pytest.mark.parametrize("kind", ["another user's", "a link", "a file"])
def test_a_foreign_control_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    path = tmp_path / "llmcache"
    if kind == "a link":
        path.symlink_to(tmp_path)
    elif kind == "a file":
        path.touch()
    else:
        path.mkdir()
        os.chown(path, OTHER, OTHER)
    for where, said in ((str(path), "not a directory of this user"), ("/proc/nowhere", "cannot create")):
        monkeypatch.setattr(control, "directory", lambda _uid, where=where: where)
        with pytest.raises(MissingRequirement, match=said):
            control.make_directory()


QUEUE = 16
Asked = list[dict[str, Any]]


@pytest.fixture
def asked(point: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    """A server that records its requests and echoes them."""
    monkeypatch.setattr(controlserver, "REQUEST_S", 240.0)
    for module in (control, controlserver):
        monkeypatch.setattr(module, "RETRY_S", 0.01)
    seen: Asked = []

    def answer(request: dict[str, Any], _tell: Any) -> dict[str, Any]:
        seen.append(request)
        return {"asked": request}

    server = serve(point, answer)
    yield seen
    server.close()


@pytest.fixture
def hurried(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The same server, with a short deadline for a request."""
    monkeypatch.setattr(controlserver, "REQUEST_S", 2.0)
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


def test_a_control_directory_on_a_read_only_file_system_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, mode: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr(control, "directory", lambda uid: str(tmp_path))
    monkeypatch.setattr(os, "chmod", refuse)
    with pytest.raises(MissingRequirement, match=r"cannot create .*: Read-only file system"):
        control.make_directory()


@pytest.mark.parametrize("sent", [b'{"op": "stop"}', b'{"op": "stop", "force": tru', b'{"op": "st'])
def test_an_incomplete_line_is_not_executed(asked: Asked, sent: bytes) -> None:
    with connected() as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        assert "does not end" in answered(client)["error"]
    assert not asked and is_served()


def test_a_line_in_many_pieces_is_one_request(asked: Asked) -> None:
    with connected() as client:
        for byte in b'{"op": "y"}\n':
            client.sendall(bytes([byte]))
        assert answered(client) == {"asked": {"op": "y"}}
    assert asked == [{"op": "y"}]


def test_a_slow_client_is_disconnected(hurried: Asked) -> None:
    """The deadline holds for the whole line, not from byte to byte."""
    with connected() as client, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while True:
            client.sendall(b" ")
            threading.Event().wait(0.01)
    assert not hurried and is_served()


def test_clients_beyond_the_limit_wait_and_are_served(hurried: Asked) -> None:
    """They wait, even if the queue is full too, until silent clients are disconnected."""
    with contextlib.ExitStack() as stack:
        before = threading.active_count()
        for _ in range(controlserver._MOST_CONNECTIONS + QUEUE):
            stack.enter_context(connected())
        assert is_served()
        assert threading.active_count() <= before + controlserver._MOST_CONNECTIONS
    assert len(hurried) == 1


def test_the_server_recovers_from_a_lack_of_descriptors(asked: Asked) -> None:
    """A daemon without free descriptors serves again as soon as it has some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX) as idle, socket.socket(socket.AF_UNIX) as client:
        taken = [os.open("/dev/null", os.O_RDONLY)]
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken[0] + 1, client.fileno() + 1), hard))
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open("/dev/null", os.O_RDONLY))
            for one in (idle, client):  # a waiting server has a descriptor reserved for the first
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


def test_only_one_daemon_steers_a_source_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SOURCE above or below that of another daemon is refused too."""
    monkeypatch.setattr(control, "directory", lambda _uid: str(tmp_path))
    monkeypatch.setattr(controlserver, "SOURCE_ENDING_S", 0.0)
    (tmp_path / "models" / "a" / "below").mkdir(parents=True)
    (tmp_path / "models" / "b").mkdir()
    one, other = (controlserver.lock_source(str(tmp_path / "models" / name)) for name in ("a", "b"))
    for overlapping in ("models", "models/a", "models/a/below"):
        with pytest.raises(MountProblem, match="already steered in place"):
            controlserver.lock_source(str(tmp_path / overlapping))
    controlserver.unlock_source(one)
    controlserver.unlock_source(other)
    above = controlserver.lock_source(str(tmp_path / "models"))
    with pytest.raises(MountProblem):
        controlserver.lock_source(str(tmp_path / "models" / "b"))
    controlserver.unlock_source(above)
    assert not list(tmp_path.glob("*.lock")), "no lock files remain"
