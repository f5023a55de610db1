"""Records the rows that the KV manager's policy Kelle keeps, for `llmcache edram report`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmcache.errors import UsageError
from llmcache.kv.bench.options import DEFAULT_POLICIES
from llmcache.kv.bench.synthetic import PolicySession, Setup, check_space, variants_of
from llmcache.kv.policies.h2o import Kelle
from llmcache.papers.edram.refresh import EdramRun, RunRecorder
from llmcache.units import format_duration


class KelleRecorder(RunRecorder):
    """Records the rows that `policy` keeps from now on, as vectors of 16 bits.

    `step_ns`: duration of a step on the *modelled* accelerator; None: the reader of the run chooses it.
    """

    def __init__(self, policy: Kelle, *, step_ns: float | None = None) -> None:
        shape = policy.store.shape
        super().__init__(shape.head_dim + shape.value_dim)  # one half of the bits
        self._policy, self._step_ns = policy, step_ns
        policy.record(self, step_ns)

    def run(self, title: str = "", **settings: Any) -> EdramRun:
        policy = self._policy
        policy.end_record()
        clock = "unknown" if self._step_ns is None else f"modelled: {format_duration(self._step_ns)} per step"
        given = {"policy": policy.name, "evicted": policy.settings.evicted, "token_budget": policy.settings.token_budget}
        return self.finish(title or f"{policy.title}, {policy.store.shape.model}", clock, given | settings)


def record_stream(setup: Setup, policy: str | None, progress: Callable[[str], None] = lambda _: None) -> EdramRun:
    """Return the rows that Kelle keeps in each step of the benchmark; UsageError if `policy` is another one."""
    variants = variants_of(policy or DEFAULT_POLICIES)
    if [variant.policy for variant in variants] != [Kelle.name]:
        raise UsageError("--edram-run: only the policy kelle can be recorded", "add --policy kelle")
    check_space(setup, 1)
    with PolicySession(setup, variants[0]) as session:
        assert isinstance(session.policy, Kelle)
        progress("storing the prompt")
        session.prefill()
        recorder = KelleRecorder(session.policy)
        for step in range(setup.steps):
            progress(f"decode step {step + 1} of {setup.steps}")
            session.decode(step)
        conditions = {name: value for name, value in setup.conditions().items() if name != "directory"}
        return recorder.run(f"Kelle, synthetic stream of {setup.spec.context:,} tokens", **conditions)
