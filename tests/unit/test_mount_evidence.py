"""Which extents stay in use, when their touches are made visible, and when a space is left to the kernel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from unittest.mock import Mock

import pytest

from llmcache.cache.steering import Steering
from llmcache.mount.backends.inplace import InPlaceBackend
from llmcache.mount.backends.pins import LockedPinStore
from llmcache.mount.engine import evidence
from llmcache.mount.engine.evidence import EXPOSURE_MAX_PASSES, EXPOSURE_REST, Judge
from llmcache.mount.engine.planner import Planner
from llmcache.mount.engine.report import judgement
from llmcache.mount.state.interfaces import ClientReads
from llmcache.mount.state.space import ABSENT, PINNED, SINGLE, SPARSE, TOUCHED, LoopSpace, MoeFile
from tests.unit.fs_parts import MIB, mixture_of, new_group, new_state, open_it

TOUCH_NS = 1_000_000


class Clock:
    """Replaces the module `time`: each touch takes 1 ms, and nothing else takes time."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def monotonic_ns(self) -> int:
        return self.now_ns

    def monotonic(self) -> float:
        return self.now_ns / 1e9


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(evidence, "time", found)
    return found


class Storage:
    """A back end: in place it has accessed bits; over FUSE, an exposure drops one page of each exposed extent."""

    def __init__(self, clock: Clock, *, in_place: bool) -> None:
        self.clock, self.in_place = clock, in_place
        self.can_expose = True
        self.exposure_s = 0.0
        self.read = 0
        self.accessed: set[int] = set()
        self.dropped: set[int] = set()
        self.mapped: set[int] = set()  # extents that are resident and mapped, so that no event shows their touches
        self.exposures: list[list[int]] = []
        self.concluded: list[list[int]] = []
        self.searched: list[MoeFile] = []
        self.drops: list[tuple[int, int]] = []  # offset and bytes

    def read_bytes(self, _group: LoopSpace) -> int:
        return self.read

    def client_reads(self) -> ClientReads | None:
        return None

    def expose(self, space: LoopSpace, extents: Sequence[int]) -> Sequence[int]:
        self.clock.now_ns += int(self.exposure_s * 1e9)
        if not self.can_expose:
            return ()
        self.exposures.append(list(extents))
        self.accessed.clear()
        self.dropped |= set() if self.in_place else {extent for extent in extents if space.state(extent) == PINNED}
        return extents

    def conclude(self, _group: LoopSpace, extents: Sequence[int]) -> Sequence[int]:
        self.concluded.append(list(extents))
        self.dropped.clear()
        return [extent for extent in extents if extent in self.accessed] if self.in_place else ()

    def absent(self, space: LoopSpace, extents: Sequence[int]) -> Sequence[int]:
        return [extent for extent in extents if not space.accounted_bytes[extent] and extent not in self.mapped]

    def drop(self, _node: int, parts: Sequence[tuple[int, int]]) -> None:
        self.drops += parts

    def find_experts(self, moe: MoeFile) -> None:
        self.searched.append(moe)


class Mount:
    """One model and its clients: touches that the back end observes reach the space, the judge and the plan as in a mount.

    With `experts`, the looping `extents` are followed by experts, which no client reads.
    """

    def __init__(self, clock: Clock, limit: int, extents: int, *, in_place: bool = True, experts: bool = False) -> None:
        self.clock = clock
        self.storage = Storage(clock, in_place=in_place)
        self.state = new_state(limit * MIB)
        self.state.least_window_bytes = MIB
        self.pin_store = LockedPinStore(self.state, Mock())
        self.planner = Planner(self.state, self.pin_store)
        self.judge = Judge(self.state, self.storage, self.pin_store, self.planner.plan)  # type: ignore[arg-type]
        if experts:
            self.space = mixture_of(self.state, experts=2, mib=1, first_byte=extents * MIB).space
            for extent in range(extents):
                self.space.set_state(extent, ABSENT)
                self.space.single[extent] = 0
            self.space.set_predicted_order([])
        else:
            self.space = new_group(self.state, "model", extents, looping=True)
        open_it(self.state, self.space)
        self.planner.plan()

    def read(self, extents: Iterable[int], passes: int = 1, *, more_mib: int = 0) -> None:
        """Read `extents` in this order, `passes` times; each pass reads `more_mib` MiB more from storage."""
        extents = list(extents)
        for _ in range(passes):
            self.storage.read += more_mib * MIB
            for extent in extents:
                with self.state.lock:
                    self._touch(extent)
                while self.state.jobs:
                    self.state.jobs.popleft()()

    def _touch(self, extent: int) -> None:
        space = self.space
        self.clock.now_ns += TOUCH_NS
        self.storage.accessed.add(extent)
        state = space.state(extent)
        if (state in (PINNED, TOUCHED) and extent not in self.storage.dropped) or extent in self.storage.mapped:
            return
        self.storage.dropped.discard(extent)
        done = space.record_access(extent, self.clock.now_ns, state in (ABSENT, SPARSE))
        if done is not None:
            if space.learn(done):
                self.planner.plan()
            self.judge.pass_ended(space)
        self.judge.touched(space, extent)
        if space.state(extent) in (ABSENT, SPARSE):
            self._fetch(extent)

    def _fetch(self, extent: int) -> None:
        space, state = self.space, self.state
        self.storage.read += space.extent_bytes
        held = space.status.count(PINNED) + 1  # extents left to the kernel are resident, but not counted
        while (len(space.touched) + held) * space.extent_bytes > state.memory.limit_bytes and space.touched:
            unused = (each for each in space.touched if space.use.unused[each])
            state.memory.forget(space, [next(unused, next(iter(space.touched)))])
        state.memory.account(space, extent, space.extent_bytes)
        space.touch(extent, self.clock.now_ns)
        self.pin_store.pin_ready(space)

    def read_in(self, extents: Iterable[int], passes: int) -> int:
        """Return the MiB read from storage during `passes` passes."""
        before = self.storage.read
        self.read(extents, passes)
        return (self.storage.read - before) // MIB

    def is_left(self) -> bool:
        return self.space.left

    @property
    def pinned(self) -> set[int]:
        return set(self.pin_store.pinned(self.space))

    @property
    def unused(self) -> set[int]:
        return {extent for extent in range(self.space.count) if self.space.use.unused[extent]}


WHOLE, FIRST_HALF, LAST_HALF = range(40), range(20), range(20, 40)  # extents of a file of 40 MiB
both = pytest.mark.parametrize("in_place", [True, False])


# Unused extents


@both
def test_a_part_that_clients_have_stopped_reading_is_unpinned_and_not_prefetched(clock: Clock, in_place: bool) -> None:
    mount = Mount(clock, 24, 40, in_place=in_place)
    mount.read(WHOLE, 2)
    assert len(mount.pinned) > 15 and mount.pinned & set(FIRST_HALF), "pins are spread over the file at first"
    mount.read(LAST_HALF, 10)
    assert mount.unused == set(FIRST_HALF) and mount.space.loop_bytes == 20 * MIB
    assert mount.pinned == set(LAST_HALF), "the part in use fits in memory"
    assert {mount.space.state(extent) for extent in FIRST_HALF} <= {SPARSE, TOUCHED}
    assert mount.space.next_absent(0, 40) is None
    assert mount.read_in(LAST_HALF, 10) == 0 and not mount.is_left()


@both
def test_pinned_extents_become_unused_only_once_their_touches_are_visible(clock: Clock, in_place: bool) -> None:
    mount = Mount(clock, 24, 40, in_place=in_place)
    mount.space.user_pinned = True  # so that the guard does not leave the space to the kernel
    mount.storage.can_expose = False
    mount.read(WHOLE, 2)
    pinned = mount.pinned & set(FIRST_HALF)
    mount.read(LAST_HALF, 20)
    assert mount.unused == set(FIRST_HALF) - pinned and pinned <= mount.pinned
    mount.storage.can_expose = True
    mount.read([*LAST_HALF, 0, 1, 2], 100)
    assert mount.unused == set(range(3, 20)), "touches of the other extents were observed"
    assert mount.pinned >= set(LAST_HALF)


def test_exposures_are_rare_while_clients_read_the_same_extents(clock: Clock) -> None:
    mount = Mount(clock, 24, 40)
    mount.read(WHOLE, 3 * EXPOSURE_MAX_PASSES)
    assert 1 <= len(mount.storage.exposures) <= 4
    assert len(mount.storage.concluded) == len(mount.storage.exposures)
    assert mount.unused == set()


@pytest.mark.parametrize("exposure_s", [0.0, 1.0])
def test_a_long_exposure_is_followed_by_a_longer_rest(clock: Clock, exposure_s: float) -> None:
    mount = Mount(clock, 24, 40)
    mount.space.user_pinned = True
    mount.storage.exposure_s = exposure_s
    began, passes = clock.now_ns, 0
    while clock.now_ns - began < EXPOSURE_REST * 1e9:
        mount.read(range(passes // 8 % 20, 20 + passes // 8 % 20))  # a working set that keeps moving
        passes += 1
    assert passes > 10 * EXPOSURE_MAX_PASSES
    assert len(mount.storage.exposures) == 1 if exposure_s else len(mount.storage.exposures) > 10


def test_exposures_without_findings_become_ever_rarer(clock: Clock) -> None:
    """Clients always use the pinned extents, and alternate between the halves of the others."""
    mount = Mount(clock, 24, 60)
    mount.space.user_pinned = True
    mount.read(range(60), 2)
    rest = [extent for extent in range(60) if extent not in mount.pinned]
    for turn in range(50):
        half = set(rest[: len(rest) // 2] if turn % 2 else rest[len(rest) // 2 :])
        mount.read([extent for extent in range(60) if extent in mount.pinned or extent in half], 4)
    assert mount.space.use.passes > 2 * EXPOSURE_MAX_PASSES
    assert 3 <= len(mount.storage.exposures) <= 12


@pytest.mark.parametrize(("used_end", "loop_mib"), [(4 * MIB + 8192, 12), (5 * MIB, 13)], ids=["a norm", "whole"])
def test_extents_that_are_used_in_small_part_are_read_page_by_page(clock: Clock, used_end: int, loop_mib: int) -> None:
    """The used tensor begins in extent 4; the tensors around it were copied by the engine of the client."""
    start = 4 * MIB + 4096 if loop_mib == 12 else 4 * MIB
    mount = Mount(clock, 8, 20)
    mount.space.members[0].tensors.extend([0, start, start, used_end, used_end, 8 * MIB, 8 * MIB, 20 * MIB])
    mount.read(range(20), 2)
    mount.read([4, *range(8, 20)], 12)
    assert mount.unused == {0, 1, 2, 3, 5, 6, 7} and mount.space.loop_bytes == loop_mib * MIB
    in_pages = mount.space.state(4) == SINGLE and 4 in mount.space.hot
    assert in_pages == (loop_mib == 12), "its pages are cached like those of headers"


def test_an_extent_next_to_unused_ones_counts_in_part(clock: Clock) -> None:
    """Without tensors, the used part ends somewhere inside its last extent."""
    mount = Mount(clock, 24, 40)
    mount.space.use.unused[10] = mount.space.use.unused[12] = 1
    used = [mount.judge.used_bytes(mount.space, extent) for extent in (8, 9, 11, 13)]
    assert used == [MIB, MIB // 2, MIB // 4, MIB // 2]


def test_resident_extents_in_use_count_as_hits_once_a_pass(clock: Clock) -> None:
    mount = Mount(clock, 24, 40)
    mount.read(WHOLE, 3)
    before, pinned = mount.state.counters.hit_bytes, len(mount.pinned)
    mount.read(WHOLE, 10)
    assert mount.state.counters.hit_bytes - before == pytest.approx(10 * pinned * MIB, rel=0.1)


# The guard


@both
def test_a_space_is_left_while_steering_reads_more_than_lru_and_steered_again_when_the_kernel_does(
    clock: Clock, in_place: bool
) -> None:
    mount = Mount(clock, 24, 40, in_place=in_place)
    mount.storage.can_expose = False  # pins of the unused half stay, and the used half is streamed
    mount.read(WHOLE, 2)
    mount.read(LAST_HALF, 20)
    said = judgement(mount.space)
    assert mount.is_left() and said["left"] and said["steered_pass_bytes"] > said["lru_pass_bytes"]
    mount.planner.plan()
    assert not mount.pinned and not any(mount.space.wanted)
    mount.read(LAST_HALF, 2)
    assert mount.read_in(LAST_HALF, 10) == 0, "this half fits in the page cache"
    mount.read(WHOLE, 20)
    assert not mount.is_left() and len(mount.pinned) > 15
    assert mount.read_in(WHOLE, 10) <= 10 * 20, "the page cache would read 40 MiB per pass"
    assert not mount.is_left()


def test_a_space_for_which_steering_reads_less_is_never_left(clock: Clock) -> None:
    mount = Mount(clock, 24, 40)
    mount.read(WHOLE, 3)
    unknown = {"left": False, "steered_pass_bytes": None, "lru_pass_bytes": None}
    assert judgement(mount.space) == unknown, "before the first comparison"
    for _ in range(100):
        mount.read(WHOLE)
        assert not mount.is_left()
    said = judgement(mount.space)
    assert said["steered_pass_bytes"] <= 20 * MIB and said["lru_pass_bytes"] == pytest.approx(40 * MIB, rel=0.01)


def test_a_space_that_the_user_pinned_is_never_left(clock: Clock) -> None:
    mount = Mount(clock, 24, 40)
    mount.space.user_pinned = True
    for _ in range(100):
        mount.read(WHOLE, more_mib=100)
        assert not mount.is_left() and mount.pinned


def test_a_space_that_is_pinned_whole_keeps_only_extents_in_use(clock: Clock) -> None:
    """Pinned extents cause no events, so they are exposed from time to time; an idle client loses nothing."""
    mount = Mount(clock, 64, 40)
    mount.read(WHOLE, 3)
    assert mount.pinned == set(WHOLE)

    def look(seconds: int) -> None:
        clock.now_ns += seconds * 1_000_000_000
        with mount.state.lock:
            mount.judge.look(mount.space, clock.now_ns)
        while mount.state.jobs:
            mount.state.jobs.popleft()()

    for _ in range(100):
        look(60)
    assert mount.pinned == set(WHOLE) and len(mount.storage.exposures) == 1, "the client is idle"
    for _ in range(500):
        mount.read(WHOLE)
        look(6)
    assert mount.pinned == set(WHOLE) and 10 < len(mount.storage.exposures) < 40, "exposures become rarer"
    for _ in range(200):
        mount.read(LAST_HALF)
        look(6)
    assert mount.pinned == set(LAST_HALF) == set(WHOLE) - mount.unused
    assert mount.read_in(LAST_HALF, 10) == 0 and not mount.is_left()


def test_a_space_that_is_pinned_whole_is_judged_without_a_pass(clock: Clock) -> None:
    mount = Mount(clock, 24, 40)
    mount.read(WHOLE, 3)
    mount.state.memory.limit_bytes = mount.state.memory.pin_limit_bytes = 64 * MIB
    mount.state.shadow.resize(64 * MIB)
    mount.planner.plan()
    mount.read(WHOLE, 3)
    assert mount.pinned == set(WHOLE)

    def look(read_mib: int, times: int) -> None:
        for _ in range(times):
            mount.storage.read += read_mib * MIB
            clock.now_ns += 2 * evidence.LOOK_NS
            mount.space.last_ns = clock.now_ns
            with mount.state.lock:
                mount.judge.look(mount.space, clock.now_ns)

    look(0, 100)
    assert not mount.is_left()
    look(20, 10)
    assert mount.is_left() and not mount.pinned


def test_in_place_experts_are_left_together_with_their_loop(clock: Clock) -> None:
    mount = Mount(clock, 24, 40, experts=True)
    moe = mount.space.members[0].moe
    assert moe is not None
    mount.read(WHOLE, 24, more_mib=60)
    assert [mount.is_left(), moe.alone, mount.storage.searched] == [True, True, []]
    mount.read(WHOLE, 24, more_mib=200)
    assert [mount.is_left(), moe.alone] == [False, False]
    assert mount.storage.searched == [moe], "the mount searches for the resident experts"


def test_moe_models_are_never_left_over_fuse(clock: Clock) -> None:
    mount = Mount(clock, 24, 40, in_place=False, experts=True)
    moe = mount.space.members[0].moe
    assert moe is not None
    for _ in range(60):
        mount.read(WHOLE, more_mib=60)
        assert not mount.is_left() and not moe.alone and mount.pinned


# A working set that moves


def moved(clock: Clock, **more: bool) -> Mount:
    """Return a mount of a file of 80 MiB whose first 20 MiB clients use and the mount pins; the memory is full."""
    mount = Mount(clock, 24, 80, **more)
    mount.read(range(80), 2)
    mount.read(range(20), 12)
    assert mount.pinned == set(range(20)) and mount.state.memory.used_bytes == mount.state.memory.limit_bytes
    return mount


@both
def test_a_space_is_left_at_once_when_clients_begin_to_use_other_parts(clock: Clock, in_place: bool) -> None:
    mount = moved(clock, in_place=in_place)
    passes = mount.space.use.passes
    mount.read(range(40, 50))
    assert mount.is_left() and mount.space.use.passes == passes, "before a pass ends"
    mount.planner.plan()
    assert not mount.pinned
    assert mount.storage.drops == [(0, 20 * MIB)] * in_place, "the kernel would evict formerly pinned pages last"


@pytest.mark.parametrize("why", ["few extents", "free memory", "the client loads the file", "pinned by the user"])
def test_reads_of_other_parts_that_do_not_move_the_working_set(clock: Clock, why: str) -> None:
    mount = moved(clock)
    if why == "free memory":
        mount.state.memory.limit_bytes = 100 * MIB
    elif why == "the client loads the file":
        mount.space.opened_ns = clock.now_ns
    elif why == "pinned by the user":
        mount.space.user_pinned = True
    mount.read({"few extents": range(40, 45), "the client loads the file": range(80)}.get(why, range(40, 60)))
    assert not mount.is_left() and mount.pinned >= set(range(20))


def test_pins_that_several_exposures_have_shown_in_use_can_become_unused(clock: Clock) -> None:
    """In place, a touch found by an exposure counts as three passes after the previous touch."""
    mount = Mount(clock, 24, 40)
    mount.space.user_pinned = True
    while len(mount.storage.concluded) < 3:
        mount.read(WHOLE)
    mount.read(LAST_HALF, 3 * EXPOSURE_MAX_PASSES)
    assert mount.unused == set(FIRST_HALF) and mount.pinned == set(LAST_HALF)


def test_pins_of_an_unused_space_are_released(clock: Clock) -> None:
    mount = Mount(clock, 24, 40)
    mount.read(WHOLE, 2)
    mount.space.use.unused[:] = b"\1" * 40
    with mount.state.lock:
        mount.planner.plan()
    assert not mount.pinned


def test_resident_extents_stay_in_use_when_a_space_is_steered_again(clock: Clock) -> None:
    """The kernel kept extents that clients map; their touches cause no events."""
    mount = Mount(clock, 24, 40)
    mount.read(WHOLE, 3)
    assert mount.space.evidence.guard is not None
    mount.space.evidence.guard.leave()
    with mount.state.lock:
        mount.judge.turn(mount.space, True)
    mount.storage.mapped = set(range(10))
    while mount.is_left():
        mount.read(WHOLE, more_mib=20)
    mount.read(WHOLE, 2)
    assert mount.unused == set()


def test_clients_outside_the_pid_namespace_cannot_be_exposed() -> None:
    """Their mappings are unknown, so their touches of resident data cannot be observed."""
    space = new_group(new_state(64 * MIB), "model", 8, looping=True)
    file = Mock(programs={0: None}, readers=[], key=(1, 1))
    backend = Mock(files=Mock(of_node=lambda _node: file, lock=nullcontext()))
    assert InPlaceBackend.expose(backend, space, [1, 2]) == ()


def test_the_bound_of_the_guard_follows_the_memory(clock: Clock) -> None:
    """With a fixed bound, a loop stays with the kernel for many passes after the engine has taken its memory."""
    mount = Mount(clock, 32, 40)
    mount.read(WHOLE, 3)
    guard = mount.space.evidence.guard
    assert guard is not None
    before = guard.bound_bytes
    mount.state.shadow.resize(mount.state.shadow.capacity_bytes // 2)
    mount.read(WHOLE, 3)
    assert guard.bound_bytes == before // 2


def test_a_space_that_has_ended_is_neither_left_nor_steered_again(clock: Clock) -> None:
    """A reader that found the space before it ended may still end a pass; the planner of arena has forgotten the space."""
    mount = Mount(clock, 24, 40)
    mount.read(WHOLE, 3)
    mount.space.alive = False
    mount.state.references.core = Steering(24 * MIB)  # has no such space
    for is_left in (True, False):
        mount.judge.turn(mount.space, is_left)
    assert not mount.space.left
