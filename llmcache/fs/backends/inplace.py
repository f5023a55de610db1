"""In place: the page cache of SOURCE's files themselves is steered; nothing lies between a program and its file system.

Observe: touches, as the kernel tells them (`touches.py`), drive the same groups, cursors and plans as READ requests do in
the other modes. Bring: by a fault of this process on the first page of each huge page of an extent, in a mapping that
asks for huge pages: the file system reads the whole of it into one folio, by DMA, for some microseconds of processor time
(measured: .02 CPU seconds per GB, with readahead in single pages .13 to .2); what is partly there, and on file systems
without large folios, by readahead. Hold: mlock, by the pin helper. Drop: from under the mappings of the programs that
read (`programs.py`), and by fadvise what nobody has mapped.

Only what loops, or is read from front to back, is brought in and dropped. Of anything else the kernel knows more than a
touch for each extent tells: experts of a mixture, rows, and files that are read here and there are its own.

What the kernel keeps beyond the budget in memory that nobody wants stays there: room is made only when memory runs short.

Locks, in this order: `Files.turn`, of those who change what is known of files; `Files.lock`, which keeps descriptors open
during a drop; the engine's, as in `state`. Who holds one of the last two never waits for storage. No program ever waits
for this process.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import queue
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmcache.cache.arbitration import MIN_WINDOW_BYTES
from llmcache.cache.extents import LEAST_MODEL_BYTES
from llmcache.fs import syscalls
from llmcache.fs.backends.fetching import FAILED
from llmcache.fs.backends.programs import Program
from llmcache.fs.backends.touches import MISS, PLACES, Touch, Touches
from llmcache.fs.engine.engine import Engine
from llmcache.fs.engine.group import ABSENT, LOADING, PAGE, PINNED, READY, SINGLE, SPARSE, TOUCHED, Fetch, Group, Member
from llmcache.fs.engine.pressure import free_bytes
from llmcache.fs.vfs.backing import Backing

if TYPE_CHECKING:
    from llmcache.fs.backends.base import Fetching
    from llmcache.fs.engine.state import CacheState, Job, KernelNotifier
    from llmcache.fs.vfs.caller import Caller
    from llmcache.fs.vfs.source import SourceTree

log = logging.getLogger(__name__)

HUGE_BYTES = 2 << 20
SCAN_S, SCAN_REST = 1.0, 50  # SOURCE is walked so often, and rests for so many times as long as that took
QUIET_NS = 2_000_000_000  # a file that was changed less than this ago is left alone
IDLE_NS = 10_000_000_000  # a file that nobody has touched for this long may have been closed
FOLLOWED_MIN, FOLLOWED_STEP = 6, 32  # so many steps forward, of so many extents at most, make a reader in order
DELAY_S = 0.01  # from a touch to the read that it asks for, where all processors are busy: storage is to have work meanwhile
AGAIN_NS = 100_000_000  # touches of one extent within this are one visit
CHECK_S = 0.25  # so often it is seen which programs have ended
SLACK_S = 0.05
MEASURED_BYTES, WINDOW_MAX_BYTES = 128 << 20, 96 << 20
FAILURES_MAX = 16  # no large folios on this file system, or no memory in one piece
READAHEAD_BYTES = 128 << 10  # a call brings no more than the device's read-ahead, or its largest request


@dataclass(eq=False)
class Mapping:
    """A file as this process has it open, and mapped in the way that makes its faults bring huge pages in."""

    backing: Backing
    address: int
    length: int
    reads: int = 0  # under way: it is not closed before they have ended
    failures: int = 0  # faults that brought no huge page in, less those that did

    @classmethod
    def of(cls, backing: Backing) -> Mapping:
        """Maps a file. OSError."""
        length = backing.size
        address = syscalls.mmap(backing.fd, length)
        with contextlib.suppress(OSError):  # a kernel without huge pages reads ahead in small ones
            syscalls.madvise(address, length, syscalls.MADV_HUGEPAGE)
            syscalls.madvise(address, length, syscalls.MADV_RANDOM)  # else it reads two where one faults
        return cls(backing, address, length)

    def bring(self, offset: int, length: int) -> int:
        """Has the kernel read what is absent of a part that begins at a huge page; returns the bytes read. OSError."""
        fd, read, end = self.backing.fd, 0, offset + length
        for start in range(offset, end, HUGE_BYTES):
            size = min(HUGE_BYTES, end - start)
            wanted = -(-size // PAGE)
            there = syscalls.cached_pages(fd, start, size)
            if there >= wanted:
                continue
            read += (wanted - there) * PAGE
            if not there and self.failures < FAILURES_MAX:
                syscalls.madvise(self.address + start, PAGE, syscalls.MADV_POPULATE_READ)
                there = syscalls.cached_pages(fd, start, size)
                self.failures = max(-FAILURES_MAX, self.failures + (1 if there < wanted else -1))
            if there < wanted:
                for at in range(start, start + size, READAHEAD_BYTES):
                    os.posix_fadvise(fd, at, min(READAHEAD_BYTES, start + size - at), os.POSIX_FADV_WILLNEED)
        syscalls.madvise(self.address + offset, -(-length // PAGE) * PAGE, syscalls.MADV_DONTNEED)
        return read

    def close(self) -> None:
        """Ends it."""
        self.backing.close()
        syscalls.munmap(self.address, self.length)


@dataclass(eq=False)
class File:
    """One regular file of SOURCE: watched whole, and in extents once somebody reads it. `first`: place of its extents."""

    number: int
    path: str
    status: os.stat_result
    first: int = -1
    mapping: Mapping | None = None  # while somebody reads it
    group: Group | None = None
    programs: dict[int, Program | None] = field(default_factory=dict)  # by pid; None for this process (a warm-up)
    looked_ns: int = 0  # when it was last seen whether its programs still have it

    @property
    def key(self) -> tuple[int, int]:
        """Device and inode."""
        return self.status.st_dev, self.status.st_ino


class Places:
    """`count` places in a row, of which stretches are taken and given back."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._taken: dict[int, int] = {}  # first place -> how many

    def take(self, count: int) -> int | None:
        """The first of `count` free places in a row, None if there are none."""
        at = 0
        for first, taken in sorted(self._taken.items()):
            if first - at >= count:
                break
            at = first + taken
        if at + count > self.count:
            return None
        self._taken[at] = count
        return at

    def give(self, first: int) -> None:
        """Gives back what was taken at `first`, if anything was."""
        self._taken.pop(first, None)


class Files:
    """The files below SOURCE and who reads them: found, opened, looked after and let go, by `run` and by warm-ups."""

    def __init__(self, tree: SourceTree, touches: Touches, engine: InPlaceEngine) -> None:
        self.tree, self.touches, self.engine = tree, touches, engine
        self.by_key: dict[tuple[int, int], File] = {}
        self.by_number: dict[int, File] = {}
        self.turn, self.lock = threading.RLock(), threading.Lock()
        self._dev = os.fstat(tree.fd).st_dev  # what is mounted below SOURCE is not seen through MOUNT
        self._numbers = iter(range(1, 1 << 32))
        self._asked: queue.SimpleQueue[tuple[File, int] | None] = queue.SimpleQueue()
        self._pending: set[tuple[int, int]] = set()
        self._programs: dict[int, Program] = {}
        self._places = Places(PLACES)

    def of_node(self, node: int | None) -> File | None:
        """The file that has this number in the kernel."""
        return self.by_key.get((self._dev, node or 0))

    @contextlib.contextmanager
    def descriptor(self, file: File) -> Iterator[int]:
        """The file, open for reading; of one that nobody reads, for the moment. `lock` held. OSError."""
        if file.mapping is not None:
            yield file.mapping.backing.fd
            return
        fd = self._open_by_path(file)
        try:
            yield fd
        finally:
            os.close(fd)

    # Touches, on the observing thread

    def ask(self, file: File, pid: int) -> None:
        """Has a file opened, or a program noted as its reader, soon."""
        if (file.number, pid) not in self._pending:
            self._pending.add((file.number, pid))
            self._asked.put((file, pid))

    def stop(self) -> None:
        """Ends `run`."""
        self._asked.put(None)

    # The thread

    def run(self) -> None:
        """Until `stop`: adopts what is asked for, walks SOURCE now and then, and notices what ends or changes."""
        next_scan = next_check = 0.0
        while True:
            began = time.monotonic()
            if began >= next_scan:
                with self.turn:
                    self._scan()
                    self._check_changes()
                next_scan = time.monotonic() + max(SCAN_S, SCAN_REST * (time.monotonic() - began))
            if began >= next_check:
                with self.turn:
                    self._check_programs()
                    self._check_use()
                next_check = time.monotonic() + CHECK_S
            with contextlib.suppress(queue.Empty):
                asked = self._asked.get(timeout=CHECK_S)
                if asked is None:
                    return
                self._answer(*asked)

    def _answer(self, file: File, pid: int) -> None:
        try:
            with self.turn:
                if file.mapping is not None or self._is_quiet(file):
                    self._adopt(file, pid)
        except OSError as error:
            log.debug("inode %d is not steered: %s", file.status.st_ino, error.strerror)
        self._pending.discard((file.number, pid))

    def _is_quiet(self, file: File) -> bool:
        return not 0 <= time.time_ns() - max(self.tree.stat(file.path).st_mtime_ns, 0) < QUIET_NS

    def _scan(self) -> None:
        """Watches what has come, forgets what has gone."""
        found: dict[tuple[int, int], tuple[str, os.stat_result]] = {}
        for directory, _, names, fd in os.fwalk(".", dir_fd=self.tree.fd, follow_symlinks=False, onerror=None):
            for name in names:
                with contextlib.suppress(OSError):
                    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    key = status.st_dev, status.st_ino
                    large = status.st_size >= LEAST_MODEL_BYTES or key in self.by_key
                    if stat.S_ISREG(status.st_mode) and large and status.st_dev == self._dev:
                        found[key] = (os.path.normpath(f"/{directory}/{name}"), status)
        for key in [key for key in self.by_key if key not in found]:
            self._forget(self.by_key[key])
        for key, (path, status) in found.items():
            file = self.by_key.get(key)
            if file is None:
                self._watch_whole(File(next(self._numbers), path, status))
            elif file.path != path and not any(path == other.path for other in self.by_key.values()):
                old, file.path = file.path, path
                self.engine.renamed(old, path)

    def _find(self, path: str) -> File | None:
        """The file at `path`, however small."""
        for file in self.by_key.values():
            if file.path == path:
                return file
        status = self.tree.stat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_dev != self._dev:
            return None
        file = self.by_key.get((status.st_dev, status.st_ino)) or File(next(self._numbers), path, status)
        return file if file.number in self.by_number or not status.st_size else self._watch_whole(file)

    def _watch_whole(self, file: File) -> File | None:
        place = self._places.take(1)
        if place is None:
            return None
        file.first = place
        self.by_key[file.key] = self.by_number[file.number] = file
        whole = -(-max(file.status.st_size, 1) // HUGE_BYTES) * HUGE_BYTES
        self.touches.watch(file.number, file.status, place, 1, whole)
        return file

    def _adopt(self, file: File, pid: int) -> None:
        """Opens the file and tells the engine that a program reads it. OSError."""
        if file.number not in self.by_number:
            return
        program: Program | None = None
        if pid not in file.programs and pid not in (0, os.getpid()):
            program = self._programs.get(pid) or Program(pid)
            self._programs[pid] = program
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
        if owner is not None and owner[0] is not file.group:
            self._watch_extents(file, *owner)

    def _open_by_path(self, file: File) -> int:
        with self.tree.parent(file.path) as (dir_fd, name):
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != file.key:
            os.close(fd)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), file.path)
        return fd

    def _open(self, file: File) -> None:
        fd = self._open_by_path(file)
        file.status = status = os.fstat(fd)
        file.mapping = Mapping.of(Backing(file.path, fd, status, False))

    def _watch_extents(self, file: File, group: Group, member: Member) -> None:
        self._places.give(file.first)
        place = None if group.paged else self._places.take(member.count)
        if place is None:  # it is the kernel's
            self.touches.ignore(*file.key)
            return
        file.first, file.group = place, group
        self.touches.watch(file.number, file.status, place, member.count, group.extent_bytes)

    def _check_programs(self) -> None:
        """Lets go of programs that have ended."""
        for pid, program in list(self._programs.items()):
            if not program.ended:
                continue
            del self._programs[pid]
            for file in self.by_number.values():
                if pid in file.programs:
                    self._leave(file, pid)
            with self.lock:
                program.close()

    def _check_use(self) -> None:
        """Takes leave of programs that live on and have closed what they read."""
        now_ns = time.monotonic_ns()
        for file in self.by_number.values():
            group = file.group
            if group is None or not file.programs or now_ns - max(group.last_ns, file.looked_ns) < IDLE_NS:
                continue
            file.looked_ns = now_ns
            for pid, program in list(file.programs.items()):
                if (program is None and pid == 0) or (program is not None and not program.has(*file.key)):
                    self._leave(file, pid)

    def _leave(self, file: File, pid: int) -> None:
        """A program reads the file no more."""
        file.programs.pop(pid, None)
        if file.mapping is not None:
            self.engine.closed(file.mapping.backing, pid)
            if not file.programs:
                self._close(file, file.mapping)

    def _close(self, file: File, mapping: Mapping) -> None:
        """Gives up descriptors; the group is known until it has been idle for long."""
        with self.engine.state.lock:
            file.mapping = None
            self.engine.state.ended.wait_for(lambda: not mapping.reads)
        with self.lock:
            mapping.close()

    def _check_changes(self) -> None:
        """Gives up what is known of files that were rewritten, truncated or replaced."""
        for file in list(self.by_number.values()):
            if file.mapping is None:
                if file.group is not None and not file.group.alive:
                    file.group = None
                    self._places.give(file.first)
                    self._watch_whole(file)
                continue
            status = os.fstat(file.mapping.backing.fd)
            if (status.st_size, status.st_mtime_ns) != (file.status.st_size, file.status.st_mtime_ns):
                self._forget(file)

    def _forget(self, file: File) -> None:
        """Ends what is known of a file; if it is still there, the next walk finds it anew."""
        if file.mapping is not None:
            self.engine.changed(file.mapping.backing, 0, -1)
        for pid in list(file.programs):
            self._leave(file, pid)
        self.touches.ignore(*file.key)
        self._places.give(file.first)
        self.by_key.pop(file.key, None)
        self.by_number.pop(file.number, None)

    # What a warm-up does as if it were a program

    def open(self, path: str, _flags: int, caller: Caller) -> tuple[int, bool]:
        """(number, True) of a file that is kept open until `release`; 0 for an empty one. OSError."""
        with self.turn:
            file = self._find(path)
            if file is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            if not file.status.st_size:
                return 0, True
            self._adopt(file, caller.pid)
            return file.number, True

    def release(self, number: int) -> None:
        """Ends what `open` began."""
        with self.turn:
            file = self.by_number.get(number)
            if file is not None:
                self._leave(file, os.getpid())


class Pages:
    """Bringing in and dropping: what moves between storage and the page cache."""

    def __init__(self, state: CacheState, files: Files) -> None:
        self.state, self.files = state, files
        self._busy = 0  # reads under way
        self._busy_ns = 0  # since when there are some
        self._read_bytes, self._read_s = 0, 0.0  # of late: half of it counts no more each time that enough was read

    # Fetching

    def follows(self, group: Group) -> bool:
        """True for loops, and for readers that go in order. Lock held."""
        return group.looping or group.followed >= FOLLOWED_MIN

    def ahead(self, group: Group, member: Member, extent: int, pid: int = 0) -> Job | None:
        """Claims an extent; what it returns brings it in. Lock held."""
        return self._claim(group, member, extent, ahead=True)

    def demand(self, group: Group, member: Member, extent: int) -> None:
        """Has an extent brought in whole that a reader has begun to read. Lock held."""
        if member.reachable and extent not in group.loading:
            self.state.jobs.append(self._claim(group, member, extent, ahead=False))

    def _claim(self, group: Group, member: Member, extent: int, ahead: bool) -> Job:
        length = group.length_of(member, extent)
        fetch = Fetch(extent, length, ahead, member.backing, group.charge[extent])
        group.loading[extent] = fetch
        group.strays.pop(extent, None)
        group.touched.pop(extent, None)
        group.set_state(extent, LOADING)
        self.state.charge(group, extent, length)
        member.loads += 1
        return functools.partial(self._bring, group, member, fetch)

    def _bring(self, group: Group, member: Member, fetch: Fetch) -> None:
        mapping = None if fetch.stale else self._begin(member, fetch.backing)
        if mapping is None:
            fetch.error = OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        else:
            read = 0
            try:
                read = mapping.bring(group.offset_of(member, fetch.extent), fetch.length)
            except OSError as error:
                fetch.error = error
            with self.state.lock:
                self._end(mapping, read)
        fetch.done.set()
        with self.state.lock:
            self.state.load_ended(member)
            if group.loading.get(fetch.extent) is fetch:
                self._arrived(group, fetch)
            self.state.work.notify()

    def fill(self, group: Group, member: Member, extent: int, backing: Backing) -> bool:
        """Has a whole extent read that is no loop's; False if it cannot be."""
        mapping, read = self._begin(member, backing), -1
        if mapping is None:
            return False
        with contextlib.suppress(OSError):
            read = mapping.bring(group.offset_of(member, extent), group.length_of(member, extent))
        with self.state.lock:
            self._end(mapping, max(read, 0))
        return read >= 0

    def _begin(self, member: Member, backing: Backing | None) -> Mapping | None:
        """The member's open file, to be read; None if that is not `backing` any more."""
        file = self.files.of_node(member.node)
        with self.state.lock:
            mapping = None if file is None else file.mapping
            if mapping is None or mapping.backing is not backing:
                return None
            mapping.reads += 1
            if not self._busy:
                self._busy_ns = time.monotonic_ns()
            self._busy += 1
            return mapping

    def _end(self, mapping: Mapping, read: int) -> None:
        """Notes the end of a read, and how large a window the storage needs to be kept at work. Lock held."""
        mapping.reads -= 1
        self.state.counters.backing_read_bytes += read
        self.state.counters.stored_bytes += read
        self._busy -= 1
        self._read_bytes += read
        now_ns = time.monotonic_ns()
        self._read_s += (now_ns - self._busy_ns) / 1e9
        self._busy_ns = now_ns
        if self._read_bytes < MEASURED_BYTES:
            return
        window = min(WINDOW_MAX_BYTES, max(MIN_WINDOW_BYTES, int(2 * DELAY_S * self._read_bytes / self._read_s)))
        self._read_bytes, self._read_s = self._read_bytes // 2, self._read_s / 2
        if not 0.8 < window / self.state.least_window_bytes < 1.25:
            self.state.least_window_bytes = window
            self.files.engine.replan()

    def _arrived(self, group: Group, fetch: Fetch) -> None:
        """Lock held."""
        extent, now_ns = fetch.extent, time.monotonic_ns()
        del group.loading[extent]
        if fetch.error is not None:
            group.missed[extent] = FAILED
            group.set_state(extent, SPARSE)
            group.strays[extent] = now_ns
        elif fetch.ahead and not fetch.joined:
            group.set_state(extent, READY)
            group.ready[extent] = now_ns
        else:
            group.touch(extent, now_ns)
            self.state.consumed(fetch.length, False)
        if fetch.error is None:
            self.files.engine.holder.stored(group, fetch)

    # As a notifier

    def store(self, _nodeid: int, _offset: int, _address: int, _length: int) -> int:
        """Never called: the kernel reads for itself."""
        return -errno.EOPNOTSUPP

    def invalidate(self, nodeid: int, offset: int, length: int) -> int:
        """Drops a part of a file (0 bytes: all behind) from the page cache, from under mappings too."""
        with self.files.lock:
            file = self.files.of_node(nodeid)
            if file is None:
                return 0
            size = length or max(0, file.status.st_size - offset)
            programs = [program for program in list(file.programs.values()) if program is not None]
            several = sum(program.maps(*file.key) for program in programs) > 1
            for program in programs:
                program.advise(*file.key, offset, size, syscalls.MADV_COLD if several else syscalls.MADV_PAGEOUT)
            with contextlib.suppress(OSError), self.files.descriptor(file) as fd:
                os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)
        return 0


class InPlaceEngine(Engine):
    """The engine over touches instead of requests."""

    def __init__(self, cache_bytes: int, tree: SourceTree, pinned: tuple[str, ...] = ()) -> None:
        self.touches = Touches()
        self.files = Files(tree, self.touches, self)
        super().__init__(cache_bytes, "inplace", tree, pinned, HUGE_BYTES)
        self.grouping.in_place, self.grouping.steers_experts = True, False
        self._observing = threading.Thread(target=self._observe, name="touches", daemon=True)
        self._tending = threading.Thread(target=self.files.run, name="files", daemon=True)
        self._closed = False

    def _make_fetcher(self) -> Fetching:
        self.pages = Pages(self.state, self.files)
        return self.pages

    def start(self, notifier: KernelNotifier, mountpoint: str) -> None:
        """See Engine; the helper opens what is in SOURCE, and so does not keep MOUNT busy."""
        super().start(notifier, self.files.tree.directory)
        if not self._observing.is_alive():
            self._observing.start()
            self._tending.start()

    def stop(self) -> None:
        """See Engine; what loaders were to bring in is outdated, which they say when they run."""
        super().stop()
        while self.state.jobs:
            self.state.jobs.popleft()()

    def close(self) -> None:
        """See Engine; and lets go of all programs and files."""
        self._closed = True
        if self._observing.is_alive():
            self.files.stop()
            self._tending.join(timeout=10)
            self._observing.join(timeout=10)
        self.touches.close()

    def _guards(self, mountpoint: str) -> bool:
        """Nobody hangs if this process is killed: the files are the file system's own. `BindMount` sees when it ends."""
        return True

    def _attached(self, path: str, node: int | None) -> None:
        """The helper has opened `path`; what the kernel has of it is not dropped for that."""
        with self.state.lock:
            for group in self.state.groups.values():
                for member in group.members:
                    if member.path == path:
                        member.node, member.attaching = node, False
            self.state.work.notify_all()

    def _find_slack(self) -> None:
        """Memory that nobody wants may keep more than the budget."""
        slack = free_bytes()
        with self.state.lock:
            shrunk = slack < self.state.slack_bytes
            self.state.slack_bytes = slack
            if shrunk:
                self.state.room.notify()

    # The observing thread

    def _observe(self) -> None:
        next_look = 0.0
        while not self._closed:
            touches = self.touches.wait(CHECK_S)
            if not self.state.running:
                continue
            if time.monotonic() >= next_look:
                self._find_slack()
                next_look = time.monotonic() + SLACK_S
            for touch in touches:
                self._touched(touch)

    def _touched(self, touch: Touch) -> None:
        file = self.files.by_number.get(touch.file)
        if file is None:
            return
        mapping = file.mapping
        owner = self.state.owners.get(mapping.backing) if mapping is not None else None
        if owner is None or touch.pid not in file.programs or owner[0] is not file.group:
            self.files.ask(file, touch.pid)
            if owner is None or owner[0] is not file.group:
                return
        group, member = owner
        with self.state.lock:
            if group.alive and touch.extent < member.count:
                self._note(group, member, file, member.base + touch.extent, touch)

    def _note(self, group: Group, member: Member, file: File, extent: int, touch: Touch) -> None:
        """Lock held."""
        state, now_ns = group.state(extent), touch.t_ns
        length = group.length_of(member, extent)
        group.last_pid = touch.pid
        if state == SINGLE:
            group.last_ns = group.seen_ns[extent] = now_ns
            return
        self.state.counters.requested_bytes += length
        done = group.note(extent, now_ns, bool(touch.flags & MISS) and state in (ABSENT, SPARSE))
        if done is not None:
            self._pass_ended(group, done)
            state = group.state(extent)
        if not (group.looping or self._follow(group, extent)):
            if state in (READY, SPARSE):
                group.ready.pop(extent, None)
                group.set_state(extent, ABSENT)
            return
        if state not in (TOUCHED, PINNED):
            self.state.references.claimed(group, member, extent, touch.pid)
        if state in (ABSENT, SPARSE):
            self.pages.demand(group, member, extent)
        elif state == LOADING:
            fetch = group.loading[extent]
            if fetch.ahead and not fetch.joined:
                self.state.counters.prefetch_late_bytes += length
            fetch.joined = True
        elif state == READY:
            group.touch(extent, now_ns)
            group.missed.pop(extent, None)
            self.state.consumed(length, False)
            self.state.counters.prefetch_useful_bytes += length
        elif state == TOUCHED:
            self._came_back(group, member, file, extent, touch, length)
        self.state.work.notify()

    def _follow(self, group: Group, extent: int) -> bool:
        """True if the readers of what is no loop, or not known as one, go forward through it. Lock held.

        What they leave out on their way may be mapped already.
        """
        step = group.order.rank_of[extent] - group.follow_rank
        if step:
            group.followed = group.followed + 1 if 0 < step <= FOLLOWED_STEP else 0
            group.follow_rank += step
        return group.followed >= FOLLOWED_MIN

    def _came_back(self, group: Group, member: Member, file: File, extent: int, touch: Touch, length: int) -> None:
        """A reader is at an extent that it, or another, has read before. Lock held."""
        if touch.flags & MISS and file.mapping is not None:
            offset = group.offset_of(member, extent)
            if syscalls.cached_pages(file.mapping.backing.fd, offset, length) < length // PAGE // 2:
                self.state.counters.refault_bytes += length
                self.pages.demand(group, member, extent)  # the kernel has reclaimed it
                return
        again = touch.t_ns - group.touched.get(extent, 0) < AGAIN_NS
        group.touch(extent, touch.t_ns)
        if not again:
            self.state.consumed(length, True)
