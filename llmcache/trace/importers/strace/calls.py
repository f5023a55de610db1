"""What each system call does to descriptors, offsets and files, and which blocks it accesses."""

from __future__ import annotations

import re
from collections.abc import Callable

from llmcache.trace.importers.strace.descriptors import Description, File, Files, Process, Processes
from llmcache.trace.importers.strace.lines import Begun, Call, Ended, split, unquoted
from llmcache.trace.record import MAP, READ, WRITE

_FD = re.compile(r"(-?\d+)(?:<((?:[^<>\\]|\\.)*)>)?")
_SIZE = re.compile(r"\bst(?:x)?_size=(\d+)")
_LAST_FD = (1 << 32) - 1
_CLONES = ("clone", "clone3", "fork", "vfork")
# Calls that return a descriptor of something that is no file: it may take a number that a file had.
_NO_FILES = (
    *("socket", "accept", "accept4", "epoll_create", "epoll_create1", "eventfd", "eventfd2", "timerfd_create"),
    *("signalfd", "signalfd4", "inotify_init", "inotify_init1", "fanotify_init", "memfd_create", "userfaultfd"),
    *("perf_event_open", "io_uring_setup", "pidfd_open"),
)
# (t_ns, file, offset, length, op, pid): bytes offset .. offset + length - 1 were accessed.
Sink = Callable[[int, File, int, int, int, int], None]


class Calls:
    """Follows the calls of a log.

    `unknown` counts accesses whose file is not known, `guessed` those whose offset is not, `mapped` mapped ranges.
    """

    def __init__(self, sink: Sink) -> None:
        self.files, self.processes = Files(), Processes()
        self.unknown = self.guessed = self.mapped = self.not_understood = 0
        self.command = ""
        self._sink = sink

    def take(self, event: Call | Begun | Ended) -> None:
        """Follow one event."""
        if isinstance(event, Ended):
            self.processes.end(event.tid)
        elif isinstance(event, Begun):
            if event.name in _CLONES:
                self.processes.begin_clone(event.tid, event.args)
        elif event.result != -1 and event.name in _HANDLERS:
            try:
                _HANDLERS[event.name](self, event, self.processes.get(event.tid))
            except (IndexError, ValueError):
                self.not_understood += 1  # arguments in another form, or a line that was cut

    def _description(self, text: str, process: Process) -> Description | None:
        """Returns what the descriptor written as `text` stands for; None if it is no file or not known.

        What -y tells is trusted more than what was followed: a descriptor may have been replaced unseen.
        """
        found = _FD.match(text)
        if found is None:
            return None
        entry = process.table.entries.get(int(found[1]))
        described = entry[0] if entry else None
        if found[2] is None:
            return described
        path = unquoted(found[2])
        if described and described.file and described.file.name == path:
            return described
        file = self.files.named(path) if path.startswith("/") else None
        described = Description(file, is_guessed=True)
        process.table.entries[int(found[1])] = described, False
        return described

    def _access(self, call: Call, process: Process, fd: str, op: int, length: int, offset: int | None = None) -> None:
        """An access of `length` bytes, at `offset`, or where the description is: that one then moves on."""
        described = self._description(fd, process)
        if length <= 0:
            return
        if described is None:
            self.unknown += 1
            return
        if described.file is None:
            return
        file = described.file
        if op == WRITE and described.append:
            start = file.size
            self.guessed += not file.is_size_known
        elif offset is None:
            start = described.offset
            self.guessed += described.is_guessed
        else:
            start = offset
        if offset is None:
            described.offset = start + length
        file.reach(start + length)
        self._sink(call.t_ns, file, start, length, op, process.pid)

    def _path(self, args: list[str], process: Process) -> str:
        """Returns the path that a directory descriptor and a path mean together."""
        path = unquoted(args[1])
        found = re.match(r"\w+<((?:[^<>\\]|\\.)*)>", args[0])
        if found:
            return process.directory.joined(unquoted(found[1]) + "/" + path) if not path.startswith("/") else path
        base = self._description(args[0], process)
        if base and base.file and not path.startswith("/"):
            path = base.file.name + "/" + path
        return process.directory.joined(path)

    def _opened(self, call: Call, process: Process, path: str, flags: str) -> None:
        file = self.files.named(unquoted(call.result_path) if call.result_path else path)
        if file and "O_TRUNC" in flags:
            file.resize(0)
        process.table.entries[call.result] = Description(file, append="O_APPEND" in flags), "O_CLOEXEC" in flags

    # Handlers, one for each kind of call.

    def _open(self, call: Call, process: Process) -> None:
        args = split(call.args)
        if not call.name.startswith("openat"):
            args = ["AT_FDCWD", *args]
        flags = "O_WRONLY|O_CREAT|O_TRUNC" if call.name == "creat" else args[2]
        self._opened(call, process, self._path(args, process), flags)

    def _close(self, call: Call, process: Process) -> None:
        process.table.entries.pop(_number(call.args), None)

    def _close_range(self, call: Call, process: Process) -> None:
        args = split(call.args)
        last = int(args[1]) if args[1].isdigit() else _LAST_FD
        for fd in [fd for fd in process.table.entries if _number(args[0]) <= fd <= last]:
            if "CLOEXEC" in args[2]:
                process.table.entries[fd] = process.table.entries[fd][0], True
            else:
                del process.table.entries[fd]

    def _dup(self, call: Call, process: Process) -> None:
        args = split(call.args)
        self._duplicated(args[0], call.result, process, len(args) > 2 and "O_CLOEXEC" in args[2])

    def _duplicated(self, fd: str, new: int, process: Process, cloexec: bool) -> None:
        described = self._description(fd, process)
        if new == _number(fd):
            return
        process.table.entries.pop(new, None)
        if described:
            process.table.entries[new] = described, cloexec

    def _fcntl(self, call: Call, process: Process) -> None:
        args = split(call.args)
        if args[1].startswith("F_DUPFD"):
            self._duplicated(args[0], call.result, process, args[1] == "F_DUPFD_CLOEXEC")
        elif args[1] == "F_SETFD":
            self._set_cloexec(args[0], process, "FD_CLOEXEC" in args[2])
        elif args[1] == "F_SETFL" and (described := self._description(args[0], process)):
            described.append = "O_APPEND" in args[2]

    def _ioctl(self, call: Call, process: Process) -> None:
        args = split(call.args)
        if args[1] in ("FIOCLEX", "FIONCLEX"):
            self._set_cloexec(args[0], process, args[1] == "FIOCLEX")

    def _set_cloexec(self, fd: str, process: Process, cloexec: bool) -> None:
        if described := self._description(fd, process):
            process.table.entries[_number(fd)] = described, cloexec

    def _no_file(self, call: Call, process: Process) -> None:
        process.table.entries[call.result] = Description(None), False

    def _pair(self, call: Call, process: Process) -> None:
        """A pipe or a pair of sockets: two descriptors in brackets."""
        bracket = next((arg for arg in split(call.args) if arg.startswith("[")), "[]")
        for fd in split(bracket.strip("[]")):
            if found := _FD.match(fd):
                process.table.entries[int(found[1])] = Description(None), False

    def _stream(self, call: Call, process: Process) -> None:
        """A read or write where the description is (read, write, readv, writev)."""
        # The descriptor stands first: the data after it, long and full of commas, need not be taken apart.
        self._access(call, process, call.args, _op(call.name), call.result)

    def _at(self, call: Call, process: Process) -> None:
        """A read or write at an offset; -1 means where the description is (preadv2, pwritev2)."""
        has_flags = call.name in ("preadv2", "pwritev2")
        last = call.args.rsplit(", ", 2 if has_flags else 1)[1:]
        offset = int(last[0], 0)
        if has_flags and "RWF_APPEND" in last[1] and (described := self._description(call.args, process)) and described.file:
            offset = described.file.size
        at = None if offset in (-1, (1 << 64) - 1) else offset
        self._access(call, process, call.args, _op(call.name), call.result, at)

    def _seek(self, call: Call, process: Process) -> None:
        args = split(call.args)
        described = self._description(args[0], process)
        if described is None:
            return
        bracketed = args[2].startswith("[")
        described.offset = int(args[2].strip("[]"), 0) if bracketed and call.name == "_llseek" else call.result
        described.is_guessed = False
        if args[-1] == "SEEK_END" and described.file and call.name == "lseek":
            described.file.resize(described.offset - int(args[1], 0))

    def _sendfile(self, call: Call, process: Process) -> None:
        target, source, place = split(call.args)[:3]
        self._access(call, process, source, READ, call.result, _told(place))
        self._access(call, process, target, WRITE, call.result)

    def _copy(self, call: Call, process: Process) -> None:
        """A copy between descriptors (copy_file_range, splice)."""
        source, at, target, to = split(call.args)[:4]
        self._access(call, process, source, READ, call.result, _told(at))
        self._access(call, process, target, WRITE, call.result, _told(to))

    def _mmap(self, call: Call, process: Process) -> None:
        """A mapping of a file: its range, up to the end of the file if that is known."""
        args = split(call.args)
        described = self._description(args[4], process)
        if "MAP_ANON" in args[3] or described is None or described.file is None:
            return
        offset, length, file = int(args[5], 0), int(args[1], 0), described.file
        if file.is_size_known:
            length = min(length, file.size - offset)
        if length > 0:
            self.mapped += 1
            self._sink(call.t_ns, file, offset, length, MAP, process.pid)

    def _stat(self, call: Call, process: Process) -> None:
        """A size that stat tells of an open file (fstat, newfstatat and statx of a descriptor)."""
        size = _SIZE.search(call.args)
        args = split(call.args)
        if not size or not (call.name.startswith("fstat") or args[1] == '""'):
            return
        described = self._description(args[0], process)
        if described and described.file:
            described.file.resize(int(size[1]))

    def _truncate(self, call: Call, process: Process) -> None:
        args = split(call.args)
        if call.name.startswith("ftruncate"):
            described = self._description(args[0], process)
            file = described.file if described else None
        else:
            file = self.files.named(process.directory.joined(unquoted(args[0])))
        if file:
            file.resize(int(args[1], 0))

    def _unlink(self, call: Call, process: Process) -> None:
        args = split(call.args)
        self.files.remove(self._path(args if call.name == "unlinkat" else ["AT_FDCWD", *args], process))

    def _rename(self, call: Call, process: Process) -> None:
        args = split(call.args)
        if call.name == "rename":
            args = ["AT_FDCWD", args[0], "AT_FDCWD", args[1]]
        self.files.rename(self._path(args[:2], process), self._path(args[2:4], process))

    def _chdir(self, call: Call, process: Process) -> None:
        process.directory.path = process.directory.joined(unquoted(split(call.args)[0]))

    def _getcwd(self, call: Call, process: Process) -> None:
        process.directory.path = unquoted(split(call.args)[0])

    def _fchdir(self, call: Call, process: Process) -> None:
        described = self._description(call.args, process)
        if described and described.file:
            process.directory.path = described.file.name

    def _clone(self, call: Call, process: Process) -> None:
        self.processes.cloned(call.tid, call.result, call.args)

    def _exec(self, call: Call, process: Process) -> None:
        process.table = process.table.after_exec()
        if not self.command:
            path, arguments = split(call.args)[:2]
            # The path is shown whole; arguments may be cut off (-s).
            self.command = " ".join(unquoted(word) for word in [path, *split(arguments.strip("[]"))[1:]])


def _op(name: str) -> int:
    return WRITE if "write" in name else READ


def _number(fd: str) -> int:
    """Returns the number of a descriptor, with or without what -y adds; -1 if there is none."""
    found = _FD.match(fd)
    return int(found[1]) if found else -1


def _told(place: str) -> int | None:
    """Returns the offset in "[4096]" or "[0] => [4096]" (the first), None for NULL."""
    found = re.match(r"\[(\d+)\]", place)
    return int(found[1]) if found else None


_HANDLERS: dict[str, Callable[[Calls, Call, Process], None]] = {
    **dict.fromkeys(("open", "openat", "openat2", "creat"), Calls._open),
    **dict.fromkeys(("read", "write", "readv", "writev"), Calls._stream),
    **dict.fromkeys(("pread64", "pwrite64", "preadv", "pwritev", "preadv2", "pwritev2", "pread", "pwrite"), Calls._at),
    **dict.fromkeys(("dup", "dup2", "dup3"), Calls._dup),
    **dict.fromkeys(("fcntl", "fcntl64"), Calls._fcntl),
    **dict.fromkeys(("lseek", "_llseek"), Calls._seek),
    **dict.fromkeys(("sendfile", "sendfile64"), Calls._sendfile),
    **dict.fromkeys(("copy_file_range", "splice"), Calls._copy),
    **dict.fromkeys(("mmap", "mmap2"), Calls._mmap),
    **dict.fromkeys(("fstat", "fstat64", "newfstatat", "fstatat64", "statx"), Calls._stat),
    **dict.fromkeys(("truncate", "truncate64", "ftruncate", "ftruncate64"), Calls._truncate),
    **dict.fromkeys(("unlink", "unlinkat"), Calls._unlink),
    **dict.fromkeys(("rename", "renameat", "renameat2"), Calls._rename),
    **dict.fromkeys(_CLONES, Calls._clone),
    **dict.fromkeys(("execve", "execveat"), Calls._exec),
    **dict.fromkeys(("pipe", "pipe2", "socketpair"), Calls._pair),
    **dict.fromkeys(_NO_FILES, Calls._no_file),
    "close": Calls._close,
    "close_range": Calls._close_range,
    "ioctl": Calls._ioctl,
    "chdir": Calls._chdir,
    "fchdir": Calls._fchdir,
    "getcwd": Calls._getcwd,
}
