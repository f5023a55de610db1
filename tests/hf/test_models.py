"""Real models: with a budget for everything nothing changes, even after a kill, and every cache reads a text."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from gguf import GGUFReader, dequantize

from llmcache import cli
from llmcache.kv.bench.options import model_of
from llmcache.kv.bench.subject import Subject, load_model, logits, stock
from llmcache.kv.tasks import english
from llmcache.kv.transformers import SpillCache
from tests.unit.store_parts import crash
from tools.make_model import choose_shape, make_model

pytestmark = pytest.mark.models
TOKENS = 600
"""Length of a prompt, longer than the window of Gemma's sliding layers."""


@functools.cache
def model() -> Any:
    return load_model(model_of("gemma3"))


def test_a_gguf_file_is_dequantized(tmp_path: Path) -> None:
    (path,) = make_model(tmp_path / "tiny.gguf", choose_shape(8 << 20, 34 / 32, 2, tied=False), "gguf", 1, 0)
    subject = Subject(path)
    stored = next(tensor for tensor in GGUFReader(path).tensors if tensor.name == "token_embd.weight")
    embedded = subject.model.get_input_embeddings().weight.numpy(force=True)
    assert embedded.dtype == np.float32 and (embedded == dequantize(stored.data, stored.tensor_type)).all()
    assert subject.tokenizer is not None and "b" in subject.tokenizer.decode(subject.encode("a b"))


def prompt() -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return repeated words, so that attention has targets."""
    rng = np.random.default_rng(5)
    words = rng.integers(1000, 20000, 60)
    return words[rng.integers(0, len(words), (1, TOKENS))]


def next_tokens(cache: Any, ids: Any, steps: int) -> tuple[list[int], torch.Tensor]:
    """Return the next tokens after `ids`, and the logits of each."""
    tokens, found = [], []
    for _ in range(steps):
        found.append(logits(model(), cache, ids))
        tokens.append(int(found[-1].argmax()))
        ids = np.array([tokens[-1:]])
    return tokens, torch.cat(found)


@pytest.mark.long
def test_a_budget_of_the_context_and_a_kill_change_no_bit(tmp_path: Path) -> None:
    """tests/hf/test_restore.py tests the same with a small budget."""
    expected = next_tokens(stock(model()), prompt(), 6)
    options: dict[str, Any] = {"token_budget": 2 * TOKENS, "cpu_pages": 8, "threads": 1}
    cache = SpillCache(model().config, "mass", path=tmp_path / "talk.kv", **options)
    tokens, found = next_tokens(cache, prompt(), 3)
    cache.save()
    crash(cache.store)
    with SpillCache.restore(model(), tmp_path / "talk.kv", "mass", **options) as again:
        assert again.get_seq_length() == TOKENS + 2
        rest, more = next_tokens(again, np.array([tokens[-1:]]), 3)
    assert [*tokens, *rest] == expected[0] and torch.equal(torch.cat([found, more]), expected[1])


@pytest.mark.long
def test_each_cache_reads_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(english, "FOLLOWING", 17)
    words = ["--model", "smollm2", "--task", "loss", "--context", "200", "--policy", "mass", "--budget", "48"]
    fast = ["--cases", "1", "--steps", "1", "--threads", "1", "--path", str(tmp_path), "--json"]
    result = CliRunner().invoke(cli.app, ["kv", "bench", *words, *fast], catch_exceptions=False)
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    stock_row, mass = document["rows"]
    assert [row["policy"] for row in document["rows"]] == ["stock", "mass"]
    assert stock_row["divergences"] == [0] and stock_row["answers"]["asked"] == [16]
    assert 0 < mass["divergences"][0] < 0.5
    (text,) = document["conditions"]["texts"]
    assert Path(text.split(" from letter ")[0]).is_file() and document["conditions"]["family"] == "llama"
