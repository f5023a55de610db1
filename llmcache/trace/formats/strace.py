"""The importer of logs of strace, the tool of the paper: `strace -f -ttt -y -e trace=desc,process -o app.strace APP`.

A log lacks accesses through mmap; a mapping becomes one row with the mapped range. With `-y` strace prints the path of each
descriptor, which identifies files opened before tracing began. Descriptors closed by exec or close_range are not tracked;
the next call that returns such a number replaces it. The log may have any of the options -t, -tt, -ttt and -r, or none, and
-f or not.

Source: io_caching, section 3: "trace capturing was performed using the Linux strace utility together with a custom parser".
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from llmcache.errors import DataError
from llmcache.trace.record import COLUMNS, MAP, READ, UNKNOWN, WRITE, Provenance, TraceFile, TraceWriter, readable
from llmcache.units import BLOCK_BYTES

_BATCH_ROWS = 1 << 15
_NOTE = "System calls only: a map row shows which range was mapped, not which pages were touched; io_uring is not included."
# Paths without files in the page cache. /dev/shm, which has files, is an exception.
_NOT_FILES = ("/dev/", "/proc/", "/sys/")
_FD = re.compile(r"(-?\d+)(?:<((?:[^<>\\]|\\.)*)>)?")
_SIZE = re.compile(r"\bst(?:x)?_size=(\d+)")
_CLONES = ("clone", "clone3", "fork", "vfork")
# Calls that return a descriptor that is not a file. The number may have belonged to a file before.
_NO_FILES = (
    *("socket", "accept", "accept4", "epoll_create", "epoll_create1", "eventfd", "eventfd2", "timerfd_create"),
    *("signalfd", "signalfd4", "inotify_init", "inotify_init1", "fanotify_init", "memfd_create", "userfaultfd"),
    *("perf_event_open", "io_uring_setup", "pidfd_open"),
)


def read(path: Path, writer: TraceWriter) -> None:
    """Append the accesses in `path`; DataError if it is not a log. Memory grows only with names and descriptors."""
    log = StraceLog()
    with readable(path), open(path, encoding="utf-8", errors="surrogateescape") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(LONGEST_LINE + 1), ""), 1):
            if len(line) > LONGEST_LINE:
                message = f"rows: line {number} has more than {LONGEST_LINE} characters"
                raise DataError(message, "not a log of strace, or damaged")
            try:
                log.take(line.rstrip("\n"), number)
            except ValueError as error:  # int() rejects numbers with thousands of digits
                raise DataError(f"rows: line {number} has a number with too many digits", "the log is damaged") from error
            if len(log.rows) >= _BATCH_ROWS:
                _flush(log, writer)
    if not log.counts["calls"]:
        raise DataError(f"rows: no system call found in '{path}'", "not a log of strace, or one of another format (-c, -X)")
    _flush(log, writer)
    for file in log.accessed():
        writer.add_file(file)
    writer.provenance = log.provenance()


def _flush(log: StraceLog, writer: TraceWriter) -> None:
    if log.rows:
        writer.append(dict(zip(COLUMNS, map(list, zip(*log.rows, strict=True)), strict=True)))
        log.rows = []


# The lines: process, time, name, arguments and result of a call. A call that another thread interrupts has two lines.

LONGEST_LINE = 1 << 24  # generous: with -s, lines contain data
CALL_NS = 1_000  # between two calls in a log without times
_SECOND_NS = 10**9
_DAY_NS = 86_400 * _SECOND_NS
_EPOCH_NS = 10**8 * _SECOND_NS  # smaller numbers (before 1973) are differences: -r and not -ttt
_STEP_NS = _SECOND_NS  # a clock adjustment may move the time back by this much

# "1234 " (-f -o FILE) or "[pid 1234] " (-f on the terminal), then "12:34:56.789012 ", "1700000000.123456 " or no time. With
# both -r and -t, the difference follows in parentheses.
_PREFIX = re.compile(
    r"\s*(?:\[pid\s+(\d+)\]\s*|(\d+)\s+)?(?:(\d\d):(\d\d):(\d\d)(?:\.(\d+))?\s+|(\d+)\.(\d+)\s+)?(?:\(\+\s*[\d.]+\)\s*)?"
)
_CALL = re.compile(r"(\w+)\((.*)\)\s+= (-?\d+|0x[\da-f]+)(?:<((?:[^<>\\]|\\.)*)>)?")
_UNKNOWN_RESULT = re.compile(r"\w+\(.*\)\s+= \?")
_UNFINISHED = re.compile(r"(\w+\(.*) <unfinished \.\.\.>$")
_RESUMED = re.compile(r"<\.\.\. (\w+) resumed>\s?")
_ENDED = re.compile(r"\+\+\+ (?:exited with|killed by) ")
_SEPARATOR = re.compile(r'"(?:[^"\\]|\\.)*"|(?<=\w)<(?:[^<>\\]|\\.)*>|[\[{(]|[\]})]|, ')
_ESCAPE = re.compile(rb"\\([0-7]{1,3}|x[\da-fA-F]{2}|.)")
_ESCAPED = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"v": b"\v", b"f": b"\f", b"a": b"\a", b"b": b"\b"}


@dataclass(frozen=True)
class SystemCall:
    """A call that returned. `result_path` is the path that -y prints after a returned descriptor."""

    tid: int
    t_ns: int
    name: str
    args: str
    result: int
    result_path: str | None

    @cached_property
    def words(self) -> list[str]:
        return split(self.args)


class LogClock:
    """Converts times in any format of strace to nanoseconds that never decrease."""

    def __init__(self) -> None:
        self.kind = "none: calls are 1 us apart"
        self.steps_back = 0
        self._now_ns = 0
        self._days = 0
        self._has_begun = False

    def at(self, prefix: re.Match[str], number: int) -> int:
        """Return the time of line `number`; DataError if it is over a second before the previous line."""
        t_ns = self._time_of(prefix)
        if self._has_begun and t_ns < self._now_ns:
            if self._now_ns - t_ns > _STEP_NS:
                hint = "give the log of one run of strace, not of several"
                raise DataError(f"time: line {number} is {(self._now_ns - t_ns) / 1e9:.6f} s before the one above", hint)
            self.steps_back += 1
            t_ns = self._now_ns
        self._has_begun, self._now_ns = True, t_ns
        return t_ns

    def _time_of(self, prefix: re.Match[str]) -> int:
        if prefix[7]:
            t_ns = int(prefix[7]) * _SECOND_NS + _fraction_ns(prefix[8])
            self.kind = "seconds since 1970 (-ttt)" if t_ns >= _EPOCH_NS else "seconds from the first call (-r)"
            return t_ns if t_ns >= _EPOCH_NS else self._now_ns + t_ns
        if prefix[3]:
            self.kind = "time of day (-t)"
            hours, minutes, seconds = int(prefix[3]), int(prefix[4]), int(prefix[5])
            t_ns = (hours * 3600 + minutes * 60 + seconds) * _SECOND_NS + _fraction_ns(prefix[6]) + self._days * _DAY_NS
            if self._has_begun and self._now_ns - t_ns > _DAY_NS // 2:
                self._days += 1
                t_ns += _DAY_NS
            return t_ns
        return self._now_ns + CALL_NS if self._has_begun else 0


def _fraction_ns(digits: str | None) -> int:
    return int((digits or "0").ljust(9, "0")[:9])


def split(args: str) -> list[str]:
    """Return the arguments of a call, as written in the log."""
    parts, start, depth = [], 0, 0
    for found in _SEPARATOR.finditer(args):
        token = found[0]
        if token in "[{(":
            depth += 1
        elif token in "]})":
            depth -= 1
        elif token == ", " and depth == 0:
            parts.append(args[start : found.start()])
            start = found.end()
    parts.append(args[start:])
    return parts


def unquoted(text: str) -> str:
    """Return the string that strace printed as `text`; bytes that are not UTF-8 are kept."""
    quoted = os.fsencode(text.removesuffix("...").removeprefix('"').removesuffix('"'))
    return os.fsdecode(_ESCAPE.sub(_unescaped, quoted))


def _unescaped(found: re.Match[bytes]) -> bytes:
    code = found[1]
    if code[:1] in b"01234567":
        return bytes([int(code, 8) & 255])
    if code[:1] == b"x" and len(code) == 3:
        return bytes([int(code[1:], 16)])
    return _ESCAPED.get(code, code)


# The state that calls change: names, sizes, open file descriptions with their offsets, working directories, tasks.


@dataclass(eq=False)
class LoggedFile:
    """`size` is the current size, a lower bound without `is_size_known`; `largest` is its maximum."""

    number: int
    path: str
    generation: int
    name: str
    size: int = 0
    largest: int = 0
    is_size_known: bool = False

    def resize(self, size: int) -> None:
        self.size, self.is_size_known = size, True
        self.largest = max(self.largest, size)

    def reach(self, end: int) -> None:
        self.size = max(self.size, end)
        self.largest = max(self.largest, self.size)


class FileNames:
    """All files of a log, by their current names."""

    def __init__(self) -> None:
        self._names: dict[str, LoggedFile] = {}
        self.all: list[LoggedFile] = []  # by number
        self._generations: dict[str, int] = {}

    def named(self, path: str) -> LoggedFile | None:
        if path.startswith(_NOT_FILES) and not path.startswith("/dev/shm/"):
            return None
        if path not in self._names:
            generation = self._generations.get(path, -1) + 1
            self._generations[path] = generation
            self._names[path] = LoggedFile(len(self.all), path, generation, path)
            self.all.append(self._names[path])
        return self._names[path]

    def remove(self, path: str) -> None:
        self._names.pop(path, None)

    def rename(self, old: str, new: str) -> None:
        file = self._names.pop(old, None)
        self.remove(new)
        if file is not None:
            self._names[new], file.name = file, new


@dataclass(eq=False)
class Description:
    """An open file description. With `is_guessed`, its offset is assumed to be 0."""

    file: LoggedFile | None
    offset: int = 0
    append: bool = False
    is_guessed: bool = False


@dataclass(eq=False)
class Directory:
    """A working directory, which threads share; "" if unknown."""

    path: str = ""

    def joined(self, path: str) -> str:
        return os.path.normpath(os.path.join(self.path, path))


@dataclass(eq=False)
class Task:
    """A process or thread. `table` maps its descriptors to open file descriptions."""

    pid: int
    table: dict[int, Description] = field(default_factory=dict)
    directory: Directory = field(default_factory=Directory)

    def child(self, tid: int, flags: str) -> Task:
        return Task(
            self.pid if "CLONE_THREAD" in flags else tid,
            self.table if "CLONE_FILES" in flags else dict(self.table),
            self.directory if "CLONE_FS" in flags else Directory(self.directory.path),
        )


class Tasks:
    """All tasks of a log by thread id, which is 0 if the log has none."""

    def __init__(self) -> None:
        self.adopted = 0
        self._known: dict[int, Task] = {}
        self._first: Task | None = None
        self._cloning: dict[int, str] = {}
        self._early: dict[int, int] = {}

    def get(self, tid: int) -> Task:
        """Return the task `tid`: if new, the child of an unfinished clone, else a thread of the first task.

        Logs of `-e trace=` without the process calls contain threads, but not their creation.
        """
        if tid not in self._known:
            if self._cloning:
                parent, flags = self._cloning.popitem()
                self._known[tid] = self._known[parent].child(tid, flags)
                self._early[tid] = parent
            elif self._first is not None:
                self._known[tid] = Task(self._first.pid or tid, self._first.table, self._first.directory)
                self.adopted += 1
            else:
                self._known[tid] = Task(tid)
            self._first = self._first or self._known[tid]
        return self._known[tid]

    def begin_clone(self, tid: int, flags: str) -> None:
        """Record that `tid` has called clone; lines of the child may come before the call returns."""
        self.get(tid)
        self._cloning[tid] = flags

    def cloned(self, tid: int, child: int, flags: str) -> None:
        parent = self.get(tid)
        self._cloning.pop(tid, None)
        if self._early.pop(child, None) != tid:
            self._known[child] = parent.child(child, flags)

    def end(self, tid: int) -> None:
        if tid:
            self._known.pop(tid, None)
            self._cloning.pop(tid, None)
            self._early.pop(tid, None)


class StraceLog:
    """Parses a log, complete or growing. The caller reads and empties `rows` (tuples of COLUMNS)."""

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self.rows: list[tuple[int, ...]] = []
        self._accessed: set[int] = set()  # numbers of files
        self._files, self._tasks, self._clock = FileNames(), Tasks(), LogClock()
        self._begun: dict[int, str] = {}  # by thread: the first part of an unfinished call
        self._command = ""

    def take(self, line: str, number: int) -> None:
        prefix = _PREFIX.match(line)
        assert prefix is not None  # every part of the expression is optional
        tid, text = int(prefix[1] or prefix[2] or 0), line[prefix.end() :]
        if text.endswith("<unfinished ...>") and (begun := _UNFINISHED.match(text)):
            self._begun[tid] = begun[1]
            self._clock.at(prefix, number)
            name, _, args = begun[1].partition("(")
            if name in _CLONES:
                self._tasks.begin_clone(tid, args)
            return
        if resumed := _RESUMED.match(text):
            text = self._begun.pop(tid, "") + text[resumed.end() :]
        if found := _CALL.match(text):
            result = int(found[3], 16 if "x" in found[3] else 10)  # base 0 rejects leading zeros
            self._call(SystemCall(tid, self._clock.at(prefix, number), found[1], found[2], result, found[4]))
        elif _ENDED.match(text):
            self._tasks.end(tid)
        elif not text.startswith(("---", "+++")) and not _UNKNOWN_RESULT.match(text):
            self.counts["other_lines"] += 1

    def _call(self, call: SystemCall) -> None:
        self.counts["calls"] += 1
        if call.result != -1:
            try:
                self._apply(call, self._tasks.get(call.tid))
            except (IndexError, ValueError):
                self.counts["calls_not_understood"] += 1  # an unknown form of arguments, or a truncated line

    def path(self, number: int) -> str:
        return self._files.all[number].path

    def accessed(self) -> list[TraceFile]:
        chosen = (file for file in self._files.all if file.number in self._accessed)
        return [TraceFile(file.number, file.path, 0, 0, file.generation, file.largest) for file in chosen]

    def provenance(self) -> Provenance:
        self.counts["threads_of_unknown_origin"] = self._tasks.adopted
        self.counts["clock_steps_back"] = self._clock.steps_back
        return Provenance(
            tier="strace",
            clock=self._clock.kind,
            command=self._command,
            note=_NOTE,
            extra={name: str(count) for name, count in self.counts.items() if count},
        )

    def _note(self, call: SystemCall, task: Task, file: LoggedFile, offset: int, length: int, op: int) -> None:
        first = offset // BLOCK_BYTES
        self._accessed.add(file.number)
        count = (offset + length - 1) // BLOCK_BYTES - first + 1
        self.rows.append((call.t_ns, file.number, first, count, op, UNKNOWN, task.pid))

    def _description(self, text: str, task: Task) -> Description | None:
        """Return the description. A path printed by -y overrides the tracked state: the log may lack the call that
        replaced it.
        """
        found = _FD.match(text)
        if found is None:
            return None
        described = task.table.get(int(found[1]))
        if found[2] is None:
            return described
        path = unquoted(found[2])
        if described and described.file and described.file.name == path:
            return described
        file = self._files.named(path) if path.startswith("/") else None
        described = Description(file, is_guessed=True)
        task.table[int(found[1])] = described
        return described

    def _access(self, call: SystemCall, task: Task, fd: str, op: int, length: int, offset: int | None = None) -> None:
        """Add an access; without `offset`, at that of the description, which then advances."""
        described = self._description(fd, task)
        if length <= 0:
            return
        if described is None:
            self.counts["accesses_of_unknown_files"] += 1
            return
        if described.file is None:
            return
        file = described.file
        if op == WRITE and described.append:
            start = file.size
            self.counts["guessed_offsets"] += not file.is_size_known
        elif offset is None:
            start = described.offset
            self.counts["guessed_offsets"] += described.is_guessed
        else:
            start = offset
        if offset is None:
            described.offset = start + length
        file.reach(start + length)
        self._note(call, task, file, start, length, op)

    def _path(self, args: list[str], task: Task) -> str:
        path = unquoted(args[1])
        found = re.match(r"\w+<((?:[^<>\\]|\\.)*)>", args[0])
        if found:
            return task.directory.joined(unquoted(found[1]) + "/" + path) if not path.startswith("/") else path
        base = self._description(args[0], task)
        if base and base.file and not path.startswith("/"):
            path = base.file.name + "/" + path
        return task.directory.joined(path)

    def _apply(self, call: SystemCall, task: Task) -> None:  # noqa: C901 - a table of calls
        """Raise IndexError or ValueError for arguments of an unknown form."""
        name, table = call.name, task.table
        match name:
            case "read" | "write" | "readv" | "writev":
                # The descriptor is the first argument. Splitting the data after it would be slow.
                self._access(call, task, call.args, _op(name), call.result)
            case "pread64" | "pwrite64" | "preadv" | "pwritev" | "preadv2" | "pwritev2" | "pread" | "pwrite":
                self._access_at(call, task)
            case "lseek" | "_llseek":
                self._seek(call, task)
            case "close":
                if found := _FD.match(call.args):
                    table.pop(int(found[1]), None)
            case "open" | "openat" | "openat2" | "creat":
                args = call.words if name.startswith("openat") else ["AT_FDCWD", *call.words]
                flags = "O_WRONLY|O_CREAT|O_TRUNC" if name == "creat" else args[2]
                self._open(call, task, self._path(args, task), flags)
            case "fstat" | "fstat64" | "newfstatat" | "fstatat64" | "statx":  # of a descriptor
                size = _SIZE.search(call.args)
                if size and (name.startswith("fstat") or call.words[1] == '""'):
                    self._resize(call.words[0], task, int(size[1]))
            case "mmap" | "mmap2":
                self._mmap(call, task)
            case "dup" | "dup2" | "dup3":
                self._dup(call, task)
            case "fcntl" | "fcntl64":
                if call.words[1].startswith("F_DUPFD"):
                    self._dup(call, task)
                elif call.words[1] == "F_SETFL" and (described := self._description(call.words[0], task)):
                    described.append = "O_APPEND" in call.words[2]
            case "clone" | "clone3" | "fork" | "vfork":
                self._tasks.cloned(call.tid, call.result, call.args)
            case "execve" | "execveat":
                task.table = dict(table)  # exec ends the sharing
                if not self._command:
                    path, arguments = call.words[:2]
                    # strace prints the whole path, but may truncate arguments (-s).
                    self._command = " ".join(unquoted(word) for word in [path, *split(arguments.strip("[]"))[1:]])
            case "sendfile" | "sendfile64":
                target, source, at = call.words[:3]
                self._access(call, task, source, READ, call.result, _offset_in(at))
                self._access(call, task, target, WRITE, call.result)
            case "copy_file_range" | "splice":
                source, at, target, to = call.words[:4]
                self._access(call, task, source, READ, call.result, _offset_in(at))
                self._access(call, task, target, WRITE, call.result, _offset_in(to))
            case "ftruncate" | "ftruncate64":
                self._resize(call.words[0], task, int(call.words[1], 0))
            case "truncate" | "truncate64":
                if file := self._files.named(task.directory.joined(unquoted(call.words[0]))):
                    file.resize(int(call.words[1], 0))
            case "unlink" | "unlinkat":
                self._files.remove(self._path(call.words if name == "unlinkat" else ["AT_FDCWD", *call.words], task))
            case "rename" | "renameat" | "renameat2":
                args = call.words
                if name == "rename":
                    args = ["AT_FDCWD", args[0], "AT_FDCWD", args[1]]
                self._files.rename(self._path(args[:2], task), self._path(args[2:4], task))
            case "chdir":
                task.directory.path = task.directory.joined(unquoted(call.words[0]))
            case "getcwd":
                task.directory.path = unquoted(call.words[0])
            case "fchdir":
                described = self._description(call.args, task)
                if described and described.file:
                    task.directory.path = described.file.name
            case "pipe" | "pipe2" | "socketpair":  # two descriptors in brackets
                bracket = next((arg for arg in call.words if arg.startswith("[")), "[]")
                for fd in split(bracket.strip("[]")):
                    if found := _FD.match(fd):
                        table[int(found[1])] = Description(None)
            case _ if name in _NO_FILES:
                table[call.result] = Description(None)

    def _open(self, call: SystemCall, task: Task, path: str, flags: str) -> None:
        file = self._files.named(unquoted(call.result_path) if call.result_path else path)
        if file and "O_TRUNC" in flags:
            file.resize(0)
        task.table[call.result] = Description(file, append="O_APPEND" in flags)

    def _resize(self, fd: str, task: Task, size: int) -> None:
        described = self._description(fd, task)
        if described and described.file:
            described.file.resize(size)

    def _dup(self, call: SystemCall, task: Task) -> None:
        described = self._description(call.words[0], task)
        task.table.pop(call.result, None)
        if described:
            task.table[call.result] = described

    def _access_at(self, call: SystemCall, task: Task) -> None:
        """Handle an access at an offset; -1 is that of the description (preadv2, pwritev2)."""
        has_flags = call.name in ("preadv2", "pwritev2")
        last = call.args.rsplit(", ", 2 if has_flags else 1)[1:]
        offset = int(last[0], 0)
        if has_flags and "RWF_APPEND" in last[1] and (described := self._description(call.args, task)) and described.file:
            offset = described.file.size
        at = None if offset in (-1, (1 << 64) - 1) else offset
        self._access(call, task, call.args, _op(call.name), call.result, at)

    def _seek(self, call: SystemCall, task: Task) -> None:
        args = call.words
        described = self._description(args[0], task)
        if described is None:
            return
        bracketed = args[2].startswith("[")
        described.offset = int(args[2].strip("[]"), 0) if bracketed and call.name == "_llseek" else call.result
        described.is_guessed = False
        if args[-1] == "SEEK_END" and described.file and call.name == "lseek":
            described.file.resize(described.offset - int(args[1], 0))

    def _mmap(self, call: SystemCall, task: Task) -> None:
        args = call.words
        described = self._description(args[4], task)
        if "MAP_ANON" in args[3] or described is None or described.file is None:
            return
        offset, length, file = int(args[5], 0), int(args[1], 0), described.file
        if file.is_size_known:
            length = min(length, file.size - offset)
        if length > 0:
            self.counts["mapped_ranges"] += 1
            self._note(call, task, file, offset, length, MAP)


def _op(name: str) -> int:
    return WRITE if "write" in name else READ


def _offset_in(text: str) -> int | None:
    """Return the (first) offset in "[4096]" or "[0] => [4096]", None for NULL."""
    found = re.match(r"\[(\d+)\]", text)
    return int(found[1]) if found else None
