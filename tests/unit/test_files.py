"""Files of llmcache: private whatever the umask, safe against links planted at their names, complete, and synced."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmcache import files
from llmcache.cache.plan import Plan
from llmcache.cache.simulate import simulate_all
from llmcache.errors import MissingRequirement
from llmcache.files import create
from llmcache.kv.index import dci
from llmcache.kv.spill import KvShape, SpillFile
from llmcache.kv.tiers.table import Tables
from llmcache.model.modelfile import ModelHeaders
from llmcache.mount.client import control
from llmcache.report.plot import plot
from llmcache.report.simulate_page import write_report
from llmcache.trace.formats import convert
from llmcache.trace.formats.recording import RecordingWriter, recording_of
from llmcache.trace.formats.recording import read as read_recording
from llmcache.trace.record import Provenance, TraceWriter
from tests.unit.report_parts import recorded

ROOT = Path(__file__).resolve().parents[2]


def journal(path: Path) -> None:
    RecordingWriter(path, Provenance(tier="faults"), force=False).close()


def trace(path: Path) -> None:
    with TraceWriter(path):
        pass


def converted(path: Path) -> None:
    convert(ROOT / "traces" / "read-loop.parquet", path.with_suffix(".csv"))


def picture(path: Path) -> None:
    drawn, page = ROOT / "traces" / "read-loop.parquet", path.with_suffix(".html")
    plot(str(drawn), str(page), lambda files: ModelHeaders((), files), lambda trace, done, in_all: None)


def report(path: Path) -> None:
    write_report(str(path), simulate_all([recorded()], Plan(("lru",), (1 << 20,))), force=False)


def indexes(path: Path) -> None:
    dci.save_indexes(path, {}, {"spill": "x"})


def page_tables(path: Path) -> None:
    Tables([[(0, 3)]]).write(path)


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.parametrize("write", [journal, trace, converted, picture, report, indexes, page_tables])
def test_written_files_are_private(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path / "file.kv")
    (made,) = tmp_path.iterdir()
    assert stat.S_IMODE(made.stat().st_mode) == 0o600


@pytest.mark.parametrize("write", [trace, indexes, page_tables])
def test_links_at_the_temporary_name_are_not_followed(tmp_path: Path, write: Callable[[Path], None]) -> None:
    target = tmp_path / "target"
    target.write_text("untouched")
    directory = tmp_path / "shared"
    directory.mkdir()
    pid = os.getpid()
    for name in (f"new-{pid}-file.kv", f"new-{pid}-tables-file.kv"):
        (directory / name).symlink_to(target)
    write(directory / "file.kv")
    assert target.read_text() == "untouched"


@pytest.mark.parametrize("write", [trace, converted, picture, report, indexes, page_tables])
def test_a_new_file_that_is_replaced_by_a_link_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None]
) -> None:
    """Another user with write access to the directory could redirect a write of root with a link."""
    target, directory = tmp_path / "target", tmp_path / "directory"
    target.write_text("untouched")
    directory.mkdir()
    made = files.create

    def replaced(path: Path, mode: int = files.PRIVATE) -> int:
        fd = made(path, mode)
        os.unlink(path)
        os.symlink(target, path)
        return fd

    monkeypatch.setattr(files, "create", replaced)
    with pytest.raises((OSError, MissingRequirement), match="has replaced the file"):
        write(directory / "file.kv")
    assert target.read_text() == "untouched" and not list(directory.iterdir())


def test_a_recording_is_read_from_its_open_file(tmp_path: Path) -> None:
    path = recording_of(tmp_path / "file.parquet")
    recording = RecordingWriter(path, Provenance(tier="faults"), force=False)
    recording.close()
    path.unlink()
    os.mkfifo(path)
    with TraceWriter(tmp_path / "file.parquet") as writer:
        read_recording(recording.opened, writer)
    recording.discard()
    assert [item.name for item in tmp_path.iterdir()] == ["file.parquet"]


def test_create_replaces_an_old_file(tmp_path: Path) -> None:
    old = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR, 0o666)
    new = create(tmp_path / "file")
    os.write(old, b"an earlier open does not see the new content")
    assert os.fstat(new).st_size == 0 and stat.S_IMODE(os.fstat(new).st_mode) == 0o600
    for fd in (old, new):
        os.close(fd)


def removed_tables(path: Path) -> None:
    Tables([[(0, 3)]]).write(path)
    Tables.remove(path)


def new_spill_file(path: Path) -> None:
    SpillFile.create(path, KvShape("tiny", 1, 1, 8)).close()


def control_info(path: Path) -> None:
    control.ControlFiles(str(path), os.geteuid()).write_info({"pid": 1})


@pytest.mark.parametrize("write", [trace, indexes, page_tables, removed_tables, new_spill_file, control_info])
def test_files_and_directories_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None]
) -> None:
    """A file is synced before it gets its name, and the directory after the last change of a name in it."""
    events: list[str] = []

    def noted(call: Callable[..., None]) -> Callable[..., None]:
        def noting(*arguments: Any, **named: Any) -> None:
            call(*arguments, **named)
            if call.__name__ in ("fsync", "fdatasync"):
                events.append("directory" if stat.S_ISDIR(os.fstat(arguments[0]).st_mode) else "file")
            else:
                events.append("name")

        return noting

    for module, name in ((os, "fsync"), (os, "fdatasync"), (os, "replace"), (os, "unlink"), (files, "renameat2")):
        monkeypatch.setattr(module, name, noted(getattr(module, name)))
    write(tmp_path / "file.kv")
    named = [place for place, event in enumerate(events) if event == "name"]
    assert "file" in events[: named[0]] and "directory" in events[named[-1] :]


def test_rename_does_not_replace_an_existing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds on file systems without RENAME_NOREPLACE too."""
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
    with pytest.raises(FileExistsError):
        files.rename(tmp_path / "one", tmp_path / "two", replace=False)

    def no_such_call(*arguments: Any) -> None:
        raise OSError(errno.EINVAL, "no flags here")

    monkeypatch.setattr(files, "renameat2", no_such_call)
    with pytest.raises(FileExistsError):
        files.rename(tmp_path / "one", tmp_path / "two", replace=False)
    files.rename(tmp_path / "one", tmp_path / "three", replace=False)
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == ["one", "two"]
    assert sorted(os.listdir(tmp_path)) == ["three", "two"]
