"""The families of transformers with which SpillCache works: the list in docs/contexts.md is the result of this test.

Every family gets a tiny model with random weights. `ARCHITECTURES=all` tests all families instead of a sample, and
`ARCHITECTURES=write` also writes the list.
"""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from llmcache.errors import DataError, UsageError
from llmcache.kv.transformers import SpillCache, cache_argument, enable
from llmcache.kv.transformers.versions import version_of
from tests.hf.tiny_models import generate

DOCS = Path(__file__).parents[2] / "docs/contexts.md"
WANTED = os.environ.get("ARCHITECTURES", "")
RECORDED_WITH = (5, 24)
SAMPLE = (
    "bamba",
    "gemma3_text",
    "gpt_neox",
    "gpt2",
    "jamba",
    "llama",
    "minimax",
    "mixtral",
    "phi3",
    "qwen3_5_text",
    "qwen3_next",
)
HYBRIDS = ("bamba", "jamba", "qwen3_5_text", "qwen3_next")
MOST_PARAMETERS = 30_000_000
_SIZES = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 512, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512,
    "d_model": 64, "n_layers": 4, "n_heads": 4, "ffn_dim": 64, "num_local_experts": 4, "num_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "max_seq_len": 512, "rotary_dim": 8,
    "bos_token_id": 0, "eos_token_id": 96, "pad_token_id": 0, "word_embed_proj_dim": 64, "layer_norm_eps": 1e-5,
    "sliding_window": 32, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "mamba_d_state": 8, "use_mamba_kernels": False,
}  # fmt: skip
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "mistral": {"sliding_window": None},
}  # fmt: skip


def tiny_model(family: str) -> Any:
    """Return a tiny model of a family with random weights; raises any error if that is not possible."""
    kinds = {config.model_type: (config, model) for config, model in MODEL_FOR_CAUSAL_LM_MAPPING.items()}
    config, model = kinds[family]
    text = config().get_text_config(decoder=True)
    sizes = {name: size for name, size in _SIZES.items() if getattr(text, name, None) is not None}
    if "num_key_value_heads" in sizes and text.num_key_value_heads == text.num_attention_heads:
        sizes["num_key_value_heads"] = 4
    tiny = type(text)(**{**sizes, "vocab_size": 97, **_OWN.get(family, {})})
    torch.manual_seed(1)
    with torch.device("meta"):
        parameters = sum(each.numel() for each in model(tiny).parameters())
    assert parameters < MOST_PARAMETERS
    return model(tiny).eval()


def outcome(family: str) -> str | None:
    """Return "bit-exact", the reason why a family is refused, or None if transformers itself cannot run its tiny model."""
    inputs = {"input_ids": torch.randint(1, 96, (1, 60), generator=torch.Generator().manual_seed(2))}
    try:
        model = tiny_model(family)
        expected = generate(model, None, inputs, max_new_tokens=6)
        assert cache_argument(None).keys() & inspect.signature(model.forward).parameters.keys()
    except Exception:
        return None
    try:
        enable(model)
        results = []
        for full_tokens in (0, 4096):
            with SpillCache(model, "full", full_tokens=full_tokens) as cache:
                results.append(generate(model, cache, inputs, max_new_tokens=6))
    except UsageError as error:
        named = re.sub(r"model: the attention of \w+", "the attention", error.message)
        return re.sub(r"model: \w+ has", "the model has", re.sub(r"\blayer \d+", "a layer", named))
    except Exception as error:
        return f"fails: {type(error).__name__}: {str(error)[:100]}"
    same = all(torch.equal(one, other) for got in results for one, other in zip(expected.logits, got.logits, strict=True))
    return "bit-exact" if same else "differs"


def listed() -> dict[str, str]:
    """Return the families in the documentation, and their outcomes."""
    block = DOCS.read_text().partition("<!-- architectures -->")[2].partition("<!-- /architectures -->")[0]
    rows = re.findall(r"^\| (.+) \| (.+) \|$", block, re.MULTILINE)[1:]
    return {family: result.strip() for result, families in rows for family in re.findall(r"[\w-]+", families)}


def write(found: dict[str, str]) -> None:
    results = sorted(set(found.values()), key=lambda result: (result != "bit-exact", result))
    rows = [f"| {result} | {', '.join(sorted(of for of, own in found.items() if own == result))} |" for result in results]
    before, _, rest = DOCS.read_text().partition("<!-- architectures -->")
    after = rest.partition("<!-- /architectures -->")[2]
    table = "\n".join(["<!-- architectures -->", "| result | families |", "|---|---|", *rows, "<!-- /architectures -->"])
    DOCS.write_text(before + table + after)


recorded = pytest.mark.skipif(
    version_of(transformers.__version__) != RECORDED_WITH, reason="the list is of another version of transformers"
)
recurrent = pytest.mark.skipif(
    not hasattr(transformers.cache_utils, "LinearAttentionLayer"), reason="this version has no recurrent layers"
)


@recorded
@pytest.mark.parametrize("family", SAMPLE)
def test_a_family_works_as_documented(family: str) -> None:
    assert listed()[family] == outcome(family)


if WANTED:

    @recorded
    def test_all_families_work_as_documented() -> None:
        families = sorted({config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING})
        found = {family: result for family in families if (result := outcome(family)) is not None}
        assert not {family for family, result in found.items() if result.startswith(("differs", "fails"))}
        if WANTED == "write":
            write(found)
        assert listed() == found


@recurrent
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_hybrid_with_beams_and_a_batch(family: str) -> None:
    """The recurrent layers stay transformers' own, and are reordered with the others."""
    try:
        model = tiny_model(family)
    except KeyError:
        pytest.skip("this version of transformers does not have the family")
    inputs = {"input_ids": torch.randint(1, 96, (2, 60), generator=torch.Generator().manual_seed(2))}
    expected = generate(model, None, inputs, num_beams=3)
    enable(model)
    with SpillCache(model, "full") as cache:
        for _ in range(2):
            got = generate(model, cache, inputs, num_beams=3)
            assert all(torch.equal(one, other) for one, other in zip(expected.logits, got.logits, strict=True))
            cache.reset()


@recurrent
def test_an_interrupted_step_of_a_hybrid_is_reported() -> None:
    """A recurrent state cannot be rolled back, saved or cropped."""
    model = enable(tiny_model("qwen3_next"))
    one = torch.tensor([[5]])

    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with SpillCache(model, "full") as cache, torch.no_grad():
        model(input_ids=torch.tensor([[5, 6, 7]]), **cache_argument(cache))
        for refused in (cache.save, lambda: cache.crop(-1)):
            with pytest.raises(UsageError, match="recurrent"):
                refused()
        hook = model.model.layers[1].register_forward_pre_hook(stop)  # after the first recurrent layer
        with pytest.raises(KeyboardInterrupt):
            model(input_ids=one, **cache_argument(cache))
        hook.remove()
        with pytest.raises(DataError, match="middle of an earlier step"):
            model(input_ids=one, **cache_argument(cache))
        cache.reset()
        model(input_ids=one, **cache_argument(cache))
