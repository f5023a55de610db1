"""Real models: with room for everything nothing changes, a conversation outlives its process, and they are measured."""

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
from llmcache.kv.bench.question import TASK_MODELS, model_of
from llmcache.kv.bench.subject import Subject, load_model, logits, stock
from llmcache.kv.tasks import english
from llmcache.kv.transformers import SpillCache
from tests.unit.store_parts import crash
from tools.make_model import choose_shape, make_model

pytestmark = pytest.mark.models
TOKENS = {"smollm2": 300, "gemma3": 600}
"""Of a prompt: more than the window of Gemma's sliding layers."""


@functools.cache
def model(name: str) -> Any:
    return load_model(model_of(name))


def test_a_gguf_file_is_widened(tmp_path: Path) -> None:
    (path,) = make_model(tmp_path / "tiny.gguf", choose_shape(8 << 20, 34 / 32, 2, tied=False), "gguf", 1, 0)
    subject = Subject(path)
    stored = next(tensor for tensor in GGUFReader(path).tensors if tensor.name == "token_embd.weight")
    embedded = subject.model.get_input_embeddings().weight.numpy(force=True)
    assert embedded.dtype == np.float32 and (embedded == dequantize(stored.data, stored.tensor_type)).all()
    assert subject.tokenizer is not None and "b" in subject.tokenizer.decode(subject.encode("a b"))


def prompt(name: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return words that come again, so that there is something to attend to."""
    rng = np.random.default_rng(5)
    words = rng.integers(1000, 20000, 60)
    return words[rng.integers(0, len(words), (1, TOKENS[name]))]


def said(name: str, cache: Any, ids: Any, steps: int) -> tuple[list[int], torch.Tensor]:
    """Return the next tokens after `ids`, and the logits of each."""
    tokens, found = [], []
    for _ in range(steps):
        found.append(logits(model(name), cache, ids))
        tokens.append(int(found[-1].argmax()))
        ids = np.array([tokens[-1:]])
    return tokens, torch.cat(found)


@pytest.mark.long
@pytest.mark.parametrize("name", TASK_MODELS)
def test_a_budget_of_the_context_changes_no_bit(name: str, tmp_path: Path) -> None:
    expected = said(name, stock(model(name)), prompt(name), 6)
    with SpillCache(
        model(name).config, "mass", token_budget=2 * TOKENS[name], path=tmp_path, cpu_pages=8, threads=1
    ) as cache:
        got = said(name, cache, prompt(name), 6)
    assert got[0] == expected[0] and torch.equal(got[1], expected[1])


@pytest.mark.long
@pytest.mark.parametrize("name", TASK_MODELS)
def test_a_conversation_that_was_saved_goes_on_after_a_kill(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"token_budget": 96, "threads": 1}
    path = tmp_path / "talk.kv"
    cache = SpillCache(model(name).config, "mass", path=path, **options)
    tokens, _ = said(name, cache, prompt(name), 5)
    cache.save()
    crash(cache.store)
    with SpillCache.restore(model(name), path, "mass", **options) as again:
        assert again.get_seq_length() == TOKENS[name] + 4
        rest, _ = said(name, again, np.array([tokens[-1:]]), 5)
    with SpillCache(model(name).config, "mass", **options) as cache:
        assert said(name, cache, prompt(name), 10)[0] == [*tokens, *rest]


@pytest.mark.long
def test_a_text_is_read_with_each_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(english, "FOLLOWING", 17)
    words = ["--model", "smollm2", "--task", "loss", "--context", "200", "--policy", "mass", "--budget", "48"]
    few = ["--cases", "1", "--steps", "1", "--threads", "1", "--path", str(tmp_path), "--json"]
    result = CliRunner().invoke(cli.app, ["kv", "bench", *words, *few], catch_exceptions=False)
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    stock_row, mass = told["rows"]
    assert [row["policy"] for row in told["rows"]] == ["stock", "mass"]
    assert stock_row["divergences"] == [0] and stock_row["answers"]["asked"] == [16]
    assert 0 < mass["divergences"][0] < 0.5
    (text,) = told["conditions"]["texts"]
    assert Path(text.split(" from letter ")[0]).is_file() and told["conditions"]["family"] == "llama"
