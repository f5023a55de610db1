"""resize, warmup, evict and --pin on real mounts: their effect on the page cache and on reads from storage."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from llmcache.mount.client import control
from tests.mount.conftest import Mounted, Mounter
from tests.mount.live import MIB, by_mmap, by_read, is_busy, llmcache, random_file, resident_bytes, run_json, wait_for
from tools.bench.sides import environment

SLACK = 16 * MIB  # windows, in addition to the budget


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SOURCE with a safetensors model, a model in two shards, two files of unknown format, and a small file."""
    directory = tmp_path_factory.mktemp("source")
    random_file(directory / "loop.bin", 40 * MIB + 7)
    random_file(directory / "other.bin", 40 * MIB)
    random_file(directory / "tokens.json", MIB)
    write_model(directory / "model.safetensors", "layers.0.weight", 40 * MIB)
    for number in (1, 2):
        write_model(directory / f"shard-0000{number}-of-00002.safetensors", f"layers.{number}.weight", 5 * MIB)
    os.sync()
    return directory


def write_model(path: Path, name: str, size: int) -> None:
    """Write a safetensors file of one tensor."""
    header = json.dumps({name: {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + os.urandom(size))


def terminal_output(*words: str | Path) -> str:
    """Return the output of a command on stderr, a terminal, while it works."""
    terminal, end = os.openpty()
    command, text = [sys.executable, "-m", "llmcache", *map(str, words)], b""
    with open(terminal, "rb", buffering=0) as screen:
        drawing = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=end, env=environment())
        os.close(end)
        with contextlib.suppress(OSError):  # EIO: the other end is closed
            # read continuously: the terminal buffers a few KB, and then the command blocks
            while piece := screen.read(1 << 16):
                text += piece
        assert drawing.wait(120) == 0
    return text.decode()


def stats_at_rest(mounted: Mounted) -> dict[str, Any]:
    """Return the counters once loaders are idle; with slow storage, the last prefetches take a while."""
    seen = [mounted.stats()]

    def rests() -> bool:
        time.sleep(0.5)
        seen.append(mounted.stats())
        return not is_busy(mounted.pid) and seen[-1]["backing_read_bytes"] == seen[-2]["backing_read_bytes"]

    wait_for(rests, "the loaders are idle")
    return seen[-1]


def pinned_bytes(mounted: Mounted, name: str) -> int:
    files = [file for file in mounted.stats()["files"] if file["path"] == f"/{name}"]
    return sum(loop["pinned_bytes"] for file in files for loop in file["loops"])


def test_a_terminal_shows_progress(mount: Mounter, source: Path) -> None:
    mounted = mount("--cache", "32Mi", source=source)
    commands: tuple[tuple[str, tuple[str | Path, ...]], ...] = (
        ("warming", ("warmup", mounted.point, "loop.bin")),
        ("checking", ("warmup", mounted.point, "loop.bin", "--check")),
        ("shrinking", ("resize", mounted.point, "20Mi")),
        ("evicting", ("evict", mounted.point)),
    )
    for word, command in commands:
        text = terminal_output(*command)
        assert word in text and "━" in text, text


def test_warmed_bytes_are_not_read_again(mount: Mounter, mode: str, source: Path) -> None:
    mounted = mount("--mode", mode, "--cache", "32Mi", source=source)
    assert run_json("warmup", mounted.point, "loop.bin", "--check", code=4)["warm_bytes"] == 0

    reports: list[dict[str, Any]] = []
    control.request(str(mounted.point), {"op": "warmup", "globs": ["loop.bin"]}, on_progress=reports.append)
    reply = run_json("warmup", mounted.point, "loop.bin", "--check")
    warm = reply["warm_bytes"]
    assert 20 * MIB < warm == reply["wanted_bytes"] <= 32 * MIB
    assert reports and reports[0]["total_bytes"] >= warm
    assert mounted.stats()["backing_read_bytes"] < warm + 2 * MIB  # no bytes that would only stream through
    if mode == "steer":
        wait_for(lambda: resident_bytes(mounted.point / "loop.bin") >= warm, "it is cached, including unlocked pages")

    before = stats_at_rest(mounted)
    assert by_read(mounted.point / "loop.bin") == by_read(source / "loop.bin")
    after = mounted.stats()
    # Near the end, loaders prefetch the beginning of the loop, as far as it fits.
    missing = (source / "loop.bin").stat().st_size - warm
    assert after["backing_read_bytes"] - before["backing_read_bytes"] <= missing + SLACK

    evicted = run_json("evict", mounted.point, "*.bin")
    assert evicted["evicted_bytes"] >= warm and len(evicted["groups"]) == 1
    wait_for(lambda: resident_bytes(mounted.point / "loop.bin") < 2 * MIB, "its pages are dropped")
    wait_for(lambda: mounted.stats()["resident_bytes"] < 2 * MIB, "resident_bytes follows")
    assert by_mmap(mounted.point / "loop.bin") == by_read(source / "loop.bin")


def test_without_globs_models_and_small_files_are_warmed(mount: Mounter, source: Path) -> None:
    mounted = mount("--mode", "arena", "--cache", "64Mi", source=source)
    reply = run_json("warmup", mounted.point)
    warm = {row["path"]: row["warm_bytes"] for row in reply["files"]}
    assert warm["/model.safetensors"] > 32 * MIB
    assert warm["/tokens.json"] == MIB

    def is_cached() -> bool:
        """Return whether all pages are cached; if not, repeat the warm-up, because the kernel may evict unlocked pages."""
        if resident_bytes(mounted.point / "tokens.json") == MIB:
            return True
        run_json("evict", mounted.point, "tokens.json")
        assert run_json("warmup", mounted.point, "tokens.json")["warm_bytes"] == MIB
        return False

    wait_for(is_cached, "the file is cached")
    assert warm["/loop.bin"] == warm["/other.bin"] == 0
    shards = ["/shard-00001-of-00002.safetensors", "/shard-00002-of-00002.safetensors"]
    assert all(warm[shard] > 4 * MIB for shard in shards)

    evicted_groups = run_json("evict", mounted.point, "shard-00001*")["groups"]
    assert [group["paths"] for group in evicted_groups] == [shards]
    again = run_json("warmup", mounted.point, "shard-00002*")["files"]
    assert [(row["path"], row["warm_bytes"]) for row in again] == [(shard, warm[shard]) for shard in shards]
    for name in ("model.safetensors", "tokens.json"):
        assert by_read(mounted.point / name) == by_read(source / name)

    done = llmcache("warmup", mounted.point, "*.gguf")
    assert done.returncode == 2 and "no file of the mount matches *.gguf" in done.stderr

    shrunk = run_json("resize", mounted.point, "20Mi")
    assert shrunk["before_bytes"] == 64 * MIB and shrunk["budget_bytes"] == 20 * MIB
    assert shrunk["resident_bytes"] <= 20 * MIB + SLACK
    assert resident_bytes(mounted.point / "model.safetensors") <= 20 * MIB + SLACK
    assert pinned_bytes(mounted, "model.safetensors") <= 20 * MIB
    assert run_json("resize", mounted.point, "64Mi")["budget_bytes"] == 64 * MIB
    assert run_json("warmup", mounted.point, "model*")["warm_bytes"] > 32 * MIB

    too_large = llmcache("resize", mounted.point, "900P")
    assert too_large.returncode == 3 and "can spare" in too_large.stderr
    assert llmcache("resize", mounted.point, "much").returncode == 2
    assert mounted.stats()["budget_bytes"] == 64 * MIB


def test_pinned_files_take_precedence_over_loops(mount: Mounter, source: Path) -> None:
    mounted = mount("--mode", "steer", "--cache", "56Mi", "--pin", "loop.bin", "--pin", "*.json", source=source)
    wait_for(lambda: pinned_bytes(mounted, "loop.bin") > 40 * MIB, "loop.bin is pinned")
    wait_for(lambda: pinned_bytes(mounted, "tokens.json") == MIB, "tokens.json is pinned")
    for _ in range(4):
        assert by_read(mounted.point / "other.bin") == by_read(source / "other.bin")
    assert pinned_bytes(mounted, "loop.bin") > 40 * MIB
    assert run_json("evict", mounted.point)["pinned"] == ["/loop.bin", "/tokens.json"]
    assert pinned_bytes(mounted, "loop.bin") > 40 * MIB
    wait_for(lambda: resident_bytes(mounted.point / "loop.bin") > 40 * MIB, "it is locked")
    before = stats_at_rest(mounted)["backing_read_bytes"]
    assert by_read(mounted.point / "loop.bin") == by_read(source / "loop.bin")
    assert mounted.stats()["backing_read_bytes"] - before < MIB


@pytest.mark.parametrize("mode", ["steer", "arena", "inplace"])
def test_globs_match_the_names_of_links_to_a_file(mount: Mounter, mode: str) -> None:
    """In a Hugging Face cache, a model is a link to a file named by its checksum; a second one is downloaded later."""
    mounted = mount.place()
    hub = mounted.source / "models--x--y"
    (hub / "blobs").mkdir(parents=True)
    (hub / "snapshots/1").mkdir(parents=True)

    def download(name: str, blob: str) -> None:
        write_model(hub / "blobs" / blob, f"{name}.weight", 20 * MIB)
        (hub / "snapshots/1" / name).symlink_to(f"../../blobs/{blob}")

    def pinned_loops() -> list[int]:
        return [file["loops"][0]["pinned_bytes"] for file in mounted.stats()["files"] if file["loops"]]

    download("one.safetensors", "aaaa")
    mounted = mount("--mode", mode, "--cache", "100Mi", "--pin", "*.safetensors")
    wait_for(lambda: len(pinned_loops()) == 1 and min(pinned_loops()) >= 20 * MIB, "it is pinned under the name of the link")
    download("two.safetensors", "bbbb")

    def both_are_pinned() -> bool:
        # in place, new files are found by a periodic walk
        by_read(mounted.point / "models--x--y/snapshots/1/two.safetensors")
        return len(pinned_loops()) == 2 and min(pinned_loops()) >= 19 * MIB

    wait_for(both_are_pinned, "so is a later one")
    assert run_json("warmup", mounted.point, "two*")["warm_bytes"] > 19 * MIB
    assert len(run_json("evict", mounted.point, "one.*")["pinned"]) == 1


def test_evict_reports_progress_and_refuses_unknown_names(mount: Mounter, source: Path) -> None:
    mounted = mount(source=source)
    run_json("warmup", mounted.point, "*.bin")
    reports: list[dict[str, Any]] = []
    reply = control.request(str(mounted.point), {"op": "evict"}, on_progress=reports.append)
    assert reports[0] == {"done_bytes": 0, "total_bytes": 80 * MIB + 7} and reply["evicted_bytes"] > 16 * MIB
    assert [step["done_bytes"] for step in reports] == sorted({step["done_bytes"] for step in reports})
    assert run_json("evict", mounted.point, "tokens.json")["groups"] == []  # nothing of it was cached
    done = llmcache("evict", mounted.point, "*.gguf")
    assert done.returncode == 2 and "no file of the mount matches *.gguf" in done.stderr


def test_simultaneous_warmups_read_once(mount: Mounter, source: Path) -> None:
    mounted = mount("--cache", "100Mi", source=source)
    with ThreadPoolExecutor(2) as pool:
        replies = list(pool.map(lambda _: run_json("warmup", mounted.point, "*.bin"), range(2)))
    for reply in replies:
        assert reply["warm_bytes"] == reply["wanted_bytes"] > 75 * MIB
    assert mounted.stats()["backing_read_bytes"] < 84 * MIB


def test_file_names_cannot_control_the_terminal(mount: Mounter, tmp_path: Path) -> None:
    mounted = mount("--pin", "*red*", point=tmp_path / "\x1b[31m[bold]mnt")
    for name in (b"\x1b[31mred", b"\xffred", "é red".encode()):
        (mounted.source / os.fsdecode(name)).write_bytes(b"x")
    shown = llmcache("warmup", mounted.point).stdout
    assert all(word in shown for word in ("\\x1b[31mred", "\\xffred", "é red")) and "\x1b" not in shown
    evicted = llmcache("evict", mounted.point)
    assert "\\x1b[31mred is pinned" in evicted.stderr
    other = llmcache("stats", tmp_path)
    reports = [shown, evicted.stdout, llmcache("resize", mounted.point, "40Mi").stdout, other.stderr]
    assert other.returncode == 4 and all("/\\x1b[31m[bold]mnt" in text and "\x1b" not in text for text in reports), reports


@pytest.mark.parametrize("mode", ["steer", "arena"])
def test_closed_files_leave_descriptors_for_open_ones(mount: Mounter, mode: str) -> None:
    mounted = mount("--mode", mode)
    resource.prlimit(mounted.pid, resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    for number in range(300):
        (mounted.source / f"{number}.json").write_text(str(number))
        assert (mounted.point / f"{number}.json").read_text() == str(number)
    assert 0 < len(mounted.stats()["files"]) <= 256 // 8 + 1


def test_warmup_refuses_more_files_than_it_can_open(mount: Mounter) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    mounted = mount()
    for number in range(70):
        (mounted.source / f"{number}.json").write_text("x")
    resource.prlimit(mounted.pid, resource.RLIMIT_NOFILE, (256, before[1]))
    done = llmcache("warmup", mounted.point)
    assert done.returncode == 3 and "GLOB: 70 files match, but at most 64 can be warmed at once" in done.stderr
    assert run_json("warmup", mounted.point, "?.json")["warm_bytes"] == 10
