"""The tier without privilege: page faults of the user's own processes, and their reads and writes if strace is installed.

The kernel's perf events report the address of each page fault, and every new mapping and fork, in one ring per CPU.
`AddressSpaces` maps an address at a given time to a file and a block. `FaultSource` merges faults and system calls by time.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import os
import platform
import shutil
import struct
import subprocess
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from contextlib import suppress
from operator import attrgetter, itemgetter
from pathlib import Path

import numpy as np

from llmcache.arrays import Records, Uint64s
from llmcache.bpf.perf import Attributes, is_known_processor, open_event
from llmcache.bpf.ring import Fence
from llmcache.errors import MissingRequirement
from llmcache.procfs import FileMapping, RunningProcesses, descendants, mappings, status_of
from llmcache.trace.formats.strace import StraceLog
from llmcache.trace.record import MAP, UNKNOWN, WRITE
from llmcache.trace.records import ACCESS, RECORD, Key, Scope, Source, no_records
from llmcache.units import BLOCK_BYTES, PAGE_BYTES

# Perf events: linux/perf_event.h.
_SOFTWARE, _PAGE_FAULTS = 1, 2
_TID, _TIME, _ADDR = 1 << 1, 1 << 2, 1 << 3
_INHERIT, _EXCLUDE_KERNEL, _EXCLUDE_HYPERVISOR, _WATERMARK = 1 << 1, 1 << 5, 1 << 6, 1 << 14
_USE_CLOCK, _INHERIT_THREADS_ONLY = 1 << 25, 1 << 35
# mmap, task, mmap_data, sample_id_all, mmap2
_REPORT_MAPPINGS = 1 << 8 | 1 << 13 | 1 << 17 | 1 << 18 | 1 << 23
_SET_OUTPUT, _DISABLE = 0x2405, 0x2401
_HEAD, _TAIL = 128, 129  # words of the control page
_HEADER = struct.Struct("<IHH")  # kind, -, size
_LOST, FORK, _SAMPLE, MMAP = 2, 7, 9, 10  # kinds of records; MMAP is PERF_RECORD_MMAP2
_NAME = 64  # offset of the file name in PERF_RECORD_MMAP2
_FAULT = np.dtype(
    [("kind", "<u4"), ("flags_size", "<u4"), ("pid", "<u4"), ("tid", "<u4"), ("t_ns", "<u8"), ("address", "<u8")]
)
# Without privilege, a user may lock 516 KiB for perf by default, control pages included.
_LOCKED_BYTES = 480 << 10
_ROOT_RING_BYTES = 1 << 20

_SETTLED_NS = 50_000_000  # strace may report a call this late
_LOOK_S = 0.1
_ATTACH_S = 60.0  # generous: strace attaches or fails within milliseconds unless the machine is stalled
_PIPE_BYTES = 1 << 20
_libc = ctypes.CDLL(None, use_errno=True)


def _opened(tid: int, cpu: int, follow: bool) -> int:
    """Return a perf event descriptor for the page faults of thread `tid` on `cpu`; OSError.

    It includes the threads that `tid` starts, and with `follow` the processes, but no page faults in kernel code.
    """
    flags = _INHERIT | _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR | _WATERMARK | _USE_CLOCK | _REPORT_MAPPINGS
    attributes = Attributes(
        type=_SOFTWARE,
        config=_PAGE_FAULTS,
        sample_period=1,
        sample_type=_TID | _TIME | _ADDR,
        flags=flags if follow else flags | _INHERIT_THREADS_ONLY,
        wakeup_watermark=1 << 30,  # never wake the reader: it reads at intervals
        clockid=time.CLOCK_MONOTONIC,
    )
    return open_event(attributes, tid, cpu)


def _processors() -> list[int]:
    """Return the online CPUs: an inherited event must be opened on each."""
    found: list[int] = []
    with open("/sys/devices/system/cpu/online") as file:
        for part in file.read().strip().split(","):
            low, _, high = part.partition("-")
            found += range(int(low), int(high or low) + 1)
    return found


class EventRing:
    """The ring buffer for the events on one CPU, which any number of threads share. `size_bytes` is a power of two."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.lost = 0
        self._fds = [fd]
        self._size = size_bytes
        self._map = mmap.mmap(fd, PAGE_BYTES + size_bytes)
        self._control = np.frombuffer(self._map, np.uint64, PAGE_BYTES // 8)
        self._fence = Fence()

    def add(self, fd: int) -> None:
        self._fds.append(fd)
        if _libc.ioctl(fd, ctypes.c_ulong(_SET_OUTPUT), ctypes.c_int(self._fds[0])):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def read(self) -> tuple[list[Records], list[tuple[int, bytes]]]:
        """Return the samples, and the kind and content of each other record."""
        head, tail = int(self._control[_HEAD]), int(self._control[_TAIL])
        self._fence()
        begin = PAGE_BYTES + tail % self._size
        data = self._map[begin : begin + head - tail]
        data += self._map[PAGE_BYTES : PAGE_BYTES + head - tail - len(data)]
        self._fence()
        self._control[_TAIL] = head
        samples, others, at = [], [], 0
        while at < len(data):
            kind, _, size = _HEADER.unpack_from(data, at)
            if kind == _SAMPLE:
                # All samples have one size, so numpy decodes a run of them in one step.
                rows = np.frombuffer(data, _FAULT, (len(data) - at) // _FAULT.itemsize, at)
                other = np.flatnonzero(rows["kind"] != _SAMPLE)
                samples.append(rows[: other[0]] if len(other) else rows)
                size = samples[-1].nbytes
            elif kind == _LOST:
                self.lost += struct.unpack_from("<Q", data, at + 16)[0]
            else:
                others.append((kind, data[at + _HEADER.size : at + size]))
            at += size
        return samples, others

    def stop(self) -> None:
        for fd in self._fds:
            _libc.ioctl(fd, ctypes.c_ulong(_DISABLE), 0)

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        del self._control
        self._map.close()


class AddressSpace:
    """The mappings of a process, disjoint and in ascending order."""

    def __init__(self, mappings: Iterable[FileMapping] = ()) -> None:
        self.mappings = list(mappings)
        self._table: Uint64s | None = None

    def put(self, new: FileMapping) -> None:
        """Add a mapping, which replaces the parts of older ones at its addresses."""
        self._table = None
        at = bisect_right(self.mappings, new.low, key=attrgetter("high"))
        end = bisect_left(self.mappings, new.high, key=attrgetter("low"))
        below = [dataclasses.replace(old, high=new.low) for old in self.mappings[at:end] if old.low < new.low]
        above = [
            dataclasses.replace(old, low=new.high, block=old.block + (new.high - old.low) // BLOCK_BYTES)
            for old in self.mappings[at:end]
            if new.high < old.high
        ]
        self.mappings[at:end] = [*below, new, *above]

    def files(self, address: Uint64s) -> tuple[Uint64s, Uint64s, Uint64s]:
        """Return device, inode and block of each address; inode 0 where no file is mapped."""
        if not self.mappings:
            nothing = np.zeros(len(address), np.uint64)
            return nothing, nothing, nothing
        if self._table is None:
            rows = [(each.low, each.high, each.dev, each.inode, each.block) for each in self.mappings]
            self._table = np.array(rows, np.uint64).T
        low, high, dev, inode, block = self._table
        at = np.maximum(np.searchsorted(low, address, "right").astype(np.int64) - 1, 0)
        inside = (low[at] <= address) & (address < high[at])
        blocks = block[at] + (address - low[at]) // BLOCK_BYTES
        return dev[at], np.where(inside, inode[at], np.uint64(0)), blocks


class AddressSpaces:
    """The address spaces of all recorded processes."""

    def __init__(self, paths: dict[Key, str]) -> None:
        self._paths = paths
        self._by_pid: dict[int, AddressSpace] = {}
        self._changes: list[tuple[int, int, FileMapping | int]] = []  # time, process, its new mapping or its parent

    def look(self, pid: int) -> None:
        self._by_pid[pid] = AddressSpace(mappings(pid))

    def note(self, kind: int, record: bytes) -> None:
        """Store a MMAP or FORK record without its header; process and time (`sample_id_all`) are at its end."""
        (t_ns,) = struct.unpack_from("<Q", record, len(record) - 8)
        if kind == FORK:
            pid, parent = struct.unpack_from("<II", record)
            if pid != parent:
                self._changes.append((t_ns, pid, parent))
        elif kind == MMAP:
            pid, _, low, length, offset, major, minor, inode = struct.unpack_from("<IIQQQIIQ", record)
            path = os.fsdecode(record[_NAME:].partition(b"\0")[0])
            mapping = FileMapping(low, low + length, os.makedev(major, minor), inode, offset // BLOCK_BYTES, path)
            self._changes.append((t_ns, pid, mapping))
            if inode:
                self._paths[mapping.dev, inode] = path

    def files(self, pid: Uint64s, t_ns: Uint64s, address: Uint64s) -> tuple[Uint64s, Uint64s, Uint64s]:
        """Return device, inode and block of faults in ascending order of time; inode 0 outside of files."""
        found = np.zeros((3, len(pid)), np.uint64)
        begin = 0
        for when, process, change in sorted(self._changes, key=itemgetter(0)):
            end = int(np.searchsorted(t_ns, np.uint64(when)))
            self._fill(found[:, begin:end], pid[begin:end], address[begin:end])
            begin = end
            if isinstance(change, FileMapping):
                self._by_pid.setdefault(process, AddressSpace()).put(change)
            elif change in self._by_pid:
                self._by_pid[process] = AddressSpace(self._by_pid[change].mappings)
            else:
                self.look(process)
        self._changes = []
        self._fill(found[:, begin:], pid[begin:], address[begin:])
        dev, inode, block = found
        return dev, inode, block

    def _fill(self, found: Uint64s, pid: Uint64s, address: Uint64s) -> None:
        for process in np.unique(pid).tolist():
            mine = pid == process
            if process not in self._by_pid:
                self.look(process)
            found[:, mine] = self._by_pid[process].files(address[mine])


class Strace:
    """The system calls of a scope's targets, traced by strace.

    The constructor returns when strace is attached, or raises MissingRequirement. Paths of accessed files are stored in
    `paths`.
    """

    def __init__(self, scope: Scope, paths: dict[Key, str]) -> None:
        self.lost = 0
        self._scope, self._paths = scope, paths
        self._keys: dict[int, Key | None] = {}  # by file number in the log; None if the path no longer exists
        self._log, self._lines, self._rest = StraceLog(), 0, b""
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        with tempfile.TemporaryDirectory(prefix="llmcache-") as directory:
            fifo = Path(directory) / "log"
            os.mkfifo(fifo, 0o600)
            self._pipe = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            # -f is required for threads, even without scope.follow.
            attach = [word for pid in scope.targets for word in ("-p", str(pid))]
            self._process = subprocess.Popen(
                ["strace", "-f", "-q", "-ttt", "-y", "-s", "0", "-e", "trace=desc,process", "-o", str(fifo), *attach],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C must reach only the recorder, which ends strace
            )
            try:
                self._wait()
            except BaseException:
                self.stop()
                self.close()
                raise

    def _wait(self) -> None:
        deadline = time.monotonic() + _ATTACH_S
        while any(_tracer(pid) != self._process.pid for pid in self._scope.targets):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                output = self._process.communicate()[1].decode(errors="replace").strip()
                reason = output.splitlines()[0] if output else "it cannot attach"
                raise MissingRequirement(
                    f"strace: {reason}",
                    "without root, it attaches only to your own processes, and only where no debugger is attached",
                )
            time.sleep(0.005)

    @property
    def guessed(self) -> int:
        """Return the number of sequential accesses in files that were open before, so that their offset is unknown."""
        return self._log.counts["guessed_offsets"]

    def drain(self) -> Records:
        self._follow()
        found = []
        for t_ns, number, first, count, op, _, pid in self._log.rows:
            # The page faults show which blocks of a mapping are touched.
            if op == MAP or (op == WRITE and not self._scope.writes):
                continue
            if not self._scope.follow and pid not in self._scope.targets:
                continue
            if key := self._key(number):
                dev, inode = key
                found.append((max(0, t_ns - self._offset_ns), first, inode, dev, count, pid, 1, op, UNKNOWN, ACCESS, 0))
            else:
                self.lost += 1
        self._log.rows = []
        return np.array(found, RECORD)

    def _follow(self) -> None:
        with suppress(BlockingIOError):
            while data := os.read(self._pipe, _PIPE_BYTES):
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    self._lines += 1
                    self._log.take(os.fsdecode(line), self._lines)

    def _key(self, number: int) -> Key | None:
        if number not in self._keys:
            self._keys[number] = None
            path = self._log.path(number)
            with suppress(OSError, ValueError):
                stat = os.stat(path)
                self._keys[number] = stat.st_dev, stat.st_ino
                self._paths[stat.st_dev, stat.st_ino] = path
        return self._keys[number]

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            # strace may be blocked on a full pipe.
            while self._process.poll() is None:
                self._follow()
                time.sleep(0.002)
        if self._process.stderr is not None:
            self._process.stderr.close()

    def close(self) -> None:
        os.close(self._pipe)


def _tracer(pid: int) -> int:
    try:
        return int(status_of(pid)["TracerPid"])
    except OSError:
        return 0


class FaultSource(Source):
    """The tier of page faults and strace."""

    name = "faults"
    sees = "the page of every page fault in a mapped file; with strace also reads and writes by system call"
    cannot_see = (
        "cache hits and misses; accesses to pages that are already mapped, or that the kernel maps around a fault; page "
        "faults inside system calls; files that mremap has moved; io_uring; the offsets of reads in files that were open "
        "before the recording, unless the calls name them (pread)"
    )
    pages = False
    requests = False

    def __init__(self) -> None:
        super().__init__()
        self._rings: dict[int, EventRing] = {}  # by processor
        self._spaces = AddressSpaces(self.paths)
        self._running = RunningProcesses()
        self._follow = False
        self._looked_s = 0.0
        self._strace: Strace | None = None

    @classmethod
    def probe(cls) -> str | None:
        if not is_known_processor():
            return f"the processor is {platform.machine()}; only x86-64 and arm64 are supported"
        try:
            os.close(_opened(os.getpid(), 0, True))
        except PermissionError:
            return "perf events are not allowed (kernel.perf_event_paranoid is above 2)"
        except OSError as error:
            return f"perf events: {error.strerror}"
        return None

    def start(self, scope: Scope) -> None:
        self._follow = scope.follow
        self._add(scope.targets)
        if not self.alive():
            raise scope.missing()
        try:
            self._attach(scope)
            if shutil.which("strace"):
                self._strace = Strace(scope, self.paths)
            else:
                self.remarks.append("not recorded: reads and writes by system call (strace is not installed)")
        except BaseException as error:
            self._close()
            if isinstance(error, PermissionError):
                raise MissingRequirement("the process belongs to another user", "sudo llmcache trace …") from error
            if isinstance(error, OSError):
                raise MissingRequirement(f"cannot open perf events: {error.strerror}", "try as root") from error
            raise

    def _attach(self, scope: Scope) -> None:
        cpus = _processors()
        most = _ROOT_RING_BYTES if os.geteuid() == 0 else max(4096, _LOCKED_BYTES // len(cpus) - 4096)
        size = 1 << most.bit_length() - 1  # a power of two
        for pid in scope.targets:
            for task in Path(f"/proc/{pid}/task").glob("*"):
                with suppress(ProcessLookupError):
                    for cpu in cpus:
                        fd = _opened(int(task.name), cpu, scope.follow)
                        if cpu in self._rings:
                            self._rings[cpu].add(fd)
                        else:
                            self._rings[cpu] = EventRing(fd, size)
            self._spaces.look(pid)

    def drain(self) -> Records:
        horizon: int | None = None if self._stopped else time.monotonic_ns() - _SETTLED_NS
        samples: list[Records] = []
        for ring in self._rings.values():
            found, others = ring.read()
            samples += found
            for kind, record in others:
                self._spaces.note(kind, record)
        parts = [no_records()]
        if samples:
            parts.append(self._in_files(np.concatenate(samples)))
        if self._strace is not None:
            parts.append(self._strace.drain())
        records = np.concatenate(parts)
        if self._follow and not self._stopped:
            self._add(np.unique(records["pid"]).tolist())
        if self._stopped:
            self._close()
        return self._order.put(records, horizon)

    def _in_files(self, samples: Records) -> Records:
        samples = samples[np.argsort(samples["t_ns"], kind="stable")]
        records = no_records(len(samples))
        records["pid"], records["t_ns"] = samples["pid"], samples["t_ns"]
        found = self._spaces.files(samples["pid"], samples["t_ns"], samples["address"])
        records["dev"], records["inode"], records["first"] = found
        records["count"], records["aux"], records["op"] = 1, 1, MAP
        records["miss"], records["kind"] = UNKNOWN, ACCESS
        in_files: Records = records[records["inode"] != 0]
        return in_files

    def alive(self) -> bool:
        """Return whether a process runs; children that have touched no file are searched in /proc at most ten times a
        second.
        """
        if self._stopped:
            return False
        self._running.wait(0)
        now_s = time.monotonic()
        if self._follow and now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            self._add(child for pid in self._running.pids for child in descendants(pid))
        return bool(self._running.pids)

    def _add(self, pids: Iterable[int]) -> None:
        for pid in pids:
            self._running.add(pid)

    @property
    def lost(self) -> int:
        of_strace = self._strace.lost if self._strace else 0
        return self._lost + of_strace + sum(ring.lost for ring in self._rings.values())

    def stop(self) -> None:
        self._stopped = True
        for ring in self._rings.values():
            ring.stop()
        if self._strace is not None:
            self._strace.stop()

    def _close(self) -> None:
        self._lost = self.lost
        self._running.close()
        for ring in self._rings.values():
            ring.close()
        self._rings = {}
        if self._strace is not None:
            self._strace.close()
            if self._strace.guessed:
                self.remarks.append(f"guessed offsets, in files that were open before the recording: {self._strace.guessed}")
            self._strace = None
