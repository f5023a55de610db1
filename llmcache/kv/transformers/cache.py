"""SpillCache: a KV cache for transformers' models that keeps keys and values in memory and SSD tiers.

Layers with full attention are spilled; layers with a sliding window or a recurrent state stay transformers' own.
"""

from __future__ import annotations

import functools
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
import transformers
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from llmcache.arrays import Int64s
from llmcache.errors import UsageError
from llmcache.kv.pipeline import NO_TIMELINE, Timeline
from llmcache.kv.tiers import KvStore, Traffic
from llmcache.kv.transformers import sidecar
from llmcache.kv.transformers.conversation import Conversation, broken_off
from llmcache.kv.transformers.identity import identity_of
from llmcache.kv.transformers.settings import SpillSettings, memory_size, policy_settings
from llmcache.kv.transformers.tensors import dtype_name
from llmcache.kv.transformers.versions import version_of
from llmcache.papers.csd import PROFILES, CsdProfile

TAG = "_llmcache_layer"  # attribute of keys that a cache passes to attention: the SpillLayer that they belong to

_RECURRENT: Any = getattr(cache_utils, "LinearAttentionLayer", ())  # transformers 5 and later
_STOCK = {getattr(cache_utils, name, None) for name in ("DynamicSlidingWindowLayer", "LinearAttentionLayer", "DummyLayer")}
"""Classes of layers that stay transformers' own; a DummyLayer stores nothing."""
_HINT = "use transformers' own cache for this model"
_REFUSED = {
    "kv_lora_rank": "latent attention (MLA) is",
    "attention_chunk_size": "chunked attention is",
    "cross_attention_layers": "cross attention is",
    "num_kv_shared_layers": "layers with shared keys are",
}


class SpillCache(Cache):
    """A KV cache for a model on which `enable` was called: pass it as `cache`. It is a context manager.

        enable(model)
        with SpillCache(model.config, token_budget=1024, path="/mnt/nvme") as cache:
            model.generate(**inputs, cache=cache)  # transformers before 5.24: past_key_values=cache

    Contexts of up to `full_tokens` tokens get full attention. By default, this is the *measured* length from which choosing
    tokens is faster, but at most the length that fits in memory; set it explicitly for reproducible runs.
    In longer contexts, `policy` (a name) chooses the tokens that a new token attends to: `token_budget` tokens, or the share
    `alpha` of the context (default 0.2). Both include the sink and window, the first and last tokens, which are always
    attended to (default: as the policy prefers). Prompts get full attention. `options` are further settings of the policy.

    `path` is the spill file, which `close` keeps; if it is a directory, `close` removes the file; if None, all pages stay in
    memory. `memory` (bytes, or "2G") limits everything that the cache holds in host memory: short contexts, pages, rows read
    from the file, and the index of the policy. The default is a quarter of the available memory, or more if the token budget
    needs more. Instead, `cpu_pages` limits only the pages, of 16 tokens per layer and sequence. The rows last read from the
    file stay in memory: up to two token budgets, at most an eighth of the context. `ssd` is "file", or "csd" for the
    *emulated* computational SSD with `profile`. `gpu_pages`, counted over all layers and sequences, are cached in the memory
    of the model's device. With `lookahead`, the next layer is evaluated and fetched while the current one computes; with
    `exact=False`, it then attends to the tokens chosen for its estimated queries. UsageError names an unsupported setting,
    or an unsupported property of the model.
    """

    def __init__(
        self,
        config: Any,
        policy: str = "mass",
        *,
        alpha: float | None = None,
        token_budget: int | None = None,
        path: str | Path | None = None,
        ssd: str = "file",
        sink_tokens: int | None = None,
        window_tokens: int | None = None,
        memory: int | str | None = None,
        cpu_pages: int | None = None,
        gpu_pages: int | None = None,
        profile: CsdProfile = PROFILES["none"],
        lookahead: bool = False,
        exact: bool = True,
        threads: int | None = None,
        timeline: Timeline = NO_TIMELINE,
        full_tokens: int | None = None,
        **options: Any,
    ) -> None:
        config = getattr(config, "config", config)  # accept a model as well
        chosen = policy_settings(policy, {"alpha": alpha, "token_budget": token_budget, **options})
        settings = SpillSettings(
            *chosen, None if path is None else Path(path), ssd, sink_tokens=sink_tokens, window_tokens=window_tokens,
            memory_bytes=memory_size(memory), cpu_pages=cpu_pages, gpu_pages=gpu_pages, profile=profile,
            lookahead=lookahead, exact=exact, threads=threads, timeline=timeline, full_tokens=full_tokens,
        )  # fmt: skip
        self._config = config
        super().__init__(layers=spilled_layers(config, functools.partial(Conversation, settings)))
        self.conversation = next(layer.conversation for layer in self.layers if isinstance(layer, SpillLayer))
        self._finalizer = weakref.finalize(self, Conversation.close, self.conversation)

    def _stock(self) -> list[Any]:
        return [layer for layer in self.layers if not isinstance(layer, SpillLayer)]

    def _sliding(self) -> list[Any]:
        return [layer for layer in self.layers if isinstance(layer, DynamicSlidingWindowLayer)]

    def _refuse_recurrent(self, what: str) -> None:
        if any(isinstance(layer, _RECURRENT) for layer in self.layers):
            raise UsageError(f"{what}: not possible for a model with recurrent layers", "compute the context again")

    @property
    def store(self) -> KvStore:
        """The store, which numbers the spilled layers only; UsageError while the cache is empty."""
        return self.conversation.store

    def __repr__(self) -> str:
        return f"SpillCache({self.conversation.describe()})"

    @property
    def traffic(self) -> Traffic:
        """The traffic between tiers since the start; UsageError while the cache is empty."""
        return self.store.traffic

    @property
    def ids(self) -> Int64s:
        """Token ids [batch, tokens]; -1 for tokens that the model received as embeddings."""
        return self.conversation.ids

    def check(self) -> None:
        """Raise DataError if a forward pass stopped between a spilled layer and another one, which cannot be rolled back."""
        if self.conversation.in_step and any(isinstance(layer, _RECURRENT) for layer in self.layers):
            raise broken_off()
        if any(layer.get_seq_length() != self.conversation.length for layer in self._sliding()):
            raise broken_off()

    # Interface of transformers' Cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens of each sequence, padding included, over all tiers."""
        layer = self.layers[layer_idx]
        return int(layer.get_seq_length() if isinstance(layer, CacheLayerMixin) else self.conversation.length)

    def reset(self) -> None:
        """Discard all tokens; the next conversation may have another batch size."""
        self.conversation.close()
        # Before transformers 5, a reset sliding layer keeps as many zeros as it had keys, so create new layers.
        for index, fresh in enumerate(DynamicCache(config=self._config).layers):
            if not isinstance(self.layers[index], SpillLayer):
                self.layers[index] = fresh

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replace sequence i by sequence `beam_idx[i]`; pages are shared, not copied."""
        self.conversation.choose(_numbers(beam_idx))
        for layer in self._stock():
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Replace every sequence by `repeats` consecutive copies."""
        if self.conversation.length:
            self.reorder_cache(torch.arange(self.conversation.store.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the sequences `indices`."""
        self.reorder_cache(torch.from_numpy(_numbers(indices)))

    def crop(self, tokens: int) -> None:
        """Remove the last `-tokens` tokens if `tokens` is negative, else keep the first `tokens`.

        The installed transformers defines the meaning of 0: no change from 5.0 on, and before that an empty cache.
        """
        length, tokens = self.conversation.length, int(tokens)  # transformers 5.17 passes a tensor
        if not length:
            return
        self._refuse_recurrent("crop")
        # A sliding layer may refuse to crop, so crop those first: nothing has changed if one does.
        for layer in self._stock():
            layer.crop(tokens)
        if tokens < 0 or (tokens == 0 and version_of(transformers.__version__) >= (5, 0)):
            self.conversation.crop(max(0, length + tokens))
        else:
            self.conversation.crop(tokens)

    # Saving and restoring

    def save(self) -> None:
        """Write everything to the spill file, so that `restore` continues from here. Call it between steps only."""
        self._refuse_recurrent("save")
        self.conversation.save(self._sliding())

    @classmethod
    def restore(cls, model: Any, path: str | Path, policy: str = "mass", **options: Any) -> SpillCache:
        """Return a cache that continues the spill file at `path` for `model`; `options` as for a new cache.

        The file must be from a model with the same weights and settings (`identity_of`); the model's path does not matter.
        Without a `save`, up to 15 tokens at the end are lost; with sliding layers, all tokens after the last `save`.
        Policies with a memory of past attention start with an empty one. DataError: the file is damaged, or from another
        model, or the model has sliding layers and the file was not saved, or was cropped or reordered after the last save.
        UsageError: the model cannot be identified.
        """
        cache = cls(model.config, policy, path=path, **options)
        try:
            cache.conversation.identify(identity_of(model, fresh=True))
            cache.conversation.restore(dtype_name(model.dtype))
            cache._refuse_recurrent("restore")
            sidecar.read(Path(path), cache.store, cache._sliding(), model.device)
        except BaseException:
            cache.close()
            raise
        return cache

    def __deepcopy__(self, memory: dict[int, Any]) -> SpillCache:
        """Raise TypeError: a spill file has one owner."""
        raise TypeError("SpillCache: cannot be copied; call save(), and restore copies of the file")

    # Closing

    def close(self) -> None:
        """Stop the threads and the device, and remove a temporary spill file; the cache can then be used again."""
        self.conversation.close()

    def __enter__(self) -> SpillCache:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class SpillLayer(CacheLayerMixin):
    """A layer with full attention: it tags new keys, so that the attention function passes them to the conversation.

    The layers of a cache change together: a single one cannot be cropped, reordered or reset.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, conversation: Conversation, number: int) -> None:
        super().__init__()
        self.conversation, self.number = conversation, number
        self.is_initialized = True

    def lazy_initialization(self, *arguments: Any) -> None: ...

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *arguments: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.conversation.expect(self.number)
        if key_states.dtype != value_states.dtype:
            key_states, value_states = _of_one_type(key_states, value_states)
        tagged = key_states.view_as(key_states)
        setattr(tagged, TAG, self)
        return tagged, value_states

    def get_seq_length(self, *arguments: Any) -> int:
        return self.conversation.length

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        """Return the length and offset of a mask over all tokens. `query`: the new tokens' number or positions."""
        return self.conversation.length + (query.shape[0] if torch.is_tensor(query) else int(query)), 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # the name up to transformers 5.0

    def reset(self) -> None:
        self.conversation.close()

    def _only_together(self, *arguments: Any) -> None:
        raise TypeError("layer: cannot be changed alone; call the method of the SpillCache")

    crop = reorder_cache = batch_repeat_interleave = batch_select_indices = _only_together
    offload = prefetch = _only_together


def _of_one_type(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Under autocast, rotary embeddings produce float32 keys, while values are in half precision."""
    if not torch.is_autocast_enabled(keys.device.type):
        types = f"keys are {keys.dtype}, values {values.dtype}"
        raise UsageError(f"dtype: must be the same for keys and values, but {types}", _HINT)
    dtype = torch.get_autocast_dtype(keys.device.type)
    return keys.to(dtype), values.to(dtype)


def checked_text_config(config: Any) -> Any:
    """Return the configuration of the text model of `config`; UsageError names an unsupported property."""
    if not hasattr(config, "get_text_config"):
        hint = "SpillCache(model.config, ...)"
        raise UsageError(f"config: a {type(config).__name__}, not the configuration of a transformers model", hint)
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise UsageError("is_encoder_decoder: encoder-decoder models are not supported", _HINT)
    for name, kind_is in _REFUSED.items():
        if getattr(text, name, None):
            raise UsageError(f"{name}: {kind_is} not supported", _HINT)
    for index, kind in enumerate(getattr(text, "layer_types", None) or []):
        # Before transformers 5, DynamicCache ignores other types; since then, it has a class for each.
        if kind == "chunked_attention" or not (_RECURRENT or kind in ("full_attention", "sliding_attention")):
            raise UsageError(f"layer_types: '{kind}' of layer {index} is not supported", _HINT)
    return text


def spilled_layers(config: Any, conversation_of: Any) -> list[Any]:
    """Return the layers that transformers creates for a model with `config`, with spilled layers for full attention.

    `conversation_of(n, alone)` returns a conversation for n spilled layers; `alone` is True if all layers are spilled.
    """
    text = checked_text_config(config)
    try:
        layers: list[Any] = DynamicCache(config=config).layers
    except (AttributeError, TypeError, ValueError) as error:
        raise UsageError(f"config: transformers makes no cache for a {text.model_type} model: {error}", _HINT) from error
    spilled = [index for index, layer in enumerate(layers) if type(layer) is DynamicLayer]
    for index, layer in enumerate(layers):
        if type(layer) is not DynamicLayer and type(layer) not in _STOCK:
            raise UsageError(f"layer_types: layer {index} is a {type(layer).__name__}, which is not supported", _HINT)
    if len(layers) != text.num_hidden_layers:
        raise UsageError(f"num_hidden_layers: only {len(layers)} of {text.num_hidden_layers} layers have keys", _HINT)
    if not spilled:
        field, what = "layer_types", "a recurrent state"
        if any(type(layer) is DynamicSlidingWindowLayer for layer in layers):
            field, what = "sliding_window", "one"
        hint = "use transformers' own cache, which does not grow with the context"
        raise UsageError(f"{field}: all layers have {what}, so there is nothing to spill", hint)
    conversation = conversation_of(len(spilled), len(spilled) == len(layers))
    for number, index in enumerate(spilled):
        layers[index] = SpillLayer(conversation, number)
    return layers


def _numbers(index: torch.Tensor) -> Int64s:
    found: Int64s = torch.as_tensor(index).cpu().numpy().astype(np.int64)
    return np.flatnonzero(found) if torch.as_tensor(index).dtype == torch.bool else found
