"""The layers of a SpillCache: those of full attention are spilled, those with a sliding window stay transformers' own."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from llmcache.errors import UsageError
from llmcache.kv.transformers.conversation import Conversation

TAG = "_llmcache_layer"
"""Attribute of keys on their way from a cache to attention: the layer that they belong to."""

_HINT = "use transformers' own cache for this model"


class SpillLayer(CacheLayerMixin):
    """One layer of full attention: hands new keys on to attention, which knows by a tag to ask the conversation.

    Sequences of all layers change together: only the cache can be cropped, reordered or reset, not one layer of it.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, conversation: Conversation, number: int) -> None:
        super().__init__()
        self.conversation, self.number = conversation, number
        self.is_initialized = True

    def lazy_initialization(self, *arguments: Any) -> None:
        """Does nothing: the conversation begins with the first token."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *arguments: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the new keys, tagged, and values: attention over what is stored happens when they arrive there."""
        self.conversation.expect(self.number)
        if key_states.dtype != value_states.dtype:
            key_states, value_states = _of_one_type(key_states, value_states)
        tagged = key_states.view_as(key_states)
        setattr(tagged, TAG, self)
        return tagged, value_states

    def get_seq_length(self, *arguments: Any) -> int:
        """Returns the tokens of each sequence, those before the step that is under way."""
        return self.conversation.length

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        """Returns for how many tokens a mask is made, and from which on: all. `query`: new tokens, or their positions."""
        return self.conversation.length + (query.shape[0] if torch.is_tensor(query) else int(query)), 0

    def get_max_length(self) -> int:
        """Returns -1: there is no bound."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Returns -1: there is no bound (the name up to transformers 5.0)."""
        return -1

    def reset(self) -> None:
        """Ends the conversation, of all layers."""
        self.conversation.close()

    def _only_together(self, *arguments: Any) -> None:
        raise TypeError("layer: layers of a SpillCache change together: call the cache's own method")

    crop = reorder_cache = batch_repeat_interleave = batch_select_indices = _only_together
    offload = prefetch = _only_together


def _of_one_type(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in the type of autocast, which attention would cast them to; UsageError if they differ without it.

    Under autocast rotary embeddings leave keys in float32, while values are in half precision.
    """
    if not torch.is_autocast_enabled(keys.device.type):
        types = f"keys of type {keys.dtype}, values of type {values.dtype}"
        raise UsageError(f"dtype: {types}, one is needed for both", _HINT)
    dtype = torch.get_autocast_dtype(keys.device.type)
    return keys.to(dtype), values.to(dtype)


def spilled_layers(config: Any, conversation_of: Any) -> list[Any]:
    """Returns the layers of a cache for a model with `config`, as transformers makes them, those of full attention spilled.

    `conversation_of(n, alone)` makes the conversation of n spilled layers; `alone`: there are no others. UsageError names
    what of the model is not supported.
    """
    text = config.get_text_config(decoder=True)
    _check(config, text)
    layers: list[Any] = DynamicCache(config=config).layers
    spilled = [index for index, layer in enumerate(layers) if type(layer) is DynamicLayer]
    for index, layer in enumerate(layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise UsageError(f"layer_types: layer {index} keeps its state in a {type(layer).__name__}, not in keys", _HINT)
    if len(layers) != text.num_hidden_layers:
        raise UsageError(f"num_hidden_layers: {text.num_hidden_layers}, but {len(layers)} of them have keys", _HINT)
    if not spilled:
        hint = "such a cache is never longer than the window: use transformers' own"
        raise UsageError("sliding_window: every layer has one, there is nothing to spill", hint)
    conversation = conversation_of(len(spilled), len(spilled) == len(layers))
    for number, index in enumerate(spilled):
        layers[index] = SpillLayer(conversation, number)
    return layers


def _check(config: Any, text: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise UsageError("is_encoder_decoder: models with an encoder are not supported", _HINT)
    if getattr(text, "kv_lora_rank", None):
        raise UsageError("kv_lora_rank: latent attention (MLA) is not supported", _HINT)
    if getattr(text, "attention_chunk_size", None):
        raise UsageError("attention_chunk_size: attention in chunks is not supported", _HINT)
    if getattr(text, "num_kv_shared_layers", None):
        raise UsageError("num_kv_shared_layers: layers that share their keys are not supported", _HINT)
    for index, kind in enumerate(getattr(text, "layer_types", None) or []):
        if kind not in ("full_attention", "sliding_attention"):
            raise UsageError(f"layer_types: layer {index} is of type '{kind}', which is not supported", _HINT)
