"""Models of a few thousand random parameters, of every family that SpillCache supports, and runs of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers

from llmcache.kv.transformers import SpillCache, cache_argument, disable, enable

transformers.logging.set_verbosity_error()

VOCABULARY, END = 97, 96
_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096}
_TOKENS = {"eos_token_id": END, "bos_token_id": 0, "pad_token_id": 0, "initializer_range": 0.1}
_SLIDING = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "qwen2": ("Qwen2", {}),
    "qwen2-sliding": ("Qwen2", {**_SLIDING, "use_sliding_window": True}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "gemma": ("Gemma", {"num_key_value_heads": 1}),
    "gemma2": ("Gemma2", {**_SLIDING, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3Text", {**_SLIDING, "query_pre_attn_scalar": 16}),
}
Caches = Callable[[Any], Any]
Run = Callable[[Any, Any], Any]
Enabled = Callable[..., Any]
"""The fixture `enabled`: returns an enabled model of a family."""


@functools.cache
def tiny(family: str, dtype: str = "float32") -> Any:
    """Return the model of a family, the same one for every call."""
    name, extra = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**_SIZES, **_HEADS, **_TOKENS, **extra})
    causal = name.replace("Text", "") + "ForCausalLM"
    torch.manual_seed(1)
    model = getattr(transformers, causal)(config).eval().to(getattr(torch, dtype))
    if family == "gemma2":  # only eager attention caps its logits
        model.set_attn_implementation("eager")
    return model


def prompt(tokens: int = 150, padding: int = 37) -> dict[str, Any]:
    """Return a batch of two prompts, the first of them padded on the left."""
    ids = torch.from_numpy(np.random.default_rng(7).integers(1, END, (2, tokens)))
    mask = torch.ones_like(ids)
    if padding:
        ids[0, :padding], mask[0, :padding] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def single(tokens: int = 150) -> dict[str, Any]:
    return {"input_ids": prompt(tokens, 0)["input_ids"][1:]}


def longer(generated: Any, tokens: int = 9) -> dict[str, Any]:
    """Return the next turn of a conversation that began with `prompt()`: the generated sequences with `tokens` appended."""
    ids = torch.cat([generated.sequences, torch.full((2, tokens), 7)], 1)
    more = ids.shape[1] - prompt()["attention_mask"].shape[1]
    return {"input_ids": ids, "attention_mask": torch.cat([prompt()["attention_mask"], torch.ones(2, more).long()], 1)}


def words() -> tuple[Any, str]:
    """Return a tokenizer with the words w0, w1 and so on, and a text of 200 of them."""
    kind = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w1"))
    kind.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    text = " ".join(f"w{i * 7 % 90 + 2}" for i in range(200))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=kind, pad_token="w0"), text


def stock(model: Any) -> Any:
    return transformers.DynamicCache(config=model.config)


def both(model: Any, spilled: Caches, run: Run) -> tuple[Any, Any]:
    """Return the results of `run(model, cache)` with transformers' cache and attention, and with a spilled cache."""
    torch.manual_seed(3)
    expected = run(model, stock(model))
    enable(model)
    try:
        torch.manual_seed(3)
        with spilled(model) as cache:
            return expected, run(model, cache)
    finally:
        disable(model)


def generate(model: Any, cache: Any, inputs: dict[str, Any], **options: Any) -> Any:
    options = {"max_new_tokens": 12, "do_sample": False, **options}
    return model.generate(**inputs, **cache_argument(cache), return_dict_in_generate=True, output_logits=True, **options)


def check_same(expected: Any, got: Any) -> None:
    """Check that two generations are the same, bit for bit."""
    assert torch.equal(expected.sequences, got.sequences)
    assert len(expected.logits) == len(got.logits)
    assert max(float((one - other).abs().max()) for one, other in zip(expected.logits, got.logits, strict=True)) == 0


def whole(policy: str = "hillinfer", **options: Any) -> Caches:
    """Return a factory of SpillCaches whose budget exceeds every context of these tests."""
    return lambda model: SpillCache(model.config, policy, token_budget=4096, threads=2, **options)
