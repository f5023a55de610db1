"""SpillCache: a cache for transformers' models whose keys and values lie in tiers, of which each token attends to some.

Its layers of full attention are spilled and share a `Conversation`; those with a sliding window stay transformers' own.
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
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from llmcache.arrays import Int64s
from llmcache.errors import UsageError
from llmcache.kv.csd import PROFILES, CsdProfile
from llmcache.kv.pipeline import NO_TIMELINE, Timeline
from llmcache.kv.tiers import KvStore, Traffic
from llmcache.kv.transformers import sidecar, version_of
from llmcache.kv.transformers.conversation import Conversation, SpillSettings, broken_off, policy_settings
from llmcache.kv.transformers.identity import identity_of
from llmcache.kv.transformers.tensors import dtype_name

TAG = "_llmcache_layer"
"""Attribute of keys on their way from a cache to attention: the layer that they belong to."""

_HINT = "use transformers' own cache for this model"
_REFUSED = {
    "kv_lora_rank": "latent attention (MLA) is",
    "attention_chunk_size": "chunked attention is",
    "num_kv_shared_layers": "layers with shared keys are",
}


class SpillCache(Cache):
    """A cache for a model that `enable` was called for: pass it as `cache`. A context manager.

        enable(model)
        with SpillCache(model.config, token_budget=1024, path="/mnt/nvme") as cache:
            model.generate(**inputs, cache=cache)  # transformers before 5.24: past_key_values=cache

    Contexts of up to `full_tokens` are attended to fully, as fast as with transformers' own cache (None: as far as that is
    faster than choosing, which is *measured*, and fits the memory below; then runs that shall be the same must name it).
    Beyond, `policy`, by name, chooses what a new token attends to: `token_budget` tokens, or the share `alpha` of the
    context (0.2 if neither is given), sink and window included: the first and last tokens, which are attended in any case
    (None: as many as suit the policy). Prompts are attended to exactly. `path`: the spill file, kept on `close`; a
    directory: a file in it that is removed then; None: all stays in memory. `ssd`: "file", or "csd" for the *emulated*
    computational SSD with `profile`. `cpu_pages` of 16 tokens per layer and sequence stay in memory (default: a quarter of
    what can be had, or the token budget where that is more), and beside them of what a file gave last up to two token
    budgets, no more than an eighth of the context; `gpu_pages` that were used lately stay in the memory of the
    device that the model runs on, over all layers and sequences together. `lookahead`: the next layer is evaluated and
    fetched while one computes; `exact` False takes what an estimate of its queries chose. `options`: further settings of
    the policy. UsageError names a setting, or a property of the model, that is not supported.
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
        config = getattr(config, "config", config)  # a model is taken as well
        chosen = policy_settings(policy, {"alpha": alpha, "token_budget": token_budget, **options})
        settings = SpillSettings(
            *chosen, None if path is None else Path(path), ssd, sink_tokens=sink_tokens, window_tokens=window_tokens,
            cpu_pages=cpu_pages, gpu_pages=gpu_pages, profile=profile, lookahead=lookahead, exact=exact, threads=threads,
            timeline=timeline, full_tokens=full_tokens,
        )  # fmt: skip
        super().__init__(layers=spilled_layers(config, functools.partial(Conversation, settings)))
        self.conversation = next(layer.conversation for layer in self.layers if isinstance(layer, SpillLayer))
        self._finalizer = weakref.finalize(self, Conversation.close, self.conversation)

    def _stock(self) -> Any:
        return (layer for layer in self.layers if not isinstance(layer, SpillLayer))

    @property
    def store(self) -> KvStore:
        """The store of the spilled layers, numbered without those in between that are not; UsageError while it is empty."""
        return self.conversation.store

    @property
    def traffic(self) -> Traffic:
        """What moved between tiers so far; UsageError while it is empty."""
        return self.store.traffic

    @property
    def ids(self) -> Int64s:
        """Ids of the tokens [batch, tokens] that it holds; -1 for those that the model got as embeddings."""
        return self.conversation.ids

    def check(self) -> None:
        """DataError if a forward pass ended between a spilled layer and a sliding one: their tokens differ."""
        if any(layer.get_seq_length() != self.conversation.length for layer in self._stock()):
            raise broken_off()

    # What transformers asks of a cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the tokens of each sequence, padding included, wherever they are."""
        return int(self.layers[layer_idx].get_seq_length())

    def reset(self) -> None:
        """Forgets everything: a new conversation may begin, of another batch too."""
        self.conversation.close()
        # Before transformers 5 a sliding layer that is reset keeps as many zeros as it had keys: new ones are made.
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, SpillLayer):
                self.layers[index] = type(layer)(sliding_window=layer.sliding_window)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Makes sequence i what sequence `beam_idx[i]` was; pages are shared, not copied."""
        self.conversation.choose(_numbers(beam_idx))
        for layer in self._stock():
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Makes `repeats` of every sequence, one after the other."""
        if self.conversation.length:
            self.conversation.choose(np.repeat(np.arange(self.conversation.store.batch), repeats))
        for layer in self._stock():
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps only the sequences `indices`."""
        self.conversation.choose(_numbers(indices))
        for layer in self._stock():
            layer.batch_select_indices(indices)

    def crop(self, tokens: int) -> None:
        """Takes the last `-tokens` tokens away if that is negative, else cuts to `tokens`.

        0 does what transformers of the version at hand means by it: nothing from 5.0 on, before that everything goes.
        """
        length, tokens = self.conversation.length, int(tokens)  # 5.17 gives a tensor
        if not length:
            return
        # A sliding layer may refuse: nothing has changed then.
        for layer in self._stock():
            layer.crop(tokens)
        if tokens < 0 or (tokens == 0 and version_of(transformers.__version__) >= (5, 0)):
            self.conversation.crop(max(0, length + tokens))
        else:
            self.conversation.crop(tokens)

    # Keeping it

    def save(self) -> None:
        """Writes everything to the spill file, so that `restore` goes on exactly here; between steps, and it may go on."""
        self.conversation.save(list(self._stock()))

    @classmethod
    def restore(cls, model: Any, path: str | Path, policy: str = "mass", **options: Any) -> SpillCache:
        """Return a cache that continues the spill file at `path`, for `model` itself; `options` as for a new cache.

        The file must be of a model with the same weights and settings (`identity_of`), at any path. Without a `save`, up to
        15 tokens at the end are lost; of a model with sliding layers, all tokens after the last `save`. Policies that
        remember attention begin with an empty memory. DataError: the file is of another model, damaged, or of a model with
        sliding layers and not saved, or cropped or reordered after that. UsageError: the model cannot be identified.
        """
        cache = cls(model.config, policy, path=path, **options)
        try:
            cache.conversation.identify(identity_of(model, fresh=True))
            cache.conversation.restore(dtype_name(model.dtype))
            sidecar.read(Path(path), cache.store, list(cache._stock()), model.device)
        except BaseException:
            cache.close()
            raise
        return cache

    def __deepcopy__(self, memory: dict[int, Any]) -> SpillCache:
        """Raises TypeError: a spill file has one owner."""
        raise TypeError("SpillCache: cannot be copied; call save(), and restore copies of the file")

    # The end

    def close(self) -> None:
        """Ends it: threads, the device and a spill file without a name are gone. It may begin again."""
        self.conversation.close()

    def __enter__(self) -> SpillCache:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


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

    get_max_cache_shape = get_max_length  # the name up to transformers 5.0

    def reset(self) -> None:
        """Ends the conversation, of all layers."""
        self.conversation.close()

    def _only_together(self, *arguments: Any) -> None:
        raise TypeError("layer: cannot be changed alone; call the method of the SpillCache")

    crop = reorder_cache = batch_repeat_interleave = batch_select_indices = _only_together
    offload = prefetch = _only_together


def _of_one_type(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in the type of autocast, which attention would cast them to; UsageError if they differ without it.

    Under autocast rotary embeddings leave keys in float32, while values are in half precision.
    """
    if not torch.is_autocast_enabled(keys.device.type):
        types = f"keys are {keys.dtype}, values {values.dtype}"
        raise UsageError(f"dtype: must be the same for keys and values, but {types}", _HINT)
    dtype = torch.get_autocast_dtype(keys.device.type)
    return keys.to(dtype), values.to(dtype)


def checked_text_config(config: Any) -> Any:
    """Return the configuration of the text model of `config`; UsageError names a property that is not supported."""
    if not hasattr(config, "get_text_config"):
        hint = "SpillCache(model.config, ...)"
        raise UsageError(f"config: a {type(config).__name__}, not the configuration of a transformers model", hint)
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise UsageError("is_encoder_decoder: encoder-decoder models are not supported", _HINT)
    for name, what in _REFUSED.items():
        if getattr(text, name, None):
            raise UsageError(f"{name}: {what} not supported", _HINT)
    for index, kind in enumerate(getattr(text, "layer_types", None) or []):
        if kind not in ("full_attention", "sliding_attention"):
            raise UsageError(f"layer_types: '{kind}' of layer {index} is not supported", _HINT)
    return text


def spilled_layers(config: Any, conversation_of: Any) -> list[Any]:
    """Returns the layers of a cache for a model with `config`, as transformers makes them, those of full attention spilled.

    `conversation_of(n, alone)` makes the conversation of n spilled layers; `alone`: there are no others. UsageError names
    what of the model is not supported.
    """
    text = checked_text_config(config)
    try:
        layers: list[Any] = DynamicCache(config=config).layers
    except (AttributeError, TypeError, ValueError) as error:
        raise UsageError(f"config: transformers makes no cache for a {text.model_type} model: {error}", _HINT) from error
    spilled = [index for index, layer in enumerate(layers) if type(layer) is DynamicLayer]
    for index, layer in enumerate(layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise UsageError(f"layer_types: layer {index} has no keys, but a {type(layer).__name__}", _HINT)
    if len(layers) != text.num_hidden_layers:
        raise UsageError(f"num_hidden_layers: only {len(layers)} of {text.num_hidden_layers} layers have keys", _HINT)
    if not spilled:
        hint = "use transformers' own cache, which is never longer than the window"
        raise UsageError("sliding_window: all layers have one, so there is nothing to spill", hint)
    conversation = conversation_of(len(spilled), len(spilled) == len(layers))
    for number, index in enumerate(spilled):
        layers[index] = SpillLayer(conversation, number)
    return layers


def _numbers(index: torch.Tensor) -> Int64s:
    found: Int64s = torch.as_tensor(index).cpu().numpy().astype(np.int64)
    return np.flatnonzero(found) if torch.as_tensor(index).dtype == torch.bool else found
