"""The `llmcache stats`, `resize`, `warmup` and `evict` commands: hostile names and malformed replies."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from llmcache.errors import MountProblem, UsageError
from llmcache.mount.client import mountpoint, operation
from llmcache.procfs import Mount
from tests.unit.top_parts import file, loop, stats


def shown(facts: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(operation, "fetch", lambda _mount: facts)
    operation.show_stats("/mnt/[bold]\x1b[2J", pause_s=None, count=None, as_json=False)
    return capsys.readouterr().out


def test_control_characters_in_replies_are_escaped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = stats(files=[file("/[red]\x1b]0;x\x07\udcff.gguf", loop())], metrics="127.0.0.1:9464")
    said = shown(facts, capsys, monkeypatch)
    assert "\x1b" not in said and "\x07" not in said
    assert "/mnt/[bold]\\x1b[2J: mode steer" in said and "[red]" in said
    assert "metrics on http://127.0.0.1:9464/metrics" in said
    facts = stats(mode="\x1b[2J", metrics="\x1b[3J", files=[file("/a", loop()) | {"class": "[/x]\x1b[1J"}])
    facts["services"] = {"running": 1, "failures": 0, "ended": ["\x1b[2J[/y]"]}
    said = shown(facts, capsys, monkeypatch)
    assert "\x1b" not in said and "[/x]" in said and "[/y]" in said


def test_the_counters_of_a_daemon_of_version_1_0_are_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not send all keys."""
    experts = {"count": 8, "kept": 3, "kept_bytes": 30, "bytes": 80}
    model = file("/model.gguf", loop()) | {"experts": experts}
    for key in ("unused_bytes", "left", "steered_pass_bytes", "lru_pass_bytes"):
        del model["loops"][0][key]
    facts = stats(files=[model, file("/a.json")])
    del facts["client_read_bytes"]
    said = shown(facts, capsys, monkeypatch)
    assert re.search(r"^model.gguf +100 MB +loop ", said, re.MULTILINE) and "3 of 8 experts cached, 30 B of 80 B" in said


ROW = {"path": "/a", "size_bytes": 1, "wanted_bytes": 1, "warm_bytes": 1, "pinned": False}
WARMUP_REPLY = {"files": [ROW], "warm_bytes": 1, "wanted_bytes": 1, "read_bytes": 1, "seconds": 1.0, "unreadable": []}


@pytest.mark.parametrize(
    ("call", "reply"),
    [
        (lambda: operation.show_openmetrics("/mnt"), {name: fact for name, fact in stats().items() if name != "waits"}),
        (lambda: operation.show_stats("/mnt", pause_s=None, count=None, as_json=False), {"files": []}),
        (lambda: operation.resize("/mnt", 1, as_json=False), {}),
        (lambda: operation.resize("/mnt", 1, as_json=False), {"before_bytes": [], "budget_bytes": 1, "resident_bytes": 1}),
        (lambda: operation.warmup("/mnt", (), check=True, as_json=True), {}),
        (lambda: operation.warmup("/mnt", (), check=False, as_json=False), WARMUP_REPLY | {"unreadable": 5}),
        (lambda: operation.warmup("/mnt", (), check=False, as_json=False), WARMUP_REPLY | {"files": [ROW | {"path": 5}]}),
        (lambda: operation.evict("/mnt", (), as_json=False), {"evicted_bytes": 1, "groups": [{}], "pinned": []}),
        (lambda: operation.evict("/mnt", (), as_json=False), {"evicted_bytes": 1, "groups": [], "pinned": 5}),
    ],
)
def test_malformed_replies_are_refused(
    call: Callable[[], None], reply: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for function in ("ask", "fetch"):
        monkeypatch.setattr(operation, function, lambda *_: reply)
    with pytest.raises(MountProblem, match="does not understand"):
        call()


@pytest.mark.parametrize("wrong", [{"mode": []}, {"budget_bytes": "1"}, {"read_bytes": 10**400}, {"uptime_s": None}])
def test_a_malformed_reply_does_not_hide_other_mounts(
    wrong: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = [Mount(number, 0, "/", point, mountpoint.FSTYPE, "rw") for number, point in enumerate(("/bad", "/good"))]
    monkeypatch.setattr(mountpoint, "of_user", lambda: mounts)
    monkeypatch.setattr(operation, "fetch", lambda point: stats(**wrong) if point == "/bad" else stats())
    operation.show_mounts(as_json=False)
    said = capsys.readouterr()
    bad, good = said.out.splitlines()[1:]
    assert bad.startswith("no answer ") and good.startswith("steer ")
    assert said.err == "llmcache: /bad: this version of llmcache does not understand the reply of the daemon\n"


def test_rates_use_the_time_between_samples(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [stats(10.0, read_bytes=0), stats(20.0, read_bytes=10**9), stats(1.0, read_bytes=5 * 10**6)]
    monkeypatch.setattr(operation, "fetch", lambda _mount: samples.pop(0))
    operation.show_stats("/mnt", pause_s=0.001, count=3, as_json=False)
    first, second, of_another_mount = (re.split(r"\s{2,}", line)[4:7] for line in capsys.readouterr().out.splitlines()[1:])
    assert second == ["100 MB", "0 B", "0 B"]
    assert first == of_another_mount == ["-", "-", "-"]


@pytest.mark.parametrize("pause_s", [0.0, -1.0])
def test_an_interval_that_is_not_positive_is_refused(pause_s: float) -> None:
    with pytest.raises(UsageError, match="INTERVAL"):
        operation.show_stats("/mnt", pause_s=pause_s, count=None, as_json=False)
