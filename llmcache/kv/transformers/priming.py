"""A prompt that is read once and given to several caches: prompts are attended to exactly, whatever the policy.

For accuracy alone: what a cache takes of a prompt is the same as when the model reads it, but in another time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache
from transformers.cache_utils import Cache

from llmcache.kv.transformers.cache import SpillCache
from llmcache.kv.transformers.conversation import Call, Conversation, Output
from llmcache.kv.transformers.layers import SpillLayer, spilled_layers


class _Recorder(Conversation):
    """Notes the calls of attention of a prompt, and stores nothing."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    length = 0
    looks_ahead = False

    def expect(self, layer: int) -> None:
        return

    def attend(self, layer: int, call: Call) -> Output:
        self.calls.append(call)
        return call.run(call.key, call.value, call.mask)


class Prompt:
    """Keys, values and queries of a batch of prompts of equal length, as an enabled model makes them of `ids`."""

    def __init__(self, model: Any, ids: NDArray[np.int64]) -> None:
        self._model, self._ids, self._calls = model, ids, self._recorded(model, ids)

    @classmethod
    def by_chance(cls, model: Any, tokens: int) -> Prompt:
        """Returns *synthetic* keys and values of a prompt of `tokens`, normally distributed, in no time; for times alone.

        All layers of `model` must be of full attention. Queries are not there: policies that need them see zeros.
        """
        made = cls.__new__(cls)
        text = model.config.get_text_config(decoder=True)
        heads, kv_heads, dim = text.num_attention_heads, text.num_key_value_heads, text.head_dim
        random = torch.Generator().manual_seed(0)
        none = torch.zeros((1, 1, 1, 1), dtype=model.dtype, device=model.device).expand(1, heads, tokens, dim)
        made._model, made._ids, made._calls = model, np.zeros((1, tokens), np.int64), []
        for _ in range(text.num_hidden_layers):
            drawn = (torch.randn((1, kv_heads, tokens, dim), generator=random) for _ in range(2))
            keys, values = (side.to(model.device, model.dtype) for side in drawn)
            made._calls.append(Call(None, none, keys, values, None, {"scaling": dim**-0.5}, _no_attention))
        return made

    @staticmethod
    def _recorded(model: Any, ids: NDArray[np.int64]) -> list[Call] | None:
        """The calls; None where layers with a sliding window keep keys of their own."""
        recorder = _Recorder()
        layers = spilled_layers(model.config, lambda count, alone: recorder)
        if not all(isinstance(layer, SpillLayer) for layer in layers):
            return None
        feed(model, Cache(layers=layers), ids)
        return recorder.calls

    def give(self, cache: Any) -> None:
        """Fills an empty cache: a SpillCache, or one of transformers' own."""
        if self._calls is None:
            feed(self._model, cache, self._ids)
            return
        for layer, call in enumerate(self._calls):
            if isinstance(cache, SpillCache):
                cache.conversation.attend(layer, replace(call, stock=_no_attention))
            else:
                cache.update(call.key, call.value, layer)


def _no_attention(*arguments: Any, **options: Any) -> Output:
    return torch.empty(0), None


def stock(model: Any) -> Any:
    """Returns the cache that transformers would take for `model`, empty."""
    return DynamicCache(config=model.config)


def feed(model: Any, cache: Any, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Gives the model the tokens `ids` [batch, tokens]; returns the likeliest next ones [batch]."""
    tokens = torch.from_numpy(np.ascontiguousarray(ids)).to(model.device)
    with torch.no_grad():
        logits = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
    likeliest: NDArray[np.int64] = logits.argmax(-1).cpu().numpy()
    return likeliest
