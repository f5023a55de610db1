"""The identity of a model: a digest of everything except the tokens that determines its keys and values.

It covers all bytes of the weights and buffers of the model's body, and the configuration without the settings that do
not affect keys. The model's path has no effect.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from llmcache.errors import UsageError
from llmcache.kv.spill.checksum import checksums

CHUNK_BYTES = 1 << 20
NEUTRAL = frozenset(
    {
        "architectures", "attn_implementation", "dtype", "torch_dtype", "transformers_version", "return_dict", "use_cache",
        "output_attentions", "output_hidden_states", "id2label", "label2id", "problem_type", "num_labels",
        "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "attention_dropout", "name_or_path",
    }
)  # fmt: skip
"""Settings that do not affect keys; those whose names begin with "_" do not either."""
_CACHED = "_llmcache_identity"


def identity_of(model: Any, fresh: bool = False) -> str:
    """Return the identity of `model`: its type and 32 hexadecimal digits. UsageError: some weights cannot be read.

    The model caches the result; it is recomputed if `fresh`, or if a tensor was replaced or changed in place. Takes about
    1 s for each 10 GB of weights.
    """
    body = model.base_model
    tensors = dict(_tensors(body))
    versions = [(name, tensor.data_ptr(), tensor._version) for name, tensor in tensors.items()]
    known, text = getattr(body, _CACHED, (None, ""))
    if fresh or known != versions:
        digest = hashlib.sha256(json.dumps(_settings(body.config.to_dict()), sort_keys=True, default=str).encode())
        for name, tensor in tensors.items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            for chunk in _chunks(tensor):
                digest.update(chunk)
        text = f"{body.config.get_text_config(decoder=True).model_type} {digest.hexdigest()[:32]}"
        setattr(body, _CACHED, (versions, text))
    return text


def _tensors(body: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers of a module and its state, which includes the scales of quantized layers."""
    found: dict[str, Any] = {**dict(body.named_buffers()), **body.state_dict()}
    for name, tensor in sorted(found.items()):
        if not torch.is_tensor(tensor):
            continue
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise _unidentified(name, f"is a {type(tensor).__name__}")
        if tensor.is_meta:
            raise _unidentified(name, "is offloaded")
        yield name, tensor.detach()


def _unidentified(name: str, why: str) -> UsageError:
    hint = "a spill file of this model cannot be saved or restored: give a directory as path, or load the model without it"
    return UsageError(f"model: the weight {name} {why}, so that the model cannot be identified", hint)


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _settings(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if isinstance(name, str) and not name.startswith("_") and name not in NEUTRAL
    }


def _chunks(tensor: torch.Tensor) -> Iterator[bytes]:
    flat = tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)
    whole = flat.numel() // CHUNK_BYTES * CHUNK_BYTES
    if whole:
        yield checksums(np.ascontiguousarray(flat[:whole].cpu().numpy()).reshape(-1, CHUNK_BYTES)).tobytes()
    yield flat[whole:].cpu().numpy().tobytes()
