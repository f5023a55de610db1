"""Writing through the mount: spill files by default, everything with --rw, and the effect on SOURCE."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mount.conftest import Mounted, Mounter
from tests.mount.live import wait_for
from tests.mount.test_posix_read import fails_with


def hidden(source: Path) -> list[str]:
    return [name for name in os.listdir(source) if name.startswith(".fuse_hidden")]


def test_create_extend_overwrite_truncate(reading: Mounted) -> None:
    path, behind = reading.point / "a.kv", reading.source / "a.kv"
    with path.open("x+b", buffering=0) as file:
        assert file.write(b"0123456789") == 10
        os.pwrite(file.fileno(), b"ABC", 3)
        os.pwrite(file.fileno(), b"end", 100_000)
        assert os.fstat(file.fileno()).st_size == 100_003
        assert os.pread(file.fileno(), 10, 0) == b"012ABC6789"
        os.fsync(file.fileno())
        os.fdatasync(file.fileno())
        assert behind.read_bytes() == b"012ABC6789" + bytes(99_990) + b"end"
        os.ftruncate(file.fileno(), 5)
        assert os.pread(file.fileno(), 100, 0) == b"012AB" == behind.read_bytes()
        os.ftruncate(file.fileno(), 8)
        assert os.pread(file.fileno(), 100, 0) == b"012AB\0\0\0"
    os.truncate(path, 2)
    assert path.read_bytes() == behind.read_bytes() == b"01"
    fails_with(errno.EEXIST, os.open, path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    with path.open("wb") as file:
        assert behind.stat().st_size == 0
        file.write(b"new")
    assert path.read_bytes() == b"new"


def test_append(reading: Mounted) -> None:
    path = reading.point / "log.kv"
    code = "import os, sys\nfd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)\n"
    code += "for i in range(200): os.write(fd, (sys.argv[2] * 15 + '\\n').encode())"
    words = [subprocess.Popen([sys.executable, "-c", code, str(path), letter]) for letter in "abcd"]
    assert [process.wait(120) for process in words] == [0] * 4
    lines = path.read_text().splitlines()
    assert sorted(lines) == sorted(letter * 15 for letter in "abcd" for _ in range(200))


def test_rename(reading: Mounted) -> None:
    point, source = reading.point, reading.source
    (point / "a.kv").write_text("a")
    (point / "b.kv").write_text("b")
    with (point / "a.kv").open() as file:
        os.rename(point / "a.kv", point / "c.kv")
        assert file.read() == "a"
        assert os.fstat(file.fileno()).st_nlink == 1
    os.replace(point / "c.kv", point / "b.kv")
    assert (point / "b.kv").read_text() == "a"
    assert os.listdir(source) == os.listdir(point) == ["b.kv"]
    fails_with(errno.EROFS, os.rename, point / "b.kv", point / "b.gguf")
    fails_with(errno.ENOENT, os.rename, point / "none.kv", point / "x.kv")


def test_deleted_while_open(reading: Mounted) -> None:
    path = reading.point / "gone.kv"
    with path.open("x+b", buffering=0) as file:
        file.write(b"still here")
        path.unlink()
        assert not os.listdir(reading.source), "nothing is left if the daemon dies now"
        assert not os.listdir(reading.point)
        fails_with(errno.ENOENT, os.stat, path)
        assert os.pread(file.fileno(), 100, 0) == b"still here"
        os.pwrite(file.fileno(), b"!", 10)
        os.fchmod(file.fileno(), 0o600)
        os.utime(file.fileno(), ns=(1, 2))
        status = os.fstat(file.fileno())
        assert (status.st_size, status.st_nlink, status.st_mtime_ns) == (11, 0, 2)
        os.ftruncate(file.fileno(), 5)
        assert os.pread(file.fileno(), 100, 0) == b"still"
        os.fsync(file.fileno())
        with open(f"/proc/self/fd/{file.fileno()}", "r+b", buffering=0) as again:
            assert again.read() == b"still"
            again.write(b" here")
        path.write_bytes(b"another")
        assert os.pread(file.fileno(), 100, 0) == b"still here"
    assert path.read_bytes() == b"another"
    path.unlink()
    assert not hidden(reading.source)


def test_the_directory_of_a_deleted_open_file_can_be_removed(writing: Mounted) -> None:
    directory = writing.point / "dir"
    directory.mkdir()
    with (directory / "f").open("w+b", buffering=0) as file:
        file.write(b"x")
        (directory / "f").unlink()
        directory.rmdir()
        assert os.pread(file.fileno(), 10, 0) == b"x"
    assert os.listdir(writing.source) == []


def test_own_writes_do_not_look_like_changes_behind(reading: Mounted) -> None:
    path = reading.point / "own.kv"
    for number in range(20):
        with path.open("ab") as file:
            file.write(bytes([number]) * 10_000)
        assert path.read_bytes()[-1] == number
    assert "changed behind" not in reading.log()


def test_spill_globs(mount: Mounter) -> None:
    mounted = mount("--spill", "*.tmp", "--spill", "kv/*")
    (mounted.source / "kv").mkdir()
    (mounted.point / "x.tmp").write_text("1")
    (mounted.point / "kv" / "anything").write_text("1")
    for name in ("x.kv", "x.gguf"):
        fails_with(errno.EROFS, os.open, mounted.point / name, os.O_CREAT | os.O_WRONLY)


@pytest.mark.parametrize("options", [("--spill", ""), ("-o", "ro,nofail,x-systemd.automount,_netdev")])
def test_a_mount_without_spill_files_is_read_only(mount: Mounter, options: tuple[str, str]) -> None:
    mounted = mount(*options)
    assert os.statvfs(mounted.point).f_flag & os.ST_RDONLY
    fails_with(errno.EROFS, os.open, mounted.point / "a.kv", os.O_CREAT | os.O_WRONLY)


def test_attributes_of_spill_files(reading: Mounted) -> None:
    path = reading.point / "a.kv"
    path.write_text("x")
    path.chmod(0o604)
    os.utime(path, ns=(10**18 + 1, 10**18 + 2))
    status = (reading.source / "a.kv").stat()
    assert stat.S_IMODE(status.st_mode) == 0o604
    assert (status.st_atime_ns, status.st_mtime_ns) == (10**18 + 1, 10**18 + 2)


def test_all_changes_with_rw(writing: Mounted) -> None:
    point, source = writing.point, writing.source
    (point / "d" / "e").mkdir(parents=True)
    (point / "d" / "f").write_text("f")
    os.symlink("f", point / "d" / "s")
    os.link(point / "d" / "f", point / "d" / "h")
    assert (point / "d" / "h").stat().st_nlink == 2
    assert (source / "d" / "s").read_text() == "f"
    os.rename(point / "d", point / "moved")
    assert (point / "moved" / "f").read_text() == "f"
    fails_with(errno.ENOTEMPTY, os.rmdir, point / "moved")
    fails_with(errno.EEXIST, os.mkdir, point / "moved")
    fails_with(errno.EPERM, os.mknod, point / "device", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    os.mknod(point / "plain", stat.S_IFREG | 0o600)
    os.unlink(point / "plain")
    (point / "moved" / "e").rmdir()
    assert sorted(os.listdir(source / "moved")) == ["f", "h", "s"]


def test_writes_by_a_deleted_name_are_seen_by_the_other_name(writing: Mounted) -> None:
    one, two = writing.point / "one", writing.point / "two"
    one.write_bytes(b"a" * 8192)
    os.link(one, two)
    with one.open("r+b", buffering=0) as deleted, two.open("r+b", buffering=0) as left:
        assert deleted.read() == left.read() == b"a" * 8192
        one.unlink()
        os.pwrite(deleted.fileno(), b"b", 5000)
        assert two.read_bytes()[4999:5002] == b"aba"
        for letter in (b"c", b"d", b"e"):
            os.pwrite(left.fileno(), letter, 100)
            wait_for(lambda now=letter: os.pread(deleted.fileno(), 3, 99) == b"a%ca" % now, "it is one file", 30)  # type: ignore[misc]


def test_a_name_like_those_of_libfuse_for_deleted_files(writing: Mounted) -> None:
    """A user can rename a file to a name like libfuse's names for deleted files, whether it is open or was just closed."""
    names = [f".fuse_hidden{2:08x}{number:08x}" for number in range(1, 4)]
    first, second, third = (writing.point / name for name in names)
    first.with_name("f").write_bytes(b"content")
    os.rename(first.with_name("f"), first)
    assert first.read_bytes() == (writing.source / names[0]).read_bytes() == b"content"
    with first.open("rb", buffering=0) as file:
        os.rename(first, second)
        assert file.read() == second.read_bytes() == (writing.source / names[1]).read_bytes() == b"content"
        second.unlink()
        assert os.pread(file.fileno(), 10, 0) == b"content"
        assert os.listdir(writing.source) == []
        third.write_bytes(b"another")
    assert os.listdir(writing.source) == os.listdir(writing.point) == [names[2]]
    third.unlink()
    assert not third.exists()


def test_renaming_a_directory_of_open_files(writing: Mounted) -> None:
    (writing.point / "d").mkdir()
    (writing.point / "d" / "f").write_text("content")
    with (writing.point / "d" / "f").open("r+") as file:
        os.rename(writing.point / "d", writing.point / "e")
        assert file.read() == "content"
        file.write(" more")
        file.flush()
        assert (writing.point / "e" / "f").read_text() == "content more"


def test_rename_flags(writing: Mounted) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    one, two = os.fsencode(writing.point / "one"), os.fsencode(writing.point / "two")
    (writing.point / "one").write_text("1")
    (writing.point / "two").write_text("2")
    assert libc.renameat2(-100, one, -100, two, 1) == -1
    assert ctypes.get_errno() == errno.EEXIST
    assert libc.renameat2(-100, one, -100, two, 2) == 0
    assert (writing.point / "one").read_text() == "2"
    assert (writing.point / "two").read_text() == "1"


def test_extended_attributes(writing: Mounted) -> None:
    path = writing.point / "x"
    path.touch()
    try:
        os.setxattr(path, "user.a", b"1")
    except OSError as error:
        pytest.skip(f"SOURCE has no extended attributes: {error.strerror}")
    fails_with(errno.EEXIST, os.setxattr, path, "user.a", b"2", os.XATTR_CREATE)
    fails_with(errno.ENODATA, os.setxattr, path, "user.b", b"2", os.XATTR_REPLACE)
    os.setxattr(path, "user.a", b"3", os.XATTR_REPLACE)
    assert os.getxattr(writing.source / "x", "user.a") == b"3"
    os.removexattr(path, "user.a")
    assert os.listxattr(path) == []


def test_locks_between_processes(reading: Mounted) -> None:
    path = reading.point / "lock.kv"
    path.touch()
    with path.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        code = "import fcntl, sys\nfcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        result = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
        assert "BlockingIOError" in result.stderr


def test_created_again_while_the_deleted_file_is_open(reading: Mounted) -> None:
    path, behind = reading.point / "a.kv", reading.source / "a.kv"
    with path.open("xb", buffering=0) as file:
        file.write(b"1" * 10_000)
    with path.open("rb", buffering=0) as old_file:
        assert old_file.read() == b"1" * 10_000
        behind.unlink()
        with path.open("xb", buffering=0) as file:
            file.write(b"2" * 5_000)
        assert path.read_bytes() == b"2" * 5_000 == behind.read_bytes()
