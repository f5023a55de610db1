"""The `llmcache simulate` command: rows as JSON, tables, bad input, Ctrl-C, and memory that stays constant."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcache.cache.policies import policy_class
from llmcache.trace.record import Provenance
from tests.unit.command_parts import called
from tests.unit.simulation_parts import loop, saved, trace_of

KEYS = {"trace", "policy", "cache_bytes", "accesses", "hits", "hit_ratio", "read_bytes", "write_bytes"}
KEYS |= {"storage_read_bytes", "latency_s"}


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return saved(trace_of(loop(200, 5, 16) + loop(20, 3, 5, op=1)), tmp_path)


def document(*args: str) -> dict[str, Any]:
    done = called("simulate", *args, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_json_has_a_row_for_each_trace_policy_and_size(trace: str) -> None:
    found = document(trace, "--policy", "lru,sieve", "--cache", "40Ki,1M", "--bw", "100,1GB/s")
    assert found["schema"] == "llmcache.simulate/1"
    assert [(row["policy"], row["cache_bytes"]) for row in found["results"]] == [
        ("lru", 40960), ("lru", 10**6), ("sieve", 40960), ("sieve", 10**6),
    ]  # fmt: skip
    row = found["results"][1]
    assert row.keys() >= KEYS
    assert (row["accesses"], row["hits"], row["reads"], row["writes"]) == (1060, 860, 1000, 60)
    assert (row["read_bytes"], row["write_bytes"], row["storage_read_bytes"]) == (1000 * 4096, 60 * 4096, 200 * 4096)
    assert row["bw"] == 100 * 10**6
    assert [latency["bw"] for latency in row["latencies"]] == [100 * 10**6, 10**9]
    assert row["latency_s"] == row["latencies"][0]["latency_s"] > row["latencies"][1]["latency_s"]
    assert found["model"]["kind"] == "modelled"
    assert found["traces"][0]["footprint_blocks"] == 200


def test_sizes_can_be_percentages_and_the_default_has_ten(trace: str, tmp_path: Path) -> None:
    shares = document(trace, "--policy", "lru", "--cache", "2%,12.5%,100%")["results"]
    assert [row["cache_bytes"] for row in shares] == [4 * 4096, 25 * 4096, 200 * 4096]
    auto = document(trace, "--policy", "lru")["results"]
    assert [row["cache_bytes"] for row in auto] == [
        2 * percent * 4096 for percent in (2, 5, 10, 20, 30, 40, 50, 60, 80, 100)
    ]
    path = saved(trace_of([(0, 0, 1, 0), (0, 0, 1, 0)]), tmp_path, "smallest.parquet")
    (row,) = document(path, "--policy", "lru")["results"]
    assert (row["cache_bytes"], row["hits"]) == (4096, 1)


def test_the_curve_and_the_stalls_are_in_the_json(trace: str) -> None:
    found = document(trace, "--policy", "lru", "--cache", "1M", "--mrc", "--t", "10ms", "--bw", "1")
    (curve,) = found["curves"]
    assert curve["cache_bytes"][-1] == 200 * 4096
    assert curve["hits"][-1] == found["results"][0]["hits"]
    (stall,) = found["results"][0]["stalls"]
    assert stall["bw"] == 10**6
    assert stall == found["traces"][0]["cold_stalls"][0]  # at this size, only first references miss
    assert stall["stalled_slices"] == 2 and stall["worst_bytes"] == 160 * 4096
    assert stall["stall_s"] == pytest.approx(200 * 4096 / 1e6 - 2 * 0.01)
    assert found["period_s"] == 0.01


def test_tables_mark_modelled_values(trace: str) -> None:
    done = called("simulate", trace, "--policy", "lru,belady", "--cache", "40Ki,1M", "--t", "0.01", "--mrc")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(said in done.stdout for said in ("Belady", "0.8113", "latency by bandwidth (modelled)", "Stalls (modelled)"))


def test_setup_time_adds_to_each_missed_block(trace: str) -> None:
    args = [trace, "--policy", "lru", "--cache", "40Ki", "--bw", "500"]
    streamed, one_by_one = document(*args), document(*args, "--setup", "50us")
    (row,), (slow,) = streamed["results"], one_by_one["results"]
    to_gpu_s = row["read_bytes"] / 20e9
    assert row["latency_s"] == pytest.approx(row["storage_read_bytes"] / 500e6 + to_gpu_s)
    assert slow["latency_s"] == pytest.approx(row["latency_s"] + row["storage_read_bytes"] / 4096 * 50e-6)
    assert (streamed["model"]["setup_ns"], one_by_one["model"]["setup_ns"]) == (0, 50_000)


def test_a_report_is_replaced_only_with_force(trace: str, tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    args = ("simulate", trace, "--policy", "lru", "--cache", "50%", "--report", str(page))
    assert called(*args).returncode == 0 and page.read_text().startswith("<!DOCTYPE html>")
    refused = called(*args)
    assert refused.returncode == 2 and "--report" in refused.stderr and "--force" in refused.stderr
    assert called(*args, "--force").returncode == 0


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--cache", "16"), "--cache: '16' has no unit"),
        (("--cache", "4095B"), "--cache: '4095B' is less than one block"),
        (("--cache", "0.1%"), "--cache: 0.1% of the 200 blocks"),
        (("--cache", "101%"), "--cache: '101%'"),
        (("--bw", "100,-5"), "--bw"),
        (("--setup", "long"), "--setup: 'long'"),
        (("--t", "0"), "--t: must be above 0, not '0'"),
        (("--policy", "lru,best"), "--policy: there is no policy 'best'"),
        (("--jobs", "0"), "--jobs"),
        (("--jobs", "2", "--scheduler", "tcp://127.0.0.1:1"), "--jobs and --scheduler"),
        (("--report", "/nowhere/out.html"), "--report"),
    ],
)
def test_bad_options_are_named(args: tuple[str, ...], named: str, trace: str) -> None:
    done = called("simulate", trace, *args)
    assert (done.returncode, done.stdout) == (2, "") and named in done.stderr


def test_bad_traces_are_named(tmp_path: Path) -> None:
    foreign, empty = tmp_path / "foreign.parquet", saved(trace_of([]), tmp_path, "empty.parquet")
    foreign.write_text("no Parquet")
    lost = saved(trace_of(loop(9, 9, 3), provenance=Provenance("ebpf", lost_events=3)), tmp_path, "lost.parquet")
    timeless = saved(trace_of(loop(9, 9, 3), step_ns=0), tmp_path, "timeless.parquet")
    for args, code, named in (
        ((foreign,), 5, "foreign.parquet"),
        ((tmp_path / "none.parquet",), 2, "none.parquet"),
        ((lost, "--policy", "lru,belady"), 5, "lost_events"),
        ((timeless, "--t", "0.1"), 5, "t_ns"),
        ((timeless, empty), 5, "rows"),
    ):
        done = called("simulate", *args, "--cache", "4Ki")
        assert (done.returncode, done.stdout) == (code, "") and named in done.stderr
    assert called("simulate", lost, timeless, "--policy", "lru", "--cache", "4Ki").returncode == 0


def test_ctrl_c_ends_a_simulation_quietly(tmp_path: Path) -> None:
    path = saved(trace_of([(0, block % 50_000, 1, 0) for block in range(0, 7 * 40_000, 7)]), tmp_path)
    code = "import sys; from llmcache.cache import simulate; simulate.BATCH_ROWS = 1000\n"
    code += "import time\nold = simulate.PolicyCell.feed\n"
    code += "def feed(self, part):\n    print('fed', flush=True); time.sleep(0.5); old(self, part)\n"  # half a minute in all
    code += "simulate.PolicyCell.feed = feed\nfrom llmcache import cli; cli.main()"
    command = [sys.executable, "-c", code, "simulate", path, "--policy", "lru,sieve", "--cache", "10%,50%"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("fed")  # output of threads may interleave
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0
        assert "Traceback" not in err and err == ""
        assert "hit ratio" not in out


def test_memory_of_the_mount_policy_does_not_grow_with_the_trace() -> None:
    """Compare allocations after 3000 random reads and after 9000 more, which would take 72 kB if they were kept."""
    random = np.random.default_rng(1)
    kept_bytes: list[int] = []
    policy = policy_class("llmcache")(2000, 100_000)
    tracemalloc.start()
    try:
        for rows in (3_000, 9_000):
            policy.replay(random.integers(0, 100_000, rows), np.ones(rows, np.int64))
            kept_bytes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert kept_bytes[1] < kept_bytes[0] + 20_000
