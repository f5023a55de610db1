"""An access log, replayed through the simulator, gives the hits, misses, evictions and cached extents of the mount."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from llmcache.cache.plan import why_not_exact
from llmcache.cache.policies import policy_class
from llmcache.cache.simulate import simulate
from llmcache.model.modelfile import UNKNOWN
from llmcache.model.tensors import Experts
from llmcache.mount.client import control
from llmcache.mount.daemon.accesslog import FRAME, ROW, ROWS
from llmcache.trace.record import GROUP_ROWS, HIT, READ, WRITE, BlockSpace, Trace
from llmcache.units import BLOCK_BYTES
from tests.mount.live import MIB, Live, is_busy, live, llmcache, random_file, wait_for
from tools.bench import routing
from tools.bench.sides import end_mount, environment
from tools.make_model import BYTES_PER_VALUE, MoeShape, choose_shape, make_model

SIZES = {
    "loop.bin": 72 * MIB + 77, "short.bin": 33 * MIB, "other.bin": 60 * MIB, "small.json": 3 * MIB + 5, "tiny.txt": 99
}  # fmt: skip
CACHE = 32 * MIB

Work = Callable[[Live], None]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source")
    for name, size in SIZES.items():
        random_file(directory / name, size)
    shape = choose_shape(60 * MIB, BYTES_PER_VALUE["gguf"], None, True, MoeShape(16, 2, 200_000))
    make_model(directory / "mixture.gguf", shape, "gguf", 1, 0)
    return directory


def sweep(mount: Live, name: str, passes: int, pause_s: float = 0.0) -> None:
    """Read a whole file `passes` times, with a pause of `pause_s` after each MiB."""
    for _ in range(passes):
        with open(mount.mountpoint / name, "rb", buffering=0) as file:
            while file.read(MIB):
                time.sleep(pause_s)


def a_loop_larger_than_the_budget(mount: Live) -> None:
    sweep(mount, "loop.bin", 5)


def two_loops_in_sequence(mount: Live) -> None:
    sweep(mount, "loop.bin", 4)
    sweep(mount, "other.bin", 4)


def small_files_and_a_loop(mount: Live) -> None:
    for _ in range(4):
        sweep(mount, "small.json", 1)
        sweep(mount, "tiny.txt", 1)
        sweep(mount, "loop.bin", 1)


def a_spill_file_and_a_loop(mount: Live) -> None:
    for number in range(3):
        (mount.mountpoint / "spill.kv").write_bytes(os.urandom(5 * MIB + number))
        sweep(mount, "loop.bin", 2)
        sweep(mount, "spill.kv", 1)


def a_warmup_and_an_eviction(mount: Live) -> None:
    os.listdir(mount.mountpoint)  # returns once the control socket exists
    for name in ("loop.bin", "other.bin"):
        control.request(str(mount.mountpoint), {"op": "warmup", "globs": [name]})
        sweep(mount, name, 3)
    control.request(str(mount.mountpoint), {"op": "evict", "globs": ["loop.bin"]})
    sweep(mount, "loop.bin", 2)


def a_moe_model(mount: Live) -> None:
    path = mount.source / "mixture.gguf"
    experts = Experts(routing.layout_of(path))
    with open(mount.mountpoint / path.name, "rb", buffering=0) as file:
        for use in range(300):
            for offset, length in experts.ranges(use * 7 % experts.count if use % 3 else use % 5):
                os.pread(file.fileno(), length, offset)
    assert mount.stats()["files"][0]["experts"]["kept"] > 0


WORKS: list[Work] = [
    a_moe_model,
    a_warmup_and_an_eviction,
    a_loop_larger_than_the_budget,
    two_loops_in_sequence,
    small_files_and_a_loop,
    a_spill_file_and_a_loop,
]


def settled(mount: Live) -> dict[str, Any]:
    """Return the counters once loaders have nothing more to prefetch and no thread waits for storage."""
    seen: list[dict[str, Any]] = [mount.stats()]

    def still() -> bool:
        time.sleep(0.5)
        seen.append(mount.stats())
        same = seen[-1]["arena"] == seen[-2]["arena"] and seen[-1]["access_log"] == seen[-2]["access_log"]
        return bool(same and not is_busy(mount.daemon.pid))

    wait_for(still, "the counters stand still")
    return seen[-1]


def cached_bytes_by_file(trace: Trace) -> dict[str, int]:
    """Return how many bytes of each file the replayed mount has cached at the end."""
    space = BlockSpace.of([trace])
    policy = policy_class("llmcache")(int(trace.provenance.extra["budget_bytes"]) // BLOCK_BYTES, space.blocks)
    policy.describe(space, trace.files, trace.provenance, UNKNOWN)
    hits = policy.replay(space.place(trace), trace.count.astype(np.int64))
    assert np.array_equal(hits > 0, trace.miss == HIT), "the mount recorded the same for each row"
    files, _ = space.locate(policy.resident())
    paths = {file.id: file.path for file in trace.files}
    return {paths[number]: int((files == number).sum()) * BLOCK_BYTES for number in np.unique(files).tolist()}


@pytest.mark.mount
@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.__name__)
def test_replaying_a_log_reproduces_the_mount(source: Path, tmp_path: Path, work: Work) -> None:
    path = tmp_path / "log.parquet"
    with live(source, tmp_path / "mnt", str(CACHE), "--mode", "arena", "--access-log", str(path)) as mount:
        work(mount)
        stats = settled(mount)
    trace = Trace.load(path)
    assert (trace.provenance.tier, trace.provenance.lost_events) == ("mount", 0)
    assert len(trace) == stats["access_log"]["rows"] > 0
    (result,) = simulate(str(path), ["llmcache"], [stats["budget_bytes"]])
    arena = stats["arena"]
    assert (result.hits, result.accesses - result.hits) == (arena["hit_blocks"], arena["miss_blocks"])
    assert result.evictions == arena["evicted_blocks"]
    cached = cached_bytes_by_file(trace)
    assert sum(cached.values()) == arena["held_blocks"] * BLOCK_BYTES
    for entry in stats["files"]:
        if not entry["loops"]:  # a written file has only single cached pages: those read from storage again
            continue
        pinned = sum(loop["pinned_bytes"] for loop in entry["loops"])
        assert abs(cached.get(entry["path"], 0) - pinned) < MIB, "the last extent of a file may be short"


@pytest.mark.mount
def test_a_log_has_hits_evictions_and_writes(source: Path, tmp_path: Path) -> None:
    """This is independent of the simulator, with which the other test compares the log."""
    path = tmp_path / "log.parquet"
    with live(source, tmp_path / "mnt", str(CACHE), "--mode", "arena", "--access-log", str(path)) as mount:
        mount.know()
        sweep(mount, "loop.bin", 5)
        assert 0.9 * CACHE < settled(mount)["arena"]["held_blocks"] * BLOCK_BYTES <= CACHE
        sweep(mount, "other.bin", 4)
        assert settled(mount)["arena"]["evicted_blocks"] > 0
        # from memory, because data that faults is written in several requests
        (mount.mountpoint / "new.kv").write_bytes(b"\1" * (3 * MIB))
        mapped = Path(f"/proc/{mount.daemon.pid}/maps").read_text()
        assert [name for name in ("numpy", "numba", "pyarrow", "matplotlib", "libarrow") if name in mapped] == []
    (mount.source / "new.kv").unlink()
    trace = Trace.load(path)
    last_pass = trace.slice(4 * 73, 5 * 73)  # 73 extents in the loop
    hits = int(last_pass.count[last_pass.miss == HIT].sum()) / last_pass.accesses
    assert 0.9 < hits / (CACHE / SIZES["loop.bin"]) <= 1.1
    paths = {file.id: file.path for file in trace.files}
    assert {paths[number] for number in np.unique(trace.file).tolist()} == {"/loop.bin", "/other.bin", "/new.kv"}
    assert int(trace.count[trace.op == WRITE].sum()) * BLOCK_BYTES == 3 * MIB
    assert set(trace.pid[trace.op == READ].tolist()) == {os.getpid()}, "the kernel writes for any process"


@pytest.mark.mount
def test_a_steer_mount_logs_its_reads(source: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("steer needs the right to lock memory")
    path = tmp_path / "log.parquet"
    with live(source, tmp_path / "mnt", str(CACHE), "--mode", "steer", "--access-log", str(path)) as mount:
        mount.know()
        sweep(mount, "loop.bin", 4)
        assert mount.stats()["arena"] is None
    trace = Trace.load(path)
    assert trace.provenance.extra["mode"] == "steer"
    assert "without a request" in (why_not_exact(trace.provenance) or "")
    assert "these reads are not recorded" in trace.provenance.note
    touched = BlockSpace.of([trace]).footprint * BLOCK_BYTES
    assert touched >= SIZES["loop.bin"] // MIB * MIB
    assert HIT not in trace.miss and READ in trace.op


@pytest.mark.mount
@pytest.mark.parametrize("end", ["umount", "SIGTERM", "SIGKILL"])
def test_the_log_is_complete_however_the_mount_ends(source: Path, tmp_path: Path, end: str) -> None:
    path, point = tmp_path / "log.parquet", tmp_path / "mnt"
    with live(source, point, str(CACHE), "--mode", "arena", "--access-log", str(path)) as mount:
        sweep(mount, "loop.bin", 2)
        rows = settled(mount)["access_log"]["rows"]
        assert not path.exists(), "the log gets its name once it is complete"
        if end == "umount":
            assert llmcache("umount", str(point)).returncode == 0
            assert path.exists(), "umount waits for the log"
        else:
            mount.daemon.send_signal(getattr(signal, end))
            mount.daemon.wait(120)
            if end == "SIGKILL":
                time.sleep(0.1)
                end_mount(point, mount.daemon)
        wait_for(path.exists, "the log is complete")
    trace = Trace.load(path)
    assert len(trace) == rows
    assert ("killed" in trace.provenance.note) == (end == "SIGKILL")


@pytest.mark.mount
def test_a_dead_log_writer_loses_rows_but_no_reads(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    with live(source, tmp_path / "mnt", str(CACHE), "--mode", "arena", "--access-log", str(path)) as mount:
        sweep(mount, "loop.bin", 1)
        writers = [child for child in mount.helpers() if "llmcache.mount.daemon.logwriter" in child.cmdline()]
        assert len(writers) == 1
        writers[0].kill()
        wait_for(lambda: writers[0].status() == psutil.STATUS_ZOMBIE, "the writer is dead")
        sweep(mount, "loop.bin", 3)
        wait_for(lambda: mount.stats()["access_log"]["lost_rows"] > 0, "lost rows are counted")
        wait_for(lambda: "access log" in mount.log.read_text(), "the log says so")
    assert not path.exists()


@pytest.mark.mount
def test_a_log_on_a_full_disk_leaves_no_file(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", tmp_path], check=True)
    try:
        command = [sys.executable, "-m", "llmcache.mount.daemon.logwriter", str(tmp_path / "log.parquet")]
        blocks = np.random.default_rng(0).integers(0, 1 << 40, 2 * GROUP_ROWS).tolist()
        rows = b"".join(ROW.pack(0, 0, block, 1, READ, HIT, 1) for block in blocks)
        frames = FRAME.pack(ROWS, len(rows)) + rows
        done = subprocess.run(command, input=frames, capture_output=True, env=environment(), timeout=120, check=False)
        assert done.returncode == 3
        assert b"llmcache: error: cannot write" in done.stderr and b"Traceback" not in done.stderr
        assert os.listdir(tmp_path) == []
    finally:
        subprocess.run(["umount", tmp_path], check=True)
