"""libbpf 1.x through ctypes.

When the process ends or is killed, the kernel removes its links and maps.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from llmcache.errors import MissingRequirement

OBJECTS = Path(__file__).parent / "objects"
APT_HINT = "install libbpf: sudo apt install libbpf1"
_RAW_TRACEPOINT, _ENTRY = 23, 24  # BPF_TRACE_RAW_TP, BPF_TRACE_FENTRY: attach types of sections tp_btf/ and fentry/
_WARNING = 0
_FAILED_PROGRAM = re.compile(rb"prog '(\w+)': (?:BPF program load failed|failed to (?:load|find|prepare))")

_pointer, _text, _int, _size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_size_t
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "bpf_object__open_file": (_pointer, [_text, _pointer]),
    "bpf_object__load": (_int, [_pointer]),
    "bpf_object__close": (None, [_pointer]),
    "bpf_object__next_program": (_pointer, [_pointer, _pointer]),
    "bpf_object__next_map": (_pointer, [_pointer, _pointer]),
    "bpf_program__name": (_text, [_pointer]),
    "bpf_program__set_autoload": (_int, [_pointer, ctypes.c_bool]),
    "bpf_program__attach": (_pointer, [_pointer]),
    "bpf_program__attach_iter": (_pointer, [_pointer, _pointer]),
    "bpf_program__fd": (_int, [_pointer]),
    "bpf_prog_test_run_opts": (_int, [_int, _pointer]),
    "bpf_obj_get_info_by_fd": (_int, [_int, _pointer, _pointer]),
    "bpf_link__fd": (_int, [_pointer]),
    "bpf_link__destroy": (_int, [_pointer]),
    "bpf_iter_create": (_int, [_int]),
    "bpf_map__name": (_text, [_pointer]),
    "bpf_map__fd": (_int, [_pointer]),
    "bpf_map__set_initial_value": (_int, [_pointer, _pointer, _size]),
    "bpf_map_lookup_elem": (_int, [_int, _pointer, _pointer]),
    "bpf_map_update_elem": (_int, [_int, _pointer, _pointer, ctypes.c_uint64]),
    "bpf_map_delete_elem": (_int, [_int, _pointer]),
    "libbpf_find_vmlinux_btf_id": (_int, [_text, _int]),
}

_PRINT = ctypes.CFUNCTYPE(_int, _int, _text, _pointer)
_libc = ctypes.CDLL(None)


class LoadFailure(Exception):
    """The kernel or libbpf refused an object."""

    def __init__(self, number: int, program: str | None) -> None:
        super().__init__(f"{os.strerror(number)}{f' ({program})' if program else ''}")
        self.number = number
        self.program = program


class _TestRun(ctypes.Structure):
    _fields_ = (
        ("sz", _size),
        ("data_in", _pointer),
        ("data_out", _pointer),
        ("data_size_in", ctypes.c_uint32),
        ("data_size_out", ctypes.c_uint32),
        ("ctx_in", _pointer),
        ("ctx_out", _pointer),
        ("ctx_size_in", ctypes.c_uint32),
        ("ctx_size_out", ctypes.c_uint32),
        ("retval", ctypes.c_uint32),
    )


class _Log:
    def __init__(self) -> None:
        self.program: str | None = None
        self.callback = _PRINT(self._take)  # an attribute, because libbpf keeps the pointer

    def _take(self, level: int, form: bytes, arguments: int) -> int:
        if level == _WARNING:
            buffer = ctypes.create_string_buffer(1 << 16)
            _libc.vsnprintf(buffer, _size(len(buffer)), _text(form), _pointer(arguments))
            if self.program is None and (found := _FAILED_PROGRAM.search(buffer.value)):
                self.program = found[1].decode()
        return 0


_log = _Log()


@functools.cache
def library() -> Any:
    """Return libbpf; MissingRequirement if it is not installed."""
    try:
        lib = ctypes.CDLL("libbpf.so.1", use_errno=True)
    except OSError as error:
        raise MissingRequirement(f"libbpf 1 cannot be loaded: {error}", APT_HINT) from error
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    lib.libbpf_set_print.restype, lib.libbpf_set_print.argtypes = _pointer, [_PRINT]
    lib.libbpf_set_print(_log.callback)
    return lib


def has_tracepoint(name: str) -> bool:
    """Return whether the kernel's BTF has tracepoint `name`."""
    return int(library().libbpf_find_vmlinux_btf_id(name.encode(), _RAW_TRACEPOINT)) > 0


def has_function(name: str) -> bool:
    """Return whether the kernel's BTF has function `name`; it lacks functions that the compiler has inlined everywhere."""
    return int(library().libbpf_find_vmlinux_btf_id(name.encode(), _ENTRY)) > 0


class BpfObject:
    """A BPF object. Call `configure`, `load` for some of its programs, `attach`, and `close` at the end."""

    def __init__(self, path: Path) -> None:
        self._lib = library()
        self._links: list[int] = []
        _log.program = None
        self._object: int | None = self._lib.bpf_object__open_file(os.fsencode(path), None)
        if not self._object:
            raise self._failure(ctypes.get_errno() or errno.EINVAL)
        self._programs = {self._lib.bpf_program__name(one).decode(): one for one in self._each("program")}
        self._maps = {self._lib.bpf_map__name(one).decode(): one for one in self._each("map")}

    def _each(self, kind: str) -> Iterator[int]:
        following = getattr(self._lib, f"bpf_object__next_{kind}")
        item = following(self._object, None)
        while item:
            yield item
            item = following(self._object, item)

    @staticmethod
    def _failure(number: int) -> LoadFailure:
        return LoadFailure(abs(number), _log.program)

    def configure(self, value: bytes) -> None:
        found = next(item for name, item in self._maps.items() if name.endswith(".rodata"))
        self._check(self._lib.bpf_map__set_initial_value(found, value, len(value)))

    def load(self, programs: Collection[str]) -> None:
        for name, program in self._programs.items():
            self._lib.bpf_program__set_autoload(program, name in programs)
        _log.program = None
        self._check(self._lib.bpf_object__load(self._object))

    def attach(self, program: str) -> None:
        ctypes.set_errno(0)
        link = self._lib.bpf_program__attach(self._programs[program])
        if not link:
            raise LoadFailure(ctypes.get_errno() or errno.EINVAL, program)
        self._links.append(link)

    def program_fd(self, program: str) -> int:
        return int(self._lib.bpf_program__fd(self._programs[program]))

    def map_fd(self, name: str) -> int:
        return int(self._lib.bpf_map__fd(self._maps[name]))

    def run(self, program: str, context: ctypes.Structure) -> int:
        """Run a program of section "syscall" once; it may change `context`."""
        options = _TestRun()
        options.sz = ctypes.sizeof(options)
        options.ctx_in, options.ctx_size_in = ctypes.addressof(context), ctypes.sizeof(context)
        self._check(self._lib.bpf_prog_test_run_opts(self.program_fd(program), ctypes.byref(options)))
        return int(options.retval)

    def iterate(self, program: str) -> bytes:
        link = self._lib.bpf_program__attach_iter(self._programs[program], None)
        if not link:
            raise LoadFailure(ctypes.get_errno() or errno.EINVAL, program)
        try:
            fd = self._check(self._lib.bpf_iter_create(self._lib.bpf_link__fd(link)))
            with open(fd, "rb") as output:
                return output.read()
        finally:
            self._lib.bpf_link__destroy(link)

    def put(self, name: str, key: bytes, value: bytes) -> None:
        self._check(self._lib.bpf_map_update_elem(self.map_fd(name), key, value, 0))

    def read(self, name: str, key: bytes, size: int) -> bytes:
        value = ctypes.create_string_buffer(size)
        self._check(self._lib.bpf_map_lookup_elem(self.map_fd(name), key, value))
        return value.raw

    def remove(self, name: str, key: bytes) -> None:
        self._lib.bpf_map_delete_elem(self.map_fd(name), key)

    def misses(self, program: str) -> int:
        """Return how often the kernel skipped `program` because it was running on that CPU already."""
        info = (ctypes.c_uint64 * 40)()  # struct bpf_prog_info; recursion_misses is its 27th word
        size = ctypes.c_uint32(ctypes.sizeof(info))
        self._check(self._lib.bpf_obj_get_info_by_fd(self.program_fd(program), info, ctypes.byref(size)))
        return int(info[26]) if size.value >= 27 * 8 else 0

    def detach(self) -> None:
        while self._links:
            self._lib.bpf_link__destroy(self._links.pop())

    def close(self) -> None:
        self.detach()
        if self._object:
            self._lib.bpf_object__close(self._object)
        self._object = None

    def _check(self, result: int) -> int:
        if result < 0:
            raise self._failure(result)
        return int(result)
