"""The attention functions that a model gets, and `enable`, which gives it them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from llmcache.errors import UsageError
from llmcache.kv.transformers.conversation import Call, Output
from llmcache.kv.transformers.layers import TAG

SDPA, EAGER = "llmcache", "llmcache_eager"


def _eager(module: Any, *arguments: Any, **options: Any) -> Output:
    """The attention that the family of `module` brings along itself."""
    function = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if function is None:
        raise UsageError(f"model: {type(module).__name__} has no attention that can be replaced", "use another model")
    found: Output = function(module, *arguments, **options)
    return found


def _spilling(stock: Callable[..., Output]) -> Callable[..., Output]:
    """Attention that does what `stock` does, over what the conversation says where keys are tagged by a SpillCache."""

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


def register() -> None:
    """Makes the attention functions known to transformers, and the functions for their masks: else it makes none."""
    AttentionInterface.register(SDPA, _spilling(sdpa_attention_forward))
    AttentionMaskInterface.register(SDPA, sdpa_mask)
    AttentionInterface.register(EAGER, _spilling(_eager))
    AttentionMaskInterface.register(EAGER, eager_mask)
