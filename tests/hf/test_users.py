"""Other uses by users: the cache behaves like transformers' own, or reports why not."""

import copy
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers

from llmcache.errors import UsageError
from llmcache.kv.transformers import SpillCache, cache_argument, enable
from tests.hf.tiny_models import VOCABULARY, Enabled, both, check_same, generate, prompt, single, stock, tiny, whole, words

POLICIES = ["hillinfer", "h2o", "icecache"]


def small(policy: str, path: Path | None = None) -> Callable[[Any], SpillCache]:
    return lambda model: SpillCache(
        model.config, policy, token_budget=64, threads=2, path=path, cpu_pages=None if path is None else 4
    )


def steps(model: Any, cache: Any, tokens: int = 20, batch: int = 3) -> torch.Tensor:
    ids = torch.arange(tokens * batch).view(batch, tokens) % VOCABULARY
    results = [model(input_ids=ids[:, i : i + 1], **cache_argument(cache)).logits for i in range(tokens)]
    return torch.cat(results, 1)


def test_generation_under_autocast() -> None:
    """Under autocast, rotary embeddings leave keys in float32 and values in half precision."""

    def run(model: Any, cache: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return generate(model, cache, prompt())

    check_same(*both(tiny("gemma3"), whole("full"), run))


def test_inference_mode_and_no_use_of_the_cache(tmp_path: Path) -> None:
    with torch.inference_mode():
        caches = whole(path=tmp_path, cpu_pages=4)
        check_same(*both(tiny("qwen2"), caches, lambda model, cache: generate(model, cache, prompt())))
    check_same(*both(tiny("llama"), whole(), lambda model, cache: generate(model, cache, prompt(), use_cache=False)))


def test_a_model_with_eager_attention_keeps_it() -> None:
    model = copy.deepcopy(tiny("llama"))
    model.set_attn_implementation("eager")
    check_same(*both(model, whole("full"), lambda model, cache: generate(model, cache, prompt())))
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", sorted({"past_key_values", *cache_argument(None)}))
def test_every_name_of_the_cache_argument(enabled: Enabled, name: str) -> None:
    """From version 5.24 on, a model takes its cache by either name; before, only by the older one."""
    model = enabled("llama")
    expected = generate(model, stock(model), single())
    with whole()(model) as cache:
        got = model.generate(**single(), **{name: cache}, max_new_tokens=12, do_sample=False)
        assert torch.equal(expected.sequences, got) and cache.ids.shape[1] == got.shape[1] - 1
        assert cache.conversation.length == got.shape[1] - 1


def test_a_pipeline_of_transformers(tmp_path: Path) -> None:
    tokenizer, text = words()

    def run(model: Any, cache: Any) -> Any:
        pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
        output = pipe(text, max_new_tokens=10, do_sample=False, **cache_argument(cache))
        assert cache.get_seq_length() >= 200
        return output

    expected, got = both(copy.deepcopy(tiny("qwen2")), whole(path=tmp_path, cpu_pages=4), run)
    assert expected == got


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_prompt_of_embeddings(enabled: Enabled, family: str, tmp_path: Path) -> None:
    """The ids of such tokens are unknown."""
    model, ids = enabled(family), single(70)["input_ids"]
    with whole(path=tmp_path, cpu_pages=4)(model) as cache:
        from_ids = generate(model, cache, {"input_ids": ids})
        cache.reset()
        results = generate(model, cache, {"inputs_embeds": model.get_input_embeddings()(ids).detach()})
        assert results[next(iter(cache_argument(None)))] is cache and torch.equal(
            results.sequences, from_ids.sequences[:, 70:]
        )
        assert all(torch.equal(one, other) for one, other in zip(results.logits, from_ids.logits, strict=True))
        assert (cache.ids[:, :70] == -1).all() and (cache.ids[0, 70:] == results.sequences[0, :-1].numpy()).all()


def test_a_copy_of_a_cache_is_refused(llama: Any) -> None:
    with SpillCache(llama.config) as cache, pytest.raises(TypeError, match="save"):
        copy.deepcopy(cache)


def test_two_caches_in_two_threads(llama: Any, tmp_path: Path) -> None:
    inputs, got = [single(), prompt()], {}

    def run(number: int, cache: SpillCache) -> None:
        got[number] = generate(llama, cache, inputs[number])

    with whole(path=tmp_path, cpu_pages=4)(llama) as one, whole("icecache", path=tmp_path, cpu_pages=4)(llama) as two:
        threads = [threading.Thread(target=run, args=pair) for pair in ((0, one), (1, two))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number, request in enumerate(inputs):
        check_same(generate(llama, stock(llama), request), got[number])


def test_a_conversation_continues_after_ctrl_c(llama: Any, tmp_path: Path) -> None:
    """Wherever the signal arrives, the cache has whole steps and continues like one that has read the same tokens.

    Python loses a signal during the callback of a weak reference; the generated tokens then fit the budget as well.
    """
    torch.set_grad_enabled(False)
    try:
        with whole(path=tmp_path, cpu_pages=4, lookahead=True)(llama) as cache:
            generate(llama, cache, single(), max_new_tokens=40, eos_token_id=-1)  # compile everything first
        for delay, lookahead in ((0.03, True), (0.05, False), (0.07, True), (0.09, False), (0.12, True)):
            with whole(path=tmp_path, cpu_pages=4, lookahead=lookahead)(llama) as cache:
                timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
                with suppress(KeyboardInterrupt):
                    timer.start()
                    generate(llama, cache, single(), max_new_tokens=400, eos_token_id=-1)
                timer.join()
                tokens_read = torch.from_numpy(cache.ids) if cache.get_seq_length() else single()["input_ids"][:, :0]
                expected = llama(input_ids=torch.cat([tokens_read, torch.tensor([[5]])], 1)).logits[:, -1:]
                got = llama(input_ids=torch.tensor([[5]]), **cache_argument(cache)).logits
                torch.testing.assert_close(expected, got, atol=1e-4, rtol=1e-4)
                assert cache.get_seq_length() == tokens_read.shape[1] + 1
    finally:
        torch.set_grad_enabled(True)
    assert not list(tmp_path.iterdir())


def test_ctrl_c_in_compiled_code_raises_keyboardinterrupt(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """numba creates arrays of results in Python. If the signal arrives there, numba raises SystemError."""
    error = SystemError("returned a result with an exception set")
    with torch.no_grad(), SpillCache(llama.config) as cache:
        monkeypatch.setattr(cache.conversation, "attend", Mock(side_effect=error))
        for cause, expected in ((KeyboardInterrupt(), KeyboardInterrupt), (None, SystemError)):
            error.__cause__ = cause
            with pytest.raises(expected):
                llama(**single(), **cache_argument(cache))


def test_an_unreferenced_cache_is_freed(tmp_path: Path) -> None:
    model = enable(copy.deepcopy(tiny("qwen2")))
    cache = SpillCache(model.config, token_budget=64, path=tmp_path, lookahead=True)
    generate(model, cache, single())
    seen = weakref.ref(cache), weakref.ref(cache.conversation), weakref.ref(model)
    del cache, model
    gc.collect()
    assert [ref() for ref in seen] == [None, None, None]
    assert not list(tmp_path.iterdir())
    # A thread that an earlier test's Ctrl-C interrupted at its start stays listed forever.
    alive = [thread for thread in threading.enumerate() if thread.is_alive()]
    assert not [thread for thread in alive if thread.name.startswith("llmcache-kv-ahead")]


@pytest.mark.parametrize("policy", POLICIES)
def test_sequences_of_a_batch_do_not_disturb_each_other(llama: Any, policy: str, tmp_path: Path) -> None:
    """Also with a small budget, each sequence gives the same as alone."""
    inputs = prompt(150, 0)["input_ids"]
    with small(policy, tmp_path)(llama) as cache:
        together = generate(llama, cache, {"input_ids": inputs}, eos_token_id=-1)
    for row in (0, 1):
        with small(policy, tmp_path)(llama) as cache:
            alone = generate(llama, cache, {"input_ids": inputs[row : row + 1]}, eos_token_id=-1)
        for one, other in zip(together.logits, alone.logits, strict=True):
            torch.testing.assert_close(one[row], other[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("policy", POLICIES)
def test_another_prompt_after_a_padded_one(llama: Any, policy: str) -> None:
    """The positions of the first prompt's padding now have tokens, which can be selected like others."""
    results = []
    with torch.no_grad():
        for with_padded in (True, False):
            with small(policy)(llama) as cache:
                if with_padded:
                    llama(**prompt(150, 120), **cache_argument(cache))
                    cache.crop(-150)
                    assert cache.get_seq_length() == 0
                llama(**prompt(150, 0), **cache_argument(cache))
                results.append(steps(llama, cache, 4, 2))
    assert torch.equal(*results)


def test_a_model_with_other_layers_or_heads_is_refused(llama: Any) -> None:
    """A model with fewer layers would never complete a step and would lose its tokens."""
    for layers in (2, 4):
        config = transformers.LlamaConfig(**{**llama.config.to_dict(), "num_hidden_layers": layers})
        with SpillCache(config, "full") as cache, pytest.raises(UsageError, match=f"config: .* {layers} layers, .* has 3"):
            generate(llama, cache, single())
    model = enable(copy.deepcopy(tiny("llama")))
    model.model.layers = model.model.layers[:2]
    with SpillCache(model.config, "full") as cache, pytest.raises(UsageError, match="model: 1 of 3 spilled layers"):
        model(**single(), **cache_argument(cache))
    other = enable(copy.deepcopy(tiny("llama-mha")))
    with SpillCache(llama.config, "full") as cache:
        llama(**single(), **cache_argument(cache))
        with pytest.raises(UsageError, match="model: has 4 key heads of 16 dimensions, but the cache 2 of 16"):
            other(input_ids=torch.tensor([[5]]), **cache_argument(cache))


def test_gradients_through_the_cache_are_refused(llama: Any) -> None:
    with SpillCache(llama.config, "full") as cache:
        llama(**single(), **cache_argument(cache)).logits.sum().backward()
        assert llama.model.embed_tokens.weight.grad is not None
        llama.zero_grad()
        loss = llama(input_ids=torch.tensor([[5]]), **cache_argument(cache)).logits.sum()
        with pytest.raises(UsageError, match="backward: "):
            loss.backward()
    llama.zero_grad()


def test_half_precision_after_enable() -> None:
    model = enable(copy.deepcopy(tiny("llama")))
    with SpillCache(model.config, "full") as cache:
        generate(model, cache, single())
        model.half()
        with pytest.raises(UsageError, match="dtype: keys are float16, but those of the cache float32"):
            model(input_ids=torch.tensor([[5]]), **cache_argument(cache))
        cache.reset()
        check_same(generate(model, stock(model), single()), generate(model, cache, single()))
