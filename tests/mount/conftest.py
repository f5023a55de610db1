"""Mounts made through the command line, as a user makes them; ended by pid and unmounted whatever a test does."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from llmcache.fs import syscalls
from llmcache.fs.client import control, mountpoint
from tests.mount.live import llmcache

PATIENCE_S = 60.0
USUAL = {"--mode": "steer", "--cache": "32Mi"}


@dataclass
class Mounted:
    """A mount that a daemon in the background serves, or a directory of one that several tests share."""

    source: Path
    point: Path
    whole: Mounted | None = None  # what the directory is in
    logged: int = 0  # characters of the log that are of tests before

    @property
    def files(self) -> control.ControlFiles:
        """The daemon's files."""
        return control.files(str((self.whole or self).point))

    @property
    def pid(self) -> int:
        """The daemon's process id."""
        return int(self.files.describe()["pid"])

    def log(self) -> str:
        """What the daemon logged so far."""
        return Path(self.files.log).read_text()[self.logged :]

    def directory(self, name: str) -> Mounted:
        """An empty directory of the mount, for one test."""
        (self.source / name).mkdir()
        return Mounted(self.source / name, self.point / name, self, len(self.log()))


@dataclass
class Mounter:
    """Makes mounts; every one is ended at the end of the test."""

    directory: Path
    made: list[Mounted] = field(default_factory=list)

    def __call__(self, *options: str, source: Path | None = None, point: Path | None = None) -> Mounted:
        """Mount `source` (default: tmp/source) on `point` (default: tmp/mnt), in steer unless `options` say otherwise."""
        mounted = self.place(source, point)
        usual = (f"{word}={value}" for word, value in USUAL.items() if word not in options)
        result = llmcache("mount", mounted.source, mounted.point, *usual, *options)
        assert result.returncode == 0, result.stderr
        return mounted

    def place(self, source: Path | None = None, point: Path | None = None) -> Mounted:
        """The same directories, for a test that mounts by itself."""
        mounted = Mounted(source or self.directory / "source", point or self.directory / "mnt")
        mounted.source.mkdir(exist_ok=True)
        mounted.point.mkdir(exist_ok=True)
        self.made.append(mounted)
        return mounted

    def end(self) -> None:
        """End what still lives, whatever state it is in."""
        for mounted in self.made:
            pid = control.daemon_pid(str(mounted.point))
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
                if not control.wait_until_gone(mounted.files, PATIENCE_S):
                    os.kill(pid, signal.SIGKILL)
                    control.wait_until_gone(mounted.files, PATIENCE_S)
            while mountpoint.find(str(mounted.point)) is not None:
                syscalls.umount2(str(mounted.point), syscalls.MNT_DETACH)
            mounted.files.remove()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(mounted.files.log)


@contextlib.contextmanager
def mounting(directory: Path) -> Iterator[Mounter]:
    """What mounts in `directory`, and ends it all; a traceback in a daemon's log fails whoever asked."""
    mounter = Mounter(directory)
    logs: Callable[[], Sequence[str]] = lambda: [  # noqa: E731 - read before end() removes them
        mounted.log() for mounted in mounter.made if os.path.exists(mounted.files.log)
    ]
    try:
        yield mounter
        said = logs()
    finally:
        mounter.end()
    assert not [text for text in said if "Traceback" in text or "unexpected error" in text], said


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mounter]:
    """A function that mounts."""
    with mounting(tmp_path) as mounter:
        yield mounter


@pytest.fixture(scope="module", params=["steer", "arena"])
def mode(request: pytest.FixtureRequest) -> str:
    """Both ways of holding data; steer needs locked memory."""
    if request.param == "steer" and os.geteuid() != 0:
        pytest.skip("steer needs the right to lock memory")
    return str(request.param)


@pytest.fixture(scope="module")
def readable(mode: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    """A mount with the default rights (only *.kv may be written)."""
    with mounting(tmp_path_factory.mktemp("readable")) as mounter:
        yield mounter("--mode", mode)


@pytest.fixture(scope="module")
def writable(mode: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    """A mount on which everything may be written."""
    with mounting(tmp_path_factory.mktemp("writable")) as mounter:
        yield mounter("--mode", mode, "--rw")


@pytest.fixture
def reading(readable: Mounted, tmp_path: Path) -> Mounted:
    """A directory, with the default rights, of a mount that the tests of a module share."""
    return readable.directory(tmp_path.name)


@pytest.fixture
def writing(writable: Mounted, tmp_path: Path) -> Mounted:
    """The same where everything may be written."""
    return writable.directory(tmp_path.name)
