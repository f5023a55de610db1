"""Spill files after crashes of the machine, damage and failed syncs: flushed data survives, and restored data is right."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmcache.arrays import Bytes
from llmcache.errors import DataError, LlmcacheError, MissingRequirement
from llmcache.kv.spill import KvShape, SpillFile, SpillReader
from llmcache.kv.spill.raw import RawFile, problem
from tests.conftest import examples
from tests.unit.kv_parts import append, flip, ids, restored

SECTOR = 512
# The setting replaces the profile's suppressions, so it has to repeat them.
SUPPRESSED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
SHAPE = KvShape("tiny", layers=2, kv_heads=1, head_dim=4, page_tokens=4)
ONE_LAYER = KvShape("tiny", layers=1, kv_heads=1, head_dim=2, page_tokens=2)
State = dict[int, tuple[int, ...]]


@pytest.fixture(scope="module", autouse=True)
def _no_real_sync() -> Iterator[None]:
    """The disk that loses power is a model; waiting for the real one thousands of times would be slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda _fd: None)
        yield


Write = tuple[int, bytes]
"""Offset and data. Without data: the file grew to the offset, or was cut to minus the offset."""
SYNC: Write = (0, b"")


class Disk:
    """A disk with a cache: records all writes and syncs of a file, and creates the image after a crash."""

    def __init__(self) -> None:
        self.events: list[Write] = [SYNC]

    def image(self, path: Path, at: int, lost: random.Random) -> None:
        """Write the disk contents after a crash before event `at`: of unsynced writes, any sectors may be missing."""
        data, events = bytearray(), self.events[:at]
        synced = max((index for index, event in enumerate(events) if event is SYNC), default=0)
        for index, (offset, content) in enumerate(events):
            data.extend(bytes(max(0, offset + len(content) - len(data))))
            if offset < 0:
                del data[-offset:]
                continue
            for start in range(offset // SECTOR * SECTOR, offset + len(content), SECTOR):
                first, end = max(start, offset), min(start + SECTOR, offset + len(content))
                if index < synced or lost.random() < 0.7:
                    data[first:end] = content[first - offset : end - offset]
        path.write_bytes(data)


@contextmanager
def recorded(disk: Disk) -> Iterator[None]:
    recorders: dict[str, Callable[..., object]] = {
        "write": lambda data, offset, *_: disk.events.append((offset, bytes(data))),
        "grow": lambda _, end: disk.events.append((end, b"")),  # only the length is recorded, the content is zero
        "cut": lambda end: disk.events.append((-end, b"")),
        "sync": lambda: disk.events.append(SYNC),
    }

    def recording(name: str, real: Callable[..., None]) -> Callable[..., None]:
        def instead(self: RawFile, *arguments: Any) -> None:
            real(self, *arguments)
            recorders[name](*arguments)

        return instead

    with pytest.MonkeyPatch.context() as patch:
        for name in recorders:
            patch.setattr(RawFile, name, recording(name, getattr(RawFile, name)))
        yield


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed file with two sequences, one of them truncated and rewritten."""
    path = tmp_path_factory.mktemp("small") / "a.kv"
    with SpillFile.create(path, ONE_LAYER, extent_pages=2) as file:
        append(file, 0, ids(0, 7))
        file.flush()
        file.truncate(0, 1)
        append(file, 0, ids(2, 3))
        append(file, 1, ids(50, 2))
    return path


def contents(path: Path) -> list[list[int]] | None:
    """Return all tokens of a file, None if it is refused."""
    try:
        with SpillReader.open(path, ONE_LAYER, direct=False) as file:
            return [restored(file, 0), restored(file, 1)]
    except DataError as error:
        assert error.exit_code == 5 and str(path) in error.message
        return None


def lengths_of(path: Path, shortest: int) -> list[int]:
    """Return file lengths, descending: every byte near data and block borders, some elsewhere."""
    data = np.fromfile(path, np.uint8)
    candidates = np.zeros(len(data) + 1, bool)
    for place in [*np.flatnonzero(data), *range(0, len(data) + 1, 4096)]:
        candidates[max(0, place - 2) : place + 6] = candidates[max(0, place - 2) : place + 66 : 7] = True
    candidates[::121] = True
    return [int(length) for length in np.flatnonzero(candidates)[::-1] if length >= shortest]


def test_a_file_cut_at_every_byte(small: Path, tmp_path: Path) -> None:
    """The flushed tokens are complete, or the file is refused; both occur."""
    path = tmp_path / "a.kv"
    shutil.copy(small, path)
    whole = contents(path)
    assert whole == [[0, 1, 2, 3, 4], [50, 51]]
    outcomes = []
    for length in lengths_of(path, 0):
        os.truncate(path, length)
        found = contents(path)
        assert found in (None, whole)
        outcomes.append(found is None)
    assert outcomes == sorted(outcomes), "refused from some length on"
    assert 0 < sum(outcomes) < len(outcomes)


def test_a_file_cut_at_every_byte_before_it_was_flushed(tmp_path: Path) -> None:
    """The torn tail of a killed process: a prefix of the appended tokens."""
    whole, path = tmp_path / "whole.kv", tmp_path / "a.kv"
    file = SpillFile.create(whole, ONE_LAYER, extent_pages=1)
    for start in range(0, 8, 2):
        append(file, 0, ids(start, 2))
    shutil.copy(whole, path)  # not closed, so nothing is committed
    file.close()
    lengths = []
    for length in lengths_of(path, 8192):
        os.truncate(path, length)
        found = contents(path)
        assert found is not None and found[0] == list(range(len(found[0]))) and not found[1]
        lengths.append(len(found[0]))
    assert lengths == sorted(lengths, reverse=True) and set(lengths) == {8, 6, 4, 2, 0}


def test_no_flipped_bit_is_served(small: Path, tmp_path: Path) -> None:
    """After a flip of each byte, the contents are right and complete, or the file or page is refused."""
    path, refused = tmp_path / "a.kv", 0
    shutil.copy(small, path)
    data = np.fromfile(path, np.uint8)
    interesting = np.flatnonzero(data)
    others = np.random.default_rng(0).choice(np.flatnonzero(data == 0), 500, replace=False)
    for place in [*interesting, *others]:
        flip(path, int(place))
        found = contents(path)
        assert found in (None, [[0, 1, 2, 3, 4], [50, 51]])
        refused += found is None
        flip(path, int(place))
    assert refused > len(interesting) // 2


# Failed syncs


class Cache:
    """The page cache of a file on a disk that fails on request; the kernel drops pages that it could not write."""

    def __init__(self, chance: random.Random, share: float = 0.5) -> None:
        self.fails = False
        self.lasts = 0  # successful syncs before one fails
        self._chance, self._share = chance, share
        self._before: list[tuple[int, bytes]] = []  # the bytes that each write since the last sync replaced

    def revert_unsynced(self, fd: int) -> None:
        """Revert any sectors written since the last sync."""
        size = os.fstat(fd).st_size
        for offset, data in reversed(self._before):
            for start in range(offset // SECTOR * SECTOR, offset + len(data), SECTOR):
                first, end = max(start, offset), min(start + SECTOR, offset + len(data), size)
                if first < end and self._chance.random() < self._share:
                    os.pwrite(fd, data[first - offset : end - offset], first)
        self._before = []

    @contextmanager
    def used(self) -> Iterator[None]:
        """Route all writes and syncs of the body through this cache."""
        write = RawFile.write

        def writing(file: RawFile, data: bytes | Bytes, offset: int, direct: bool = False) -> None:
            self._before.append((offset, os.pread(file.fd, len(data), offset).ljust(len(data), b"\0")))
            write(file, data, offset, direct)

        def syncing(file: RawFile) -> None:
            if self.fails and not self.lasts:
                self.revert_unsynced(file.fd)
                raise problem(file.path, "writing back", OSError(errno.EIO, "failed"))
            self._before, self.lasts = [], max(0, self.lasts - 1)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RawFile, "write", writing)
            patch.setattr(RawFile, "sync", syncing)
            yield


class UnreliableFile:
    """A file on an unreliable disk, and its expected contents: prefixes of `state` that include all of `flushed`."""

    def __init__(self, path: Path, cache: Cache) -> None:
        self.file, self.cache = SpillFile.create(path, SHAPE, extent_pages=2, interleaved=True, direct=False), cache
        self.state: State = {}
        self.flushed: State = {}
        self.next_id = 0

    def do(self, operation: str, sequence: int, number: int) -> None:
        """Carry out one operation; repeat a failed one once the disk works, or accept that data is reported lost."""
        if operation == "fail":
            self.cache.fails, self.cache.lasts = True, number
        elif operation == "crash":
            self.cache.fails = False
            self.cache.revert_unsynced(self.file.raw.fd)
            self.file.raw.close()
            self.file = SpillFile.open(self.file.path, SHAPE, direct=False)
            self.adopt()
        else:
            self.attempt(lambda: getattr(self, operation)(sequence, number))
        self.check()

    def attempt(self, call: Callable[[], None]) -> None:
        """Repeat until it succeeds; the disk may cause one error, and the lost data a second one."""
        for expected in (MissingRequirement, DataError, None):
            try:
                call()
                return
            except LlmcacheError as error:
                assert expected is not None, error.message
                assert isinstance(error, DataError) or (self.cache.fails and expected is MissingRequirement)
                self.cache.fails = False
                if isinstance(error, DataError):
                    self.adopt()

    def append(self, sequence: int, number: int) -> None:
        whole = len(self.state.get(sequence, ())) // 4
        if set(self.file.pages_by_layer(sequence)) != {whole} or len(self.state.get(sequence, ())) % 4:
            self.truncate(sequence, whole)
        new = ids(self.next_id, number)
        self.next_id += number
        append(self.file, sequence, new)
        self.state = {**self.state, sequence: (*self.state.get(sequence, ()), *map(int, new))}

    def truncate(self, sequence: int, number: int) -> None:
        own = self.state.get(sequence, ())[: 4 * number]
        # applies even if the truncation fails
        self.flushed = {**self.flushed, sequence: self.flushed.get(sequence, ())[: len(own)]}
        self.file.truncate(sequence, number)
        self.state = {**self.state, sequence: own}

    def flush(self, _sequence: int = 0, _number: int = 0) -> None:
        self.file.flush()
        self.flushed = self.state

    def adopt(self) -> None:
        """Accept the file's contents as the expected state, if they are a valid prefix."""
        for sequence in range(3):
            found, state = tuple(restored(self.file, sequence)), self.state.get(sequence, ())
            assert found == state[: len(found)] and len(found) >= len(self.flushed.get(sequence, ())) // 4 * 4
            self.state = {**self.state, sequence: found}

    def check(self) -> None:
        """Compare everything. Before, interrupted operations were repeated and lost data was reported."""
        for sequence in range(3):
            found, state = tuple(restored(self.file, sequence)), self.state.get(sequence, ())
            assert found == state


FAILING = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["append", "truncate"]), st.integers(0, 2), st.integers(1, 14)),
        st.tuples(st.sampled_from(["fail", "flush", "flush", "crash"]), st.just(0), st.integers(0, 2)),
    ),
    max_size=14,
)


@given(FAILING, st.randoms(use_true_random=False))
@settings(max_examples=examples(60), deadline=None, suppress_health_check=SUPPRESSED)
def test_data_lost_by_a_failed_sync_is_reported(
    tmp_path: Path, operations: list[tuple[str, int, int]], chance: random.Random
) -> None:
    """No success is followed by missing data, and no file is refused."""
    path, cache = tmp_path / "a.kv", Cache(chance)
    path.unlink(missing_ok=True)
    with cache.used():
        model = UnreliableFile(path, cache)
        for operation in operations:
            model.do(*operation)
        model.do("flush", 0, 0)
        for _ in range(2):
            model.do("crash", 0, 0)
        assert model.state == {**model.state, **model.flushed}
        model.file.close()


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_a_failed_commit_may_be_on_the_disk_or_not(tmp_path: Path, is_on_disk: bool) -> None:
    """Tokens appended after it are not part of it in either case, and the next commit counts all."""
    path, cache = tmp_path / "a.kv", Cache(random.Random(1), share=0 if is_on_disk else 1)
    file = SpillFile.create(path, SHAPE, extent_pages=2, direct=False)
    with cache.used():
        append(file, 0, ids(0, 4))
        cache.fails, cache.lasts = True, 1
        with pytest.raises(MissingRequirement, match="writing back"):
            file.flush()
    append(file, 0, ids(4, 8))
    file.raw.close()
    for _ in range(2):
        with SpillFile.open(path, SHAPE, direct=False) as file:
            assert restored(file, 0) == list(range(12))
    with SpillFile.open(path, SHAPE, direct=False) as file:
        torn = file.key_ranges(0, 1, [1])[0][1]
        file.truncate(0, 1)
        cache = Cache(random.Random(1), share=0)
        cache.fails, cache.lasts = True, 1
        with cache.used(), pytest.raises(MissingRequirement, match="writing back"):
            file.flush()
        append(file, 0, ids(4, 8))
        flip(path, torn)
        file.raw.close()
    with SpillFile.open(path, SHAPE, direct=False) as file:
        assert restored(file, 0) == list(range(4))
