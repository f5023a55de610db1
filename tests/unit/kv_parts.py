"""Keys and values in which every number encodes its place, so that misplaced pages are detected."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmcache.kv.spill import KvShape, SpillFile, SpillReader
from llmcache.kv.spill.raw import RawFile

Rows = NDArray[Any]


def ids(first: int, count: int) -> NDArray[np.int64]:
    return np.arange(first, first + count, dtype=np.int64)


def flip(path: Path, place: int) -> None:
    """Flip a bit of the byte at `place` of a file."""
    with path.open("r+b") as stream:
        stream.seek(place)
        byte = stream.read(1)[0]
        stream.seek(place)
        stream.write(bytes([byte ^ 1]))


def carried(numbers: NDArray[np.float32], dtype: str) -> Rows:
    """Return `numbers` in the numpy type for `dtype`; for bfloat16, the bits."""
    return (numbers.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else numbers.astype(dtype)


@functools.cache
def _noise(size: int, *seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def rows(shape: KvShape, layer: int, ids: NDArray[np.int64], side: int) -> Rows:
    """Return keys (`side` 0) or values (1) [kv_heads, tokens, dim] of tokens `ids` in `layer`."""
    dim = (shape.head_dim, shape.value_dim)[side]
    size = shape.kv_heads * dim * shape.numpy_dtype.itemsize
    raw = np.frombuffer(b"".join(_noise(size, int(token), layer, side) for token in ids), shape.numpy_dtype)
    found: Rows = raw.reshape(len(ids), shape.kv_heads, dim).swapaxes(0, 1)
    return found


def append(file: SpillFile, sequence: int, ids: NDArray[np.int64], layers: range | None = None) -> None:
    """Append tokens to all layers, or only to `layers`, without the tokens."""
    shape = file.shape
    for layer in range(shape.layers) if layers is None else layers:
        file.append(sequence, layer, *(rows(shape, layer, ids, side) for side in (0, 1)))
    if layers is None:
        file.append_tokens(sequence, ids, ids + 1000)


def restored(file: SpillReader, sequence: int) -> list[int]:
    """Return the ids of a sequence, after a comparison of all keys, values and positions."""
    ids, positions = file.tokens(sequence)
    shape, pages = file.shape, file.pages(sequence)
    assert len(ids) == len(positions) == file.length(sequence)
    assert (positions == ids + 1000).all()
    for layer in range(shape.layers):
        found = file.read(sequence, layer, list(range(pages)))
        for side, got in enumerate(found):
            if len(ids):
                flat = got.swapaxes(0, 1).reshape(shape.kv_heads, -1, got.shape[3])[:, : len(ids)]
                assert flat.tobytes() == rows(shape, layer, ids, side).tobytes()
    return [int(token) for token in ids]


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the size of every later read of pages is appended."""
    reads: list[int] = []
    read_runs = RawFile.read_runs

    def counted(self: RawFile, wanted: Rows, *rest: Any) -> None:
        end = -1
        for offset, _, size in sorted(wanted.tolist()):
            if offset != end:
                reads.append(0)
            reads[-1] += size
            end = offset + size
        read_runs(self, wanted, *rest)

    monkeypatch.setattr(RawFile, "read_runs", counted)
    return reads


def unmount(point: Path) -> None:
    """Unmount a file system of a test; if it is busy, detach it and fail."""
    for _ in range(100):
        if not subprocess.run(["umount", str(point)], capture_output=True, check=False).returncode:
            return
        time.sleep(0.1)  # monitors that read the list of mounts keep it busy for a moment
    subprocess.run(["umount", "-l", str(point)], check=True)
    raise AssertionError(f"{point} was still in use")


@contextlib.contextmanager
def small_disk(parent: Path, size: str) -> Iterator[Path]:
    """Mount a file system of `size` (as in mount options) below `parent`; skip the test if that is impossible."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small tmpfs needs root")
    small = parent / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", small], check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        yield small
    finally:
        unmount(small)


class LoopDisk:
    """A file system on a loop device, whose image is on a small disk of its own; `point` is the mount point."""

    def __init__(self, image: Path, device: str, point: Path) -> None:
        self._image, self._device, self.point = image, device, point
        self._ballast = image.with_name("ballast")

    def starve(self, path: Path, offsets: list[int]) -> None:
        """Make writes of the blocks at `offsets` of a file fail; their contents are lost."""
        told = _run("filefrag", "-v", "-b4096", path)
        extents = [list(map(int, re.findall(r"\d+", line)[1:4])) for line in told.splitlines() if ".." in line]
        for block in (offset // 4096 for offset in offsets):
            (place,) = (physical + block - first for first, last, physical in extents if first <= block <= last)
            _run("fallocate", "--punch-hole", "-o", str(4096 * place), "-l", "4096", self._image)
        with self._ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    def feed(self) -> None:
        """Make writes of all blocks succeed again."""
        self._ballast.unlink()

    def remount(self) -> None:
        """Drop all data that is in memory and not on disk."""
        unmount(self.point)
        _run("mount", self._device, self.point)


def _run(*words: str | Path) -> str:
    return subprocess.run(list(map(str, words)), check=True, capture_output=True, text=True).stdout.strip()


@contextlib.contextmanager
def loop_disk(parent: Path) -> Iterator[LoopDisk]:
    """Yield a disk of 20 MiB; skip the test if there are no loop devices."""
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("a loop device needs e2fsprogs")
    with contextlib.ExitStack() as stack:
        image, point = stack.enter_context(small_disk(parent, "20m")) / "disk.img", parent / "disk"
        image.touch()
        os.truncate(image, 18 << 20)
        made = subprocess.run(["losetup", "-f", "--show", image], capture_output=True, text=True, check=False)
        if made.returncode:
            pytest.skip(f"no loop devices here: {made.stderr.strip()}")
        device = made.stdout.strip()
        stack.callback(_run, "losetup", "-d", device)
        _run("mkfs.ext4", "-q", "-b", "4096", "-O", "^has_journal", "-m", "0", device)  # a journal error would stop it
        point.mkdir()
        _run("mount", device, point)
        stack.callback(unmount, point)
        with (point / "all").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * (1 << 20))  # allocate all blocks of the image that are used later
        _run("sync", "-f", point)
        (point / "all").unlink()
        yield LoopDisk(image, device, point)
