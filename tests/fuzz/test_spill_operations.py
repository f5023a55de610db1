"""Random operations on a spill file, compared with a dictionary, as fsx does with files.

Append, truncate, flush, reopen, read rows in any order, read in another process, and crash; after a crash, continue with
the disk image. tests/property/test_kv_spill_crashes.py tests single crashes at every position; here they follow one
another, with small extents, so that chains are long.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llmcache.errors import DataError
from llmcache.kv.spill import KvShape, SpillFile, SpillReader
from llmcache.kv.spill.layout import aligned, view_slots
from tests.fuzz.target import Machine, scratch
from tests.property.test_kv_spill_crashes import SYNC, Disk, recorded
from tests.property.test_kv_store import Device, Store
from tests.unit.kv_parts import append, ids, restored, rows

Tokens = tuple[int, ...]
State = dict[int, Tokens]
SEQUENCES = 3
SEEDS = st.integers(0, 1 << 30)
PAGE = 2


class Operations(RuleBasedStateMachine):
    """A file and its dictionary with the tokens of each sequence; `possible` has the states that a crash may restore."""

    @initialize(
        dtype=st.sampled_from(["float16", "float32"]),
        extent_pages=st.integers(1, 3),
        layers=st.integers(1, 2),
        interleaved=st.booleans(),
    )
    def make(self, dtype: str, extent_pages: int, layers: int, interleaved: bool) -> None:
        self.shape = KvShape("tiny", layers, 1, 3, dtype, page_tokens=PAGE, value_dim=5)
        self.stack = ExitStack()
        self.directory = Path(self.stack.enter_context(scratch()))
        self.disk, self.next_id, self.crashes = Disk(), 0, 0
        self.stack.enter_context(recorded(self.disk))
        options: dict[str, Any] = {"extent_pages": extent_pages, "interleaved": interleaved, "direct": False}
        self.file = SpillFile.create(self.directory / "0.kv", self.shape, **options)
        self.state: State = {}
        self.possible: list[State] = [{}]
        self.readers: list[tuple[SpillReader, State, list[State]]] = []

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            for reader, _, _ in self.readers:
                reader.close()
            self.file.close()
            self.stack.close()

    # Changes

    @rule(sequence=st.integers(0, SEQUENCES - 1), count=st.integers(1, 9))
    def append(self, sequence: int, count: int) -> None:
        self._end_with_whole_pages(sequence)
        new = self._new(count)
        append(self.file, sequence, new)
        self._now({**self.state, sequence: (*self.state.get(sequence, ()), *map(int, new))})

    @rule(sequence=st.integers(0, SEQUENCES - 1), count=st.integers(1, 7))
    def append_one_layer(self, sequence: int, count: int) -> None:
        """Append to one layer only, like an unfinished step; its tokens stay invisible."""
        self._end_with_whole_pages(sequence)
        append(self.file, sequence, self._new(count), range(1))

    @rule(sequence=st.integers(0, SEQUENCES - 1), pages=st.integers(0, 6))
    def crop(self, sequence: int, pages: int) -> None:
        self.file.truncate(sequence, pages)
        self._now({**self.state, sequence: self.state.get(sequence, ())[: PAGE * pages]})

    @rule()
    def flush(self) -> None:
        self.file.flush()
        self.possible = [self.state]

    @rule()
    def reopen(self) -> None:
        self.file.close()
        self.possible = [self.state]
        self.file = SpillFile.open(self.file.path, self.shape, direct=False)
        self.disk.events = [(0, self.file.path.read_bytes()), SYNC]

    # Crashes

    @rule(seed=SEEDS)
    def crash(self, seed: int) -> None:
        """Crash; any unsynced sectors may be missing."""
        self._crash(len(self.disk.events), random.Random(seed), self.possible)

    @rule(sequence=st.integers(0, SEQUENCES - 1), count=st.integers(1, 9), cut=st.booleans(), seed=SEEDS)
    def crash_within(self, sequence: int, count: int, cut: bool, seed: int) -> None:
        source, first, before = random.Random(seed), len(self.disk.events), list(self.possible)
        if cut:
            self.crop(sequence, count)
        else:
            self.append(sequence, count)
        self._crash(source.randint(first, len(self.disk.events)), source, [*before, *self.possible])

    def _crash(self, at: int, source: random.Random, possible: list[State]) -> None:
        self.crashes += 1
        path = self.directory / f"{self.crashes}.kv"
        self.disk.image(path, at, source)
        self.disk.events = [SYNC]
        for reader, _, _ in self.readers:
            reader.close()
        self.readers = []
        self.file.close()
        with SpillReader.open(path, self.shape, direct=False) as reader:
            seen = {sequence: tuple(restored(reader, sequence)) for sequence in range(SEQUENCES)}
        self.disk.events = [(0, path.read_bytes()), SYNC]
        self.file = SpillFile.open(path, self.shape, direct=False)
        self.state = {sequence: tuple(restored(self.file, sequence)) for sequence in range(SEQUENCES)}
        assert self.state == seen, "a reader sees the state with which a writer continues"
        for sequence, found in self.state.items():
            states = [state.get(sequence, ()) for state in possible]
            assert any(found == state[: len(found)] for state in states), "a prefix of a possible state"
            assert len(found) >= min(map(len, states)) // PAGE * PAGE, "flushed pages survive"
        self.possible = [self.state]

    # Reads

    @invariant()
    def lengths_are_right(self) -> None:
        if hasattr(self, "state"):
            for sequence in range(SEQUENCES):
                assert self.file.length(sequence) == len(self.state.get(sequence, ()))

    @rule(seed=SEEDS, shared=st.booleans())
    def read(self, seed: int, shared: bool) -> None:
        self._check_rows(self.file, self.state, np.random.default_rng(seed), shared)

    @rule()
    def read_all(self) -> None:
        for sequence in range(SEQUENCES):
            assert tuple(restored(self.file, sequence)) == self.state.get(sequence, ())

    @precondition(lambda self: len(self.readers) < 3)
    @rule()
    def open_reader(self) -> None:
        """Open a second reader, which sees all whole pages, flushed or not."""
        reader = SpillReader.open(self.file.path, self.shape, direct=False)
        seen = {sequence: tuple(restored(reader, sequence)) for sequence in range(SEQUENCES)}
        assert seen == {sequence: self.state.get(sequence, ()) for sequence in range(SEQUENCES)}
        self.readers.append((reader, seen, [self.state]))

    @precondition(lambda self: self.readers)
    @rule(seed=SEEDS)
    def read_beside(self, seed: int) -> None:
        """Read with a reader opened earlier: pages that the writer truncated are refused, and no other data is returned."""
        reader, seen, since = self.readers[seed % len(self.readers)]
        try:
            self._check_rows(reader, seen, np.random.default_rng(seed), True)
        except DataError as error:
            unchanged = all(
                state.get(sequence, ())[: len(tokens_of_sequence)] == tokens_of_sequence
                for state in since
                for sequence, tokens_of_sequence in seen.items()
            )
            assert not unchanged, error.message

    def _check_rows(self, file: SpillReader, state: State, source: np.random.Generator, shared: bool) -> None:
        """Read pages of one layer in any order, some twice, both sides together and each alone."""
        sequence, layer = int(source.integers(SEQUENCES)), int(source.integers(self.shape.layers))
        pages = file.pages(sequence)
        tokens_of_sequence = np.array(state.get(sequence, ()), np.int64)
        pages_read = source.integers(0, pages, int(source.integers(1, 9))) if pages else np.empty(0, np.int64)
        buffers = [aligned(8 * size) for size in self.shape.slot_sizes]
        found = file.read(sequence, layer, pages_read, buffers if shared else None)
        for side, whole in enumerate(found):
            alone = view_slots(self.shape, file.read_slots(sequence, layer, pages_read, side), side)
            assert alone.tobytes() == np.ascontiguousarray(whole).tobytes()
        for index, page in enumerate(pages_read.tolist()):
            tokens = tokens_of_sequence[page * PAGE : (page + 1) * PAGE]
            for side, got in enumerate(found):
                assert got[index, :, : len(tokens)].tobytes() == rows(self.shape, layer, tokens, side).tobytes()
                assert not got[index, :, len(tokens) :].any()

    # The dictionary

    def _new(self, count: int) -> Any:
        self.next_id += count
        return ids(self.next_id - count, count)

    def _end_with_whole_pages(self, sequence: int) -> None:
        """Truncate partial pages and pages that some layers lack: nothing can be appended after them."""
        tokens_of_sequence = self.state.get(sequence, ())
        if len(tokens_of_sequence) % PAGE or self.file.pages(sequence, 0) > len(tokens_of_sequence) // PAGE:
            self.crop(sequence, len(tokens_of_sequence) // PAGE)

    def _now(self, state: State) -> None:
        self.state = state
        self.possible.append(state)
        for _, _, since in self.readers:
            since.append(state)


MACHINE = Machine("spill-operations", Operations)
# short runs of these are in the files that define them
STORE = Machine("kv-store", Store)
DEVICE = Machine("kv-store-device", Device)

TestOperations = Operations.TestCase
TestOperations.settings = settings(max_examples=25, stateful_step_count=30)
