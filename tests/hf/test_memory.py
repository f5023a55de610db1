"""`memory` limits everything that a SpillCache holds in host memory: the test adds up all of its arrays and tensors."""

from __future__ import annotations

import functools
import gc
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from llmcache.errors import UsageError
from llmcache.kv.transformers import SpillCache, cache_argument, conversation, disable, enable
from llmcache.kv.transformers.dense import NEVER
from tests.hf.tiny_models import Enabled, both, check_same, generate, single

SKIPPED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, torch.nn.Module)


def held_bytes(cache: SpillCache) -> int:
    """Return the bytes of all arrays, tensors and large byte strings that are reachable from `cache`."""
    seen, found, left = set(), {}, [cache]
    while left:
        item = left.pop()
        if id(item) in seen or isinstance(item, SKIPPED):
            continue
        seen.add(id(item))
        if isinstance(item, np.ndarray):
            if item.base is None:
                found[id(item)] = item.nbytes
        elif torch.is_tensor(item):
            storage = item.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif type(item).__name__ == "mmap" or type(item) is bytes:
            found[id(item)] = len(item)
        elif type(item).__name__ == "array":
            found[id(item)] = item.buffer_info()[1] * item.itemsize
        left += gc.get_referents(item)
        if isinstance(item, np.ndarray) and item.base is not None:
            left.append(item.base)
    return sum(found.values())


def model_of(layers: int, kv_heads: int, dim: int, dtype: str) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=kv_heads, head_dim=dim, max_position_embeddings=8192, pad_token_id=0, eos_token_id=96,
    )  # fmt: skip
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(config).eval().to(getattr(torch, dtype))


def fill(model: Any, cache: SpillCache, lengths: tuple[int, ...]) -> list[int]:
    """Extend a context to each of `lengths`, with a few single tokens after each; return the bytes held after each step."""
    held = []
    ids = torch.from_numpy(np.random.default_rng(7).integers(1, 96, (1, max(lengths) + 3)))
    with torch.no_grad():
        for length in lengths:
            model(input_ids=ids[:, cache.get_seq_length() : length], **cache_argument(cache))
            held.append(held_bytes(cache))
            for _ in range(3):
                model(input_ids=ids[:, length : length + 1], **cache_argument(cache))
                held.append(held_bytes(cache))
    return held


@pytest.mark.parametrize("full", [False, True], ids=["selecting", "full attention first"])
@pytest.mark.parametrize(
    ("layers", "kv_heads", "dim", "dtype", "policy", "options"),
    [
        (2, 2, 16, "float32", "mass", {}),
        (5, 4, 64, "float32", "mass", {"scorer": "packed"}),
        (3, 1, 128, "bfloat16", "mass", {"scorer": "exact"}),
        (3, 2, 64, "float16", "quest", {}),
        (2, 2, 64, "float32", "icecache", {}),
        (2, 2, 64, "float32", "h2o", {}),
        (2, 2, 64, "bfloat16", "hillinfer", {}),
        (2, 2, 64, "float32", "leoam", {}),
        (2, 2, 64, "float32", "mass", {"token_budget": None, "alpha": 0.2}),
    ],
    ids=str,
)
def test_everything_that_a_cache_holds_is_within_its_memory(
    layers: int, kv_heads: int, dim: int, dtype: str, policy: str, options: dict[str, Any], full: bool,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if full:
        monkeypatch.setattr(conversation, "break_even", lambda *arguments: NEVER)
    model = enable(model_of(layers, kv_heads, dim, dtype))
    token_bytes = 2 * layers * kv_heads * dim * getattr(torch, dtype).itemsize
    share = 0.85 if policy == "icecache" or options.get("scorer") == "exact" else 0.5  # their indexes are large
    memory = int(4000 * share) * token_bytes
    options = {"token_budget": 64, "threads": 2, **options}
    with SpillCache(model, policy, path=tmp_path, memory=memory, **options) as cache:
        held = fill(model, cache, (500, 1200, 2500, 4000))
        assert max(held) <= memory
        assert held[-1] >= memory / 3, "it uses the memory"
        assert cache.traffic.bytes_between("ssd", "cpu") > 0 or policy == "h2o"


def test_a_context_within_the_memory_is_not_spilled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "break_even", lambda *arguments: NEVER)
    model = enable(model_of(2, 2, 64, "float32"))
    with SpillCache(model, token_budget=64, path=tmp_path, memory="10M") as cache:
        assert max(fill(model, cache, (100, 1500))) <= 10_000_000
        assert cache.traffic.bytes_between("cpu", "ssd") == 0


def test_too_little_memory_is_refused_with_the_least_possible_value(llama: Any, tmp_path: Path) -> None:
    inputs = single(800)
    refused = pytest.raises(UsageError, match="memory: 100 KB is too small for 800 tokens")
    with SpillCache(llama, token_budget=64, path=tmp_path, memory="100K") as cache, refused as error:
        llama(**inputs, **cache_argument(cache))
    assert error.value.hint is not None
    least = error.value.hint.split()[3].rstrip(",")
    with SpillCache(llama, token_budget=64, path=tmp_path, memory=least) as cache:
        llama(**inputs, **cache_argument(cache))
        assert held_bytes(cache) <= float(least[:-1]) * 1e6


@pytest.mark.parametrize(
    "options", [{"memory": "2X"}, {"memory": 0}, {"memory": 1.5}, {"memory": "1G", "cpu_pages": 9}, {"path": None}], ids=str
)
def test_bad_limits_are_refused(options: dict[str, Any], llama: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^memory: "):
        SpillCache(llama, **{"path": tmp_path, "memory": "1G", **options})


def test_a_limit_changes_no_answers_at_full_budget(enabled: Enabled, tmp_path: Path) -> None:
    """Beam search changes the number of sequences that share the memory."""
    model = enabled("llama")
    disable(model)
    for beams in (1, 3):
        expected, got = both(
            model,
            lambda model: SpillCache(model, token_budget=4096, path=tmp_path, memory="10M", threads=2),
            functools.partial(generate, inputs=single(300), num_beams=beams),
        )
        check_same(expected, got)


@pytest.mark.parametrize("full", [False, True], ids=["selecting", "full attention"])
def test_a_saved_and_restored_context_is_within_the_memory(
    full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if full:
        monkeypatch.setattr(conversation, "break_even", lambda *arguments: NEVER)
    model = enable(model_of(2, 2, 64, "float32"))
    options: dict[str, Any] = {"token_budget": 64, "memory": "2M" if not full else "8M", "threads": 2}
    limit = 8_000_000 if full else 2_000_000
    with SpillCache(model, path=tmp_path / "a.kv", **options) as cache:
        fill(model, cache, (2500,))
        cache.save()
        assert held_bytes(cache) <= limit
        assert max(fill(model, cache, (2550,))) <= limit
        cache.save()
    with SpillCache.restore(model, tmp_path / "a.kv", **options) as cache:
        assert max(fill(model, cache, (2600, 4000))) <= limit
