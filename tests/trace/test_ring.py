"""The reader of a ring buffer, with a writer that follows the kernel's protocol."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator

import numpy as np
import pytest

from llmcache.trace.kernel import RecordRing

RECORD = np.dtype([("number", "<u8"), ("rest", "<u8")])
BUSY, DISCARDED = 1 << 31, 1 << 30
SIZE = mmap.PAGESIZE
FRAME = 8 + RECORD.itemsize


class Writer:
    """A ring in a file: the reader's page, the writer's page, and the data mapped twice in a row."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("ring")
        os.truncate(self.fd, 2 * mmap.PAGESIZE + 2 * SIZE)
        self.end = 0

    @property
    def read_to(self) -> int:
        return int(struct.unpack("<Q", os.pread(self.fd, 8, 0))[0])

    def header(self, at: int, bits: int) -> None:
        self._put(at, struct.pack("<I", RECORD.itemsize | bits))

    def write(self, number: int, bits: int = 0) -> int:
        """Add a record and return its offset."""
        at = self.end
        assert at + FRAME - self.read_to <= SIZE
        self._put(at, struct.pack("<IIQQ", RECORD.itemsize | bits, 0, number, ~number & 0xFFFFFFFF))
        self.end += FRAME
        os.pwrite(self.fd, struct.pack("<Q", self.end), mmap.PAGESIZE)
        return at

    def _put(self, at: int, data: bytes) -> None:
        for index, byte in enumerate(data):
            offset = (at + index) % SIZE
            for copy in (0, SIZE):
                os.pwrite(self.fd, bytes([byte]), 2 * mmap.PAGESIZE + copy + offset)


@pytest.fixture
def writer() -> Iterator[Writer]:
    ring_writer = Writer()
    yield ring_writer
    os.close(ring_writer.fd)


def test_records_are_read_once_and_in_order_across_the_end(writer: Writer) -> None:
    ring = RecordRing(writer.fd, SIZE, RECORD)
    numbers = iter(range(1000))
    seen: list[int] = []
    for burst in (1, 0, 5, SIZE // FRAME, 100, 150, SIZE // FRAME):
        for number in [next(numbers) for _ in range(burst)]:
            writer.write(number)
        records = ring.read()
        seen += records["number"].tolist()
        assert (records["rest"] == (~records["number"] & np.uint64(0xFFFFFFFF))).all()
        assert writer.read_to == writer.end
    assert seen == list(range(len(seen)))
    assert len(seen) > 2 * SIZE // FRAME


def test_records_behind_an_unfinished_one_wait(writer: Writer) -> None:
    ring = RecordRing(writer.fd, SIZE, RECORD)
    writer.write(1)
    busy = writer.write(2, BUSY)
    writer.write(3)
    assert ring.read()["number"].tolist() == [1]
    assert ring.read()["number"].tolist() == []
    writer.header(busy, 0)
    assert ring.read()["number"].tolist() == [2, 3]


def test_discarded_records_are_skipped(writer: Writer) -> None:
    ring = RecordRing(writer.fd, SIZE, RECORD)
    for number in range(4):
        writer.write(number, DISCARDED if number % 2 else 0)
    assert ring.read()["number"].tolist() == [0, 2]
    assert writer.read_to == writer.end


def test_records_are_copies(writer: Writer) -> None:
    ring = RecordRing(writer.fd, SIZE, RECORD)
    writer.write(1)
    records = ring.read()
    for number in range(SIZE // FRAME):
        writer.write(100 + number)
    assert records["number"].tolist() == [1]
