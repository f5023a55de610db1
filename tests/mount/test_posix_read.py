"""Reading through the mount gives the same bytes, attributes, names and errors as SOURCE."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from pathlib import Path

import pytest

from tests.mount.conftest import Mounted, Mounter
from tests.mount.live import random_file

SIZE = (3 << 20) + 777


@pytest.fixture
def data(reading: Mounted) -> tuple[Path, bytes]:
    """A file of odd size: its path in the mount, and its bytes."""
    random_file(reading.source / "data.bin", SIZE)
    return reading.point / "data.bin", (reading.source / "data.bin").read_bytes()


def fails_with(number: int, call, *arguments) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(OSError) as caught:
        call(*arguments)
    assert caught.value.errno == number, caught.value


def test_lseek_and_read(data: tuple[Path, bytes]) -> None:
    path, content = data
    with path.open("rb", buffering=0) as file:
        assert file.seek(-100, os.SEEK_END) == SIZE - 100
        assert file.read(1000) == content[-100:]
        assert os.lseek(file.fileno(), 0, os.SEEK_DATA) == 0
        assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == SIZE
        fails_with(errno.ENXIO, os.lseek, file.fileno(), SIZE + 1, os.SEEK_DATA)


def test_mappings(data: tuple[Path, bytes]) -> None:
    path, content = data
    with path.open("rb") as file:
        shared = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
        private = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    assert shared[:] == content == private[:]
    private[0:4] = b"mine"
    assert shared[:4] == content[:4]
    assert path.read_bytes()[:4] == content[:4]


@pytest.mark.parametrize("how", ["read", "map"])
def test_o_direct(data: tuple[Path, bytes], how: str) -> None:
    path, content = data
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        buffer = mmap.mmap(-1, 1 << 20)
        if how == "map":
            assert mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)[:] == content
        got = b""
        while count := os.preadv(fd, [buffer], len(got)):
            got += buffer[:count]
        assert got == content
    finally:
        os.close(fd)


def test_reads_by_o_direct_count_as_reads_from_storage(mount: Mounter, mode: str) -> None:
    mounted = mount("--mode", mode)
    random_file(mounted.source / "f", 3 << 20)
    fd = os.open(mounted.point / "f", os.O_RDONLY | os.O_DIRECT)
    try:
        for _ in range(2):
            assert os.preadv(fd, [mmap.mmap(-1, 4 << 20)], 0) == 3 << 20
    finally:
        os.close(fd)
    stats = mounted.stats()
    names = ("read_bytes", "miss_bytes", "requested_bytes", "backing_read_bytes")
    assert {name: stats[name] for name in names} == dict.fromkeys(names, 6 << 20)


def test_stat_is_that_of_source(reading: Mounted) -> None:
    file = random_file(reading.source / "f", 12345)
    os.truncate(file, 1 << 20)  # sparse: fewer blocks than its size
    os.utime(file, ns=(1_600_000_000_123_456_789, 1_500_000_000_987_654_321))
    os.chmod(file, 0o640)
    os.link(file, reading.source / "f2")
    wanted, got = file.stat(), (reading.point / "f").stat()
    for name in ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks", "st_mtime_ns", "st_ctime_ns"):
        assert getattr(got, name) == getattr(wanted, name), name
    assert (reading.point / "f").stat().st_ino == got.st_ino
    assert os.statvfs(reading.point).f_blocks == os.statvfs(reading.source).f_blocks


def test_large_directory(reading: Mounted) -> None:
    directory = reading.source / "many"
    directory.mkdir()
    for number in range(20_000):
        os.close(os.open(directory / f"n{number:05}", os.O_CREAT | os.O_WRONLY))
    (directory / "sub").mkdir()
    (directory / "link").symlink_to("n00000")
    names = os.listdir(reading.point / "many")
    assert len(names) == len(set(names)) == 20_002
    assert set(names) == set(os.listdir(directory))
    with os.scandir(reading.point / "many") as entries:
        kinds = {
            entry.name: (entry.is_file(follow_symlinks=False), entry.is_dir(follow_symlinks=False), entry.is_symlink())
            for entry in entries
        }
    assert kinds["sub"] == (False, True, False)
    assert kinds["link"] == (False, False, True)
    assert kinds["n19999"] == (True, False, False)


def test_rewinddir_and_seekdir(reading: Mounted) -> None:
    import ctypes

    for number in range(3000):
        (reading.source / f"entry-{number}").touch()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.opendir.restype = libc.readdir.restype = ctypes.c_void_p
    libc.telldir.restype = ctypes.c_long
    directory = ctypes.c_void_p(libc.opendir(os.fsencode(reading.point)))

    def name() -> bytes | None:
        entry = libc.readdir(directory)
        return ctypes.string_at(entry + 19) if entry else None

    first = [name() for _ in range(1000)]
    place = libc.telldir(directory)
    following = [name() for _ in range(10)]
    libc.rewinddir(directory)
    assert [name() for _ in range(1000)] == first
    while name() is not None:
        pass
    libc.seekdir(directory, ctypes.c_long(place))
    assert [name() for _ in range(10)] == following
    libc.closedir(directory)


def test_symbolic_links(reading: Mounted) -> None:
    (reading.source / "dir").mkdir()
    (reading.source / "target").write_text("inside")
    links = {"dir/up": "../target", "dangling": "nowhere", "absolute": "/etc/hostname", "loop": "loop", "d": "dir"}
    for name, target in links.items():
        (reading.source / name).symlink_to(target)
    for name, target in links.items():
        assert os.readlink(reading.point / name) == target
        assert stat.S_ISLNK(os.lstat(reading.point / name).st_mode)
    assert (reading.point / "d" / "up").read_text() == "inside"
    fails_with(errno.ENOENT, os.stat, reading.point / "dangling")
    fails_with(errno.ELOOP, os.stat, reading.point / "loop")


def test_extended_attributes(reading: Mounted) -> None:
    file = reading.source / "x"
    file.touch()
    try:
        os.setxattr(file, "user.empty", b"")
    except OSError as error:
        pytest.skip(f"SOURCE has no extended attributes: {error.strerror}")
    os.setxattr(file, "user.blob", bytes(range(256)))
    through = reading.point / "x"
    assert sorted(os.listxattr(through)) == ["user.blob", "user.empty"]
    assert os.getxattr(through, "user.blob") == bytes(range(256))
    assert os.getxattr(through, "user.empty") == b""
    fails_with(errno.ENODATA, os.getxattr, through, "user.none")
    fails_with(errno.EROFS, os.setxattr, through, "user.new", b"1")
    fails_with(errno.EROFS, os.removexattr, through, "user.blob")


NAMES = ["ünïcödé-模型.gguf", "a b\tc", "line\nbreak", "-rf", "back\\slash", "%41", "x" * 255, "\udcff\udcfe", "'\"$`*?[]"]


def test_odd_names(reading: Mounted) -> None:
    for name in NAMES:
        (reading.source / name).write_text(f"in {name!a}")
    assert sorted(os.listdir(reading.point)) == sorted(NAMES)
    for name in NAMES:
        assert (reading.point / name).read_text() == f"in {name!a}"


def test_errors(reading: Mounted) -> None:
    source, point = reading.source, reading.point
    (source / "file").write_text("x")
    (source / "dir").mkdir()
    fails_with(errno.ENOENT, os.open, point / "none", os.O_RDONLY)
    fails_with(errno.ENOTDIR, os.open, point / "file" / "x", os.O_RDONLY)
    fails_with(errno.ENOTDIR, os.listdir, point / "file")
    fails_with(errno.ENOTDIR, os.open, point / "file", os.O_RDONLY | os.O_DIRECTORY)
    fails_with(errno.EISDIR, os.open, point / "dir", os.O_WRONLY)
    fails_with(errno.ENAMETOOLONG, os.stat, point / ("x" * 256))
    fails_with(errno.EINVAL, os.readlink, point / "file")
    fd = os.open(point / "dir", os.O_RDONLY)
    fails_with(errno.EISDIR, os.read, fd, 1)
    os.close(fd)


def test_only_spill_files_can_be_changed(reading: Mounted) -> None:
    source, point = reading.source, reading.point
    (source / "file").write_text("x")
    (source / "dir").mkdir()
    (source / "link.kv").symlink_to("file")
    changes = [
        (os.open, point / "file", os.O_WRONLY),
        (os.open, point / "file", os.O_RDWR),
        (os.open, point / "file", os.O_RDONLY | os.O_TRUNC),
        (os.open, point / "new", os.O_WRONLY | os.O_CREAT),
        (os.truncate, point / "file", 0),
        (os.unlink, point / "file"),
        (os.unlink, point / "link.kv"),
        (os.rename, point / "file", point / "other"),
        (os.rename, point / "file", point / "other.kv"),
        (os.mkdir, point / "new"),
        (os.mkdir, point / "new.kv"),
        (os.rmdir, point / "dir"),
        (os.symlink, "x", point / "l"),
        (os.link, point / "file", point / "l.kv"),
        (os.chmod, point / "file", 0o600),
        (os.utime, point / "file"),
        (os.mkfifo, point / "fifo"),
    ]
    for call, *arguments in changes:
        fails_with(errno.EROFS, call, *arguments)
    assert (source / "file").read_text() == "x"
    assert sorted(os.listdir(source)) == ["dir", "file", "link.kv"]
