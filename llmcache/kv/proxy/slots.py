"""Slots: what the proxy knows of the slots of a llama-server, and which of them a request gets. No I/O.

The server does not say which tokens a slot holds. What is known here is what was restored into it, what a request that was
sent to it has had evaluated, and what its saved file lists. It may be out of date, where requests went to the server by
another way: that costs time, because a prefix is restored that was there, or evaluated that was stored. The server itself
compares the tokens of a request with those of its slot, so no answer depends on it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
NONE: Tokens = np.empty(0, np.int32)
MOST_NEW_LETTERS, MOST_LETTERS = 1024, 8
"""A prompt goes on with a slot's if it has at most so many letters more, and so many for each token of the slot's answer."""
PAUSE_S = 5.0
"""After a pause of this length, the server may have unloaded its model (--sleep-idle-seconds)."""
LEAST_GAIN = 64
"""Tokens that restoring has to save at least, over what a slot holds already."""


@dataclass
class Slot:
    """One slot of the server: the tokens that it holds, how many of them are stored, and when it was used last.

    `text`: the prompt that it had last, if that was text; `answered`: tokens of the answer behind it.
    """

    number: int
    tokens: Tokens = field(default_factory=lambda: NONE)
    stored: int = 0
    text: str = ""
    answered: int = 0
    last_use: int = 0
    is_busy: bool = False

    def hold(self, tokens: Tokens, text: str = "") -> None:
        """Record that the slot holds `tokens` now, of the prompt `text` if that is known."""
        self.stored = min(self.stored, common(self.tokens, tokens))
        self.tokens, self.text = tokens, text


@dataclass(frozen=True)
class Lease:
    """A slot for one request, and how many tokens of its prompt the slot holds."""

    slot: Slot
    held: int


class SlotTable:
    """The slots of one server. For the thread of one event loop."""

    def __init__(self, count: int) -> None:
        self.slots = [Slot(number) for number in range(count)]
        self._uses, self._last_s = 0, 0.0
        self._freed = asyncio.Condition()

    async def lease(self, tokens: Tokens, stored: int) -> Lease:
        """Return a slot for a prompt of `tokens`, `stored` of which could be restored; waits until a slot is idle."""
        async with self._freed:
            await self._freed.wait_for(lambda: any(not slot.is_busy for slot in self.slots))
            lease = choose([slot for slot in self.slots if not slot.is_busy], tokens, stored)
            self._uses += 1
            lease.slot.is_busy, lease.slot.last_use = True, self._uses
            return lease

    def lease_continued(self, text: str) -> Slot | None:
        """Return an idle slot that holds nearly all of the prompt `text`, which need not be tokenized then; or None."""
        slot = max(
            (slot for slot in self.slots if not slot.is_busy and slot.text and text.startswith(slot.text)),
            key=lambda slot: len(slot.text),
            default=None,
        )
        if slot is None or len(text) - len(slot.text) > MOST_NEW_LETTERS + MOST_LETTERS * slot.answered:
            return None
        self._uses += 1
        slot.is_busy, slot.last_use = True, self._uses
        return slot

    async def release(self, slot: Slot) -> None:
        """Let other requests have `slot`."""
        async with self._freed:
            slot.is_busy = False
            self._last_s = time.monotonic()
            self._freed.notify()

    @property
    def busy(self) -> int:
        """Number of slots that requests have."""
        return sum(slot.is_busy for slot in self.slots)

    def take_idle(self) -> list[Slot]:
        """Return all idle slots, which then have to be released."""
        idle = [slot for slot in self.slots if not slot.is_busy]
        for slot in idle:
            slot.is_busy = True
        return idle

    def is_doubtful(self, now_s: float) -> bool:
        """Whether the server may have cleared an idle slot: one that was not used last, or all after a pause."""
        held = [slot for slot in self.slots if not slot.is_busy and len(slot.tokens)]
        return any(slot.last_use < self._uses for slot in held) or (bool(held) and now_s > self._last_s + PAUSE_S)

    def forget_cleared(self, counts: dict[int, int]) -> None:
        """Record how many tokens idle slots hold by the server's own count; it says nothing of those that are missing."""
        for slot in self.slots:
            if not slot.is_busy and len(slot.tokens) > counts.get(slot.number, 0):
                slot.hold(NONE)

    def forget_idle(self) -> None:
        """Record that nothing is known of the idle slots: a request was sent for which the server chooses the slot."""
        for slot in self.slots:
            if not slot.is_busy:
                slot.hold(NONE)


def choose(idle: Sequence[Slot], tokens: Tokens, stored: int) -> Lease:
    """Return which of the `idle` slots a prompt gets: the one that holds most of it, unless restoring is worth more.

    To restore into, and for a prompt that no slot holds, it is the one whose tokens are the smallest loss: an empty one, one
    whose tokens are stored, the one that was used the longest ago.
    """
    best = max(idle, key=lambda slot: (common(slot.tokens, tokens), slot.last_use))
    held = common(best.tokens, tokens)
    if held and stored < held + LEAST_GAIN:
        return Lease(best, held)

    def loss(slot: Slot) -> tuple[bool, bool, int]:
        is_lost = len(slot.tokens) - slot.stored >= LEAST_GAIN and common(slot.tokens, tokens) < len(slot.tokens)
        return bool(len(slot.tokens)), is_lost, slot.last_use

    victim = min(idle, key=loss)
    return Lease(victim, common(victim.tokens, tokens))


def common(first: Tokens, second: Tokens) -> int:
    """Return how many tokens two sequences begin with alike."""
    length = min(len(first), len(second))
    if not length or first[0] != second[0]:
        return 0
    differ = np.flatnonzero(first[:length] != second[:length])
    return int(differ[0]) if len(differ) else length
