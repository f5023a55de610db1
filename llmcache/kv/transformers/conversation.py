"""Conversation: what the layers of a cache share, a store, a policy and an engine; and attention over them.

It begins with `DenseLayers`: every token attends to all, exactly, until there are more than `SpillSettings.full_tokens`. The
store takes over then, between two steps.

A prompt is attended to exactly, by transformers' own attention over the keys as they come, and stored layer by layer. So
are several tokens at once behind it (chunked prefill, assisted decoding, the next turn), over everything that is stored.
A single token attends to what the policy chooses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from llmcache.arrays import Floats, Int64s
from llmcache.errors import DataError, LlmcacheError, UsageError
from llmcache.kv.csd import PROFILES, CsdProfile
from llmcache.kv.pipeline import NO_TIMELINE, KvEngine, Timeline
from llmcache.kv.policies import policy_class
from llmcache.kv.policies.base import KvPolicy, PolicySettings
from llmcache.kv.spill import KvShape, SpillReader
from llmcache.kv.spill.raw import RawFile
from llmcache.kv.tiers import Gathered, KvStore, StoreConfig
from llmcache.kv.tiers.table import look
from llmcache.kv.transformers import sidecar
from llmcache.kv.transformers.dense import LENGTHS, NEVER, SHORT, DenseLayers, crossing
from llmcache.kv.transformers.tensors import TorchFastTier, as_array, as_tensor, cut_mask, dtype_name, first_tokens
from llmcache.memory import tightest

Output = tuple[torch.Tensor, torch.Tensor | None]
UNKNOWN_ID = -1
"""Id of a token that was given as an embedding."""
MEMORY_SHARE = 0.25
"""Of the memory that can be had when a cache with a spill file begins: so much keeps pages where nothing is said of it."""
GPU_SHARE = 0.5
"""Of a GPU's free memory, that short contexts may take: its weights are there already, and prompts need the rest."""
RECENT_BUDGETS = 2
"""Of the rows that were read lately so many token budgets stay in memory, for the next tokens attend to much the same."""

MEASURED_LAYERS, MEASURED_STEPS = 4, 5
"""More than the processor's cache holds of most models, and few enough to take no time."""

_OWN_NAME = re.compile(r"llmcache-[0-9a-f]{16}\.kv")


@dataclass(frozen=True)
class SpillSettings:
    """Settings of a cache, as `SpillCache` takes them; `chosen` are those of the policy. UsageError names what is wrong."""

    policy: type[KvPolicy]
    chosen: PolicySettings
    path: Path | None = None
    ssd: str = "file"
    sink_tokens: int | None = None
    window_tokens: int | None = None
    cpu_pages: int | None = None
    gpu_pages: int | None = None
    profile: CsdProfile = field(default_factory=lambda: PROFILES["none"])
    lookahead: bool = False
    exact: bool = True
    threads: int | None = None
    timeline: Timeline = NO_TIMELINE
    full_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("sink_tokens", "window_tokens", "cpu_pages", "gpu_pages", "threads", "full_tokens"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, (int, np.integer)):
                raise UsageError(f"{name}: {value!r} is not a whole number", f"for example {name}=1024")
        if self.gpu_pages is not None and self.gpu_pages < 1:
            raise UsageError(f"gpu_pages: must be at least 1, not {self.gpu_pages}", "omit it to use no gpu tier")
        if self.gpu_pages is not None and self.lookahead:
            raise UsageError(
                "gpu_pages: cannot be combined with lookahead, which fetches to the host", "give only one of them"
            )
        if self.full_tokens is not None and self.full_tokens < 0:
            raise UsageError(
                f"full_tokens: must be at least 0, not {self.full_tokens}", "use 0 to choose from the first token on"
            )
        if self.full_tokens and self.policy.needs_weights:
            hint = "omit full_tokens: this policy counts the attention of every step"
            raise UsageError(f"full_tokens: the policy {self.policy.name!r} must choose from the first token on", hint)
        # A shape of nothing: what does not fit whatever the model is must be said now, and not within its first step.
        self.chosen.check_store(self.store_config(KvShape("none", 1, 1, 1), 1, self.path))

    def store_config(self, shape: KvShape, batch: int, path: Path | None) -> StoreConfig:
        """Returns what the store of a model of `shape` is made from, with the spill file `path`.

        Sink and window are as the policy would have them unless given; the pool beside a file takes its share of memory, or
        the budget where that is more.
        """
        if self.ssd not in ("file", "csd"):
            raise UsageError(f"ssd: must be 'file' or 'csd', not {self.ssd!r}", "one of: file, csd")
        sink = self.policy.sink_tokens if self.sink_tokens is None else self.sink_tokens
        window = self.policy.window_tokens if self.window_tokens is None else self.window_tokens
        pages = self.cpu_pages
        if path is not None and pages is None:
            least = shape.pages_of(sink) + shape.pages_of(window), shape.pages_of(self.chosen.token_budget or 0)
            pages = max(*least, free_tokens(shape, batch) // shape.page_tokens)
        rows = RECENT_BUDGETS * (self.chosen.token_budget or 0)
        known = (shape, batch, sink, window, pages, path, self.ssd, self.profile)
        return StoreConfig(*known, threads=self.threads, cpu_rows=rows, interleaved=self.policy.interleaved)

    def most_full(self, shape: KvShape, batch: int, device: torch.device) -> int:
        """Returns how many tokens may be attended to fully where that is faster than choosing: as `full_tokens` says, or as
        far as they may be in memory.
        """
        if self.full_tokens is not None:
            return self.full_tokens
        if self.policy.needs_weights or self.gpu_pages is not None:
            return 0
        if device.type == "cuda":
            unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch keeps what was freed
            free_bytes = torch.cuda.mem_get_info(device)[0] + unused
            return int(GPU_SHARE * free_bytes) // (batch * shape.layers * shape.token_bytes)
        if self.cpu_pages is not None:
            return self.cpu_pages * shape.page_tokens
        return free_tokens(shape, batch) if self.path is not None else NEVER


def free_tokens(shape: KvShape, batch: int) -> int:
    """Returns how many tokens of each sequence fit `MEMORY_SHARE` of the memory to be had."""
    return int(MEMORY_SHARE * tightest().available_bytes) // (batch * shape.layers * shape.token_bytes)


def policy_settings(name: str, options: dict[str, Any]) -> tuple[type[KvPolicy], PolicySettings]:
    """Returns the policy called `name` and its settings made of `options`; UsageError names an option that it has not."""
    policy = policy_class(name)
    known = {entry.name for entry in dataclasses.fields(policy.settings_class)}
    for option in options:
        if option not in known:
            hint = f"settings of the policy {name!r}: {', '.join(sorted(known))}"
            raise UsageError(f"{option}: unknown setting of the cache and of its policy", hint)
    return policy, policy.settings_class(**options)


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

    def run_chosen(self, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> Output:
        """As `run`, of keys whose number differs from layer to layer: cuDNN plans for each number, some 20 ms a layer."""
        if self.query.device.type != "cuda":
            return self.run(key, value, mask)
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            return self.run(key, value, mask)


class Conversation:
    """A batch of sequences of equal length; begins with the first token, or as a file restores it, ends with `close`.

    `layers`: how many are spilled; `alone`: the model has no others, so that a step that failed can be taken back.
    """

    def __init__(self, settings: SpillSettings, layers: int, alone: bool = True) -> None:
        self.settings, self.layers, self.alone = settings, layers, alone
        self.model = "unidentified"
        self._unidentified: UsageError | None = None
        self._pid = os.getpid()
        self._noted: tuple[Int64s | None, Int64s | None] = None, None
        self._store: KvStore | None = None
        self.engine: KvEngine | None = None  # None before the first step
        self._dense: DenseLayers | None = None  # while it is short; the store has a beginning of it then, or nothing
        self._most_full, self._is_measured = 0, False
        self._own_file: Path | None = None  # in a directory, until it is closed
        self._padding_known = False
        self._is_restored = False
        self._done: set[int] = set()
        self._expected: int | None = None
        self._thread = 0  # the thread that runs the present step

    @property
    def length(self) -> int:
        """Tokens of each sequence, padding included."""
        if self._dense is not None:
            return self._dense.length
        return self._store.length if self._store is not None else 0

    @property
    def store(self) -> KvStore:
        """The store; UsageError before the first token."""
        if self._store is None:
            raise UsageError("cache: it is empty", "run the model with it first")
        return self._store

    @property
    def ids(self) -> Int64s:
        """Ids of the tokens [batch, tokens]; UsageError before the first."""
        return self.store.ids if self._dense is None else self._dense.ids

    @property
    def engine_ahead(self) -> KvEngine | None:
        """The engine, if layers are evaluated before their queries are there."""
        return self.engine if self.settings.lookahead and self.length > 0 and self._dense is None else None

    @property
    def memory_bytes(self) -> int:
        """Memory that keys and values take on the host, or while the context is short on the device; no index."""
        stored = self.store.memory_bytes if self.store.length else 0
        return stored + (0 if self._dense is None else self._dense.size_bytes)

    @property
    def needs_identity(self) -> bool:
        """True if the next token begins a spill file that may be restored later."""
        path = self.settings.path
        return self._store is None and path is not None and not path.is_dir()

    def identify(self, model: str | UsageError) -> None:
        """Set the identity of the model that the spill file will name, or why the model cannot be identified."""
        self._unidentified = model if isinstance(model, UsageError) else None
        self.model = "unidentified" if isinstance(model, UsageError) else model

    # Attention

    def expect(self, layer: int) -> None:
        """Note that attention of spilled layer `layer` comes next; UsageError if that of the previous layer did not come."""
        self._check_thread()
        if self._expected is not None:
            hint = "call enable(model) first; after an error, call reset() of the cache"
            raise UsageError("model: the attention hook is not active", hint)
        self._expected = layer

    def begin_step(self, ids: Int64s | None, positions: Int64s | None) -> None:
        """Notes the ids and positions of the tokens that come [batch, tokens], None for those that are not known.

        Forgets keys that did not come to attention because a forward pass was broken off between the two.
        """
        self._expected, self._noted, self._thread = None, (ids, positions), threading.get_ident()

    def check_step(self) -> None:
        """UsageError if a forward pass has ended and not all layers have attended."""
        self._check_thread()
        missing = self.layers - len(self._done) if self._done or self._expected is not None else 0
        if missing:
            hint = "call enable(model), call reset() of the cache, and run all layers"
            raise UsageError(f"model: {missing} of {self.layers} spilled layers did not run their attention", hint)

    def _check_thread(self) -> None:
        """UsageError if another thread has begun a forward pass since this one did."""
        if self._thread not in (0, threading.get_ident()):
            raise UsageError("cache: two threads use it at the same time", "give each thread a cache of its own")

    def attend(self, layer: int, call: Call) -> Output:
        """Return the output of attention in spilled layer `layer`, and store its keys and values."""
        self._check_thread()
        self._expected = None
        engine = self.engine or self._begin(call)
        self._check(layer, call)
        if not self._done:
            self._note_padding(engine.policy, call.mask)
            if self._dense is not None and not self._stays_full(call):
                self._hand_over(engine)
                self._dense = None
        if self._dense is not None:
            output = call.run(*self._dense.append(layer, call.key, call.value), call.mask)
        elif call.tokens > 1 or self.length == 0:
            output = self._attend_all(engine, layer, call)
        else:
            output = self._attend_chosen(engine, layer, call)
        if self.length:
            _refuse_backward(output[0])
        self._done.add(layer)
        if len(self._done) == self.layers:
            self._done = set()
            end = engine.finish_step if self._dense is None else self._dense.commit
            end(*self._tokens(call.tokens))
        return output

    def _stays_full(self, call: Call) -> bool:
        """Whether all is attended to in this step too; measures what is faster when that begins to matter."""
        tokens = self.length + call.tokens
        if SHORT < tokens <= self._most_full and not self._is_measured:
            self._most_full = min(self._most_full, break_even(self.settings, call))
            self._is_measured = True
        return tokens <= self._most_full

    def _hand_over(self, engine: KvEngine) -> None:
        """Gives the store the tokens that it has not; after an error it may be called again."""
        dense, store = self._dense, self.store
        if dense is None or store.length == dense.length:
            return
        none: Floats = np.empty((store.batch, store.shape.kv_heads, 0, store.shape.head_dim), np.float32)
        for layer in range(self.layers):
            if (start := store.layer_length(layer)) < dense.length:
                engine.prefill(layer, none, *map(as_array, dense.rows(layer, start)))
        engine.finish_step(dense.ids[:, store.length :], dense.positions[:, store.length :])

    def _check(self, layer: int, call: Call) -> None:
        if (self._dense or self.store).layer_length(layer) > self.length:
            self._take_back()
        shape, batch = self.store.shape, self.store.batch
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

    def _take_back(self) -> None:
        """Takes a step back that an error has broken off; DataError where that cannot be done."""
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
            sides = zip(_tensors(before, call), (keys, values), strict=True)
            keys, values = (torch.cat([old, new], 2) for old, new in sides)
        output = call.run(keys, values, call.mask)
        if before is not None:
            before.release()
        asked = call.query if engine.policy.needs_weights else call.query[:, :, :0]
        engine.prefill(layer, as_array(asked.float()), as_array(call.key), as_array(call.value))
        return output

    def _attend_chosen(self, engine: KvEngine, layer: int, call: Call) -> Output:
        queries = as_array(call.query[:, :, 0].float().contiguous())
        newest = as_array(call.key)
        gathered = engine.step(layer, queries, newest, as_array(call.value))
        keys, values = _tensors(gathered, call)
        mask = cut_mask(call.mask, gathered.positions, call.query)
        run = call.run if keys.shape[2] > self.length else call.run_chosen
        output = run(keys, values, mask)
        unseen = engine.unseen(layer, queries, newest)
        engine.attended(layer, _weights(call, keys, mask, output[1]) if engine.policy.needs_weights else None)
        gathered.release()
        return output if unseen is None else (_with_unseen(output[0], *unseen), output[1])

    def _note_padding(self, policy: KvPolicy, mask: torch.Tensor | None) -> None:
        """Tells the policy where sequences begin, until that cannot change any more: while one is all padding."""
        if not self._padding_known:
            policy.pad(first_tokens(mask, self.store.batch))
            self._padding_known = mask is None or bool((policy.first < mask.shape[3]).all())
            if self._is_restored:
                self._is_restored = False
                policy.restored()

    def _tokens(self, count: int) -> tuple[Int64s, Int64s]:
        """Ids and positions of the newest tokens, as the model got them."""
        shape = (self.store.batch, count)
        (ids, positions), self._noted = self._noted, (None, None)
        if ids is None or ids.shape != shape:
            ids = np.full(shape, UNKNOWN_ID, np.int64)
        if positions is None or positions.shape != shape:
            positions = np.broadcast_to(np.arange(self.length, self.length + count), shape)
        return ids, positions

    # Beginning and end

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
        self._most_full = settings.most_full(self._store.shape, batch, call.key.device)
        # A GPU attends to all that fits its memory faster than the host chooses.
        self._is_measured = settings.full_tokens is not None or call.key.device.type == "cuda"
        if self._stays_full(call):
            dense, store = DenseLayers(self.layers), self.store
            if store.length:  # what a file had that was restored
                for layer in range(self.layers):
                    gathered = store.gather(layer, store.everything)
                    dense.append(layer, *_tensors(gathered, call))
                    gathered.release()
                dense.commit(store.ids, store.positions)
            self._dense = dense
        return self.engine

    def _file(self) -> Path | None:
        """The spill file: one of its own where the path is a directory."""
        path = self.settings.path
        if path is None or not path.is_dir():
            return path
        _remove_orphans(path)
        self._own_file = path / f"llmcache-{secrets.token_hex(8)}.kv"
        return self._own_file

    def restore(self, dtype: str) -> None:
        """Continue the spill file, for the model that `identify` named and keys of type `dtype`.

        DataError: the file is of another model, or damaged.
        """
        path = self.settings.path
        if path is None or path.is_dir():
            raise UsageError("path: must name a spill file", "name the file that was saved")
        with SpillReader.open(path) as file:
            shape = dataclasses.replace(file.shape, model=self.model, layers=self.layers, dtype=dtype)
        batch = len(look(path, shape).sequences)
        self._store = KvStore.restore(path, self.settings.store_config(shape, batch, path))
        self._is_restored = True

    def save(self, sliding: list[Any]) -> None:
        """Writes what no page is full of yet, and the states of `sliding` layers: all or nothing; between steps only.

        UsageError: nothing would be left of it, as the spill file has no name of the user's.
        """
        store = self.store
        if self._own_file is not None or self.settings.path is None:
            raise UsageError("path: the cache has only a temporary spill file", "create the cache with the path of a file")
        if self._unidentified is not None:
            raise self._unidentified
        if self.engine is not None:
            self.engine.rest()
        if any((self._dense or store).layer_length(layer) > self.length for layer in range(self.layers)):
            self._take_back()
        if self.engine is not None:
            self._hand_over(self.engine)
        try:
            store.save(sidecar.write(self.settings.path, store, sliding))
        finally:
            sidecar.prune(self.settings.path, store)
        if self.engine is not None:
            self.engine.policy.saved()

    def close(self) -> None:
        """End it; a spill file that the user named stays. It may begin again.

        In a forked child nothing is closed or removed: the files are the parent's.
        """
        if os.getpid() != self._pid:
            return
        store, engine, self._store, self.engine, self._dense = self._store, self.engine, None, None, None
        self._done, self._expected, self._noted, self._padding_known = set(), None, (None, None), False
        self._is_restored = False
        if engine is not None:
            engine.close()
        own_file, self._own_file = self._own_file, None
        try:
            if store is not None:
                store.close()
        finally:
            if own_file is not None:  # an interrupt may have come before there was a store
                with contextlib.suppress(FileNotFoundError):
                    _remove(own_file)

    # Changing sequences

    def crop(self, tokens: int) -> None:
        """Cuts every sequence to its first `tokens`."""
        if self._store is not None and tokens < self.length:
            self._cut(tokens)

    def _cut(self, tokens: int) -> None:
        if self.engine is not None:
            self.engine.rest()
        if self._dense is not None:
            self._dense.crop(tokens)
        self.store.crop(min(tokens, self.store.length))
        self._padding_known = False  # what follows may begin elsewhere, if nothing but padding is left
        if self.engine is not None:
            self.engine.policy.cropped(tokens)

    def choose(self, index: Int64s) -> None:
        """Makes sequence i what sequence `index[i]` was; there may be more or fewer than before."""
        if self._store is None:
            return
        if self.engine is not None:
            self.engine.rest()
        if self._dense is not None:
            self._store.crop(self._store.length)  # of a hand-over that an error has broken off
            self._dense.choose(index)
        self._store.select(index)
        if self.engine is not None:
            self.engine.policy.reordered(index)


def broken_off() -> DataError:
    """What is raised where layers are in the middle of a step that cannot be taken back."""
    hint = "call reset() of the cache and start again: sliding layers cannot go back"
    return DataError("cache: the model stopped in the middle of an earlier step", hint)


# The break-even


def no_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *arguments: Any, **options: Any
) -> Output:
    """Attends to nothing, for prompts whose keys are all that matters."""
    batch, heads, tokens, _ = query.shape
    return value.new_zeros(()).expand(batch, tokens, heads, value.shape[3]), None


_known: dict[Any, int] = {}


def break_even(settings: SpillSettings, call: Call) -> int:
    """Returns up to how many tokens a decode step attends to all in less time than the policy chooses some of them.

    `call`: any of this model's. *Measured* on keys drawn by chance, once in a process for each kind of model, settings and
    batch, in some tenths of a second; rounded up to a power of two, as a process like this one shall find the same.
    """
    settings = dataclasses.replace(
        settings, path=None, ssd="file", cpu_pages=None, gpu_pages=None, lookahead=False, timeline=NO_TIMELINE
    )
    shapes = (call.query.shape[:2], *(side.shape[1::2] for side in (call.key, call.value)))
    kind = (settings, shapes, call.key.dtype, call.key.device)
    if kind not in _known:
        both = (dataclasses.replace(settings, full_tokens=full) for full in (NEVER, 0))
        found = crossing(*([_layer_s(one, call, tokens) for tokens in LENGTHS] for one in both))
        _known[kind] = found if found in (0, NEVER) else 1 << max(0, found - 1).bit_length()
    return max(SHORT, _known[kind])


def _layer_s(settings: SpillSettings, call: Call, tokens: int) -> float:
    """Seconds of a layer in the middle of some steps after `tokens`; not the first of them, which compiles or indexes."""
    random = torch.Generator().manual_seed(0)
    keys, values = (
        torch.randn((*side.shape[:2], tokens, side.shape[3]), generator=random).to(side.device, side.dtype)
        for side in (call.key, call.value)
    )
    query, key, value = (side[:, :, -1:] for side in (call.query, call.key, call.value))
    once = dataclasses.replace(call, query=query, key=key, value=value, mask=None)
    prompt = dataclasses.replace(once, query=query.expand(-1, -1, tokens, -1), key=keys, value=values, stock=no_attention)
    measured, taken = Conversation(settings, MEASURED_LAYERS), []
    try:
        with torch.no_grad():
            for one in (prompt, *[once] * (MEASURED_STEPS + 1)):
                begin_s = time.perf_counter()
                for layer in range(measured.layers):
                    measured.attend(layer, one)
                taken.append(time.perf_counter() - begin_s)
    finally:
        measured.close()
    return statistics.median(taken[2:]) / measured.layers


def _remove_orphans(directory: Path) -> None:
    """Takes away the files of caches whose processes were killed: nobody holds their locks."""
    for path in directory.iterdir():
        if _OWN_NAME.fullmatch(path.name):
            with contextlib.suppress(LlmcacheError, OSError):  # in use, or another user's
                file = RawFile(path, os.O_RDWR)
                try:
                    file.lock()
                    _remove(path)
                finally:
                    file.close()


def _remove(path: Path) -> None:
    """Takes away a spill file that nobody named, with all that has its name behind one of its own: tables, new files."""
    for other in path.parent.iterdir():
        if other.name.endswith(f"-{path.name}"):
            other.unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def _refuse_backward(output: torch.Tensor) -> None:
    """Makes a backward pass through attention to stored keys an error: they are copies, through which nothing flows."""

    def refuse(gradient: torch.Tensor) -> None:
        raise UsageError("backward: a SpillCache does not support gradients", "train with transformers' own cache")

    if output.requires_grad:
        output.register_hook(refuse)


def _tensors(gathered: Gathered, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    if torch.is_tensor(gathered.keys):
        return gathered.keys, gathered.values
    keys, values = (as_tensor(side, call.key.dtype, call.key.device) for side in (gathered.keys, gathered.values))
    return keys, values


def _with_unseen(output: torch.Tensor, shares: Floats, values: Floats) -> torch.Tensor:
    """Returns an output [batch, 1, heads, dim] of which `shares` [batch, heads] go to `values` [batch, kv_heads, dim]."""
    each = np.repeat(values, shares.shape[1] // values.shape[1], axis=1)
    target, share = (torch.from_numpy(side).to(output.device) for side in (each[:, None], shares[:, None, :, None]))
    found = torch.lerp(output.float(), target, share)
    return found.to(output.dtype)


def _weights(call: Call, keys: torch.Tensor, mask: torch.Tensor | None, weights: torch.Tensor | None) -> Floats:
    """Weights of attention [batch, heads, k]: those of the model if it gives any, else computed again."""
    if weights is None:
        batch, heads, _, dim = call.query.shape
        grouped = call.query.float().view(batch, keys.shape[1], -1, dim)
        scores = (grouped @ keys.float().transpose(2, 3)).view(batch, heads, 1, -1)
        scores = scores * (call.options.get("scaling") or dim**-0.5)
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, torch.finfo(torch.float32).min)
        elif mask is not None:
            scores = scores + mask
        weights = scores.softmax(-1)
    return as_array(weights[:, :, 0].float().contiguous())
