"""Measuring storage: reads of a real disk, cleanup, and directories that cannot be measured."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from llmcache.cgroup import Cgroup
from llmcache.errors import MissingRequirement
from llmcache.mount.client import bandwidth
from llmcache.mount.client.bandwidth import LEAST_BYTES, REQUEST_BYTES, measure, measured_storage
from llmcache.mount.client.mountpoint import FSTYPE
from tools.bench.sides import environment

MB = 10**6


@pytest.fixture
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a directory on a disk and shorten the measurement."""
    try:
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600))
        bandwidth.refuse_memory(str(tmp_path))
    except (OSError, MissingRequirement) as error:
        pytest.skip(f"{tmp_path} is on no disk: {error}")
    monkeypatch.setattr(bandwidth, "READ_S", 0.1)
    monkeypatch.setattr(bandwidth, "WRITTEN_BYTES", LEAST_BYTES)
    yield tmp_path


def refusing(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Make opening a temporary file fail with `code`."""
    real = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(code, os.strerror(code))
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)


def tried(attempt: Callable[[], None]) -> None:
    """Retry an attempt, because a pause of a shared machine or disk spoils a short measurement."""
    for _ in range(7):
        with contextlib.suppress(AssertionError, MissingRequirement):
            return attempt()
    return attempt()


def test_a_temporary_file_is_read_and_removed(on_disk: Path) -> None:
    def attempt() -> None:
        found = measure(str(on_disk))
        assert (found.file, found.directory) == ("temporary", str(on_disk))
        assert found.bytes_read >= LEAST_BYTES // 2 and found.seconds > 0
        assert found.bandwidth == pytest.approx(found.bytes_read / found.seconds, rel=0.5)

    gc.collect()  # otherwise files of an earlier test could be closed during the measurement
    before = set(os.listdir("/proc/self/fd"))
    tried(attempt)
    assert list(on_disk.iterdir()) == [] and set(os.listdir("/proc/self/fd")) <= before


def test_an_existing_large_file_is_read_instead(on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch, errno.EROFS)
    with (on_disk / "sparse.bin").open("wb") as file:
        file.truncate(8 * LEAST_BYTES)
    (on_disk / "small.bin").write_bytes(bytes(REQUEST_BYTES))
    with pytest.raises(MissingRequirement):
        measure(str(on_disk))  # neither file is usable: holes cause no reads
    large = on_disk / "large.bin"
    large.write_bytes(os.urandom(LEAST_BYTES))

    def attempt() -> None:
        result = measured_storage(str(on_disk))
        assert (result.source, result.detail["file"]) == ("measured", str(large))
        assert result.bandwidth > 0 and result.detail["bytes_read"] >= LEAST_BYTES // 2

    tried(attempt)


def test_bursts_and_hanging_reads_do_not_change_the_rate() -> None:
    """200 MB at once, then 20 MB every 0.2 s, as under a throttle."""
    begin = [(0.01, 200 * MB)]
    bursts = [(0.2 * burst + 0.001 * part, MB) for burst in range(1, 11) for part in range(20)]
    _, _, rate = bandwidth.sustained(begin + bursts)
    assert rate == pytest.approx(100 * MB, rel=0.03)
    read, seconds, rate = bandwidth.sustained([*((0.01 * number, MB) for number in range(1, 101)), (9.0, MB)])
    assert (read, seconds) == (100 * MB, 9.0 - 0.01) and rate > 0
    with pytest.raises(MissingRequirement, match="fewer than two"):
        bandwidth.sustained([(15.0, MB)])


def test_unwritable_and_unreadable_directories_are_explained(on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for code in (errno.EROFS, errno.ENOSPC, errno.EOPNOTSUPP):
        with monkeypatch.context() as patch:
            refusing(patch, code)
            with pytest.raises(MissingRequirement) as caught:
                measure(str(on_disk))
        assert caught.value.message == f"--measure: cannot write in {on_disk}: {os.strerror(code)}"
        assert caught.value.hint
    with (
        monkeypatch.context() as patch,
        pytest.raises(MissingRequirement, match=r"cannot open a file in .*Permission denied"),
    ):
        patch.setattr(os, "scandir", Mock(side_effect=PermissionError(errno.EACCES, os.strerror(errno.EACCES))))
        measure(str(on_disk))
    monkeypatch.setattr(os, "preadv", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(MissingRequirement, match=r"cannot read in .*Input/output error"):
        measure(str(on_disk))
    assert set(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize(("fstype", "why"), [("tmpfs", "is in memory"), (FSTYPE, "answers from its cache")])
def test_memory_file_systems_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fstype: str, why: str) -> None:
    monkeypatch.setattr(bandwidth, "fstype_at", lambda _path: fstype)
    with pytest.raises(MissingRequirement, match=why):
        measure(str(tmp_path))


@pytest.mark.cgroup
def test_the_rate_of_a_throttled_disk_is_the_throttle(on_disk: Path) -> None:
    """The measurement runs in its own process, because the throttle applies to tasks of a cgroup."""
    limit = 40 * MB
    with Cgroup("measure", directory=on_disk, read_bps=limit) as group:
        command = [sys.executable, "-c", "import sys; from llmcache.mount.client import bandwidth; bandwidth.READ_S = 1; "
                   "print(bandwidth.measure(sys.argv[1]).bandwidth)", str(on_disk)]  # fmt: skip

        def attempt() -> None:
            result = subprocess.run(
                group.wrap(command), capture_output=True, text=True, timeout=120, env=environment(), check=False
            )
            assert result.returncode == 0, result.stderr
            assert int(result.stdout) == pytest.approx(limit, rel=0.15)

        tried(attempt)
