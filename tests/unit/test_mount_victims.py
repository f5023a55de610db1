"""The order of eviction, and its amount: enough but not more."""

from __future__ import annotations

import errno
from unittest.mock import Mock

import pytest

from llmcache.cache.arbitration import ROWS_RESERVE_BYTES
from llmcache.mount.backends.fuse import REFAULTS_MAX, FuseBackend, Reader
from llmcache.mount.backends.pins import LockedPinStore
from llmcache.mount.engine.planner import ABANDONED_NS, LAG_NS, choose_victims
from llmcache.mount.state import space as spaces
from llmcache.mount.state.buffers import BUFFER_BYTES, BufferPool, MemoryRegion
from llmcache.mount.state.space import ABSENT, COMING_NS, LOADING, PINNED, READY, TOUCHED, WINDOW_BYTES
from llmcache.mount.state.state import CacheState
from llmcache.units import BLOCK_BYTES
from tests.unit.fs_parts import MIB, bring, mixture_of, new_group, new_state, open_it, stray

NOW = 10**12
LONG_AGO = NOW - 10 * ABANDONED_NS


def victims(state: CacheState) -> list[tuple[str, int]]:
    return [(space.key, extent) for space, extent in choose_victims(state, NOW)]


def squeeze(state: CacheState, bytes_to_go: int) -> None:
    """Set a limit that requires evicting `bytes_to_go`."""
    state.memory.limit_bytes = state.memory.used_bytes - bytes_to_go


def test_spare_memory_is_used_and_only_what_others_need_is_released() -> None:
    state = new_state(8 * MIB)
    space = new_group(state, "file", 32)
    bring(state, space, list(range(4)), TOUCHED, LONG_AGO)
    with state.lock:
        state.memory.set_opportunistic(12 * MIB)
        assert state.memory.room_bytes == 16 * MIB
        bring(state, space, list(range(4, 16)), TOUCHED, LONG_AGO)
        state.memory.set_opportunistic(0)
        assert state.memory.room_bytes == 16 * MIB and victims(state) == []
        state.memory.set_opportunistic(-2 * MIB)
        assert len(victims(state)) == 2
        state.memory.set_opportunistic(-20 * MIB)
        assert state.memory.room_bytes == 8 * MIB, "never less than the budget"


def test_eviction_for_a_reader_frees_several_extents_at_a_time() -> None:
    state = new_state(64 * MIB)
    space = new_group(state, "file", 80)
    space.record_access(0, 1, True)
    bring(state, space, list(range(1, 63)), TOUCHED, LONG_AGO)
    assert victims(state) == [], "half of the reserve is still free"
    bring(state, space, [63], TOUCHED, LONG_AGO)
    assert victims(state) == [("file", extent) for extent in (1, 2, 3)]


def test_no_more_than_needed_is_evicted_oldest_touch_first() -> None:
    state = new_state(4 * MIB)
    space = new_group(state, "file", 10)
    bring(state, space, [5, 1, 7, 2], TOUCHED, LONG_AGO)
    assert victims(state) == [], "while there is room"
    state.memory.warmup_bytes = MIB
    assert victims(state) == [("file", 5)], "a warmup gets room for one extent"
    state.memory.warmup_bytes = 0
    squeeze(state, 2 * MIB)
    assert victims(state) == [("file", 5), ("file", 1)]
    assert state.memory.evict(*choose_victims(state, NOW)[0]) == (1, 5 * MIB, MIB, MIB)


def test_extents_in_use_are_never_evicted() -> None:
    """Pinned, loading, just read and freshly prefetched extents stay; all others are chosen once each."""
    state = new_state(10 * MIB)
    space = new_group(state, "loop", 10, looping=True)
    bring(state, space, [0, 1, 2, 3], TOUCHED, LONG_AGO)
    space.set_state(1, PINNED)
    bring(state, space, [4], LOADING, LONG_AGO)
    bring(state, space, [5], READY, NOW - 2 * ABANDONED_NS)
    bring(state, space, [6], READY, NOW - ABANDONED_NS // 2)
    bring(state, space, [7], TOUCHED, NOW - 2 * LAG_NS)
    bring(state, space, [8], TOUCHED, NOW - LAG_NS // 2)
    stray(state, space, [0, 2])
    state.memory.limit_bytes = 0
    assert sorted(victims(state)) == [("loop", extent) for extent in (0, 2, 3, 5, 7)]
    space.members[0].node = None
    assert victims(state) == [], "pages of a file without a node cannot be dropped"


def test_the_order_of_eviction_is_as_documented() -> None:
    state = new_state(100 * MIB)
    rows, hot = new_group(state, "rows", 40, kind="paged"), new_group(state, "hot", 10, kind="hot")
    once, loop = new_group(state, "once", 4), new_group(state, "loop", 8, looping=True)
    reserve = ROWS_RESERVE_BYTES // MIB
    stray(state, rows, list(range(reserve + 2)), MIB)
    stray(state, hot, list(range(10)), MIB)
    bring(state, loop, [0, 1], TOUCHED, LONG_AGO)
    bring(state, loop, [2], READY, LONG_AGO)
    bring(state, once, [0, 1], TOUCHED, LONG_AGO)
    squeeze(state, state.memory.used_bytes)
    state.memory.limit_bytes = 0
    order = victims(state)
    expected = [("rows", 0), ("rows", 1), ("once", 0), ("once", 1), ("loop", 0), ("loop", 1), ("loop", 2)]
    expected += [("hot", extent) for extent in range(10)] + [("rows", 2 + extent) for extent in range(reserve)]
    assert order == expected


def test_closed_files_are_evicted_before_open_ones() -> None:
    state = new_state(10 * MIB)
    opened, closed = new_group(state, "opened", 2), new_group(state, "closed", 2)
    open_it(state, opened)
    opened.last_ns, closed.last_ns = 1, 2
    for space in (opened, closed):
        bring(state, space, [0, 1], TOUCHED, LONG_AGO)
    squeeze(state, 2 * MIB)
    assert victims(state) == [("closed", 0), ("closed", 1)]


def test_charged_extents_can_be_evicted_whatever_happened_to_their_fetch() -> None:
    """If the kernel drops an extent in part or does not store it, or storage fails, it must not stay charged forever."""
    state = new_state(10 * MIB)
    state.pool = BufferPool(2, 0)
    backend = FuseBackend(state, LockedPinStore(state, None))  # type: ignore[arg-type]
    backend.notifier = Mock(store=lambda *_: -errno.ENOMEM)
    space = new_group(state, "file", 4)
    (member,) = space.members
    member.backing = backing = Mock(size=4 * MIB, hidden=False, read_into=lambda _address, size, _offset: size)
    state.owners[backing] = space, member
    bring(state, space, [0], TOUCHED, LONG_AGO)
    into = MemoryRegion(BLOCK_BYTES)
    for _ in range(REFAULTS_MAX):
        Reader(Mock(pins=Mock(pids=())), backend).read(backing, into.address, BLOCK_BYTES, 0, 1)
    stray(state, space, [2], 8192)
    not_stored, failed = (backend.claim(space, member, extent, ahead=False) for extent in (1, 2))
    assert not_stored is not None and failed is not None
    backend.load(space, member, not_stored)
    backend.store(space, member, not_stored)
    backing.read_into = Mock(side_effect=OSError(errno.EIO, "error"))
    backend.load(space, member, failed)
    assert failed.error is not None and space.state(1) == ABSENT
    assert space.accounted_bytes[2] >= 8192 and state.memory.resident_bytes == sum(space.accounted_bytes)
    state.memory.limit_bytes = 0
    assert sorted(extent for _, extent in victims(state)) == list(space.charged_extents()) == [0, 1, 2]


def test_bytes_of_experts_are_counted_while_they_are_cached() -> None:
    state = new_state(64 * MIB)
    moe, cache = mixture_of(state, layers=1, mib=2), state.expert_cache

    def miss(expert: int, works: bool = True) -> None:
        with state.lock:
            assert cache.missed(moe, expert) == [expert]
            assert state.memory.experts_bytes == state.memory.resident_bytes == 2 * MIB * len(moe.kept)
            cache.arrived(moe, expert, works)
        assert state.memory.experts_bytes == state.memory.resident_bytes == 2 * MIB * len(moe.kept)

    for expert in range(4):
        miss(expert)
    miss(1)  # the kernel reclaimed part of it
    miss(2, works=False)
    assert moe.kept == [0, 1, 3] and len(cache.hot) == 3
    with state.lock:
        assert cache.missed(moe, 0)  # loading, therefore no victim
        state.memory.add_expert(100 * MIB)
        assert {offset // (2 * MIB) for _node, offset, _length, _charged in cache.victims()} == {1, 3}
        state.memory.add_expert(-100 * MIB)
        assert sum(charged for *_, charged in cache.end(state.spaces["mixture"])) == 0
        cache.arrived(moe, 0, True)
    assert state.memory.experts_bytes == 0


def test_experts_of_a_prompt_are_prefetched_and_evicted_before_those_of_tokens() -> None:
    state = new_state(1024 * MIB)
    moe, cache = mixture_of(state, experts=64, mib=1, used=4), state.expert_cache
    with state.lock:
        for _token in range(20):
            for expert in (3, 9, 20, 21, 64, 70, 71, 99):
                assert cache.missed(moe, expert) == [expert], "tokens miss few experts of a layer at a time"
                cache.arrived(moe, expert, True)
                if _token < 19:
                    cache.lost(moe, expert)
        fetched: list[int] = []
        for expert in range(64):
            if moe.states[expert] == ABSENT:
                fetched += cache.missed(moe, expert)
        assert sorted(fetched) == [expert for expert in range(64) if expert not in (3, 9, 20, 21)]
        for expert in fetched:
            cache.arrived(moe, expert, True)
        coldest = cache.hot.coldest(64 - 4 - 12)
    assert not {3, 9, 20, 21, 64, 70, 71, 99} & set(coldest)
    assert set(coldest) <= set(fetched)


def test_readahead_around_a_fault_is_dropped_unless_it_belongs_to_cached_experts() -> None:
    state = new_state(64 * MIB)
    moe, cache = mixture_of(state), state.expert_cache
    for expert in (4, 6, 8, 9, 10):
        cache.missed(moe, expert)
        cache.arrived(moe, expert, True)
    reach = 64 << 10
    cache.faulted(moe, 5, reach, 0)
    cache.faulted(moe, 3, reach, 0)
    assert cache.victims() == [], "it stays in spare memory"
    squeeze(state, 0)
    cache.room_bytes = state.memory.experts_bytes
    *around, victim = cache.victims()
    assert [(offset, length, charged) for _, offset, length, charged in around] == [(12 * MIB - reach, reach, 0)]
    assert victim[3] == 4 * MIB
    assert [debt[3] for debt in cache.victims()] == [], "it is dropped only once"


def test_experts_are_dropped_in_whole_kernel_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spaces, "PAGE_BYTES", 16384)
    moe = mixture_of(new_state(16 * MIB), layers=1, mib=1, first_byte=3 * 4096)
    moe.states[2] = moe.states[4] = TOUCHED
    assert all(number % 16384 == 0 for part in (*moe.ranges(3), *moe.own(3)) for number in part)
    assert moe.own(3) == [(3 * MIB + 16384, MIB - 16384)], "without the pages that it shares"


def test_readahead_beyond_a_slice_is_not_a_use_of_the_next() -> None:
    moe = mixture_of(new_state(16 * MIB), layers=1, mib=1)
    start, tail = moe.layout.starts[3], 7 * BLOCK_BYTES

    def own(offset: int, size: int, now_ns: int = NOW) -> bool:
        return moe.reads_on(3, start + offset, size, now_ns)

    assert not own(0, WINDOW_BYTES), "the slice before it is not loading"
    moe.states[2] = LOADING
    assert own(0, tail) and own(tail, WINDOW_BYTES), "the rest of a window, and the next window"
    assert not own(tail + WINDOW_BYTES, WINDOW_BYTES), "reads beyond that come from a client"
    assert own(tail, WINDOW_BYTES) and own(0, tail) and not own(0, tail), "in any order, but only once"
    assert own(0, tail, NOW + 10**9), "and again with the next token"
    assert not moe.reads_on(0, moe.layout.starts[0], tail, NOW)
    moe.states[2], moe.came_ns[2] = TOUCHED, 2 * NOW
    assert own(0, tail, 2 * NOW + COMING_NS // 2) and not own(tail, WINDOW_BYTES, 2 * NOW + 2 * COMING_NS), (
        "the slice before it was loaded long ago"
    )
    further, now_ns = 5 * WINDOW_BYTES // 4, 2 * NOW + 2 * 10**9
    moe.came_ns[2] = now_ns
    assert not own(further, WINDOW_BYTES, now_ns), "beyond the reach of a window"
    assert not own(0, 2 * WINDOW_BYTES, now_ns + 10**9), "the slice before it was loaded long ago"
    moe.came_ns[2] = now_ns + 10**9
    assert own(further, WINDOW_BYTES, now_ns + 10**9), "within reach once windows of twice the size were seen"
    moe.sweeping = True
    assert not own(0, tail, now_ns + 2 * 10**9), "a prompt reads all experts"


def test_no_page_of_a_request_is_stored_before_the_reply() -> None:
    """The kernel keeps them locked until the reply, which waits for the rest of the slice to be stored."""
    state = new_state(64 * MIB)
    moe = mixture_of(state, layers=1, mib=1, first_byte=1000)
    backing = Mock(size=9 * MIB, read_into=lambda _address, size, _offset: size)
    moe.member.backing = backing
    state.owners[backing] = (moe.space, moe.member)
    backend, into = FuseBackend(state, LockedPinStore(state, None)), MemoryRegion(32 * BLOCK_BYTES)  # type: ignore[arg-type]
    offset, length = moe.ranges(3)[0]
    assert offset < moe.layout.starts[3]
    Reader(Mock(pins=Mock(pids=())), backend).read(backing, into.address, into.size, offset - 16 * BLOCK_BYTES, 1)
    (fetch,) = moe.loads[3].loading
    assert (fetch.offset, fetch.length) == (offset, min(length, BUFFER_BYTES))
    assert fetch.replied == (0, 16 * BLOCK_BYTES)


def test_pages_shared_by_experts_are_dropped_with_the_last_of_them() -> None:
    state = new_state(64 * MIB)
    moe, cache = mixture_of(state, layers=1, mib=1, first_byte=1000), state.expert_cache
    with state.lock:
        for expert in (2, 3):
            cache.missed(moe, expert)
            cache.arrived(moe, expert, True)
    first, last = moe.ranges(2)[0][0], sum(moe.ranges(3)[0])
    between = moe.ranges(3)[0][0]
    behind = between + BLOCK_BYTES
    assert moe.own(2) == [(first, between - first)] and moe.own(3) == [(behind, last - behind)]
    cache.lost(moe, 2)
    assert moe.own(3) == [(between, last - between)]


def test_requested_but_unused_experts_are_evicted_first() -> None:
    """They count as unused only after their layer was computed again: uses of resident experts are sampled."""
    state = new_state(64 * MIB)
    moe, cache = mixture_of(state, layers=3), state.expert_cache

    def evicted() -> set[int]:
        """Return the experts that are evicted when one has to be."""
        before = set(moe.kept)
        squeeze(state, 0)
        cache.room_bytes = state.memory.experts_bytes
        state.memory.invalidated(cache.victims())
        return before - set(moe.kept)

    with state.lock:
        for expert in (1, 3, 5, 9, 11, 17):
            cache.missed(moe, expert)
            cache.arrived(moe, expert, True)
        for expert in (5, 5, 9, 9, 11, 11, 17):
            cache.used(moe, expert)
        for expert in (5, 9):
            moe.trip(expert)
        assert list(moe.unused()) == [] and evicted() == {1}, "the last layer is being computed"
        moe.reach(3)
        assert list(moe.unused()) == [], "the layer of the expert is being computed"
        moe.reach(11)
        assert list(moe.unused()) == [5], "9 could be in use now"
        assert evicted() == {5}, "although 3 has fewer known uses"
        moe.reach(17)
        assert list(moe.unused()) == [9] and evicted() == {9}


def test_tokens_with_unseen_uses_age_earlier_uses() -> None:
    """The number of tokens is estimated from the observed layers."""
    left: dict[int, int] = {}
    for tokens in (0, 1000):
        state = new_state(64 * MIB)
        moe, cache = mixture_of(state), state.expert_cache
        with state.lock:
            for expert in (1, 9, 3):
                cache.missed(moe, expert)
                cache.arrived(moe, expert, True)
            for _ in range(10):
                cache.used(moe, 1)
            for _ in range(tokens):
                moe.reach(9)
                moe.reach(3)
            cache.catch_up(moe)
            for expert in (3, 3, 9, 9):
                cache.used(moe, expert)
            least = cache.hot.least()
            assert least is not None
            left[tokens] = least
    assert left == {0: 3, 1000: 1}, "the least used, and after many tokens the one used long ago"


def test_observed_uses_are_not_also_counted_as_unseen() -> None:
    """This holds for any number of checks during a token."""
    state = new_state(64 * MIB)
    moe, cache = mixture_of(state), state.expert_cache
    hot = cache.hot
    cache.hot = Mock(wraps=hot)
    with state.lock:
        for expert in (1, 9, 3, 11, 5):
            cache.missed(moe, expert)
            cache.arrived(moe, expert, True)
            cache.catch_up(moe)
        moe.reach(9)
        moe.reach(3)
        cache.catch_up(moe)
    assert moe.layout.token_uses == 4
    assert [call.args for call in cache.hot.skip.call_args_list] == [(4 - 3,), (4 - 2,), (4,)]


def test_a_page_shared_by_two_slices_is_not_dropped_with_one_of_them() -> None:
    moe = mixture_of(new_state(16 * MIB), layers=1, mib=1, first_byte=100)
    start, end = moe.layout.starts[3], moe.layout.starts[4]
    inside = (-(-start // BLOCK_BYTES) * BLOCK_BYTES, end // BLOCK_BYTES * BLOCK_BYTES)
    assert moe.inner(3, start - BLOCK_BYTES, end + BLOCK_BYTES) == [(inside[0], inside[1] - inside[0])]
    assert moe.inner(3, inside[1] - BLOCK_BYTES, end) == [(inside[1] - BLOCK_BYTES, BLOCK_BYTES)]
    assert moe.inner(3, inside[1], end) == moe.inner(3, end, 2 * end) == []
