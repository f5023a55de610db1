"""Records what Kelle keeps of a synthetic stream, for `llmcache edram report`: the KV manager's live run, untimed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from llmcache.edram.refresh import EdramRun
from llmcache.errors import UsageError
from llmcache.kv.bench.measured import check_space, workplace
from llmcache.kv.bench.session import Session, Setup
from llmcache.kv.bench.variants import Variant
from llmcache.kv.policies.kelle import Kelle


def record(setup: Setup, variants: list[Variant], progress: Callable[[str], None] = lambda _: None) -> EdramRun:
    """Returns what the policy of `variants` keeps in each of the setup's steps; UsageError unless it is Kelle alone.

    The run has no clock: how long a step takes on an accelerator with eDRAM, nothing here can measure.
    """
    if [variant.policy for variant in variants] != [Kelle.name]:
        raise UsageError("--edram-run: only Kelle's runs can be recorded", "--policy kelle")
    check_space(setup, 1)
    with workplace(setup.directory) as directory, Session(replace(setup, directory=directory), variants[0]) as session:
        policy = session.policy
        assert isinstance(policy, Kelle)
        progress("storing the prompt")
        session.prefill()
        policy.record()
        for step in range(setup.steps):
            progress(f"decode step {step + 1} of {setup.steps}")
            session.decode(step)
        conditions = {name: value for name, value in setup.conditions().items() if name != "directory"}
        return policy.recorded(f"Kelle, synthetic stream of {setup.spec.context:,} tokens", **conditions)
