"""Fuzz targets: blocks of stored prompts, and the llama.cpp states that are cut into blocks and joined from them."""

from __future__ import annotations

import contextlib
import json
import logging
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
from hypothesis import example, given, settings

from llmcache.errors import DataError
from llmcache.kv.prefix.state import Joined, StateLayout, Uncut, read_state
from llmcache.kv.prefix.store import PART, Block, BlockStore, pack, unpack
from llmcache.kv.spill.layout import aligned
from tests.conftest import examples
from tests.fuzz.mutations import Headed, documents, mutated, written
from tests.fuzz.target import Target, bounded, refusal, scratch
from tests.unit.test_kv_prefix import SHAPES, key, state_bytes

KEY = key(1, kind=PART)
STATES = [state_bytes(parts, [2, 0, 1, 3]).tobytes() for parts in SHAPES]
FILES = Headed(b"llmcKVB1", 4096)


def block_of(data: bytes) -> Block:
    """Return the block that contains a whole state."""
    state = read_state(np.frombuffer(data, np.uint8))
    out = aligned(state.tokens * state.layout.token_bytes)
    state.block(0, state.tokens, out)
    return Block(out, tuple(range(state.tokens)), state.layout)


WHOLE = Block(np.arange(24, dtype=np.uint8), (7,))
BLOCKS = [b"".join(bytes(part) for part in pack(KEY, block)) for block in (*map(block_of, STATES), WHOLE)]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Disable the store's log of dropped blocks."""
    logging.getLogger("llmcache.kv").disabled = True
    try:
        yield
    finally:
        logging.getLogger("llmcache.kv").disabled = False


def check(data: bytes) -> None:
    """Check that bytes are a valid block or refused, both from a server and from a file, which is deleted if refused."""
    with scratch() as directory, bounded(), quiet():
        store = BlockStore(directory, 1 << 30)
        path = store.directory / KEY.file
        path.parent.mkdir()
        path.write_bytes(data)
        buffer = aligned(len(data))
        buffer[:] = np.frombuffer(data, np.uint8)
        with refusal():
            try:
                block = unpack(buffer, KEY, "shared")
            except DataError:
                assert store.read(KEY) is None and not path.exists()
                raise
            read = store.read(KEY)
            assert read is not None and read.payload.tobytes() == block.payload.tobytes()
            assert (read.tokens, read.layout) == (block.tokens, block.layout) and len(block.payload) <= len(data)
            assert np.asarray(block.tokens, np.int32).tolist() == list(block.tokens)
            if block.layout and block.tokens:
                joined = Joined(block.layout, len(block.tokens))
                joined.put(0, block.payload)
                assert block_of(joined.data.tobytes()).payload.tobytes() == block.payload.tobytes()


def check_state(data: bytes) -> None:
    """Check that a state is cut and joined to the same tokens, or that the refusal has a reason."""
    with bounded():
        try:
            block = block_of(data)
        except Uncut as reason:
            assert str(reason)
            return
        assert block.layout and StateLayout.from_json(json.loads(json.dumps(block.layout.to_json()))) == block.layout
        joined = Joined(block.layout, len(block.tokens))
        joined.put(0, block.payload)
        assert len(joined.data) == len(data) and block_of(joined.data.tobytes()).payload.tobytes() == block.payload.tobytes()


def changed(**changes: Any) -> bytes:
    """Return a block with changes to its header."""
    header, rest = FILES.parts(BLOCKS[0])
    return FILES.file(written({**header, **changes}), rest)


HEADERS = documents([FILES.parts(data)[0] for data in BLOCKS]).map(
    lambda header: FILES.file(written(header), BLOCKS[0][4096:])
)
TARGET = Target("prefix-block", mutated(BLOCKS) | HEADERS, check)
STATE = Target("prefix-state", mutated(STATES), check_state)


def test_the_seeds_are_read() -> None:
    for data in BLOCKS:
        assert len(unpack(np.frombuffer(data, np.uint8), KEY, "").payload) == len(data) - 4096
        check(data)
        check(FILES.file(written(FILES.parts(data)[0]), data[4096:]))
    for data in STATES:
        check_state(data)


@given(TARGET.inputs)
@settings(max_examples=examples(150))
@example(FILES.file(b"[" * 30_000, b""))
@example(FILES.file(b"[" * 100_000, b""))
@example(FILES.file(b"[]", b""))
@example(changed(tokens=[float("inf")]))
@example(changed(tokens=[1 << 40] * 4))
@example(changed(layout=[[False, [[float("inf"), 1, 1]], []]]))
@example(FILES.file(written({**FILES.parts(BLOCKS[-1])[0], "tokens": [], "layout": None, "bytes": 0}), b""))
def test_any_block(data: bytes) -> None:
    check(data)


@given(STATE.inputs)
@settings(max_examples=examples(150))
@example(struct.pack("<IIII", 0xAF143CD8, 0, 1, 1 << 31))
def test_any_state(data: bytes) -> None:
    check_state(data)
