"""The ssd tier: streams of pages in a spill file, read and written by this process or through the *emulated* device.

A file may be read by many threads, and written by one. A device does one command at a time: its lock is held from the
beginning of each to its end, for an execution as long as its score blocks are taken. Every byte is counted where it moves.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.errors import LlmcacheError, UsageError
from llmcache.kv.csd import EmulatedCsd, KvRows, ScoreBlock
from llmcache.kv.csd.blocks import BLOCK_TOKENS
from llmcache.kv.kernels import score_pages
from llmcache.kv.spill import KvPages, Recovery, Room, SpillFile
from llmcache.kv.spill.reader import TakeRows
from llmcache.kv.spill.reading import KEYS, rows
from llmcache.kv.tiers.config import Arrays, Floats, Numbers, StoreConfig, Traffic

KeyRows = tuple[NDArray[Any], Floats | None]
KEPT_ROOMS = 2
SCORE_BYTES = 1 << 22
"""Keys that the host reads before it scores them."""


@dataclass(frozen=True)
class Ask:
    """What is to be scored: queries [heads, head_dim] float32 against the keys of pages at `places` of a stream."""

    stream: int
    layer: int
    places: Numbers
    queries: Floats
    combine: str = "max"
    block_tokens: int = BLOCK_TOKENS


class SsdTier(ABC):
    """What both kinds can do. Pages are numbered within their stream; reasons ("why") are those of `Traffic`.

    `near_data`: rows are gathered and keys scored where they lie; else whole pages come to the host.
    """

    near_data = False

    @abstractmethod
    def pages(self, stream: int, layer: int) -> int:
        """Returns how many pages of a layer are written; layer `shape.layers` stands for the tokens."""

    @abstractmethod
    def append(self, stream: int, layer: int, arrays: Arrays) -> None:
        """Writes keys, values and for int8 their scales, [kv_heads, tokens, ..], behind the last page."""

    @abstractmethod
    def append_tokens(self, stream: int, ids: Numbers, positions: Numbers) -> None:
        """Writes ids and positions of tokens behind the last page of tokens."""

    @abstractmethod
    def truncate(self, stream: int, pages: int) -> None:
        """Takes away all pages of a stream from number `pages` on."""

    @abstractmethod
    def read(self, stream: int, layer: int, places: Numbers, why: str) -> contextlib.AbstractContextManager[KvPages]:
        """Reads whole pages; they are valid while the context lasts."""

    def read_through(self, stream: int, layer: int, places: Numbers, take: TakeRows, why: str) -> None:
        """Reads whole pages and hands them to `take`, some at a time, by many threads; not where `near_data`."""
        raise ValueError("ssd: of a device rows are gathered")

    @abstractmethod
    def read_keys(self, stream: int, layer: int, places: Numbers, why: str) -> KeyRows:
        """Returns the keys of pages and for int8 their scales."""

    def gather(self, stream: int, layer: int, positions: list[Numbers], why: str) -> KvRows:
        """Returns single rows, by ascending token numbers of each head, and moves nothing else; only where `near_data`."""
        raise ValueError("ssd: a file has nothing that could gather rows")

    @abstractmethod
    def score(self, ask: Ask) -> Iterator[ScoreBlock]:
        """Yields score blocks as they come; positions count from the beginning of the stream."""

    @abstractmethod
    def flush(self) -> None:
        """Returns when all that was written will survive the machine."""

    def restart(self) -> None:
        """Starts a device that has died anew."""
        raise UsageError("ssd: a file has no device that could be restarted", "use ssd='csd'")

    @abstractmethod
    def close(self) -> None:
        """Flushes and ends it."""


class FileTier(SsdTier):
    """A spill file that this process reads and writes: whole pages come to the host."""

    def __init__(self, file: SpillFile, traffic: Traffic, threads: int | None) -> None:
        self._file, self._traffic, self._threads = file, traffic, threads
        self._rooms: list[Room] = []
        self._rooms_lock = threading.Lock()

    def pages(self, stream: int, layer: int) -> int:
        """Returns how many pages of a layer are written."""
        return self._file.pages_by_layer(stream)[layer]

    def append(self, stream: int, layer: int, arrays: Arrays) -> None:
        """Writes pages; EnvironmentProblem if there is no space, and then none of them is there."""
        self._traffic.add("cpu", "ssd", "spill", self._file.append(stream, layer, *arrays))

    def append_tokens(self, stream: int, ids: Numbers, positions: Numbers) -> None:
        """Writes tokens; errors as `append`."""
        self._traffic.add("cpu", "ssd", "spill", self._file.append_tokens(stream, ids, positions))

    def truncate(self, stream: int, pages: int) -> None:
        """Takes away pages."""
        self._file.truncate(stream, pages)

    @contextlib.contextmanager
    def read(self, stream: int, layer: int, places: Numbers, why: str) -> Iterator[KvPages]:
        """Reads whole pages into memory that is used again."""
        room = self._take_room(len(places))
        try:
            found = self._file.read(stream, layer, places, room, self._threads)
            shape = self._file.shape
            self._traffic.add("ssd", "cpu", why, len(places) * (shape.key_slot_bytes + shape.value_slot_bytes))
            yield found
        finally:
            with self._rooms_lock:
                self._rooms = [room, *self._rooms][:KEPT_ROOMS]

    def read_through(self, stream: int, layer: int, places: Numbers, take: TakeRows, why: str) -> None:
        """Reads whole pages and hands them on."""
        self._file.read_through(stream, layer, places, take, self._threads)
        shape = self._file.shape
        self._traffic.add("ssd", "cpu", why, len(places) * (shape.key_slot_bytes + shape.value_slot_bytes))

    def _take_room(self, pages: int) -> Room:
        with self._rooms_lock:
            for index, room in enumerate(self._rooms):
                if len(room) >= pages:
                    return self._rooms.pop(index)
        return Room(self._file.shape, pages + pages // 8)

    def read_keys(self, stream: int, layer: int, places: Numbers, why: str) -> KeyRows:
        """Returns the keys of pages."""
        shape = self._file.shape
        slots = self._file.read_slots(stream, layer, places, KEYS)
        self._traffic.add("ssd", "cpu", why, slots.size)
        return rows(shape, slots, shape.head_dim)

    def score(self, ask: Ask) -> Iterator[ScoreBlock]:
        """Reads the keys to the host and scores them here."""
        shape = self._file.shape
        share = max(1, SCORE_BYTES // shape.key_slot_bytes)
        for first in range(0, len(ask.places), share):
            places = ask.places[first : first + share]
            keys, scales = self.read_keys(ask.stream, ask.layer, places, "score")
            scores = score_pages(ask.queries, keys, scales, combine=ask.combine, threads=self._threads)
            positions = (places[:, None] * shape.page_tokens + np.arange(shape.page_tokens)).reshape(-1)
            for start in range(0, len(positions), ask.block_tokens):
                part = slice(start, start + ask.block_tokens)
                for head, of_head in enumerate(scores):
                    yield ScoreBlock(head, positions[part], of_head[part])

    def flush(self) -> None:
        """Returns when all is on the disk."""
        self._file.flush()

    def close(self) -> None:
        """Flushes and closes the file."""
        self._file.close()


class CsdTier(SsdTier):
    """The *emulated* device: scores and single rows come to the host."""

    near_data = True

    def __init__(self, device: EmulatedCsd, traffic: Traffic) -> None:
        self.device, self._traffic = device, traffic
        self._lock = threading.RLock()
        self._busy = False
        self._program = device.load()
        device.activate(self._program)

    @contextlib.contextmanager
    def _command(self, why: str) -> Iterator[EmulatedCsd]:
        """Holds the device, and counts what its commands move."""
        with self._lock:
            if self._busy:
                raise ValueError("score_ssd: take all score blocks before anything else is asked of the device")
            self._busy = True
            before = (self.device.report.link_to_host_bytes, self.device.report.link_to_device_bytes)
            inside = (self.device.report.internal_read_bytes, self.device.report.internal_written_bytes)
            try:
                yield self.device
            finally:
                self._busy = False
                report = self.device.report
                self._traffic.add("ssd", "cpu", why, report.link_to_host_bytes - before[0])
                self._traffic.add("cpu", "ssd", why, report.link_to_device_bytes - before[1])
                self._traffic.add("ssd", "device", why, report.internal_read_bytes - inside[0])
                self._traffic.add("device", "ssd", why, report.internal_written_bytes - inside[1])

    def pages(self, stream: int, layer: int) -> int:
        """Returns how many pages of a layer the device has acknowledged."""
        return self.device.pages(stream, layer)

    def append(self, stream: int, layer: int, arrays: Arrays) -> None:
        """Writes pages over the link; what was acknowledged before an error stays."""
        with self._command("spill") as device:
            device.append(stream, layer, *arrays)

    def append_tokens(self, stream: int, ids: Numbers, positions: Numbers) -> None:
        """Writes tokens over the link."""
        with self._command("spill") as device:
            device.append_tokens(stream, ids, positions)

    def truncate(self, stream: int, pages: int) -> None:
        """Takes away pages."""
        with self._command("spill") as device:
            device.truncate(stream, pages)

    @contextlib.contextmanager
    def read(self, stream: int, layer: int, places: Numbers, why: str) -> Iterator[KvPages]:
        """Reads whole pages over the link."""
        with self._command(why) as device:
            found = device.read(stream, layer, places)
        yield found

    def read_keys(self, stream: int, layer: int, places: Numbers, why: str) -> KeyRows:
        """Returns the keys of pages over the link."""
        with self._command(why) as device:
            return device.read_keys(stream, layer, places)

    def gather(self, stream: int, layer: int, positions: list[Numbers], why: str) -> KvRows:
        """Returns single rows; nothing else crosses the link."""
        with self._command(why) as device:
            return device.gather(stream, layer, positions)

    def score(self, ask: Ask) -> Iterator[ScoreBlock]:
        """Yields what the device scores near its data, as halves."""
        with self._command("score") as device:
            options: dict[str, Any] = {"combine": ask.combine, "block_tokens": ask.block_tokens}
            running = device.execute(self._program, ask.queries, ask.stream, ask.layer, pages=ask.places, **options)
            try:
                yield from running
            except GeneratorExit:
                with contextlib.suppress(LlmcacheError):
                    running.drain()
                raise

    def flush(self) -> None:
        """Returns when all is on the disk."""
        with self._command("spill") as device:
            device.flush()

    def restart(self) -> None:
        """Starts the device anew over its file; DataError if pages are missing that it had acknowledged."""
        with self._command("restore") as device:
            device.restart()

    def close(self) -> None:
        """Ends the device once its file is flushed."""
        with self._lock:
            self.device.close()


def open_tier(config: StoreConfig, traffic: Traffic, create: bool) -> tuple[SsdTier | None, Recovery]:
    """Returns the ssd tier of a store, if it has one, made anew or opened; and what opening dropped."""
    if config.path is None:
        return None, Recovery()
    if config.ssd == "file":
        if create:
            file = SpillFile.create(config.path, config.shape, direct=config.direct, force=config.force)
        else:
            file = SpillFile.open(config.path, config.shape, direct=config.direct)
        return FileTier(file, traffic, config.threads), file.recovery
    options: dict[str, Any] = {"direct": config.direct, "threads": config.threads, "force": config.force}
    device = EmulatedCsd(config.path, config.shape, config.profile, create=create, **options)
    return CsdTier(device, traffic), Recovery(**device.recovery)
