"""The BPF object of this package in the kernel: which of its programs run here, and what was configured in it."""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmcache.bpf.libbpf import OBJECTS, BpfObject, LoadFailure
from llmcache.bpf.ring import BUSY, DISCARDED, Ring
from llmcache.errors import EnvironmentProblem
from llmcache.trace.sources.base import RECORD, Records

OBJECT = OBJECTS / "iotrace.bpf.o"
RING_BYTES = 16 << 20
MAX_AGE_NS = 1_000_000
LEFT_NS = 5 * MAX_AGE_NS  # a run that `flush` leaves alone began at most so long ago (bpf/flush.h)
_BUSY_TRIES, _BUSY_S = 1000, 0.001  # at the end, for programs that stand still with the processor they run on
MAX_BLOCKS = 1024
LOSSES = ("ring full", "too many threads", "too many files", "too many block requests", "huge mapping of an unknown file")

# struct config of bpf/record.h.
CONFIG = np.dtype(
    [
        ("max_age_ns", "<u8"),
        ("max_blocks", "<u4"),
        ("follow", "<u4"),
        ("page_blocks_log2", "<u4"),
        ("total_store_order", "<u4"),
        ("write_calls", "<i4", 6),
        ("read_calls", "<i4", 6),
    ]
)
# Numbers of write, pwrite64, writev, pwritev, pwritev2, sendfile and of read, pread64, readv, preadv, preadv2.
_CALLS = {
    "x86_64": ((1, 18, 20, 296, 328, 40), (0, 17, 19, 295, 327, -1)),
    "aarch64": ((64, 68, 66, 70, 287, 71), (63, 67, 65, 69, 286, -1)),
}
_ALWAYS = ("seed", "flush", "started", "ended", "replaced")
_RUN_BY_US = ("seed", "flush")


@dataclass(frozen=True)
class Part:
    """Something to be seen, by the first of `programs` (each a group that belongs together) that the kernel takes.

    Without any, `missing` is what the recording lacks; None if there is no recording without it.
    """

    programs: Sequence[Sequence[str]]
    missing: str | None = None


def supported() -> str | None:
    """Why BPF programs of any tier cannot work on this machine, or None."""
    if platform.machine() not in _CALLS:
        return f"the processor is {platform.machine()}; x86-64 or arm64 is needed"
    if not Path("/sys/kernel/btf/vmlinux").exists():
        return "the kernel has no BTF (/sys/kernel/btf/vmlinux): CONFIG_DEBUG_INFO_BTF"
    return None


class _FlushResult(ctypes.Structure):
    _fields_ = (("live", ctypes.c_uint32), ("busy", ctypes.c_uint32), ("all", ctypes.c_uint32))


class RecordRing(Ring):
    """A ring that holds only `record`s, read with numpy."""

    def __init__(self, fd: int, size: int, record: np.dtype[np.void]) -> None:
        super().__init__(fd, size, record.itemsize)
        self._framed = np.dtype([("length", "<u4"), ("page", "<u4"), ("record", record)])

    def read(self) -> Records:
        """All records that are complete, in the order in which they were written; gives their place back."""
        frames = np.frombuffer(self.stretch(), self._framed)
        busy = np.flatnonzero(frames["length"] & np.uint32(BUSY))
        if len(busy):
            frames = frames[: busy[0]]
        self.fence()
        records: Records = frames["record"][(frames["length"] & np.uint32(DISCARDED)) == 0]
        self.free(len(frames))
        return records


class KernelPart:
    """The object loaded for `parts`; what could not be had is in `missing`. `attach` begins, `close` ends it."""

    def __init__(self, parts: Iterable[Part], follow: bool, coalesce: bool) -> None:
        self.missing: list[str] = []
        self._config = _config(follow, coalesce).tobytes()
        self._object, self._programs = self._load(list(parts))
        self._ring = RecordRing(self._object.map_fd("ring"), RING_BYTES, RECORD)

    def _load(self, parts: list[Part]) -> tuple[BpfObject, list[str]]:
        """Loads what the kernel takes: a program that it refuses is replaced by the next choice, or left out."""
        choice = [0] * len(parts)
        while True:
            chosen = [part.programs[index] for part, index in zip(parts, choice, strict=True) if index < len(part.programs)]
            programs = [*_ALWAYS, *(name for group in chosen for name in group)]
            loaded = BpfObject(OBJECT)
            try:
                loaded.configure(".rodata", self._config)
                loaded.load(programs)
                return loaded, programs
            except LoadFailure as failure:
                loaded.close()
                self._give_up(failure, parts, choice)

    def _give_up(self, failure: LoadFailure, parts: list[Part], choice: list[int]) -> None:
        for position, part in enumerate(parts):
            if choice[position] < len(part.programs) and failure.program in part.programs[choice[position]]:
                choice[position] += 1
                if choice[position] < len(part.programs):
                    return
                if part.missing is not None:
                    self.missing.append(part.missing)
                    return
        raise failure

    def attach(self, pids: Iterable[int]) -> int:
        """Begins to record the processes `pids`; returns the number of their threads."""
        for pid in pids:
            self._object.put("targets", pid.to_bytes(4, sys.byteorder), (1).to_bytes(4, sys.byteorder))
        for name in ("started", "ended", "replaced"):
            self._object.attach(name)
        # What a thread starts before it is found itself is found in the next round.
        found = 0
        while added := len(self._object.iterate("seed")):
            found += added
        for name in self._programs:
            if name not in _ALWAYS:
                self._object.attach(name)
        return found

    def flush(self, at_end: bool = False) -> tuple[int, bool]:
        """Sends runs that stopped growing to the ring, `at_end` all; returns the number of live threads and whether none
        was busy."""
        result = _FlushResult(all=at_end)
        for _ in range(_BUSY_TRIES if at_end else 4):
            self._object.run("flush", result)
            if not result.busy:
                break
            if at_end:
                time.sleep(_BUSY_S)
        return int(result.live), not result.busy

    def read(self) -> Records:
        """What is in the ring."""
        return self._ring.read()

    def losses(self) -> dict[str, int]:
        """Events lost so far, by reason; only reasons that occurred."""
        counts = {reason: self._loss(number) for number, reason in enumerate(LOSSES)}
        attached = [name for name in self._programs if name not in _RUN_BY_US]
        counts["program busy"] = sum(self._object.misses(name) for name in attached)
        return {reason: count for reason, count in counts.items() if count}

    def _loss(self, number: int) -> int:
        return int.from_bytes(self._object.read("losses", number.to_bytes(4, sys.byteorder), 8), sys.byteorder)

    def detach(self) -> None:
        """Ends the recording; what is in the maps can still be flushed and read."""
        self._object.detach()

    def close(self) -> None:
        """Gives everything back."""
        self._object.close()


def _config(follow: bool, coalesce: bool) -> Records:
    config = np.zeros(1, CONFIG)
    config["max_age_ns"] = MAX_AGE_NS
    config["max_blocks"] = MAX_BLOCKS if coalesce else 0
    config["follow"] = follow
    config["page_blocks_log2"] = (mmap.PAGESIZE // 4096).bit_length() - 1
    config["total_store_order"] = platform.machine() == "x86_64"
    config["write_calls"], config["read_calls"] = _CALLS[platform.machine()]
    return config


def explained(failure: LoadFailure, what: str) -> EnvironmentProblem:
    """The error for a person when the kernel refuses `what`."""
    return EnvironmentProblem(f"the kernel refuses {what}: {failure}", "choose another with --tier")
