"""Spill files on a disk whose syncs fail now and then, over a system that lets go what it could not write."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcache.arrays import Bytes
from llmcache.errors import DataError, EnvironmentProblem, LlmcacheError
from llmcache.kv.spill import SpillFile
from llmcache.kv.spill.raw import RawFile, problem
from tests.conftest import examples
from tests.property.test_kv_spill_crashes import SECTOR, SHAPE, SUPPRESSED, State
from tests.unit.kv_parts import append, flip, ids, restored


class Cache:
    """What the system keeps of a file in memory, on a disk that fails when told to: it lets go what it could not write."""

    def __init__(self, chance: random.Random, share: float = 0.5) -> None:
        self.fails = False
        self.lasts = 0  # syncs that go well before one fails
        self._chance, self._share = chance, share
        self._before: list[tuple[int, bytes]] = []  # what each write since the last sync has replaced

    def let_go(self, fd: int) -> None:
        """Make any sectors of what was not synced what they were before."""
        size = os.fstat(fd).st_size
        for offset, data in reversed(self._before):
            for start in range(offset // SECTOR * SECTOR, offset + len(data), SECTOR):
                first, end = max(start, offset), min(start + SECTOR, offset + len(data), size)
                if first < end and self._chance.random() < self._share:
                    os.pwrite(fd, data[first - offset : end - offset], first)
        self._before = []

    @contextmanager
    def used(self) -> Iterator[None]:
        """Have all writes and syncs of the body go through it."""
        write = RawFile.write

        def writing(file: RawFile, data: bytes | Bytes, offset: int, direct: bool = False) -> None:
            self._before.append((offset, os.pread(file.fd, len(data), offset).ljust(len(data), b"\0")))
            write(file, data, offset, direct)

        def syncing(file: RawFile) -> None:
            if self.fails and not self.lasts:
                self.let_go(file.fd)
                raise problem(file.path, "writing back", OSError(errno.EIO, "failed"))
            self._before, self.lasts = [], max(0, self.lasts - 1)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RawFile, "write", writing)
            patch.setattr(RawFile, "sync", syncing)
            yield


class Doubtful:
    """A file on a disk that fails now and then, and what must be in it: beginnings of `state`, with all of `flushed`."""

    def __init__(self, path: Path, cache: Cache) -> None:
        self.file, self.cache = SpillFile.create(path, SHAPE, extent_pages=2, direct=False), cache
        self.state: State = {}
        self.flushed: State = {}
        self.next_id = 0

    def do(self, operation: str, sequence: int, number: int) -> None:
        """Do one operation; what has failed is done again once the disk works, or told to be lost."""
        if operation == "fail":
            self.cache.fails, self.cache.lasts = True, number
        elif operation == "crash":
            self.cache.fails = False
            self.cache.let_go(self.file._raw.fd)
            self.file._raw.close()
            self.file = SpillFile.open(self.file.path, SHAPE, direct=False)
            self.adopt()
        else:
            self.attempt(lambda: getattr(self, operation)(sequence, number))
        self.check()

    def attempt(self, call: Callable[[], None]) -> None:
        """Call until there is no error; one may come of the disk, and one tell what that has cost."""
        for expected in (EnvironmentProblem, DataError, None):
            try:
                call()
                return
            except LlmcacheError as error:
                assert expected is not None, error.message
                assert isinstance(error, DataError) or (self.cache.fails and expected is EnvironmentProblem)
                self.cache.fails = False
                if isinstance(error, DataError):
                    self.adopt()

    def append(self, sequence: int, number: int) -> None:
        """Add tokens, behind whole pages."""
        whole = len(self.state.get(sequence, ())) // 4
        if set(self.file.pages_by_layer(sequence)) != {whole} or len(self.state.get(sequence, ())) % 4:
            self.truncate(sequence, whole)
        new = ids(self.next_id, number)
        self.next_id += number
        append(self.file, sequence, new)
        self.state = {**self.state, sequence: (*self.state.get(sequence, ()), *map(int, new))}

    def truncate(self, sequence: int, number: int) -> None:
        """Cut a sequence."""
        own = self.state.get(sequence, ())[: 4 * number]
        # Whatever becomes of it.
        self.flushed = {**self.flushed, sequence: self.flushed.get(sequence, ())[: len(own)]}
        self.file.truncate(sequence, number)
        self.state = {**self.state, sequence: own}

    def flush(self, _sequence: int = 0, _number: int = 0) -> None:
        """Have all on the disk."""
        self.file.flush()
        self.flushed = self.state

    def adopt(self) -> None:
        """Take what the file has for what must be there, if it may be."""
        for sequence in range(3):
            found, state = tuple(restored(self.file, sequence)), self.state.get(sequence, ())
            assert found == state[: len(found)] and len(found) >= len(self.flushed.get(sequence, ())) // 4 * 4
            self.state = {**self.state, sequence: found}

    def check(self) -> None:
        """Compare everything; what an error of the disk may have broken off in the middle, or lost, is not told yet."""
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
def test_what_a_failed_sync_has_lost_is_told(
    tmp_path: Path, operations: list[tuple[str, int, int]], chance: random.Random
) -> None:
    """Never a success after which something is missing, and never a file that is refused."""
    path, cache = tmp_path / "a.kv", Cache(chance)
    path.unlink(missing_ok=True)
    with cache.used():
        model = Doubtful(path, cache)
        for operation in operations:
            model.do(*operation)
        model.do("flush", 0, 0)
        for _ in range(2):
            model.do("crash", 0, 0)
        assert model.state == {**model.state, **model.flushed}
        model.file.close()


@pytest.mark.parametrize("reached", [False, True])
def test_a_commit_that_failed_may_be_on_the_disk_or_not(tmp_path: Path, reached: bool) -> None:
    """What is appended behind it is no part of it, whichever it is, and the next one counts all."""
    path, cache = tmp_path / "a.kv", Cache(random.Random(1), share=0 if reached else 1)
    file = SpillFile.create(path, SHAPE, extent_pages=2, direct=False)
    with cache.used():
        append(file, 0, ids(0, 4))
        cache.fails, cache.lasts = True, 1
        with pytest.raises(EnvironmentProblem, match="writing back"):
            file.flush()
    append(file, 0, ids(4, 8))
    file._raw.close()
    with SpillFile.open(path, SHAPE, direct=False) as file:
        assert restored(file, 0) == list(range(12))
    with SpillFile.open(path, SHAPE, direct=False) as file:
        assert restored(file, 0) == list(range(12))
        torn = file.key_ranges(0, 1, [1])[0].offset
        file.truncate(0, 1)
        cache = Cache(random.Random(1), share=0)
        cache.fails, cache.lasts = True, 1
        with cache.used(), pytest.raises(EnvironmentProblem, match="writing back"):
            file.flush()
        append(file, 0, ids(4, 8))
        flip(path, torn)
        file._raw.close()
    with SpillFile.open(path, SHAPE, direct=False) as file:
        assert restored(file, 0) == list(range(4))
