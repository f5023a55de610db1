"""Minimal spaces and cache states for tests: no threads, no files."""

from __future__ import annotations

from typing import cast
from unittest.mock import Mock

from llmcache.model.tensors import Experts, ModelLayout, Tensor
from llmcache.mount.source.backing import Backing
from llmcache.mount.state.buffers import BufferPool
from llmcache.mount.state.space import LOADING, READY, TOUCHED, Fetch, LoopSpace, MoeFile, SpaceFile
from llmcache.mount.state.state import CacheState

MIB = 1 << 20


class NoPinStore:
    """A pin store that records released extents and reports all wanted extents as pinned."""

    mode = "steer"

    def __init__(self) -> None:
        self.released: list[int] = []

    def release(self, _group: LoopSpace, extents: list[int]) -> None:
        """Record the released extents."""
        self.released += extents

    def pinned(self, space: LoopSpace) -> list[int]:
        """Return the wanted extents."""
        return [extent for extent in range(space.count) if space.wanted[extent]]

    def pin_ready(self, space: LoopSpace) -> None:
        """Do nothing."""


def new_state(budget_bytes: int) -> CacheState:
    """Return a state without buffers, whose limits equal the budget."""
    state = CacheState(budget_bytes, BufferPool(0, 0))
    state.memory.limit_bytes = budget_bytes
    return state


def new_group(state: CacheState, name: str, extents: int, looping: bool = False, kind: str = "loop") -> LoopSpace:
    """Add a closed space of one file with `extents` extents of 1 MiB to `state`."""
    member = SpaceFile(f"/{name}", extents * MIB, 0, extents, node=len(state.spaces) + 1)
    space = LoopSpace(name, [member], MIB, kind, state.index)
    state.add(space)
    state.steering.close(name)
    if looping:
        space.set_predicted_order([])
    return space


def open_it(state: CacheState, space: LoopSpace) -> None:
    """Open the file as a client would."""
    (member,) = space.members
    member.backing = backing = Mock()  # only its identity matters
    state.opens[backing] = 1
    state.steering.open(space.key)
    state.index.move(space)
    state.owners[backing] = (space, member)


def bring(state: CacheState, space: LoopSpace, extents: list[int], kind: int, now_ns: int) -> None:
    """Account whole extents of `space` and put them into the state `kind`."""
    for extent in extents:
        state.memory.account(space, extent, space.extent_bytes)
        if kind == READY:
            space.make_ready(extent, now_ns)
        elif kind == TOUCHED:
            space.touch(extent, now_ns)
        elif kind == LOADING:
            space.begin_load(Fetch(extent, space.extent_bytes, True))
        else:
            space.set_state(extent, kind)


def stray(state: CacheState, space: LoopSpace, extents: list[int], length: int = 4096) -> None:
    """Account single pages of `extents`; the last is the most recently used."""
    for extent in extents:
        state.memory.account(space, extent, length)
        space.make_partial(extent, 0)


def mixture_of(
    state: CacheState, layers: int = 2, experts: int = 8, mib: int = 4, used: int = 2, first_byte: int = 0
) -> MoeFile:
    """Add an MoE model: `layers` tensors of `experts` experts of `mib` MiB each, after `first_byte` other bytes."""
    space = new_group(state, "mixture", mib * layers * experts - (-first_byte // MIB), kind="paged")
    member = space.members[0]
    member.backing = cast(Backing, object())
    size = mib * experts * MIB
    names = [f"blk.{n}.ffn_up_exps.weight" for n in range(layers)]
    tensors = tuple(Tensor(name, first_byte + n * size, size, "F32", experts=experts) for n, name in enumerate(names))
    state.expert_cache.begin(space, member, Experts(ModelLayout("gguf", 0, tensors, experts_used=used)))
    assert member.moe is not None
    return member.moe
