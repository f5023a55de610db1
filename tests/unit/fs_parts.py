"""Minimal groups and cache states for tests: no threads, no files."""

from __future__ import annotations

from typing import cast
from unittest.mock import Mock

from llmcache.fs.backends.base import BufferPool
from llmcache.fs.engine.experts import Mixture
from llmcache.fs.engine.group import LOADING, READY, SINGLE, TOUCHED, Group, Member
from llmcache.fs.engine.state import CacheState
from llmcache.fs.layout.tensors import Experts, ModelLayout, Tensor
from llmcache.fs.vfs.backing import Backing

MIB = 1 << 20


class NoHolder:
    """A holder that records released extents and reports all wanted extents as pinned."""

    mode = "steer"

    def __init__(self) -> None:
        self.released: list[int] = []

    def release(self, _group: Group, extents: list[int]) -> None:
        """Record the released extents."""
        self.released += extents

    def pinned(self, group: Group) -> list[int]:
        """Return the wanted extents."""
        return [extent for extent in range(group.count) if group.wanted[extent]]

    def pin_ready(self, group: Group) -> None:
        """Do nothing."""


def new_state(budget_bytes: int) -> CacheState:
    """Return a state without buffers, whose limits equal the budget."""
    state = CacheState(budget_bytes, BufferPool(0, 0))
    state.limit_bytes = state.pin_limit_bytes = budget_bytes
    return state


def new_group(state: CacheState, name: str, extents: int, looping: bool = False) -> Group:
    """Add a group of one file with `extents` extents of 1 MiB to `state`."""
    member = Member(f"/{name}", extents * MIB, 0, extents, node=len(state.groups) + 1)
    group = Group(name, [member], MIB)
    if looping:
        group.believe([])
    state.groups[name] = group
    return group


def open_it(state: CacheState, group: Group) -> None:
    """Open the file as a client would."""
    (member,) = group.members
    member.backing = backing = Mock()  # only its identity matters
    state.opens[backing] = 1
    state.owners[backing] = (group, member)


def bring(state: CacheState, group: Group, extents: list[int], kind: int, now_ns: int) -> None:
    """Account whole extents of `group` and put them into the state `kind`."""
    for extent in extents:
        state.charge(group, extent, group.extent_bytes)
        group.set_state(extent, kind)
        if kind == READY:
            group.ready[extent] = now_ns
        elif kind == TOUCHED:
            group.touch(extent, now_ns)
        elif kind == LOADING:
            group.loading[extent] = None  # type: ignore[assignment]  # only the key matters here


def stray(state: CacheState, group: Group, extents: list[int], length: int = 4096) -> None:
    """Account single pages of `extents`; the last is the most recently used."""
    for extent in extents:
        state.charge(group, extent, length)
        group.strays.pop(extent, None)
        group.strays[extent] = 0


def mixture_of(
    state: CacheState, layers: int = 2, experts: int = 8, mib: int = 4, used: int = 2, first_byte: int = 0
) -> Mixture:
    """Add an MoE model: `layers` tensors of `experts` experts of `mib` MiB each, after `first_byte` other bytes."""
    group = new_group(state, "mixture", mib * layers * experts - (-first_byte // MIB))
    group.status = bytearray([SINGLE]) * group.count
    member = group.members[0]
    member.backing = cast(Backing, object())
    size = mib * experts * MIB
    names = [f"blk.{n}.ffn_up_exps.weight" for n in range(layers)]
    tensors = tuple(Tensor(name, first_byte + n * size, size, "F32", experts=experts) for n, name in enumerate(names))
    state.mixtures.begin(group, member, Experts(ModelLayout("gguf", 0, tensors, experts_used=used)))
    assert member.mixture is not None
    return member.mixture
