"""A disk that is full when a conversation is saved: an error that says so, nothing half written, and it goes on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from llmcache.errors import EnvironmentProblem
from llmcache.kv.transformers import SpillCache
from tests.hf.tiny_models import Enabled, generate, longer, prompt
from tests.unit.kv_parts import small_disk

CASES = [("llama", "hillinfer", {"ssd": "csd"}), ("gemma3", "hillinfer", {}), ("llama", "icecache", {"scorer": "dci"})]


def fill(disk: Path) -> Path:
    """Fill a disk to the last block."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(1 << 16))
    return ballast


@pytest.mark.parametrize(("family", "policy", "options"), CASES)
def test_a_disk_that_is_full_when_it_is_saved(
    enabled: Enabled, tmp_path: Path, family: str, policy: str, options: dict[str, Any]
) -> None:
    model, options = enabled(family), {"token_budget": 64, "threads": 2, **options}
    with small_disk(tmp_path, "30m") as disk:
        with SpillCache(model.config, policy, path=disk / "talk.kv", **options) as cache:
            inputs = longer(generate(model, cache, prompt()))
            before = sorted(os.listdir(disk))
            ballast = fill(disk)
            for _ in range(2):
                with pytest.raises(EnvironmentProblem, match=r"talk\.kv") as caught:
                    cache.save()
                assert caught.value.hint and caught.value.exit_code == 3
            ballast.unlink()
            assert sorted(os.listdir(disk)) == before, "nothing is left behind"
            cache.save()
            length, ids = cache.get_seq_length(), cache.ids.copy()
        with SpillCache.restore(model, disk / "talk.kv", policy, **options) as cache:
            assert cache.get_seq_length() == length and (cache.ids == ids).all()
            generate(model, cache, inputs)


@pytest.mark.parametrize("full_tokens", [0, 165])
def test_a_disk_that_is_full_while_it_talks(llama: Any, tmp_path: Path, full_tokens: int) -> None:
    """The step is taken back, and the conversation is as it would have been, once there is space.

    That it is full may come out while the store takes over what was attended to fully.
    """
    with small_disk(tmp_path, "30m") as disk:
        with SpillCache(llama.config, path=disk / "talk.kv", token_budget=64, threads=2, full_tokens=full_tokens) as cache:
            inputs = longer(generate(llama, cache, prompt()), 1100)
            ballast, ids = fill(disk), cache.ids.copy()
            with pytest.raises(EnvironmentProblem, match="no space left"):
                generate(llama, cache, inputs)
            ballast.unlink()
            cache.save()
        with SpillCache.restore(llama, disk / "talk.kv", token_budget=64, threads=2, full_tokens=full_tokens) as cache:
            assert (cache.ids == ids).all()
            generate(llama, cache, inputs)
