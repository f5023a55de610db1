"""Mounts and namespaces: copies in other mount namespaces, a daemon in a chroot, daemons and readers in containers."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from llmcache.errors import MountProblem
from llmcache.mount import syscalls
from llmcache.mount.backends.touches import why_not
from llmcache.mount.client import control, mountpoint
from llmcache.mount.daemon.bindmount import BindMount
from llmcache.procfs import mounts
from tests.mount.live import MIB, live, random_file, wait_for
from tools.bench.sides import environment

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="namespaces need root and util-linux"),
]


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """A directory that is a shared mount, as mounts are under systemd."""
    subprocess.run(["mount", "--bind", tmp_path, tmp_path], check=True)
    subprocess.run(["mount", "--make-shared", tmp_path], check=True)
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


@contextmanager
def namespace(propagation: str) -> Iterator[int]:
    """Yield a process with its own mount namespace."""
    process = subprocess.Popen(["unshare", "--mount", "--propagation", propagation, "sleep", "600"])
    own = os.readlink("/proc/self/ns/mnt")
    wait_for(lambda: os.readlink(f"/proc/{process.pid}/ns/mnt") != own, "it has left our namespace")
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def in_namespace(pid: int, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["nsenter", "-t", str(pid), "-m", "--", *words], capture_output=True, text=True, check=False)


@pytest.mark.bpf
@pytest.mark.parametrize("propagation", ["unchanged", "slave"])
def test_a_read_only_mount_in_place_is_read_only_in_every_namespace(shared: Path, propagation: str) -> None:
    source, point = shared / "source", shared / "mnt"
    source.mkdir()
    if reason := why_not(str(source)):
        pytest.skip(reason)
    (source / "below").mkdir()
    with namespace(propagation) as pid:
        with live(source, point, "32Mi", "--mode", "inplace"):
            (entry,) = [mount for mount in mounts(pid).values() if mount.point == str(point)]
            options = in_namespace(pid, "findmnt", "--noheadings", "--output", "VFS-OPTIONS", point).stdout
            assert {"ro", "nosuid", "nodev"} <= set(options.strip().split(",")), entry
            refused = in_namespace(pid, "touch", point / "file")
            assert refused.returncode != 0 and "Read-only" in refused.stderr
            assert not (source / "file").exists()
            # A file system mounted in SOURCE later does not appear in MOUNT, and vice versa.
            subprocess.run(["mount", "-t", "tmpfs", "none", source / "below"], check=True)
            try:
                assert not [mount for mount in mounts().values() if mount.point == str(point / "below")]
            finally:
                subprocess.run(["umount", source / "below"], check=True)
        assert not [mount for mount in mounts(pid).values() if mount.point == str(point)]


READER = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
while True:
    at = 0
    while count := len(os.pread(fd, 1 << 20, at)):
        at += count
"""


@contextmanager
def contained(source: Path, point: Path, mode: str) -> Iterator[int]:
    """Yield the daemon of a mount in its own mount and pid namespaces, where it is process 1."""
    words: list[str | Path] = ["mount", source, point, "--mode", mode, "--cache", "32Mi", "--foreground"]
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-m", "llmcache"]
    log = point.with_suffix(".log")
    with log.open("w") as sink:
        outer = subprocess.Popen([*command, *words], env=environment(), stdout=sink, stderr=sink)
    try:
        wait_for(lambda: "serving a directory on" in log.read_text() or outer.poll() is not None, "the mount serves")
        assert outer.poll() is None, log.read_text()
        yield int(Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text())
    finally:
        outer.kill()  # kills the daemon, too
        outer.wait()
        control.files(str(point)).remove()
    assert "Traceback" not in log.read_text(), log.read_text()


@pytest.mark.bpf
@pytest.mark.parametrize("mode", ["steer", "inplace"])
@pytest.mark.parametrize("prefix", [[], ["unshare", "--pid", "--fork", "--kill-child"]], ids=["outside", "in another"])
def test_readers_of_other_pid_namespaces_count_as_clients(tmp_path: Path, mode: str, prefix: list[str]) -> None:
    """Readers outside the daemon's pid namespace, or in another container, where they may be process 1 like the daemon."""
    source, point = tmp_path / "source", tmp_path / "mnt"
    for directory in (source, point):
        directory.mkdir()
    if mode == "inplace" and (reason := why_not(str(source))):
        pytest.skip(reason)
    os.utime(random_file(source / "loop.bin", 80 * MIB), (0, 0))

    def stats() -> dict[str, Any]:
        return control.request(str(point), {"op": "stats"})

    with contained(source, point, mode) as daemon:
        enter = ["nsenter", "-t", str(daemon), "-m", "--", *prefix]
        reader = subprocess.Popen([*enter, sys.executable, "-c", READER, point / "loop.bin"])
        try:
            wait_for(lambda: stats()["pinned_bytes"] > 8 * MIB and stats()["hit_bytes"] > 0, "a loop is seen", state=stats)
            (file,) = stats()["files"]
            assert file["open"] and file["loops"][0]["passes"] > 1
        finally:
            reader.kill()
            reader.wait()
        wait_for(lambda: not any(file["open"] for file in stats()["files"]), "it has ended", state=stats)
    assert point.with_suffix(".log").read_text().count("outside this PID namespace") == 1


# Runs in a pid namespace. Two successive readers have the same number outside and different numbers inside. They are not
# children of the observer, whose own reads are not reported.
REUSED = """
import array, ctypes, os, signal, sys, time
from llmcache.mount.backends.touches import QUIET_NS, Touches

path, number = sys.argv[1], int(sys.argv[2])
libc = ctypes.CDLL(None, use_errno=True)

def read(own):
    numbers = (ctypes.c_int * 2)(own, number)
    # struct clone_args: exit_signal is the fifth, set_tid and set_tid_size are the ninth and the tenth
    arguments = array.array("Q", [0, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, ctypes.addressof(numbers), 2, 0])
    child = libc.syscall(ctypes.c_long(435), ctypes.c_void_p(arguments.buffer_info()[0]), ctypes.c_size_t(88))
    if child == 0:
        os.pread(os.open(path, os.O_RDONLY), 4096, 0)
        os._exit(0)
    assert child == own, os.strerror(ctypes.get_errno())
    os.waitpid(child, 0)
    os._exit(0)

touches = Touches()
touches.watch(7, os.stat(path), 0, 1, 1 << 20)
for own in (500, 600):
    if not os.fork():
        read(own)
    assert os.wait()[1] == 0
    print(*{touch.pid for touch in touches.wait(1)}, flush=True)
    time.sleep(2 * QUIET_NS / 1e9)
touches.close()
"""


@pytest.mark.bpf
def test_a_reused_process_number_is_another_process(tmp_path: Path) -> None:
    if reason := why_not(str(tmp_path)):
        pytest.skip(reason)
    path = random_file(tmp_path / "file", MIB)
    most = int(Path("/proc/sys/kernel/pid_max").read_text())
    free = next(number for number in range(most - 1, 0, -1) if not Path(f"/proc/{number}").exists())
    inside = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", REUSED]
    done = subprocess.run(
        [*inside, path, str(free)], capture_output=True, text=True, env=environment(), timeout=120, check=False
    )
    assert done.stdout.split() == ["500", "600"], done


@pytest.mark.parametrize("call", ["_OPEN_TREE", "_MOUNT_SETATTR", "_MOVE_MOUNT"])
def test_a_kernel_without_the_system_calls_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setattr(syscalls, call, 9999)  # ENOSYS, as before Linux 5.12 or under old seccomp filters
    mount = BindMount("/", str(tmp_path), 0, Mock(), Mock(), Mock())
    with pytest.raises(MountProblem, match=call[1:].lower()) as caught:
        mount.run()
    assert "Linux 5.12" in (caught.value.hint or "")
    assert not [entry for entry in mounts().values() if entry.point == str(tmp_path)]


@pytest.fixture
def jail(shared: Path) -> Iterator[Path]:
    """A root directory for chroot(2) that is not a mount point, with the system's directories mounted in it."""
    root = shared / "jail"
    root.mkdir()
    made = []
    for name in os.listdir("/"):
        at = root / name
        if os.path.islink(f"/{name}"):
            at.symlink_to(os.readlink(f"/{name}"))
        elif os.path.isdir(f"/{name}"):
            at.mkdir()
            subprocess.run(["mount", "--bind", f"/{name}", at], check=True)
            made.append(at)
    yield root
    for at in reversed(made):
        subprocess.run(["umount", "--lazy", at], check=False, capture_output=True)


def test_a_daemon_in_a_chroot_changes_only_its_own_mount(jail: Path) -> None:
    """The helper and the sentinel need a private mount, but a chroot cannot change propagation."""

    def in_jail() -> list[tuple[str, str]]:
        return [(mount.point, mount.fstype) for mount in mounts().values() if mount.point.startswith(f"{jail}/")]

    # /tmp and /run are the same directories inside.
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        source, point, inside = Path(directory) / "source", Path(directory) / "mnt", f"{jail}{directory}"
        source.mkdir()
        point.mkdir()
        random_file(source / "loop.bin", 20 * MIB)
        before = in_jail()
        command = ["chroot", str(jail), sys.executable, "-m", "llmcache"]
        words = [*command, "mount", directory + "/source", directory + "/mnt", "--mode", "steer", "--cache", "32Mi"]
        made = subprocess.run([*words, "--pin", "*"], capture_output=True, text=True, env=environment(), check=False)
        assert made.returncode == 0, made.stderr
        daemon = int(control.files(str(point)).describe()["pid"])
        try:
            own = (f"{inside}/mnt", "fuse.llmcachefs")
            wait_for(lambda: control.request(str(point), {"op": "stats"})["pinned_bytes"] == 20 * MIB, "the file is pinned")
            assert in_jail() == [*before, own]
            os.kill(daemon, signal.SIGKILL)
            wait_for(lambda: mountpoint.answers(f"{inside}/mnt") == errno.ENOTCONN, "the sentinel aborts the connection")
            assert in_jail() == [*before, own]
            ended = subprocess.run([*command, "umount", "--force", point], env=environment(), check=False)
            assert ended.returncode == 0 and in_jail() == before
        finally:
            subprocess.run(["umount", "--lazy", f"{inside}/mnt"], check=False, capture_output=True)
            control.files(str(point)).remove()
            Path(control.files(str(point)).log).unlink(missing_ok=True)
