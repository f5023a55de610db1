"""Fixtures that mount through the command line, as a user does, and always end the daemon and unmount."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from llmcache.mount import syscalls
from llmcache.mount.client import control, mountpoint
from tests.mount.live import llmcache, run_json

PATIENCE_S = 60.0
USUAL = {"--mode": "steer", "--cache": "32Mi"}


@dataclass
class Mounted:
    """A mount served by a background daemon, or a directory of a mount that several tests share."""

    source: Path
    point: Path
    whole: Mounted | None = None  # the mount that contains this directory
    logged: int = 0  # length of the log before this test started

    @property
    def files(self) -> control.ControlFiles:
        return control.files(str((self.whole or self).point))

    @property
    def pid(self) -> int:
        return int(self.files.describe()["pid"])

    def stats(self) -> dict[str, Any]:
        """Return the counters that `llmcache stats --json` prints."""
        return run_json("stats", self.point)

    def know(self) -> None:
        """Return once the mount has found every file: it does not count earlier reads, whose pages stay cached."""
        control.request(str(self.point), {"op": "warmup", "check": True})

    def log(self) -> str:
        """Return the daemon's log since the test started."""
        return Path(self.files.log).read_text()[self.logged :]

    def directory(self, name: str) -> Mounted:
        """Create an empty directory in the mount, for one test."""
        (self.source / name).mkdir()
        return Mounted(self.source / name, self.point / name, self, len(self.log()))


@dataclass
class Mounter:
    """Creates mounts and ends all of them at the end of the test."""

    directory: Path
    made: list[Mounted] = field(default_factory=list)

    def __call__(self, *options: str, source: Path | None = None, point: Path | None = None) -> Mounted:
        """Mount `source` (default: tmp/source) on `point` (default: tmp/mnt), in mode steer unless `options` set another."""
        mounted = self.place(source, point)
        usual = (f"{word}={value}" for word, value in USUAL.items() if word not in options)
        result = llmcache("mount", mounted.source, mounted.point, *usual, *options)
        assert result.returncode == 0, result.stderr
        return mounted

    def place(self, source: Path | None = None, point: Path | None = None) -> Mounted:
        """Create the same directories for a test that mounts by itself."""
        mounted = Mounted(source or self.directory / "source", point or self.directory / "mnt")
        mounted.source.mkdir(exist_ok=True)
        mounted.point.mkdir(exist_ok=True)
        self.made.append(mounted)
        return mounted

    def end(self) -> None:
        """End the remaining daemons and mounts, whatever their state."""
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
    """Yield a Mounter for `directory` and end its mounts; fail if a daemon logged a traceback."""
    mounter = Mounter(directory)
    logs: Callable[[], Sequence[str]] = lambda: [  # noqa: E731 - read before end() removes them
        mounted.log() for mounted in mounter.made if os.path.exists(mounted.files.log)
    ]
    try:
        yield mounter
        texts = logs()
    finally:
        mounter.end()
    assert not [text for text in texts if "Traceback" in text or "unexpected error" in text], texts


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mounter]:
    with mounting(tmp_path) as mounter:
        yield mounter


@pytest.fixture
def places(mount: Mounter) -> tuple[Path, Path]:
    """Valid (SOURCE, MOUNT), for a test that mounts by itself."""
    own = mount.place()
    return own.source, own.point


@pytest.fixture(scope="module", params=["steer", "arena"])
def mode(request: pytest.FixtureRequest) -> str:
    """Run a test in both modes; steer needs the right to lock memory."""
    if request.param == "steer" and os.geteuid() != 0:
        pytest.skip("steer needs the right to lock memory")
    return str(request.param)


@pytest.fixture(scope="module")
def readable(mode: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    """A mount with the default permissions (only *.kv is writable)."""
    with mounting(tmp_path_factory.mktemp("readable")) as mounter:
        yield mounter("--mode", mode)


@pytest.fixture(scope="module")
def writable(mode: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    """A mount on which every file is writable."""
    with mounting(tmp_path_factory.mktemp("writable")) as mounter:
        yield mounter("--mode", mode, "--rw")


@pytest.fixture
def reading(readable: Mounted, tmp_path: Path) -> Mounted:
    """A directory of a shared mount with the default permissions."""
    return readable.directory(tmp_path.name)


@pytest.fixture
def writing(writable: Mounted, tmp_path: Path) -> Mounted:
    """A directory of a shared mount on which every file is writable."""
    return writable.directory(tmp_path.name)
