"""In-place mounts that change the read-ahead of their storage, and the value that they restore."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from llmcache.mount.backends.touches import why_not
from llmcache.mount.readahead import read_ahead_file
from tests.mount.live import MIB, Live, live, llmcache, wait_for
from tests.unit.kv_parts import LoopDisk, loop_disk
from tools.make_model import Shape, make_model

pytestmark = [pytest.mark.mount, pytest.mark.bpf]

Mounted = Callable[..., AbstractContextManager[Live]]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[LoopDisk]:
    """A disk whose read-ahead no other process uses."""
    with loop_disk(tmp_path) as disk:
        if reason := why_not(str(disk.point)):
            pytest.skip(reason)
        yield disk


@pytest.fixture
def setting(disk: LoopDisk) -> Path:
    path = read_ahead_file(str(disk.point))
    assert path is not None
    return path


@pytest.fixture
def mounted(disk: LoopDisk, tmp_path: Path) -> Mounted:
    """Return a function that mounts a directory of the disk, with a file larger than the budget."""

    def mount(name: str, kib: int | None, mode: str = "inplace") -> AbstractContextManager[Live]:
        source = disk.point / name
        source.mkdir(exist_ok=True)
        (source / "large.bin").touch()
        os.truncate(source / "large.bin", 64 * MIB)
        options = () if kib is None else ("--read-ahead", f"{kib}Ki")
        return live(source, tmp_path / name, "32M", "--mode", mode, *options)

    return mount


def test_the_last_mount_restores_read_ahead(setting: Path, mounted: Mounted) -> None:
    before = setting.read_text()
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(mounted("first", 64))
        second.enter_context(mounted("second", 32))
        assert setting.read_text() == "32\n"
        first.close()
        assert setting.read_text() == "32\n", "the other mount still exists"
        second.close()
        assert setting.read_text() == before


@pytest.mark.parametrize("mode", ["inplace", "steer"])
def test_the_next_mount_restores_read_ahead_after_a_killed_one(setting: Path, mounted: Mounted, mode: str) -> None:
    """The next mount does not change read-ahead itself."""
    before = setting.read_text()
    with mounted("first", 64) as killed:
        killed.daemon.kill()
        killed.daemon.wait()
    assert setting.read_text() == "64\n"
    with mounted("second", None, mode):
        assert setting.read_text() == before


def test_a_forced_umount_restores_read_ahead(setting: Path, mounted: Mounted) -> None:
    before = setting.read_text()
    with mounted("first", 64) as killed, mounted("second", 32) as second:
        killed.daemon.kill()
        killed.daemon.wait()
        assert llmcache("umount", "--force", killed.mountpoint).returncode == 0
        assert setting.read_text() == "32\n", "the other mount needs it"
        second.daemon.kill()
        second.daemon.wait()
        assert llmcache("umount", "--force", second.mountpoint).returncode == 0
        assert setting.read_text() == before


def test_read_ahead_is_set_while_files_do_not_fit(disk: LoopDisk, setting: Path, tmp_path: Path) -> None:
    before = setting.read_text()
    files = [disk.point / "one.bin", disk.point / "two.bin"]
    for path in files:
        path.touch()
        os.truncate(path, 24 * MIB)
    with live(disk.point, tmp_path / "mnt", "64M", "--mode", "inplace", "--read-ahead", "64Ki") as mount:
        assert setting.read_text() == before != "64\n"
        mount.resize(32 * MIB)
        wait_for(lambda: setting.read_text() == "64\n", "it is set, as both do not fit")
        files[1].unlink()
        wait_for(lambda: setting.read_text() == before, "it is restored, as one does")


def test_read_ahead_too_large_for_an_moe_model_is_logged(disk: LoopDisk, setting: Path, tmp_path: Path) -> None:
    shape = Shape(256, 704, 2000, layers=2, tied=False, experts=8, used=2)
    (path,) = make_model(disk.point / "moe.gguf", shape, "gguf", 1, 0)
    os.utime(path, (0, 0))
    (disk.point / "large.bin").touch()
    os.truncate(disk.point / "large.bin", 64 * MIB)
    for name, kib, options, warned in (
        ("far", 256, (), True),
        ("near", 128, (), False),
        ("set", 256, ("--read-ahead", "32Ki"), False),
    ):
        setting.write_text(f"{kib}\n")
        with live(disk.point, tmp_path / name, "32M", "--mode", "inplace", *options) as mount:
            (mount.mountpoint / path.name).read_bytes()
            wait_for(lambda stats=mount.stats: stats()["files"], "it is steered")  # type: ignore[misc]
            if warned:
                wait_for(lambda log=mount.log: "--read-ahead 32Ki" in log.read_text(), "it is logged")  # type: ignore[misc]
            assert ("around each page fault" in mount.log.read_text()) == warned, options
