"""What `llmcache top` makes of a mount's replies: rates, the span they are of, waits, mounts that end or are others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcache.errors import MountProblem
from llmcache.fs.client.top import HEAT_SHARE, Watcher, lines, quantile_s, waits_between
from llmcache.fs.engine.state import BOUNDS_NS
from tests.unit.top_parts import MB, file, heat, layer, loop, stats, waits


class Mount:
    """Replies with the counters that it is given, one after the other; an error is raised."""

    def __init__(self, *replies: dict[str, Any] | Exception) -> None:
        self.replies = list(replies)
        self.asked: list[str] = []
        self.now_s = 0.0
        self.takes_s = 0.0

    def __call__(self, _mount: str, question: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(question["op"])
        if question["op"] == "heat":
            self.now_s += self.takes_s
            return heat(layer("blk.0"))
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def watcher(self) -> Watcher:
        return Watcher("/mnt", self, lambda: self.now_s)


def at(uptime_s: float, read_mb: int, **more: Any) -> dict[str, Any]:
    return stats(uptime_s, read_bytes=read_mb * MB, hit_bytes=read_mb * MB // 2, **more)


def test_the_interval_is_what_has_moved_since_the_last_look() -> None:
    watcher = Mount(at(10, 100), at(12, 500)).watcher()
    first, second = watcher.sample(), watcher.sample()
    assert first.interval is None and first.total.read_bytes == 100 * MB
    assert second.interval is not None and second.interval.seconds == 2
    assert second.interval.read_bytes == 400 * MB and second.interval.hit_ratio == 0.5
    assert second.interval.per_s(second.interval.read_bytes) == 200 * MB


def test_the_interval_is_a_whole_period_of_the_slowest_loop_in_use() -> None:
    slow, idle = loop(period_s=5.0), loop(period_s=50.0, readers=[])
    files = [file("/a", slow), file("/b", idle), file("/c", loop(period_s=None))]
    watcher = Mount(*(at(10.0 + second, 100 * second, files=files) for second in range(9))).watcher()
    spans = [None if sample.interval is None else sample.interval.seconds for sample in (watcher.sample() for _ in range(9))]
    assert spans == [None, 1, 2, 3, 4, 5, 5, 5, 5]


def test_another_mount_on_the_same_path_begins_anew() -> None:
    watcher = Mount(at(100, 900), at(1, 3), at(2, 5)).watcher()
    samples = [watcher.sample() for _ in range(3)]
    assert samples[1].interval is None and samples[1].total.read_bytes == 3 * MB
    assert samples[2].interval is not None and samples[2].interval.read_bytes == 2 * MB


def test_another_mount_is_noticed_also_when_it_is_older_than_the_last_look() -> None:
    mount = Mount(at(5, 900), at(3000, 3), at(3001, 5))
    watcher = mount.watcher()
    watcher.sample()
    mount.now_s = 7000.0  # Ctrl-Z, a mount ends, another is made; fg
    assert watcher.sample().interval is None
    mount.now_s = 7001.0
    sample = watcher.sample()
    assert sample.interval is not None and sample.interval.read_bytes == 2 * MB


def test_a_daemon_that_hangs_for_a_while_is_no_other() -> None:
    mount = Mount(at(10, 100), at(35, 500), at(36, 600))
    watcher = mount.watcher()
    watcher.sample()
    ask = watcher._ask

    def slow(path: str, question: dict[str, Any]) -> dict[str, Any]:
        mount.now_s += 25.0 if question["op"] == "stats" else 0.0
        return ask(path, question)

    watcher._ask = slow
    second = watcher.sample()
    assert second.interval is not None and second.interval.seconds == 25
    watcher._ask = ask
    mount.now_s += 1.0
    assert watcher.sample().interval is not None


def test_what_is_remembered_is_bounded() -> None:
    files = [file(f"/{number}", loop()) for number in range(300)]
    watcher = Mount(*(at(float(second), second, files=files) for second in range(500))).watcher()
    for _ in range(500):
        watcher.sample()
    assert len(watcher._past) < 70
    assert not any("files" in past for past in watcher._past)


def test_there_is_no_mount() -> None:
    with pytest.raises(MountProblem, match=r"^no llmcachefs is mounted on /mnt$"):
        Mount(MountProblem("no llmcachefs is mounted on /mnt", "hint")).watcher().sample()


def test_a_mount_that_ends_is_said_to_have_ended() -> None:
    watcher = Mount(at(1, 1), MountProblem("no llmcachefs is mounted on /mnt", "hint")).watcher()
    watcher.sample()
    with pytest.raises(MountProblem, match="/mnt can no longer be watched: no llmcachefs") as caught:
        watcher.sample()
    assert caught.value.hint == "hint" and caught.value.exit_code == 4


def without(key: str) -> dict[str, Any]:
    facts = stats()
    del facts[key]
    return facts


@pytest.mark.parametrize(
    "foreign",
    [without("waits"), without("uptime_s"), stats(files=7), stats(files=[{}]), stats(prefetch=None), stats(pages_bytes="x")],
    ids=lambda foreign: f"{len(foreign)} keys",
)
def test_a_mount_of_another_version_is_told_as_such(foreign: dict[str, Any]) -> None:
    with pytest.raises(MountProblem, match="does not understand") as caught:
        Mount(foreign).watcher().sample()
    assert caught.value.hint and "version" in caught.value.hint


KEYS = st.sampled_from(["path", "bytes", "cells"])
NUMBERS = st.integers() | st.floats() | st.sampled_from([1e308, 1e300, 2**63, 10**400])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=2),
    max_leaves=4,
)


def places(document: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Ways to every value of a document."""
    yield way
    inner = document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    for key, value in inner:
        yield from places(value, (*way, key))


@given(st.data(), VALUES)
def test_whatever_a_daemon_of_another_tells_is_shown_or_refused(data: st.DataObject, value: Any) -> None:
    replies = {"stats": stats(), "heat": heat(layer("blk.0"), layer("blk.1"))}
    *way, last = data.draw(st.sampled_from([way for way in places(replies) if len(way) > 1]))
    target: Any = replies
    for key in way:
        target = target[key]
    target[last] = value
    watcher = Watcher("/mnt", lambda _mount, question: replies[question["op"]])
    try:
        samples = [watcher.sample(), watcher.sample()]
    except MountProblem:
        return
    for sample in samples:
        assert all(line.plain.isprintable() for line in lines(sample, 80, 24))
        json.dumps(sample.document(), allow_nan=False)


def heats(mount: Mount, advance: Callable[[Mount], None], looks: int) -> int:
    """How often heat is asked for in so many looks."""
    watcher = mount.watcher()
    for _ in range(looks):
        mount.replies = [at(mount.now_s, 0)]
        watcher.sample()
        advance(mount)
    return mount.asked.count("heat")


def test_heat_is_asked_for_the_more_seldom_the_longer_it_takes() -> None:
    def second(mount: Mount) -> None:
        mount.now_s += 1.0

    looks = 100
    quick, slow = Mount(), Mount()
    assert heats(quick, second, looks) == looks
    slow.takes_s = 1.0
    asked = heats(slow, second, looks)
    assert 1 < asked * slow.takes_s <= HEAT_SHARE * slow.now_s + 1


def test_the_document_is_json_in_base_units() -> None:
    facts = at(12, 500, waits={"late": waits(10**10), "demand": waits()})
    watcher = Mount(at(10, 100, waits={"late": waits(), "demand": waits()}), facts).watcher()
    assert watcher.sample().document()["interval"] is None
    found = json.loads(json.dumps(watcher.sample().document(), allow_nan=False))
    assert found["schema"] == "llmcache.top/1" and found["mount"] == "/mnt"
    budget = {"budget": 100, "limit": 100, "pinned": 60, "window": 10, "other": 5, "free": 25, "daemon": 22}
    assert found["budget"] == {"mode": "steer", **{f"{name}_bytes": size * MB for name, size in budget.items()}}
    assert found["interval"]["read_bytes_per_s"] == 200 * MB and found["total"]["late_ratio"] == 0.225
    assert found["interval"]["late_waits"]["median_s"] is None  # longer than the last bound
    assert found["loops"][0]["path"] == "/model.gguf" and found["loops"][0]["readers"] == [0.5]
    assert found["heat"][0]["layers"][0]["name"] == "blk.0"


DURATIONS = st.lists(st.integers(0, 20_000_000_000), max_size=50)


def test_a_bound_belongs_to_its_class() -> None:
    found = waits(*BOUNDS_NS, BOUNDS_NS[-1] + 1)
    assert found["counts"] == [1] * (len(BOUNDS_NS) + 1)
    assert found["bounds_s"][0] == 0.0001 and found["bounds_s"][-1] == 3.0


@given(DURATIONS, DURATIONS)
def test_what_is_between_two_moments_is_what_came_in_between(before: list[int], later: list[int]) -> None:
    now = waits(*before, *later)
    found = waits_between(waits(*before), now)
    assert found["counts"] == waits(*later)["counts"]
    assert found["sum_s"] == pytest.approx(sum(later) / 1e9)
    assert waits_between(None, now) == now


@given(DURATIONS, st.sampled_from([0.1, 0.5, 0.99, 1.0]))
def test_a_quantile_is_the_least_bound_that_enough_do_not_exceed(durations: list[int], share: float) -> None:
    found = quantile_s(waits(*durations), share)
    if not durations:
        assert found is None
        return
    assert found is not None
    within = sum(each <= found * 1e9 for each in durations)
    assert within >= share * len(durations)
    lower = [bound / 1e9 for bound in BOUNDS_NS if bound / 1e9 < found]
    if lower:
        assert sum(each <= lower[-1] * 1e9 for each in durations) < share * len(durations)
