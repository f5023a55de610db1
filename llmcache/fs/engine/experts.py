"""Mixtures of experts: of those that a token uses, the missing come in whole, and who is used least leaves.

A miss in one slice names the expert, and with it the slices that will be read next: all come in at once, and none that is
there. Dense tensors loop and have the budget first (`planner.py`): a byte there saves a read per token. What is left is the
experts' room. Who was used is told by touches of what is not mapped, and by samples of what is (`InPlaceBackend`).

Every method but `bring` expects the engine's lock.
"""

from __future__ import annotations

import functools
from array import array
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

from llmcache.cache.hotset import HotSet
from llmcache.fs.engine.group import ABSENT, LOADING, PAGE, TOUCHED

if TYPE_CHECKING:
    from llmcache.fs.backends.base import Backend
    from llmcache.fs.engine.group import Group, Member
    from llmcache.fs.engine.state import CacheState
    from llmcache.fs.layout.experts import Experts

HEADROOM_BYTES = 4 << 20
LEAST_ROOM_BYTES = 16 << 20  # so many experts are in use at a time


class Mixture:
    """The experts of one file that is read: each ABSENT, LOADING or TOUCHED. Expert n has the key `first` + n."""

    def __init__(self, group: Group, member: Member, layout: Experts, first: int) -> None:
        self.group, self.member, self.layout, self.first = group, member, layout, first
        self.states = bytearray(layout.count)
        # In the middle of a slice: what the kernel maps around a fault in the next one does not reach so far.
        firsts = (layout.ranges(expert)[:1] or [(0, 0)] for expert in range(layout.count))
        self.probes = array("Q", ((offset + length // 2) // PAGE * PAGE for ((offset, length),) in firsts))

    @property
    def kept(self) -> list[int]:
        """The experts that are there."""
        return [expert for expert, state in enumerate(self.states) if state == TOUCHED]

    def facts(self) -> dict[str, Any]:
        """What is kept, as `llmcache stats --json` tells it."""
        kept = self.kept
        return {
            "count": self.layout.count,
            "kept": len(kept),
            "kept_bytes": sum(map(self.layout.bytes_of, kept)),
            "bytes": sum(self.layout.sizes),
        }


class MixtureCache:
    """All mixtures of a mount, and the room that they share."""

    def __init__(self, state: CacheState) -> None:
        self.state = state
        self.hot = HotSet()
        self.room_bytes = LEAST_ROOM_BYTES
        self.used_bytes = 0
        self.mixtures: list[Mixture] = []  # by their keys
        self._next = 0

    def begin(self, group: Group, member: Member, layout: Experts) -> None:
        """A file with experts is read from now on."""
        member.mixture = Mixture(group, member, layout, self._next)
        self.mixtures.append(member.mixture)
        self._next += layout.count

    def end(self, group: Group) -> None:
        """Nothing is known of the files of `group` any more; their pages are the kernel's."""
        for mixture in [mixture for mixture in self.mixtures if mixture.group is group]:
            self.mixtures.remove(mixture)
            mixture.member.mixture = None
            gone = sum(mixture.layout.bytes_of(expert) for expert in mixture.kept)
            self.used_bytes -= gone
            self.state.resident_bytes -= gone
            self.hot.forget(range(mixture.first, mixture.first + mixture.layout.count))

    def used(self, mixture: Mixture, expert: int) -> None:
        """A sample says that an expert that is there was used."""
        self.hot.use(mixture.first + expert)
        self.state.counters.hit_bytes += mixture.layout.bytes_of(expert)

    def touched(self, backend: Backend, mixture: Mixture, number: int, missed: bool) -> None:
        """A program reads slice `number`, of which a page was `missed`, or is mapped now."""
        expert = mixture.layout.expert_of[number]
        state = mixture.states[expert]
        if state == LOADING or (state == TOUCHED and not missed):
            return  # counted when it came, or with the next sample
        self.hot.use(mixture.first + expert)
        self.state.counters.miss_bytes += mixture.layout.bytes_of(expert)
        if not mixture.member.reachable:
            return
        if state == TOUCHED:
            self._give_up(mixture, expert)  # the kernel has reclaimed some of it
            self.state.resident_bytes -= mixture.layout.bytes_of(expert)
        mixture.states[expert] = LOADING
        mixture.member.loads += 1
        self.state.jobs.append(functools.partial(self._bring, backend, mixture, expert))
        self.state.work.notify()

    def _bring(self, backend: Backend, mixture: Mixture, expert: int) -> None:
        """Has all slices of an expert read, as far as they are not there. Without the lock."""
        done = backend.bring(mixture.member, mixture.layout.ranges(expert))
        with self.state.lock:
            self.state.load_ended(mixture.member)
            if mixture.member.mixture is not mixture:
                return
            mixture.states[expert] = TOUCHED if done else ABSENT
            if done:
                self.hot.keep(mixture.first + expert)
                self.used_bytes += mixture.layout.bytes_of(expert)
                self.state.resident_bytes += mixture.layout.bytes_of(expert)
            if self.excess_bytes > 0:
                self.state.room.notify()

    @property
    def excess_bytes(self) -> int:
        """What has to leave: beyond the experts' room, where all together take more than there is."""
        together = self.state.used_bytes + HEADROOM_BYTES - self.state.room_bytes
        return min(together, self.used_bytes + HEADROOM_BYTES - max(self.room_bytes, LEAST_ROOM_BYTES))

    def victims(self) -> list[tuple[int, int, int, int]]:
        """Gives up experts, the least used first, until there is room: (node, offset, bytes, charged) to drop."""
        debts: list[tuple[int, int, int, int]] = []
        excess = self.excess_bytes
        while excess > 0 and (key := self.hot.least()) is not None:
            mixture = self.mixtures[bisect_right(self.mixtures, key, key=lambda one: one.first) - 1]
            expert = key - mixture.first
            self._give_up(mixture, expert)
            size = mixture.layout.bytes_of(expert)
            excess -= size
            if (node := mixture.member.node) is None:
                self.state.resident_bytes -= size
            else:  # resident until it is dropped
                debts += [(node, offset, length, length) for offset, length in mixture.layout.ranges(expert)]
        return debts

    def _give_up(self, mixture: Mixture, expert: int) -> None:
        self.hot.drop(mixture.first + expert)
        mixture.states[expert] = ABSENT
        self.used_bytes -= mixture.layout.bytes_of(expert)
