"""Tasks with real models: the measurements are right, and a given prompt equals a prompt that the cache has read."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from click.testing import CliRunner

from llmcache import cli
from llmcache.errors import DataError, UsageError
from llmcache.kv.bench.results import STOCK
from llmcache.kv.bench.subject import Prompt, Subject, ask, feed, stock, watch
from llmcache.kv.bench.task import Candidate
from llmcache.kv.tasks import RECALL_MODEL
from llmcache.kv.tasks.recall import symbols
from llmcache.kv.transformers import SpillCache
from tools.bench.kvtransformers import SMALL, by_length, stock_at


@functools.cache
def subject() -> Subject:
    return Subject(RECALL_MODEL)


def task(tmp_path: Path, *words: str) -> dict[str, Any]:
    fast = ("--steps", "2", "--threads", "2", "--cases", "1", "--path", str(tmp_path), "--json")
    result = CliRunner().invoke(cli.app, ["kv", "bench", "--task", *words, *fast], catch_exceptions=False)
    assert result.exit_code == 0
    found: dict[str, Any] = json.loads(result.stdout)
    return found


# The command


def test_a_tree_finds_a_passkey_and_a_window_does_not(tmp_path: Path) -> None:
    document = task(tmp_path, "passkey", "--context", "512", "--policy", "icecache,window", "--budget", "64")
    rows = {row["policy"]: row for row in document["rows"]}
    assert rows["stock"]["answers"]["share"] == rows["icecache"]["answers"]["share"] == 1
    assert rows["window"]["answers"]["share"] < 0.5
    assert rows["icecache"]["attention"]["mass"] > rows["window"]["attention"]["mass"]
    assert rows["icecache"]["attention"]["recall"] > 0.6
    own = rows["icecache"]
    assert own["spilled_bytes"] > 0 and own["moved_bytes"]["ssd to cpu, fetch"] > 0
    assert own["memory"]["kv_bytes"] < rows["stock"]["memory"]["kv_bytes"] == 2 * 2 * 32 * 2 * 4 * (512 + 1 + 3 + 2)
    for row in rows.values():
        assert sum(row["speed"]["parts_ns"].values()) == pytest.approx(row["speed"]["tpot_ns"])
        assert row["speed"]["prefill_ns"] < row["speed"]["tt2t_ns"] and row["speed"]["steps"] == 2
    assert not list(tmp_path.iterdir()), "no spill file is left"


def test_questions_in_words_need_a_tokenizer(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    save_worded(directory)
    document = task(
        tmp_path, "needle", "--model", str(directory), "--context", "1100", "--policy", "window", "--budget", "64"
    )
    assert [row["answers"]["questions"] for row in document["rows"]] == [1, 1]
    assert document["conditions"]["family"] == "llama" and document["rows"][0]["answers"]["depths"][0] < 1
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    with pytest.raises(DataError, match="no tokenizer"):
        Subject(directory)
    with pytest.raises(DataError, match="not a model"):
        Subject(tmp_path)
    with pytest.raises(UsageError, match="is neither a directory"):
        Subject(tmp_path / "nowhere")


def save_worded(directory: Path) -> None:
    """Save a tiny model with random weights whose tokens are letters."""
    letters = {chr(code): code for code in range(128)}
    kind = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="\x00"))
    kind.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=kind, bos_token="\x01").save_pretrained(directory)
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).save_pretrained(directory)


# Its parts


def test_a_given_prompt_equals_a_read_one() -> None:
    probe = symbols("passkey", np.random.default_rng(2), 300, 1)
    model = subject().model
    read_cache, given_cache = stock(model), stock(model)
    feed(model, read_cache, probe.ids)
    prompt = Prompt(model, probe.ids)
    prompt.give(given_cache)
    for one, other in zip(read_cache.layers, given_cache.layers, strict=True):
        assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)
    with SpillCache(model.config, "h2o", token_budget=64, threads=2) as own:
        feed(model, own, probe.ids)
        expected = ask(model, own, probe)
    with SpillCache(model.config, "h2o", token_budget=64, threads=2) as own:
        prompt.give(own)
        assert (ask(model, own, probe) == expected).all() and not expected.all()


def test_the_watch_computes_recall_and_mass_of_attention() -> None:
    """Compare with the weights of transformers' eager attention."""
    ids = symbols("recall", np.random.default_rng(2), 400, 2).ids
    plain = transformers.Qwen2ForCausalLM.from_pretrained(RECALL_MODEL, attn_implementation="eager").eval()
    with torch.no_grad():
        weights = plain(input_ids=torch.from_numpy(ids), output_attentions=True).attentions[0][:, :, -1].numpy()
    model = subject().model
    with SpillCache(model.config, "window", token_budget=128, threads=2, full_tokens=0) as cache:
        feed(model, cache, ids[:, :-1])
        seen, middle = watch(cache), cache.store.middle
        feed(model, cache, ids[:, -1:])
        recalls, masses = seen.recalls[0], seen.masses[0]
    old = weights[..., :-1] / weights[..., :-1].sum(-1, keepdims=True)
    lead, end = middle.start * 16, middle.stop * 16
    count = 128 - (399 - (end - lead))  # as many tokens of the middle as the budget allows
    assert masses == pytest.approx(float((old[..., :lead].sum(-1) + old[..., end - count :].sum(-1)).mean()), abs=1e-4)
    top = np.argsort(-old.reshape(2, 2, 2, -1).sum(2)[..., lead:end], -1)[..., :count]
    assert recalls == pytest.approx(float((top >= end - lead - count).mean()), abs=1e-6)


def test_lengths_are_measured_and_compared_with_the_stock_cache(tmp_path: Path) -> None:
    shape = {**SMALL, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "num_hidden_layers": 2}
    candidates = [Candidate(STOCK, None), Candidate("quest", 64), Candidate("icecache-reuse", 64)]
    rows = by_length(shape, (256, 512), candidates, tmp_path, 2, 2)
    assert [(row.tokens, row.policy) for row in rows[:3]] == [(256, "stock"), (256, "quest"), (256, "icecache-reuse")]
    full = stock_at(rows, 512)
    assert full.memory.kv_bytes == 2 * 2 * 2 * 16 * 4 * (512 + 3 + 2)
    quest = rows[4]
    assert quest.kv_share(full) < 1 and quest.share_with_index(full) > quest.kv_share(full)
    assert not list(tmp_path.iterdir())
