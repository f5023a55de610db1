"""Spill files against a dictionary, with crashes of the machine: what was flushed is there, what is there is right."""

from __future__ import annotations

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

from llmcache.errors import DataError
from llmcache.kv.spill import KvShape, SpillFile, SpillReader
from llmcache.kv.spill.raw import RawFile
from tests.conftest import examples
from tests.unit.kv_parts import append, flip, ids, restored

SECTOR = 512
# In place of what the profile suppresses, which goes with it.
SUPPRESSED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
SHAPE = KvShape("tiny", layers=2, kv_heads=1, head_dim=4, page_tokens=4)
ONE_LAYER = KvShape("tiny", layers=1, kv_heads=1, head_dim=2, page_tokens=2)
State = dict[int, tuple[int, ...]]

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 2), st.integers(1, 14)),
        st.tuples(st.just("half"), st.integers(0, 2), st.integers(1, 9)),
        st.tuples(st.just("truncate"), st.integers(0, 2), st.integers(0, 5)),
        st.tuples(st.just("flush"), st.just(0), st.just(0)),
        st.tuples(st.just("reopen"), st.just(0), st.just(0)),
    ),
    max_size=14,
)


@pytest.fixture(scope="module", autouse=True)
def _no_real_sync() -> Iterator[None]:
    """The disk that loses power is a modelled one: nothing waits for the real one, thousands of times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda _fd: None)
        yield


class Disk:
    """A disk with a cache: remembers all writes to a file and what of them was synced, and makes what a crash leaves."""

    def __init__(self) -> None:
        self.writes: list[tuple[int, bytes]] = []
        self.syncs = [0]  # how many writes there were at each

    def image(self, path: Path, at: int, lost: random.Random) -> None:
        """Write what is on the disk after a crash behind write `at`: of what was not synced, any sectors may be missing."""
        data = bytearray()
        synced = max(count for count in self.syncs if count <= at)
        for index, (offset, content) in enumerate(self.writes[:at]):
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
    """Record what happens to the file during the body."""
    notes: dict[str, Callable[..., object]] = {
        "write": lambda data, offset, *_: disk.writes.append((offset, bytes(data))),
        "grow": lambda _, end: disk.writes.append((end, b"")),  # the length is noted, the content is zero
        "cut": lambda end: disk.writes.append((-end, b"")),
        "sync": lambda: disk.syncs.append(len(disk.writes)),
    }

    def noted(name: str, real: Callable[..., None]) -> Callable[..., None]:
        def instead(self: RawFile, *arguments: Any) -> None:
            real(self, *arguments)
            notes[name](*arguments)

        return instead

    with pytest.MonkeyPatch.context() as patch:
        for name in notes:
            patch.setattr(RawFile, name, noted(name, getattr(RawFile, name)))
        yield


class Model:
    """The dictionary: tokens of each sequence, and all states that a crash may bring back."""

    def __init__(self, path: Path) -> None:
        self.file = SpillFile.create(path, SHAPE, extent_pages=2, direct=False)
        self.state: State = {}
        self.possible: list[State] = [{}]
        self.next_id = 0

    def do(self, operation: str, sequence: int, number: int) -> None:
        """Do one operation to both."""
        own = self.state.get(sequence, ())
        if operation in ("append", "half"):
            whole = len(own) // 4
            if len(own) % 4 or self.file.pages(sequence, 0) > whole:
                self.truncate(sequence, whole)
            new = ids(self.next_id, number)
            self.next_id += number
            if operation == "half":  # one layer alone: never to be seen after a restart
                append(self.file, sequence, new, range(1))
                return
            append(self.file, sequence, new)
            self.now({**self.state, sequence: (*self.state.get(sequence, ()), *map(int, new))})
        elif operation == "truncate":
            self.truncate(sequence, number)
        elif operation == "flush":
            self.file.flush()
            self.possible = [self.state]
        else:
            self.file.close()
            self.possible = [self.state]
            self.file = SpillFile.open(self.file.path, SHAPE, direct=False)
            self.check(self.file)

    def truncate(self, sequence: int, pages: int) -> None:
        """Cut a sequence."""
        self.file.truncate(sequence, pages)
        self.now({**self.state, sequence: self.state.get(sequence, ())[: 4 * pages]})

    def now(self, state: State) -> None:
        """Note a state that a crash from now on may bring back."""
        self.state = state
        self.possible.append(state)

    def check(self, file: SpillReader) -> None:
        """Compare everything with what must be there."""
        for sequence in range(3):
            assert tuple(restored(file, sequence)) == self.state.get(sequence, ())


@given(OPERATIONS, st.randoms(use_true_random=False))
@settings(max_examples=examples(60), deadline=None, suppress_health_check=SUPPRESSED)
def test_it_is_a_dictionary_of_which_a_crash_of_the_machine_leaves_a_beginning(
    tmp_path: Path, operations: list[tuple[str, int, int]], chance: random.Random
) -> None:
    """A dictionary without one; after a crash anywhere each sequence is a beginning of a state it was in.

    It is at least as long as what was flushed.
    """
    path, disk = tmp_path / "a.kv", Disk()
    path.unlink(missing_ok=True)
    marks: list[tuple[int, list[State]]] = []
    with recorded(disk):
        model = Model(path)
        for operation in operations:
            first, before = len(disk.writes), list(model.possible)
            model.do(*operation)
            marks.append((chance.randint(first, len(disk.writes)), [*before, *model.possible]))
            if operation[0] != "half":
                model.check(model.file)
        model.do("reopen", 0, 0)
        model.file.close()
    for at, possible in marks:
        crashed = tmp_path / "crashed.kv"
        disk.image(crashed, at, chance)
        for _ in range(2):  # the second time nothing may come alive that the first has dropped
            with SpillFile.open(crashed, SHAPE, direct=False) as file:
                for sequence in range(3):
                    found = tuple(restored(file, sequence))
                    states = [state.get(sequence, ()) for state in possible]
                    assert any(found == state[: len(found)] for state in states)
                    assert len(found) >= min(map(len, states)) // 4 * 4
                    file.truncate(sequence, len(found) // 4)
                    append(file, sequence, ids(10_000, 5))
                    assert restored(file, sequence) == [*found[: len(found) // 4 * 4], *range(10_000, 10_005)]
                    file.truncate(sequence, len(found) // 4)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed file with two sequences, one cut and rewritten."""
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
    """Return all lengths to cut a file to, descending: every byte where something is or a block begins, some elsewhere."""
    data = np.fromfile(path, np.uint8)
    near = np.zeros(len(data) + 1, bool)
    for place in [*np.flatnonzero(data), *range(0, len(data) + 1, 4096)]:
        near[max(0, place - 2) : place + 66] = True
    near[::61] = True
    return [int(length) for length in np.flatnonzero(near)[::-1] if length >= shortest]


def test_a_file_cut_at_every_byte(small: Path, tmp_path: Path) -> None:
    """All of what was flushed, or a refusal; both happen."""
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
    """The torn tail of a process that was killed: a beginning of what it had appended, never anything else."""
    whole, path = tmp_path / "whole.kv", tmp_path / "a.kv"
    file = SpillFile.create(whole, ONE_LAYER, extent_pages=1)
    for start in range(0, 8, 2):
        append(file, 0, ids(start, 2))
    shutil.copy(whole, path)  # not closed: nothing is committed
    file.close()
    lengths = []
    for length in lengths_of(path, 8192):
        os.truncate(path, length)
        found = contents(path)
        assert found is not None and found[0] == list(range(len(found[0]))) and not found[1]
        lengths.append(len(found[0]))
    assert lengths == sorted(lengths, reverse=True) and set(lengths) == {8, 6, 4, 2, 0}


def test_no_flipped_bit_is_served(small: Path, tmp_path: Path) -> None:
    """Every byte in turn: all is right and whole, or the file, or the page, is refused."""
    path, refused = tmp_path / "a.kv", 0
    shutil.copy(small, path)
    data = np.fromfile(path, np.uint8)
    interesting = np.flatnonzero(data)
    others = np.random.default_rng(0).choice(np.flatnonzero(data == 0), 2000, replace=False)
    for place in [*interesting, *others]:
        flip(path, int(place))
        found = contents(path)
        assert found in (None, [[0, 1, 2, 3, 4], [50, 51]])
        refused += found is None
        flip(path, int(place))
    assert refused > len(interesting) // 2
