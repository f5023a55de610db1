"""The process that stands for a computational SSD (*emulated*) and executes commands of the host.

Run `python -m llmcache.papers.csd.device PIPE MEMORY` with two inherited descriptors.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.arrays import Bytes, Floats, Int64s, Uint32s
from llmcache.errors import LlmcacheError
from llmcache.kv.kernels import score_pages
from llmcache.kv.kernels.threads import processors
from llmcache.kv.spill import KvShape, SpillFile
from llmcache.kv.spill.layout import KEYS, VALUES, aligned, view_slots
from llmcache.papers.csd.profile import PROFILES, CsdProfile, ModelledClock, Report
from llmcache.papers.csd.wire import (
    COMMAND_BYTES,
    COMPLETION_BYTES,
    HEADER_BYTES,
    MOST_TOKENS,
    RING_BYTES,
    Data,
    Shared,
    encode,
    receive,
    shares,
)

FULL_NAP_S = 50e-6


class Device:
    """Executes commands, one at a time."""

    def __init__(self, end: Connection, shared: Shared) -> None:
        self._end, self._shared = end, shared
        self._file: SpillFile | None = None
        self._profile = PROFILES["none"]  # until the file is open
        self._clock = ModelledClock(self._profile)
        self._threads = 1
        self._begun_ns = 0
        self._report = Report()

    def serve(self) -> None:
        try:
            while True:
                command, arguments = receive(self._end)
                self._end.send(self._done(getattr(self, f"_{command}"), arguments))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            if self._file is not None:
                self._file.close()

    def _done(self, method: Callable[..., dict[str, Any] | None], arguments: dict[str, Any]) -> dict[str, Any] | Exception:
        self._begun_ns = time.perf_counter_ns()
        self._report = Report(commands=1, link_to_host_bytes=COMPLETION_BYTES, link_to_device_bytes=COMMAND_BYTES)
        self._clock = ModelledClock(self._profile)
        try:
            result = method(**arguments) or {}
        except (LlmcacheError, ValueError) as error:
            return error
        self._report.modelled_ns = self._clock.now_ns
        self._throttle()
        self._report.wall_ns = time.perf_counter_ns() - self._begun_ns
        return {**result, "report": self._report}

    def _throttle(self) -> None:
        if self._profile.throttle:
            left_ns = self._begun_ns + self._clock.now_ns - time.perf_counter_ns()
            time.sleep(max(0, left_ns) / 1e9)

    @property
    def file(self) -> SpillFile:
        assert self._file is not None
        return self._file

    def _open(
        self,
        path: Path,
        shape: KvShape,
        profile: CsdProfile,
        *,
        create: bool,
        restarted: bool,
        direct: bool | None,
        threads: int | None,
    ) -> dict[str, Any]:
        if max(shape.slot_sizes) > RING_BYTES // 2:
            raise ValueError(
                f"page_tokens: pages of {shape.page_tokens} tokens exceed {RING_BYTES // 2} bytes, half of the ring"
            )
        if create:
            self._file = SpillFile.create(path, shape, direct=direct)
        else:
            self._file = SpillFile.open(path, shape, direct=direct, keep_unfinished=restarted)
        self._profile, self._clock = profile, ModelledClock(profile)
        self._threads = threads or processors()
        return self._identify()

    def _identify(self) -> dict[str, Any]:
        file = self.file
        pages = {number: file.pages_by_layer(number) for number in file.sequences}
        return {"direct": file.direct, "pages": pages}

    def _execute_program(
        self, sequence: int, layer: int, queries: Floats, runs: Uint32s, combine: str, block_tokens: int
    ) -> None:
        if not 1 <= block_tokens <= MOST_TOKENS:
            raise ValueError(f"block_tokens: must be from 1 to {MOST_TOKENS}, not {block_tokens}")
        self._receive(queries.nbytes + runs.nbytes)
        pages = [page for first, count in runs.tolist() for page in range(first, first + count)] if len(runs) else None
        for base, scores, read_bytes in self._scored(sequence, layer, queries, combine, pages):
            self._count_read(read_bytes)
            self._clock.compute(read_bytes)
            self._report.scored_keys += scores.size
            for head, of_head in enumerate(scores):
                for first in range(0, len(of_head), block_tokens):
                    block = of_head[first : first + block_tokens]
                    at, room = self._room(4 * len(block))
                    encode(block, room.view(np.uint16).reshape(-1, 2))
                    self._send(Data(at, room.size, head, base + first), HEADER_BYTES, True)

    def _scored(
        self, sequence: int, layer: int, queries: Floats, combine: str, pages: list[int] | None
    ) -> Iterator[tuple[int, Floats, int]]:
        """Score one buffer of keys while a thread reads the next: the function that the engine runs (CSF).

        Yields the position of the first token, scores [kv_heads, tokens], and the bytes read for them.
        """
        file, shape = self.file, self.file.shape
        length, most = file.length(sequence, layer), max(1, self._profile.buffer_bytes // shape.key_slot_bytes)
        todo = [
            found[first : first + most]
            for found, _ in file.key_ranges(sequence, layer, pages)
            for first in range(0, len(found), most)
        ]
        buffers = [aligned(max(map(len, todo), default=0) * shape.key_slot_bytes) for _ in range(2)]

        def read(index: int) -> Bytes:
            return file.read_slots(sequence, layer, todo[index], KEYS, buffers[index % 2], threads=1)

        with ThreadPoolExecutor(1, thread_name_prefix="csd-read") as reader:
            ahead = reader.submit(read, 0) if todo else None
            for index, pages_now in enumerate(todo):
                assert ahead is not None
                slots = ahead.result()
                if index + 1 < len(todo):
                    ahead = reader.submit(read, index + 1)
                keys = view_slots(shape, slots, KEYS)
                base = pages_now.start * shape.page_tokens
                scores = score_pages(queries, keys, combine=combine, threads=self._threads)
                yield base, scores[:, : length - base], slots.size

    def _send(self, data: Data, header_bytes: int, computed: bool) -> None:
        size = data.size_bytes + header_bytes
        self._report.link_to_host_bytes += size
        self._clock.send(size, computed)
        self._throttle()
        self._end.send(data)

    def _room(self, size_bytes: int) -> tuple[int, Bytes]:
        counters = self._shared.counters
        at = int(counters[0])
        if at % RING_BYTES + size_bytes > RING_BYTES:
            at += RING_BYTES - at % RING_BYTES
        while at + size_bytes - int(counters[1]) > RING_BYTES:
            if self._end.poll():  # the host sends nothing while it waits for a result, so it has ended
                raise EOFError
            time.sleep(FULL_NAP_S)
        counters[0] = at + size_bytes
        return at, self._shared.bytes_of(Data(at, size_bytes))

    def _receive(self, size_bytes: int) -> None:
        self._report.link_to_device_bytes += size_bytes
        self._clock.receive(size_bytes)

    def _count_read(self, size_bytes: int) -> None:
        self._report.internal_read_bytes += size_bytes
        self._clock.read(size_bytes)

    def _count_written(self, size_bytes: int) -> None:
        self._report.internal_written_bytes += size_bytes
        self._clock.read(size_bytes)  # the same internal path, in the other direction

    def _write(self, sequence: int, layer: int, keys: NDArray[Any], values: NDArray[Any]) -> None:
        self._receive(keys.nbytes + values.nbytes)
        self._count_written(self.file.append(sequence, layer, keys, values))

    def _write_tokens(self, sequence: int, ids: Int64s, positions: Int64s) -> None:
        self._receive(ids.nbytes + positions.nbytes)
        self._count_written(self.file.append_tokens(sequence, ids, positions))

    def _read(self, sequence: int, layer: int, pages: Int64s, sides: Sequence[int]) -> None:
        self._receive(pages.nbytes)
        shape = self.file.shape
        share = max(1, RING_BYTES // 8 // max(shape.slot_sizes))
        for first in range(0, len(pages), share):
            part = pages[first : first + share]
            for side in sides:
                slots = self.file.read_slots(sequence, layer, part, side)
                self._count_read(slots.size)
                self._send_bytes(slots)

    def _gather(self, sequence: int, layer: int, positions: list[Uint32s]) -> None:
        shape, requested = self.file.shape, [of_head.astype(np.int64) for of_head in positions]
        self._receive(sum(of_head.nbytes for of_head in positions))
        flat = np.concatenate(requested)
        for pages, parts in shares(shape, requested):
            heads = np.repeat(np.arange(len(parts)), [part.stop - part.start for part in parts])
            page, token = np.divmod(np.concatenate([flat[part] for part in parts]), shape.page_tokens)
            places = np.searchsorted(pages, page), heads, token
            for side in (KEYS, VALUES):
                slots = self.file.read_slots(sequence, layer, pages, side)
                self._count_read(slots.size)
                self._send_bytes(view_slots(shape, slots, side)[places])

    def _send_bytes(self, data: Any) -> None:
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        at, room = self._room(flat.size)
        room[:] = flat
        self._send(Data(at, room.size), 0, False)

    def _deallocate(self, sequence: int, pages: int) -> None:
        self.file.truncate(sequence, pages)

    def _flush(self) -> None:
        self.file.flush()


def main(argv: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the host handles Ctrl-C; the device ends with the host
    Device(Connection(int(argv[0])), Shared(int(argv[1]))).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
