"""The heat map: each byte of a layer is counted once, replies are bounded, and the lock is held only for copies."""

from __future__ import annotations

import json
import time
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from llmcache.model.tensors import Experts, LayerMap, ModelLayout, Tensor
from llmcache.mount.engine.report import CELLS, ROWS_MAX, heat_map
from llmcache.mount.state.space import ABSENT, LOADING, PINNED, READY, SINGLE, SPARSE, TOUCHED, LoopSpace
from llmcache.mount.state.state import CacheState
from llmcache.mount.stats import LayerExperts, to_json
from tests.unit.fs_parts import MIB, new_group, new_state

KINDS = {ABSENT: "storage", SPARSE: "storage", LOADING: "window", READY: "window", TOUCHED: "window"}
KINDS |= {PINNED: "pinned", SINGLE: "pages"}
HEADER = 4096


def model(extents: int, sizes: list[int]) -> tuple[CacheState, LoopSpace]:
    """Return a looping space of one file, in which a layer of each size follows the header."""
    state = new_state(64 * MIB)
    space = new_group(state, "model.gguf", extents, looping=True)
    tensors, offset = [], HEADER
    for number, size in enumerate(sizes):
        tensors.append(Tensor(f"blk.{number}.attn_q.weight", offset, size, "F16"))
        offset += size
    assert offset <= space.size_bytes
    space.members[0].anatomy = LayerMap(ModelLayout("gguf", HEADER, tuple(tensors)))
    return state, space


@given(
    st.lists(st.integers(1, 5 * MIB), min_size=1, max_size=6),
    st.lists(st.tuples(st.sampled_from(sorted(KINDS)), st.booleans(), st.integers(0, MIB)), min_size=32, max_size=32),
)
def test_each_byte_is_counted_once_in_its_category(sizes: list[int], extents: list[tuple[int, bool, int]]) -> None:
    state, space = model(32, sizes)
    now_ns = time.monotonic_ns()
    for number, (kind, seen, charge) in enumerate(extents):
        space.set_state(number, kind)
        space.accounted_bytes[number] = charge
        space.seen_ns[number] = now_ns if seen else 0
    (file,) = heat_map(state, "steer", str).files
    first = HEADER
    for size, layer in zip(sizes, file.layers[1:], strict=True):
        expected: Counter[str] = Counter()
        for number in range(first // MIB, (first + size - 1) // MIB + 1):
            length = min(first + size, (number + 1) * MIB) - max(first, number * MIB)
            kind, seen, charge = extents[number]
            resident = charge * length // MIB if kind == SINGLE else 0
            expected["pages"] += resident
            rest = "streamed" if seen and (kind != SINGLE or not charge) else "cold"
            name = KINDS[kind] if KINDS[kind] in ("window", "pinned") else rest
            expected[name] += length - resident
        names = ("pinned", "window", "pages", "streamed", "cold")
        assert {name: getattr(layer, f"{name}_bytes") for name in names} == {name: expected[name] for name in names}
        assert sum(getattr(layer, f"{name}_bytes") for name in names) == layer.size_bytes == size
        touched = range(first // MIB, (first + size - 1) // MIB + 1)
        assert (layer.age_s is None) == (not any(extents[number][1] for number in touched))
        assert all(len(cells) == CELLS and set(cells) <= set("0123456789") for cells in layer.cells.values())
        first += size


def test_cached_experts_count_as_pages() -> None:
    state, space = model(33, [8 * MIB])
    tensor = Tensor("blk.0.ffn_up_exps.weight", 8 * MIB, 16 * MIB, "F16", experts=8)
    layout = ModelLayout("gguf", HEADER, (tensor,))
    member = space.members[0]
    member.anatomy = LayerMap(layout)
    for extent in range(8, 24):
        space.set_state(extent, SINGLE)
    state.expert_cache.begin(space, member, Experts(layout))
    assert member.moe is not None
    for expert in (0, 1, 5):
        state.expert_cache.arrived(member.moe, expert, done=True)
    _, layer = heat_map(state, "steer", str).files[0].layers
    assert layer.experts == LayerExperts(kept=3, count=8) and layer.pages_bytes == 6 * MIB
    assert layer.cells["pages"] == "99990000009900" + "00"


def test_the_reply_is_bounded_for_any_model() -> None:
    state = new_state(64 * MIB)
    for number in range(8):
        space = new_group(state, f"{number}" * 200, 600, looping=True)
        tensors = [Tensor("層" * 300 + str(place), place * MIB, MIB, "F16") for place in range(600)]
        space.members[0].anatomy = LayerMap(ModelLayout("gguf", 0, tuple(tensors)))
    found = heat_map(state, "steer", str)
    assert len(json.dumps(to_json(found))) < 1 << 20
    shown = sum(len(file.layers) for file in found.files)
    assert shown == ROWS_MAX and found.left_out_files == 6
    assert found.files[-1].left_out_layers == 0


class HeldTimes:
    """A lock that sums up how long it is held, in CPU time of its thread."""

    held_ns = 0

    def __enter__(self) -> None:
        self._since = time.thread_time_ns()

    def __exit__(self, *_error: object) -> None:
        self.held_ns += time.thread_time_ns() - self._since


def test_the_lock_is_held_for_a_small_part_of_the_work() -> None:
    count = 40_000
    state, space = model(count, [count * MIB // 80 - MIB] * 80)
    space.seen_ns[:] = type(space.seen_ns)("Q", [time.monotonic_ns()]) * count
    for extent in range(0, count, 3):
        space.status[extent] = PINNED
    shares = []
    for _ in range(5):  # preemption on a shared CPU may count as work
        state.lock = lock = HeldTimes()  # type: ignore[assignment]
        began = time.thread_time_ns()
        found = heat_map(state, "steer", str)
        shares.append(lock.held_ns / (time.thread_time_ns() - began))
        assert len(found.files[0].layers) == 81
    assert min(shares) < 1 / 4
