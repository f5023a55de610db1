"""Conversation: what the layers of a cache share, a store, a policy and an engine; and attention over them.

A prompt is attended to exactly, by transformers' own attention over the keys as they come, and stored layer by layer. So
are several tokens at once behind it (chunked prefill, assisted decoding, the next turn), over everything that is stored.
A single token attends to what the policy chooses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmcache.errors import DataError, UsageError
from llmcache.kv.pipeline import KvEngine
from llmcache.kv.policies.base import KvPolicy
from llmcache.kv.spill import KvShape
from llmcache.kv.tiers import Gathered, KvStore, Selection
from llmcache.kv.transformers.masks import cut_mask, first_tokens
from llmcache.kv.transformers.settings import SpillSettings
from llmcache.kv.transformers.views import as_array, as_tensor, dtype_name

Numbers = NDArray[np.int64]
Output = tuple[torch.Tensor, torch.Tensor | None]
UNKNOWN_ID = -1
"""Id of a token that was given as an embedding."""

_numbers = itertools.count()


@dataclass
class Call:
    """A call of an attention function of transformers: `stock` is its own, `options` all other arguments.

    `query` [batch, heads, tokens, dim], `key` and `value` [batch, kv_heads, tokens, dim] of the new tokens alone; `mask`
    [batch or 1, heads or 1, tokens, all tokens], None where nothing is hidden but what comes later.
    """

    module: Any
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    options: dict[str, Any]
    stock: Callable[..., Output]

    @property
    def tokens(self) -> int:
        """New tokens of each sequence."""
        return int(self.query.shape[2])

    def run(self, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> Output:
        """Returns what transformers makes of other keys, values and mask."""
        return self.stock(self.module, self.query, key, value, mask, **self.options)


@dataclass
class _Running:
    """What there is from the first token on."""

    store: KvStore
    policy: KvPolicy
    engine: KvEngine
    device: torch.device
    dtype: torch.dtype
    remove: Path | None


class Conversation:
    """A batch of sequences of equal length; begins with the first token, ends with `close`."""

    def __init__(self, settings: SpillSettings, model: str, layers: int) -> None:
        self.settings, self.model, self.layers = settings, model, layers
        self.noted: tuple[Numbers, Numbers | None] | None = None
        self._running: _Running | None = None
        self._done: set[int] = set()
        self._expected: int | None = None

    @property
    def length(self) -> int:
        """Tokens of each sequence, padding included."""
        return self._running.store.length if self._running else 0

    @property
    def looks_ahead(self) -> bool:
        """True if layers are evaluated before their queries are there; not for the first token."""
        return self.settings.lookahead and self.length > 0

    @property
    def store(self) -> KvStore:
        """The store; UsageError before the first token."""
        return self._now.store

    @property
    def policy(self) -> KvPolicy:
        """The policy; UsageError before the first token."""
        return self._now.policy

    @property
    def engine(self) -> KvEngine:
        """The engine; UsageError before the first token."""
        return self._now.engine

    @property
    def _now(self) -> _Running:
        if self._running is None:
            raise UsageError("cache: it is empty, nothing is known of its keys", "run the model with it first")
        return self._running

    # Attention

    def expect(self, layer: int) -> None:
        """Notes that attention of spilled layer `layer` comes next; UsageError if that of the one before never came."""
        if self._expected is not None:
            hint = "call enable(model) before, and after an error reset() the cache"
            raise UsageError("model: keys that were given to the cache did not come to its attention", hint)
        self._expected = layer

    def attend(self, layer: int, call: Call) -> Output:
        """Returns the output of attention in spilled layer `layer`, and stores its keys and values."""
        self._expected = None
        if self._running is None:
            self._running = self._begin(call)
        self._check(layer, call)
        if not self._done:
            self._note_padding(call.mask)
        whole = call.tokens > 1 or self.length == 0
        output = self._attend_all(layer, call) if whole else self._attend_chosen(layer, call)
        self._done.add(layer)
        if len(self._done) == self.layers:
            self._done = set()
            self.engine.finish_step(*self._tokens(call.tokens))
        return output

    def _check(self, layer: int, call: Call) -> None:
        if layer in self._done:
            raise DataError("cache: the model stopped in the middle of a step before", "reset() the cache and begin anew")
        if len(call.query) != self.store.batch:
            raise UsageError(f"batch: {len(call.query)} sequences, the cache has {self.store.batch}", "reset() it before")

    def _attend_all(self, layer: int, call: Call) -> Output:
        keys, values, before = call.key, call.value, None
        if self.length:
            self.engine.rest()
            store = self.store
            everything = Selection.of_all(store.middle, store.batch, store.shape.kv_heads, store.shape.page_tokens)
            before = store.gather(layer, everything)
            sides = zip(self._tensors(before), (keys, values), strict=True)
            keys, values = (torch.cat([old, new], 2) for old, new in sides)
        output = call.run(keys, values, call.mask)
        if before is not None:
            before.release()
        self.engine.prefill(layer, as_array(call.query.float()), as_array(call.key), as_array(call.value))
        return output

    def _attend_chosen(self, layer: int, call: Call) -> Output:
        queries = as_array(call.query[:, :, 0].float().contiguous())
        gathered = self.engine.step(layer, queries, as_array(call.key), as_array(call.value))
        keys, values = self._tensors(gathered)
        mask = cut_mask(call.mask, gathered.positions, call.query.shape[1])
        output = call.run(keys, values, mask)
        self.engine.attended(layer, self._weights(call, keys, mask, output) if self.policy.needs_weights else None)
        gathered.release()
        return output

    def _weights(
        self, call: Call, keys: torch.Tensor, mask: torch.Tensor | None, output: Output
    ) -> NDArray[np.float32]:
        """Weights of attention [batch, heads, k]: those of the model if it gives any, else computed again."""
        weights = output[1]
        if weights is None:
            batch, heads, _, dim = call.query.shape
            grouped = call.query.float().view(batch, keys.shape[1], -1, dim)
            scores = (grouped @ keys.float().transpose(2, 3)).view(batch, heads, 1, -1) * self.policy.scale
            if mask is not None:
                hidden = ~mask if mask.dtype == torch.bool else None
                scores = scores + mask if hidden is None else scores.masked_fill(hidden, torch.finfo(torch.float32).min)
            weights = scores.softmax(-1)
        return as_array(weights[:, :, 0].float().contiguous())

    def _tensors(self, gathered: Gathered) -> tuple[torch.Tensor, torch.Tensor]:
        now = self._now
        keys, values = (as_tensor(side, now.dtype, now.device) for side in (gathered.keys, gathered.values))
        return keys, values

    def _note_padding(self, mask: torch.Tensor | None) -> None:
        """Tells the policy where sequences begin, as long as that may change: while one is all padding."""
        if self.length == 0 or (self.policy.first >= self.length).any():
            self.policy.pad(first_tokens(mask, self.store.batch))

    def _tokens(self, count: int) -> tuple[Numbers, Numbers]:
        """Ids and positions of the newest tokens, as the model got them."""
        shape = (self.store.batch, count)
        ids, positions = self.noted or (np.empty(0, np.int64), None)
        self.noted = None
        if ids.shape != shape:
            ids = np.full(shape, UNKNOWN_ID, np.int64)
        if positions is None or positions.shape != shape:
            positions = np.broadcast_to(np.arange(self.length, self.length + count), shape)
        return ids, positions

    # Beginning and end

    def _begin(self, call: Call) -> _Running:
        path, remove = self._file()
        batch, kv_heads, _, head_dim = call.key.shape
        shape = KvShape(
            self.model, self.layers, kv_heads, head_dim, dtype_name(call.key.dtype), value_dim=call.value.shape[3]
        )
        chosen = self.settings.chosen
        if chosen.scale is None:
            chosen = dataclasses.replace(chosen, scale=call.options.get("scaling"))
        store = KvStore(self.settings.store_config(shape, batch, path))
        try:
            policy = self.settings.policy(store, chosen, self.settings.timeline)
        except BaseException:
            store.close()
            raise
        engine = self._engine(store, policy)
        return _Running(store, policy, engine, call.key.device, call.key.dtype, remove)

    def _engine(self, store: KvStore, policy: KvPolicy) -> KvEngine:
        settings = self.settings
        return KvEngine(store, policy, app=settings.lookahead, exact=settings.exact, timeline=settings.timeline)

    def _file(self) -> tuple[Path | None, Path | None]:
        """The spill file, and what is to be removed in the end: a file of its own where the path is a directory."""
        path = self.settings.path
        if path is None or not path.is_dir():
            return path, None
        own = path / f"llmcache-{os.getpid()}-{next(_numbers)}.kv"
        return own, own

    def close(self) -> None:
        """Ends it; a spill file that has a name of the user's stays. It may begin again."""
        running, self._running = self._running, None
        self._done, self._expected, self.noted = set(), None, None
        if running is None:
            return
        try:
            running.engine.close()
            running.store.close()
        finally:
            if running.remove is not None:
                with contextlib.suppress(OSError):
                    running.remove.unlink()

    # Changing sequences

    def crop(self, tokens: int) -> None:
        """Cuts every sequence to its first `tokens`."""
        if self._running is None or tokens >= self.length:
            return
        self.engine.rest()
        self.store.crop(tokens)
        self.policy.cropped(tokens)

    def choose(self, index: Numbers) -> None:
        """Makes sequence i what sequence `index[i]` was; there may be more or fewer than before."""
        if self._running is None:
            return
        self.engine.rest()
        self.store.select(index)
        self.policy.reordered(index)
