"""Metrics of real mounts: what they add up to, who may ask, and scrapers that hang."""

from __future__ import annotations

import os
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from llmcache.fs.client import control
from tests.mount.conftest import Mounted, Mounter
from tests.mount.live import MIB, by_read, llmcache, random_file, said, wait_for

SIZE = 80 * MIB + 7  # more than budget and window: every pass is seen


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source")
    random_file(directory / "secret-loop.bin", SIZE)
    return directory


def stats(mounted: Mounted) -> dict[str, Any]:
    return said("stats", mounted.point)


def know(mounted: Mounted) -> None:
    """The mount knows every file from now on: what is read before is not seen, and the kernel keeps it meanwhile."""
    control.request(str(mounted.point), {"op": "warmup", "check": True})


def scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as reply:
        return str(reply.read().decode())


def values(text: str) -> dict[str, float]:
    """Sums of all values with one name."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):  # type: ignore[no-untyped-call]
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def test_they_add_up_to_what_was_read(mount: Mounter, source: Path, mode: str) -> None:
    mounted = mount("--mode", mode, "--metrics", "127.0.0.1:0", source=source)
    address = stats(mounted)["metrics"]
    first = values(scrape(address))
    assert first["llmcache_read_bytes_total"] == 0 and first["llmcache_budget_bytes"] == 32 * MIB
    know(mounted)
    path = mounted.point / "secret-loop.bin"
    expected = by_read(source / "secret-loop.bin")
    for _ in range(3):
        assert by_read(path) == expected
        assert values(scrape(address))  # while it is open, and while it loops
    facts: dict[str, Any] = {}
    found: dict[str, float] = {}

    def at_rest() -> bool:
        """What is fetched ahead of the last reader may still come between one command and the next."""
        before = stats(mounted)
        found.update(values(llmcache("stats", mounted.point, "--openmetrics").stdout))
        facts.update(stats(mounted))
        return all(before[key] == facts[key] for key in ("backing_read_bytes", "stored_bytes", "prefetch", "waits"))

    wait_for(at_rest, "nothing moves")
    for name, key in (("storage_read", "backing_read_bytes"), ("requested", "requested_bytes"), ("fetched", "stored_bytes")):
        assert found[f"llmcache_{name}_bytes_total"] == facts[key]
    assert found["llmcache_read_bytes_total"] == facts["read_bytes"]
    if mode == "arena":
        # Each pass is seen. What was asked for before the mount knew the file is asked for twice. What is not dropped yet
        # when the next pass comes to it, of the budget at most, is not asked for at all.
        assert -2 * 32 * MIB <= facts["read_bytes"] - 3 * SIZE <= 2 * MIB
    waits = facts["waits"]
    assert found["llmcache_wait_seconds_count"] == sum(sum(waits[reason]["counts"]) for reason in ("late", "demand"))
    assert found["llmcache_prefetch_bytes_total"] == sum(facts["prefetch"].values())
    assert sum(facts["prefetch"].values()) > 0 and found["llmcache_wait_seconds_count"] > 0


def test_names_of_files_are_told_to_the_user_and_to_others_only_on_request(mount: Mounter, source: Path) -> None:
    mounted = mount("--metrics", "127.0.0.1:0", source=source)
    know(mounted)
    by_read(mounted.point / "secret-loop.bin")
    by_read(mounted.point / "secret-loop.bin")
    assert "secret" in llmcache("stats", mounted.point, "--openmetrics").stdout
    assert "secret" not in scrape(stats(mounted)["metrics"])
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"http://{stats(mounted)['metrics']}/secret-loop.bin", timeout=60)
    assert llmcache("umount", mounted.point).returncode == 0
    open_to_all = mount("--metrics", "127.0.0.1:0", "--metrics-files", source=source)
    know(open_to_all)
    by_read(open_to_all.point / "secret-loop.bin")
    by_read(open_to_all.point / "secret-loop.bin")
    assert 'file="/secret-loop.bin"' in scrape(stats(open_to_all)["metrics"])


def test_scrapers_that_hang_harm_nobody(mount: Mounter, source: Path) -> None:
    mounted = mount("--metrics", "127.0.0.1:0", source=source)
    host, _, port = stats(mounted)["metrics"].rpartition(":")
    hanging = [socket.create_connection((host, int(port)), timeout=60) for _ in range(40)]
    for connection in hanging[::2]:
        connection.sendall(b"GET /metrics HTTP/1.1\r\n")
    try:
        path, expected = mounted.point / "secret-loop.bin", by_read(source / "secret-loop.bin")
        assert [by_read(path) for _ in range(2)] == [expected] * 2
        assert stats(mounted)["read_bytes"] > 0
        assert llmcache("umount", mounted.point).returncode == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), timeout=60)
    finally:
        for connection in hanging:
            connection.close()


def test_a_port_in_use_is_told_before_there_is_a_mount(mount: Mounter, tmp_path: Path) -> None:
    first = mount("--metrics", "127.0.0.1:0")
    address = stats(first)["metrics"]
    other = tmp_path / "other"
    other.mkdir()
    for words in (["--metrics", address], ["-o", f"metrics={address}"], ["--metrics", address, "-f"]):
        refused = llmcache("mount", first.source, other, "--cache", "32Mi", *words)
        assert refused.returncode == 4
        assert f"metrics: cannot listen on {address}: Address already in use" in refused.stderr
        assert "hint: choose another port" in refused.stderr and not os.path.ismount(other)
    assert llmcache("umount", first.point).returncode == 0
    again = mount("--metrics", address)  # the port is free with the mount
    assert stats(again)["metrics"] == address


def test_a_mount_without_metrics_listens_nowhere(mount: Mounter) -> None:
    mounted = mount()
    assert stats(mounted)["metrics"] is None
    links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{mounted.pid}/fd")]
    inodes = {link[8:-1] for link in links if link.startswith("socket:")}
    tables = [Path(f"/proc/{mounted.pid}/net/{name}") for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    assert not [row for row in rows if row[9] in inodes]
