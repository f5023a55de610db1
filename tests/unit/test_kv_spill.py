"""Spill files: data is the same after a write and a restart, and errors name the cause."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcache.errors import DataError, LlmcacheError, MissingRequirement, UsageError
from llmcache.kv.spill import KvShape, SpillFile, SpillReader, layout, raw, reader
from llmcache.kv.spill.checksum import by_tables, checksums
from llmcache.kv.spill.layout import Commit
from llmcache.kv.spill.raw import RawFile
from llmcache.units import BLOCK_BYTES
from tests.unit.kv_parts import Rows, append, counted_reads, ids, restored

SHAPE = KvShape("tiny", layers=2, kv_heads=2, head_dim=4, page_tokens=4)
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("interleaved", [False, True])
def test_pages_are_read_in_any_order_and_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interleaved: bool
) -> None:
    with SpillFile.create(tmp_path / "a.kv", SHAPE, extent_pages=8, interleaved=interleaved) as file:
        append(file, 0, ids(0, 80))
        keys, values = file.read(0, 1, list(range(20)))
        order = [19, 2, 3, 4, 0, 15, 16, 3]
        reads = counted_reads(monkeypatch)
        part = file.read(0, 1, order, threads=1)
        assert part[0].tobytes() == keys[order].tobytes()
        assert part[1].tobytes() == values[order].tobytes()
        together = [2, 3, 2, 3, 2, 2, 2] if interleaved else [1, 2, 2, 1, 1, 1] * 2
        assert sorted(size // 4096 for size in reads) == sorted(together), "pages 15 and 16 are in different extents"
        for wrong in ([20], [-1]):
            with pytest.raises(ValueError, match="has 20 pages"):
                file.read(0, 0, wrong)


WIDE = KvShape("wide", 1, kv_heads=3, head_dim=600, dtype="float16", page_tokens=8, value_dim=64)
"""Keys of a page take 8 blocks, and rows of 1200 bytes lie in one or two of them; values take one."""


@pytest.mark.parametrize("aio", [True, False], ids=["at a time", "one by one"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_reads_of_rows_read_only_their_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aio: bool, interleaved: bool
) -> None:
    shape, random = replace(WIDE, value_dim=598 if interleaved else 64), np.random.default_rng(5)
    monkeypatch.setattr(raw, "free_queues", [])
    monkeypatch.setattr(reader, "SCATTERED_ROWS", 25)
    if not aio:
        monkeypatch.setattr(raw, "AIO_NUMBERS", {})
    with SpillFile.create(tmp_path / "a.kv", shape, extent_pages=4, interleaved=interleaved) as file:
        assert file.interleaved == interleaved
        append(file, 0, ids(0, 48))
        order = np.array([0, 1, 3, 5])
        whole = file.read(0, 0, order)
        reads = counted_reads(monkeypatch)
        for count in (0, 1, 2, 9, 60):
            of_page, rows = random.integers(0, 4, count), random.integers(0, 24, count)
            reads.clear()
            found, read_bytes = file.read_rows(0, 0, order[of_page], rows)
            for got, expected in zip(found, whole, strict=True):
                assert got.tobytes() == expected.reshape(4, 24, -1)[of_page, rows].tobytes()
            assert sum(reads) == read_bytes <= count * (4 if interleaved else 3) * 4096
            assert count != 1 or len(reads) == 2 - interleaved
            assert count > 9 or read_bytes < 4 * sum(shape.slot_sizes)
    assert len(raw.free_queues) == 1


@pytest.mark.parametrize(("version", "more", "blocks"), [(1, {}, 9), (2, {"parts": [8, 1]}, 2)])
def test_older_files_keep_their_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, more: dict[str, Any], blocks: int
) -> None:
    """In version 1, a page has one checksum for keys and one for values, and the header does not mention parts."""
    path, fields = tmp_path / "a.kv", {**WIDE.to_json(), "extent_pages": 4, **more}
    with monkeypatch.context() as patch:
        patch.setattr(layout, "MOST_PARTS", 1 if version == 1 else layout.MOST_PARTS)
        with SpillFile.create(path, WIDE, extent_pages=4) as file:
            append(file, 0, ids(0, 40))
    identity = json.dumps(fields, sort_keys=True).encode()
    start = struct.pack("<II", version, len(identity))
    header = b"LLMCKV\r\n" + start + struct.pack("<I", zlib.crc32(identity, zlib.crc32(start))) + identity
    with path.open("r+b") as stream:
        stream.write(header.ljust(4096, b"\0"))
    for first in (40, 56):
        with SpillFile.open(path, WIDE) as file:
            assert restored(file, 0) == list(range(first))
            append(file, 0, ids(first, 16))
            (keys, _), read_bytes = file.read_rows(0, 0, np.array([3]), np.array([7]))
            assert keys.tobytes() == file.read(0, 0, [3])[0][0, 0, 7].tobytes()
            assert read_bytes == blocks * 4096, "version 1 has one checksum per page"
    assert path.read_bytes()[:4096] == header.ljust(4096, b"\0")


def test_one_writer_and_many_readers(tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    with SpillFile.create(path, SHAPE) as file:
        append(file, 0, ids(0, 8))
        with pytest.raises(MissingRequirement, match="another process is writing"):
            SpillFile.open(path)
        with SpillReader.open(path) as reader:
            assert restored(reader, 0) == list(range(8))


def test_a_read_while_a_writer_removes_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader sees the old commit and the new entries: it reads again instead of reporting damage."""
    with SpillFile.create(tmp_path / "a.kv", SHAPE) as file:
        append(file, 0, ids(0, 40))
        file.flush()
        commit_of, seen = reader.commit_of, []

        def and_then_truncate(raw: RawFile) -> Commit:
            seen.append(commit_of(raw))
            if len(seen) == 1:
                file.truncate(0, 2)
            return seen[-1]

        monkeypatch.setattr(reader, "commit_of", and_then_truncate)
        with SpillReader.open(tmp_path / "a.kv") as opened:
            assert restored(opened, 0) == list(range(8))
        assert seen[0] != seen[-1]


def test_a_file_created_twice_at_the_same_time_has_one_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second starts just before the first renames its file."""
    path, made, sync = tmp_path / "a.kv", list[SpillFile](), RawFile.sync

    def second(self: RawFile) -> None:
        monkeypatch.setattr(RawFile, "sync", sync)
        sync(self)
        made.append(SpillFile.create(path, SHAPE))

    monkeypatch.setattr(RawFile, "sync", second)
    with pytest.raises(UsageError, match="the file exists"):
        SpillFile.create(path, SHAPE)
    (owner,) = made
    append(owner, 0, ids(0, 8))
    owner.close()
    with SpillReader.open(path) as reader:
        assert restored(reader, 0) == list(range(8))
    assert os.listdir(tmp_path) == ["a.kv"]


def test_holes_in_a_file_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read, left = tmp_path / "a.kv", RawFile.read, iter(range(1000))
    with SpillFile.create(path, SHAPE, extent_pages=2) as file:
        append(file, 0, ids(0, 40))
    os.truncate(path, 1 << 40)
    with path.open("r+b") as stream:
        stream.seek(1 << 39)
        stream.write(b"something")

    def counted(self: RawFile, size: int, offset: int) -> bytes:
        next(left)
        return read(self, size, offset)

    monkeypatch.setattr(RawFile, "read", counted)
    for first in (40, 80):
        with SpillFile.open(path, SHAPE) as file:
            assert restored(file, 0) == list(range(first))
            append(file, 0, ids(first, 40))


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("model", KvShape("other", 2, 2, 4, page_tokens=4)),
        ("kv_heads", KvShape("tiny", 2, 1, 4, page_tokens=4)),
        ("dtype", KvShape("tiny", 2, 2, 4, "bfloat16", page_tokens=4)),
    ],
)
def test_another_models_file_is_refused(tmp_path: Path, field: str, other: KvShape) -> None:
    SpillFile.create(tmp_path / "a.kv", SHAPE).close()
    with pytest.raises(DataError, match=f"spill file of another model .*{field}: ") as caught:
        SpillFile.open(tmp_path / "a.kv", other)
    assert caught.value.exit_code == 5 and caught.value.message.count("not ") == 1, "it names only the field that differs"


@pytest.mark.parametrize(
    ("place", "written", "message"),
    [
        (0, b"", "not a spill file"),
        (0, b"GGUF" + bytes(9000), "not a spill file"),
        (8, struct.pack("<I", 4), "version: must be at most 3 for this llmcache, not 4"),
    ],
)
def test_other_files_and_newer_versions_are_refused(tmp_path: Path, place: int, written: bytes, message: str) -> None:
    path = tmp_path / "a.kv"
    with pytest.raises(MissingRequirement, match="No such file"):
        SpillReader.open(path)
    SpillFile.create(path, SHAPE).close()
    data = path.read_bytes()
    path.write_bytes(data[:place] + written + data[place + len(written) :] if place else written)
    with pytest.raises(DataError, match=message):
        SpillReader.open(path)


def test_a_failed_read_among_many_raises_its_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(200)))
    raw, buffer = RawFile(tmp_path / "a", os.O_RDONLY), np.zeros(60, np.uint8)

    def reads(*offsets: int) -> Rows:
        return np.stack([offsets, buffer.ctypes.data + np.array([0, 10, 31]), [10, 20, 29]], axis=1)

    raw.read_runs(reads(100, 0, 150))
    assert buffer.tolist() == [*range(100, 110), *range(20), 0, *range(150, 179)]
    with pytest.raises(DataError, match="ends at byte 200, but a page extends to byte 210"):
        raw.read_runs(reads(100, 190, 0))
    raw.close()
    with pytest.raises(MissingRequirement, match="reading at 0: Bad file descriptor"):
        raw.read_runs(reads(100, 0, 150))


def calls_failing(monkeypatch: pytest.MonkeyPatch, name: str, code: int, after: int) -> list[int]:
    """Make os.`name` fail from its `after`-th call on; return the count of calls."""
    real, calls = getattr(os, name), [0]

    def failing(*arguments: object) -> object:
        calls[0] += 1
        if calls[0] > after:
            raise OSError(code, os.strerror(code))
        return real(*arguments)

    monkeypatch.setattr(os, name, failing)
    return calls


@pytest.mark.parametrize(
    ("name", "code"),
    [("pwrite", errno.ENOSPC), ("pwrite", errno.EIO), ("posix_fallocate", errno.ENOSPC), ("fdatasync", errno.EIO)],
)
def test_a_disk_failure_at_any_call_loses_no_flushed_data(tmp_path: Path, name: str, code: int) -> None:
    """After any failure, the file can be opened, has all flushed data, and can be extended."""
    for after in range(100):
        made = None
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(MissingRequirement):
            calls_failing(patch, name, code, after)
            made = SpillFile.create(tmp_path / "new.kv", SHAPE)
        if made:
            made.close()
            break
        assert not list(tmp_path.iterdir()), "no files remain if the file cannot be created"
    assert made
    for after in range(100):
        path = tmp_path / f"{after}.kv"
        file = SpillFile.create(path, SHAPE, extent_pages=2)
        append(file, 0, ids(0, 12))
        file.flush()
        with pytest.MonkeyPatch.context() as patch:
            calls = calls_failing(patch, name, code, after)
            try:
                append(file, 0, ids(12, 12))
                append(file, 1, ids(12, 8))
                file.flush()
            except LlmcacheError as error:
                assert error.exit_code == 3
                assert code != errno.ENOSPC or ("no space left" in error.message and error.hint)
            done = calls[0] <= after
        if not done:  # the disk works again: the file can be extended, even if a rollback had failed
            file.truncate(0, 3)
            append(file, 0, ids(12, 4))
        file.close()
        with SpillFile.open(path, SHAPE) as again:
            found = restored(again, 0)
            assert found == list(range(24 if done else 16))
            assert not again.torn
            assert set(restored(again, 1)) <= set(range(12, 20))
        path.unlink()
        if done:
            return
    raise AssertionError("never got through")


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    good = np.zeros((2, 4, 4), np.float16)
    with SpillFile.create(tmp_path / "a.kv", SHAPE) as file:
        for keys, values, message in (
            (good[:1], good, "keys: "),
            (good, good[:, :, :3], "values: "),
            (good.astype(np.float32), good, "keys: must be float16 .*, not float32"),
            (good, good[:, :3], "values: "),
            (good[:, :0], good[:, :0], "keys: "),
        ):
            with pytest.raises(ValueError, match=message):
                file.append(0, 0, keys, values)
        with pytest.raises(ValueError, match="layer: must be from 0 to 1, not 2"):
            file.append(0, 2, good, good)
        with pytest.raises(ValueError, match=r"sequence: must be from 0 to .*, not -1"):
            file.append(-1, 0, good, good)
        assert file.sequences == [] and file.written_bytes == 0
        append(file, 0, ids(0, 6))
        with pytest.raises(ValueError, match="partial page"):
            append(file, 0, ids(6, 4))
    for field, wrong in (("dtype", "float8"), ("layers", 0), ("head_dim", -4), ("page_tokens", 0)):
        with pytest.raises(ValueError, match=f"{field}: "):
            replace(SHAPE, **{field: wrong})  # type: ignore[arg-type]


def crc32c(data: bytes, crc: int = 0xFFFFFFFF) -> int:
    """Return the CRC register after `data`, computed bit by bit."""
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc


def test_checksums_are_the_same_on_every_machine() -> None:
    assert crc32c(b"123456789") ^ 0xFFFFFFFF == 0xE3069283, "the check value of CRC-32C"
    for size in (8, 16, 24, 32, 40, 72, 128):
        slots = np.random.default_rng(size).integers(0, 256, (3, size), dtype=np.uint8)
        expected = []
        for slot in slots:
            words = [slot.tobytes()[at : at + 8] for at in range(0, size, 8)]
            whole = len(words) // 4 * 4
            dealt = [b"".join(words[lane:whole:4]) for lane in range(4)]
            dealt[0] += b"".join(words[whole:])
            expected.append(crc32c(b"".join(crc32c(part).to_bytes(8, "little") for part in dealt)))
        assert checksums(slots).tolist() == [[crc] for crc in expected]
    drawn = np.random.default_rng(0).integers(0, 1 << 63, 9, dtype=np.uint64)
    summed = functools.reduce(lambda crc, word: np.uint64(by_tables(crc, word)), drawn, np.uint64(0xFFFFFFFF))
    assert summed == crc32c(drawn.tobytes()), "on a CPU without the instruction"


def test_a_failed_close_raises_and_closes_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, closed, close = RawFile(tmp_path / "a", os.O_RDWR | os.O_CREAT), [], os.close
    raw.write(bytes(BLOCK_BYTES), 0)
    raw.open_direct()
    expected = [fd for fd in map(int, os.listdir("/proc/self/fd")) if raw.path == Path(f"/proc/self/fd/{fd}").resolve()]
    assert len(expected) == 1 + raw.direct

    def dead(fd: int) -> None:
        close(fd)
        closed.append(fd)
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    monkeypatch.setattr(os, "close", dead)
    with pytest.raises(MissingRequirement, match="a: closing: Transport endpoint is not connected"):
        raw.close()
    assert sorted(closed) == sorted(expected)
    raw.close()  # nothing is left
