"""`enable`: a model that is told about SpillCaches goes on as before with any other cache."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from llmcache.errors import UsageError
from llmcache.kv.transformers.ahead import look_ahead
from llmcache.kv.transformers.attention import EAGER, SDPA, register
from llmcache.kv.transformers.cache import SpillCache
from llmcache.kv.transformers.views import as_array

_ENABLED = "_llmcache_hooks"


def enable(model: Any) -> Any:
    """Makes `model`, any causal language model of transformers, work with a SpillCache; returns it.

    Its attention becomes "llmcache": transformers' own (eager where it was, or where logits are capped, as in Gemma 2, else
    sdpa), but for the keys of a SpillCache. Called twice it does the same as once. UsageError if the model's attention
    cannot be replaced.
    """
    register()
    before = model.config._attn_implementation
    capped = getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    try:
        model.set_attn_implementation(EAGER if capped or before in ("eager", EAGER) else SDPA)
    except (AttributeError, ValueError) as error:
        hint = "its attention must go through transformers' AttentionInterface"
        raise UsageError(f"model: the attention of {type(model).__name__} cannot be replaced: {error}", hint) from error
    if not hasattr(model, _ENABLED):
        inner = model.base_model
        hooks = [inner.register_forward_pre_hook(_note_tokens, with_kwargs=True)]
        hooks.append(inner.register_forward_hook(_check_step, with_kwargs=True))
        for layer, behind in _pairs(inner):
            hooks.append(layer.register_forward_pre_hook(look_ahead(behind), with_kwargs=True))
        setattr(model, _ENABLED, (hooks, before))
    return model


def disable(model: Any) -> Any:
    """Undoes `enable`: the model has the attention that it had, and no hooks; returns it."""
    if hasattr(model, _ENABLED):
        hooks, before = getattr(model, _ENABLED)
        for hook in hooks:
            hook.remove()
        delattr(model, _ENABLED)
        model.set_attn_implementation(before)
    return model


def _pairs(inner: Any) -> list[tuple[Any, Any]]:
    """Each decoder layer with the one behind it."""
    layers = list(getattr(inner, "layers", []))
    return list(itertools.pairwise(layers))


def _note_tokens(inner: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Before a forward pass: checks that the cache is whole, tells it which tokens come, and where they are."""
    cache = options.get("past_key_values")
    if not isinstance(cache, SpillCache):
        return
    cache.check()
    layers = inner.config.get_text_config(decoder=True).num_hidden_layers
    if layers != len(cache.layers):
        hint = "make it with the config of the model that runs with it"
        raise UsageError(f"config: the cache was made for {len(cache.layers)} layers, the model has {layers}", hint)
    cache.conversation.begin_step()
    ids = options.get("input_ids", arguments[0] if arguments else None)
    if not torch.is_tensor(ids):
        cache.conversation.noted = None
        return
    numbers = as_array(ids).astype(np.int64)
    positions: Any = options.get("position_ids")
    if torch.is_tensor(positions) and positions.ndim == 2:
        cache.conversation.noted = (numbers, np.broadcast_to(as_array(positions).astype(np.int64), numbers.shape))
    else:
        cache.conversation.noted = (numbers, None)


def _check_step(inner: Any, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
    """After a forward pass: UsageError if not every layer was in it, as the cache would keep nothing of the step then."""
    cache = options.get("past_key_values")
    if isinstance(cache, SpillCache):
        cache.conversation.check_step()
