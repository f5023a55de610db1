"""What transformers' own tests ask of a cache that generates (tests/utils/test_cache_utils.py, GenerationTesterMixin).

Written anew, for the tiny models; each says which of theirs it is. Theirs that belong to static, quantized, offloaded or
exported caches, or that compare texts of models from the hub, do not apply.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from llmcache.kv.transformers import SpillCache
from tests.hf.tiny_models import Enabled, generate, prompt, single


@pytest.fixture(params=["llama", "qwen3", "gemma3"])
def model(request: pytest.FixtureRequest, enabled: Enabled) -> Any:
    return enabled(request.param)


@pytest.fixture
def cache(model: Any, tmp_path: Path) -> Iterator[SpillCache]:
    with SpillCache(model.config, token_budget=1024, path=tmp_path, cpu_pages=4, threads=2) as found:
        yield found


def test_a_batch_says_what_its_prompts_say_alone(model: Any, cache: SpillCache) -> None:
    """test_cache_batched."""
    together = generate(model, cache, prompt(90, 20)).sequences
    inputs = prompt(90, 20)
    for row, start in ((0, 20), (1, 0)):
        cache.reset()
        alone = generate(model, cache, {"input_ids": inputs["input_ids"][row : row + 1, start:]}).sequences[0]
        assert torch.equal(alone, together[row, start:][: len(alone)])  # in a batch the one that ends first is padded


def test_beams_change_places(model: Any, cache: SpillCache) -> None:
    """test_cache_beam_search: the result consists of several beams, so the cache was reordered."""
    found = generate(model, cache, single(), num_beams=4, num_return_sequences=4)
    assert found.past_key_values is cache
    assert any(len(set(beams)) > 1 for beams in found.beam_indices.tolist())
    assert cache.store.batch == 4


def test_more_padding_changes_nothing(model: Any, cache: SpillCache) -> None:
    """test_cache_extra_left_padding, test_left_padding_compatibility."""
    inputs = single(60)
    plain = generate(model, cache, inputs)
    cache.reset()
    ids = torch.cat([torch.zeros(1, 32, dtype=torch.long), inputs["input_ids"]], 1)
    padded = generate(model, cache, {"input_ids": ids, "attention_mask": (torch.arange(92) >= 32).long()[None]})
    assert torch.equal(plain.sequences[0], padded.sequences[0, 32:])
    torch.testing.assert_close(torch.cat(plain.logits), torch.cat(padded.logits), atol=1e-4, rtol=1e-4)


def test_generating_goes_on_from_a_cache(model: Any, cache: SpillCache) -> None:
    """test_generate_continue_from_past_key_values: 3 tokens and 1 more are the same as 4."""
    at_once = generate(model, cache, single(), max_new_tokens=4, eos_token_id=-1)
    cache.reset()
    first = generate(model, cache, single(), max_new_tokens=3, eos_token_id=-1)
    then = generate(model, first.past_key_values, {"input_ids": first.sequences}, max_new_tokens=1, eos_token_id=-1)
    assert torch.equal(then.sequences, at_once.sequences)
    assert torch.equal(then.logits[0], at_once.logits[3])
    assert cache.get_seq_length() == 153


def test_a_prompt_of_embeddings(model: Any, cache: SpillCache) -> None:
    """test_generate_from_inputs_embeds, test_generate_continue_from_inputs_embeds; ids are not known then."""
    ids = single(70)["input_ids"]
    from_ids = generate(model, cache, {"input_ids": ids})
    cache.reset()
    embedded = {"inputs_embeds": model.get_input_embeddings()(ids).detach()}
    found = generate(model, cache, embedded)
    assert torch.equal(found.sequences, from_ids.sequences[:, 70:])
    assert all(torch.equal(one, other) for one, other in zip(found.logits, from_ids.logits, strict=True))
    assert (cache.ids[:, :70] == -1).all()
    assert (cache.ids[0, 70:] == found.sequences[0, :-1].numpy()).all()


def test_without_a_cache_the_logits_are_the_same(model: Any, cache: SpillCache) -> None:
    """test_decoder_model_past_with_large_inputs: three more tokens at once, behind a cache and without any."""
    ids = single(80)["input_ids"]
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits[:, -3:]
        model(input_ids=ids[:, :77], past_key_values=cache)
        behind = model(input_ids=ids[:, 77:], past_key_values=cache).logits
    torch.testing.assert_close(whole, behind, atol=1e-5, rtol=1e-4)


def test_it_is_said_that_it_cannot_be_copied(cache: SpillCache) -> None:
    with pytest.raises(TypeError, match="save"):
        copy.deepcopy(cache)
