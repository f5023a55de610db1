"""Tensors as arrays, and pages in the memory of a device, with the same replacement (least recently used) as on the host."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmcache.errors import UsageError
from llmcache.kv.transformers import SpillCache
from llmcache.kv.transformers.tensors import TorchFastTier, as_array, dtype_name
from tests.hf.tiny_models import check_same, generate, prompt
from tests.unit.store_parts import HostFastTier

CPU = torch.device("cpu")


def pages(first: int, count: int, dim: int = 8) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    rng = np.random.default_rng(first)
    return rng.standard_normal((count, 2, 4, dim), dtype=np.float32)


def test_the_torch_tier_equals_the_host_tier() -> None:
    rng = np.random.default_rng(3)
    torch_tier, host_tier = TorchFastTier(12, torch.float32, CPU), HostFastTier(12)
    for step in range(60):
        layer = int(rng.integers(2))
        used = np.sort(rng.choice(20, 5, replace=False))
        found = torch_tier.have(layer, used)
        assert (found == host_tier.have(layer, used)).all()
        sent = (pages(step, int((~found).sum())), pages(step + 1000, int((~found).sum()), 6))
        for tier in (torch_tier, host_tier):
            tier.put(layer, used[~found], *sent)
        wanted = used[rng.integers(0, 5, (3, 2, 7))]
        offsets = rng.integers(0, 4, wanted.shape)
        for one, other in zip(torch_tier.rows(layer, wanted, offsets), host_tier.rows(layer, wanted, offsets), strict=True):
            assert (as_array(one) == other).all()
        if step % 9 == 0:
            dropped = rng.choice(20, 3, replace=False)
            for tier in (torch_tier, host_tier):
                tier.drop(dropped)


def test_too_many_pages_are_refused(llama: Any) -> None:
    tier = TorchFastTier(2, torch.float32, CPU)
    with pytest.raises(ValueError, match="pages: must be at most 2 at once, not 3"):
        tier.put(0, np.arange(3), pages(0, 3), pages(1, 3))
    tier.put(0, np.arange(2), pages(0, 2), pages(1, 2))
    tier.put(0, np.array([2]), pages(0, 1), pages(1, 1))
    with pytest.raises(ValueError, match="one gather needs 3, but there is room for 2"):
        tier.rows(0, np.array([[[0, 1, 2]]]), np.zeros((1, 1, 3), np.int64))
    small = SpillCache(llama.config, token_budget=96, gpu_pages=6, threads=2)
    with small as cache, pytest.raises(ValueError, match="pages: "):
        generate(llama, cache, prompt(200))
    with pytest.raises(UsageError, match="dtype"):
        dtype_name(torch.float64)


def test_a_cache_with_pages_on_the_device(llama: Any, tmp_path: Path) -> None:
    """The device is the CPU here: the logits are the same as without it, and only missing pages are sent."""
    results, sent = [], 0
    for pages in (None, 120):
        with SpillCache(llama.config, token_budget=96, path=tmp_path, gpu_pages=pages, threads=2) as cache:
            results.append(generate(llama, cache, prompt(200)))
            sent = cache.traffic.bytes_between("cpu", "gpu", "attend")
    check_same(results[0], results[1])
    layers, sequences, steps, token_bytes = 3, 2, 11, 2 * 2 * 16 * 4
    attended = layers * sequences * steps * 96 * token_bytes
    assert 0 < sent < attended
