"""Lookahead: queries are estimated exactly from exact input, and lookahead only affects when pages are fetched."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from llmcache.kv.transformers import SpillCache, cache_argument, disable, enable
from llmcache.kv.transformers.attention import estimated
from tests.hf.tiny_models import Enabled, check_same, generate, prompt, single, stock, tiny


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3"])
def test_the_estimate_is_exact_for_the_real_input_of_a_layer(family: str) -> None:
    model = tiny(family)
    layer, seen = model.model.layers[1], {}

    def attention(module: Any, query: Any, *arguments: Any, **options: Any) -> Any:
        if module is layer.self_attn:
            seen["queries"] = query
        return plain(module, query, *arguments, **options)

    def record_input(module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        seen["hidden"] = options.get("hidden_states", arguments[0] if arguments else None)
        rotation = options.get("position_embeddings", options.get("position_embeddings_global"))
        seen["rotation"] = rotation

    enable(model)
    name = model.config._attn_implementation
    plain = AttentionInterface()[name]
    AttentionInterface.register(name, attention)
    hook = layer.register_forward_pre_hook(record_input, with_kwargs=True)
    try:
        with torch.no_grad():
            model(**single(20), **cache_argument(stock(model)))
            found = estimated(layer, seen["hidden"], seen["rotation"])
    finally:
        hook.remove()
        AttentionInterface.register(name, plain)
        disable(model)
    assert torch.equal(found, seen["queries"])


def test_selections_by_exact_queries_do_not_depend_on_lookahead(enabled: Enabled, tmp_path: Path) -> None:
    model = enabled("qwen3")
    results = []
    for ahead in (False, True):
        settings: dict[str, Any] = {"token_budget": 80, "path": tmp_path, "cpu_pages": 5, "threads": 2}
        with SpillCache(model.config, **settings, lookahead=ahead) as cache:
            results.append(generate(model, cache, prompt(200)))
    check_same(results[0], results[1])


@pytest.mark.parametrize(("family", "layers"), [("llama", [1, 2]), ("gemma3", [])])
def test_layers_are_evaluated_ahead_except_the_first_and_those_with_another_rotation(
    enabled: Enabled, family: str, layers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Gemma 3, a global layer follows a local one with another rotary embedding."""
    model = enabled(family)
    with SpillCache(model.config, token_budget=64, lookahead=True, exact=False, threads=2) as cache:
        layers_ahead: list[int] = []
        generate(model, cache, single(), max_new_tokens=1)
        engine = cache.conversation.engine
        assert engine is not None
        monkeypatch.setattr(engine, "ahead", lambda layer, queries: layers_ahead.append(layer))
        model(input_ids=torch.tensor([[5]]), **cache_argument(cache))
    assert layers_ahead == layers
