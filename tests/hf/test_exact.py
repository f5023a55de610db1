"""With a budget that holds the context nothing changes, bit for bit: every family, every way to generate."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from llmcache.kv.transformers import SpillCache
from tests.hf.tiny_models import FAMILIES, Caches, both, check_same, generate, prompt, single, tiny, whole


def spilled(policy: str, ssd: str, path: Path) -> Caches:
    return whole(policy, ssd=ssd, path=path, cpu_pages=4)


@pytest.mark.parametrize("policy", ["full", "hillinfer"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_with_padding(family: str, policy: str) -> None:
    check_same(*both(tiny(family), whole(policy), lambda model, cache: generate(model, cache, prompt())))


@pytest.mark.parametrize("policy", ["window", "h2o", "prefetch", "leoam", "quest", "icecache", "mass", "oracle"])
def test_other_policies(policy: str) -> None:
    check_same(*both(tiny("qwen2"), whole(policy), lambda model, cache: generate(model, cache, prompt())))


@pytest.mark.parametrize("ssd", ["file", "csd"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_from_the_ssd(family: str, ssd: str, tmp_path: Path) -> None:
    caches = spilled("hillinfer", ssd, tmp_path)
    check_same(*both(tiny(family), caches, lambda model, cache: generate(model, cache, prompt())))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_half_precision(family: str, dtype: str, tmp_path: Path) -> None:
    caches = spilled("full", "file", tmp_path)
    check_same(*both(tiny(family, dtype), caches, lambda model, cache: generate(model, cache, prompt())))


CROPPED = ["llama", "gemma3"] if int(transformers.__version__.split(".")[0]) >= 5 else ["llama"]
"""Families whose stock cache can give back what an assistant got wrong: before transformers 5, sliding layers could not."""

MODES: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "sampled beams": {"do_sample": True, "num_beams": 2, "num_return_sequences": 2},
    "chunks": {"prefill_chunk_size": 33},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_ways_to_generate(family: str, mode: str, tmp_path: Path) -> None:
    caches = spilled("hillinfer", "file", tmp_path)
    check_same(*both(tiny(family), caches, lambda model, cache: generate(model, cache, prompt(), **MODES[mode])))


@pytest.mark.parametrize("assistant", [True, False])
@pytest.mark.parametrize("family", CROPPED)
def test_tokens_that_are_guessed_and_taken_back(family: str, assistant: bool, tmp_path: Path) -> None:
    def run(model: Any, cache: Any) -> Any:
        by = {"assistant_model": tiny("qwen2")} if assistant else {"prompt_lookup_num_tokens": 3}
        return generate(model, cache, single(), max_new_tokens=20, **by)

    check_same(*both(tiny(family), spilled("hillinfer", "file", tmp_path), run))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_several_turns(family: str, tmp_path: Path) -> None:
    def run(model: Any, cache: Any) -> Any:
        inputs = prompt()
        for turn in (5, 1, 40):
            said = generate(model, cache, inputs)
            more = torch.full((2, turn), 7)
            ids = torch.cat([said.sequences, more], 1)
            padding = ids.shape[1] - inputs["attention_mask"].shape[1]
            mask = torch.cat([inputs["attention_mask"], torch.ones(2, padding, dtype=torch.long)], 1)
            inputs = {"input_ids": ids, "attention_mask": mask}
        return generate(model, cache, inputs)

    check_same(*both(tiny(family), spilled("hillinfer", "file", tmp_path), run))


def test_looking_ahead(tmp_path: Path) -> None:
    for exact in (True, False):
        caches = whole(path=tmp_path, cpu_pages=4, lookahead=True, exact=exact)
        check_same(*both(tiny("qwen3"), caches, lambda model, cache: generate(model, cache, prompt())))


def test_sequences_are_cut_repeated_and_chosen(tmp_path: Path) -> None:
    def run(model: Any, cache: Any) -> Any:
        with torch.no_grad():
            ids = prompt(90, 0)["input_ids"]
            model(input_ids=ids, past_key_values=cache)
            cache.crop(-25)
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([3, 0, 1]))
            cache.reorder_cache(torch.tensor([1, 1, 2]))
            assert cache.get_seq_length() == 65
            steps = [model(input_ids=ids[:1, i : i + 1].expand(3, 1), past_key_values=cache).logits for i in range(20)]
            return torch.cat(steps, 1)

    for caches in (whole("full"), spilled("hillinfer", "file", tmp_path)):
        expected, got = both(tiny("llama"), caches, run)
        assert torch.equal(expected, got)


def test_a_small_budget_is_no_exact_attention() -> None:
    def few(model: Any) -> Any:
        return SpillCache(model.config, "window", token_budget=48)

    expected, got = both(tiny("llama"), few, lambda model, cache: generate(model, cache, prompt()))
    assert torch.equal(expected.logits[0], got.logits[0])
    assert float((expected.logits[1] - got.logits[1]).abs().max()) > 0.01


@pytest.mark.parametrize("policy", ["hillinfer", "h2o", "leoam", "mass", "oracle"])
def test_padding_never_takes_the_place_of_a_token(policy: str) -> None:
    """All tokens that are none fit the budget, so all are chosen; in which order they are added up differs by rounding."""

    def enough(model: Any) -> Any:
        return SpillCache(model.config, policy, token_budget=160, threads=2)

    inputs = prompt(300, 200)
    expected, got = both(tiny("llama"), enough, lambda model, cache: generate(model, cache, inputs))
    for one, other in zip(expected.logits, got.logits, strict=True):
        assert torch.allclose(one[0], other[0], atol=1e-4)
    assert float((expected.logits[-1][1] - got.logits[-1][1]).abs().max()) > 1e-3
