"""The parts of a recording that need no privilege: journal, mounts, names, options."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from llmcache.errors import DataError, EnvironmentProblem, UsageError
from llmcache.mountinfo import Mount
from llmcache.trace import files
from llmcache.trace.capture import CaptureSettings
from llmcache.trace.files import FileTable
from llmcache.trace.formats import open_trace
from llmcache.trace.formats.recording import RecordingWriter, recording_of
from llmcache.trace.processes import target_of
from llmcache.trace.record import Columns, Provenance, TraceFile, columns_from

PROVENANCE = Provenance("filemap", note="Sees all.")


def batch(start_ns: int, file: int) -> Columns:
    return columns_from({"t_ns": np.arange(5) + start_ns, "file": file, "first": np.arange(5), "count": 1})


def written(path: Path) -> RecordingWriter:
    """A journal of three batches, as a recorder that was killed leaves it; each batch brings a file."""
    journal = RecordingWriter(recording_of(path), PROVENANCE, force=False)
    for number in range(3):
        journal.append(batch(10 * number, number), [TraceFile(number, f"/data/{number}", 1, number, 0, 0)], number)
    return journal


def test_a_journal_is_readable_however_it_ends(tmp_path: Path) -> None:
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
        assert found.provenance.note == PROVENANCE.note, "it was not cut short"


def test_a_journal_that_exists_is_not_overwritten_and_what_is_none_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "run.parquet").path
    with pytest.raises(UsageError, match="exists"):
        RecordingWriter(path, PROVENANCE, force=False)
    path.write_bytes(b"not arrow at all")
    with pytest.raises(DataError, match=r"run\.parquet\.recording"):
        open_trace(path)


def test_layers_of_an_overlay() -> None:
    options = "rw,lowerdir=/a\\:b:/c,upperdir=/up,workdir=/w"
    mount = Mount(1, 0, "/", "/merged", "overlay", options)
    assert list(mount.layers("/merged/x/y")) == ["/up/x/y", "/a:b/x/y", "/c/x/y"]
    assert not list(Mount(1, 0, "/", "/merged", "ext4", options).layers("/merged/x"))


def test_names_of_open_deleted_and_unknown_files(tmp_path: Path) -> None:
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


def test_a_file_that_was_closed_is_named_when_it_is_seen_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "path_of", lambda *_: None)  # as on FUSE, which cannot open files by inode
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


def test_options_that_cannot_be() -> None:
    for wrong, named in (({"output": "x.csv"}, "-o"), ({"seconds": 0.0}, "-d"), ({"rerefs_s": 0.0}, "--mmap-rerefs")):
        with pytest.raises(UsageError, match=named):
            CaptureSettings(**{"output": "x.parquet", **wrong})  # type: ignore[arg-type]


def answering(program: Path) -> subprocess.Popen[bytes]:
    """A process of a copy of cat, once it has answered: until it is executed it has no name of its own."""
    process = subprocess.Popen([program, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"x")
    assert process.stdout.read(1) == b"x"
    return process


def test_a_process_is_found_by_its_name(tmp_path: Path) -> None:
    name = f"model-{os.getpid()}-server"  # longer than the kernel's name of a process
    shutil.copy(shutil.which("cat") or "", tmp_path / name)
    with pytest.raises(EnvironmentProblem, match=f"no process is called '{name}'") as missing:
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
