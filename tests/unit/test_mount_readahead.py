"""The read-ahead of a device that several mounts change: one saved value per disk, which is always restored."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmcache.errors import MissingRequirement
from llmcache.mount.client import control
from llmcache.mount.readahead import ReadAhead, read_ahead_file, restore_left


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a /sys tree in which `tmp_path` and /proc are on two partitions of one disk."""
    monkeypatch.setattr(control, "directory", lambda _uid: str(tmp_path / "run"))
    root, disk = tmp_path / "root", tmp_path / "root/sys/devices/virtual/block/vdx"
    (disk / "queue").mkdir(parents=True)
    (disk / "queue/read_ahead_kb").write_text("128\n")
    numbers = root / "sys/dev/block"
    numbers.mkdir(parents=True)
    for number, directory in enumerate((tmp_path, Path("/proc")), 1):
        (disk / f"vdx{number}").mkdir()
        device = os.stat(directory).st_dev
        (numbers / f"{os.major(device)}:{os.minor(device)}").symlink_to(disk / f"vdx{number}")
    return root


def test_partitions_of_a_disk_share_its_setting(root: Path, tmp_path: Path) -> None:
    setting = read_ahead_file("/proc", root)
    assert setting is not None
    first, second = ReadAhead(str(tmp_path), 64 << 10, root), ReadAhead("/proc", 32 << 10, root)
    first.set()
    second.set()
    assert setting.read_text() == "32\n"
    first.restore()
    assert setting.read_text() == "32\n"
    restore_left()
    assert setting.read_text() == "32\n"
    second.restore()
    assert setting.read_text() == "128\n"
    assert not list((tmp_path / "run").iterdir())


def test_a_value_that_cannot_be_restored_is_kept(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    setting = read_ahead_file("/proc", root)
    assert setting is not None
    mount = ReadAhead("/proc", 32 << 10, root)
    mount.set()
    setting.unlink()
    setting.mkdir()  # EISDIR
    mount.restore()
    assert "cannot restore read_ahead_kb of vdx" in caplog.text
    setting.rmdir()
    setting.write_text("32\n")
    again = ReadAhead("/proc", 64 << 10, root)
    again.set()
    assert setting.read_text() == "64\n"
    again.restore()
    assert setting.read_text() == "128\n"


def test_the_value_of_a_removed_disk_is_deleted(root: Path, tmp_path: Path) -> None:
    setting = read_ahead_file("/proc", root)
    assert setting is not None
    mount = ReadAhead("/proc", 32 << 10, root)
    mount.set()
    setting.unlink()
    setting.parent.rmdir()
    mount.restore()
    assert not list((tmp_path / "run").iterdir())
    with pytest.raises(MissingRequirement, match="no read_ahead_kb"):
        ReadAhead("/proc", 32 << 10, root)


def test_a_truncated_saved_value_is_ignored(root: Path, tmp_path: Path) -> None:
    """A full disk or a crash can truncate it; the setting had not been changed at that time."""
    setting = read_ahead_file("/proc", root)
    assert setting is not None
    (tmp_path / "run").mkdir()
    note = tmp_path / "run/read-ahead-vdx"
    note.write_text("12")
    restore_left()
    assert setting.read_text() == "128\n" and not note.exists()
    note.write_text("12")
    mount = ReadAhead("/proc", 32 << 10, root)
    mount.set()
    mount.restore()
    assert setting.read_text() == "128\n" and not note.exists()
