"""What policies leave out, the recall model answers wrongly: HillInfer's choice costs nothing, the window's nearly all."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmcache.kv.bench.subject import accuracy, load_model
from llmcache.kv.tasks import RECALL_MODEL, Questions, chain, passkey, recall

CONTEXTS = 4


@functools.cache
def model() -> Any:
    return load_model(RECALL_MODEL)


@functools.cache
def questions(tokens: int) -> Questions:
    return recall(np.random.default_rng(17), CONTEXTS, tokens)


def share(policy: str, tokens: int, **options: Any) -> float:
    return accuracy(model(), questions(tokens), policy, threads=2, **options)


@functools.cache
def full(tokens: int) -> float:
    return accuracy(model(), questions(tokens))


@pytest.mark.parametrize("tokens", [1024, 4096])
def test_the_model_knows_its_task(tokens: int) -> None:
    assert full(tokens) >= 0.99


@pytest.mark.parametrize("tokens", [1024, 4096])
def test_a_fifth_of_the_context_is_enough(tokens: int) -> None:
    assert share("hillinfer", tokens, alpha=0.2) >= full(tokens) - 0.01


def test_so_are_128_tokens_from_the_ssd(tmp_path: Path) -> None:
    assert share("hillinfer", 1024, token_budget=128, path=tmp_path, cpu_pages=8) >= full(1024) - 0.02


def test_the_newest_tokens_alone_are_not() -> None:
    assert share("window", 1024, token_budget=256) <= 0.3


def test_a_passkey_is_found_at_every_depth() -> None:
    for depth in np.arange(0, 1, 0.19):
        task = passkey(np.random.default_rng(5), 4, 1024, depth=float(depth))
        assert accuracy(model(), task, "mass", token_budget=64, threads=2) == 1, f"depth {depth}"


def test_a_chain_is_followed_as_far_as_with_everything() -> None:
    task = chain(np.random.default_rng(5), CONTEXTS, 1024, steps=32)
    expected = accuracy(model(), task)
    assert expected >= 0.95
    assert accuracy(model(), task, "mass", token_budget=128, threads=2) >= expected - 0.05


def test_everything_kept_is_the_plain_cache_and_torch_keeps_its_threads() -> None:
    torch.set_num_threads(2)
    assert share("full", 1024) == full(1024)
    assert torch.get_num_threads() == 2
