"""The budget of a mount, and the limit that memory pressure leaves of it. `root` lets tests use recorded trees.

Free memory is compared with a margin for the machine and each limited cgroup above the daemon, every 0.25 s to 0.05 s. Below
the margin, the limit drops at once to the bytes that the kernel cannot reclaim, less the missing bytes. If PSI shows stalls,
it drops in steps. It grows back slowly after a calm period.
"""

from __future__ import annotations

import itertools
import logging
import time
from pathlib import Path

from llmcache.errors import MissingRequirement
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
DAEMON_BYTES = 40 << 20  # reserved outside the budget for daemon, helper, buffers and page tables


def budget_of(ram_bytes: int) -> int:
    """Return the budget without --cache for `ram_bytes` of otherwise free memory."""
    return max(0, machine_of(ram_bytes, ram_bytes).spare_bytes - DAEMON_BYTES)


def ram_for(budget_bytes: int) -> int:
    """Return the smallest memory for which `budget_of` returns `budget_bytes`."""
    needed_bytes = budget_bytes + DAEMON_BYTES
    ram_bytes = max(needed_bytes + MACHINE_MARGIN_BYTES, int(needed_bytes / (1 - MACHINE_MARGIN_SHARE)))
    return next(size for size in itertools.count(ram_bytes) if budget_of(size) >= budget_bytes)


def settle_budget(cache_bytes: int | None, root: Path = Path("/")) -> int:
    """Return the budget for `cache_bytes` (None: all memory that can be spared).

    A budget that cannot be spared now is reduced, with a warning; one larger than the machine's memory is an error.
    """
    least = tightest(root)
    spare = least.spare_bytes - DAEMON_BYTES
    if spare < MIN_BUDGET_BYTES:
        raise MissingRequirement(
            f"not enough memory for a cache: the {least.name} has {format_size(least.available_bytes)} available",
            "end other programs, or raise the memory limit of the cgroup",
        )
    if cache_bytes is None:
        return spare
    if cache_bytes < MIN_BUDGET_BYTES:
        raise MissingRequirement(
            f"a budget of {format_size(cache_bytes)} is too small to stream through",
            f"set --cache to {format_size(MIN_BUDGET_BYTES)} or more",
        )
    if cache_bytes > least.total_bytes - least.margin_bytes:
        raise MissingRequirement(
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
    """Return `mode`; for auto, steer if the budget may be locked, otherwise arena. MissingRequirement."""
    lockable = lockable_bytes(root)
    if mode == "auto":
        chosen = "steer" if lockable >= budget_bytes else "arena"
        why = "memory can be locked" if chosen == "steer" else f"only {format_size(lockable)} of memory may be locked"
        # Arena is slower, so a warning shows the user that raising a limit enables steer.
        log.log(logging.INFO if chosen == "steer" else logging.WARNING, "mode %s: %s", chosen, why)
        return chosen
    if mode == "steer" and lockable < budget_bytes:
        raise MissingRequirement(
            f"mode steer locks {format_size(budget_bytes)}, but RLIMIT_MEMLOCK allows {format_size(lockable)}",
            "run as root, raise `ulimit -l`, or use --mode arena",
        )
    return mode


PSI_SOME_LIMIT = 0.10  # share of the last interval in which some task stalled on memory
STEP_SHARE = 0.05
AHEAD_BYTES = 16 << 20  # freed beyond the missing bytes, because the program that took them usually takes more
PAUSE_S = 0.25
PAUSE_NEAR_S = 0.05  # when no memory is left; between NEAR_BYTES and 0, the pause is proportional
NEAR_BYTES = 64 << 20
CALM_S, LONGEST_CALM_S = 3.0, 60.0  # before the limit grows again; doubled each time that growth causes pressure
LEAST_LIMIT_BYTES = MIN_BUDGET_BYTES // 2
LOG_S = 60.0  # between messages about the limit: another program may use and free memory many times a second


class PressureGauge:
    """Limits the budget by the state of the machine's memory."""

    def __init__(self, budget_bytes: int, root: Path = Path("/")) -> None:
        self.budget_bytes = budget_bytes
        self._root = root
        self._limit = budget_bytes
        self._calm_since = 0.0
        self._calm_s = CALM_S
        self._grown = False  # since it was last lowered
        self._stalled_us: int | None = None
        self._last_check = 0.0
        self._why = ""
        self._reductions = 0  # since the last message
        self._logged_bytes, self._logged_s = budget_bytes, time.monotonic() - LOG_S  # limit and time of the last message
        self.pause_s = PAUSE_S
        self.free_bytes = 0  # unused memory at the last call of `limit`
        self.slack_bytes = 0  # unused memory beyond the kernel's reserve at that call; negative if memory is short

    @property
    def is_near(self) -> bool:
        """Call `limit` sooner, because little memory is left."""
        return self.pause_s < PAUSE_S

    @property
    def is_calm(self) -> bool:
        """True if memory pressure has not increased for CALM_S."""
        return time.monotonic() - self._calm_since > CALM_S

    def check(self, budget_bytes: int, held_bytes: int) -> None:
        """Raise MissingRequirement if the budget cannot be spared; `held_bytes` of it are in use."""
        if budget_bytes < MIN_BUDGET_BYTES:
            raise MissingRequirement(
                f"a budget of {format_size(budget_bytes)} is too small: the minimum is {format_size(MIN_BUDGET_BYTES)}"
            )
        least = tightest(self._root)
        if budget_bytes - held_bytes > least.spare_bytes:
            raise MissingRequirement(
                f"a budget of {format_size(budget_bytes)} does not fit: "
                f"the {least.name} can spare {format_size(max(0, held_bytes + least.spare_bytes))}",
                "choose a smaller budget, or free memory",
            )

    def reset(self, budget_bytes: int) -> None:
        self.budget_bytes = self._limit = self._logged_bytes = budget_bytes

    def limit(self, held_bytes: int, window_bytes: int = 0) -> int:
        """Return the bytes that may be used now. `held_bytes`: locked or in the daemon's memory.

        `window_bytes` of a cgroup's page cache are streamed through. The kernel could reclaim them, but reclaims what was
        fetched ahead before what was read, and then all of it is read twice. The machine's margin is large enough.
        """
        now = time.monotonic()
        memories = places(self._root)
        missing = -min(memory.spare_bytes for memory in memories)
        short = max([missing, *(window_bytes - group.spare_bytes for group in memories[1:])])
        self.free_bytes = min(memory.free_bytes for memory in memories)
        self.slack_bytes = min(memory.slack_bytes for memory in memories)
        self.pause_s = min(PAUSE_S, max(PAUSE_NEAR_S, PAUSE_S * -missing / NEAR_BYTES))
        stalls = self._stalls(now)
        if missing > 0:
            # From `held_bytes`, not from the limit, so that memory that is being freed is not requested twice.
            self._lower(held_bytes - missing - AHEAD_BYTES, now, f"free memory is {format_size(missing)} below the margin")
        elif held_bytes - missing + AHEAD_BYTES < self._limit:
            # A space left to the kernel has no pins; with a higher limit, they could return before pressure shows.
            self._lower(held_bytes - missing - AHEAD_BYTES, now, f"only {format_size(-missing)} more can be spared")
        elif short > 0:
            # Without AHEAD_BYTES: no program takes more.
            self._lower(held_bytes - short, now, f"free memory is {format_size(short)} below the margin")
        elif stalls > PSI_SOME_LIMIT and self._scarce():
            self._lower(
                self._limit - int(STEP_SHARE * self.budget_bytes),
                now,
                f"tasks wait for memory {format_percent(stalls, 0)} of the time",
            )
        elif self._limit < self.budget_bytes and now - self._calm_since > self._calm_s:
            self._raise(held_bytes, -short)
        elif now - self._calm_since > 2 * LONGEST_CALM_S:
            self._calm_s = CALM_S
        if now - self._logged_s >= LOG_S:
            self._log(now)
        return self._limit

    def _log(self, now: float) -> None:
        limit, times = format_size(self._limit), f"{self._reductions} reductions in {now - self._logged_s:.0f} s"
        often = f" ({times})" if self._reductions > 1 else ""
        if self._limit == self.budget_bytes and (self._reductions or self._logged_bytes < self._limit):
            log.warning("memory pressure is over: the budget is %s again%s", limit, often)
        elif self._reductions:
            log.warning("memory pressure (%s): budget %s -> %s%s", self._why, format_size(self._logged_bytes), limit, often)
        else:
            return
        self._logged_bytes, self._logged_s, self._reductions = self._limit, now, 0

    def lost(self, pinned_bytes: int) -> int:
        """Restart with half of a killed helper's bytes; return the limit."""
        self._lower(pinned_bytes // 2, time.monotonic(), "the pin helper was killed")
        return self._limit

    def _lower(self, limit: int, now: float, why: str) -> None:
        limit = max(LEAST_LIMIT_BYTES, limit)
        self._calm_since = now
        if limit < self._limit:
            self._limit, self._why = limit, why
            self._reductions += 1
            if self._grown:
                self._calm_s, self._grown = min(2 * self._calm_s, LONGEST_CALM_S), False

    def _raise(self, held_bytes: int, spare_bytes: int) -> None:
        # Not beyond what can be spared: pins may follow the limit late, and a limit far beyond it is lowered far below it.
        most = min(self.budget_bytes, held_bytes + spare_bytes)
        step = min(int(STEP_SHARE * self.budget_bytes), spare_bytes // 2, most - self._limit)
        self._limit += max(0, step)
        self._grown = True

    def _scarce(self) -> bool:
        """Stalls alone can come from another process."""
        memory: Memory = machine_memory(self._root)
        return memory.available_bytes < memory.margin_bytes * 2 + DAEMON_BYTES

    def _stalls(self, now: float) -> float:
        """Return a share of time; 0 without PSI."""
        total_us = stalled_us(self._root)
        if total_us is None:
            return 0.0
        before, self._stalled_us = self._stalled_us, total_us
        elapsed, self._last_check = now - self._last_check, now
        return 0.0 if before is None or elapsed <= 0 else (total_us - before) / 1e6 / elapsed
