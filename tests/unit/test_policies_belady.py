"""Belady says on which traces it would not be exact, and needs memory by runs, not by blocks."""

from __future__ import annotations

import numpy as np
import pytest

from llmcache.cache.policies.belady import Belady, _segments, why_not_exact
from llmcache.trace.record import Provenance


@pytest.mark.parametrize("tier", ["synthetic", "csv", "oracleGeneral", "mount", "strace"])
def test_complete_traces_are_exact(tier: str) -> None:
    assert why_not_exact(Provenance(tier=tier)) is None


def test_lost_events_are_a_reason() -> None:
    assert why_not_exact(Provenance(tier="mount", lost_events=3)) == "lost_events is 3: accesses are missing from the trace"


def test_what_the_source_could_not_see_is_a_reason() -> None:
    reason = why_not_exact(Provenance(tier="faults", extra={"unseen": "touches of pages that are mapped already"}))
    assert reason == "unseen: touches of pages that are mapped already"


@pytest.mark.parametrize("gap", ["mapped_ranges", "accesses_of_unknown_files", "guessed_offsets"])
def test_gaps_that_an_importer_counts_are_a_reason(gap: str) -> None:
    reason = why_not_exact(Provenance(tier="strace", extra={gap: "12"}))
    assert reason is not None
    assert reason.startswith(f"{gap} is 12: ")


def test_next_uses_of_a_loop_in_runs_take_a_segment_per_run() -> None:
    first = np.tile(np.arange(0, 100_000, 1000), 5)
    count = np.full_like(first, 1000)
    uses, lengths = _segments(first, count, 100_000, int(count.sum()))
    assert len(uses) == len(first)
    assert lengths.tolist() == count.tolist()
    assert uses[-1] == 100_000  # the first block comes again after one lap
    assert uses[:100].tolist() == [-1] * 100  # the last lap has no next


def test_hits_of_a_large_loop() -> None:
    first = np.tile(np.arange(0, 100_000, 1000), 5)
    policy = Belady(50_001, 100_000)
    hits = policy.replay(first, np.full_like(first, 1000))
    assert int(hits.sum()) / 400_000 == pytest.approx(50_000 / 99_999, abs=1e-4)  # (S - 1) / (N - 1): no bypass
    assert len(policy.resident()) == 50_001
