"""Conversation: the store, policy and engine that the layers of a cache share, and attention over them.

A conversation starts in `DenseLayers`, with full attention. When the context exceeds `SpillSettings.full_tokens`, the
store takes over between two steps.

Prompts and several new tokens at once (chunked prefill, assisted decoding, the next turn) get full attention over all
stored tokens. A single new token attends to the tokens that the policy chooses. Each layer stores its new keys and
values right after its attention.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import secrets
import shutil
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llmcache.arrays import Floats, Int64s
from llmcache.errors import DataError, LlmcacheError, UsageError
from llmcache.kv.pipeline import NO_TIMELINE, KvEngine
from llmcache.kv.policies.base import KvPolicy
from llmcache.kv.spill import KvShape, SpillReader
from llmcache.kv.spill.raw import RawFile
from llmcache.kv.tiers import KvStore
from llmcache.kv.tiers.table import snapshot_of
from llmcache.kv.transformers import sidecar
from llmcache.kv.transformers.dense import LENGTHS, NEVER, SHORT, SPILLED, DenseLayers, crossing
from llmcache.kv.transformers.settings import MemoryBudget, SpillSettings
from llmcache.kv.transformers.tensors import (
    Call,
    Output,
    TorchFastTier,
    as_array,
    dtype_name,
    first_tokens,
    refuse_backward,
    with_unseen,
)
from llmcache.units import format_size

UNKNOWN_ID = -1  # id of a token that the model received as an embedding
GPU_SHARE = 0.5  # share of a GPU's free memory for short contexts; prompts need the rest
MEASURED_LAYERS, MEASURED_STEPS = 4, 5
"""Number of layers and steps in a measurement; for most models, these layers exceed the CPU cache."""

log = logging.getLogger("llmcache.kv")
_OWN_NAME = re.compile(r"llmcache-[0-9a-f]{16}\.kv")


class Conversation:
    """A batch of sequences of equal length. It begins with the first token or a restored file, and ends with `close`.

    `layers` is the number of spilled layers. If the model is `alone` (it has no others), a failed step can be rolled back.
    """

    def __init__(self, settings: SpillSettings, layers: int, alone: bool = True) -> None:
        self.settings, self.layers, self.alone = settings, layers, alone
        self.model = "unidentified"
        self._unidentified: UsageError | None = None
        self._pid = os.getpid()
        self._step_tokens: tuple[Int64s | None, Int64s | None] = None, None
        self._store: KvStore | None = None
        self.engine: KvEngine | None = None  # None before the first step
        self._dense: DenseLayers | None = None  # while the context is short; the store then has its beginning, or nothing
        self._most_full, self._is_measured = 0, False
        self._budget: MemoryBudget | None = None
        self._fitted = 0  # the tokens up to which the division of the memory is valid
        self._own_file: Path | None = None  # a temporary file in a directory
        self._padding_known = False
        self._is_restored = False
        self._done: set[int] = set()
        self._expected: int | None = None
        self.in_step = False  # a forward pass has begun and not ended
        self._thread = 0  # the thread that runs the present step

    @property
    def length(self) -> int:
        if self._dense is not None:
            return self._dense.length
        return self._store.length if self._store is not None else 0

    @property
    def store(self) -> KvStore:
        if self._store is None:
            raise UsageError("cache: it is empty", "run the model with it first")
        return self._store

    @property
    def ids(self) -> Int64s:
        return self.store.ids if self._dense is None else self._dense.ids

    @property
    def engine_ahead(self) -> KvEngine | None:
        return self.engine if self.settings.lookahead and self.length > 0 and self._dense is None else None

    @property
    def memory_bytes(self) -> int:
        stored = self.store.memory_bytes if self.store.length else 0
        return stored + (0 if self._dense is None else self._dense.size_bytes)

    def describe(self) -> str:
        name = self.settings.policy.name
        if self._store is None or self.engine is None:
            return f"{name}, empty"
        store, policy = self._store, self.engine.policy
        held = format_size(self.memory_bytes + policy.index_bytes)
        limit = "" if self._budget is None else f" of {format_size(self._budget.memory_bytes)}"
        full = "any length" if self._most_full >= NEVER else f"up to {self._most_full:,} tokens"
        parts = [name, f"{self.length:,} tokens", f"{held}{limit} in memory", f"full attention {full}"]
        if self._budget is not None and not self._budget.flexible:
            parts.append(f"at most {self._budget.longest:,} tokens")
        if store.config.path is not None:
            if self._dense is None:
                parts.append(f"then {store.config.cpu_pages} pages of {store.shape.page_tokens} tokens per layer")
            parts.append(f"SSD file {store.config.path}")
            with contextlib.suppress(OSError):
                free = shutil.disk_usage(store.config.path.parent).free
                parts[-1] += f" ({format_size(free)} free on its disk)"
        return ", ".join(parts)

    @property
    def needs_identity(self) -> bool:
        path = self.settings.path
        return self._store is None and path is not None and not path.is_dir()

    def identify(self, model: str | UsageError) -> None:
        self._unidentified = model if isinstance(model, UsageError) else None
        self.model = "unidentified" if isinstance(model, UsageError) else model

    # Attention

    def expect(self, layer: int) -> None:
        """Record that attention of spilled `layer` runs next; UsageError if that of the previous one did not run."""
        self._check_thread()
        if self._expected is not None:
            hint = "call enable(model) first; after an error, call reset() of the cache"
            raise UsageError("model: the attention hook is not active", hint)
        self._expected = layer

    def begin_step(self, ids: Int64s | None, positions: Int64s | None) -> None:
        """Record ids and positions [batch, tokens] of the new tokens; discard keys of a pass that failed earlier."""
        self._expected, self._step_tokens, self._thread = None, (ids, positions), threading.get_ident()
        if self._budget is not None and self._dense is None and ids is not None:
            self._budget.check(self.length + ids.shape[1])
        self.in_step = True

    def check_step(self) -> None:
        self._check_thread()
        self.in_step = False
        missing = self.layers - len(self._done) if self._done or self._expected is not None else 0
        if missing:
            hint = "call enable(model), call reset() of the cache, and run all layers"
            raise UsageError(f"model: {missing} of {self.layers} spilled layers did not run their attention", hint)

    def _check_thread(self) -> None:
        if self._thread not in (0, threading.get_ident()):
            raise UsageError("cache: two threads use it at the same time", "give each thread a cache of its own")

    def attend(self, layer: int, call: Call) -> Output:
        self._check_thread()
        self._expected = None
        engine = self.engine or self._begin(call)
        self._check(layer, call)
        if not self._done:
            self._update_padding(engine.policy, call.mask)
            if self._dense is not None and not self._stays_full(call):
                if self._budget is not None:
                    self._budget.check(self.length + call.tokens)
                self._hand_over(engine)
                self._dense, self._fitted = None, 0
            if self._dense is None:
                self._fit(self.length + call.tokens)
        if self._dense is not None:
            output = call.run(*self._dense.append(layer, call.key, call.value), call.mask)
        elif call.tokens > 1 or self.length == 0:
            output = self._attend_all(engine, layer, call)
        else:
            output = self._attend_chosen(engine, layer, call)
        if self.length:
            refuse_backward(output[0])
        self._done.add(layer)
        if len(self._done) == self.layers:
            self._done = set()
            end = engine.finish_step if self._dense is None else self._dense.commit
            end(*self._tokens(call.tokens))
        return output

    def _stays_full(self, call: Call) -> bool:
        """Return whether this step has full attention; measure the break-even once the context exceeds `SHORT`."""
        tokens = self.length + call.tokens
        if SHORT < tokens <= self._most_full and not self._is_measured:
            # With small pools, selected tokens would be read from the file.
            reads = self.settings.cpu_pages is not None and self.settings.cpu_pages * self.store.shape.page_tokens < SPILLED
            self._most_full = min(self._most_full, max(break_even(self.settings, call), SPILLED if reads else 0))
            self._is_measured = True
        return tokens <= self._most_full

    def _fit(self, tokens: int) -> None:
        if self._budget is None or tokens <= self._fitted:
            return
        if self._dense is None:
            self._budget.check(tokens)
        ahead = self._budget.horizon(tokens)
        dense_bytes = self._dense.size_bytes if self._dense is not None and self._dense.is_on_host else 0
        self._budget.restrict(ahead, dense_bytes)
        is_first, self._fitted = self._fitted == 0, ahead
        if is_first and self._dense is None:
            log.info("%s", self.describe())

    def _hand_over(self, engine: KvEngine) -> None:
        """Append to the store the tokens that only `_dense` has; the call can be repeated after an error."""
        dense, store = self._dense, self.store
        if dense is None or store.length == dense.length:
            return
        self._fitted = 0
        if store.lengths.max() == store.length:  # not after a failure
            self._fit(dense.length)
        none: Floats = np.empty((store.batch, store.shape.kv_heads, 0, store.shape.head_dim), np.float32)
        for layer in range(self.layers):
            if (start := store.layer_length(layer)) < dense.length:
                engine.prefill(layer, none, *map(as_array, dense.rows(layer, start)))
        engine.finish_step(dense.ids[:, store.length :], dense.positions[:, store.length :])

    def _check(self, layer: int, call: Call) -> None:
        if (self._dense or self.store).layer_length(layer) > self.length:
            self._roll_back()
        shape, batch = self.store.shape, self.store.batch
        if call.mask is not None and call.mask.shape[3] != self.length + call.tokens:
            covers = f"covers {call.mask.shape[3]} keys instead of {self.length + call.tokens}"
            raise UsageError(f"model: its attention mask {covers}", "use transformers' own cache for this model")
        if len(call.query) != batch:
            raise UsageError(
                f"batch: must be the {batch} sequences of the cache, not {len(call.query)}",
                "call reset() of the cache first",
            )
        if (call.key.shape[1], call.key.shape[3]) != (shape.kv_heads, shape.head_dim):
            heads, dim = call.key.shape[1], call.key.shape[3]
            has = f"but the cache {shape.kv_heads} of {shape.head_dim}"
            raise UsageError(f"model: has {heads} key heads of {dim} dimensions, {has}", "call reset() of the cache first")
        if (dtype := dtype_name(call.key.dtype)) != shape.dtype:
            raise UsageError(
                f"dtype: keys are {dtype}, but those of the cache {shape.dtype}", "call reset() of the cache first"
            )

    def _roll_back(self) -> None:
        if not self.alone:
            raise broken_off()
        self._done = set()
        self._cut(self.length)

    def _attend_all(self, engine: KvEngine, layer: int, call: Call) -> Output:
        keys, values, before = call.key, call.value, None
        if self.length:
            engine.rest()
            store = self.store
            before = store.gather(layer, store.everything)
            sides = zip(call.tensors(before), (keys, values), strict=True)
            keys, values = (torch.cat([old, new], 2) for old, new in sides)
        output = call.run(keys, values, call.mask)
        if before is not None:
            before.release()
        queries, *new = call.arrays(with_queries=engine.policy.needs_weights)
        engine.prefill(layer, queries, *new)
        return output

    def _attend_chosen(self, engine: KvEngine, layer: int, call: Call) -> Output:
        queries, newest, values = call.arrays()
        gathered = engine.step(layer, queries[:, :, 0], newest, values)
        output, weights = call.run_chosen(gathered, self.length, engine.policy.needs_weights)
        unseen = engine.unseen(layer, queries[:, :, 0], newest)
        engine.attended(layer, weights)
        gathered.release()
        return output if unseen is None else (with_unseen(output[0], *unseen), output[1])

    def _update_padding(self, policy: KvPolicy, mask: torch.Tensor | None) -> None:
        if not self._padding_known:
            policy.pad(first_tokens(mask, self.store.batch))
            self._padding_known = mask is None or bool((policy.first < mask.shape[3]).all())
            if self._is_restored:
                self._is_restored = False
                policy.restored()

    def _tokens(self, count: int) -> tuple[Int64s, Int64s]:
        shape = (self.store.batch, count)
        (ids, positions), self._step_tokens = self._step_tokens, (None, None)
        if ids is None or ids.shape != shape:
            ids = np.full(shape, UNKNOWN_ID, np.int64)
        if positions is None or positions.shape != shape:
            positions = np.broadcast_to(np.arange(self.length, self.length + count), shape)
        return ids, positions

    # Opening and closing

    def _begin(self, call: Call) -> KvEngine:
        batch, kv_heads, _, head_dim = call.key.shape
        if self._store is None:
            shape = KvShape(
                self.model, self.layers, kv_heads, head_dim, dtype_name(call.key.dtype), value_dim=call.value.shape[3]
            )
            self._store = KvStore(self.settings.store_config(shape, batch, self._file()))
        settings, chosen = self.settings, self.settings.chosen
        if chosen.scale is None:
            chosen = dataclasses.replace(chosen, scale=call.options.get("scaling"))
        policy = settings.policy(self._store, chosen, settings.timeline)
        pages = settings.gpu_pages
        fast = None if pages is None else TorchFastTier(pages, call.key.dtype, call.key.device)
        app, exact = settings.lookahead, settings.exact
        self.engine = KvEngine(self._store, policy, app=app, exact=exact, fast=fast, timeline=settings.timeline)
        self._budget, self._fitted = settings.memory_budget(policy), 0
        if self._budget is not None:
            self._budget.restrict(self.length)
        self._most_full = self._longest_full(call.key.device)
        # On a GPU, full attention is faster as long as the context fits in its memory.
        self._is_measured = settings.full_tokens is not None or call.key.device.type == "cuda"
        if self._stays_full(call):
            dense, store = DenseLayers(self.layers), self.store
            if store.length:  # the tokens of a restored file
                for layer in range(self.layers):
                    gathered = store.gather(layer, store.everything)
                    dense.append(layer, *call.tensors(gathered))
                    gathered.release()
                dense.commit(store.ids, store.positions)
                self._fitted = 0
            self._dense = dense
        if self._dense is not None or self._budget is None:
            log.info("%s", self.describe())
        return self.engine

    def _longest_full(self, device: torch.device) -> int:
        settings, store = self.settings, self.store
        most = NEVER if settings.full_tokens is None else settings.full_tokens
        if settings.full_tokens is None and (settings.policy.needs_weights or settings.gpu_pages is not None):
            most = 0
        elif settings.full_tokens is None and device.type == "cuda":
            unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch keeps freed memory
            free_bytes = torch.cuda.mem_get_info(device)[0] + unused
            most = int(GPU_SHARE * free_bytes) // (store.batch * store.shape.layers * store.shape.token_bytes)
        elif settings.full_tokens is None and settings.cpu_pages is not None:
            most = max(SPILLED, settings.cpu_pages * store.shape.page_tokens)
        if self._budget is not None and device.type != "cuda" and (most == NEVER or not self._budget.flexible):
            most = min(most, max(0, self._budget.full_tokens))
        return most

    def _file(self) -> Path | None:
        path = self.settings.path
        if path is None or not path.is_dir():
            return path
        _remove_orphans(path)
        self._own_file = path / f"llmcache-{secrets.token_hex(8)}.kv"
        return self._own_file

    def restore(self, dtype: str) -> None:
        """Continue the spill file, for the model that `identify` named and keys of type `dtype`."""
        path = self.settings.path
        if path is None or path.is_dir():
            raise UsageError("path: must name a spill file", "name the file that was saved")
        with SpillReader.open(path) as file:
            shape = dataclasses.replace(file.shape, model=self.model, layers=self.layers, dtype=dtype)
        batch = len(snapshot_of(path, shape).sequences)
        self._store = KvStore.restore(path, self.settings.store_config(shape, batch, path))
        self._is_restored = True

    def save(self, sliding: list[Any]) -> None:
        store = self.store
        if self._own_file is not None or self.settings.path is None:
            raise UsageError("path: the cache has only a temporary spill file", "create the cache with the path of a file")
        if self._unidentified is not None:
            raise self._unidentified
        if self.engine is not None:
            self.engine.rest()
        if any((self._dense or store).layer_length(layer) > self.length for layer in range(self.layers)):
            self._roll_back()
        if self.engine is not None:
            self._hand_over(self.engine)
        try:
            store.save(sidecar.write(self.settings.path, store, sliding))
        finally:
            sidecar.prune(self.settings.path, store)
        if self.engine is not None:
            self.engine.policy.saved()

    def close(self) -> None:
        """Close the conversation, and keep a spill file that the user named. The next token starts a new one.

        A forked child closes and removes nothing, because the files belong to the parent.
        """
        if os.getpid() != self._pid:
            return
        store, engine, self._store, self.engine, self._dense = self._store, self.engine, None, None, None
        self._done, self._expected, self._step_tokens, self._padding_known = set(), None, (None, None), False
        self._is_restored = self.in_step = False
        if engine is not None:
            engine.close()
        own_file, self._own_file = self._own_file, None
        try:
            if store is not None:
                store.close()
        finally:
            if own_file is not None:  # it may exist without a store after an interrupt
                with contextlib.suppress(FileNotFoundError):
                    _remove(own_file)

    # Changing sequences

    def crop(self, tokens: int) -> None:
        if self._store is not None and tokens < self.length:
            self._cut(tokens)

    def _cut(self, tokens: int) -> None:
        if self.engine is not None:
            self.engine.rest()
        if self._dense is not None:
            self._dense.crop(tokens)
        self.store.crop(min(tokens, self.store.length))
        self._padding_known = False  # a sequence may consist of padding only again
        if self.engine is not None:
            self.engine.policy.cropped(tokens)

    def choose(self, index: Int64s) -> None:
        if self._store is None:
            return
        if self.engine is not None:
            self.engine.rest()
        if self._dense is not None:
            self._store.crop(self._store.length)  # undo a hand-over that failed halfway
            self._dense.choose(index)
        before = self._store.batch
        self._store.select(index)
        if self.engine is not None:
            self.engine.policy.reordered(index)
        if self._store.batch != before:
            self._fitted = 0


def broken_off() -> DataError:
    """Return the error for a step that failed halfway and cannot be rolled back."""
    hint = "call reset() of the cache and start again: sliding layers cannot go back"
    return DataError("cache: the model stopped in the middle of an earlier step", hint)


# The break-even


def no_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *arguments: Any, **options: Any
) -> Output:
    """Return zeros: attention for prompts of which only the keys and values are needed."""
    batch, heads, tokens, _ = query.shape
    return value.new_zeros(()).expand(batch, tokens, heads, value.shape[3]), None


_break_evens: dict[Any, int] = {}


def break_even(settings: SpillSettings, call: Call) -> int:
    """Return the largest context, in tokens, at which full attention is faster than choosing tokens.

    *Measured* on random keys with the shapes of `call`, once in a process for each combination of settings, shapes, type and
    device; takes some tenths of a second. Rounded up to a power of two, so that similar runs get the same result.
    """
    settings = dataclasses.replace(
        settings,
        path=None,
        ssd="file",
        memory_bytes=None,
        cpu_pages=None,
        gpu_pages=None,
        lookahead=False,
        timeline=NO_TIMELINE,
    )
    shapes = (call.query.shape[:2], *(side.shape[1::2] for side in (call.key, call.value)))
    kind = (settings, shapes, call.key.dtype, call.key.device)
    if kind not in _break_evens:
        both = (dataclasses.replace(settings, full_tokens=full) for full in (NEVER, 0))
        found = crossing(*([_layer_s(one, call, tokens) for tokens in LENGTHS] for one in both))
        _break_evens[kind] = found if found in (0, NEVER) else 1 << max(0, found - 1).bit_length()
    return max(SHORT, _break_evens[kind])


def _layer_s(settings: SpillSettings, call: Call, tokens: int) -> float:
    random = torch.Generator().manual_seed(0)
    keys, values = (
        torch.randn((*side.shape[:2], tokens, side.shape[3]), generator=random).to(side.device, side.dtype)
        for side in (call.key, call.value)
    )
    query, key, value = (side[:, :, -1:] for side in (call.query, call.key, call.value))
    decode = dataclasses.replace(call, query=query, key=key, value=value, mask=None)
    prompt = dataclasses.replace(decode, query=query.expand(-1, -1, tokens, -1), key=keys, value=values, stock=no_attention)
    measured, taken = Conversation(settings, MEASURED_LAYERS), []
    try:
        with torch.no_grad():
            for call_ in (prompt, *[decode] * (MEASURED_STEPS + 1)):
                begin_s = time.perf_counter()
                for layer in range(measured.layers):
                    measured.attend(layer, call_)
                taken.append(time.perf_counter() - begin_s)
    finally:
        measured.close()
    return statistics.median(taken[2:]) / measured.layers


def _remove_orphans(directory: Path) -> None:
    """Remove the temporary files of caches whose processes were killed: their locks are free."""
    for path in directory.iterdir():
        if _OWN_NAME.fullmatch(path.name):
            with contextlib.suppress(LlmcacheError, OSError):  # in use, or owned by another user
                file = RawFile(path, os.O_RDWR)
                try:
                    file.lock()
                    _remove(path)
                finally:
                    file.close()


def _remove(path: Path) -> None:
    for other in path.parent.iterdir():
        if other.name.endswith(f"-{path.name}"):
            other.unlink(missing_ok=True)
    path.unlink(missing_ok=True)
