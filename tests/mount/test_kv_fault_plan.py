"""Random plans of faults under KvStore, on a file and the emulated device, on a disk and within a mount: byte-exact.

LLMCACHE_FAULT_SECONDS and LLMCACHE_FAULT_SEED as in test_fault_plan.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

import psutil
import pytest

from tests.mount.fault_rig import Rig
from tests.mount.kv_fault_plan import kv_rig, make_moves
from tests.mount.live import wait_for

SECONDS = float(os.environ.get("LLMCACHE_FAULT_SECONDS", "0"))
SEED = os.environ.get("LLMCACHE_FAULT_SEED")
SHORT_MOVES = {None: 24, "steer": 36, "arena": 36}  # every fault at least once
LONG_MOVES = 300

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mkfs.ext4"), reason="loop devices need root, e2fsprogs"),
    pytest.mark.timeout(SECONDS + 600),
]


@pytest.mark.parametrize(("mode", "ssd"), [(None, "file"), ("steer", "file"), ("arena", "csd")])
def test_a_plan_of_faults_under_a_store(tmp_path: Path, mode: str | None, ssd: str) -> None:
    end = time.monotonic() + SECONDS
    seed = int(SEED) if SEED else time.time_ns() % 1_000_000 if SECONDS else 7
    with Rig(tmp_path, mode, seed, sizes={}) as rig:
        while True:
            one_plan(rig, ssd, seed, LONG_MOVES if SECONDS or SEED else SHORT_MOVES[rig.mode])
            if SEED or time.monotonic() > end:
                break
            seed += 1
        if mode is not None:
            rig.end()


def one_plan(rig: Rig, ssd: str, seed: int, count: int) -> None:
    """Carry one plan out; a failure tells which."""
    directory = rig.source if rig.mode is None else rig.point
    moves, at = make_moves(seed, count, rig.mode is not None, ssd), 0
    with kv_rig(rig, directory / "context.kv", ssd) as store:
        try:
            for move in moves:
                store.carry_out(move)
                at += 1
            store.do_again(random.Random(seed))
            store.store.discard()
        except BaseException as error:
            told = " ".join(move.name for move in moves[max(0, at - 12) : at + 1])
            hint = f"LLMCACHE_FAULT_SEED={seed} does it again; move {at} of {rig.mode} {ssd}"
            raise AssertionError(f"{error}\n{told}\n{hint}\nbroken: {store.broken}, {store.errors[-3:]}") from error
    # What was deleted while it was open has another name on the faulty file system until it is closed.
    wait_for(lambda: os.listdir(rig.files) == [], "nothing is left behind")
    children = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    assert not [child for child in children if "llmcache.kv.csd.device" in child.cmdline()]
