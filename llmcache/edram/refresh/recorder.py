"""Records a live run for the accounting: a policy shows its rows once a step, the recorder keeps what changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any

from llmcache.edram.refresh.lives import KINDS, Flags, Flow, Ints, Life, Tracker
from llmcache.edram.refresh.run import EdramRun


class RunRecorder:
    """Collects an `EdramRun`. `pair_bytes`, `x_bytes`: one half (MSB or LSB) of a key and value of a head, of an x row.

    `lives`: follow rows one by one, which per-row accounting needs; about 100 bytes for each row that is ever written.
    """

    def __init__(self, pair_bytes: int, x_bytes: int = 0, *, lives: bool = True) -> None:
        if pair_bytes < 1 or x_bytes < 0:
            raise ValueError(f"pair_bytes: {pair_bytes} and {x_bytes}, at least 1 and 0 are needed")
        self.pair_bytes, self.x_bytes = pair_bytes, x_bytes
        self._lives: Counter[Life] | None = Counter() if lives else None
        self._trackers: dict[tuple[Hashable, str], Tracker] = {}
        self._now = dict.fromkeys(KINDS, Flow())
        self._flows: dict[str, list[Flow]] = {kind: [] for kind in KINDS}
        self._durations: list[float] = []

    def observe(self, layer: Hashable, kind: str, ids: Ints, high: Flags) -> None:
        """Takes the rows of one array of places (a layer of a sequence) during the step that is under way, once a step.

        `ids`: what tells the rows in the places apart (their positions; -1: free), `high`: which are high-score tokens.
        """
        if kind not in KINDS:
            raise ValueError(f"kind: '{kind}', known are {', '.join(KINDS)}")
        tracker = self._trackers.setdefault((layer, kind), Tracker(kind, self._lives))
        self._now[kind] += tracker.observe(len(self._flows[kind]), ids, high)

    def end_step(self, duration_ns: float | None = None) -> None:
        """The step that was observed is over; it takes `duration_ns` on the modelled clock (None in all steps: not said)."""
        timed = len(self._durations) if duration_ns is None else len(self._flows["kv"]) - len(self._durations)
        if timed:
            raise ValueError("duration_ns: it must be given for all steps or for none")
        if duration_ns is not None:
            if not duration_ns > 0:
                raise ValueError(f"duration_ns: {duration_ns}, more than 0 is needed")
            self._durations.append(float(duration_ns))
        for kind in KINDS:
            self._flows[kind].append(self._now[kind])
        self._now = dict.fromkeys(KINDS, Flow())

    def finish(self, title: str, clock: str, settings: dict[str, Any] | None = None) -> EdramRun:
        """Returns the run. Nothing can be observed afterwards."""
        for tracker in self._trackers.values():
            tracker.close(len(self._flows["kv"]))
        lives = None
        if self._lives is not None:
            lives = tuple(Life(life.kind, life.begin, life.path, count) for life, count in self._lives.items())
        return EdramRun(
            self.pair_bytes,
            self.x_bytes,
            {kind: tuple(flows) for kind, flows in self._flows.items()},
            tuple(self._durations) or None,
            lives,
            title,
            clock,
            settings or {},
        )
