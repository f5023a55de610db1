"""OpenMetrics text: read by Prometheus' own parser, whatever files are called."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from llmcache.fs.daemon.openmetrics import Family, exposition, labels_of, number, render
from tests.unit.top_parts import file, loop, stats

PATHS = st.binary(min_size=1, max_size=30).map(lambda name: "/" + name.decode("utf-8", "surrogateescape"))


def parsed(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """All values by name and labels; each once."""
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(text):  # type: ignore[no-untyped-call]
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def value(text: str, name: str, **labels: str) -> float:
    return parsed(text)[name, frozenset(labels.items())]


def test_the_counters_come_out_in_base_units() -> None:
    facts = stats()
    text = exposition(facts, "/mnt/models", paths=True)
    at: dict[str, Any] = {"mount": "/mnt/models"}
    assert text.endswith("# EOF\n")
    assert value(text, "llmcache_budget_bytes", **at) == facts["budget_bytes"]
    assert value(text, "llmcache_read_bytes_total", source="memory", **at) == facts["hit_bytes"]
    assert value(text, "llmcache_read_bytes_total", source="storage", **at) == facts["miss_bytes"]
    assert value(text, "llmcache_prefetch_bytes_total", outcome="late", **at) == 90_000_000
    assert value(text, "llmcache_byte_hit_ratio", **at) == 0.6
    assert value(text, "llmcache_uptime_seconds", **at) == 100
    assert value(text, "llmcache_cpu_seconds_total", **at) == 1.5
    assert value(text, "llmcache_mount_info", mode="steer", **at) == 1
    assert value(text, "llmcache_files", **{"class": "hot"}, **at) == 1
    assert value(text, "llmcache_loop_period_seconds", file="/model.gguf", **at) == 0.5
    assert value(text, "llmcache_loop_passes_total", file="/model.gguf", **at) == 12


def test_waits_are_a_histogram() -> None:
    text = exposition(stats(), "/m", paths=False)
    late = {"mount": "/m", "reason": "late"}
    assert value(text, "llmcache_wait_seconds_bucket", le="0.003", **late) == 2
    assert value(text, "llmcache_wait_seconds_bucket", le="+Inf", **late) == 3
    assert value(text, "llmcache_wait_seconds_count", **late) == 3
    assert value(text, "llmcache_wait_seconds_sum", **late) == pytest.approx(0.0245)


def test_without_being_asked_it_names_no_file() -> None:
    facts = stats(files=[file("/secret.gguf", loop())])
    assert "secret" not in exposition(facts, "/m", paths=False)
    assert "secret" in exposition(facts, "/m", paths=True)


def test_a_mount_that_nobody_has_read_has_no_ratio() -> None:
    text = exposition(stats(read_bytes=0, hit_bytes=0, miss_bytes=0, files=[]), "/m", paths=True)
    assert "hit_ratio" not in text and "llmcache_loop" not in text
    assert parsed(text)


@given(PATHS, st.lists(PATHS, max_size=6, unique=True))
def test_any_path_can_be_a_label(mount: str, paths: list[str]) -> None:
    facts = stats(files=[file(path, loop(pinned_mb=place)) for place, path in enumerate(paths)])
    text = exposition(facts, mount, paths=True)
    text.encode()  # it is UTF-8
    pinned = {key[1]: got for key, got in parsed(text).items() if key[0] == "llmcache_loop_pinned_bytes"}
    assert sorted(pinned.values()) == [place * 1_000_000 for place in range(len(paths))]
    assert {dict(labels)["file"] for labels in pinned} == set(labels_of(paths))


@given(st.lists(PATHS | st.sampled_from(["/\udcff", "/\\xff", "/\\xff (2)", "/\udcfe"]), unique=True))
def test_different_paths_have_different_labels(paths: list[str]) -> None:
    labels = labels_of(paths)
    assert len(set(labels)) == len(paths)
    for path, label in zip(paths, labels, strict=True):
        if path.isprintable() and "\\" not in path:
            assert label == path


@given(st.floats(allow_nan=False) | st.integers(0, 1 << 63))
def test_values_are_kept(amount: float) -> None:
    assert value(render([Family("x", "gauge", "An x.").add(amount)]), "x") == amount
    assert number(3) == "3" and number(0.1) == "0.1"
