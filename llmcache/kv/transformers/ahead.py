"""Looking ahead: the queries of the next layer, estimated from the input of this one, before this one has computed.

Source: hillinfer.txt, section 3.3 (APP), which evaluates layer i+1 while layer i computes, and InfiniGen (its prefetch-based
baseline) for the estimate: what enters a layer differs little from what enters the next, so that the next layer's norm,
query projection and rotary embedding give nearly its queries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from llmcache.kv.transformers.layers import SpillLayer
from llmcache.kv.transformers.views import as_array

Hook = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]


def look_ahead(behind: Any) -> Hook:
    """Returns what is to be called before a decoder layer: it starts evaluating the one `behind` it.

    Nothing happens with another cache, while a prompt is read, or where the layer behind has a rotary embedding other
    than this one's (Gemma 3, where global layers follow local ones).
    """

    def hook(layer: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        spilled = _spilled(behind, options.get("past_key_values"))
        if spilled is None or not spilled.conversation.looks_ahead or not _same_kind(layer, behind):
            return
        engine = spilled.conversation.engine
        hidden = options.get("hidden_states", arguments[0] if arguments else None)
        rotation = options.get("position_embeddings")
        if engine is None or hidden is None or rotation is None or hidden.shape[1] != 1:
            return
        with torch.no_grad():
            queries = estimated(behind, hidden, rotation)
        engine.ahead(spilled.number, as_array(queries[:, :, 0].float().contiguous()))

    return hook


def estimated(layer: Any, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Returns the queries [batch, heads, tokens, dim] that `layer` would have if `hidden` [batch, tokens, width] entered it.

    `rotation`: cosines and sines [batch, tokens, dim] of the tokens' positions.
    """
    attention = layer.self_attn
    queries = attention.q_proj(layer.input_layernorm(hidden))
    queries = queries.view(*hidden.shape[:-1], -1, attention.head_dim)
    norm = getattr(attention, "q_norm", None)
    queries = (norm(queries) if norm is not None else queries).transpose(1, 2)
    cosines, sines = (part[:, None] for part in rotation)
    first, second = queries.chunk(2, -1)
    return queries * cosines + torch.cat([-second, first], -1) * sines


def _spilled(behind: Any, cache: Any) -> SpillLayer | None:
    """The layer of `cache` that belongs to the decoder layer `behind`, if it is spilled and can be estimated."""
    attention: Any = getattr(behind, "self_attn", None)
    if not hasattr(attention, "q_proj") or not hasattr(behind, "input_layernorm"):
        return None
    layers = getattr(cache, "layers", [])
    index = attention.layer_idx
    found = layers[index] if index < len(layers) else None
    return found if isinstance(found, SpillLayer) else None


def _same_kind(layer: Any, behind: Any) -> bool:
    kinds = (getattr(part, "attention_type", getattr(part.self_attn, "layer_type", None)) for part in (layer, behind))
    return next(kinds) == next(kinds)
