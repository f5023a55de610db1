"""Hooks that `enable` installs in a model: attention over a SpillCache, checks around a forward pass, and lookahead.

Lookahead estimates the queries of layer i+1 from the input of layer i, so that layer i+1 is evaluated while layer i
computes (hillinfer.txt, section 3.3, APP). The estimate is InfiniGen's: the inputs of consecutive layers differ little.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from llmcache.arrays import Int64s
from llmcache.errors import UsageError, is_interrupt
from llmcache.kv.transformers.cache import TAG, SpillCache, SpillLayer
from llmcache.kv.transformers.identity import identity_of
from llmcache.kv.transformers.tensors import Call, Output, as_array

Hook = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
SDPA, EAGER = "llmcache", "llmcache_eager"

_ENABLED = "_llmcache_hooks"

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _interruptible(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """numba reports an interrupt while it converts a result to an array as SystemError; raise KeyboardInterrupt instead."""

    @functools.wraps(function)
    def called(*arguments: _P.args, **options: _P.kwargs) -> _R:
        try:
            return function(*arguments, **options)
        except SystemError as error:
            if is_interrupt(error):
                raise KeyboardInterrupt from error
            raise

    return called


def _eager(module: Any, *arguments: Any, **options: Any) -> Output:
    function = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if function is None:
        raise UsageError(f"model: the attention of {type(module).__name__} cannot be replaced", "use another model")
    return function(module, *arguments, **options)


def _spilling(stock: Callable[..., Output]) -> Callable[..., Output]:
    @_interruptible
    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
    ) -> Output:
        layer = getattr(key, TAG, None)
        if layer is None:
            return stock(module, query, key, value, attention_mask, **options)
        found: Output = layer.conversation.attend(
            layer.number, Call(module, query, key, value, attention_mask, options, stock)
        )
        return found

    return attention


def enable(model: Any) -> Any:
    """Make `model`, any causal language model of transformers, work with a SpillCache, and return it.

    The attention becomes "llmcache", which is transformers' own for keys of other caches: eager if the model used eager
    or caps its logits (Gemma 2), else sdpa. A second call has no further effect. UsageError: the attention cannot be
    replaced.
    """
    if not any(_uses_interface(part) for part in model.modules()):
        raise _not_replaceable(model, "it does not go through transformers' AttentionInterface")
    if not getattr(model, "_supports_default_dynamic_cache", lambda: True)():
        hint = "use the model without a SpillCache"
        raise UsageError(f"model: {type(model).__name__} has a cache of its own", hint)
    inner = model.base_model
    pairs = itertools.pairwise(getattr(inner, "layers", []))
    ahead = [(layer, following) for layer, following in pairs if _can_be_estimated(layer, following)]
    # transformers creates no masks for an attention whose mask function is not registered.
    AttentionInterface.register(SDPA, _spilling(sdpa_attention_forward))
    AttentionMaskInterface.register(SDPA, sdpa_mask)
    AttentionInterface.register(EAGER, _spilling(_eager))
    AttentionMaskInterface.register(EAGER, eager_mask)
    before = model.config._attn_implementation
    capped = getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    try:
        model.set_attn_implementation(EAGER if capped or before in ("eager", EAGER) else SDPA)
    except (AttributeError, ValueError) as error:
        model.set_attn_implementation(before)
        raise _not_replaceable(model, str(error)) from error
    if not hasattr(model, _ENABLED):
        hooks = [inner.register_forward_pre_hook(_begin_step, with_kwargs=True)]
        hooks.append(inner.register_forward_hook(_check_step, with_kwargs=True))
        hooks += [layer.register_forward_pre_hook(look_ahead(following), with_kwargs=True) for layer, following in ahead]
        setattr(model, _ENABLED, (hooks, before))
    return model


def _uses_interface(part: Any) -> bool:
    return hasattr(sys.modules.get(type(part).__module__), "ALL_ATTENTION_FUNCTIONS")


def _not_replaceable(model: Any, why: str) -> UsageError:
    hint = "use transformers' own cache for this model"
    return UsageError(f"model: the attention of {type(model).__name__} cannot be replaced: {why}", hint)


def disable(model: Any) -> Any:
    """Restore the attention that `model` had before `enable`, remove the hooks, and return the model."""
    if hasattr(model, _ENABLED):
        hooks, before = getattr(model, _ENABLED)
        for hook in hooks:
            hook.remove()
        delattr(model, _ENABLED)
        model.set_attn_implementation(before)
    return model


def _passed_cache(options: dict[str, Any]) -> Any:
    return options["cache"] if options.get("cache") is not None else options.get("past_key_values")


@_interruptible
def _begin_step(inner: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    cache = _passed_cache(options)
    if not isinstance(cache, SpillCache):
        return
    cache.check()
    layers = inner.config.get_text_config(decoder=True).num_hidden_layers
    if layers != len(cache.layers):
        hint = "create the cache with the config of this model"
        raise UsageError(f"config: the cache was created for {len(cache.layers)} layers, but the model has {layers}", hint)
    if cache.conversation.needs_identity:
        try:
            cache.conversation.identify(identity_of(inner))
        except UsageError as error:
            cache.conversation.identify(error)
    ids = options.get("input_ids", arguments[0] if arguments else None)
    position_ids: Any = options.get("position_ids")
    token_ids: Int64s | None = as_array(ids).astype(np.int64) if torch.is_tensor(ids) else None
    positions: Int64s | None = None
    if token_ids is not None and torch.is_tensor(position_ids) and position_ids.ndim == 2:
        positions = np.broadcast_to(as_array(position_ids).astype(np.int64), token_ids.shape)
    cache.conversation.begin_step(token_ids, positions)


def _check_step(inner: Any, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
    cache = _passed_cache(options)
    if isinstance(cache, SpillCache):
        cache.conversation.check_step()


def look_ahead(following: Any) -> Hook:
    """Return a hook for a decoder layer that starts the evaluation of the `following` layer in decode steps."""

    @_interruptible
    def hook(layer: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        layers, index = getattr(_passed_cache(options), "layers", []), following.self_attn.layer_idx
        spilled = layers[index] if index < len(layers) else None
        if not isinstance(spilled, SpillLayer):
            return
        engine = spilled.conversation.engine_ahead
        hidden = options.get("hidden_states", arguments[0] if arguments else None)
        rotation = options.get("position_embeddings")
        if engine is None or hidden is None or rotation is None or hidden.shape[1] != 1:
            return
        with torch.no_grad():
            queries = estimated(following, hidden, rotation)
        engine.ahead(spilled.number, as_array(queries[:, :, 0].float().contiguous()))

    return hook


def estimated(layer: Any, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the queries [batch, heads, tokens, dim] of `layer` for the input `hidden` [batch, tokens, width].

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


def _can_be_estimated(layer: Any, following: Any) -> bool:
    """Return whether `estimated` supports the `following` layer. In Gemma 3, rotary embeddings of layers differ."""
    if not hasattr(getattr(following, "self_attn", None), "q_proj") or not hasattr(following, "input_layernorm"):
        return False
    return _kind(layer) == _kind(following)


def _kind(layer: Any) -> Any:
    return getattr(layer, "attention_type", None) or getattr(getattr(layer, "self_attn", None), "layer_type", None)
