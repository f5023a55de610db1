"""What file descriptors stand for while a log is read: files, open file descriptions, tables of descriptors, processes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from llmcache.trace.record import TraceFile

# Not files that are cached by blocks; /dev/shm is memory, but has files.
_NOT_FILES = ("/dev/", "/proc/", "/sys/")


@dataclass(eq=False)
class File:
    """A file. `size` is the size now, as far as known (`is_size_known`: told by stat or lseek); `largest` its maximum."""

    number: int
    path: str
    generation: int
    name: str
    size: int = 0
    largest: int = 0
    is_size_known: bool = False

    def resize(self, size: int, is_known: bool = True) -> None:
        """Note the size."""
        self.size, self.is_size_known = size, self.is_size_known or is_known
        self.largest = max(self.largest, size)

    def reach(self, end: int) -> None:
        """Note that the file has at least `end` bytes."""
        if end > self.size:
            self.resize(end, is_known=False)


class Files:
    """All files of a log, by the names they have at the moment."""

    def __init__(self) -> None:
        self._names: dict[str, File] = {}
        self._all: list[File] = []
        self._generations: dict[str, int] = {}

    def named(self, path: str) -> File | None:
        """Returns the file called `path`; None if that is a device or the like."""
        if path.startswith(_NOT_FILES) and not path.startswith("/dev/shm/"):
            return None
        if path not in self._names:
            generation = self._generations.get(path, -1) + 1
            self._generations[path] = generation
            self._names[path] = File(len(self._all), path, generation, path)
            self._all.append(self._names[path])
        return self._names[path]

    def remove(self, path: str) -> None:
        """The name `path` is gone: what is called so next is another file."""
        self._names.pop(path, None)

    def rename(self, old: str, new: str) -> None:
        """The file called `old` is called `new`."""
        file = self._names.pop(old, None)
        self.remove(new)
        if file is not None:
            self._names[new], file.name = file, new

    def table(self, numbers: set[int]) -> list[TraceFile]:
        """Returns the files `numbers` for the trace."""
        chosen = (file for file in self._all if file.number in numbers)
        return [TraceFile(file.number, file.path, 0, 0, file.generation, file.largest) for file in chosen]


@dataclass(eq=False)
class Description:
    """An open file description: what dup and fork share. `is_guessed`: its offset was not told, and taken to be 0."""

    file: File | None
    offset: int = 0
    append: bool = False
    is_guessed: bool = False


class Table:
    """Descriptors of a process: number to (description, close on exec)."""

    def __init__(self, entries: dict[int, tuple[Description, bool]] | None = None) -> None:
        self.entries = entries or {}

    def copied(self) -> Table:
        """Returns the table of a forked child: the same descriptions, closed on their own."""
        return Table(dict(self.entries))

    def after_exec(self) -> Table:
        """Returns the table that is left when a program is executed."""
        return Table({fd: entry for fd, entry in self.entries.items() if not entry[1]})


@dataclass(eq=False)
class Directory:
    """A working directory; threads share it. Empty: not known."""

    path: str = ""

    def joined(self, path: str) -> str:
        """Returns `path` from here, without "." and ".."; symbolic links are not followed."""
        return os.path.normpath(os.path.join(self.path, path))


@dataclass(eq=False)
class Process:
    """A process or thread."""

    pid: int
    table: Table = field(default_factory=Table)
    directory: Directory = field(default_factory=Directory)

    def child(self, tid: int, flags: str) -> Process:
        """Returns the process or thread `tid`, made by clone with `flags` (empty for fork and vfork)."""
        return Process(
            self.pid if "CLONE_THREAD" in flags else tid,
            self.table if "CLONE_FILES" in flags else self.table.copied(),
            self.directory if "CLONE_FS" in flags else Directory(self.directory.path),
        )


class Processes:
    """All processes and threads of a log by their number, 0 where the log has none."""

    def __init__(self) -> None:
        self.adopted = 0
        self._known: dict[int, Process] = {}
        self._first: Process | None = None
        self._cloning: dict[int, str] = {}
        self._early: dict[int, int] = {}

    def get(self, tid: int) -> Process:
        """Returns `tid`. One not seen before is the child of a clone that has not returned; else it is taken for a thread.

        Logs of `-e trace=` without the process calls show threads, but not where they come from.
        """
        if tid not in self._known:
            if self._cloning:
                parent, flags = self._cloning.popitem()
                self._known[tid] = self._known[parent].child(tid, flags)
                self._early[tid] = parent
            elif self._first is not None:
                self._known[tid] = Process(self._first.pid or tid, self._first.table, self._first.directory)
                self.adopted += 1
            else:
                self._known[tid] = Process(tid)
            self._first = self._first or self._known[tid]
        return self._known[tid]

    def begin_clone(self, tid: int, flags: str) -> None:
        """`tid` makes a child, whose lines may come before the call returns."""
        self.get(tid)
        self._cloning[tid] = flags

    def cloned(self, tid: int, child: int, flags: str) -> None:
        """The clone of `tid` has returned `child`."""
        parent = self.get(tid)
        self._cloning.pop(tid, None)
        if self._early.pop(child, None) != tid:
            self._known[child] = parent.child(child, flags)

    def end(self, tid: int) -> None:
        """`tid` is gone; its number may come again."""
        if tid:
            self._known.pop(tid, None)
            self._cloning.pop(tid, None)
            self._early.pop(tid, None)
