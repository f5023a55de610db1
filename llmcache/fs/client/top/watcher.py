"""Looks at a mount again and again, and remembers enough to tell rates."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from llmcache.errors import MountProblem
from llmcache.fs.client.control import ask, understood
from llmcache.fs.client.top.replies import budget_of, flow_between, heat_of, loops_of
from llmcache.fs.client.top.sample import Sample

Ask = Callable[[str, dict[str, Any]], dict[str, Any]]

MEMORY_S = 60.0
HEAT_SHARE = 0.05  # of the time that the mount may be busy with telling the heat of large models
ROUNDING_S = 0.01


class Watcher:
    """Takes samples of the mount on a path."""

    def __init__(self, mount: str, asks: Ask = ask, clock: Callable[[], float] = time.monotonic) -> None:
        self.mount = mount
        self._ask = asks
        self._clock = clock
        self._past: deque[dict[str, Any]] = deque()  # without files: thousands of them would be remembered for a minute
        self._latest_begin_s = float("inf")
        self._heat: dict[str, Any] = {}
        self._heat_due_s = float("-inf")

    def sample(self) -> Sample:
        """One look. MountProblem if there is no mount, not any more, or one that tells what cannot be understood."""
        asked_s = self._clock()
        try:
            stats = self._ask(self.mount, {"op": "stats"})
            with understood(self.mount):
                self._notice_another(stats, asked_s)
                return self._sample(stats)
        except MountProblem as error:
            if not self._past:
                raise
            raise MountProblem(f"{self.mount} can no longer be watched: {error.message}", error.hint) from error

    def _notice_another(self, stats: dict[str, Any], asked_s: float) -> None:
        """Forgets all if this is another mount on the same path: one that began later, however long it is there by now.

        An uptime was told at some time between question and answer: that says when a mount began, within bounds.
        """
        if asked_s - stats["uptime_s"] > self._latest_begin_s + ROUNDING_S:
            self._past.clear()
            self._heat_due_s, self._latest_begin_s = float("-inf"), float("inf")
        self._latest_begin_s = min(self._latest_begin_s, self._clock() - stats["uptime_s"])

    def _sample(self, stats: dict[str, Any]) -> Sample:
        heat = self._warmth()
        base = self._base(stats)
        found = Sample(
            mount=self.mount,
            unix_s=time.time(),
            uptime_s=float(stats["uptime_s"]),
            budget=budget_of(stats),
            total=flow_between(None, stats),
            interval=None if base is None else flow_between(base, stats),
            loops=loops_of(stats),
            heat=heat_of(heat),
            left_out_files=int(heat["left_out_files"]),
        )
        self._past.append({name: value for name, value in stats.items() if name != "files"})
        while self._past[0]["uptime_s"] < stats["uptime_s"] - MEMORY_S:
            self._past.popleft()
        return found

    def _warmth(self) -> dict[str, Any]:
        """The heat, not asked for more often than it is cheap to tell."""
        began = self._clock()
        if began >= self._heat_due_s:
            self._heat = self._ask(self.mount, {"op": "heat"})
            taken = self._clock() - began
            self._heat_due_s = began + taken / HEAT_SHARE
        return self._heat

    def _base(self, now: dict[str, Any]) -> dict[str, Any] | None:
        """The youngest earlier look that is a whole period of every loop in use away; else the oldest there is."""
        periods = [float(loop["period_s"] or 0) for file in now["files"] for loop in file["loops"] if loop["readers"]]
        longest = max(periods, default=0.0)
        back_s: float = now["uptime_s"] - longest
        whole = [past for past in self._past if past["uptime_s"] <= back_s]
        if whole:
            return whole[-1]
        return self._past[0] if self._past else None
