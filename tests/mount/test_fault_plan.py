"""Random plans of faults under load, in both modes: the right bytes or a documented error, no hang, nothing left behind.

LLMCACHE_FAULT_SECONDS=600 goes on for so long in each mode, with a fresh seed for each plan; a failure prints its seed
and plan, and LLMCACHE_FAULT_SEED=SEED does that one again.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from tests.mount.fault_plan import FAULTS, carry_out, check_counters, make_plan
from tests.mount.fault_rig import SIZES, Rig
from tests.mount.live import MIB, OVERHEAD_BYTES, private_bytes, resident_bytes, wait_for

SECONDS = float(os.environ.get("LLMCACHE_FAULT_SECONDS", "0"))
SEED = os.environ.get("LLMCACHE_FAULT_SEED")
SHORT_STEPS = 9
SHORT_SEEDS = {"steer": 272, "arena": 1272}  # both together have every fault
LONG_STEPS = 40

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mkfs.ext4"), reason="loop devices need root, e2fsprogs"),
    pytest.mark.timeout(SECONDS + 600),
]


def test_the_short_plans_have_every_fault() -> None:
    plans = [make_plan(seed, SHORT_STEPS) for seed in SHORT_SEEDS.values()]
    assert {fault for plan in plans for step in plan for fault in step.faults} == set(FAULTS)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["steer", "arena"])
def test_a_plan_of_faults(tmp_path: Path, mode: str) -> None:
    end = time.monotonic() + SECONDS
    seed = int(SEED) if SEED else time.time_ns() % 1_000_000 if SECONDS else SHORT_SEEDS[mode]
    while True:
        directory = tmp_path / str(seed)
        directory.mkdir()
        one_plan(directory, mode, seed, LONG_STEPS if SECONDS else SHORT_STEPS)
        shutil.rmtree(directory)
        if SEED or time.monotonic() > end:
            return
        seed += 1


def one_plan(directory: Path, mode: str, seed: int, steps: int) -> None:
    """Carry one plan out; a failure tells which."""
    plan, at = make_plan(seed, steps), 0
    with Rig(directory, mode, seed) as rig:
        try:
            rig.start_clients()
            for at, step in enumerate(plan):
                print(f"seed {seed} {mode}: {at} {step}", flush=True)
                carry_out(rig, step)
                assert not rig.failures
            rig.stop_clients()
            assert not rig.failures
            check_end(rig)
        except BaseException as error:
            told = "\n".join(map(str, plan[max(0, at - 2) : at + 1]))
            log = "\n".join(rig.log.read_text().splitlines()[-30:])
            hint = f"LLMCACHE_FAULT_SEED={seed} does it again; step {at} of mode {mode}"
            raise AssertionError(f"{rig.failures}\n{error}\n{told}\n{hint}\n{log}") from error


def check_end(rig: Rig) -> None:
    """All is repaired: every byte is right, the budget is kept, and what is counted is what is there."""
    rig.control(op="resize", cache_bytes=24 * MIB)
    rig.check_everything()

    def held() -> int:
        pids = [rig.daemon.pid, *(child.pid for child in rig.children().values())] if rig.daemon else []
        resident = resident_bytes(*(rig.point / name for name in SIZES))
        return resident + sum(private_bytes(pid) for pid in pids)

    wait_for(lambda: held() <= 24 * MIB + OVERHEAD_BYTES, "the budget is kept")
    check_counters(rig.control(op="stats"))
    rig.control(op="evict", globs=[])
    wait_for(lambda: resident_bytes(*(rig.point / name for name in SIZES)) == 0, "what is evicted has gone")
    wait_for(lambda: rig.control(op="stats")["resident_bytes"] == 0, f"nothing is counted: {rig.control(op='stats')}")
    rig.end()
