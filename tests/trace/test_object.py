"""The compiled BPF object: codes match those in Python, a rebuilt one is equivalent, and programs end with the process."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llmcache.bpf import libbpf
from llmcache.trace import kernel
from llmcache.trace.records import FILL
from tests.mount.live import wait_for
from tests.trace.conftest import TOUCHED, Recording, warm

# Kinds of types in BTF.
_INT, _ARRAY, _STRUCT, _UNION, _ENUM = 1, 3, 4, 5, 6
_FUNC_PROTO, _VAR, _DATASEC, _DECL_TAG, _ENUM64 = 13, 14, 15, 17, 19


def older_counters(raw: bytes) -> bytes:
    """Return the BTF of a kernel with the counters of `struct mm_struct` as before Linux 6.2: words in a structure."""
    head = struct.unpack_from("<HBBIIIII", raw)
    types, text = bytearray(raw[head[3] + head[4] :][: head[5]]), raw[head[3] + head[6] :][: head[7]]
    name, new_text = text.index(b"\0rss_stat\0") + 1, text + b"count\0counter\0"
    at, number, word, members, arrays = 0, 0, 0, [], set()
    while at < len(types):
        number += 1
        _, info, size = struct.unpack_from("<III", types, at)
        kind, count = info >> 24 & 31, info & 0xFFFF
        per_element = {_STRUCT: 12, _UNION: 12, _ENUM: 8, _FUNC_PROTO: 8, _DATASEC: 12, _ENUM64: 12}.get(kind, 0) * count
        if kind == _INT and size == 8:
            word = number
        elif kind == _ARRAY:
            arrays.add(number)
        elif kind == _STRUCT:
            offsets = range(at + 12, at + 12 + per_element, 12)
            members += [offset for offset in offsets if struct.unpack_from("<I", types, offset)[0] == name]
        at += 12 + {_INT: 4, _ARRAY: 12, _VAR: 4, _DECL_TAG: 4}.get(kind, per_element)
    changed = [offset for offset in members if struct.unpack_from("<I", types, offset + 4)[0] in arrays]
    assert len(changed) == 1, "the kernel's counters have an unknown form"
    struct.pack_into("<I", types, changed[0] + 4, number + 3)
    types += struct.pack("<IIIIII", 0, _STRUCT << 24 | 1, 8, len(text) + 6, word, 0)
    types += struct.pack("<IIIIII", 0, _ARRAY << 24, 0, number + 1, word, 4)
    types += struct.pack("<IIIIII", 0, _STRUCT << 24 | 1, 32, len(text), number + 2, 0)
    return struct.pack("<HBBIIIII", *head[:3], 24, 0, len(types), len(types), len(new_text)) + bytes(types) + new_text


class _OpenOptions(ctypes.Structure):
    """struct bpf_object_open_opts, up to the path of the BTF to relocate against instead of the running kernel's."""

    _fields_ = (
        ("sz", ctypes.c_size_t),
        ("object_name", ctypes.c_char_p),
        ("relaxed_maps", ctypes.c_bool),
        ("pin_root_path", ctypes.c_char_p),
        ("spare", ctypes.c_uint64),
        ("kconfig", ctypes.c_char_p),
        ("btf_custom_path", ctypes.c_char_p),
    )


ROOT = Path(__file__).resolve().parents[2]
BPF = 321 if os.uname().machine == "x86_64" else 280
PROGRAM_BY_ID, LINK_BY_ID = 13, 30


def test_codes_match_the_source() -> None:
    source = (ROOT / "bpf" / "record.h").read_text()
    assert "enum { READ, WRITE, MAP };" in source
    assert "enum { ACCESS, FILL, EVICT, BLOCK, SAMPLED };" in source
    assert "enum { DIRECT = 1, AROUND = 2, STORED = 4, MATCHED = 8, COPIED = 16 };" in source
    reasons = re.findall(r"LOST_\w+", re.search(r"enum \{ (LOST_.*) LOSSES", source)[1])  # type: ignore[index]
    assert len(reasons) == len(kernel.LOSSES)


@pytest.mark.filemap
@pytest.mark.parametrize("older", [False, True])
def test_the_page_fault_programs_load_before_linux_6_2(older: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    btf = Path("/sys/kernel/btf/vmlinux").read_bytes()
    (tmp_path / "btf").write_bytes(older_counters(btf) if older else btf)
    options = _OpenOptions(ctypes.sizeof(_OpenOptions), btf_custom_path=os.fsencode(tmp_path / "btf"))
    open_file = libbpf.library().bpf_object__open_file
    monkeypatch.setattr(libbpf.library(), "bpf_object__open_file", lambda path, _: open_file(path, ctypes.byref(options)))
    loaded = libbpf.BpfObject(kernel.OBJECT)
    try:
        loaded.load(["touched", "touched_in_call", "mapped"])
    finally:
        loaded.close()


@pytest.mark.clang
@pytest.mark.filemap
def test_a_rebuilt_object_behaves_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: Callable[..., Recording], file: Path
) -> None:
    subprocess.run([ROOT / "bpf" / "build", tmp_path], check=True)
    shipped = record("pread")
    monkeypatch.setattr(kernel, "OBJECT", tmp_path / kernel.OBJECT.name)
    rebuilt = record("preadv")
    for found in (shipped, rebuilt):
        assert sorted(found.blocks()) == TOUCHED
        assert found.requests == 23
    warm(file)
    assert not len(record("sequential").kind(FILL))


def _exists(command: int, number: int) -> bool:
    """Return whether the kernel still has the program or link."""
    attributes = (ctypes.c_uint32 * 32)(number)
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(ctypes.c_long(BPF), ctypes.c_int(command), attributes, ctypes.c_uint(ctypes.sizeof(attributes)))
    if fd < 0:
        assert ctypes.get_errno() == 2, os.strerror(ctypes.get_errno())
        return False
    os.close(fd)
    return True


def _open_ids(pid: int) -> dict[int, set[int]]:
    """Return the ids of the programs and links that a process has open."""
    found: dict[int, set[int]] = {PROGRAM_BY_ID: set(), LINK_BY_ID: set()}
    for entry in Path(f"/proc/{pid}/fdinfo").iterdir():
        text = entry.read_text()
        for command, pattern in ((PROGRAM_BY_ID, r"^prog_id:\s*(\d+)"), (LINK_BY_ID, r"^link_id:\s*(\d+)")):
            found[command] |= {int(number) for number in re.findall(pattern, text, re.MULTILINE)}
    return found


@pytest.mark.filemap
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_stays_attached_when_the_recorder_is_killed(number: signal.Signals) -> None:
    script = (
        "import os,time\n"
        "from llmcache.trace.kernel import FilemapSource\n"
        "from llmcache.trace.records import Scope\n"
        "s = FilemapSource()\n"
        "s.start(Scope([os.getppid()], writes=True, block=True))\n"
        "print('started', flush=True)\n"
        "time.sleep(300)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT) as recorder:
        assert recorder.stdout is not None
        assert recorder.stdout.readline() == "started\n"
        open_ids = _open_ids(recorder.pid)
        assert len(open_ids[LINK_BY_ID]) >= 10
        assert len(open_ids[PROGRAM_BY_ID]) >= 10
        assert all(_exists(command, one) for command, numbers in open_ids.items() for one in numbers)
        recorder.send_signal(number)
        recorder.wait()
    # The kernel frees them after a grace period.
    wait_for(
        lambda: not any(_exists(command, one) for command, numbers in open_ids.items() for one in numbers),
        "programs and links are freed",
    )
