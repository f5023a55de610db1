"""Metrics: output that Prometheus' own parser accepts for any file name, and an endpoint that no scraper can block."""

from __future__ import annotations

import http.client
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from llmcache.errors import MountProblem, UsageError
from llmcache.mount.daemon import openmetrics
from llmcache.mount.daemon.openmetrics import (
    CONNECTIONS,
    REQUEST_BYTES,
    MetricsEndpoint,
    exposition,
    labels_of,
    parse_address,
)
from tests.mount.live import wait_for
from tests.unit.top_parts import as_stats, file, loop, stats

PATHS = st.binary(min_size=1, max_size=30).map(lambda name: "/" + name.decode("utf-8", "surrogateescape"))


def parsed(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return all samples by name and labels; fail on duplicates."""
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(text):  # type: ignore[no-untyped-call]
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def value(text: str, name: str, **labels: str) -> float:
    return parsed(text)[name, frozenset(labels.items())]


def test_counters_are_exported_in_base_units() -> None:
    facts = stats()
    text = exposition(as_stats(facts), "/mnt/models", paths=True)
    at: dict[str, Any] = {"mount": "/mnt/models"}
    assert text.endswith("# EOF\n")
    assert value(text, "llmcache_budget_bytes", **at) == facts["budget_bytes"]
    assert value(text, "llmcache_read_bytes_total", source="memory", **at) == facts["hit_bytes"]
    assert value(text, "llmcache_read_bytes_total", source="storage", **at) == facts["miss_bytes"]
    assert value(text, "llmcache_prefetch_bytes_total", outcome="late", **at) == 90_000_000
    assert value(text, "llmcache_byte_hit_ratio", **at) == 0.6
    assert value(text, "llmcache_mount_info", mode="steer", **at) == 1
    assert value(text, "llmcache_files", **{"class": "hot"}, **at) == 1
    assert value(text, "llmcache_loop_period_seconds", file="/model.gguf", **at) == 0.5
    assert value(text, "llmcache_loop_passes_total", file="/model.gguf", **at) == 12
    assert "model.gguf" not in exposition(as_stats(facts), "/m", paths=False), "names of files are left out unless requested"
    late = {"reason": "late", **at}
    assert value(text, "llmcache_wait_seconds_bucket", le="0.003", **late) == 2
    assert value(text, "llmcache_wait_seconds_bucket", le="+Inf", **late) == 3
    assert value(text, "llmcache_wait_seconds_count", **late) == 3
    assert value(text, "llmcache_wait_seconds_sum", **late) == pytest.approx(0.0245)
    unread = exposition(as_stats(stats(read_bytes=0, hit_bytes=0, miss_bytes=0, files=[])), "/m", paths=True)
    assert parsed(unread) and "hit_ratio" not in unread and "llmcache_loop" not in unread


def test_each_loop_has_the_figures_of_the_decision_to_steer_it() -> None:
    left = loop(left=True, unused_bytes=3, steered_pass_bytes=2_000_000, lru_pass_bytes=500_000)
    old = loop()
    for key in ("left", "unused_bytes", "steered_pass_bytes", "lru_pass_bytes"):
        del old[key]
    facts = stats(files=[file("/left", left), file("/new", loop()), file("/old", old)])
    found = parsed(exposition(as_stats(facts), "/m", paths=True))

    def values(name: str) -> dict[str, float]:
        at = {dict(labels)["file"]: value for (key, labels), value in found.items() if key == f"llmcache_loop_{name}"}
        return {path: at[path] for path in sorted(at)}

    assert values("left") == {"/left": 1, "/new": 0}
    assert values("unused_bytes") == {"/left": 3, "/new": 0}
    assert values("steered_pass_bytes") == {"/left": 2_000_000}, "unknown for the others"
    assert values("lru_pass_bytes") == {"/left": 500_000}
    assert values("passes_total") == dict.fromkeys(("/left", "/new", "/old"), 12)


@given(PATHS, st.lists(PATHS, max_size=6, unique=True))
def test_any_path_can_be_a_label(mount: str, paths: list[str]) -> None:
    facts = stats(files=[file(path, loop(pinned_mb=place)) for place, path in enumerate(paths)])
    text = exposition(as_stats(facts), mount, paths=True)
    text.encode()  # valid UTF-8
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


Answer = tuple[int, dict[str, str], bytes]


def get(address: str, path: str = "/metrics", method: str = "GET") -> Answer:
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=120)
    connection.request(method, path)
    reply = connection.getresponse()
    return reply.status, dict(reply.getheaders()), reply.read()


def status_of(address: str, path: str = "/metrics") -> int | None:
    """Return the status of a GET, or None if the deadline ended the connection."""
    try:
        return get(address, path)[0]
    except (OSError, http.client.HTTPException):
        return None


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Return a function that serves a text and returns the address; only a hang reaches the deadline."""
    monkeypatch.setattr(openmetrics, "DEADLINE_S", 120.0)
    made: list[MetricsEndpoint] = []

    def begin(text: Callable[[], str], where: str = "127.0.0.1:0") -> str:
        made.append(MetricsEndpoint(where))
        made[-1].start(text)
        return made[-1].address

    yield begin
    for each in made:
        each.close()


def dial(address: str, sends: bytes = b"") -> socket.socket:
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=120)
    connection.sendall(sends)
    return connection


def test_only_loopback_addresses_are_accepted() -> None:
    assert parse_address("127.1.2.3:0") == ("127.1.2.3", 0)
    assert parse_address("[::1]:80") == ("::1", 80)
    assert parse_address("localhost:1") == ("127.0.0.1", 1)
    for host in ("0.0.0.0", "192.168.1.2", "[::]", "example.org", "*", "128.0.0.1", "126.255.255.255"):
        with pytest.raises(UsageError, match="not a loopback address"):
            parse_address(f"{host}:9464")
    wrong = ("", "9464", "127.0.0.1", ":1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "127.0.0.1:" + "9" * 5000)
    for text in (*wrong, "::1:9464"):
        for end in ("", " "):
            with pytest.raises(UsageError, match=r"^metrics: ") as caught:
                parse_address(text + end)
            assert caught.value.hint


@pytest.mark.parametrize("where", ["127.0.0.1:0", "[::1]:0"])
def test_the_text_is_served(serve: Callable[..., str], where: str) -> None:
    try:
        address = serve(lambda: "hällo\n# EOF\n", where)
    except MountProblem:
        pytest.skip(f"no {where} here")
    status, headers, body = get(address)
    assert (status, body.decode()) == (200, "hällo\n# EOF\n")
    assert headers["Content-Type"] == CONTENT_TYPE_LATEST
    status, headers, body = get(address, method="HEAD")
    assert (status, body, headers["Content-Length"]) == (200, b"", "13")


def test_only_the_metrics_are_served(serve: Callable[..., str]) -> None:
    address = serve(lambda: "text")
    assert get(address, "/metrics?x=1")[0] == 200
    for path in ("/", "/metrics/", "/../etc/passwd", "/%6detrics"):
        assert get(address, path)[0] == 404
    status, headers, _ = get(address, method="POST")
    assert (status, headers["Allow"]) == (405, "GET, HEAD")
    with dial(address, b"HEAD /nothing HTTP/1.1\r\n\r\n") as connection:
        reply = connection.makefile("rb").read()
    assert reply.startswith(b"HTTP/1.1 404 ") and reply.endswith(b"\r\n\r\n"), "HEAD: the reply has no body"
    for line in (b"nonsense\r\n\r\n", b"GET /metrics\r\n\r\n", b"\r\n\r\n"):
        with dial(address, line) as connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 400 ")


def test_a_failure_is_logged_and_hidden_from_the_scraper(
    serve: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        status, _, body = get(serve(Mock(side_effect=RuntimeError("/home/me/secret.gguf"))))
    assert status == 500 and b"secret" not in body
    assert "cannot collect the metrics" in caplog.text


def test_connections_are_limited(serve: Callable[..., str]) -> None:
    address = serve(lambda: "text")
    with ExitStack() as stack:
        for _ in range(CONNECTIONS):
            stack.enter_context(dial(address, b"GET /met"))
        assert [get(address)[0] for _ in range(30)] == [503] * 30  # a reply, not a reset connection
    wait_for(lambda: not any(each.name == "metrics-request" for each in threading.enumerate()), "the connections are closed")
    assert get(address)[0] == 200, "the next one is served"


def test_hanging_scrapers_are_disconnected(serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmetrics, "DEADLINE_S", 0.5)
    address = serve(lambda: "text")
    with ExitStack() as stack:
        hanging = [stack.enter_context(dial(address, b"GET /met")) for _ in range(CONNECTIONS)]
        for connection in hanging:
            assert connection.recv(100) == b""  # closed by the deadline
        wait_for(lambda: status_of(address) == 200, "the connections are closed")


@pytest.mark.parametrize(
    ("deadline_s", "piece", "pieces"),
    [(0.5, b"G", REQUEST_BYTES), (120.0, b"x" * 4096, 6000)],  # for 160 deadlines, and for half a deadline
    ids=["byte by byte", "without end"],
)
def test_a_scraper_that_keeps_sending_is_disconnected(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch, deadline_s: float, piece: bytes, pieces: int
) -> None:
    monkeypatch.setattr(openmetrics, "DEADLINE_S", deadline_s)
    with dial(serve(lambda: "text")) as connection, pytest.raises(ConnectionError):
        for _ in range(pieces):
            connection.sendall(piece)
            time.sleep(0.01)


def test_a_scraper_that_does_not_read_is_disconnected(serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmetrics, "DEADLINE_S", 0.3)
    address = serve(lambda: "x" * (64 << 20))
    with ExitStack() as stack:
        for _ in range(CONNECTIONS):
            stack.enter_context(dial(address, b"GET /metrics HTTP/1.1\r\n\r\n"))
        wait_for(lambda: status_of(address, "/") == 404, "a connection is closed")


def test_frequent_scrapes_reuse_the_last_metrics(serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmetrics, "FRESH_S", 60.0)
    collected: list[int] = []
    address = serve(lambda: collected.append(1) or "text")  # type: ignore[func-returns-value]
    assert [get(address)[0] for _ in range(20)] == [200] * 20
    assert len(collected) == 1
