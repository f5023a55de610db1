"""Mounting and unmounting: over SOURCE itself, twice, while busy, by signals, after kill -9, and as an ordinary user."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import importlib.util
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from llmcache.errors import MountProblem
from llmcache.mount.backends.sentinel import is_dead
from llmcache.mount.client import control, mountpoint
from llmcache.mount.client.mountpoint import ask
from llmcache.mount.client.operation import end_mount
from llmcache.procfs import mounts
from tests.mount.conftest import Mounted, Mounter
from tests.mount.live import llmcache, run_json, wait_for
from tests.mount.test_posix_read import fails_with
from tools.bench.sides import environment


def gone(mounted: Mounted) -> bool:
    return mountpoint.find(str(mounted.point)) is None and not control.is_locked(mounted.files)


@pytest.fixture
def reading(mount: Mounter) -> Mounted:
    """A mount of one test, for it to unmount."""
    return mount()


def test_a_mount_ends_and_begins_again(mount: Mounter, tmp_path: Path) -> None:
    """The directory is not empty, contains SOURCE, has a name with odd characters, and is unmounted by a link to it."""
    point, link = tmp_path / "a b\\c,d=é\t", tmp_path / "link"
    source = point / "real"
    source.mkdir(parents=True)
    (source / "f").write_text("x")
    link.symlink_to(point)
    for _ in range(3):
        mounted = mount(source=source, point=point)
        assert os.listdir(point) == ["f"] and (point / "f").read_text() == "x"
        result = llmcache("umount", link)
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
        assert gone(mounted)
        assert not os.path.exists(mounted.files.socket)
    assert (source / "f").read_text() == "x"


def test_a_daemon_is_detached_from_its_caller_and_the_only_one(reading: Mounted) -> None:
    # llmcache() captures the output of the command, and would wait for a daemon that kept a pipe open
    for number in (0, 1, 2):
        assert os.readlink(f"/proc/{reading.pid}/fd/{number}") in (os.devnull, reading.files.log)
    assert os.getsid(reading.pid) == reading.pid
    words = [" ".join(child.cmdline()) for child in psutil.Process(reading.pid).children()]
    assert any("sentinel.py" in command for command in words), words
    second = llmcache("mount", reading.source, reading.point)
    assert second.returncode == 4 and f"already served by pid {reading.pid}" in second.stderr
    assert "hint: unmount it first: llmcache umount" in second.stderr
    samples = llmcache("stats", "--json", reading.point, "100ms", "2").stdout.splitlines()
    assert [json.loads(line)["mode"] for line in samples] == ["steer"] * 2


def test_mount_over_its_source(mount: Mounter, tmp_path: Path) -> None:
    place = tmp_path / "models"
    (place / "sub").mkdir(parents=True)
    (place / "sub" / "f").write_text("inside")
    mounted = mount(source=place, point=place)
    assert (place / "sub" / "f").read_text() == "inside"
    (place / "new.kv").write_text("written")
    result = llmcache("umount", place)
    assert result.returncode == 0, result.stderr
    assert gone(mounted)
    assert (place / "new.kv").read_text() == "written"


def test_one_of_four_simultaneous_daemons_serves(mount: Mounter) -> None:
    mounted = mount.place()
    command = [sys.executable, "-m", "llmcache", "mount", str(mounted.source), str(mounted.point), "--cache", "32Mi"]
    running = [subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) for _ in range(4)]
    codes = sorted((process.communicate(timeout=120), process.returncode)[1] for process in running)
    assert codes == [0, 4, 4, 4]
    assert sum(entry.point == str(mounted.point) for entry in mounts().values()) == 1


def test_umount_of_a_busy_mount_names_its_users(reading: Mounted) -> None:
    (reading.source / "f").write_text("x" * 10_000)
    uses = {
        "open file": "f = open(sys.argv[1] + '/f')",
        "working directory": "os.chdir(sys.argv[1])",
        "mapped file": "f = open(sys.argv[1] + '/f'); m = mmap.mmap(f.fileno(), 0, prot=1); f.close()",
    }
    for how, code in uses.items():
        words = [sys.executable, "-c", f"import mmap, os, sys\n{code}\nprint(flush=True)\ninput()", str(reading.point)]
        user = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert user.stdout is not None
        user.stdout.readline()
        result = llmcache("umount", reading.point)
        assert result.returncode == 4
        assert f"pid {user.pid}" in result.stderr, result.stderr
        if how != "mapped file":
            assert how in result.stderr
        assert "--force" in result.stderr
        assert (reading.point / "f").read_text() == "x" * 10_000, "it continues to serve"
        user.communicate(b"\n", timeout=120)
    assert llmcache("umount", reading.point).returncode == 0


def test_busy_and_forced(reading: Mounted) -> None:
    (reading.source / "f").write_text("x")
    pid = reading.pid
    with (reading.point / "f").open("rb", buffering=0) as file:
        assert file.read(1) == b"x"
        result = llmcache("umount", "--force", reading.point)
        assert result.returncode == 0, result.stderr
        assert gone(reading)
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        fails_with(errno.ENOTCONN, os.fstat, file.fileno())


def accepts_signal(pid: int, thread: int, number: int) -> bool:
    """Return whether the kernel may deliver the signal to a thread; libfuse's threads block it."""
    status = Path(f"/proc/{pid}/task/{thread}/status").read_text()
    (blocked,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigBlk:"))
    return not int(blocked, 16) >> (number - 1) & 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("which", [0, -1], ids=["main thread", "another thread"])
def test_signals_end_the_daemon_cleanly(reading: Mounted, number: int, which: int) -> None:
    pid = reading.pid
    threads = sorted(thread for thread in map(int, os.listdir(f"/proc/{pid}/task")) if accepts_signal(pid, thread, number))
    assert ctypes.CDLL(None).tgkill(pid, threads[which], number) == 0
    assert control.wait_until_gone(reading.files, 120)
    assert gone(reading)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_foreground(mount: Mounter, number: int) -> None:
    own = mount.place()
    words = [sys.executable, "-m", "llmcache", "mount", str(own.source), str(own.point), "-f"]
    daemon = subprocess.Popen(
        [*words, "--cache", "32Mi", "--mode", "arena", "--json"],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert daemon.stdout is not None
    document = json.loads(daemon.stdout.readline())
    assert (document["pid"], document["log"]) == (daemon.pid, None)
    assert os.listdir(own.point) == []
    daemon.send_signal(number)
    assert daemon.wait(120) == 0
    assert gone(own)


@pytest.mark.parametrize("mode", ["arena", "inplace"])
def test_a_foreground_mount_without_a_working_stdout_ends(mount: Mounter, mode: str) -> None:
    own = mount.place()
    words = ["mount", own.source, own.point, "-f", "--cache", "32Mi", "--mode", mode]
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "llmcache", *map(str, words)]
        assert subprocess.run(command, env=environment(), stdout=full, timeout=120, check=False).returncode == 3
    assert gone(own)


def test_a_daemon_that_starts_too_slowly_ends(mount: Mounter) -> None:
    own = mount.place()
    words = ["mount", str(own.source), str(own.point), "--cache", "32Mi", "--mode", "arena"]
    impatient = "from llmcache import cli; from llmcache.mount.daemon import daemon; daemon.START_S = 0.0; "
    command = [sys.executable, "-c", f"{impatient}cli.run(cli.app, 'llmcache', {words})"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 4 and "does not serve after 0 s" in done.stderr
    pid = int(done.stderr.partition("(pid ")[2].partition(")")[0])
    wait_for(lambda: is_dead(pid), "the daemon has ended")
    assert gone(own)


def test_external_umount_ends_the_daemon(reading: Mounted) -> None:
    subprocess.run(["umount", str(reading.point)], check=True, timeout=120)
    assert control.wait_until_gone(reading.files, 120)
    assert not os.path.exists(reading.files.socket)


def test_a_dead_mount_after_kill_9(reading: Mounted) -> None:
    (reading.source / "f").write_text("x")
    assert (reading.point / "f").read_text() == "x"
    os.kill(reading.pid, signal.SIGKILL)
    assert control.wait_until_gone(reading.files, 120)
    wait_for(lambda: mountpoint.answers(str(reading.point)) == errno.ENOTCONN, "the kernel has ended the connection")
    fails_with(errno.ENOTCONN, os.listdir, reading.point)
    for words in (("mount", reading.source, reading.point), ("umount", reading.point), ("stats", reading.point)):
        result = llmcache(*words)
        assert result.returncode == 4, words
        assert "is a dead mount" in result.stderr
        assert f"llmcache umount --force {reading.point}" in result.stderr
    assert llmcache("umount", "--force", reading.point).returncode == 0
    assert gone(reading)
    assert os.listdir(reading.point) == []
    assert llmcache("mount", reading.source, reading.point, "--cache", "32Mi").returncode == 0
    assert (reading.point / "f").read_text() == "x"


def test_stats_ends_normally_by_ctrl_c(reading: Mounted) -> None:
    command = [sys.executable, "-m", "llmcache", "stats", str(reading.point), "0.1"]
    running = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None
    running.stdout.readline()
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=120)
    assert (running.returncode, errors) == (0, "")


# An ordinary user


NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
PACKAGES = ("llmcache", "click", "rich", "pygments", "markdown_it", "mdurl", "mfusepy")


def python_for_nobody() -> str:
    """Return an interpreter that uid 65534 may run: ours, or the system's if ours is in a private home."""
    for python in (sys.executable, "/usr/bin/python3"):
        # setpriv itself can still run an interpreter below /root, but its children cannot.
        if subprocess.run([*NOBODY, "sh", "-c", '"$0" -c ""', python], check=False, timeout=120).returncode == 0:
            return python
    pytest.skip(f"an ordinary user can run neither {sys.executable} nor /usr/bin/python3")


def copy_packages(target: Path) -> None:
    """Copy the packages that the commands import (all pure Python) to where every user can read them."""
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        origin = Path(spec.origin)
        if origin.name == "__init__.py":
            shutil.copytree(origin.parent, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(origin, target)


def as_nobody(place: Path, *words: str | Path, path: str | None = None) -> subprocess.CompletedProcess[str]:
    more = {"HOME": "/nonexistent", "XDG_RUNTIME_DIR": "", "PATH": path or os.environ["PATH"]}
    return subprocess.run(
        [str(shutil.which(NOBODY[0])), *NOBODY[1:], python_for_nobody(), "-m", "llmcache", *map(str, words)],
        env={**environment(), **more, "PYTHONPATH": str(place / "lib")}, cwd=place,
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip


@pytest.fixture
def users_place() -> Iterator[Path]:
    """A directory that uid 65534 owns and can reach; /dev/fuse is open to all, as udev leaves it."""
    if os.geteuid() != 0 or shutil.which(NOBODY[0]) is None:
        pytest.skip("only root with setpriv can try what an ordinary user can do")
    place = Path(tempfile.mkdtemp(prefix="llmcache-user-"))
    for directory in (place / "source", place / "mnt", place):
        directory.mkdir(exist_ok=True)
        os.chown(directory, 65534, 65534)
    (place / "lib").mkdir()
    copy_packages(place / "lib")
    # Lock the device: another worker's test would restore its permissions at its end.
    device = os.open("/dev/fuse", os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(device, fcntl.LOCK_EX)
    bits = stat.S_IMODE(os.fstat(device).st_mode)
    os.fchmod(device, 0o666)
    try:
        yield place
    finally:
        os.fchmod(device, bits)
        os.close(device)
        if mountpoint.find(str(place / "mnt")) is not None:
            llmcache("umount", "--force", place / "mnt")
        shutil.rmtree(place)


def test_ordinary_user(users_place: Path) -> None:
    source, point = users_place / "source", users_place / "mnt"
    (source / "f").write_text("x" * 100_000)
    result = as_nobody(users_place, "mount", source, point, "--cache", "32Mi", "--mode", "arena")
    assert result.returncode == 0, result.stderr
    entry = mountpoint.find(str(point))
    assert entry is not None
    assert entry.owner == 65534
    code = f"print(len(open({str(point / 'f')!r}).read())); open({str(point / 'a.kv')!r}, 'w').write('w')"
    command = [*NOBODY, python_for_nobody(), "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "100000", done.stderr
    assert (source / "a.kv").read_text() == "w"
    assert run_json("stats", point)["mode"] == "arena", "root finds a user's daemon"
    assert json.loads(as_nobody(users_place, "stats", "--json", point).stdout)["mode"] == "arena"
    result = as_nobody(users_place, "umount", point)
    assert result.returncode == 0, result.stderr
    assert mountpoint.find(str(point)) is None


def test_ordinary_user_after_kill_9(users_place: Path) -> None:
    source, point = users_place / "source", users_place / "mnt"
    assert as_nobody(users_place, "mount", source, point, "--cache", "32Mi", "--mode", "arena").returncode == 0
    with control.daemon(str(point), 65534) as process:
        assert process is not None and process.signal(signal.SIGKILL)
        assert control.wait_until_gone(control.files(str(point), 65534), 120, process)
    assert "is a dead mount" in as_nobody(users_place, "umount", point).stderr
    result = as_nobody(users_place, "umount", "--force", point)
    assert result.returncode == 0, result.stderr
    assert mountpoint.find(str(point)) is None


def test_user_without_fusermount(users_place: Path) -> None:
    result = as_nobody(
        users_place, "mount", users_place / "source", users_place / "mnt", "--mode", "arena", path="/nonexistent"
    )
    assert result.returncode == 3
    assert "fusermount3 is not installed" in result.stderr
    assert "apt install fuse3" in result.stderr


def test_a_user_cannot_mount_on_a_directory_of_root(users_place: Path) -> None:
    os.chown(users_place / "mnt", 0, 0)
    result = as_nobody(
        users_place, "mount", users_place / "source", users_place / "mnt", "--cache", "32Mi", "--mode", "arena"
    )
    assert result.returncode == 4
    assert "cannot mount on" in result.stderr


def test_a_link_in_place_of_the_socket_is_not_followed(mount: Mounter, tmp_path: Path) -> None:
    first, second = mount(point=tmp_path / "first"), mount(point=tmp_path / "second")
    os.unlink(first.files.socket)
    os.symlink(second.files.socket, first.files.socket)
    pid = first.pid
    for call in (
        lambda: ask(str(first.point), {"op": "resize", "cache_bytes": 40 << 20}),
        lambda: end_mount(str(first.point), force=False),
    ):
        with pytest.raises(MountProblem, match="is not the daemon of the mount's user"):
            call()
    ended = end_mount(str(first.point), force=True)
    assert ended.pid == pid and mountpoint.find(str(first.point)) is None and not control.is_locked(first.files)
    assert not any(os.path.lexists(path) for path in (first.files.socket, first.files.info, first.files.lock))
    assert ask(str(second.point), {"op": "stats"})["budget_bytes"] == 32 << 20


def test_a_mount_ends_while_another_continues(mount: Mounter, tmp_path: Path) -> None:
    """A pin helper that starts later has its own namespace, which must not keep the first mount alive."""
    first = mount("--mode", "arena", point=tmp_path / "first")
    second = mount("--mode", "steer", point=tmp_path / "second")
    (first.source / "f").write_bytes(bytes(100_000))
    for mounted in (first, second):
        assert len((mounted.point / "f").read_bytes()) == 100_000
    done = llmcache("umount", first.point)  # waits until the daemon has ended, which a copy of the mount would prevent
    assert done.returncode == 0, done.stderr
    assert len((second.point / "f").read_bytes()) == 100_000


@pytest.mark.bpf
def test_in_place_over_its_source_nothing_is_mounted(tmp_path: Path) -> None:
    directory = tmp_path / "models"
    directory.mkdir()
    done = llmcache("mount", directory, directory, "--mode", "inplace", "--cache", "32Mi")
    assert done.returncode == 0 and "inplace" in done.stdout and "writable" in done.stdout, done.stderr
    try:
        assert not any(entry.point == str(directory) for entry in mounts().values())
        assert llmcache("stats", directory).returncode == 0
    finally:
        assert llmcache("umount", directory).returncode == 0
    assert mountpoint.find(str(directory)) is None
