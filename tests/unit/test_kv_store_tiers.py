"""KvStore: residency in memory, reads and counters; tests/property compares the bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcache.errors import UsageError
from llmcache.kv.tiers import KvStore, Selection, StoreConfig
from llmcache.papers.csd import CsdProfile
from tests.unit.forked_device import FORKED
from tests.unit.forked_device import forked as forked
from tests.unit.kv_parts import counted_reads
from tests.unit.store_parts import Make, shape_of
from tests.unit.store_parts import make as make

pytestmark = FORKED

SLOT = 4096  # of keys, and of values: a small page takes a block


def chosen(store: KvStore, *tokens: int) -> Selection:
    return Selection(np.tile(np.array(tokens, np.int64), (store.batch, store.shape.kv_heads, 1)))


def pages(store: KvStore, sequence: int = 0, layer: int = 0) -> list[int]:
    return [int(page) for page in np.flatnonzero(store.in_cpu(layer, sequence))]


def test_sink_window_and_the_latest_pages_stay_in_memory(make: Make) -> None:
    store, plain = make(41)
    assert store.middle == range(1, 8) and pages(store) == [0, 6, 7, 8, 9]
    for _ in range(3):
        plain.step(store, 1)
    assert store.length == 44 and store.middle == range(1, 9) and pages(store) == [0, 7, 8, 9, 10]
    plain.check_all(store)
    for _ in range(3):
        plain.step(store, 60)
        assert len(pages(store)) == 5
    assert store.memory_bytes == 2 * 7 * 4 * 2 * (8 + 8) * 2, "5 pages, the tail, and one that may be unwritten"
    plain.check_all(store)


@pytest.mark.parametrize(("steps", "counted"), [(0, 1), (16, 1), (17, 0)])
def test_a_page_that_returns_within_16_steps_counts_as_ping_pong(make: Make, steps: int, counted: int) -> None:
    store, plain = make(40, cpu_pages=30)
    store.move_down(0, 0, np.array([3, 4]))
    for _ in range(steps):
        plain.step(store, 1)
    store.move_up(0, 0, np.array([3]))
    assert store.traffic.ping_pong_pages == counted
    assert store.traffic.ping_pong_share == counted and store.traffic.to_json()["ping_pong_pages"] == counted


def test_the_victims_callback_chooses_the_pages_to_drop(make: Make) -> None:
    store, plain = make(40)
    calls: list[tuple[int, int, list[int], int]] = []

    def victims(layer: int, sequence: int, found: Any, count: int) -> Any:
        calls.append((layer, sequence, found.tolist(), count))
        return found[-count:]

    store.victims = victims
    plain.step(store, 4)
    assert calls == [(0, 0, [6, 7, 8], 1), (1, 0, [6, 7, 8], 1)] and pages(store) == [0, 6, 7, 9, 10]
    store.victims = lambda layer, sequence, found, count: np.array([1])
    with pytest.raises(ValueError, match="victims: "):
        plain.step(store, 4)


def test_whole_pages_of_a_file_are_read_once_for_all_heads(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    store, plain = make(80, batch=2)
    reads = counted_reads(monkeypatch)
    # Both heads and two tokens of a page request pages 2, 3 and 9; token 68 is in the pool.
    found = store.gather(0, chosen(store, 8, 11, 13, 36, 68))
    plain.check(0, found)
    assert sorted(reads) == sorted(2 * [2 * SLOT, SLOT] * 2), "keys and values of each sequence; adjacent pages in one read"
    assert store.traffic.bytes_between("ssd", "cpu") == store.traffic.bytes_between("ssd", "cpu", "fetch") == 12 * SLOT
    assert (store.traffic.hits_ssd, store.traffic.hits_cpu) == (2 * 2 * 4, 2 * 2)
    assert store.traffic.hit_ratio == pytest.approx(0.2)


def test_recently_used_rows_are_not_read_again(make: Make) -> None:
    store, plain = make(160, batch=2, cpu_rows=6)
    before = store.memory_bytes

    def read(*tokens: int, layer: int = 0) -> int:
        moved = store.traffic.bytes_between("ssd", "cpu")
        plain.check(layer, store.gather(layer, chosen(store, *tokens)))
        return (store.traffic.bytes_between("ssd", "cpu") - moved) // (2 * SLOT * store.batch)

    assert read(8, 20, 40, 60) == 4
    assert 0 < store.memory_bytes - before <= 2 * 2 * 6 * (2 * 8 * 2 + 3 * 8)
    assert read(8, 20, 40, 61) == 1, "only row 60 of its page was cached"
    assert read(8, 61, 80, 100) == 2 and read(8, 20, 40, 61) == 0
    assert read(60) == 1, "the least recently used row was evicted"
    assert read(*range(8, 36, 4)) == 7 and read(8, 20, 40, 61) == 0, "requests larger than the cache bypass it"
    assert read(8, 20, 40, 61, layer=1) == 4
    store.select(np.array([1, 0]))
    plain.choose(np.array([1, 0]))
    assert read(8, 20, 40, 61) == 0
    store.crop(59)
    plain.crop(59)
    plain.step(store, 101)
    assert read(8, 20, 40) == 0 and read(61) == 1, "position 61 has a new token"


def test_a_device_sends_rows_and_scores_only(make: Make) -> None:
    store, plain = make(80, ssd="csd")
    plain.check(0, store.gather(0, chosen(store, 8, 11, 13, 36)))
    moved = store.traffic.bytes_between("ssd", "cpu", "fetch")
    assert moved == 2 * 4 * 2 * 8 * 2 + 16, "keys and values of 4 tokens of 2 heads, and one completion"
    assert store.traffic.bytes_between("ssd", "device", "fetch") == 2 * 3 * SLOT
    blocks = list(store.score_ssd(0, 0, np.ones((2, 8), np.float32), np.array([3, 4, 9])))
    assert {int(position) // 4 for block in blocks for position in block.positions} == {3, 4, 9}
    assert store.traffic.bytes_between("ssd", "device", "score") == 3 * SLOT
    assert store.traffic.bytes_between("ssd", "cpu", "score") == 4 * 2 * 12 + 16 * len(blocks) + 16
    store.read_side(0, 0, np.array([3, 4]), 0)
    assert store.traffic.bytes_between("ssd", "cpu", "index") == 2 * SLOT + 16
    report = store.device_report
    assert report is not None and report.internal_written_bytes >= 2 * 2 * 20 * SLOT


def test_the_device_is_busy_while_it_scores(make: Make) -> None:
    store, plain = make(80, ssd="csd", profile=CsdProfile("slow", 1e9, 1e9, 1e9, 1000))
    blocks = store.score_ssd(0, 0, np.ones((2, 8), np.float32))
    next(blocks)
    with pytest.raises(ValueError, match="the device is busy"):
        store.gather(0, chosen(store, 8))
    blocks.close()  # type: ignore[attr-defined]
    plain.check(0, store.gather(0, chosen(store, 8)))


def test_an_abandoned_step(make: Make) -> None:
    store, plain = make(38)
    rows = plain.rows(1, 30, 5)
    store.append(1, *rows)
    assert store.layer_length(1) == 68 and store.length == 38
    with pytest.raises(ValueError, match="a step is in progress"):
        store.select(np.array([0, 0]))
    with pytest.raises(ValueError, match=r"ids: 30 tokens after 38 do not match the \[38, 68\] tokens of the layers"):
        store.commit(np.zeros((1, 30), np.int64), np.zeros((1, 30), np.int64))
    store.crop(38)
    plain.check_all(store)
    plain.step(store, 11)
    plain.check_all(store)


@pytest.mark.parametrize("ssd", ["file", "csd"])
def test_another_layer_may_add_pages_at_any_moment_of_a_fetch(make: Make, monkeypatch: pytest.MonkeyPatch, ssd: str) -> None:
    """Layer 0 adds enough tokens for new page numbers at different points of the fetch of layer 1."""
    store, plain = make(60, ssd=ssd)
    random = np.random.default_rng(0)

    def add_tokens() -> None:
        before = store.table.numbers
        while store.table.numbers == before:
            step = int(random.integers(1 << 30))
            store.append(0, *plain.grow(0, 256, step))
            plain.grow(1, 256, step)
            plain.grow_ids(256, step)

    tier, pool = store.ssd, store.pools[1]
    name = "read_rows" if ssd == "file" else "gather"
    plainly, extend_to = getattr(tier, name), pool.extend_to

    def at(call: int, owner: object, name: str, real: Callable[..., Any]) -> None:
        """Add the tokens at the end of this call of a function."""
        left = iter(range(call - 1, -1, -1))

        def instead(*arguments: Any) -> Any:
            found = real(*arguments)
            if next(left) == 0:
                monkeypatch.setattr(owner, name, real)
                add_tokens()
            return found

        monkeypatch.setattr(owner, name, instead)

    at(1, tier, name, plainly)  # during the read
    staged = store.stage(1, chosen(store, 5, 9, 30))
    at(2, pool, "extend_to", extend_to)  # between the check of the pages and their use
    again = store.stage(1, chosen(store, 6, 9, 31))
    store.append(1, *(array[:, :, 60:] for array in plain.layers[1]))
    for found in (staged, again):
        plain.check(1, store.complete(found))


@pytest.mark.parametrize(
    ("error", "field", "options"),
    [
        (ValueError, "ssd", {"ssd": "tape"}),
        (UsageError, "cpu_pages", {"cpu_pages": 4}),
        (UsageError, "cpu_pages", {"cpu_pages": 2, "path": Path("a.kv"), "sink_tokens": 5, "window_tokens": 1}),
    ],
)
def test_invalid_configurations_are_refused(error: type[Exception], field: str, options: dict[str, Any]) -> None:
    with pytest.raises(error, match=f"{field}: "):
        StoreConfig(shape_of(), **options)


def test_invalid_arguments_are_refused(make: Make) -> None:
    store, plain = make(41)
    keys, values = plain.rows(0, 2, 0)
    calls: dict[str, Callable[[], object]] = {
        "keys: ": lambda: store.append(0, keys[:, :1], values),
        "values: ": lambda: store.append(0, keys, values[:, :, :1]),
        "layer: must be from 0 to 1, not 2": lambda: store.append(2, keys, values),
        "sequence: must be from 0 to 0, not 1": lambda: store.in_cpu(0, 1),
        "positions: must be from 4 to 31": lambda: store.gather(0, chosen(store, 3, 5)),
        "positions: must be": lambda: store.gather(0, Selection.none(2, 2)),
        "tokens: must be from 0 to 41, not 42": lambda: store.crop(42),
        r"index: must name sequences from 0 to 0, not \[1\]": lambda: store.select(np.array([1])),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(UsageError, match="no device"):
        store.restart_device()
    plain.check_all(store)


def test_pages_that_cannot_move_are_refused(make: Make, tmp_path: Path) -> None:
    store, _ = make(40)
    with pytest.raises(ValueError, match="pages: 1 more do not fit: the pool has 5 of at most 5"):
        store.move_up(0, 0, np.array([2]))
    for pinned in (0, 8, 9):
        with pytest.raises(ValueError, match="pages: must be from 1 to 7"):
            store.move_down(0, 0, np.array([pinned]))
    store.move_down(0, 0, np.array([6, 3]))
    for _ in range(2):
        store.move_up(0, 0, np.array([2]))
    assert pages(store) == [0, 2, 7, 8, 9] and pages(store, layer=1) == [0, 6, 7, 8, 9]
    assert (store.traffic.pages_down, store.traffic.pages_up) == (1, 1), "only pages that were on the other side"
    assert store.traffic.bytes_between("ssd", "cpu", "move") == 2 * SLOT
    in_memory, _ = make(40, cpu_pages=None, path=None)
    with pytest.raises(ValueError, match="no ssd tier"):
        in_memory.move_down(0, 0, np.array([3]))
    with pytest.raises(UsageError, match="no spill file"):
        in_memory.save()
