"""Parts of a recording that need no privileges: journal, file names, mappings, options, bytes locked by a mount."""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from llmcache.cache.classify import LockedLoop, TraceClasses, classify
from llmcache.errors import DataError, MissingRequirement, MountProblem, UsageError
from llmcache.mount.client import control, mountpoint
from llmcache.procfs import FileMapping, Mount, mappings
from llmcache.report.classify import summary
from llmcache.trace import files
from llmcache.trace.faults import FORK, MMAP, AddressSpace, AddressSpaces
from llmcache.trace.files import FileTable, LockedBytes
from llmcache.trace.formats import open_trace
from llmcache.trace.formats.recording import RecordingWriter, recording_of
from llmcache.trace.processes import target_of
from llmcache.trace.record import (
    LOCKED,
    MAP,
    Columns,
    Provenance,
    Trace,
    TraceFile,
    columns_from,
    locked_bytes,
    locked_extra,
)
from tests.unit import top_parts

PROVENANCE = Provenance("filemap", note="Sees all.")


def batch(start_ns: int, file: int) -> Columns:
    return columns_from({"t_ns": np.arange(5) + start_ns, "file": file, "first": np.arange(5), "count": 1})


def written(path: Path) -> RecordingWriter:
    """Write a journal of three batches, each with a new file, as a killed recorder leaves it."""
    journal = RecordingWriter(recording_of(path), PROVENANCE, force=False)
    for number in range(3):
        journal.append(batch(10 * number, number), [TraceFile(number, f"/data/{number}", 1, number, 0, 0)], number)
    return journal


def test_a_truncated_or_damaged_journal_is_readable(tmp_path: Path) -> None:
    journal = written(tmp_path / "run.parquet")
    path, whole = journal.path, journal.path.read_bytes()
    with open_trace(path) as found:
        assert found.rows == 15 and "cut short" in found.provenance.note
        assert [file.path for file in found.files] == ["/data/0", "/data/1", "/data/2"]
        assert found.provenance.lost_events == 2
    rows = set()
    for cut in range(len(whole) - 1, len(whole) - 1200, -31):
        path.write_bytes(whole[:cut])
        with open_trace(path) as found:
            rows.add(found.rows)
            assert np.array_equal(found.read().t_ns[:5], np.arange(5))
    assert rows <= {5, 10} and 10 in rows
    path.write_bytes(whole)
    journal.close()
    with open_trace(path) as found:
        assert found.provenance.note == PROVENANCE.note, "it is complete"
    whole = path.read_bytes()
    for at in range(len(whole) - 1000, len(whole) - 100, 31):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with suppress(DataError), open_trace(path) as found:
            assert found.rows == 15, "damage is not taken for the end"


def test_layers_of_an_overlay_are_listed() -> None:
    options = "rw,lowerdir=/a\\:b:/c,upperdir=/up,workdir=/w"
    mount = Mount(1, 0, "/", "/merged", "overlay", options)
    assert list(mount.layers("/merged/x/y")) == ["/up/x/y", "/a:b/x/y", "/c/x/y"]
    assert not list(Mount(1, 0, "/", "/merged", "ext4", options).layers("/merged/x"))


def test_open_deleted_and_unknown_files_have_names(tmp_path: Path) -> None:
    kept, gone = tmp_path / "kept", tmp_path / "gone (deleted)"
    kept.write_bytes(b"x" * 5000)
    gone.write_bytes(b"y" * 100)
    with kept.open("rb") as first, gone.open("rb") as second:
        stats = [os.fstat(first.fileno()), os.fstat(second.fileno())]
        gone.unlink()
        names = FileTable([os.getpid()])
        dev = np.array([stats[0].st_dev, stats[1].st_dev, stats[0].st_dev, 12345], np.uint64)
        inode = np.array([stats[0].st_ino, stats[1].st_ino, stats[0].st_ino, 77], np.uint64)
        ids = names.numbers(dev, inode, np.full(4, os.getpid(), np.uint32))
        by_id = {file.id: file for file in names.files}
        assert [by_id[number].path for number in ids.tolist()[:3]] == [str(kept), str(gone), str(kept)]
        assert by_id[int(ids[0])].size_bytes == 5000
        assert by_id[int(ids[3])].path == f"[{os.major(12345)}:{os.minor(12345)} inode 77]"
        kept.rename(tmp_path / "renamed")
        names.finish()
        assert names.unnamed == 1
        assert {file.path for file in names.files} >= {str(tmp_path / "renamed"), str(gone)}


def test_a_closed_file_is_named_when_it_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "path_of", lambda *_: None)  # FUSE cannot open files by inode
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(9000))
    stat = path.stat()
    row = np.array([stat.st_dev], np.uint64), np.array([stat.st_ino], np.uint64), np.array([os.getpid()], np.uint32)
    names = FileTable([os.getpid()])
    first = names.numbers(*row)
    assert names.files[0].path.startswith("[") and names.changes == 0
    with path.open("rb"):
        assert names.numbers(*row).tolist() == first.tolist()
    assert (names.files[0].path, names.files[0].size_bytes, names.changes) == (str(path), 9000, 1)
    names.numbers(*row)
    assert len(names.files) == names.changes == 1
    names.finish()
    assert names.unnamed == 0


def test_a_new_mapping_replaces_the_range_that_it_covers() -> None:
    space = AddressSpace([FileMapping(0x1000, 0x9000, 1, 10, 0, "")])
    space.put(FileMapping(0x3000, 0x5000, 1, 20, 7, ""))
    address = np.array([0x1000, 0x2FFF, 0x3000, 0x4FFF, 0x5000, 0x8FFF, 0x9000, 0x0], np.uint64)
    _, inode, block = space.files(address)
    assert inode.tolist() == [10, 10, 20, 20, 10, 10, 0, 0]
    assert block.tolist()[:6] == [0, 1, 7, 8, 4, 7]
    space.put(FileMapping(0x2000, 0x9000, 1, 30, 1, ""))
    assert space.files(address)[1].tolist() == [10, 30, 30, 30, 30, 30, 0, 0]


def test_faults_belong_to_the_mapping_at_their_time() -> None:
    paths: dict[tuple[int, int], str] = {}
    spaces = AddressSpaces(paths)
    time = struct.Struct("<IIQ")

    def mapped(pid: int, inode: int, t_ns: int) -> bytes:
        head = struct.pack("<IIQQQIIQQII", pid, pid, 0x1000, 0x1000, 0x2000, 8, 1, inode, 0, 0, 0)
        return head + b"/data/file\0\0\0\0\0\0" + time.pack(pid, pid, t_ns)

    for number, t_ns in ((5, 10), (6, 20)):
        spaces.note(MMAP, mapped(9, number, t_ns))
    spaces.note(FORK, struct.pack("<IIIIQ", 11, 9, 11, 9, 30) + time.pack(9, 9, 30))
    pid = np.array([9, 9, 11], np.uint64)
    dev, inode, block = spaces.files(pid, np.array([15, 25, 35], np.uint64), np.full(3, 0x1000, np.uint64))
    assert inode.tolist() == [5, 6, 6] and block.tolist() == [2, 2, 2]
    assert set(dev.tolist()) == {os.makedev(8, 1)}
    assert paths[os.makedev(8, 1), 6] == "/data/file"


def answering(program: Path) -> subprocess.Popen[bytes]:
    """Start a copy of cat and wait for a reply, because before exec it does not have its own name."""
    process = subprocess.Popen([program, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"x")
    assert process.stdout.read(1) == b"x"
    return process


def test_a_process_is_found_by_name(tmp_path: Path) -> None:
    name = f"model-{os.getpid()}-server"  # longer than the process name in the kernel
    shutil.copy(shutil.which("cat") or "", tmp_path / name)
    with pytest.raises(MissingRequirement, match=f"no process is called '{name}'") as missing:
        target_of((name,))
    assert missing.value.hint is not None and f"llmcache trace -- {name}" in missing.value.hint
    with pytest.raises(UsageError) as refused:
        target_of(("sleep", "600"))
    assert refused.value.hint is not None and "llmcache trace -- sleep 600" in refused.value.hint
    with ExitStack() as stack:
        running = []
        for _ in range(2):
            running.append(stack.enter_context(answering(tmp_path / name)))
            stack.callback(running[-1].kill)
            if len(running) == 1:
                assert [target_of((known,)).pid for known in (name, name[:15])] == [running[0].pid] * 2, "as ps shows it"
        with pytest.raises(UsageError) as several:
            target_of((name,))
        assert all(f"{one.pid} ({tmp_path / name}"[:60] in several.value.message for one in running)


BLOCK = 4096
FILE = TraceFile(0, "/mnt/models/m.gguf", 0x2B, 7, 0, 1000 * BLOCK)
OTHER = TraceFile(1, "/etc/hosts", 1, 8, 0, BLOCK)


def passes(extra: str, shown_blocks: int = 600) -> TraceClasses:
    """Return the classes of six passes over the first blocks of FILE in rows of 100, with locked bytes in `extra`."""
    first = [block for _ in range(6) for block in range(0, shown_blocks, 100)]
    times = [number * 10**8 for number in range(len(first))]
    provenance = Provenance("test", extra={LOCKED: extra} if extra else {})
    return classify(Trace.build(times, 0, first, 100, MAP, files=[FILE, OTHER], provenance=provenance).batches())


def test_locked_bytes_are_added_to_the_loop() -> None:
    found = passes(locked_extra({0: 300 * BLOCK, 1: BLOCK}))
    assert found.locked == (LockedLoop(FILE.path, 300 * BLOCK),), "bytes outside loops are not counted"
    assert (found.totals.loop_at_once_bytes, found.totals.locked_loop_bytes) == (600 * BLOCK, 300 * BLOCK)
    assert found.size_command == f"llmcache size --loop {900 * BLOCK / 1e6:.10g}M --hot 0M"
    assert found.document("t")["locked"] == [{"path": FILE.path, "bytes": 300 * BLOCK}]
    assert any("1.23 MB of /mnt/models/m.gguf, locked by its mount" in line for line in summary(found))


def test_locked_bytes_are_the_smaller_of_two_replies() -> None:
    answers = {FILE.path: [500, 300], OTHER.path: [0]}
    locked = LockedBytes(lambda file: answers[file.path].pop(0))
    locked.begin([FILE, OTHER])
    locked.begin([FILE])
    locked.finish([FILE, OTHER])
    assert locked.by_file == {0: 300} and "300 B" in locked.remarks[0]
    silent = LockedBytes(Mock(side_effect=MountProblem("the daemon does not answer")))
    silent.begin([FILE])
    silent.finish([FILE])
    said = f"{FILE.path}: the bytes that its mount has pinned are unknown: the daemon does not answer"
    assert silent.by_file == {} and silent.remarks == [said]


def test_recorded_locked_bytes_are_validated() -> None:
    assert locked_extra({}) == "" and passes("").locked == () and locked_bytes(Provenance("test")) == {}
    for text in ("[1]", "{", '{"x": 1}', '{"0": []}'):
        with pytest.raises(DataError, match="locked_bytes"):
            locked_bytes(Provenance("test", extra={LOCKED: text}))


@pytest.mark.parametrize(("mode", "expected"), [("steer", 300), ("arena", 0)])
def test_locked_bytes_come_from_the_mount_of_the_file(monkeypatch: pytest.MonkeyPatch, mode: str, expected: int) -> None:
    mount = Mount(30, 0x2B, "/", "/mnt/models", mountpoint.FSTYPE, "user_id=0")
    files = [
        top_parts.file("/m.gguf", top_parts.loop(pinned_bytes=300)),
        top_parts.file("/n.gguf", top_parts.loop(pinned_bytes=9)),
    ]
    request = Mock(return_value=top_parts.stats(mode=mode, files=files))
    monkeypatch.setattr(mountpoint, "mounts", lambda: {29: replace(mount, dev=0x2A, point="/else"), 30: mount})
    monkeypatch.setattr(control, "request", request)
    assert mountpoint.locked_bytes(FILE) == expected and mountpoint.locked_bytes(OTHER) == 0
    assert [call.args for call in request.call_args_list] == [("/mnt/models", {"op": "stats"})]
    request.return_value = top_parts.stats(files=[{}])
    with pytest.raises(MountProblem, match="does not understand"):
        mountpoint.locked_bytes(FILE)


def test_an_in_place_mount_is_found_from_both_of_its_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    mount = Mount(30, FILE.dev, "/", "/mnt/models", mountpoint.IN_PLACE, "rw")
    document = top_parts.stats(mode="inplace", files=[top_parts.file("/m.gguf", top_parts.loop(pinned_bytes=300))])
    monkeypatch.setattr(mountpoint, "mounts", dict)
    monkeypatch.setattr(mountpoint, "find", lambda _point: mount)
    monkeypatch.setattr(control, "root_points", lambda: {"/mnt/models": {"source": "/srv"}})
    monkeypatch.setattr(control, "request", lambda *_, **__: document)
    found = {path: mountpoint.locked_bytes(replace(FILE, path=path)) for path in (FILE.path, "/srv/m.gguf", "/srv2/m.gguf")}
    assert list(found.values()) == [300, 300, 0]


def test_names_of_mappings_may_contain_line_breaks() -> None:
    """The kernel escapes line feeds in maps but not carriage returns, which any file name may contain."""
    fd = os.memfd_create("a\rb")
    os.ftruncate(fd, 4096)
    with mmap.mmap(fd, 4096):
        assert "/memfd:a\rb (deleted)" in [part.path for part in mappings(os.getpid())]
    os.close(fd)
