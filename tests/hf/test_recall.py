"""The recall model answers wrongly if a policy drops the needed tokens: rarely with HillInfer, mostly with a window."""

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmcache.errors import DataError, UsageError
from llmcache.kv.bench.subject import accuracy, load_model
from llmcache.kv.tasks import RECALL_MODEL, Questions, chain, passkey, recall
from tests.hf.tiny_models import tiny, words
from tools import long_context, train_recall
from tools.train_recall import train

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


def test_a_fifth_of_the_context_or_128_tokens_suffice_but_not_the_newest(tmp_path: Path) -> None:
    assert min(full(1024), full(4096)) >= 0.99, "the model knows its task"
    assert share("hillinfer", 4096, alpha=0.2) >= full(4096) - 0.01
    assert share("hillinfer", 1024, token_budget=128, path=tmp_path, cpu_pages=8) >= full(1024) - 0.02
    assert share("window", 1024, token_budget=256) <= 0.3


def test_a_passkey_is_found_at_every_depth() -> None:
    for depth in (0, 0.4, 0.95):
        task = passkey(np.random.default_rng(5), 4, 1024, depth=depth)
        assert accuracy(model(), task, "mass", token_budget=64, threads=2) == 1, f"depth {depth}"


def test_a_chain_is_followed_as_far_as_with_the_full_cache() -> None:
    task = chain(np.random.default_rng(5), CONTEXTS, 1024, steps=32)
    expected = accuracy(model(), task)
    assert expected >= 0.95
    assert accuracy(model(), task, "mass", token_budget=128, threads=2) >= expected - 0.05


def test_the_full_policy_equals_the_plain_cache_and_keeps_torchs_threads() -> None:
    torch.set_num_threads(2)
    assert share("full", 1024) == full(1024)
    assert torch.get_num_threads() == 2


# The example `tools/long_context.py`: both caches give the same answers, in noise and about a text, also with a saved
# model


def lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[list[str]]:
    monkeypatch.setattr(sys, "argv", ["long_context.py", *arguments])
    assert long_context.main() == 0
    return [line.split(": ", 1) for line in capsys.readouterr().out.splitlines()]


def test_both_caches_of_the_example_give_the_same_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = lines(monkeypatch, capsys, "--tokens", "700", "--budget", "96", "--dir", str(tmp_path))
    assert [answer for _, answer in found] == ["100% right", "100% right"]
    assert " 0 B read" in found[0][0] and " 0 B read" not in found[1][0]
    assert not list(tmp_path.iterdir())
    tokenizer, content = words()
    tokenizer.save_pretrained(tmp_path / "model")
    tiny("llama").save_pretrained(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text(content)
    arguments = [str(tmp_path / "model"), "--text", str(text), "--ask", "w3 w4", "--budget", "512", "--dir", str(tmp_path)]
    found = lines(monkeypatch, capsys, *arguments)
    assert found[0][1] == found[1][1] != ""
    with pytest.raises(UsageError, match="--text, --ask"):
        lines(monkeypatch, capsys, str(tmp_path / "model"))
    with pytest.raises(DataError, match="--text: "):
        lines(monkeypatch, capsys, *(argument + "x" if argument == str(text) else argument for argument in arguments))


# The script that trains the model runs for a few steps


def test_a_few_steps_write_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_recall, "known", lambda model, tokens, contexts: tokens / 10_000)
    options = argparse.Namespace(out=tmp_path, start=None, short_steps=2, long_steps=1, contexts=1, threads=2, seed=3)
    result = train(options, lambda line: None)
    assert set(result["known"]) == {512, 1024, 2048, 4096}
    assert (tmp_path / "model.safetensors").stat().st_size > 1_800_000
    with pytest.raises(UsageError, match=r"OUT: .* is not empty"):
        train(options, lambda line: None)
