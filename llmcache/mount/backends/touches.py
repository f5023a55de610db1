"""Touches: the extents of watched files that clients read or map, as BPF programs report them (bpf/touches.bpf.c).

An extent is reported again after QUIET_NS at the earliest. Access to a mapped page is not reported.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import struct
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from llmcache.bpf.filemap import BY_FUNCTION, BY_TRACEPOINT, observable_by
from llmcache.bpf.libbpf import OBJECTS, BpfObject, LoadFailure, has_tracepoint
from llmcache.bpf.ring import Ring
from llmcache.errors import MissingRequirement
from llmcache.model.tensors import SliceRun
from llmcache.mount import syscalls
from llmcache.mount.state.interfaces import ClientReads
from llmcache.procfs import fstype_at
from llmcache.units import PAGE_BYTES

log = logging.getLogger(__name__)

OBJECT = OBJECTS / "touches.bpf.o"
PLACES = 1 << 19  # extents of all files together; the same as in the BPF program
QUIET_NS = 20_000_000
GATHER_NS = 1_000_000  # least time between two wake-ups of the daemon for hits
MISS, FAULT = 1, 2
_RING_BYTES = 1 << 20
_PROGRAMS = {
    BY_TRACEPOINT: ("read_pages", "fault_page", "map_around", "add_folio"),
    BY_FUNCTION: ("batch_found", "fault_begun", "map_returned", "add_folio"),
}
_FAULT_TRACEPOINT = "page_fault_user"  # x86-64 has it, arm64 does not
_FAULTS = (("fault", "fault_in_call"), ("fault_handled",), ())
"""Programs that observe mappings by huge pages, which BY_TRACEPOINT misses: at a tracepoint, at a function, or none."""
_FRAME = struct.Struct("<IIQIIII")
_KEY = struct.Struct("<QQ")
_WATCHED = struct.Struct("<IIIIIII")
_RUN = struct.Struct("<QQII")
_ADDED = struct.Struct("<QQ")
FILES, RUNS = 1 << 13, 1 << 14  # files watched at a time; runs of slices in all files; the same as in the BPF program


class Touch(NamedTuple):
    """`flags`: MISS if the page was absent (or triggers readahead), FAULT if a mapping was used."""

    t_ns: int  # CLOCK_MONOTONIC
    file: int
    extent: int
    pid: int  # 0 for a process outside this PID namespace
    flags: int


# Their inode in the page cache is the one that stat reports; on overlayfs, btrfs and file systems in memory it is not.
_FILE_SYSTEMS = ("ext4", "xfs", "f2fs", "ext3", "ext2")


def why_not(directory: str | None = None, *, keep: bool = False) -> str | None:
    """Return why files (below `directory`) cannot be steered in place on this machine, or None.

    `keep`: keep the programs loaded for the next `Touches`, here or in a forked process.
    """
    if os.geteuid() != 0:
        return "mode inplace needs root"
    if directory is not None and (kind := fstype_at(directory)) not in _FILE_SYSTEMS:
        return f"{directory} is on {kind or 'an unknown file system'}; mode inplace supports {', '.join(_FILE_SYSTEMS)}"
    if reason := syscalls.refusal():
        return reason
    try:
        programs = _load_attached()
    except MissingRequirement as problem:
        return problem.message
    if keep:
        programs.object.detach()
        Touches.loaded = programs
    else:
        programs.object.close()
    return None


class _Programs(NamedTuple):
    """The BPF object, and its programs to attach. `way`: BY_TRACEPOINT or BY_FUNCTION."""

    object: BpfObject
    way: str
    faults: Sequence[str]

    @property
    def names(self) -> Sequence[str]:
        return (*_PROGRAMS[self.way], *self.faults)

    @property
    def sees_huge(self) -> bool:
        """Return whether mappings by huge pages are observed."""
        return self.way == BY_FUNCTION or bool(self.faults)

    def attach(self) -> None:
        """After a LoadFailure, the object is closed."""
        try:
            self.object.run("begin", _Nothing())
            for name in self.names:
                self.object.attach(name)
        except LoadFailure:
            self.object.close()
            raise


def _load(way: str, faults: Sequence[str]) -> _Programs:
    loaded = BpfObject(OBJECT)
    try:
        loaded.configure(struct.pack("<QQII", QUIET_NS, GATHER_NS, PAGE_BYTES.bit_length() - 1, 0))
        loaded.load([*_PROGRAMS[way], *faults, "begin"])
    except LoadFailure:
        loaded.close()
        raise
    return _Programs(loaded, way, faults)


def _load_attached() -> _Programs:
    """Use the programs for this kernel, with the first of `_FAULTS` that it accepts. MissingRequirement."""
    way = observable_by()
    if way is None:
        raise MissingRequirement(
            "the kernel has neither tracepoints for page cache accesses (Linux 6.12 and later have them) nor BTF of the "
            "functions behind them",
            "use another --mode",
        )
    choices = _FAULTS if has_tracepoint(_FAULT_TRACEPOINT) else _FAULTS[1:]
    for faults in choices if way == BY_TRACEPOINT else [()]:
        try:
            programs = _load(way, faults)
            programs.attach()
            return programs
        except LoadFailure as failure:
            refused = failure
            if failure.program not in faults:
                break
    raise _refused(refused, way) from refused


def _refused(failure: LoadFailure, way: str) -> MissingRequirement:
    place = "" if way == BY_TRACEPOINT else " at functions (Linux 6.12 and later have tracepoints instead)"
    text = f"the kernel rejects the BPF programs that observe reads{place}: {failure}"
    return MissingRequirement(text, "use another --mode")


class _Nothing(ctypes.Structure):
    _fields_ = (("nothing", ctypes.c_uint64),)


class Touches:
    """The attached programs, until `close`. MissingRequirement if the kernel refuses them."""

    loaded: ClassVar[_Programs | None] = None

    def __init__(self) -> None:
        if Touches.loaded is None:
            programs = _load_attached()
        else:
            programs, Touches.loaded = Touches.loaded, None
            try:
                programs.attach()
            except LoadFailure as failure:
                raise _refused(failure, programs.way) from failure
        self._object = programs.object
        if not programs.sees_huge:
            log.warning("uses of huge pages by clients are not observed: the kernel allows no BPF program at page faults")
        self._ring = Ring(self._object.map_fd("ring"), _RING_BYTES, _FRAME.size - 8)
        self._counted: set[int] = set()  # numbers of the files whose reads are counted
        self._past = ClientReads(0, 0)  # reads of files that are no longer watched
        self._poll = select.poll()
        self._poll.register(self._object.map_fd("ring"), select.POLLIN)

    def watch(
        self,
        file: int,
        status: os.stat_result,
        first: int,
        count: int,
        extent_bytes: int,
        step: int = 1,
        first_run: int = 0,
        runs: Sequence[SliceRun] = (),
    ) -> None:
        """Report touches of a file as file number `file`; its `count` extents use places from `first` on.

        Only every `step`th extent is reported. Slice n of `runs` is reported as extent `count` + n; `first_run` is the place
        of the runs in their table.
        """
        for number, run in enumerate(runs):
            packed = _RUN.pack(run.first_byte, run.slice_bytes, run.count, run.first)
            self._object.put("runs", struct.pack("<I", first_run + number), packed)
        pages = extent_bytes // PAGE_BYTES
        watched = _WATCHED.pack(file, first, count, pages, step, first_run, len(runs))
        if file not in self._counted:
            self._counted.add(file)
            self._object.put("added_pages", struct.pack("<I", file), bytes(_ADDED.size))
        self._object.put("files", self._key(status.st_dev, status.st_ino), watched)

    def ignore(self, dev: int, ino: int) -> None:
        self._object.remove("files", self._key(dev, ino))

    def reads(self, file: int) -> ClientReads:
        """Return the bytes that the kernel has read of a file since it is watched."""
        if file not in self._counted:
            return ClientReads(0, 0)
        pages = _ADDED.unpack(self._object.read("added_pages", struct.pack("<I", file), _ADDED.size))
        return ClientReads(*(count * PAGE_BYTES for count in pages))

    def all_reads(self) -> ClientReads:
        now = [self.reads(file) for file in list(self._counted)]
        return ClientReads(*(sum(amounts) for amounts in zip(self._past, *now, strict=True)))

    def forget(self, file: int) -> None:
        if file in self._counted:
            self._past = ClientReads(*(sum(amounts) for amounts in zip(self._past, self.reads(file), strict=True)))
            self._counted.remove(file)
            self._object.remove("added_pages", struct.pack("<I", file))

    @staticmethod
    def _key(dev: int, ino: int) -> bytes:
        return _KEY.pack(dev, ino)

    def wait(self, timeout_s: float) -> list[Touch]:
        """Return the touches since the last call; empty after `timeout_s`.

        Hits end the wait at most once in GATHER_NS, and the last ones do not: use a short timeout after a touch.
        """
        self._poll.poll(timeout_s * 1e3)
        return [Touch(*fields) for fields in self._ring.take(_FRAME)]

    @property
    def lost(self) -> int:
        return int(struct.unpack("<IIQQ", self._object.read("own", bytes(4), 24))[2])

    def close(self) -> None:
        self._object.close()
