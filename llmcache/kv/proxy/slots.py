"""The tokens in the slots of a llama-server, and the choice of a slot for each request. No I/O.

The server does not report the tokens of a slot, so the table records those that the proxy restored, evaluated or saved.
If clients bypass the proxy, the table may be wrong. This costs time but never changes an answer, because the server
compares the tokens of a request with its slot.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from llmcache.kv.prefix import common_length

Tokens = NDArray[np.int32]
NONE: Tokens = np.empty(0, np.int32)
MOST_NEW_LETTERS, MOST_LETTERS = 1024, 8
"""A prompt continues that of a slot if it adds at most MOST_NEW_LETTERS, and MOST_LETTERS for each token of the answer."""
PAUSE_S = 5.0  # after a pause of this length, the server may have unloaded its model (--sleep-idle-seconds)
LEAST_GAIN = 64  # least number of tokens that a restore has to add to those in a slot


@dataclass
class Slot:
    """A slot of the server. `text` is its last prompt, if that was text; `answered`: tokens of the answer to it."""

    number: int
    tokens: Tokens = field(default_factory=lambda: NONE)
    stored: int = 0
    text: str = ""
    answered: int = 0
    last_use: int = 0
    is_busy: bool = False

    def record(self, tokens: Tokens, text: str = "") -> None:
        self.stored = min(self.stored, common_length(self.tokens, tokens))
        self.tokens, self.text = tokens, text


@dataclass(frozen=True)
class Lease:
    """A slot leased to a request; `held`: tokens of the prompt that it contains."""

    slot: Slot
    held: int


class SlotTable:
    """The slots of one server. Use it only on the thread of one event loop."""

    def __init__(self, count: int) -> None:
        self.slots = [Slot(number) for number in range(count)]
        self._uses, self._last_s = 0, 0.0
        self._freed = asyncio.Condition()

    async def lease(self, tokens: Tokens, stored: int) -> Lease:
        async with self._freed:
            await self._freed.wait_for(lambda: any(not slot.is_busy for slot in self.slots))
            lease = choose([slot for slot in self.slots if not slot.is_busy], tokens, stored)
            self._uses += 1
            lease.slot.is_busy, lease.slot.last_use = True, self._uses
            return lease

    def lease_continued(self, text: str) -> Slot | None:
        """Lease an idle slot with nearly all of the prompt `text`, which then need not be tokenized, if there is one."""
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
        async with self._freed:
            slot.is_busy = False
            self._last_s = time.monotonic()
            self._freed.notify()

    @property
    def busy(self) -> int:
        return sum(slot.is_busy for slot in self.slots)

    def take_idle(self) -> list[Slot]:
        idle = [slot for slot in self.slots if not slot.is_busy]
        for slot in idle:
            slot.is_busy = True
        return idle

    def is_doubtful(self, now_s: float) -> bool:
        """Return whether the server may have cleared idle slots: all but the last used one, or all after a pause."""
        held = [slot for slot in self.slots if not slot.is_busy and len(slot.tokens)]
        return any(slot.last_use < self._uses for slot in held) or (bool(held) and now_s > self._last_s + PAUSE_S)

    def forget_cleared(self, counts: dict[int, int]) -> None:
        for slot in self.slots:
            if not slot.is_busy and len(slot.tokens) > counts.get(slot.number, 0):
                slot.record(NONE)

    def forget_idle(self) -> None:
        for slot in self.slots:
            if not slot.is_busy:
                slot.record(NONE)


def choose(idle: Sequence[Slot], tokens: Tokens, stored: int) -> Lease:
    """Return the `idle` slot with the longest prefix of the prompt, unless restoring `stored` tokens saves more.

    Else prefer an empty slot, then one whose tokens are stored, then the least recently used one.
    """
    best = max(idle, key=lambda slot: (common_length(slot.tokens, tokens), slot.last_use))
    held = common_length(best.tokens, tokens)
    if held and stored < held + LEAST_GAIN:
        return Lease(best, held)

    def loss(slot: Slot) -> tuple[bool, bool, int]:
        is_lost = len(slot.tokens) - slot.stored >= LEAST_GAIN and common_length(slot.tokens, tokens) < len(slot.tokens)
        return bool(len(slot.tokens)), is_lost, slot.last_use

    victim = min(idle, key=loss)
    return Lease(victim, common_length(victim.tokens, tokens))
