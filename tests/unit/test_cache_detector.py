"""The detector on small traces, those that break the printed Algorithm 1 among them."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import pytest

from llmcache.cache.detector import LOOP_PASSES, SEQ, Detector
from llmcache.cache.streams import WINDOW
from tests.unit.access_lists import STEP_NS, detect, hot_blocks, live_loops, loops, runs_of, spans

if TYPE_CHECKING:
    from _typeshed import TraceFunction

SCAN = [(block, 1) for block in range(1000)]


def test_a_scan_is_sequential() -> None:
    (place,) = detect(SCAN).places(0)
    assert (place.kind, place.first, place.end, place.blocks, place.passes) == (SEQ, 0, 1000, 1000, 1)


def test_a_retried_prompt_is_no_loop() -> None:
    """io_caching section 3.2, figure 2c: two consecutive accesses to the same file."""
    (place,) = detect(SCAN * 2).places(0)
    assert (place.kind, place.passes) == (SEQ, 2)


@pytest.mark.parametrize("row", [1, 7, 256, 1000])
def test_a_loop_has_its_period_however_it_is_cut(row: int) -> None:
    one_pass = [(first, min(row, 1000 - first)) for first in range(0, 1000, row)]
    (place,) = loops(detect(one_pass * 20))
    assert (place.first, place.end, place.blocks, place.passes, place.accesses) == (0, 1000, 1000, 20, 20_000)
    assert place.period is not None
    assert place.period.blocks == 1000
    assert place.period.ns == pytest.approx(len(one_pass) * STEP_NS, rel=0.01)
    assert not place.descending


def test_a_descending_loop() -> None:
    (place,) = loops(detect(runs_of(list(range(999, -1, -1)) * 20)))
    assert (place.first, place.end, place.passes, place.descending) == (0, 1000, 20, True)
    assert place.period is not None and place.period.blocks == 1000


@pytest.mark.parametrize("stride", [2, 5, 31, 32, 33, 100, 100_000])
def test_a_stride_is_a_sequence(stride: int) -> None:
    (place,) = loops(detect(runs_of(list(range(7, 7 + 500 * stride, stride)) * 10)))
    assert (place.stride, place.width, place.blocks, place.passes) == (stride, 1, 500, 10)
    assert (place.first, place.end) == (7, 7 + 499 * stride + 1)


def test_columns_of_a_matrix_are_read_once() -> None:
    """Every column is a stride over all rows: they are no passes over the same blocks."""
    detector = detect(runs_of([row * 40 + column for column in range(40) for row in range(100)]))
    assert loops(detector) == []


def test_two_loops_in_lock_step() -> None:
    blocks = [block for step in range(1000) for block in (step, 5000 + step)] * 20
    assert spans(detect(runs_of(blocks))) == [(0, 1000), (5000, 6000)]


def test_requests_of_a_kilobyte_make_no_loop_of_a_scan() -> None:
    scan = [(block, 1) for block in range(10_000, 12_000) for _ in range(4)]
    loop = [(block, 1) for block in range(1000) for _ in range(4)] * 20
    detector = detect(scan + loop)
    (place,) = loops(detector)
    assert (place.first, place.end, place.passes, place.accesses) == (0, 1000, 20, 80_000)
    assert detector.now.blocks == 2000 + 20_000


def test_one_block_read_byte_by_byte_is_no_hot_set() -> None:
    detector = detect([(5, 1)] * 4096)
    assert [place.kind for place in detector.places(0)] == [SEQ]
    assert detector.now.blocks == 1


def test_hot_blocks_do_not_break_a_loop() -> None:
    source = random.Random(1)
    blocks: list[int] = []
    for _ in range(20):
        for block in range(1000):
            blocks.append(block)
            if source.random() < 0.1:
                blocks.append(source.randrange(9000, 9050))
    detector = detect(runs_of(blocks))
    assert spans(detector) == [(0, 1000)]
    assert loops(detector)[0].passes == 20
    assert hot_blocks(detector) == 50


def test_noise_does_not_break_a_loop_and_is_forgotten() -> None:
    source = random.Random(2)
    blocks: list[int] = []
    for _ in range(10):
        for block in range(3000):
            blocks.append(block)
            if source.random() < 0.5:
                blocks.append(source.randrange(10**6, 10**9))
    detector = detect(runs_of(blocks))
    assert spans(detector) == [(0, 3000)]
    assert hot_blocks(detector) <= 2


def test_a_hot_set_read_in_short_runs_is_no_loop() -> None:
    """Figure 2b: probabilistic re-references look like loops, and are none."""
    source = random.Random(3)
    accesses = []
    for _ in range(4000):
        accesses += [(source.randrange(60) * 4, 4), *((source.randrange(10**6, 10**7), 1) for _ in range(4))]
    detector = detect(accesses)
    assert loops(detector) == []
    assert 235 <= hot_blocks(detector) <= 245


@pytest.mark.parametrize("size", [3, 20, 40, 64, 200])
def test_random_reads_of_neighbours_are_hot(size: int) -> None:
    source = random.Random(size)
    detector = detect([(source.randrange(size), 1) for _ in range(600 + 40 * size)])
    assert loops(detector) == []
    assert hot_blocks(detector) == size


def test_a_short_loop_inside_a_long_one() -> None:
    blocks = (list(range(100, 200)) * 4 + list(range(1000))) * 30
    found = {(place.first, place.end): place for place in loops(detect(runs_of(blocks)))}
    assert set(found) == {(0, 100), (100, 200), (200, 1000)}
    short, rest = found[100, 200], found[200, 1000]
    assert short.period is not None and short.period.blocks == 100
    assert rest.period is not None and rest.period.blocks == 1400
    assert (short.passes, rest.passes) == (150, 30)


def test_layers_read_twice_are_one_loop_with_two_rhythms() -> None:
    blocks = [block for layer in range(20) for _ in range(2) for block in range(layer * 200, layer * 200 + 200)] * 12
    found = loops(detect(runs_of(blocks)))
    assert {place.passes for place in found} == {24}
    assert {tuple(rhythm.blocks for rhythm in place.rhythms) for place in found} == {(200, 7800)}


def test_an_old_loop_expires_and_comes_back() -> None:
    first, second = [(0, 100), (100, 100), (200, 200)], [(5000, 500), (5500, 500)]
    detector = detect(first * 10)
    assert len(live_loops(detector, 0)) == 1
    detect(second * 10, file=1, detector=detector)
    assert live_loops(detector, 0) == []
    assert len(live_loops(detector, 1)) == 1
    detector.note(10**12, 0, 0, 400)
    assert len(live_loops(detector, 0)) == 1, "its period is still known"


@pytest.mark.parametrize("wait_periods", [1.9, 2.1])
def test_a_loop_is_over_after_two_missed_periods(wait_periods: float) -> None:
    detector = Detector()
    for turn in range(10):
        detector.note(turn * 10**9, 0, 0, 1000)
    waited = round(wait_periods * 1000)
    detector.note(9 * 10**9 + round(wait_periods * 10**9), 1, 0, waited)
    assert len(live_loops(detector, 0)) == (1 if wait_periods < 2 else 0)


def test_a_pause_of_the_user_does_not_end_a_loop() -> None:
    detector = detect([(0, 1000)] * 10)
    detector.note(10**15, 1, 0, 1)
    assert len(live_loops(detector, 0)) == 1


def test_readers_that_follow_each_other_make_one_pass() -> None:
    """Four processes load one file, each 100 blocks behind the next: it is read once, in one go."""
    blocks = [step - 100 * reader for step in range(2300) for reader in range(4) if 0 <= step - 100 * reader < 2000]
    detector = detect(runs_of(blocks))
    assert loops(detector) == []
    assert max(place.passes for place in detector.places(0)) == 1


def test_two_readers_of_a_loop_do_not_halve_its_period() -> None:
    one = list(range(1000)) * 12
    other = one[600:] + one[:600]
    detector = detect(runs_of([block for pair in zip(one, other, strict=True) for block in pair]))
    for place in loops(detector):
        assert place.period is not None
        assert 1700 <= place.period.blocks <= 2100
    assert sum(place.blocks for place in loops(detector)) >= 990


def test_threads_that_share_layers_make_one_loop() -> None:
    """Four threads on quarters of each layer, out of step by some blocks."""
    source = random.Random(4)
    blocks: list[int] = []
    for _ in range(8):
        for layer in range(0, 3200, 320):
            turns = [(step + source.uniform(0, 2), layer + 80 * thread + step) for step in range(80) for thread in range(4)]
            blocks += [block for _, block in sorted(turns)]
    found = loops(detect([(block, 1) for block in blocks]))
    assert sum(place.blocks for place in found) >= 0.98 * 3200
    assert sum(place.blocks for place in found if place.passes in (7, 8)) >= 0.95 * 3200


def test_files_written_and_read_once_each_are_sequential() -> None:
    accesses = [(start, 300) for start in range(0, 30_000, 300) for _ in range(2)]
    assert loops(detect(accesses)) == []


def test_writes_are_apart_from_reads() -> None:
    detector = Detector()
    for turn in range(6):
        detector.note(turn, 0, 0, 500, True)
        detector.note(turn, 0, 0, 500, False)
    detector.finish()
    assert [place.passes for place in detector.places(0, write=True)] == [6]
    assert [place.passes for place in detector.places(0, write=False)] == [6]


def test_files_of_other_generations_are_apart() -> None:
    detector = Detector()
    for turn in range(6):
        detector.note(turn, (1, 7, turn), 0, 500)
    detector.finish()
    assert all(detector.places((1, 7, turn))[0].kind == SEQ for turn in range(6))


def test_loops_need_two_equal_distances() -> None:
    for passes in range(1, 6):
        assert len(loops(detect([(0, 500)] * passes))) == (1 if passes >= LOOP_PASSES else 0)


def test_what_is_shorter_than_a_window_is_no_sequence() -> None:
    assert loops(detect([(0, WINDOW // 2), (10_000, 1)] * 50)) == []
    assert len(loops(detect([(0, 2 * WINDOW), (10_000, 1)] * 50))) == 1


@pytest.mark.parametrize("run", [(0, 0), (-1, 3), (5, -2)])
def test_a_run_without_blocks_is_refused(run: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="first"):
        Detector().note(0, 0, *run)


def test_the_daemon_can_use_it() -> None:
    code = "import sys, llmcache.cache.detector; print(*{'numpy', 'numba', 'pyarrow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == ""


def work_per_note(accesses: list[tuple[int, int]]) -> float:
    """Python lines executed for each of `accesses`: what O(1) means here, whatever the machine."""
    lines = 0

    def count(frame: FrameType, event: str, argument: object) -> TraceFunction:
        nonlocal lines
        lines += event == "line"
        return count

    detector = Detector()
    previous = sys.gettrace()
    sys.settrace(count)
    try:
        for number, (first, blocks) in enumerate(accesses):
            detector.note(number, 0, first, blocks)
    finally:
        sys.settrace(previous)
    return lines / len(accesses)


@pytest.mark.parametrize("kind", ["loop", "random", "jumps", "huge"])
def test_the_work_for_a_run_does_not_grow(kind: str) -> None:
    source = random.Random(5)
    made: dict[str, Callable[[int], list[tuple[int, int]]]] = {
        "loop": lambda rows: [(row % 700, 1) for row in range(rows)],
        "random": lambda rows: [(source.randrange(10**9), 1) for _ in range(rows)],
        "jumps": lambda rows: [(source.randrange(0, 10**6, 40), 40) for _ in range(rows)],
        "huge": lambda rows: [(source.randrange(3) << 30, 1 << 28) for _ in range(rows)],
    }
    few, many = work_per_note(made[kind](2000)), work_per_note(made[kind](16_000))
    assert many < 1.5 * few + 50
