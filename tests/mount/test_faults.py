"""What goes wrong under load: signals, dead helpers, files that change underneath, storage that fails."""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from llmcache.fs.backends.touches import why_not
from tests.mount.live import (
    MIB,
    WAYS,
    Reader,
    by_read,
    finish_reader,
    live,
    llmcache,
    random_file,
    readers,
    wait_for,
)
from tools.bench.clients.loop_reader import crcs
from tools.bench.sides import is_mounted

SIZE = 40 * MIB + 321
CACHE = "28Mi"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    directory.mkdir()
    for name in ("a.bin", "b.bin"):
        random_file(directory / name, SIZE)
    return directory


@pytest.fixture
def jobs(source: Path, tmp_path: Path) -> list[tuple[Path, Path, str]]:
    """Checking readers of both files, by read and mmap, over the mount at tmp_path/mnt."""
    made = []
    for name in ("a.bin", "b.bin"):
        check = tmp_path / f"{name}.json"
        check.write_text(json.dumps(crcs(source / name)))
        made += [(tmp_path / "mnt" / name, check, how) for how in ("read", "mmap")]
    return made


def assert_serves(source: Path, mountpoint: Path) -> None:
    """A fresh mount gives the right bytes."""
    with live(source, mountpoint, CACHE) as mount:
        for name in os.listdir(source):
            assert by_read(mount.mountpoint / name) == by_read(source / name)


def alive(process: psutil.Process) -> bool:
    """True unless it has ended (a zombie has)."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def end_readers(running: list[Reader]) -> None:
    """A reader without its mount gets an error or SIGBUS, or goes on with what is cached; killing it must not hang."""
    time.sleep(1)
    for reader in running:
        assert reader.poll() != 0
        reader.kill()
        reader.wait(120)


@pytest.mark.parametrize("mode", ["steer", "inplace"])
def test_programs_have_more_files_open_than_the_daemon_may(tmp_path: Path, mode: str) -> None:
    """It lives, and once they have closed them it looks after memory and mount as before."""
    source = tmp_path / "source"
    source.mkdir()
    if mode == "inplace" and (reason := why_not(str(source))):
        pytest.skip(reason)
    for number in range(100):
        path = source / f"{number}.bin"
        path.touch()
        os.truncate(path, 4 * MIB)
        os.utime(path, (0, 0))

    def few(command: Sequence[str]) -> list[str]:
        return ["prlimit", "--nofile=100", *command]

    with live(source, tmp_path / "mnt", CACHE, "--mode", mode, wrap=few) as mount, contextlib.ExitStack() as opened:
        for path in mount.mountpoint.iterdir():
            with contextlib.suppress(OSError):
                opened.enter_context(path.open("rb")).read(MIB)
        time.sleep(2)
        opened.close()
        wait_for(lambda: len(os.listdir(f"/proc/{mount.daemon.pid}/fd")) < 60, "it has closed them too")
        assert llmcache("umount", mount.mountpoint).returncode == 0
        assert mount.daemon.wait(60) == 0


@pytest.mark.parametrize(
    ("number", "mode"), [(signal.SIGTERM, "steer"), (signal.SIGKILL, "steer"), (signal.SIGKILL, "arena")]
)
def test_a_daemon_ends_under_load(
    source: Path, tmp_path: Path, jobs: list[tuple[Path, Path, str]], number: signal.Signals, mode: str
) -> None:
    mountpoint = tmp_path / "mnt"
    with live(source, mountpoint, CACHE, "--mode", mode) as mount, readers(jobs, 600) as running:
        time.sleep(1)
        helpers = mount.helpers()
        mount.daemon.send_signal(number)
        if number == signal.SIGKILL:
            wait_for(lambda: all(reader.poll() is not None for reader in running), "readers are not left hanging")
            result = llmcache("umount", str(mountpoint), "--force")
            assert result.returncode == 0, result.stderr
        mount.daemon.wait(120)
        assert not is_mounted(mountpoint)
        end_readers(running)
        wait_for(lambda: not any(alive(helper) for helper in helpers), "the pin helper ends with its daemon")
    assert_serves(source, mountpoint)


def test_kill_9_of_the_pin_helper_under_load(source: Path, tmp_path: Path, jobs: list[tuple[Path, Path, str]]) -> None:
    with live(source, tmp_path / "mnt", CACHE, "--mode", "steer") as mount, readers(jobs, 5) as running:
        for _ in range(3):
            time.sleep(1.2)
            assert mount.helpers(), "steer has a pin helper"
            for helper in mount.helpers():
                with contextlib.suppress(psutil.NoSuchProcess):  # of the turn before, and waited for just now
                    helper.kill()
        results = [finish_reader(reader, 120) for reader in running]
        assert mount.daemon.poll() is None
        assert mount.stats()["mode"] == "steer"
    assert all(passes > 0 and wrong == 0 for passes, wrong in results), results


def read_block(fd: int, offset: int) -> bytes | int:
    """Return the bytes, or the errno where reading fails."""
    try:
        return os.pread(fd, 4096, offset)
    except OSError as error:
        return error.errno or 0


@pytest.mark.parametrize("how", ["truncated", "replaced", "rewritten", "deleted"])
def test_changed_underneath(source: Path, tmp_path: Path, how: str) -> None:
    """An open handle gives what was there, what is there, or an error, and never hangs; whoever opens it anew, what is."""
    behind = source / "a.bin"
    with live(source, tmp_path / "mnt", CACHE, "--mode", "steer") as mount:
        through = mount.mountpoint / "a.bin"
        before = behind.read_bytes()
        assert by_read(through) == by_read(behind)
        fd = os.open(through, os.O_RDONLY)
        if how == "truncated":
            os.truncate(behind, SIZE // 2)
        elif how == "replaced":
            random_file(source / "new.bin", SIZE).rename(behind)
        elif how == "rewritten":
            with behind.open("r+b") as file:
                for offset in range(0, SIZE, 5 * MIB):
                    file.seek(offset)
                    file.write(os.urandom(5000))
        else:
            behind.unlink()
        after = b"" if how == "deleted" else behind.read_bytes()
        for offset in range(0, SIZE, MIB):
            block = read_block(fd, offset)
            if isinstance(block, bytes):  # at the end as long as the file was known to be
                end = offset + len(block)
                # What is read up to one of the two sizes the kernel pads with zeros to the size that it knows by then.
                ends = [min(end, len(version)) for version in (before, after)]
                parts = {version[offset:end] for version in (before, after) for end in ends}
                assert block in {part and part.ljust(len(block), b"\0") for part in parts}, offset
        os.close(fd)
        if how == "deleted":
            with pytest.raises(FileNotFoundError):
                through.open("rb")
            assert by_read(mount.mountpoint / "b.bin") == by_read(source / "b.bin")
            return
        for way, read in WAYS.items():
            assert read(through) == by_read(behind), way


@pytest.fixture
def failing_disk(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A file system with two files, and its image: truncating that makes real I/O errors.

    A loop device answers reads beyond the end of its image with EIO, as a broken disk does.
    """
    image, mountpoint = tmp_path / "disk.img", tmp_path / "disk"
    mountpoint.mkdir()
    with image.open("wb") as file:
        file.truncate(128 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-b", "4096", "-O", "^has_journal", str(image)], check=True)
    attached = subprocess.run(["losetup", "--show", "-f", str(image)], capture_output=True, text=True, check=False)
    if attached.returncode != 0:
        pytest.skip(f"no loop devices here: {attached.stderr.strip()}")
    device = attached.stdout.strip()
    try:
        subprocess.run(["mount", device, str(mountpoint)], check=True)
        for name in ("one.bin", "two.bin"):
            random_file(mountpoint / name, 30 * MIB)
        subprocess.run(["mount", "-o", "remount,ro", str(mountpoint)], check=True)
        yield mountpoint, image
    finally:
        if is_mounted(mountpoint):
            subprocess.run(["umount", str(mountpoint)], check=True)
        subprocess.run(["losetup", "-d", device], check=True)


def places_on_disk(path: Path) -> list[int]:
    """Return where on the disk each block of a file is, in bytes."""
    fibmap, places = 1, []
    with path.open("rb") as file:
        for number in range(path.stat().st_size // 4096):
            block = array.array("i", [number])
            fcntl.ioctl(file.fileno(), fibmap, block)
            places.append(block[0] * 4096)
    return places


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mkfs.ext4"), reason="loop devices need root, e2fsprogs")
def test_storage_errors_stay_with_their_read(failing_disk: tuple[Path, Path], tmp_path: Path) -> None:
    source, image = failing_disk
    contents = {path: path.read_bytes() for path in source.glob("*.bin")}
    places = {path: places_on_disk(path) for path in contents}
    good, broken = sorted(contents, key=lambda path: max(places[path]))
    cut = max(max(places[good]) + 4096, places[broken][len(places[broken]) // 2])
    bad = {4096 * number for number, place in enumerate(places[broken]) if place >= cut}
    whole = image.read_bytes()
    for path in contents:
        drop(path)
    os.truncate(image, cut)
    with live(source, tmp_path / "mnt", "32Mi", "--mode", "arena") as mount:
        check_broken(mount.mountpoint / broken.name, contents[broken], bad)
        assert (mount.mountpoint / good.name).read_bytes() == contents[good]
        check_broken(mount.mountpoint / broken.name, contents[broken], bad)
        with image.open("r+b") as file:  # the disk recovers: nothing of the failure was kept
            file.seek(cut)
            file.write(whole[cut:])
        assert (mount.mountpoint / broken.name).read_bytes() == contents[broken]


def drop(path: Path) -> None:
    """Forget the cached pages of a file."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def check_broken(path: Path, contents: bytes, bad: set[int]) -> None:
    """Blocks that can be read are right, the others give EIO, whatever was read before and around them."""
    fd = os.open(path, os.O_RDONLY)
    border = sorted(bad)[0]
    around = range(max(0, border - 2 * MIB), min(len(contents), border + 2 * MIB), 4096)
    try:
        for offset in (*range(0, len(contents), MIB // 2), *around):
            assert read_block(fd, offset) == (errno.EIO if offset in bad else contents[offset : offset + 4096]), offset
    finally:
        os.close(fd)
