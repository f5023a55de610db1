"""Changes of files in SOURCE, behind the mount: the next open notices them, and later reads return nothing stale."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from pathlib import Path

import psutil
import pytest

from llmcache.mount.backends.touches import why_not
from llmcache.mount.client import operation
from tests.mount.conftest import Mounted, Mounter
from tests.mount.live import MIB, llmcache, random_file, wait_for

SIZE = 2 << 20
TICK_S = 0.05  # before Linux 6.13, two changes within one clock tick have the same time


@pytest.fixture
def pair(reading: Mounted) -> tuple[Path, Path]:
    """Return the paths, in the mount and in SOURCE, of a file after a read through the mount."""
    behind = reading.source / "f"
    behind.write_bytes(b"1" * SIZE)
    through = reading.point / "f"
    assert through.read_bytes() == b"1" * SIZE
    time.sleep(TICK_S)
    return through, behind


def replace(behind: Path, content: bytes) -> None:
    fresh = behind.with_name("fresh")
    fresh.write_bytes(content)
    os.replace(fresh, behind)


@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize("size", [SIZE, SIZE // 2, 2 * SIZE, 0], ids=["same size", "shorter", "longer", "empty"])
@pytest.mark.parametrize("how", ["replaced", "rewritten"])
def test_changed_behind_the_mount(pair: tuple[Path, Path], how: str, size: int, is_open: bool) -> None:
    through, behind = pair
    open_file = through.open("rb") if is_open else None
    if how == "replaced":
        replace(behind, b"2" * size)
    else:
        behind.write_bytes(b"2" * size)
    assert through.read_bytes() == b"2" * size
    assert through.stat().st_size == size
    if size:
        with through.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
            assert pages[:] == b"2" * size
    if open_file is not None:
        with open_file:
            assert set(os.pread(open_file.fileno(), 4096, 0)) <= {ord("2")}, (
                "nothing stale once an open has noticed the change"
            )
    assert through.read_bytes() == b"2" * size


def test_a_restored_modification_time_does_not_hide_a_change(pair: tuple[Path, Path]) -> None:
    through, behind = pair
    status = behind.stat()
    with behind.open("r+b") as file:
        file.write(b"2" * 100)
    os.utime(behind, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert through.read_bytes()[:101] == b"2" * 100 + b"1"


def test_no_read_returns_data_older_than_its_open(pair: tuple[Path, Path]) -> None:
    through, behind = pair
    version, wrong, stop = [1], [], threading.Event()
    replace(behind, b"\x01" * SIZE)

    def read() -> None:
        while not stop.is_set():
            least = version[0]
            content = through.read_bytes()
            if content and content[0] < least:
                wrong.append((least, content[0]))

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for number in range(2, 60):
        replace(behind, bytes([number]) * SIZE)
        version[0] = number
        time.sleep(0.02)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_deleted_and_created_again(pair: tuple[Path, Path]) -> None:
    through, behind = pair
    with through.open("rb", buffering=0) as file:
        behind.unlink()
        assert os.pread(file.fileno(), 10, SIZE - 10) == b"1" * 10
        with pytest.raises(FileNotFoundError):
            through.open("rb")
        behind.write_bytes(b"new")
        assert through.read_bytes() == b"new"
    assert through.read_bytes() == b"new"


def test_new_names_appear_at_once(reading: Mounted) -> None:
    assert not (reading.point / "later").exists()
    (reading.source / "later").write_text("x")
    assert (reading.point / "later").read_text() == "x"
    assert os.listdir(reading.point) == ["later"]


def test_renamed_behind(pair: tuple[Path, Path], reading: Mounted) -> None:
    through, behind = pair
    (reading.source / "g").write_bytes(b"g" * SIZE)
    assert (reading.point / "g").read_bytes() == b"g" * SIZE
    os.rename(reading.source / "g", reading.source / "x")
    os.rename(behind, reading.source / "g")
    os.rename(reading.source / "x", behind)
    assert through.read_bytes() == b"g" * SIZE
    assert (reading.point / "g").read_bytes() == b"1" * SIZE


def test_replaced_while_written_through(reading: Mounted) -> None:
    """A client that has the file open for writing continues in the new file."""
    through, behind = reading.point / "f.kv", reading.source / "f.kv"
    with through.open("x+b", buffering=0) as file:
        file.write(b"a" * 8192)
        replace(behind, b"b" * 8192)
        assert through.read_bytes() == b"b" * 8192
        assert os.pwrite(file.fileno(), b"c" * 10, 8000) == 10
        assert through.read_bytes() == behind.read_bytes() == b"b" * 8000 + b"c" * 10 + b"b" * 182


def test_written_behind_while_written_through(reading: Mounted) -> None:
    through, behind = reading.point / "f.kv", reading.source / "f.kv"
    with through.open("x+b", buffering=0) as file:
        file.write(b"a" * 8192)
        assert through.read_bytes() == b"a" * 8192
        time.sleep(TICK_S)
        with behind.open("r+b") as other:
            other.write(b"b" * 4096)
        os.pwrite(file.fileno(), b"c" * 10, 8000)
        assert through.read_bytes() == b"b" * 4096 + b"a" * (8000 - 4096) + b"c" * 10 + b"a" * 182


def uses(mounted: Mounted, name: str) -> list[str]:
    """Return the descriptors and mappings of files called `name` in the daemon and its helpers."""
    found = []
    daemon = psutil.Process(mounted.pid)
    for pid in [daemon.pid, *(child.pid for child in daemon.children())]:
        process = Path(f"/proc/{pid}")
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed in the meantime
                if name in (link := os.readlink(descriptor)):
                    found.append(f"{pid} {link}")
        found += [f"{pid} {line}" for line in (process / "maps").read_text().splitlines() if name in line]
    return found


@pytest.mark.parametrize("through", [False, True], ids=["behind", "through"])
@pytest.mark.parametrize("mode", ["inplace", "steer", "arena"])
def test_a_deleted_model_is_released_at_once(mount: Mounter, mode: str, through: bool) -> None:
    """This holds for files of --pin, too: their disk space and memory are free again."""
    place = mount.place()
    if os.geteuid() != 0 or (mode == "inplace" and why_not(str(place.source))):
        pytest.skip(f"mode {mode} is not available here")
    path = random_file(place.source / "model.bin", 24 * MIB)
    os.utime(path, (0, 0))
    mounted = mount("--mode", mode, "--pin", "model.bin", "--rw", "--cache", "64Mi")
    point = str(mounted.point)
    wait_for(lambda: operation.fetch(point)["pinned_bytes"] > 16 * MIB, "it is pinned")
    assert uses(mounted, "model.bin")
    (mounted.point / "model.bin" if through else path).unlink()
    wait_for(lambda: not uses(mounted, "model.bin"), "it is released", 20, lambda: uses(mounted, "model.bin"))
    wait_for(lambda: operation.fetch(point)["pinned_bytes"] == 0, "nothing is pinned", 20)


def test_mount_warns_of_links_that_lead_outside(mount: Mounter) -> None:
    """Over FUSE, the links of a Hugging Face snapshot dangle if only the snapshot is mounted."""
    place = mount.place()
    (place.source.parent / "blobs").mkdir()
    (place.source.parent / "blobs" / "0a1b").write_bytes(b"x" * MIB)
    (place.source / "inside.bin").write_bytes(b"x")
    (place.source / "near.bin").symlink_to("inside.bin")
    for number in range(4):
        (place.source / f"model-{number}.gguf").symlink_to("../blobs/0a1b")
    done = llmcache("mount", place.source, place.point, "--mode", "steer", "--cache", "32Mi")
    assert done.returncode == 0 and "links that lead outside: 4" in done.stdout
    assert "model-0.gguf, model-1.gguf, model-2.gguf, ...; mount the directory that contains both" in done.stderr
    assert "near.bin" not in done.stderr
