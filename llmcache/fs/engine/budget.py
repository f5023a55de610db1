"""How much memory a mount gets, and what pressure leaves of it; `root` is there for tests on recorded trees.

Pressure gives budget back before the OOM killer comes, and takes it again when it is over. Locked pages count as used to
the OOM killer, so the margin is watched in every place that has a limit (machine, cgroups): four times a second, and thirty
times when little is left. Short of the margin: the limit drops, at once, to what is held less what is missing, where held is
what the kernel cannot take itself. PSI (where the kernel has it) says earlier that others stall: the limit then drops in
steps. After a calm time it grows back, slowly.
"""

from __future__ import annotations

import itertools
import logging
import time
from pathlib import Path

from llmcache.errors import EnvironmentProblem
from llmcache.memory import (
    MACHINE_MARGIN_BYTES,
    MACHINE_MARGIN_SHARE,
    Memory,
    lockable_bytes,
    machine_memory,
    machine_of,
    places,
    stalled_us,
    tightest,
)
from llmcache.units import format_percent, format_size

log = logging.getLogger(__name__)

MIN_BUDGET_BYTES = 16 << 20
DAEMON_BYTES = 40 << 20  # what daemon, helper, buffers and page tables still grow to, beside the budget


def budget_of(ram_bytes: int) -> int:
    """Returns the budget of a mount without --cache where `ram_bytes` of memory are otherwise free."""
    return max(0, machine_of(ram_bytes, ram_bytes).spare_bytes - DAEMON_BYTES)


def ram_for(budget_bytes: int) -> int:
    """Returns the least memory of which `budget_of` is `budget_bytes`."""
    taken = budget_bytes + DAEMON_BYTES
    ram_bytes = max(taken + MACHINE_MARGIN_BYTES, int(taken / (1 - MACHINE_MARGIN_SHARE)))
    return next(size for size in itertools.count(ram_bytes) if budget_of(size) >= budget_bytes)


def settle_budget(cache_bytes: int | None, root: Path = Path("/")) -> int:
    """Returns the budget for `cache_bytes` (None: all that can be spared).

    More than there is in all is refused; more than can be spared now is reduced, with a message.
    """
    least = tightest(root)
    spare = least.spare_bytes - DAEMON_BYTES
    if spare < MIN_BUDGET_BYTES:
        raise EnvironmentProblem(
            f"not enough memory for a cache: the {least.name} has {format_size(least.available_bytes)} available",
            "end other programs, or raise the memory limit of the cgroup",
        )
    if cache_bytes is None:
        return spare
    if cache_bytes < MIN_BUDGET_BYTES:
        raise EnvironmentProblem(
            f"a budget of {format_size(cache_bytes)} is too small to stream through",
            f"set --cache to {format_size(MIN_BUDGET_BYTES)} or more",
        )
    if cache_bytes > least.total_bytes - least.margin_bytes:
        raise EnvironmentProblem(
            f"a budget of {format_size(cache_bytes)} does not fit: the {least.name} has {format_size(least.total_bytes)}",
            f"--cache {spare // 10**6}M is possible now; the default is all that can be spared",
        )
    if cache_bytes > spare:
        log.warning(
            "--cache is reduced from %s to %s, which is what the %s can spare now",
            format_size(cache_bytes),
            format_size(spare),
            least.name,
        )
        return spare
    return cache_bytes


def settle_mode(mode: str, budget_bytes: int, root: Path = Path("/")) -> str:
    """Returns the mode to have over FUSE (auto steers where the whole budget may be locked), or inplace as it is."""
    lockable = lockable_bytes(root)
    if mode == "auto":
        chosen = "steer" if lockable >= budget_bytes else "arena"
        why = "memory can be locked" if chosen == "steer" else f"only {format_size(lockable)} of memory may be locked"
        # Arena is slower: whoever could have steer by raising a limit should see it at once.
        log.log(logging.INFO if chosen == "steer" else logging.WARNING, "mode %s: %s", chosen, why)
        return chosen
    if mode == "steer" and lockable < budget_bytes:
        raise EnvironmentProblem(
            f"mode steer locks {format_size(budget_bytes)}, but RLIMIT_MEMLOCK allows {format_size(lockable)}",
            "run as root, raise `ulimit -l`, or use --mode arena",
        )
    return mode


PSI_SOME_LIMIT = 0.10  # share of the last interval in which some task stalled on memory
STEP_SHARE = 0.05
AHEAD_BYTES = 16 << 20  # given back beyond what is missing: who takes memory goes on taking
PAUSE_S = 0.25
PAUSE_NEAR_S = 0.05  # when nothing is left; in between, the less, the sooner
NEAR_BYTES = 64 << 20
CALM_S, LONGEST_CALM_S = 3.0, 60.0  # before the budget grows again: longer each time that this brings pressure back
LEAST_LIMIT_BYTES = MIN_BUDGET_BYTES // 2


class PressureGauge:
    """Turns what the machine says into the limit that the budget has right now."""

    def __init__(self, budget_bytes: int, root: Path = Path("/")) -> None:
        self.budget_bytes = budget_bytes
        self._root = root
        self._limit = budget_bytes
        self._calm_since = 0.0
        self._calm_s = CALM_S
        self._grown = False  # since it was lowered last
        self._stalled_us: int | None = None
        self._looked = 0.0
        self.pause_s = PAUSE_S
        self.free_bytes = 0  # memory that holds nothing, when the limit was asked for last
        self.slack_bytes = 0  # memory that nobody wants (negative: so much is wanted), when the limit was asked for last

    @property
    def is_near(self) -> bool:
        """True if little memory was left when the limit was asked for last, so that it is asked for sooner."""
        return self.pause_s < PAUSE_S

    @property
    def is_calm(self) -> bool:
        """True if memory has not got shorter for a while."""
        return time.monotonic() - self._calm_since > CALM_S

    def check(self, budget_bytes: int, held_bytes: int) -> None:
        """Raises EnvironmentProblem if a new budget cannot be had; `held_bytes` are ours already."""
        if budget_bytes < MIN_BUDGET_BYTES:
            raise EnvironmentProblem(
                f"a budget of {format_size(budget_bytes)} is too small: the minimum is {format_size(MIN_BUDGET_BYTES)}"
            )
        least = tightest(self._root)
        if budget_bytes - held_bytes > least.spare_bytes:
            raise EnvironmentProblem(
                f"a budget of {format_size(budget_bytes)} does not fit: "
                f"the {least.name} can spare {format_size(max(0, held_bytes + least.spare_bytes))}",
                "choose a smaller budget, or free memory",
            )

    def reset(self, budget_bytes: int) -> None:
        """Starts over with a new budget."""
        self.budget_bytes = self._limit = budget_bytes

    def limit(self, held_bytes: int) -> int:
        """Returns the bytes that may be used now, where `held_bytes` are locked or in the daemon's memory.

        What lies in the page cache and is not locked counts as had: the kernel takes it without telling.
        """
        now = time.monotonic()
        found = places(self._root)
        missing = -min(memory.spare_bytes for memory in found)
        self.free_bytes = min(memory.free_bytes for memory in found)
        self.slack_bytes = min(memory.slack_bytes for memory in found)
        self.pause_s = min(PAUSE_S, max(PAUSE_NEAR_S, PAUSE_S * -missing / NEAR_BYTES))
        stalls = self._stalls(now)
        if missing > 0:
            # From what is held, not from the limit: what is already on its way out is not asked for twice.
            self._lower(held_bytes - missing - AHEAD_BYTES, now, f"free memory is {format_size(missing)} below the margin")
        elif held_bytes - missing + AHEAD_BYTES < self._limit:
            # A loop that was left to the kernel holds nothing, and its pins would return faster than pressure is noticed.
            self._lower(held_bytes - missing - AHEAD_BYTES, now, f"only {format_size(-missing)} more can be spared")
        elif stalls > PSI_SOME_LIMIT and self._scarce():
            self._lower(
                self._limit - int(STEP_SHARE * self.budget_bytes),
                now,
                f"tasks wait for memory {format_percent(stalls, 0)} of the time",
            )
        elif self._limit < self.budget_bytes and now - self._calm_since > self._calm_s:
            self._raise(-missing)
        elif now - self._calm_since > 2 * LONGEST_CALM_S:
            self._calm_s = CALM_S
        return self._limit

    def lost(self, pinned_bytes: int) -> None:
        """What was pinned is no more: start again from half of it."""
        self._lower(pinned_bytes // 2, time.monotonic(), "the pin helper was killed")

    def _lower(self, limit: int, now: float, why: str) -> None:
        limit = max(LEAST_LIMIT_BYTES, limit)
        self._calm_since = now
        if limit < self._limit:
            log.warning("memory pressure (%s): budget %s -> %s", why, format_size(self._limit), format_size(limit))
            self._limit = limit
            if self._grown:
                self._calm_s, self._grown = min(2 * self._calm_s, LONGEST_CALM_S), False

    def _raise(self, spare_bytes: int) -> None:
        step = min(int(STEP_SHARE * self.budget_bytes), spare_bytes // 2, self.budget_bytes - self._limit)
        self._limit += max(0, step)
        self._grown = True
        if self._limit == self.budget_bytes:
            log.warning("memory pressure is over: the budget is %s again", format_size(self._limit))

    def _scarce(self) -> bool:
        """Stalls alone are no reason: a capped neighbour stalls too. The machine itself must be short."""
        memory: Memory = machine_memory(self._root)
        return memory.available_bytes < memory.margin_bytes * 2 + DAEMON_BYTES

    def _stalls(self, now: float) -> float:
        """Share of the time since the last call in which some task stalled on memory; 0 without PSI."""
        total_us = stalled_us(self._root)
        if total_us is None:
            return 0.0
        before, self._stalled_us = self._stalled_us, total_us
        elapsed, self._looked = now - self._looked, now
        return 0.0 if before is None or elapsed <= 0 else (total_us - before) / 1e6 / elapsed
