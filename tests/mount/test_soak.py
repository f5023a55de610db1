"""Mixed readers for a long time while the budget is halved and doubled: every byte verified, nobody hangs.

LLMCACHE_SOAK_SECONDS sets the duration: 2 by default, 600 for the real thing.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tests.mount.live import MIB, OVERHEAD_BYTES, Live, finish_reader, live, random_file, readers, resident_bytes
from tools.bench.clients.loop_reader import crcs

SECONDS = float(os.environ.get("LLMCACHE_SOAK_SECONDS", "2"))
SIZES = {"loop.bin": 150 * MIB, "second.bin": 70 * MIB + 77, "small.bin": 9 * MIB + 1}
CACHE = 96 * MIB


def held(mount: Live) -> int:
    """Bytes in the page cache of the mount, and of memory of its processes."""
    return resident_bytes(*(mount.mountpoint / name for name in SIZES)) + mount.memory_bytes()


@pytest.mark.timeout(SECONDS + 240)
@pytest.mark.parametrize("mode", ["steer", "arena"])
def test_soak(tmp_path: Path, mode: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    checks = {}
    for name, size in SIZES.items():
        checks[name] = tmp_path / f"{name}.json"
        checks[name].write_text(json.dumps(crcs(random_file(source / name, size))))
    kinds = [("loop.bin", "read"), ("loop.bin", "mmap"), ("second.bin", "read"), ("second.bin", "mmap"),
             ("small.bin", "read"), ("small.bin", "mmap"), ("loop.bin", "direct"), ("second.bin", "read")]  # fmt: skip
    with live(source, tmp_path / "mnt", str(CACHE), "--mode", mode) as mount:
        jobs = [(mount.mountpoint / name, checks[name], how) for name, how in kinds]
        with readers(jobs, SECONDS) as running:
            budget, over = CACHE, []
            while any(reader.poll() is None for reader in running):
                budget = CACHE // 2 if budget == CACHE else CACHE
                mount.resize(budget)
                time.sleep(min(2.0, SECONDS / 4))  # a smaller budget may take a moment to be reached
                # What moves from memory to the page cache between the two counts twice: too much is so again at once.
                if held(mount) > CACHE + OVERHEAD_BYTES and (still := held(mount)) > CACHE + OVERHEAD_BYTES:
                    over.append(still)
            results = [finish_reader(reader, 120) for reader in running]
        assert mount.daemon.poll() is None
        assert mount.stats()["mode"] == mode
    assert all(passes > 0 and wrong == 0 for passes, wrong in results), results
    assert over == [], f"held more than {CACHE + OVERHEAD_BYTES}: {over}"
