"""The view of `llmcache top`: as it looks at 80 columns, and that it fits whatever a mount tells."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, Group

from llmcache.fs.client.top import (
    FREE,
    PINNED,
    WINDOW,
    HeatFile,
    HeatLayer,
    LoopState,
    Sample,
    Watcher,
    fold,
    lines,
    merge,
    strip_bar,
)
from tests.unit.top_parts import MB, as_layer, cells, heat, layer, stats, waits

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
NOTHING: dict[str, Any] = {"read_bytes": 0, "hit_bytes": 0, "miss_bytes": 0, "pinned_bytes": 0, "window_bytes": 0}
NOTHING |= {"pages_bytes": 0, "resident_bytes": 0, "files": [], "waits": {"late": waits(), "demand": waits()}}
NOTHING |= {"prefetch": {"useful_bytes": 0, "late_bytes": 0, "wasted_bytes": 0}, "limit_bytes": 40 * MB}

WHOLE = """\
/mnt/models steer, up 1 min 40 s                               every 1 s, q ends
budget ████████████████████████████████████████▸▸▸▸▸▸▪▪▪▪················ 100 MB
       █ pinned 60.0 MB   ▸ window 10.0 MB   ▪ pages 5.00 MB   · free 25.0 MB

              since mount   last 2.0 s                  since mount   last 2.0 s
to readers        1.00 GB     100 MB/s   byte hit ratio      60.0 %       50.0 %
from storage       400 MB    50.0 MB/s   prefetch late       22.5 %       90.0 %
fetched            390 MB    47.5 MB/s   prefetch wasted      2.5 %        0.0 %
waits         since mount  half within   99 % within         in all   last 2.0 s
late                    3         3 ms         30 ms        24.5 ms        1.2 %
on demand               1        10 ms         10 ms        5.00 ms        0.0 %

loop                          size   period  pinned  passes   readers
model.gguf                  100 MB   500 ms    60 %      12   ─────────●────────

model.gguf                    size  pinned        read   ░ streamed  · cold
header                     1.00 MB   100 %           -   ███████████████████████
token_embd.weight          19.0 MB     0 %         now   ▪▪▪····················
blk.0                      20.0 MB    50 %         now   ████████████░░░░░░░░░░░
blk.1                      20.0 MB    50 %         now   ██████▓▓▓▓▓▓░░▸▸▸▸░░░░░
blk.2                      20.0 MB     0 %  12 min ago   ·······················
"""
FOLDED = """\
model.gguf                    size  pinned        read   ░ streamed  · cold
header – blk.0             40.0 MB    28 %         now   ▓▓▪········███████░░░░░
blk.1 – blk.2              40.0 MB    25 %         now   ███▓▓▓░▸▸░░············
"""
NEW = """\
/mnt/models steer, up 1 s
budget ·································································· 100 MB
       █ pinned 0 B   ▸ window 0 B   ▪ pages 0 B   · free 40.0 MB
       memory pressure: 40.0 MB of 100 MB may be used

              since mount                               since mount
to readers            0 B            -   byte hit ratio           -            -
from storage       400 MB            -   prefetch late            -            -
fetched            390 MB            -   prefetch wasted          -            -
waits         since mount  half within   99 % within         in all
late                    0            -             -              -            -
on demand               0            -             -              -            -

no loop yet: no model is open, and nothing was read twice
"""


NARROW = """\
/mnt/models steer, up 1 min 40 s           every 1 s, q ends
budget ████████████████████████████▸▸▸▸▪▪············ 100 MB
       █ pinned 60.0 MB   ▸ window 10.0 MB
       ▪ pages 5.00 MB   · free 25.0 MB

               since mount   last 2.0 s
to readers         1.00 GB     100 MB/s
from storage        400 MB    50.0 MB/s
fetched             390 MB    47.5 MB/s
byte hit ratio      60.0 %       50.0 %
prefetch late       22.5 %       90.0 %
prefetch wasted      2.5 %        0.0 %
waits         count   half <   99 % <    in all   last 2.0 s
late              3     3 ms    30 ms   24.5 ms        1.2 %
on demand         1    10 ms    10 ms   5.00 ms        0.0 %

loop               size  period pinned  passes   readers
model.gguf       100 MB  500 ms   60 %      12   ─────●─────

model.gguf          size  pinned        read   ░ streamed
header           1.00 MB   100 %           -   █████████████
…en_embd.weight  19.0 MB     0 %         now   ▪▪···········
blk.0            20.0 MB    50 %         now   ███████░░░░░░
blk.1            20.0 MB    50 %         now   ████▓▓▓░▸▸░░░
blk.2            20.0 MB     0 %  12 min ago   ·············
"""


def sample(*replies: dict[str, Any], warmth: dict[str, Any] = HEAT) -> Sample:
    """What a watcher makes of these counters, the last of them."""
    left = iter(replies)
    watcher = Watcher("/mnt/models", lambda _mount, question: next(left) if question["op"] == "stats" else warmth)
    return [watcher.sample() for _ in replies][-1]


def text(of: Sample, width: int = 80, rows: int | None = None, hint: str = "") -> str:
    return "".join(f"{line.plain.rstrip()}\n" for line in lines(of, width, rows, hint))


def test_it_looks_like_this() -> None:
    assert text(sample(BEFORE, stats()), hint="every 1 s, q ends") == WHOLE


def test_at_60_columns_it_looks_like_this() -> None:
    assert text(sample(BEFORE, stats()), 60, hint="every 1 s, q ends") == NARROW


def test_a_mount_that_nobody_uses_looks_like_this() -> None:
    assert text(sample(stats(1.0, **NOTHING), warmth=heat() | {"files": []})) == NEW


def test_with_few_rows_layers_are_folded() -> None:
    assert text(sample(BEFORE, stats()), rows=18).endswith(FOLDED)


def test_with_more_columns_bars_and_strips_are_longer() -> None:
    wide = text(sample(BEFORE, stats()), 120).splitlines()
    assert len(wide[1]) == 120 and wide[1].count("█") == 64
    assert len(wide[-1]) == 120


def test_colours_go_where_they_are_not_wanted() -> None:
    def shown(**settings: Any) -> str:
        console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system="standard", **settings)
        console.print(Group(*lines(sample(BEFORE, stats()), 80)))
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    assert "\x1b[32m" in shown()
    assert "\x1b[32m" not in shown(no_color=True)


def test_names_cannot_command_the_terminal_and_end_with_what_tells_them_apart() -> None:
    name = "/\x1b[2J[bold]\udcff\n" + "層" * 40 + "-00001-of-00002.gguf"
    facts = stats()
    facts["files"][0]["path"] = name
    shown = text(sample(facts, warmth=heat(layer("\x07blk.0"), path=name)))
    assert "\x1b" not in shown and "\x07" not in shown and "\udcff" not in shown
    assert shown.count("-00001-of-00002.gguf") == 2


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
    lambda path, layers, more: HeatFile(f"/{path}", 100 * MB, tuple(layers), more),
    path=st.text(max_size=60),
    layers=st.lists(LAYERS, min_size=1, max_size=20),
    more=st.integers(0, 5),
)
LOOPS = st.builds(
    lambda path, size, period, share, readers: LoopState(
        f"/{path}", size, period, share * size // 9, 0, 3, True, tuple(readers)
    ),
    path=st.text(max_size=60),
    size=st.integers(0, 1 << 50),
    period=st.none() | st.floats(1e-9, 1e6),
    share=st.integers(0, 9),
    readers=st.lists(st.floats(0, 1.5), max_size=8),
)


@given(
    st.lists(FILES, max_size=5),
    st.lists(LOOPS, max_size=8),
    st.integers(20, 200),
    st.none() | st.integers(1, 60),
    st.integers(0, 3),
)
def test_it_fits(files: list[HeatFile], loops: list[LoopState], width: int, rows: int | None, more: int) -> None:
    found = lines(
        replace(sample(BEFORE, stats()), heat=tuple(files), loops=tuple(loops), left_out_files=more),
        width,
        rows,
        "every 1 s, q ends",
    )
    assert rows is None or len(found) <= rows
    assert all(line.cell_len <= max(60, width) for line in found)
    assert all(line.plain.isprintable() for line in found)
    if rows is None or rows > 40:
        assert sum("░ streamed" in line.plain for line in found) == len(files) or rows is not None


@given(st.lists(LAYERS, min_size=1, max_size=40), st.integers(1, 50))
def test_folding_loses_no_byte_and_keeps_the_order(layers: list[HeatLayer], rows: int) -> None:
    folded = fold(layers, rows)
    assert 1 <= len(folded) <= max(rows, 1)
    for name in ("tensors", "size_bytes", "pinned_bytes", "streamed_bytes"):
        assert sum(getattr(each, name) for each in folded) == sum(getattr(each, name) for each in layers)
    assert folded[0].name.startswith(layers[0].name) and folded[-1].name.endswith(layers[-1].name)
    for each in folded:
        assert all(len(digits) == 16 and set(digits) <= set("0123456789") for digits in each.cells.values())


def test_a_folded_strip_is_by_bytes() -> None:
    small, large = layer("a", 1, 1, cells=cells("9")), layer("b", 15, 0, cells=cells("0"))
    assert merge([as_layer(small), as_layer(large)]).cells["pinned"] == "9" + "0" * 15


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.sampled_from([PINNED, WINDOW])), max_size=5))
def test_a_bar_is_as_long_as_it_should_be(parts: list[tuple[int, str]]) -> None:
    total = sum(amount for amount, _ in parts)
    assert len(strip_bar(parts, total, 60)) == 60
    assert strip_bar(parts, max(1, 2 * total), 60).plain.count(FREE) >= 29
