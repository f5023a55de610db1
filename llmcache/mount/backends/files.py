"""The files below SOURCE and the client processes that read them, in mode inplace.

A mapped page can be dropped only through the client's mapping, by `process_madvise(MADV_PAGEOUT)`, which needs root, or
CAP_SYS_PTRACE and CAP_SYS_NICE. It does not reclaim pages that several processes map; those get MADV_COLD.

Locks, in this order: `Files.turn` for changes of the table of files, `Files.lock` while clients are given advice (they stay
in the table), the engine's lock (`state.py`). A thread that holds one of the last two never waits for storage.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import math
import os
import queue
import select
import stat
import threading
import time
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from llmcache.cache.space import HUGE_BYTES, LEAST_LOOP_BYTES
from llmcache.errors import MissingRequirement
from llmcache.model.names import NOT_THERE
from llmcache.mount import syscalls
from llmcache.mount.backends.touches import FILES, PLACES, RUNS, Touches
from llmcache.mount.changes import SourceChanges
from llmcache.mount.readahead import SMALL_READ_AHEAD_KB, ReadAhead, read_ahead_advice, read_ahead_file
from llmcache.mount.source.backing import Backing
from llmcache.mount.source.tree import Caller, LinkTarget
from llmcache.mount.state.interfaces import EngineCalls
from llmcache.mount.state.space import PINNED, SINGLE, LoopSpace, SpaceFile
from llmcache.mount.state.state import LOADS_S
from llmcache.procfs import RunningProcesses
from llmcache.storage import cached_blocks, map_file, unmap
from llmcache.units import BLOCK_BYTES

log = logging.getLogger(__name__)

SCAN_S, SCAN_REST = 1.0, 50  # between walks of SOURCE; at least this multiple of the time that the last walk took
QUIET_SCAN_S = 60.0  # between walks without a reported change, if all changes are reported
CHECK_S = 0.25  # between checks of open files and their clients
LOOK_REST = 20  # pause between checks of the files' paths, as a multiple of the time that the last one took
QUIET_NS = 2_000_000_000  # a file that was modified less than this ago is not steered
IDLE_NS = 10_000_000_000  # a file that no client has touched for this time may have been closed
WHOLE_STEP = 32  # one extent in this number is observed, if the loop is pinned whole
FAILURES_MAX = 16  # then the file system has no large folios, or memory is fragmented
LEAST_WINDOWS = 8  # fewer windows are read in single pages: large folios do not pay there, as they are reclaimed whole
HEAD_BYTES = 16 << 10
READAHEAD_BYTES = 128 << 10  # one POSIX_FADV_WILLNEED reads at most the device's readahead, or its largest request
_LOOK_NS = 100_000_000  # between reads of a client's mappings


FilesByKey = dict[tuple[int, int], tuple[str, os.stat_result]]
"""Path and status of each file, by device and inode."""


class Program:
    """A client process. OSError if it has ended."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.refused = 0  # times that the kernel refused advice
        self._fd = os.pidfd_open(pid)
        self._end = select.poll()
        self._end.register(self._fd, select.POLLIN)
        self._parts: dict[tuple[int, int], list[tuple[int, int, int]]] = {}  # by device and inode: (offset, address, bytes)
        self._looked_ns = 0

    @property
    def ended(self) -> bool:
        return bool(self._end.poll(0))

    def close(self) -> None:
        os.close(self._fd)

    def addresses_of(self, dev: int, ino: int, offsets: Sequence[int]) -> list[int]:
        """The address is 0 for bytes that are not mapped."""
        addresses = [0] * len(offsets)
        for at, address, size in self._parts.get((dev, ino), ()):
            shift, end = address - at, at + size
            pairs = zip(offsets, addresses, strict=True)
            addresses = [offset + shift if at <= offset < end else old for offset, old in pairs]
        return addresses

    def cool(self, addresses: Sequence[int]) -> None:
        """Clear accessed bits, unless other processes map the pages too."""
        self._advise([(address, BLOCK_BYTES) for address in addresses], syscalls.MADV_COLD)

    def maps(self, dev: int, ino: int) -> bool:
        return (dev, ino) in self._parts

    def has(self, dev: int, ino: int) -> bool:
        """True if it has the file mapped or open now."""
        self.look(again=True)
        if self.maps(dev, ino):
            return True
        with contextlib.suppress(OSError):
            for number in os.listdir(f"/proc/{self.pid}/fd"):
                with contextlib.suppress(OSError):
                    status = os.stat(f"/proc/{self.pid}/fd/{number}")
                    if (status.st_dev, status.st_ino) == (dev, ino):
                        return True
        return False

    def look(self, *, again: bool = False) -> None:
        now_ns = time.monotonic_ns()
        if now_ns - self._looked_ns < _LOOK_NS and not again:
            return
        self._looked_ns = now_ns
        parts: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        with contextlib.suppress(OSError), open(f"/proc/{self.pid}/maps", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                span, _, offset, device, inode = line.split(None, 5)[:5]
                if inode == "0":
                    continue
                start, end = (int(part, 16) for part in span.split("-"))
                major, minor = (int(part, 16) for part in device.split(":"))
                parts.setdefault((os.makedev(major, minor), int(inode)), []).append((int(offset, 16), start, end - start))
        self._parts = parts

    def advise(self, dev: int, ino: int, parts: Sequence[tuple[int, int]], advice: int) -> bool:
        """Return False if the parts, (offset, bytes), are not mapped."""
        if not self._parts.get((dev, ino)):
            self.look()
        mapped: list[tuple[int, int]] = []
        for at, address, size in self._parts.get((dev, ino), ()):
            for offset, length in parts:
                start, end = max(offset, at), min(offset + length, at + size)
                if start < end:
                    mapped.append((address + start - at, end - start))
        self._advise(mapped, advice)
        return bool(mapped)

    def _advise(self, parts: list[tuple[int, int]], advice: int) -> None:
        while parts:
            try:
                taken = syscalls.process_madvise(self._fd, parts, advice)
            except OSError as error:
                if error.errno not in (errno.ENOMEM, errno.EFAULT, errno.EINVAL):
                    if not self.refused:
                        log.warning("process %d: the kernel refuses advice on its memory: %s", self.pid, error.strerror)
                    self.refused += 1
                    return
                self.look()  # its mappings have changed
                taken = parts[0][1]
            ends = itertools.accumulate(size for _, size in parts)
            parts = parts[sum(end <= taken for end in ends) :]


def read_ahead(fd: int, parts: Sequence[tuple[int, int]], window: int = 0) -> int:
    """Make the kernel read the absent pages of parts, (offset, bytes), of a file; return the bytes. OSError.

    `window`: the kernel's readahead in bytes, for large folios; 0 for single pages.
    """
    own_fd, read = -1, 0
    try:
        for offset, length in parts:
            blocks = -(-(offset + length) // BLOCK_BYTES) - offset // BLOCK_BYTES
            absent = blocks - cached_blocks(fd, offset, length)
            large = window > 0 and absent * BLOCK_BYTES >= LEAST_WINDOWS * window
            if large and own_fd < 0:
                with contextlib.suppress(OSError):  # no free descriptor
                    own_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)  # with readahead state of its own
                    os.posix_fadvise(own_fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # doubles the window
            if large and own_fd >= 0:
                _read_windows(own_fd, offset, length, 2 * window)
            elif absent > 0:
                _will_need(fd, offset, length)
            read += max(0, absent) * BLOCK_BYTES
    finally:
        if own_fd >= 0:
            os.close(own_fd)
    return read


def _will_need(fd: int, offset: int, length: int) -> None:
    for at in range(offset, offset + length, READAHEAD_BYTES):
        os.posix_fadvise(fd, at, min(READAHEAD_BYTES, offset + length - at), os.POSIX_FADV_WILLNEED)


def _read_windows(fd: int, offset: int, length: int, window: int) -> None:
    """Make the kernel read most of a part in folios of growing size (mm/readahead.c).

    Large folios take a third of the CPU time. A read, without waiting, of the page that the kernel has marked triggers the
    next window. More than a window remains behind the last mark, so that clients which reach it trigger nothing.
    """
    byte, end = bytearray(1), offset + length
    at = mark = offset + min(HEAD_BYTES, length)
    size = 0
    _will_need(fd, offset, at - offset)
    with contextlib.suppress(OSError):  # the file system does not support RWF_NOWAIT
        while at + window < end:
            with contextlib.suppress(BlockingIOError):
                os.preadv(fd, [byte], mark, os.RWF_NOWAIT)
            if size < window:  # windows grow, and are cut to whole folios
                size = cached_blocks(fd, at, window) * BLOCK_BYTES
            if not size:
                break
            mark, at = at if mark < at else at + size - BLOCK_BYTES, at + size
    if cached_blocks(fd, offset, at - offset) * BLOCK_BYTES < at - offset:
        at = offset
    _will_need(fd, at, end - at)


@dataclass(eq=False)
class MappedFile:
    """An open file, mapped so that page faults read huge pages."""

    backing: Backing
    address: int
    length: int
    window: int = 0  # readahead of the kernel in bytes
    reads: int = 0  # reads and drops under way, which end before the file is closed
    failures: int = 0  # faults that did not read a huge page, less those that did
    whole_ns: int = 0  # when the loop was pinned whole
    renewed: int = 0  # extents that were renewed, or need not be
    renewal_s: float = 0.0  # time that it took

    @classmethod
    def of(cls, backing: Backing, window: int = 0) -> MappedFile:
        length = backing.size
        address = map_file(backing.fd, length)
        with contextlib.suppress(OSError):  # a kernel without huge pages uses readahead in small pages
            syscalls.madvise(address, length, syscalls.MADV_HUGEPAGE)
            syscalls.madvise(address, length, syscalls.MADV_RANDOM)  # otherwise a fault reads two huge pages
        return cls(backing, address, length, window)

    def populate(self, offset: int, length: int) -> int:
        """Return the bytes read; the part begins at a huge page. OSError."""
        fd, read, end = self.backing.fd, 0, offset + length
        for start in range(offset, end, HUGE_BYTES):
            size = min(HUGE_BYTES, end - start)
            wanted = -(-size // BLOCK_BYTES)
            resident = cached_blocks(fd, start, size)
            if resident >= wanted:
                continue
            read += (wanted - resident) * BLOCK_BYTES
            if not resident and size == HUGE_BYTES and self.failures < FAILURES_MAX:
                syscalls.madvise(self.address + start, BLOCK_BYTES, syscalls.MADV_POPULATE_READ)
                resident = cached_blocks(fd, start, size)
                self.failures = max(-FAILURES_MAX, self.failures + (1 if resident < wanted else -1))
            if resident < wanted:
                read_ahead(fd, [(start, size)], self.window)
        self._unmap_pages(offset, length)
        return read

    def is_huge(self, offset: int, length: int) -> bool:
        """The part is resident, and begins at a huge page; its short end is ignored. OSError."""
        whole = length // HUGE_BYTES * HUGE_BYTES
        for start in range(offset, offset + whole, HUGE_BYTES):
            syscalls.madvise(self.address + start, BLOCK_BYTES, syscalls.MADV_POPULATE_READ)
        huge = syscalls.huge_bytes(self.address + offset, whole)
        self._unmap_pages(offset, length)
        return huge == whole

    def _unmap_pages(self, offset: int, length: int) -> None:
        # Pages that this process also maps could not be dropped through a client's mapping.
        syscalls.madvise(self.address + offset, -(-length // BLOCK_BYTES) * BLOCK_BYTES, syscalls.MADV_DONTNEED)

    def close(self) -> None:
        """The file stays open if a read of it may hang."""
        self.backing.close()
        if not self.backing.kept:
            unmap(self.address, self.length)


@dataclass(eq=False)
class File:
    """A regular file: watched as a whole, or by extents once a client reads it."""

    number: int
    path: str
    status: os.stat_result
    first: int = -1  # place of its extents in the table of the BPF programs
    mapping: MappedFile | None = None  # while a client has it open
    space: LoopSpace | None = None
    step: int = 1  # one extent in this number is observed
    first_run: int = -1  # place of its runs of slices
    unplaced: bool = False  # there was no room for its extents: it is watched as a whole until there is
    programs: dict[int, Program | None] = field(default_factory=dict)  # by PID; None for a warm-up, and for PID 0
    warmups: int = 0  # warm-ups that have it open
    looked_ns: int = 0  # when it was last checked whether its clients still have it open

    @property
    def key(self) -> tuple[int, int]:
        return self.status.st_dev, self.status.st_ino

    @property
    def readers(self) -> list[Program]:
        """They stay open while `Files.lock` is held."""
        return [program for program in list(self.programs.values()) if program is not None]  # a copy, as other threads add

    @property
    def mappers(self) -> int:
        """`Files.lock` held."""
        return sum(program.maps(*self.key) for program in self.readers)


class SlotAllocator:
    """Allocator of places in a table."""

    def __init__(self, count: int) -> None:
        self._free = [(0, count)]  # (first, end) of each free stretch, sorted and merged
        self._taken: dict[int, int] = {}  # first place -> length of the stretch

    def take(self, count: int) -> int | None:
        """Return the first of `count` places in a row, or None."""
        for at, (first, end) in enumerate(self._free):
            if end - first >= count:
                self._free[at : at + 1] = [(first + count, end)] if end - first > count else []
                self._taken[first] = count
                return first
        return None

    @property
    def free(self) -> int:
        return sum(end - first for first, end in self._free)

    def taken_at(self, first: int) -> int:
        return self._taken.get(first, 0)

    def give(self, first: int) -> None:
        if (count := self._taken.pop(first, None)) is None:
            return
        end = first + count
        at = bisect(self._free, (first, end))
        if at < len(self._free) and self._free[at][0] == end:
            end = self._free.pop(at)[1]
        if at and self._free[at - 1][1] == first:
            at -= 1
            first = self._free.pop(at)[0]
        self._free.insert(at, (first, end))


class Files:
    """The table of files and clients. The thread `run` and warm-ups change it."""

    def __init__(self, touches: Touches, engine: EngineCalls) -> None:
        self.tree, self.touches, self.engine = engine.tree, touches, engine
        self.by_key: dict[tuple[int, int], File] = {}
        self.by_number: dict[int, File] = {}
        self.in_use: dict[int, File] = {}  # the open ones, by number
        self.has_opened = threading.Event()  # set at each open; cleared by the thread that waits for it
        self.window = 0  # readahead of the kernel in bytes
        self.read_ahead: ReadAhead | None = None  # the setting to use while the files do not fit
        self.turn, self.lock = threading.Lock(), threading.Lock()
        self._dev = os.fstat(self.tree.fd).st_dev  # file systems mounted below SOURCE are not visible through MOUNT
        self._numbers = iter(range(1, 1 << 32))
        self._requests: queue.SimpleQueue[tuple[File, int] | None] = queue.SimpleQueue()
        self._changes = SourceChanges(self.tree.fd)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._events = select.epoll()  # requests, ends of clients, and changes below SOURCE
        self._events.register(self._wake_fd, select.EPOLLIN)
        self._running = RunningProcesses()
        self._events.register(self._running, select.EPOLLIN | select.EPOLLONESHOT)
        if self._changes.fd is not None:
            self._events.register(self._changes.fd, select.EPOLLIN | select.EPOLLONESHOT)
        self._pending: set[tuple[int, int]] = set()
        self._programs: dict[int, Program] = {}
        self._places, self._runs = SlotAllocator(PLACES), SlotAllocator(RUNS)
        self._too_many = False  # logged that there are too many files
        self._advised = False  # logged the advice to use --read-ahead for experts
        self._refused = 0  # times that advice was refused on the memory of clients that have ended
        self._has_news = True  # something may have changed below SOURCE
        self._end_due = math.inf  # when to remove clients that have ended: their last touches are reported a little later
        self._scanned, self._pause_s, self._checked = 0.0, 0.0, 0.0  # last walk, pause after it, last check of open files
        self._unknown = False  # logged that a client is outside this PID namespace

    @property
    def refused(self) -> int:
        return self._refused + sum(program.refused for program in list(self._programs.values()))

    def of_node(self, node: int | None) -> File | None:
        return self.by_key.get((self._dev, node or 0))

    @contextlib.contextmanager
    def mapped(self, file: File) -> Iterator[MappedFile | None]:
        """The mapping stays open in the `with` block; None without one."""
        with self.engine.state.lock:
            mapping = file.mapping
            if mapping is not None:
                mapping.reads += 1
        try:
            yield mapping
        finally:
            if mapping is not None:
                with self.engine.state.lock:
                    mapping.reads -= 1
                    self.engine.state.ended.notify_all()

    @contextlib.contextmanager
    def opened(self, file: File) -> Iterator[int]:
        """The descriptor is temporary if the file is not open. OSError."""
        with self.mapped(file) as mapping:
            if mapping is not None:
                yield mapping.backing.fd
                return
            fd = self._open_by_path(file)
            try:
                yield fd
            finally:
                os.close(fd)

    # Touches, on the observing thread

    def request(self, file: File, pid: int) -> None:
        if (file.number, pid) not in self._pending:
            self._pending.add((file.number, pid))
            self._requests.put((file, pid))
            os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        self._requests.put(None)
        os.eventfd_write(self._wake_fd, 1)

    # The thread

    def begin(self) -> None:
        """Call it before MOUNT is visible: files keep the readahead that they were opened with. MissingRequirement."""
        with self.turn:
            try:
                self._scan()
            except OSError:  # no free descriptor: `run` tries again
                if self.read_ahead is not None:
                    raise
            self._set_read_ahead()

    def end(self) -> None:
        with self.turn:
            if self.read_ahead is not None:
                self.read_ahead.restore()
            self.read_ahead = None

    def _fit(self) -> bool:
        return sum(file.status.st_size for file in self.by_key.values()) <= self.engine.state.memory.budget_bytes

    def _set_read_ahead(self) -> None:
        """If the files fit, the kernel's own setting makes larger folios."""
        if self.read_ahead is not None:
            self.read_ahead.restore() if self._fit() else self.read_ahead.set()
        setting = read_ahead_file(f"/proc/self/fd/{self.tree.fd}")
        self.window = int(setting.read_text()) << 10 if setting is not None else 0

    def run(self) -> None:
        next_scan = next_look = next_check = self._end_due = 0.0
        while True:
            now = time.monotonic()
            if now >= next_look and (self._has_news or not self._changes.is_complete):
                has_changed = self._take_news()
                with self.turn:
                    has_left = self._forget_deleted()
                if has_changed or has_left:
                    next_scan = min(next_scan, now if has_left else self._scanned + self._pause_s)
                next_look = time.monotonic() + max(CHECK_S, LOOK_REST * (time.monotonic() - now))
            if now >= next_scan:
                self._walk_again()
                next_scan = self._scanned + (QUIET_SCAN_S if self._changes.is_complete else self._pause_s)
            if now >= self._end_due:
                with self.turn:
                    self._remove_ended()
            if self.in_use and now >= next_check:
                with self.turn:
                    if now >= self._checked + SCAN_S:
                        self._checked = now
                        self._check_changes()  # a write through a mapping is reported only when the file is closed
                    self._check_use()
                    self._thin()
                    self._place_waiting()
                next_check = time.monotonic() + CHECK_S
            pause_s = min(next_scan, self._end_due) - time.monotonic()
            if self._has_news or not self._changes.is_complete:
                pause_s = min(pause_s, next_look - time.monotonic())
            if self.in_use:
                pause_s = min(pause_s, next_check - time.monotonic())
            if not self._serve(max(0.0, pause_s)):
                self._changes.close()
                self._running.close()
                return

    def _take_news(self) -> bool:
        self._has_news = False
        has_changed = self._changes.take()
        if self._changes.fd is not None:
            self._events.modify(self._changes.fd, select.EPOLLIN | select.EPOLLONESHOT)
        return has_changed

    def _walk_again(self) -> None:
        began = time.monotonic()
        with self.turn:
            with contextlib.suppress(OSError):  # SOURCE is unreadable, or there is no free descriptor: retry later
                self._scan()
            self._check_changes()
            with contextlib.suppress(MissingRequirement, OSError):  # the device was removed
                self._set_read_ahead()
        self._scanned = time.monotonic()
        self._pause_s = max(SCAN_S, SCAN_REST * (self._scanned - began))
        self._has_news = True  # new directories may have changed before they were watched

    def _serve(self, timeout_s: float) -> bool:
        ready = [fd for fd, _ in self._events.poll(timeout_s)]
        self._has_news = self._has_news or self._changes.fd in ready
        if self._running.fileno() in ready:
            self._end_due = time.monotonic() + CHECK_S
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        with contextlib.suppress(queue.Empty):  # without an event, too: a run that failed may have left requests
            while True:
                request = self._requests.get_nowait()
                if request is None:
                    return False
                self._answer(*request)
        return True

    def _answer(self, file: File, pid: int) -> None:
        try:
            with self.turn:
                if file.mapping is not None or self._is_quiet(file):
                    self._adopt(file, pid)
        except OSError as error:
            log.debug("inode %d is not steered: %s", file.status.st_ino, error.strerror)
        self._pending.discard((file.number, pid))

    def _is_quiet(self, file: File) -> bool:
        # Modification times in the future are ignored: such a file would not be steered until then.
        return not 0 <= time.time_ns() - max(self.tree.stat(file.path).st_mtime_ns, 0) < QUIET_NS

    def _walk(self) -> tuple[FilesByKey, dict[str, LinkTarget], bool]:
        found: FilesByKey = {}
        errors: list[OSError] = []
        self._changes.begin()
        for directory, _, names, fd in os.fwalk(".", dir_fd=self.tree.fd, follow_symlinks=False, onerror=errors.append):
            self._changes.visit(fd)
            for name in names:
                try:
                    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    if self._is_steered(status):
                        found[status.st_dev, status.st_ino] = (os.path.normpath(f"/{directory}/{name}"), status)
                except OSError as error:
                    errors.append(error)
        targets: dict[str, LinkTarget] = {}
        followed: dict[str, str] = {}
        for path in self.tree.names.outside:
            try:
                with self.tree.parent(path) as (dir_fd, name):
                    target, status = self.tree.find_target(dir_fd, name)
            except OSError as error:
                errors.append(error)
                continue
            key = target.dev, target.ino
            if self._is_steered(status):
                if key not in found:
                    found[key], targets[path] = (path, status), target
                followed[path] = found[key][0]
        self.tree.names.followed = followed
        is_complete = all(error.errno in NOT_THERE for error in errors)
        self._changes.end(is_complete and not self.tree.names.outside)  # changes of files outside SOURCE are not reported
        return found, targets, is_complete

    def _scan(self) -> None:
        self.tree.names.scan()
        found, targets, is_complete = self._walk()
        if self.tree.names.is_outdated:
            self.tree.names.scan()
        gone = [file for key, file in self.by_key.items() if key not in found]
        if not is_complete:  # no free descriptor, or an I/O error: a file that the walk missed may still exist
            kept = {file.path: file for file in gone if self._is_at_path(file)}
            gone = [file for file in gone if file.path not in kept]
            targets |= {path: target for path, target in self.tree.targets.items() if path in kept}
        self.tree.targets = targets
        for file in gone:
            self._forget(file)
        # The largest first, because they gain most if there are more files than can be watched.
        for key, (path, status) in sorted(found.items(), key=lambda item: -item[1][1].st_size):
            if key in self.by_key:
                self._take_changes(self.by_key[key], path, status)
            else:
                self._watch_whole(File(next(self._numbers), path, status))

    def _take_changes(self, file: File, path: str, status: os.stat_result) -> None:
        if file.mapping is None and file.status.st_size != status.st_size:  # it has grown, or was truncated
            self.engine.removed(file.path)
            file.status = status
            self._place_whole(file)
        if file.path != path and not any(path == other.path for other in self.by_key.values()):
            old, file.path = file.path, path
            self.engine.renamed(old, path)

    def _is_steered(self, status: os.stat_result) -> bool:
        large = status.st_size >= LEAST_LOOP_BYTES or (status.st_dev, status.st_ino) in self.by_key
        return stat.S_ISREG(status.st_mode) and large and status.st_dev == self._dev

    def _find(self, path: str) -> File | None:
        for file in self.by_key.values():
            if file.path == path:
                return file
        status = self.tree.stat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_dev != self._dev:
            return None
        file = self.by_key.get((status.st_dev, status.st_ino)) or File(next(self._numbers), path, status)
        return file if file.number in self.by_number or not status.st_size else self._watch_whole(file)

    def _watch_whole(self, file: File) -> File | None:
        """Return None if too many files are observed."""
        place = self._places.take(1) if file.key in self.by_key or len(self.by_key) < FILES else None
        if place is None:
            if not self._too_many:
                self._too_many = True
                log.warning("SOURCE has more than %d files: the smaller ones are not steered", len(self.by_key))
            return None
        file.first = place
        self.by_key[file.key] = self.by_number[file.number] = file
        whole = -(-max(file.status.st_size, 1) // HUGE_BYTES) * HUGE_BYTES
        self.touches.watch(file.number, file.status, place, 1, whole)
        return file

    def _adopt(self, file: File, pid: int) -> None:
        if file.number not in self.by_number:
            return
        if not pid and not self._unknown:
            self._unknown = True
            log.warning("a client outside this PID namespace reads files: pages that it maps cannot be dropped")
        program: Program | None = None
        if pid not in file.programs and pid not in (0, os.getpid()):
            program = self._programs.get(pid)
            if program is None:
                self._running.add(pid)  # first: an end before the next line is reported, too
                program = self._programs[pid] = Program(pid)
            program.look(again=True)
        if file.mapping is None:
            self._open(file)
        assert file.mapping is not None
        backing = file.mapping.backing
        if pid not in file.programs:
            file.programs[pid] = program
            self.engine.opened(backing, file.path, pid)
        else:
            self.engine.adopt(backing)
        owner = self.engine.state.owners.get(backing)
        if owner is not None and owner[0] is not file.space:
            self._watch_extents(file, *owner)

    def _open_by_path(self, file: File) -> int:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        if (target := self.tree.targets.get(file.path)) is not None:
            fd = os.open(target.path, flags)
        else:
            with self.tree.parent(file.path) as (dir_fd, name):
                fd = os.open(name, flags, dir_fd=dir_fd)
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != file.key:
            os.close(fd)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), file.path)
        return fd

    def _open(self, file: File) -> None:
        fd = self._open_by_path(file)
        file.status = status = os.fstat(fd)
        backing = Backing(file.path, fd, status, False)
        try:
            file.mapping = MappedFile.of(backing, self.window)
            self.in_use[file.number] = file
        except OSError:  # it was truncated to nothing
            backing.close()
            raise
        self.has_opened.set()
        os.eventfd_write(self._wake_fd, 1)

    def _watch_extents(self, file: File, space: LoopSpace, member: SpaceFile) -> None:
        self._give_places(file)
        layout = None if member.moe is None else member.moe.layout
        extents = member.count + (0 if layout is None else len(layout.starts))
        if not space.paged and self._take_places(file, extents, 0 if layout is None else len(layout.runs)):
            if file.unplaced:
                log.info("inode %d is steered now", file.status.st_ino)
            file.space, file.step, file.unplaced = space, 1, False
            space.lacks_extents = 0
            self._watch(file, space, member)
        elif space.paged and not space.lacks_extents:  # left to the kernel
            self.touches.ignore(*file.key)
        else:
            if not file.unplaced and not space.paged:
                text = "inode %d is not steered for now: no room for its %d extents next to those of files in use"
                log.warning(text, file.status.st_ino, extents)
            if not space.paged:
                space.lacks_extents = extents
            file.unplaced = True
            self._place_whole(file)

    def _place_whole(self, file: File) -> None:
        self._give_places(file)
        file.space = None
        self._watch_whole(file)

    def _take_places(self, file: File, extents: int, runs: int) -> bool:
        now_ns = time.monotonic_ns()
        idle = [other for other in self.by_number.values() if other is not file and self._is_idle(other, now_ns)]
        idle.sort(key=lambda other: (other.mapping is not None, 0 if other.space is None else other.space.last_ns))
        places = self._places.free + sum(self._places.taken_at(other.first) - 1 for other in idle)
        if extents > places or runs > self._runs.free + sum(self._runs.taken_at(other.first_run) for other in idle):
            return False
        while (first := self._places.take(extents)) is None or (runs and (run := self._runs.take(runs)) is None):
            self._places.give(-1 if first is None else first)
            if not idle:
                return False
            self._place_whole(idle.pop(0))
        file.first, file.first_run = first, run if runs and run is not None else -1
        return True

    @staticmethod
    def _is_idle(file: File, now_ns: int) -> bool:
        return file.space is not None and (file.mapping is None or now_ns - file.space.last_ns > IDLE_NS)

    def _place_waiting(self) -> None:
        for file in list(self.in_use.values()):
            if not file.unplaced or file.mapping is None:
                continue
            backing = file.mapping.backing
            if backing not in self.engine.state.owners:  # its space has ended because there is room now
                self.engine.adopt(backing)
            owner = self.engine.state.owners.get(backing)
            if owner is not None and not owner[0].paged:
                self._watch_extents(file, *owner)

    def _watch(self, file: File, space: LoopSpace, member: SpaceFile) -> None:
        runs = () if member.moe is None or file.first_run < 0 else member.moe.layout.runs
        first_run = max(file.first_run, 0)
        far = self.read_ahead is None and self.window > SMALL_READ_AHEAD_KB << 10
        if far and member.moe is not None and not self._advised and not self._fit():
            self._advised = True
            text = "the kernel reads %d KiB around each page fault on an expert (read_ahead_kb): mount MoE models with %s"
            log.warning(text, self.window >> 10, read_ahead_advice())
        self.touches.watch(
            file.number, file.status, file.first, member.count, space.extent_bytes, file.step, first_run, runs
        )

    def _give_places(self, file: File) -> None:
        self._places.give(file.first)
        self._runs.give(file.first_run)
        file.first = file.first_run = -1

    def _thin(self) -> None:
        """Observe only some extents of a file that is pinned whole."""
        state = self.engine.state
        for file in self.in_use.values():
            if file.mapping is None:
                continue
            with state.lock:
                owner = state.owners.get(file.mapping.backing)
                if owner is None or owner[0] is not file.space:
                    continue
                space, member = owner
                whole = space.status.count(PINNED) + space.status.count(SINGLE) == space.count
                if whole and not file.mapping.whole_ns:
                    file.mapping.whole_ns = time.monotonic_ns()
            step = WHOLE_STEP if whole and not space.evidence.exposed else 1
            if step != file.step:
                file.step = step
                self._watch(file, space, member)

    def _remove_ended(self) -> None:
        self._end_due = math.inf
        self._running.wait(0)
        self._events.modify(self._running, select.EPOLLIN | select.EPOLLONESHOT)
        running = self._running.pids
        for pid, program in list(self._programs.items()):
            if pid in running:
                continue
            del self._programs[pid]
            for file in list(self.in_use.values()):
                if pid in file.programs:
                    self._leave(file, pid)
            with self.lock:
                self._refused += program.refused
                program.close()

    def _check_use(self) -> None:
        """Remove clients that have closed a file, except its last reader.

        A client that has only read the header would count as a second reader, and widen the window.
        """
        now_ns = time.monotonic_ns()
        for file in list(self.in_use.values()):
            space = file.space
            is_known = space is not None or file.unplaced
            if not is_known or not file.programs or now_ns - file.looked_ns < IDLE_NS:
                continue
            reader = space.last_pid if space is not None and now_ns - space.last_ns < IDLE_NS else -1
            if reader in file.programs and len(file.programs) == 1:
                continue
            file.looked_ns = now_ns
            for pid, program in list(file.programs.items()):
                if pid == reader:
                    continue
                if (program is None and pid == 0) or (program is not None and not program.has(*file.key)):
                    self._leave(file, pid)

    def _leave(self, file: File, pid: int) -> None:
        file.programs.pop(pid, None)
        if file.mapping is not None:
            self.engine.closed(file.mapping.backing, pid)
            if not file.programs:
                self._close(file, file.mapping)

    def _close(self, file: File, mapping: MappedFile) -> None:
        """The space is forgotten only after it has been idle for long."""
        self.in_use.pop(file.number, None)
        with self.engine.state.lock:
            for space, _ in self.engine.state.places.get(file.path, ()) if file.unplaced else ():
                space.lacks_extents = space.lacks_extents if space.paged else 0
            file.mapping, file.unplaced = None, False
            if not self.engine.state.ended.wait_for(lambda: not mapping.reads, LOADS_S):
                mapping.backing.keep_open(f"{mapping.reads} reads have not ended within {LOADS_S:.0f} s")
        mapping.close()

    def _check_changes(self) -> None:
        for file in list(self.by_number.values()):
            if file.mapping is None:
                if file.space is not None and not file.space.alive:
                    self._place_whole(file)
                continue
            status = os.fstat(file.mapping.backing.fd)
            if (status.st_size, status.st_mtime_ns) != (file.status.st_size, file.status.st_mtime_ns):
                self._forget(file)

    def _forget_deleted(self) -> bool:
        """Return True if a closed file has left its path."""
        has_left = False
        for file in list(self.by_number.values()):
            if file.mapping is not None:
                if not os.fstat(file.mapping.backing.fd).st_nlink:
                    self._forget(file)
            elif file.space is not None and file.space.alive and not self._is_at_path(file):
                has_left = True
        return has_left

    def _is_at_path(self, file: File) -> bool:
        try:
            status = self.tree.stat(file.path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # unknown for now
            return True
        return (status.st_dev, status.st_ino) == file.key

    def _forget(self, file: File) -> None:
        self.engine.removed(file.path)
        if file.mapping is not None:
            self.engine.changed(file.mapping.backing, 0, -1)
        for pid in list(file.programs):
            self._leave(file, pid)
        self.touches.ignore(*file.key)
        self.touches.forget(file.number)
        self._give_places(file)
        self.by_key.pop(file.key, None)
        self.by_number.pop(file.number, None)
        self.in_use.pop(file.number, None)

    # Opens and closes by a warm-up, which counts as a client

    def open(self, path: str, _flags: int, caller: Caller) -> tuple[int, bool]:
        """Open a file until `release`; return (number, True); number 0: empty. OSError."""
        with self.turn:
            file = self._find(path)
            if file is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            if not file.status.st_size:
                return 0, True
            self._adopt(file, caller.pid)
            file.warmups += 1
            return file.number, True

    def release(self, number: int) -> None:
        with self.turn:
            file = self.by_number.get(number)
            if file is None:
                return
            file.warmups -= 1
            if not file.warmups:
                self._leave(file, os.getpid())
