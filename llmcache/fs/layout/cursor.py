"""Reading a header piece by piece, in few reads and never far beyond its end."""

from __future__ import annotations

import struct
from collections.abc import Callable

from llmcache.errors import DataError

ReadAt = Callable[[int, int], bytes]
"""`read(offset, size)` gives up to `size` bytes of the file at `offset`."""

# The largest real headers (tokenizers of 260 000 words) have 15 MB. The limit stops a walk through a file of zeros.
HEADER_LIMIT = 64 * 2**20
_SMALLEST_READ = 64 * 2**10
_LARGEST_READ = 2**20


class Cursor:
    """A position in a header, moved by what is read; DataError at the end of the file and at the header limit."""

    def __init__(self, read: ReadAt, file_bytes: int, byte_order: str = "<") -> None:
        self._read = read
        self._limit = min(file_bytes, HEADER_LIMIT)
        self._file_bytes = file_bytes
        self._buffer = b""
        self._buffer_start = 0
        self.position = 0
        self.set_byte_order(byte_order)

    def set_byte_order(self, byte_order: str) -> None:
        """Read numbers as little ("<") or big (">") endian from here on."""
        self._u32 = struct.Struct(byte_order + "I")
        self._u64 = struct.Struct(byte_order + "Q")

    def take(self, size: int) -> bytes:
        """The next `size` bytes."""
        start = self._fill(size)
        self.position += size
        return self._buffer[start : start + size]

    def u32(self) -> int:
        """The next unsigned number of 4 bytes."""
        return int(self._u32.unpack(self.take(4))[0])

    def u64(self) -> int:
        """The next unsigned number of 8 bytes."""
        return int(self._u64.unpack(self.take(8))[0])

    def text(self, longest: int) -> str:
        """The next string (length of 8 bytes, then UTF-8); DataError when it has more than `longest` bytes."""
        length = self.u64()
        if length > longest:
            raise DataError(f"a name of {length} bytes at byte {self.position - 8} (at most {longest} are allowed)")
        return self.take(length).decode("utf-8", "replace")

    def skip(self, size: int) -> None:
        """Move on by `size` bytes, which are not read."""
        if size > self._limit - self.position:
            raise self._too_short(size)
        self.position += size

    def skip_texts(self, count: int) -> None:
        """Move on by `count` strings, reading only their lengths: tokenizers have hundreds of thousands."""
        unpack_from = self._u64.unpack_from
        while count:
            start = self._fill(8)
            buffer, last = self._buffer, len(self._buffer) - 8
            place = start
            while count and place <= last:
                place += 8 + unpack_from(buffer, place)[0]
                count -= 1
            self.skip(place - start)

    def _fill(self, size: int) -> int:
        """Place of the position in the buffer, which then holds at least `size` bytes from there on."""
        start = self.position - self._buffer_start
        if start >= 0 and start + size <= len(self._buffer):
            return start
        if size > self._limit - self.position:
            raise self._too_short(size)
        # As much as was needed so far: few reads for a long header, at most twice the bytes for a short one.
        ahead = min(max(self.position, _SMALLEST_READ), _LARGEST_READ)
        self._buffer = self._read(self.position, min(max(size, ahead), self._limit - self.position))
        self._buffer_start = self.position
        while len(self._buffer) < size:
            more = self._read(self.position + len(self._buffer), size - len(self._buffer))
            if not more:
                raise self._too_short(size)
            self._buffer += more
        return 0

    def _too_short(self, size: int) -> DataError:
        if self.position + size <= self._file_bytes:
            return DataError(f"the header needs more than {HEADER_LIMIT} bytes, which no model's does")
        return DataError(
            f"the file ends inside its header: {size} bytes are due at byte {self.position}, and it has {self._file_bytes}",
            "the file is incomplete: copy or download it again",
        )
