"""The option `--scheduler`: a Dask cluster of processes gives the rows of a local run, and errors name their cause."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmcache.cache import cluster
from llmcache.cache.plan import AUTO, Plan
from llmcache.errors import MissingRequirement
from tests.unit.command_parts import called
from tests.unit.simulation_parts import loop, saved, trace_of


@pytest.fixture(scope="module")
def distributed() -> Any:
    """Import the module only for tests that run, because the import takes longer than most tests."""
    return pytest.importorskip("distributed")


@pytest.fixture(autouse=True)
def _long_timeouts(distributed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a slow scheduler time to answer."""
    monkeypatch.setattr(cluster, "CONNECT_S", 120)


@pytest.fixture(scope="module")
def address(distributed: Any) -> Iterator[str]:
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0", host="127.0.0.1"
    ) as running:
        yield running.scheduler_address


@pytest.fixture
def traces(tmp_path: Path) -> list[str]:
    one = trace_of(loop(200, 5, 16) + loop(20, 3, 5, op=1))
    two = trace_of(loop(30, 9, 1))
    return [saved(one, tmp_path, "one.parquet"), saved(two, tmp_path, "two.parquet")]


PLAN = Plan(("lru", "sieve", "belady"), AUTO, period_ns=10_000_000, curves=True)


def test_the_command_gives_the_same_json(address: str, traces: list[str]) -> None:
    documents = []
    for options in ([], ["--scheduler", address]):
        done = called("simulate", *traces, "--policy", "lru,sieve,belady", "--t", "10ms", "--json", "--mrc", *options)
        assert done.returncode == 0, done.stderr
        documents.append(json.loads(done.stdout))
    assert documents[0] == documents[1]
    assert len(documents[0]["results"]) == 3 * 19  # 2 % and 5 % of 30 blocks are both one block


def test_another_version_on_the_workers_is_refused(address: str, traces: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "__version__", "99.0")
    with pytest.raises(MissingRequirement, match=r"worker tcp://.* has llmcache .*, but this machine has 99\.0"):
        cluster.simulate_on(address, traces, PLAN)


@pytest.mark.timeout(600)  # Dask once took five minutes for one of these three instead of three seconds
def test_an_unreachable_scheduler_is_an_error(traces: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = "tcp://127.0.0.1:1"
    monkeypatch.setattr(cluster, "CONNECT_S", 1)
    with pytest.raises(MissingRequirement, match=f"--scheduler: cannot reach a Dask scheduler at '{wrong}'"):
        cluster.simulate_on(wrong, traces, PLAN)


def test_a_missing_cluster_extra_is_named(traces: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(MissingRequirement) as caught:
        cluster.simulate_on("tcp://127.0.0.1:8786", traces, PLAN)
    assert caught.value.hint is not None and "llmcache-toolkit[cluster]" in caught.value.hint


@pytest.mark.parametrize(("threads", "tasks"), [(1, 3), (3, 3), (4, 6), (1000, 30)])
def test_a_plan_is_split_by_the_number_of_threads(threads: int, tasks: int) -> None:
    parts = cluster.parts_of(PLAN, threads)
    assert len(parts) == tasks
    assert [(part.policies[0], size) for part in parts for size in part.sizes] == [
        (policy, size) for policy in PLAN.policies for size in PLAN.sizes
    ]
    assert [part.curves for part in parts] == [True] + [False] * (tasks - 1)
