"""Groups and states as small as tests need them: no threads, no files."""

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
    """A Holder that notes what is given up and pins at once what is wanted."""

    mode = "steer"

    def __init__(self) -> None:
        self.released: list[int] = []

    def release(self, _group: Group, extents: list[int]) -> None:
        """Note what is given up."""
        self.released += extents

    def pinned(self, group: Group) -> list[int]:
        """What is wanted."""
        return [extent for extent in range(group.count) if group.wanted[extent]]

    def pin_ready(self, group: Group) -> None:
        """Nothing to do."""


def new_state(budget_bytes: int) -> CacheState:
    """A state without buffers, and without what a window may hold beside the budget."""
    state = CacheState(budget_bytes, BufferPool(0, 0))
    state.limit_bytes = state.pin_limit_bytes = budget_bytes
    return state


def new_group(state: CacheState, name: str, extents: int, looping: bool = False) -> Group:
    """A group of one attached file with `extents` extents of 1 MiB, in `state`."""
    member = Member(f"/{name}", extents * MIB, 0, extents, node=len(state.groups) + 1)
    group = Group(name, [member], MIB)
    if looping:
        group.believe([])
    state.groups[name] = group
    return group


def open_it(state: CacheState, group: Group) -> None:
    """An application opens the file."""
    (member,) = group.members
    member.backing = backing = Mock()  # only its identity matters
    state.opens[backing] = 1
    state.owners[backing] = (group, member)


def bring(state: CacheState, group: Group, extents: list[int], kind: int, now_ns: int) -> None:
    """Charge whole extents, which are then ready, touched, or still loading."""
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
    """Single pages of `extents`, the last the most recent."""
    for extent in extents:
        state.charge(group, extent, length)
        group.strays.pop(extent, None)
        group.strays[extent] = 0


def mixture_of(
    state: CacheState, layers: int = 2, experts: int = 8, mib: int = 4, used: int = 2, first_byte: int = 0
) -> Mixture:
    """A file of `layers` tensors whose experts have `mib` MiB each, behind `first_byte` other bytes; a token uses `used`."""
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
