"""Permissions: a root daemon's mount with allow_other grants users exactly the access they have in SOURCE.

A process of each user tries every call twice: in SOURCE and through the mount.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmcache.mount.client import mountpoint
from llmcache.mount.source.tree import Caller
from tests.mount.conftest import Mounted, Mounter, mounting
from tests.mount.fault_rig import small_disk
from tests.mount.live import llmcache, wait_for

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can test other users' permissions")

ALICE, BOB, TEAM = 60_001, 60_002, 60_100
NO_ID = 2**32 - 1  # id of access list entries for owner, group, mask and others
USERS = {
    "alice": (ALICE, ALICE, ()),
    "bob": (BOB, BOB, ()),
    "bob of the team": (BOB, BOB, (TEAM,)),
    "a team's user": (BOB, TEAM, ()),
}
SECRET = b"secret" * 1000

# Standard library only, run by the system's Python: other users may be unable to reach ours.
PROBE = """
import json, os, sys
uid, gid, groups, base, names = json.loads(sys.argv[1])
os.setgroups(groups); os.setgid(gid); os.setuid(uid)
def tried(call, *words):
    try:
        found = call(*words)
    except OSError as error:
        return error.errno
    if isinstance(found, int):
        os.close(found)
    return 0
print(json.dumps({name: [tried(os.open, os.path.join(base, name), os.O_RDONLY),
                         tried(os.open, os.path.join(base, name), os.O_WRONLY),
                         tried(os.open, os.path.join(base, name), os.O_ACCMODE),
                         tried(os.listdir, os.path.join(base, name)),
                         os.access(os.path.join(base, name), os.X_OK)] for name in names}))
"""


def access_list(*entries: tuple[int, int, int]) -> bytes:
    """Return a POSIX access list as stored in its extended attribute; entries are (tag, permissions, id)."""
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


@contextlib.contextmanager
def reachable() -> Iterator[Path]:
    """Yield a directory that every user can reach, unlike pytest's."""
    directory = Path(tempfile.mkdtemp(prefix="llmcache-permissions-"))
    directory.chmod(0o755)
    yield directory
    if mountpoint.find(str(directory / "mnt")) is not None:
        llmcache("umount", "--force", directory / "mnt")
    shutil.rmtree(directory)


@pytest.fixture
def place() -> Iterator[Path]:
    with reachable() as directory:
        yield directory


def mount_for_all(mount: Mounter, place: Path) -> Mounted:
    """Mount with allow_other, and with --rw, so that only SOURCE's permissions decide."""
    for name in ("source", "mnt"):
        (place / name).mkdir()
        (place / name).chmod(0o755)
    return mount("--rw", "-o", "allow_other", source=place / "source", point=place / "mnt")


@pytest.fixture(scope="module")
def mount_of_all_users() -> Iterator[Mounted]:
    """A mount for all users."""
    with reachable() as directory, mounting(directory) as mounter:
        yield mount_for_all(mounter, directory)


@pytest.fixture
def shared(mount_of_all_users: Mounted, tmp_path: Path) -> Mounted:
    return mount_of_all_users.directory(tmp_path.name)


@pytest.fixture
def alone(place: Path, mount: Mounter) -> Mounted:
    return mount_for_all(mount, place)


def make(path: Path, mode: int, uid: int = 0, gid: int = 0, data: bytes = b"x") -> Path:
    path.write_bytes(data)
    os.chown(path, uid, gid)
    path.chmod(mode)
    return path


def run_as(uid: int, code: str, *words: str | Path, fds: tuple[int, ...] = ()) -> subprocess.Popen[str]:
    """Start a process of a user without supplementary groups; it runs `code`."""
    begin = f"import os, sys; os.setgroups([]); os.setgid({uid}); os.setuid({uid})\n"
    command = [python(), "-c", begin + code, *map(str, words)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=fds)


def results(base: Path, names: list[str], uid: int, gid: int, groups: tuple[int, ...]) -> dict[str, list[int]]:
    """Return for each name: errno (0: success) of three opens and of a listing, and whether it is executable."""
    request = json.dumps([uid, gid, groups, str(base), names])
    done = subprocess.run([python(), "-c", PROBE, request], capture_output=True, text=True, timeout=120, check=True)
    return dict(json.loads(done.stdout))


def python() -> str:
    """Return an interpreter outside root's private directories."""
    return shutil.which("python3", path="/usr/bin:/bin") or sys.executable


def test_each_user_has_the_permissions_of_source(shared: Mounted) -> None:
    source = shared.source
    for mode in (0o000, 0o004, 0o040, 0o400, 0o044, 0o222, 0o640, 0o611, 0o666):
        make(source / f"root {mode:o}", mode, 0, TEAM)
        make(source / f"bob {mode:o}", mode, BOB, TEAM)
    for name, entries in {
        "for alice": [(1, 6, NO_ID), (2, 4, ALICE), (4, 0, NO_ID), (16, 4, NO_ID), (32, 0, NO_ID)],
        "not for bob": [(1, 6, NO_ID), (2, 0, BOB), (4, 6, NO_ID), (16, 6, NO_ID), (32, 4, NO_ID)],
        "for the team": [(1, 6, NO_ID), (4, 0, NO_ID), (8, 6, TEAM), (16, 4, NO_ID), (32, 0, NO_ID)],
    }.items():
        os.setxattr(make(source / name, 0o660, 0, 0), "system.posix_acl_access", access_list(*entries))
    for mode in (0o700, 0o710, 0o711, 0o750, 0o751, 0o755):
        below = source / f"directory {mode:o}"
        below.mkdir()
        make(below / "file", 0o644)
        os.chown(below, 0, TEAM)
        below.chmod(mode)
    names = [str(path.relative_to(source)) for path in sorted(source.rglob("*"))]
    for user_name, user in USERS.items():
        assert results(shared.point, names, *user) == results(source, names, *user), user_name


def test_new_files_have_the_owner_and_mode_of_their_creator(shared: Mounted) -> None:
    for name, mode in (("open", 0o777), ("team", 0o2775)):
        (shared.source / name).mkdir()
        os.chown(shared.source / name, 0, TEAM)
        (shared.source / name).chmod(mode)
    (shared.source / "open").chmod(0o1777)
    make(shared.source / "open" / "root's", 0o644)
    code = """
os.umask(0o002); os.chdir(sys.argv[1])
os.close(os.open("open/file", os.O_CREAT | os.O_WRONLY, 0o666)); os.mkdir("open/dir"); os.symlink("x", "open/link")
os.mknod("open/node", 0o100666); os.chmod("open/file", 0o6755)
for refused in (lambda: os.unlink("open/root's"), lambda: os.rename("open/root's", "open/file"),
                lambda: os.chmod("open/root's", 0o666), lambda: os.mkdir("team/x"), lambda: os.link("open/root's", "open/l"),
                lambda: os.truncate("open/root's", 0), lambda: os.setxattr("open/root's", "user.x", b"x")):
    try:
        refused()
    except PermissionError:
        continue
    print("not refused")
"""
    child = run_as(BOB, code, shared.point)
    assert child.communicate(timeout=120)[0] == "" and child.returncode == 0
    created = {path.name: path.lstat() for path in (shared.source / "open").iterdir() if path.name != "root's"}
    assert {(status.st_uid, status.st_gid) for status in created.values()} == {(BOB, BOB)}
    modes = {name: stat.S_IMODE(status.st_mode) for name, status in created.items() if name != "link"}
    assert modes == {"file": 0o6755, "dir": 0o775, "node": 0o664}
    team = subprocess.run(
        ["setpriv", f"--reuid={BOB}", f"--regid={BOB}", f"--groups={TEAM}", "mkdir", shared.point / "team/x"]
    )
    # by a supplementary group of the process
    assert team.returncode == 0 and (shared.source / "team/x").stat().st_gid == TEAM


MAKING = """
base, found = sys.argv[1], {}
for umask in (0o027, 0o777):
    os.umask(umask)
    for place in ("plain", "listed"):
        for mode in (0o777, 0o640):
            name = f"{base}/{place}/{os.getuid()} {umask:o} {mode:o}"
            os.close(os.open(name + " file", os.O_CREAT | os.O_WRONLY, mode))
            os.mknod(name + " node", 0o100000 | mode)
            os.mkdir(name + " directory", mode)
"""


def test_the_umask_applies_without_a_default_access_list(shared: Mounted, place: Path) -> None:
    entries = [(1, 7, NO_ID), (2, 7, ALICE), (4, 5, NO_ID), (16, 7, NO_ID), (32, 5, NO_ID)]
    for base in (shared.source, place):
        for name in ("plain", "listed"):
            (base / name).mkdir()
            (base / name).chmod(0o777)
        os.setxattr(base / "listed", "system.posix_acl_default", access_list(*entries))
    created = []
    for base, below in ((place, place), (shared.point, shared.source)):
        for uid in (BOB, 0):
            assert run_as(uid, MAKING, base).wait(120) == 0
        paths = sorted(path for name in ("plain", "listed") for path in (below / name).iterdir())
        attributes = [{name: os.getxattr(path, name) for name in os.listxattr(path)} for path in paths]
        modes = [f"{path.relative_to(below)}: {path.stat().st_mode:o}" for path in paths]
        created.append((modes, attributes))
    assert created[0] == created[1] and len(created[0][0]) == 48


def test_other_users_do_not_see_trusted_attributes(shared: Mounted) -> None:
    file = make(shared.source / "file", 0o644, BOB, BOB)
    for name in ("trusted.secret", "user.known"):
        os.setxattr(file, name, b"x")
    code = """
for path in sys.argv[1:]:
    found = [os.listxattr(path)]
    for call, more in ((os.getxattr, ()), (os.setxattr, (b"y",)), (os.removexattr, ())):
        try:
            found.append(call(path, "trusted.secret", *more))
        except OSError as error:
            found.append(error.errno)
    print(found)
"""
    output, _ = run_as(BOB, code, file, shared.point / "file").communicate(timeout=120)
    plain, through = output.splitlines()
    assert plain == through and "user.known" in plain and "trusted" not in plain
    assert set(os.listxattr(shared.point / "file")) == {"trusted.secret", "user.known"}  # root sees it


def test_groups_of_a_process_with_a_reused_number_are_not_used() -> None:
    with subprocess.Popen(["setpriv", f"--reuid={BOB}", f"--regid={BOB}", f"--groups={TEAM}", "sleep", "600"]) as process:
        try:
            wait_for(lambda: os.stat(f"/proc/{process.pid}").st_uid == BOB, "it is Bob's")
            for uid, gid, groups in ((BOB, BOB, (TEAM,)), (ALICE, BOB, ()), (BOB, ALICE, ())):
                assert Caller(uid, gid, process.pid).groups() == groups
        finally:
            process.kill()
    assert Caller(BOB, BOB, process.pid).groups() == ()


FILLING = """
import json, mmap
base, inherited = sys.argv[1], int(sys.argv[2])
os.chdir(base)
fill, size = os.open("fill", os.O_CREAT | os.O_RDWR, 0o600), 1 << 16
hole = os.open("hole", os.O_CREAT | os.O_RDWR, 0o600)
os.ftruncate(hole, 1 << 20)
new = os.open("new", os.O_CREAT | os.O_RDWR, 0o600)
while size >= 1024:
    try:
        os.write(fill, bytes(size))
    except OSError:
        size //= 2
def mapped():
    pages = mmap.mmap(hole, 1 << 20)
    pages[:] = bytes([1]) * (1 << 20)
    pages.flush()
    os.fsync(hole)
calls = {"write": lambda: os.write(new, bytes(4096)), "inherited": lambda: os.write(inherited, bytes(4096)),
         "fallocate": lambda: os.posix_fallocate(fill, 1 << 23, 1 << 16), "mkdir": lambda: os.mkdir("directory"),
         "symlink": lambda: os.symlink("x" * 1000, "link"), "mapped": mapped}
found = {}
for name, call in calls.items():
    try:
        call()
    except OSError as error:
        found[name] = error.errno
print(json.dumps(found))
"""


@pytest.mark.skipif(not shutil.which("mkfs.ext4"), reason="a file system of its own needs e2fsprogs")
def test_other_users_cannot_use_blocks_reserved_for_root(place: Path, mount: Mounter) -> None:
    with small_disk(place, 8, "-m", "25") as files:
        before = os.statvfs(files)
        reserve = before.f_bfree - before.f_bavail
        assert reserve > before.f_blocks // 8
        files.chmod(0o777)
        mounted = mount("--rw", "-o", "allow_other", source=files, point=place / "mnt")
        try:
            with (mounted.point / "root's").open("wb", buffering=0) as inherited:
                fd = inherited.fileno()
                refused = json.loads(run_as(BOB, FILLING, mounted.point, str(fd), fds=(fd,)).communicate(timeout=120)[0])
                assert set(refused) == {"write", "inherited", "fallocate", "mkdir", "symlink", "mapped"}, refused
                assert set(refused.values()) <= {errno.ENOSPC, errno.EIO}
                os.sync()
                assert os.statvfs(files).f_bfree > 0.9 * reserve
                assert inherited.write(bytes(1 << 19)) == 1 << 19  # root may use the reserve
        finally:
            ended = llmcache("umount", "--force", mounted.point)
        assert ended.returncode == 0, ended.stderr


def test_set_id_bits_are_cleared_by_writes_and_ignored_in_the_mount(alone: Mounted) -> None:
    make(alone.source / "tool", 0o6777, 0, TEAM)
    child = run_as(BOB, "open(sys.argv[1], 'r+').write('y')", alone.point / "tool")
    assert child.wait(120) == 0
    assert stat.S_IMODE((alone.source / "tool").stat().st_mode) == 0o777
    options = next(line for line in Path("/proc/self/mounts").read_text().splitlines() if f" {alone.point} " in line)
    assert {"nosuid", "nodev", "default_permissions"} <= set(options.split()[3].split(",")) | set(options.split(",")), (
        options
    )


def test_an_open_file_never_shows_an_unreadable_replacement(alone: Mounted) -> None:
    file = make(alone.source / "file", 0o644, data=b"public" * 1000)
    code = """
fd = os.open(sys.argv[1], os.O_RDONLY)
for _ in sys.stdin:
    print(os.pread(fd, 6, 0) + os.pread(fd, 6, 4096 + 6 - 4096 % 6), flush=True)
"""
    reader = run_as(BOB, code, alone.point / "file")
    assert reader.stdin is not None and reader.stdout is not None

    def read_again() -> str:
        print(file=reader.stdin, flush=True)
        assert reader.stdout is not None
        return reader.stdout.readline().strip()

    before = read_again()
    make(alone.source / "new", 0o600, data=SECRET).rename(file)
    with pytest.raises(OSError, match=os.strerror(errno.EBUSY)):
        (alone.point / "file").read_bytes()
    assert llmcache("warmup", alone.point, "file").returncode == 4
    assert read_again() == before
    make(alone.source / "new", 0o644, data=b"newer!" * 1000).rename(file)
    assert (alone.point / "file").read_bytes() == b"newer!" * 1000
    make(alone.source / "new", 0o600, data=SECRET).rename(file)
    reader.stdin.close()
    assert reader.wait(120) == 0

    def closed() -> bool:
        """Return whether the kernel has reported that the reader closed the file, which may take a moment."""
        try:
            return (alone.point / "file").read_bytes() == SECRET
        except OSError as error:
            assert error.errno == errno.EBUSY
            return False

    wait_for(closed, "the file is closed")


def test_paths_exchanged_during_a_call_give_no_access(shared: Mounted) -> None:
    """Bob exchanges two paths in his own directory while he uses them through the mount."""
    own, others = shared.source / "own", shared.source / "own" / "secrets"
    others.mkdir(parents=True)
    make(others / "file", 0o644, data=SECRET)
    make(shared.source / "own" / "private", 0o600, data=SECRET)
    (own / "mine").mkdir()
    make(own / "mine" / "file", 0o644, BOB, BOB, b"public")
    make(own / "public", 0o644, BOB, BOB, b"public")
    others.chmod(0o700)
    for path in (own, own / "mine"):
        os.chown(path, BOB, BOB)
    swapping = """
import ctypes, time
swap, end = ctypes.CDLL(None).renameat2, time.monotonic() + float(sys.argv[2])
os.chdir(sys.argv[1])
while time.monotonic() < end:
    for one, other in ((b"public", b"private"), (b"mine", b"secrets")):
        assert swap(-100, one, -100, other, 2) == 0
"""
    reading = """
import time
end = time.monotonic() + float(sys.argv[2])
os.chdir(sys.argv[1])
while time.monotonic() < end:
    for call in (lambda: open("public").read(), lambda: open("mine/file").read(), lambda: os.chmod("public", 0o644),
                 lambda: os.chmod("mine", 0o755), lambda: os.mkdir("mine/x"), lambda: os.truncate("public", 6)):
        try:
            said = call()
        except OSError:
            continue
        if said and "secret" in said:
            print("seen")
"""
    swapper = run_as(BOB, swapping, own, "2")
    readers = [run_as(BOB, reading, shared.point / "own", "2") for _ in range(2)]
    # root may read either file, but its reads must not open a file for Bob
    while any(reader.poll() is None for reader in readers):
        with contextlib.suppress(OSError):
            (shared.point / "own" / "public").read_bytes()
    assert [reader.communicate(timeout=120)[0] for reader in readers] == ["", ""]
    assert swapper.wait(120) == 0
    for path in own.iterdir():
        status = path.stat()
        if status.st_uid == 0:
            assert stat.S_IMODE(status.st_mode) in (0o600, 0o700), path
            assert not path.is_file() or path.read_bytes() == SECRET
            assert not path.is_dir() or os.listdir(path) == ["file"]


def test_links_out_of_source_use_the_permissions_of_the_client(alone: Mounted, place: Path) -> None:
    """The kernel resolves links for the client: inside the mount, or outside with the client's permissions."""
    hub = alone.source / "models--org--name"
    (hub / "blobs").mkdir(parents=True)
    (hub / "snapshots" / "main").mkdir(parents=True)
    make(hub / "blobs" / "0123", 0o644, data=b"weights")
    (hub / "snapshots" / "main" / "model.gguf").symlink_to("../../blobs/0123")  # as in a Hugging Face cache
    outside = place / "outside"
    outside.mkdir()
    make(outside / "secret", 0o600, data=SECRET)
    make(outside / "public", 0o644, data=b"public")
    outside.chmod(0o755)
    (alone.source / "relative").symlink_to("../outside")
    (alone.source / "absolute").symlink_to(outside)
    (alone.source / "itself").symlink_to("/proc/self")
    os.mkfifo(alone.source / "pipe", 0o666)
    (alone.source / "pipe").chmod(0o666)
    os.mknod(alone.source / "memory", 0o666 | stat.S_IFCHR, os.makedev(1, 5))
    (alone.source / "memory").chmod(0o666)
    assert (alone.point / "models--org--name/snapshots/main/model.gguf").read_bytes() == b"weights"
    names = ["relative/secret", "absolute/secret", "absolute/public", "memory", "relative/../source/memory"]
    found = results(alone.point, names, *USERS["bob"])
    assert [found[name][0] for name in names] == [errno.EACCES, errno.EACCES, 0, errno.EACCES, 0]  # the mount has nodev
    code = "print(os.readlink(sys.argv[1] + '/itself/../self'), os.getpid())"
    output, _ = run_as(BOB, code, alone.point).communicate(timeout=120)
    assert len(set(output.split())) == 1  # their process, not the daemon's
    done = llmcache("warmup", alone.point, "*")  # the daemon opens files in SOURCE, but no pipes and devices
    assert done.returncode == 0 and "secret" not in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("closed", "options", "is_open", "note"),
    [
        (False, [], True, None),
        (False, ["-o", "noallow_other"], False, None),
        (True, [], False, "only root can use the mount"),
        (True, ["-o", "allow_other"], True, "cannot enter a directory above SOURCE"),
        (True, ["-o", "noallow_other"], False, None),
    ],
)
def test_a_mount_of_root_is_for_all_users_if_source_is(
    place: Path, closed: bool, options: list[str], is_open: bool, note: str | None
) -> None:
    source = place / "above" / "source"
    source.mkdir(parents=True)
    (place / "above").chmod(0o700 if closed else 0o755)
    source.chmod(0o755)
    make(source / "public", 0o644)
    make(source / "secret", 0o600)
    (place / "mnt").mkdir()
    (place / "mnt").chmod(0o755)
    done = llmcache("mount", source, place / "mnt", "--cache", "32Mi", "--mode", "arena", *options)
    assert done.returncode == 0, done.stderr
    assert ("for all users" in done.stdout, "for this user only" in done.stdout) == (is_open, not is_open)
    assert note in done.stderr if note is not None else not done.stderr
    found = results(place / "mnt", ["public", "secret"], *USERS["bob"])
    assert [found[name][0] for name in ("public", "secret")] == [0 if is_open else errno.EACCES, errno.EACCES]
