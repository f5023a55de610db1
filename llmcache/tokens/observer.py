"""The reports of bpf/tokens.bpf.c, and the hardware breakpoints that run it.

A breakpoint at 8 bytes of a tensor shows each read by the program, to the microsecond, and whether the page is resident or
pinned, and costs nothing in between. The kernel refuses to clear accessed bits of pages that a second process maps, as
pinned pages are.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
from collections.abc import Iterator, Mapping, Sequence

from llmcache.bpf.filemap import BY_FUNCTION, BY_TRACEPOINT, observable_by
from llmcache.bpf.libbpf import OBJECTS, BpfObject, LoadFailure
from llmcache.bpf.perf import is_known_processor, open_breakpoint
from llmcache.bpf.ring import FRAME_BYTES, Ring
from llmcache.errors import MissingRequirement
from llmcache.tokens.passes import Event, Role

OBJECT = OBJECTS / "tokens.bpf.o"
_RING_BYTES = 1 << 22
_FRAME = struct.Struct("<IIQIIQQQ7Q")
_HITS = {Role.FIRST: "hit_first", Role.LATER: "hit_later"}
_ATTACHED = ("switched", "ended")
_FILES = {BY_TRACEPOINT: ("fault_page", "read_pages"), BY_FUNCTION: ("fault_begun", "batch_sought"), None: ()}
"""Programs that attribute waits to pages."""
_SCANS = 8  # of the threads of a process that starts new ones all the time


class _Subject(ctypes.Structure):
    _fields_ = (("pid", ctypes.c_uint32), ("found", ctypes.c_uint32))


def _load_attached(files: Sequence[str]) -> tuple[BpfObject, bool]:
    """Return the object with its programs, and whether `files` are among them, which the kernel may reject."""
    loaded = BpfObject(OBJECT)
    try:
        loaded.load([*_ATTACHED, *files, *_HITS.values(), "watch"])
        for program in (*_ATTACHED, *files):
            loaded.attach(program)
    except LoadFailure as failure:
        loaded.close()
        if failure.program in files:
            return _load_attached(())
        hint = "tokens needs Linux 6.1 or later with BTF, root, and no lockdown"
        raise MissingRequirement(f"the kernel rejects the BPF programs that observe processes: {failure}", hint) from failure
    return loaded, bool(files)


class Observer:
    """The programs in the kernel, attached until `close`; MissingRequirement."""

    def __init__(self) -> None:
        if os.geteuid() != 0:
            raise MissingRequirement("only root can observe single tokens", "sudo llmcache tokens ...")
        if not is_known_processor():
            raise MissingRequirement("llmcache uses hardware breakpoints on x86-64 and arm64 only")
        self._object, self.sees_files = _load_attached(_FILES[observable_by()])
        if not self.look(os.getpid()):
            self._object.close()
            raise MissingRequirement("BPF programs cannot look up processes in this kernel", "please report it")
        self._ring = Ring(self._object.map_fd("ring"), _RING_BYTES, _FRAME.size - FRAME_BYTES)
        self._breakpoints: dict[int, list[int]] = {}

    def look(self, pid: int) -> bool:
        """Observe a process, or report the sums of an observed one; False if there is no such process."""
        subject = _Subject(pid, 0)
        self._object.run("watch", subject)
        return bool(subject.found)

    def set_clock(self, pid: int, addresses: Mapping[Role, int]) -> None:
        """Report reads at these addresses of a process, and at no others.

        MissingRequirement: this machine has no hardware breakpoints, or a debugger uses them.
        """
        self.drop_clock(pid)
        fds = self._breakpoints[pid] = []
        known: set[int] = set()
        for _ in range(_SCANS):
            threads = _threads(pid) - known
            if not threads:
                break
            known |= threads
            for tid in threads:
                for role, address in addresses.items():
                    with _ending_ignored():
                        fds.append(open_breakpoint(tid, address, self._object.program_fd(_HITS[role])))

    def drop_clock(self, pid: int) -> None:
        for fd in self._breakpoints.pop(pid, ()):
            os.close(fd)

    def events(self) -> list[Event]:
        return [Event(*fields) for fields in self._ring.take(_FRAME)]

    @property
    def lost(self) -> int:
        return int.from_bytes(self._object.read("lost", bytes(4), 8), "little")

    def close(self) -> None:
        for pid in list(self._breakpoints):
            self.drop_clock(pid)
        self._object.close()


def _threads(pid: int) -> set[int]:
    with contextlib.suppress(OSError):  # it has ended
        return {int(name) for name in os.listdir(f"/proc/{pid}/task")}
    return set()


@contextlib.contextmanager
def _ending_ignored() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.ESRCH:
            return
        if error.errno == errno.ENOSPC:
            said, hint = (
                "all hardware breakpoints of the process are in use",
                "end its debugger, or other commands that observe its tokens",
            )
        else:
            said = f"hardware breakpoints cannot be set: {error.strerror}"
            hint = "some virtual machines have none; a container needs a seccomp profile that allows perf_event_open"
        raise MissingRequirement(said, hint) from error
