"""The `llmcache top` command: rates and their interval, mounts that end or change, and output that fits the terminal."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcache.errors import MountProblem
from llmcache.mount.client.top import (
    HEAT_SHARE,
    LoopState,
    Sample,
    Watcher,
    fold,
    lines,
)
from llmcache.mount.stats import FileHeat, LayerHeat, LoopStats, from_json
from tests.fuzz.mutations import documents
from tests.fuzz.target import light
from tests.unit.top_parts import MB, as_layer, cells, file, heat, layer, loop, stats, waits

BEFORE = stats(
    98.0,
    read_bytes=800 * MB,
    hit_bytes=500 * MB,
    backing_read_bytes=300 * MB,
    stored_bytes=295 * MB,
    prefetch={"useful_bytes": 290 * MB, "late_bytes": 0, "wasted_bytes": 10 * MB},
    waits={"late": waits(), "demand": waits(5_000_000)},
)
HEAT = heat(
    layer("header", 1, 1, age_s=None, cells=cells("9")),
    layer("token_embd.weight", 19, 0, pages_bytes=MB, cells=cells(pages="55" + "0" * 14, cold="9" * 16)),
    layer("blk.0"),
    layer("blk.1", cells=cells(pinned="9999555500000000", window="0" * 10 + "330000")),
    layer("blk.2", 20, 0, age_s=700.0, cells=cells(cold="9" * 16)),
)


def sample(*replies: dict[str, Any], warmth: dict[str, Any] = HEAT) -> Sample:
    """Return the last sample of a watcher that receives these counters."""
    left = iter(replies)
    watcher = Watcher("/mnt/models", lambda _mount, question: next(left) if question["op"] == "stats" else warmth)
    return [watcher.sample() for _ in replies][-1]


LAYERS = st.builds(
    lambda name, size, pinned, age, digits: as_layer(
        layer(name, size, min(size, pinned), age_s=age, cells=cells(digits, window=digits[::-1] * 16))
    ),
    name=st.text(max_size=30),
    size=st.integers(0, 10_000),
    pinned=st.integers(0, 10_000),
    age=st.none() | st.floats(0, 1e7),
    digits=st.sampled_from("0123456789"),
)
FILES = st.builds(
    lambda path, layers, more: FileHeat(
        path=f"/{path}", size_bytes=100 * MB, extent_bytes=MB, layers=tuple(layers), left_out_layers=more
    ),
    path=st.text(max_size=60),
    layers=st.lists(LAYERS, min_size=1, max_size=20),
    more=st.integers(0, 5),
)
BYTES = st.integers(0, 1 << 50)
LOOPS = st.builds(
    lambda path, size, period, share, readers, judgement: LoopState(
        f"/{path}",
        path,
        from_json(
            LoopStats,
            loop(bytes=size, period_s=period, pinned_bytes=share * size // 9, readers=readers)
            | dict(zip(("left", "unused_bytes", "steered_pass_bytes", "lru_pass_bytes"), judgement, strict=True)),
        ),
    ),
    path=st.text(max_size=60),
    size=BYTES,
    period=st.none() | st.floats(1e-9, 1e6),
    share=st.integers(0, 9),
    readers=st.lists(st.floats(0, 1.5), max_size=8),
    judgement=st.tuples(st.booleans(), BYTES, st.none() | BYTES, st.none() | BYTES),
)


@given(
    st.lists(FILES, max_size=5),
    st.lists(LOOPS, max_size=8),
    st.integers(20, 200),
    st.none() | st.integers(1, 60),
    st.integers(0, 3),
)
def test_output_fits_the_terminal(
    files: list[FileHeat], loops: list[LoopState], width: int, rows: int | None, more: int
) -> None:
    found = lines(
        replace(sample(BEFORE, stats()), heat=tuple(files), loops=tuple(loops), left_out_files=more),
        width,
        rows,
        "every 1 s, q quits",
    )
    assert rows is None or len(found) <= rows
    assert all(line.cell_len <= max(80, width) for line in found)
    assert all(line.plain.isprintable() for line in found)
    if rows is None or rows > 40:
        assert sum("░ streamed" in line.plain for line in found) == len(files) or rows is not None


@given(st.lists(LAYERS, min_size=1, max_size=40), st.integers(1, 50))
def test_folding_layers_keeps_all_bytes_and_the_order(layers: list[LayerHeat], rows: int) -> None:
    folded = fold(layers, rows)
    assert 1 <= len(folded) <= max(rows, 1)
    for name in ("tensors", "size_bytes", "pinned_bytes", "streamed_bytes"):
        assert sum(getattr(each, name) for each in folded) == sum(getattr(each, name) for each in layers)
    assert folded[0].name.startswith(layers[0].name) and folded[-1].name.endswith(layers[-1].name)
    for each in folded:
        assert all(len(digits) == 16 and set(digits) <= set("0123456789") for digits in each.cells.values())


def test_the_hit_ratio_is_unknown_if_hits_cannot_be_observed() -> None:
    """In the modes steer and inplace, reads of resident data send no request."""
    for mode, ratio in (("steer", None), ("inplace", None), ("arena", 0.0)):
        seen = sample(*(stats(10.0 + n, mode=mode, hit_bytes=0, read_bytes=(1 + n) * MB) for n in range(2)))
        assert seen.interval is not None
        assert seen.total.hit_ratio == seen.interval.hit_ratio == ratio


# Processing of replies


class Mount:
    """Replies with the given counters in order; errors among them are raised."""

    def __init__(self, *replies: dict[str, Any] | Exception) -> None:
        self.replies = list(replies)
        self.asked: list[str] = []
        self.now_s = 0.0
        self.takes_s = 0.0  # duration of a heat reply
        self.answers_s = 0.0  # duration of a counters reply

    def __call__(self, _mount: str, question: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(question["op"])
        if question["op"] == "heat":
            self.now_s += self.takes_s
            return heat(layer("blk.0"))
        self.now_s += self.answers_s
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def watcher(self) -> Watcher:
        return Watcher("/mnt", self, lambda: self.now_s)


def at(uptime_s: float, read_mb: int, **more: Any) -> dict[str, Any]:
    return stats(uptime_s, read_bytes=read_mb * MB, hit_bytes=read_mb * MB // 2, **more)


def test_the_interval_is_a_whole_period_of_the_slowest_loop_in_use() -> None:
    slow, idle = loop(period_s=5.0), loop(period_s=50.0, readers=[])
    files = [file("/a", slow), file("/b", idle), file("/c", loop(period_s=None))]
    watcher = Mount(*(at(10.0 + second, 100 * second, files=files) for second in range(9))).watcher()
    spans = [None if sample.interval is None else sample.interval.seconds for sample in (watcher.sample() for _ in range(9))]
    assert spans == [None, 1, 2, 3, 4, 5, 5, 5, 5]


def test_the_interval_is_the_difference_to_the_last_sample_of_the_same_mount() -> None:
    watcher = Mount(at(100, 100), at(102, 500), at(1, 3), at(2, 5)).watcher()
    first, second, other, later = (watcher.sample() for _ in range(4))
    assert first.interval is None and first.total.read_bytes == 100 * MB
    assert second.interval is not None and second.interval.seconds == 2
    assert second.interval.read_bytes == 400 * MB and second.interval.hit_ratio == 0.5
    assert second.interval.read_bytes_per_s == 200 * MB
    assert other.interval is None and other.total.read_bytes == 3 * MB
    assert later.interval is not None and later.interval.read_bytes == 2 * MB


def test_memory_of_the_watcher_is_bounded() -> None:
    """The watcher stores no files, and counters only for as long as the slowest loop needs."""
    moment = iter(range(150))

    def reply(_mount: str, question: dict[str, Any]) -> dict[str, Any]:
        files = [file(f"/{number}", loop()) for number in range(20)]
        return heat() if question["op"] == "heat" else at(float(next(moment)), 0, files=files)

    watcher = Watcher("/mnt", reply, lambda: 0.0)
    with light(1 << 20):
        for _ in range(150):
            watcher.sample()


def test_a_mount_that_ends_is_distinguished_from_a_missing_one() -> None:
    none = MountProblem("no llmcachefs is mounted on /mnt", "hint")
    with pytest.raises(MountProblem, match=r"(?m)^no llmcachefs is mounted on /mnt$"):
        Mount(none).watcher().sample()
    watcher = Mount(at(1, 1), none).watcher()
    watcher.sample()
    with pytest.raises(MountProblem, match="/mnt can no longer be watched: no llmcachefs") as caught:
        watcher.sample()
    assert caught.value.hint == "hint" and caught.value.exit_code == 4


def replies(good: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Generate malformed variations of a reply."""
    return documents([good]).map(lambda found: found if isinstance(found, dict) else {**good, "files": found})


@given(replies(stats()) | st.just(stats()), replies(heat(layer("blk.0"), layer("blk.1"))))
def test_any_reply_of_a_foreign_daemon_is_shown_or_refused(counters: dict[str, Any], warmth: dict[str, Any]) -> None:
    watcher = Watcher("/mnt", lambda _mount, question: counters if question["op"] == "stats" else warmth)
    try:
        samples = [watcher.sample(), watcher.sample()]
    except MountProblem:
        return
    for sample in samples:
        assert all(line.plain.isprintable() for line in lines(sample, 80, 24))
        json.dumps(sample.document(), allow_nan=False)


@pytest.mark.parametrize("takes_s", [0.0, 1.0])
def test_slow_heat_replies_are_requested_more_rarely(takes_s: float) -> None:
    mount, looks = Mount(), 100
    mount.takes_s, watcher = takes_s, mount.watcher()
    for _ in range(looks):
        mount.replies = [at(mount.now_s, 0)]
        watcher.sample()
        mount.now_s += 1.0
    asked = mount.asked.count("heat")
    assert 1 < asked * takes_s <= HEAT_SHARE * mount.now_s + 1 if takes_s else asked == looks


def test_the_json_document_uses_base_units() -> None:
    facts = at(12, 500, waits={"late": waits(10**10), "demand": waits()})
    watcher = Mount(at(10, 100, waits={"late": waits(), "demand": waits()}), facts).watcher()
    assert watcher.sample().document()["interval"] is None
    found = json.loads(json.dumps(watcher.sample().document(), allow_nan=False))
    assert found["schema"] == "llmcache.top/1" and found["mount"] == "/mnt"
    budget = {"budget": 100, "limit": 100, "pinned": 60, "window": 10, "other": 5, "free": 25, "daemon": 22}
    assert found["budget"] == {"mode": "steer", **{f"{name}_bytes": size * MB for name, size in budget.items()}}
    assert found["interval"]["read_bytes_per_s"] == 200 * MB and found["total"]["late_ratio"] == 0.225
    assert found["interval"]["late_waits"]["median_s"] is None  # beyond the last bucket
    assert found["loops"][0]["path"] == "/model.gguf" and found["loops"][0]["readers"] == [0.5]
    assert found["heat"][0]["layers"][0]["name"] == "blk.0"
