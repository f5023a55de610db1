"""Metrics of real mounts: their totals, access to file names, and scrapers that hang."""

from __future__ import annotations

import os
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.mount.conftest import Mounter
from tests.mount.live import MIB, by_read, llmcache, random_file, wait_for

SIZE = 80 * MIB + 7  # more than budget and window, so that every pass reads through the mount


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source")
    random_file(directory / "secret-loop.bin", SIZE)
    return directory


def scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as reply:
        return str(reply.read().decode())


def values(text: str) -> dict[str, float]:
    """Return the sum of all samples with the same name."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):  # type: ignore[no-untyped-call]
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def test_metrics_add_up_to_the_bytes_read(mount: Mounter, source: Path, mode: str) -> None:
    mounted = mount("--mode", mode, "--metrics", "127.0.0.1:0", source=source)
    address = mounted.stats()["metrics"]
    first = values(scrape(address))
    assert first["llmcache_read_bytes_total"] == 0 and first["llmcache_budget_bytes"] == 32 * MIB
    mounted.know()
    path = mounted.point / "secret-loop.bin"
    expected = by_read(source / "secret-loop.bin")
    for _ in range(3):
        assert by_read(path) == expected
        assert values(scrape(address))  # while the file is open and while it loops
    counters: dict[str, Any] = {}
    found: dict[str, float] = {}

    def at_rest() -> bool:
        """Return whether no counter moves: the prefetches for the last reader may still end between two commands."""
        before = mounted.stats()
        found.update(values(llmcache("stats", mounted.point, "--openmetrics").stdout))
        counters.update(mounted.stats())
        return all(before[key] == counters[key] for key in ("backing_read_bytes", "stored_bytes", "prefetch", "waits"))

    wait_for(at_rest, "no counter moves")
    for name, key in (("storage_read", "backing_read_bytes"), ("requested", "requested_bytes"), ("fetched", "stored_bytes")):
        assert found[f"llmcache_{name}_bytes_total"] == counters[key]
    assert found["llmcache_read_bytes_total"] == counters["read_bytes"]
    if mode == "arena":
        # Each pass reads through the mount, with two exceptions. Requests from before the mount found the file are
        # repeated. Pages that are not dropped before the next pass, at most the budget, are not requested again.
        assert -2 * 32 * MIB <= counters["read_bytes"] - 3 * SIZE <= 2 * MIB
    waits = counters["waits"]
    assert found["llmcache_wait_seconds_count"] == sum(sum(waits[reason]["counts"]) for reason in ("late", "demand"))
    assert found["llmcache_prefetch_bytes_total"] == sum(counters["prefetch"].values())
    assert sum(counters["prefetch"].values()) > 0 and found["llmcache_wait_seconds_count"] > 0


def test_file_names_are_exported_only_to_the_user_or_on_request(mount: Mounter, source: Path) -> None:
    mounted = mount("--metrics", "127.0.0.1:0", source=source)
    mounted.know()
    by_read(mounted.point / "secret-loop.bin")
    by_read(mounted.point / "secret-loop.bin")
    assert "secret" in llmcache("stats", mounted.point, "--openmetrics").stdout
    assert "secret" not in scrape(mounted.stats()["metrics"])
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"http://{mounted.stats()['metrics']}/secret-loop.bin", timeout=60)
    assert llmcache("umount", mounted.point).returncode == 0
    open_to_all = mount("--metrics", "127.0.0.1:0", "--metrics-files", source=source)
    open_to_all.know()
    by_read(open_to_all.point / "secret-loop.bin")
    by_read(open_to_all.point / "secret-loop.bin")
    assert 'file="/secret-loop.bin"' in scrape(open_to_all.stats()["metrics"])


def test_hanging_scrapers_do_not_disturb_the_mount(mount: Mounter, source: Path) -> None:
    mounted = mount("--metrics", "127.0.0.1:0", source=source)
    host, _, port = mounted.stats()["metrics"].rpartition(":")
    hanging = [socket.create_connection((host, int(port)), timeout=60) for _ in range(40)]
    for connection in hanging[::2]:
        connection.sendall(b"GET /metrics HTTP/1.1\r\n")
    try:
        path, expected = mounted.point / "secret-loop.bin", by_read(source / "secret-loop.bin")
        assert [by_read(path) for _ in range(2)] == [expected] * 2
        assert mounted.stats()["read_bytes"] > 0
        assert llmcache("umount", mounted.point).returncode == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), timeout=60)
    finally:
        for connection in hanging:
            connection.close()


def test_a_port_in_use_is_refused_before_mounting(mount: Mounter, tmp_path: Path) -> None:
    first = mount("--metrics", "127.0.0.1:0")
    address = first.stats()["metrics"]
    other = tmp_path / "other"
    other.mkdir()
    for words in (["--metrics", address], ["-o", f"metrics={address}"], ["--metrics", address, "-f"]):
        refused = llmcache("mount", first.source, other, "--cache", "32Mi", *words)
        assert refused.returncode == 4
        assert f"metrics: cannot listen on {address}: Address already in use" in refused.stderr
        assert "hint: choose another port" in refused.stderr and not os.path.ismount(other)
    assert llmcache("umount", first.point).returncode == 0
    again = mount("--metrics", address)  # the port is free after the mount has ended
    assert again.stats()["metrics"] == address


def test_a_mount_without_metrics_opens_no_port(mount: Mounter) -> None:
    mounted = mount()
    assert mounted.stats()["metrics"] is None
    links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{mounted.pid}/fd")]
    inodes = {link[8:-1] for link in links if link.startswith("socket:")}
    tables = [Path(f"/proc/{mounted.pid}/net/{name}") for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    assert not [row for row in rows if row[9] in inodes]
