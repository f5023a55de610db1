"""With a budget larger than the context nothing changes, bit for bit: every family, every way to generate.

The checks follow transformers' own tests of caches (tests/utils/test_cache_utils.py, GenerationTesterMixin): batches,
beams, padding, continued prompts and several new tokens give the same as with transformers' cache.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from llmcache.kv.transformers import SpillCache, cache_argument, conversation, dense, disable, enable
from llmcache.kv.transformers.conversation import break_even
from llmcache.kv.transformers.settings import SpillSettings, policy_settings
from llmcache.kv.transformers.tensors import Call
from tests.hf.tiny_models import FAMILIES, Caches, both, check_same, generate, longer, prompt, single, tiny, whole


def spilled(policy: str, ssd: str, path: Path) -> Caches:
    return whole(policy, ssd=ssd, path=path, cpu_pages=4)


def short(full_tokens: int = 4096) -> Caches:
    """Return a factory of caches that attend fully to contexts of `full_tokens`, and beyond that to almost nothing."""
    return lambda model: SpillCache(model.config, "window", token_budget=48, full_tokens=full_tokens)


def handed_over(path: Path, full_tokens: int = 155) -> Caches:
    """Return a factory of caches that change from tensors to a store in the middle of these texts."""
    return whole(path=path, cpu_pages=4, full_tokens=full_tokens)


KINDS: dict[str, Callable[[Path], Caches]] = {
    "spilled": functools.partial(spilled, "hillinfer", "file"),
    "short": lambda path: short(),
    "handed over": handed_over,
}
of_every_kind = pytest.mark.parametrize("kind", KINDS)


BATCHES = [*((family, "hillinfer") for family in FAMILIES), ("llama", "short"), ("gemma3", "short")]
BATCHES += [("qwen2", policy) for policy in ("full", "h2o", "mass", "icecache")]


@pytest.mark.parametrize(("family", "kind"), BATCHES)
def test_a_batch_with_padding(family: str, kind: str) -> None:
    caches = short() if kind == "short" else whole(kind)
    check_same(*both(tiny(family), caches, lambda model, cache: generate(model, cache, prompt())))


@pytest.mark.parametrize(("family", "dtype"), [("llama", "float16"), ("gemma2", "bfloat16")])
def test_half_precision(family: str, dtype: str, tmp_path: Path) -> None:
    for caches in (spilled("full", "file", tmp_path), handed_over(tmp_path)):
        check_same(*both(tiny(family, dtype), caches, lambda model, cache: generate(model, cache, prompt())))


CROPPABLE = ["llama", "gemma3"] if int(transformers.__version__.split(".")[0]) >= 5 else ["llama"]
"""Families whose stock cache can be cropped after wrong guesses: before transformers 5, sliding layers could not be."""

MODES: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "sampled beams": {"do_sample": True, "num_beams": 2, "num_return_sequences": 2},
    "chunks": {"prefill_chunk_size": 33},
}


@of_every_kind
@pytest.mark.parametrize("mode", MODES)
def test_ways_to_generate(mode: str, kind: str, tmp_path: Path) -> None:
    check_same(
        *both(tiny("gemma3"), KINDS[kind](tmp_path), lambda model, cache: generate(model, cache, prompt(), **MODES[mode]))
    )


GUESSED = [("llama", True, "spilled"), ("llama", False, "short"), ("llama", True, "handed over")]
GUESSED += [("gemma3", False, "spilled"), ("gemma3", True, "handed over")]


@pytest.mark.parametrize(("family", "assistant", "kind"), [each for each in GUESSED if each[0] in CROPPABLE])
def test_guessed_tokens_that_are_cropped_again(family: str, assistant: bool, kind: str, tmp_path: Path) -> None:
    def run(model: Any, cache: Any) -> Any:
        guesser = {"assistant_model": tiny("qwen2")} if assistant else {"prompt_lookup_num_tokens": 3}
        return generate(model, cache, single(), max_new_tokens=20, **guesser)

    check_same(*both(tiny(family), KINDS[kind](tmp_path), run))


@pytest.mark.parametrize(("family", "kind"), [("llama", "handed over"), ("gemma3", "spilled"), ("gemma3", "short")])
def test_several_turns(family: str, kind: str, tmp_path: Path) -> None:
    def run(model: Any, cache: Any) -> Any:
        inputs = prompt()
        for turn in (5, 1, 40):
            inputs = longer(generate(model, cache, inputs), turn)
        return generate(model, cache, inputs)

    check_same(*both(tiny(family), KINDS[kind](tmp_path), run))


def test_sequences_are_cropped_repeated_and_selected(tmp_path: Path) -> None:
    def run(model: Any, cache: Any) -> Any:
        with torch.no_grad():
            ids = prompt(90, 0)["input_ids"]
            model(input_ids=ids, **cache_argument(cache))
            cache.crop(torch.tensor(-25))  # as some versions of transformers do
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([3, 0, 1]))
            cache.reorder_cache(torch.tensor([1, 1, 2]))
            assert cache.get_seq_length() == 65
            steps = [model(input_ids=ids[:1, i : i + 1].expand(3, 1), **cache_argument(cache)).logits for i in range(30)]
            return torch.cat(steps, 1)

    for caches in (whole("full"), spilled("hillinfer", "file", tmp_path), short(), handed_over(tmp_path, 90)):
        expected, got = both(tiny("llama"), caches, run)
        assert torch.equal(expected, got)


def test_a_short_context_is_handed_over_beyond_its_bound(tmp_path: Path) -> None:
    """The bound is an option, or follows from the size of the pool, or is measured once."""
    model = tiny("llama")
    measured = 0

    def break_even(*arguments: Any) -> int:
        nonlocal measured
        measured += 1
        return 160

    kinds: tuple[tuple[dict[str, Any], int], ...] = (({"full_tokens": 152}, 152), ({"cpu_pages": 9}, 144), ({}, 160))
    for options, bound in kinds:
        with pytest.MonkeyPatch.context() as patch, whole(path=tmp_path, **options)(model) as cache:
            patch.setattr(conversation, "break_even", break_even)
            enable(model)
            generate(model, cache, single(140), max_new_tokens=2)
            assert cache.get_seq_length() == cache.ids.shape[1] == 141 and cache.store.length == 0
            assert cache.conversation.memory_bytes > 0
            generate(model, cache, {"input_ids": torch.full((1, 142), 7)}, max_new_tokens=22)
            assert cache.get_seq_length() == cache.store.length == 163 > bound
            disable(model)
    assert measured


def test_the_break_even_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dense.crossing((1.0, 4.0), (2.0, 2.0)) == 2048  # the lines cross in the middle
    assert dense.crossing((1.0, 4.0), (0.5, 0.5)) < 1024
    assert dense.crossing((1.0, 1.0), (2.0, 2.0)) == dense.NEVER and dense.crossing((2.0, 2.0), (1.0, 1.0)) == 0
    monkeypatch.setattr(conversation, "SHORT", dense.SHORT)
    # Use the sink and window of the cache: those of the policy would not fit the budget.
    options = policy_settings("window", {"token_budget": 16})
    settings = SpillSettings(*options, threads=1, sink_tokens=0, window_tokens=16)
    query, key = torch.zeros(2, 4, 1, 16), torch.zeros(2, 2, 1, 16)
    call = Call(None, query, key, key, None, {}, lambda module, *sides, **options: (sides[0], None))
    found = break_even(settings, call)
    assert found >= dense.SHORT and (found == dense.NEVER or found & (found - 1) == 0)
    with monkeypatch.context() as patch:
        patch.setattr(conversation, "Conversation", None)
        assert break_even(settings, call) == found, "the result is cached"
    # A given prompt needs no attention, but its tokens get the mean of values.
    mass = SpillSettings(*policy_settings("mass", {"token_budget": 16}), threads=1)
    assert break_even(mass, replace(call, stock=conversation.no_attention)) >= dense.SHORT


def test_a_small_budget_is_not_exact() -> None:
    def small_budget(model: Any) -> Any:
        return SpillCache(model.config, "window", token_budget=48)

    expected, got = both(tiny("llama"), small_budget, lambda model, cache: generate(model, cache, prompt()))
    assert torch.equal(expected.logits[0], got.logits[0])
    assert float((expected.logits[1] - got.logits[1]).abs().max()) > 0.01


def test_padding_never_displaces_a_token() -> None:
    """All real tokens fit the budget and are selected. They are added in another order, so results differ by rounding."""

    def large_budget(model: Any) -> Any:
        return SpillCache(model.config, token_budget=160, threads=2)

    inputs = prompt(300, 200)
    expected, got = both(tiny("llama"), large_budget, lambda model, cache: generate(model, cache, inputs))
    for one, other in zip(expected.logits, got.logits, strict=True):
        assert torch.allclose(one[0], other[0], atol=1e-4)
    assert float((expected.logits[-1][1] - got.logits[-1][1]).abs().max()) > 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_unselected_tokens_contribute_the_mean_of_values(dtype: str) -> None:
    """A token with equal attention to all tokens gets `mean_share` of the mean value for the unselected ones."""
    random = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(2, 2, 512, 16, generator=random).to(getattr(torch, dtype)) for _ in range(2))
    query = torch.zeros(2, 4, 1, 16, dtype=keys.dtype)  # all tokens have the same weight
    module = tiny("llama", dtype).model.layers[0].self_attn
    found = {}
    for share in (0.0, 0.5, 1.0):
        options = policy_settings("mass", {"token_budget": 128, "scorer": "exact", "mean_share": share})
        settings = SpillSettings(*options, threads=1, full_tokens=0)
        conv = conversation.Conversation(settings, 1)
        for part in (slice(0, 511), slice(511, 512)):
            queries = query.expand(-1, -1, part.stop - part.start, -1)
            call = Call(module, queries, keys[:, :, part], values[:, :, part], None, {}, sdpa_attention_forward)
            output, _ = conv.attend(0, call)
        assert output.dtype == keys.dtype and output.shape == (2, 1, 4, 16)
        found[share] = output[:, 0].float()
        conv.close()
    expected = values.float().mean(2).repeat_interleave(2, 1)
    distance = {share: float((output - expected).norm()) for share, output in found.items()}
    assert distance[1.0] < distance[0.5] < distance[0.0] / 1.5
    torch.testing.assert_close(found[0.5], (found[0.0] + found[1.0]) / 2, atol=1e-2, rtol=1e-2)
