"""Too many open files, and storage that fails."""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from llmcache.mount.backends.touches import why_not
from tests.mount.fault_rig import run, small_disk
from tests.mount.live import MIB, live, llmcache, random_file, wait_for
from tools.bench.runner import forget

CACHE = "28Mi"


@pytest.mark.parametrize("mode", ["steer", "inplace"])
def test_clients_open_more_files_than_the_daemon_may(tmp_path: Path, mode: str) -> None:
    """The daemon survives, and works as before once clients close their files."""
    source = tmp_path / "source"
    source.mkdir()
    if mode == "inplace" and (reason := why_not(str(source))):
        pytest.skip(reason)
    for number in range(100):
        path = source / f"{number}.bin"
        path.touch()
        os.truncate(path, 4 * MIB)
        os.utime(path, (0, 0))

    def limited(command: Sequence[str]) -> list[str]:
        return ["prlimit", "--nofile=100", *command]

    with live(source, tmp_path / "mnt", CACHE, "--mode", mode, wrap=limited) as mount, contextlib.ExitStack() as opened:
        for path in mount.mountpoint.iterdir():
            with contextlib.suppress(OSError):
                opened.enter_context(path.open("rb")).read(MIB)
        time.sleep(2)
        opened.close()
        wait_for(lambda: len(os.listdir(f"/proc/{mount.daemon.pid}/fd")) < 60, "the daemon has closed them too")
        assert llmcache("umount", mount.mountpoint).returncode == 0
        assert mount.daemon.wait(60) == 0


def read_block(fd: int, offset: int) -> bytes | int:
    """Return the bytes, or the errno if the read fails."""
    try:
        return os.pread(fd, 4096, offset)
    except OSError as error:
        return error.errno or 0


@pytest.fixture
def failing_disk(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A directory with two files, and the disk image under it: truncating the image causes real I/O errors.

    A loop device answers reads beyond the end of its image with EIO, as a broken disk does.
    """
    with small_disk(tmp_path, 128, "-b", "4096", "-O", "^has_journal") as files:
        for name in ("one.bin", "two.bin"):
            random_file(files / name, 30 * MIB)
        run("mount", "-o", "remount,ro", files.parent)
        yield files, tmp_path / "disk.img"


def places_on_disk(path: Path) -> list[int]:
    """Return the position of each block of a file on the disk, in bytes."""
    fibmap, places = 1, []
    with path.open("rb") as file:
        for number in range(path.stat().st_size // 4096):
            block = array.array("i", [number])
            fcntl.ioctl(file.fileno(), fibmap, block)
            places.append(block[0] * 4096)
    return places


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mkfs.ext4"), reason="loop devices need root, e2fsprogs")
def test_a_storage_error_affects_only_its_own_read(failing_disk: tuple[Path, Path], tmp_path: Path) -> None:
    source, image = failing_disk
    contents = {path: path.read_bytes() for path in source.glob("*.bin")}
    places = {path: places_on_disk(path) for path in contents}
    good, broken = sorted(contents, key=lambda path: max(places[path]))
    cut = max(max(places[good]) + 4096, places[broken][len(places[broken]) // 2])
    bad = {4096 * number for number, place in enumerate(places[broken]) if place >= cut}
    whole = image.read_bytes()
    forget(source)
    os.truncate(image, cut)
    with live(source, tmp_path / "mnt", "32Mi", "--mode", "arena") as mount:
        check_broken(mount.mountpoint / broken.name, contents[broken], bad)
        assert (mount.mountpoint / good.name).read_bytes() == contents[good]
        check_broken(mount.mountpoint / broken.name, contents[broken], bad)
        with image.open("r+b") as file:  # the disk recovers, and no error was cached
            file.seek(cut)
            file.write(whole[cut:])
        assert (mount.mountpoint / broken.name).read_bytes() == contents[broken]


def check_broken(path: Path, contents: bytes, bad: set[int]) -> None:
    """Check that readable blocks are right and others give EIO, whatever was read before or next to them."""
    fd = os.open(path, os.O_RDONLY)
    border = sorted(bad)[0]
    around = range(max(0, border - 2 * MIB), min(len(contents), border + 2 * MIB), 4096)
    try:
        for offset in (*range(0, len(contents), MIB // 2), *around):
            assert read_block(fd, offset) == (errno.EIO if offset in bad else contents[offset : offset + 4096]), offset
    finally:
        os.close(fd)
