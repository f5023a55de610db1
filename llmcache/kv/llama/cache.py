"""PrefixCache: prompts that llama-cpp-python has evaluated, stored on disk and restored by prefix.

    llama.set_cache(PrefixCache("/mnt/nvme/kv", limit="20G"))

The name of a block of 256 tokens is a hash of the model's fingerprint and all tokens up to its end, so prompts with a common
prefix share its blocks (kv.prefix.store). The cache that `llama.set_cache` attaches to a Llama (kv.llama.attached) calls
this one before and after a prompt is evaluated and after its answer. To restore a prefix, the cache loads the state with
llama_state_seq_set_data and sets `input_ids` and `n_tokens`; `Llama` then evaluates only the rest. `Llama.load_state` takes
only whole contexts.

- Nothing is restored or stored until all bytes of the model's files are hashed, nor after one of them was changed.
- The last bits of llama.cpp's results depend on how many tokens are evaluated together. The last token of a prompt is always
  evaluated alone, so answers to new and restored prompts are identical.
- States that cannot be cut (kv.prefix.state) are stored whole, after 1, 2, 4, 8... blocks and after the last.
- Not supported: `echo` with `logprobs`, because scores are not stored; chat handlers with images, which have no tokens.
  Control vectors set through the C interface are not detected: use another directory for them.

Threads: only one thread uses a Llama at a time. It copies the state and passes it to a writer thread, which cuts and writes
it. One lock guards the writer's queue, another the counters that several Llamas share.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import json
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import BaseLlamaCache, Llama
from llama_cpp.llama import LlamaState
from numpy.typing import NDArray

from llmcache.arrays import Bytes
from llmcache.errors import LlmcacheError, MissingRequirement
from llmcache.kv.llama.attached import AttachedCache
from llmcache.kv.prefix.identity import FileIdentity
from llmcache.kv.prefix.metrics import openmetrics
from llmcache.kv.prefix.shared import SharedTier
from llmcache.kv.prefix.state import Joined, State, Uncut, read_state
from llmcache.kv.prefix.store import CUT, PART, WHOLE, Block, BlockKey, BlockStore
from llmcache.kv.spill.layout import aligned
from llmcache.kv.spill.raw import huge_memory
from llmcache.memory import tightest
from llmcache.model.tensors import shard_names
from llmcache.units import format_size, parse_duration, parse_size

log = logging.getLogger("llmcache.kv")

BLOCK_TOKENS = 256
LINKED_TOKENS = (128, 64, 32, 16)
"""Numbers of first tokens by which links find a block; blocks and common beginnings below the least are not used."""
LEAST_TOKENS = LINKED_TOKENS[-1]
FORMAT = 2
"""Version of fingerprints: increase it if their input or the layout of blocks changes."""
WAIT_S = 2.0
"""Time for which the first look-up of a Llama waits for the digests of its files."""
LOG_S = 60.0
"""Least interval between log lines about the same kind of failure."""
LEAST_ROOM_BYTES = 1 << 20
_READERS = 2
_ROPE = ("rope_scaling_type", "rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast")
_CACHE = ("type_k", "type_v", "flash_attn_type", "attention_type", "swa_full", "n_seq_max", "kv_unified")
_CONTEXT = (*_ROPE, "yarn_beta_slow", "yarn_orig_ctx", *_CACHE)
_U8 = ctypes.POINTER(ctypes.c_uint8)
_NOT_ATTACHED = "pass a PrefixCache to llama.set_cache, or call its methods restore() and keep() with a Llama"


@dataclass
class PrefixCounters:
    """Counters of a cache since its creation. `restore_s` is the time of restoring, including reads."""

    lookups: int = 0
    hits: int = 0
    restored_tokens: int = 0
    restored_bytes: int = 0
    restore_s: float = 0.0
    saved_s: float = 0.0  # estimated time to evaluate the restored tokens, less `restore_s`; 0 until the speed is measured
    stored_blocks: int = 0
    stored_bytes: int = 0
    dropped_blocks: int = 0


@dataclass
class _Model:
    """The model of a Llama, with its settings.

    `description` is the input of the fingerprint. `root`, the fingerprint in hexadecimal, takes the place of the previous
    block's name in the name of the first block; it is empty until the files are identified. `whole`: states cannot be cut.
    `refused`: why nothing is restored or stored.
    """

    description: dict[str, Any]
    whole: bool = False
    refused: str = ""
    files: tuple[FileIdentity, ...] = ()  # files of the model, and of a LoRA adapter
    root: str = ""
    has_waited: bool = False
    token_s: float = 0.0  # time to evaluate a token; 0 until it is measured

    @property
    def name(self) -> str:
        """Name of the directory of its blocks."""
        return self.root[:32]

    @property
    def usable(self) -> bool:
        """Whether prompts are restored and stored."""
        return bool(self.root) and not self.refused

    def identify(self, digests: list[str]) -> None:
        """Compute the fingerprint from the digests of `files`."""
        models = len(self.files) - (self.description["lora"] is not None)
        self.description["files"] = [
            [file.stamp.size_bytes, digest] for file, digest in zip(self.files[:models], digests, strict=False)
        ]
        if self.description["lora"] is not None:
            self.description["lora"] = [digests[-1], self.description["lora"][-1]]
        identity = {key: value for key, value in self.description.items() if key not in ("file", "name")}
        text = json.dumps(identity, sort_keys=True)
        self.root = hashlib.blake2b(text.encode(), digest_size=32).hexdigest()[:40]


@dataclass
class Task:
    """Blocks to write; `tokens` are all tokens of the prompt, and `block` cuts a block when it is written.

    `pushed`: also send the blocks to the shared tier (not if they come from it). `memory` has the copy of the state; it can
    be used again when `is_done`.
    """

    model: _Model
    keys: list[BlockKey]
    tokens: list[int]
    size_bytes: int
    block: Callable[[BlockKey], Block]
    pushed: bool = True
    memory: Bytes | None = None
    is_done: bool = False


class PrefixCache(BaseLlamaCache):
    """Store prompts below `directory`, for one Llama or several of any models. Processes may share the directory.

    Parameters
    ----------
    limit: Largest size of all blocks ("20G").
    ttl: Evict blocks that were not used for this duration ("30d").
    floor: Bytes of the file system to leave free; by default 1 GB, or 5 % of a smaller file system.
    queue: Largest size of the prompts that wait to be written, also limited to half of the available memory. Prompts that
        do not fit are not stored.
    shared: Address of a Redis-compatible server (redis://host:6379/0) that shares blocks between machines.
    deadline: Seconds for the requests of one prompt to that server.

    `close`, and the normal end of the process, write the queued blocks. Raises UsageError and MissingRequirement like
    `BlockStore` and `SharedTier`.
    """

    def __init__(
        self,
        directory: str | Path,
        limit: str | int = "20G",
        *,
        ttl: str | None = None,
        floor: str | int | None = None,
        queue: str | int = "1G",
        shared: str | None = None,
        deadline: float = 1.0,
    ) -> None:
        super().__init__(_bytes(limit))
        ttl_ns = parse_duration(ttl) if ttl else 0
        self.shared = SharedTier(shared, deadline, ttl_ns) if shared else None
        self.store = BlockStore(directory, _bytes(limit), ttl_ns, None if floor is None else _bytes(floor))
        if self.store.room_bytes() < LEAST_ROOM_BYTES:
            kept, limited = format_size(self.store.floor_bytes), format_size(self.store.limit_bytes)
            why = f"the limit is {limited}, and {kept} of the file system have to stay free (floor)"
            log.warning("%s: there is no room to store prompts: %s", directory, why)
        self.counters, self._counting = PrefixCounters(), threading.Lock()
        self._models: weakref.WeakKeyDictionary[Llama, _Model] = weakref.WeakKeyDictionary()
        self._writer = _Writer(self.store, self.shared, self.counters, _bytes(queue))

    # The interface of BaseLlamaCache

    @property
    def cache_size(self) -> int:
        """Bytes of all blocks in the directory."""
        return sum(entry.size_bytes for entry in self.store.entries())

    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        """Raise TypeError: this works only on the cache that `llama.set_cache` attaches to a Llama."""
        raise TypeError(_NOT_ATTACHED)

    def __contains__(self, key: object) -> bool:
        """Raise TypeError, as `cache[key]`."""
        raise TypeError(_NOT_ATTACHED)

    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None:
        """Raise TypeError, as `cache[key]`."""
        raise TypeError(_NOT_ATTACHED)

    def attached(self, llama: Llama) -> AttachedCache:
        """Return the cache that `llama.set_cache` attaches to `llama`, and start to identify the model's files."""
        if llama not in self._models:
            self._models[llama] = self._described(llama)
        return AttachedCache(self, llama)

    # Restoring and storing

    def restore(self, llama: Llama, tokens: Sequence[int]) -> int:
        """Restore the longest stored prefix of `tokens` into `llama`, and return its number of tokens.

        Return 0, without an effect, if none is stored that is longer than the one in the context. If states are stored
        whole, also evaluate `tokens` up to the last block boundary, store the states on the way, and return that boundary.
        """
        model = self._model(llama)
        if not model.usable:
            return 0
        started = time.perf_counter()
        with self._counting:
            self.counters.lookups += 1
        tokens = tokens[: llama.n_ctx()]
        live = _common(llama.input_ids[: llama.n_tokens], tokens)
        # The last token is evaluated again for its logits. It can be cut off a state of blocks, but not a whole state.
        keys = _keys(model, tokens[:-1] if model.whole else tokens)
        if model.whole and live < llama.n_tokens:
            live = 0
        stored = list(self._stored(keys, model.whole))
        fetched = self._fetched(model, keys, stored, tokens, live)
        found = 0
        while not found and (len(stored) + (not model.whole)) * BLOCK_TOKENS > live:
            before = len(stored)
            data, found, stored = (self._whole if model.whole else self._joined)(model, stored, tokens, live, fetched)
            if data is not None and not self._set(llama, data, tokens[:found]):
                log.warning("%s: llama.cpp rejected the stored state; its blocks were removed", model.description["file"])
                self.store.drop(stored)
                found, stored, fetched = 0, [], {}
            elif data is not None:
                self._account(model, stored, found, len(data), time.perf_counter() - started)
            elif len(stored) == before:
                break
            live = min(live, llama.n_tokens)
        if fetched := {key: block for key, block in fetched.items() if key in stored}:
            size = sum(len(block.payload) for block in fetched.values())
            self._writer.put(Task(model, list(fetched), list(tokens), size, fetched.__getitem__, pushed=False))
        if model.whole:
            return self._evaluated(llama, model, keys, tokens) or found
        return found

    def has_prefix(self, llama: Llama, tokens: Sequence[int]) -> bool:
        """Return whether a prefix of `tokens` is stored for `llama`."""
        model = self._model(llama)
        return model.usable and any(True for _ in self._stored(_keys(model, tokens), model.whole))

    def cuts(self, llama: Llama, tokens: int) -> bool:
        """Return whether a prompt with this number of tokens is stored for `llama`, in blocks."""
        model = self._model(llama)
        return tokens >= LEAST_TOKENS and not model.refused and not model.whole

    def make_room(self, size_bytes: int) -> bool:
        """Drop queued prompts until `size_bytes` of memory are available; return whether they are."""
        return not size_bytes or self._writer.make_room(size_bytes)

    def keep(self, llama: Llama, state: LlamaState) -> None:
        """Queue the blocks of `state`, a result of `llama.save_state`, that are not stored yet."""
        tokens, data = state.input_ids[: state.n_tokens].tolist(), np.frombuffer(state.llama_state, np.uint8)
        if len(data) and (missing := self._missing(llama, tokens)):
            self._put(llama, tokens, missing, data)

    def keep_prompt(self, llama: Llama, answer_tokens: int) -> Task | None:
        """Queue the blocks of the evaluated tokens of `llama` that are not stored yet.

        Return the task, or None if nothing was queued. Its memory has room for an answer of `answer_tokens`, so that
        `handed` can use it again.
        """
        tokens = llama.input_ids[: llama.n_tokens].tolist()
        missing = self._missing(llama, tokens)
        size = llama_cpp.llama_state_get_size(llama.ctx)
        more = min(size, size * answer_tokens // max(1, llama.n_tokens))
        if not missing or (memory := self._writer.memory(size, len(missing), more)) is None:
            return None
        task = self._put(llama, tokens, missing, _copied(llama, memory))
        if task is not None:
            task.memory = memory
        return task

    def handed(self, llama: Llama, stored: Task | None) -> LlamaState:
        """Return the state of `llama` without scores, for a completion that stores it; empty if all blocks are stored.

        `stored` is the result of `keep_prompt` for the prompt.
        """
        data: Bytes = np.empty(0, np.uint8)
        if missing := self._missing(llama, llama.input_ids[: llama.n_tokens].tolist()):
            memory = stored.memory if stored is not None and stored.is_done else None
            size = llama_cpp.llama_state_get_size(llama.ctx)
            if memory is None or len(memory) < size:
                memory = self._writer.memory(size, len(missing))
            data = data if memory is None else _copied(llama, memory)
        return LlamaState(llama.input_ids.copy(), llama.scores[:0], llama.n_tokens, data, len(data), llama._seed)

    def _put(self, llama: Llama, tokens: list[int], missing: list[BlockKey], data: Bytes) -> Task | None:
        """Queue the blocks `missing` of the state `data` of `tokens`; return None if the state cannot be stored."""
        model = self._model(llama)
        try:
            cut = read_state(data, model.description["architecture"])
        except Uncut as reason:
            log.warning("%s: states are stored whole, at block boundaries: %s", model.description["file"], reason)
            model.whole = True
            return None
        if cut.tokens < len(tokens):
            log.warning(
                "%s: a state was not stored: it has %d tokens, not %d", model.description["file"], cut.tokens, len(tokens)
            )
            return None
        task = Task(model, missing, tokens, len(data), functools.partial(_block_of, cut, tokens))
        self._writer.put(task)
        return task

    def _missing(self, llama: Llama, tokens: Sequence[int]) -> list[BlockKey]:
        """Return the blocks of `tokens`, which `llama` has evaluated, that are neither stored nor queued."""
        model = self._model(llama)
        perf = llama_cpp.llama_perf_context(llama.ctx)
        if perf.n_p_eval >= BLOCK_TOKENS:
            model.token_s = perf.t_p_eval_ms / 1e3 / perf.n_p_eval
        if not model.usable or model.whole:
            return []
        keys = _keys(model, tokens, part=True)
        return [key for key in keys if not self._writer.has(key) and key not in self.store]

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait up to `timeout_s` until all queued blocks are written or dropped; return whether they are."""
        return self._writer.flush(timeout_s)

    def metrics(self) -> str:
        """Return the counters of the cache as OpenMetrics text."""
        counters = self.counters
        rows = (
            ("lookups", "", counters.lookups, "Prompts that were looked up"),
            ("hits", "", counters.hits, "Prompts with a restored prefix"),
            ("restored_tokens", "", counters.restored_tokens, "Tokens restored"),
            ("restored_bytes", "bytes", counters.restored_bytes, "Bytes of state restored to llama.cpp"),
            ("restore_seconds", "seconds", counters.restore_s, "Time spent on restoring"),
            ("saved_seconds", "seconds", counters.saved_s, "Time saved by not evaluating restored tokens (modelled)"),
            ("stored_blocks", "", counters.stored_blocks, "Blocks written"),
            ("stored_bytes", "bytes", counters.stored_bytes, "Bytes written"),
            ("dropped_blocks", "", counters.dropped_blocks, "Blocks not written: the queue was full, or writing failed"),
            ("evicted_blocks", "", self.store.evicted, "Blocks evicted by this process"),
            ("fetched_blocks", "", self.shared.fetched_blocks if self.shared else 0, "Blocks fetched from the shared tier"),
            ("pushed_blocks", "", self.shared.pushed_blocks if self.shared else 0, "Blocks pushed to the shared tier"),
            ("shared_failures", "", self.shared.failures if self.shared else 0, "Failed requests to the shared tier"),
        )
        return openmetrics(rows)

    def close(self) -> None:
        """Write the queued blocks, and end the writer thread; nothing is stored afterwards."""
        self._writer.close()
        if self.shared is not None:
            self.shared.close()

    def __enter__(self) -> PrefixCache:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Implementation

    def _model(self, llama: Llama) -> _Model:
        """Return the model of `llama`, after checking whether its files are identified or were changed."""
        model = self._models.get(llama)
        if model is None:
            model = self._models[llama] = self._described(llama)
        if model.refused:
            return model
        is_first, model.has_waited = not model.has_waited, True
        until = time.monotonic() + (WAIT_S if is_first else 0)
        try:
            digests = [file.digest(max(0.0, until - time.monotonic())) for file in model.files]
        except MissingRequirement as error:
            model.refused = error.message
            log.warning("%s: nothing is restored or stored: %s", model.description["file"], model.refused)
            return model
        known = [digest for digest in digests if digest]
        if not model.root and len(known) == len(digests):
            model.identify(known)
            # Use the speed of the process that stored first, until this process has measured its own.
            speed = self.store.description(model.name).get("token_s")
            model.token_s = speed if isinstance(speed, float) else 0.0
            if not is_first:
                log.warning("%s: identified: prompts are restored and stored from now on", model.description["file"])
        elif not model.root and is_first:
            done, size = (
                sum(sizes) for sizes in zip(*((f.hashed_bytes, f.stamp.size_bytes) for f in model.files), strict=True)
            )
            log.warning(
                "%s: prompts are restored and stored once the file is identified, which reads all of it: %s of %s",
                model.description["file"],
                format_size(done),
                format_size(size),
            )
        return model

    def _described(self, llama: Llama) -> _Model:
        try:
            model = _describe(llama)
        except OSError as error:
            description = {"file": os.path.basename(llama.model_path)}
            model = _Model(description, refused=f"the file cannot be read: {error.strerror}")
        if model.refused:
            log.warning("%s: nothing is restored or stored: %s", model.description["file"], model.refused)
        elif model.whole:
            log.warning("%s: states are stored whole, at block boundaries", model.description["file"])
        return model

    def _stored(self, keys: list[BlockKey], whole: bool) -> Iterator[BlockKey]:
        """Return the stored blocks up to the first missing one; if states are whole, all up to the last stored one."""
        if not whole:
            return takewhile(self.store.__contains__, keys)
        last = next((at for at in range(len(keys), 0, -1) if keys[at - 1] in self.store), 0)
        return iter(keys[:last])

    def _fetched(
        self, model: _Model, keys: list[BlockKey], stored: list[BlockKey], tokens: Sequence[int], live: int
    ) -> dict[BlockKey, Block]:
        """Fetch blocks after the `stored` ones of `keys` from the shared tier, and append their keys to `stored`."""
        if self.shared is None:
            return {}
        until = time.monotonic() + self.shared.deadline_s
        missing = keys[len(stored) :]
        if model.whole:
            # States after 1, 2, 4, 8… blocks and after the last are stored; use the longest one.
            wanted = [key for key in missing if key is keys[-1] or not (key.index + 1) & key.index]
            one = next((blocks for key in reversed(wanted) if (blocks := self.shared.fetch([key], until))), [])
            if not one or not _is_of(model, keys, *one[0]):
                return {}
            stored += [key for key in missing if key.index <= one[0][0].index]
            return dict(one)
        if max(live, len(stored) * BLOCK_TOKENS) + LEAST_TOKENS > len(tokens):
            return {}
        fetched = dict(takewhile(lambda one: _is_of(model, keys, *one), self.shared.fetch(missing, until)))
        stored += fetched
        parent = stored[-1].name if stored else model.root
        links = _links(parent, tokens[len(stored) * BLOCK_TOKENS :])
        if links and self.store.newest(model.name, links, len(stored)) is None:
            partial = self.shared.newest(model.name, links, len(stored), until)
            fetched |= [partial] if partial and _is_of(model, keys, *partial) else []
        return fetched

    def _read(self, model: _Model, keys: list[BlockKey], key: BlockKey, fetched: dict[BlockKey, Block]) -> Block | None:
        """Return the block `key`, one of `keys` or their successor; None if it is missing, or invalid and removed."""
        block = fetched.get(key) or self.store.read(key)
        if block is None or (_is_of(model, keys, key, block) and (block.layout is None) == (key.kind == WHOLE)):
            return block
        self.store.drop([key])
        return None

    def _set(self, llama: Llama, data: Bytes, tokens: Sequence[int]) -> bool:
        """Load the state `data` of `tokens` into `llama`; return False and clear the context if llama.cpp rejects it."""
        llama.reset()
        memory = llama_cpp.llama_get_memory(llama.ctx)
        taken = llama_cpp.llama_state_seq_set_data(llama.ctx, data.ctypes.data_as(_U8), len(data), 0)
        if taken != len(data) or llama_cpp.llama_memory_seq_pos_max(memory, 0) != len(tokens) - 1:
            llama_cpp.llama_memory_clear(memory, True)
            return False
        llama.input_ids[: len(tokens)] = np.asarray(tokens, np.intc)
        llama.n_tokens = len(tokens)
        return True

    def _whole(
        self, model: _Model, keys: list[BlockKey], tokens: Sequence[int], live: int, fetched: dict[BlockKey, Block]
    ) -> tuple[Bytes | None, int, list[BlockKey]]:
        """Like `_joined`, for a whole state."""
        block = self._read(model, keys, keys[-1], fetched)
        return (block.payload, len(keys) * BLOCK_TOKENS, keys[-1:]) if block else (None, 0, keys[:-1])

    def _joined(
        self, model: _Model, keys: list[BlockKey], tokens: Sequence[int], live: int, fetched: dict[BlockKey, Block]
    ) -> tuple[Bytes | None, int, list[BlockKey]]:
        """Join `keys`, and the beginning of a block after them that matches `tokens`, to one state.

        Return the state, its number of tokens, and the blocks used. Return None, 0 and the usable ones of `keys` if the
        state would not have more than `live` tokens, or if a block is damaged.
        """
        self.store.ahead(keys)
        at = len(keys) * BLOCK_TOKENS
        links = _links(keys[-1].name if keys else model.root, tokens[at:])
        partial_key = next((key for key in fetched if key.index == len(keys)), None)
        partial_key = partial_key or self.store.newest(model.name, links, len(keys))
        partial = self._read(model, keys, partial_key, fetched) if partial_key else None
        common = _common(np.asarray(partial.tokens, np.intc), tokens[at:]) if partial else 0
        if common < LEAST_TOKENS:
            partial, common = None, 0
        if at + common <= live:
            return None, 0, keys
        first = self._read(model, keys, keys[0], fetched) if keys else partial
        layout = first.layout if first else None
        if layout is None:
            return None, 0, []
        if partial_key and partial and partial.layout != layout:
            self.store.drop([partial_key])
            partial, common = None, 0
        if not self.make_room((at + common) * layout.token_bytes):
            self._writer.report("restored", "a prompt was not restored: %s", "memory is short")
            return None, 0, keys
        joined = Joined(layout, at + common)
        if partial:
            joined.put(at, partial.payload, common)

        def place(key: BlockKey) -> bool:
            block = self._read(model, keys, key, fetched) if key.index else first
            if block is None or block.layout != layout:
                self.store.drop([key])  # so that it can be stored again
                return False
            joined.put(key.index * BLOCK_TOKENS, block.payload)
            return True

        with ThreadPoolExecutor(_READERS) as readers:
            placed = list(readers.map(place, keys))
        if not all(placed):
            return None, 0, keys[: placed.index(False)]
        return joined.data, joined.tokens, [*keys, partial_key] if partial_key and partial else keys

    def _evaluated(self, llama: Llama, model: _Model, keys: list[BlockKey], tokens: Sequence[int]) -> int:
        """Evaluate `tokens` up to the last block boundary, and store states on the way; return the tokens in the context."""
        live = _common(llama.input_ids[: llama.n_tokens], tokens)
        if live < llama.n_tokens or not live:
            llama.reset()  # a whole state cannot be shortened
            live = 0
        for blocks in range(1, len(keys) + 1):
            at = blocks * BLOCK_TOKENS
            if at <= live or (blocks & (blocks - 1) and blocks < len(keys)):
                continue
            llama.eval(tokens[live:at])
            live = at
            if not llama._ctx.kv_cache_seq_rm(-1, live, -1):
                model.refused = "the model cannot continue from a state without evaluating the whole prompt again"
                log.warning("%s: nothing is restored or stored: %s", model.description["file"], model.refused)
                llama.reset()
                return 0
            if keys[blocks - 1] not in self.store:
                size = llama_cpp.llama_state_seq_get_size(llama.ctx, 0)
                if (data := self._writer.memory(size, 1)) is None:
                    continue
                data = data[:size]
                if llama_cpp.llama_state_seq_get_data(llama.ctx, data.ctypes.data_as(_U8), size, 0) == size:
                    made = {keys[blocks - 1]: Block(data, tuple(tokens[at - BLOCK_TOKENS : at]))}
                    self._writer.put(Task(model, list(made), list(tokens[:at]), size, made.__getitem__))
        return live

    def _account(self, model: _Model, keys: list[BlockKey], tokens: int, size_bytes: int, seconds: float) -> None:
        with self._counting:
            counters = self.counters
            counters.hits += 1
            counters.restored_tokens += tokens
            counters.restored_bytes += size_bytes
            counters.restore_s += seconds
            counters.saved_s += max(0.0, tokens * model.token_s - seconds)
        with contextlib.suppress(OSError):  # the directory may be removed; the restored state is valid
            self.store.used(keys, tokens, size_bytes)


class _Writer:
    """A thread that writes blocks from a queue, which is limited to `most_bytes` and half of the available memory.

    Tasks that do not fit are dropped. `_changed` guards the queue.
    """

    def __init__(self, store: BlockStore, shared: SharedTier | None, counters: PrefixCounters, most_bytes: int) -> None:
        self._store, self._shared, self._counters, self._most = store, shared, counters, most_bytes
        self._changed = threading.Condition()
        self._tasks: deque[Task] = deque()
        self._pending: set[BlockKey] = set()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._reported: dict[str, tuple[float, int]] = {}  # by kind: time of the last log line, failures since

    def has(self, key: BlockKey) -> bool:
        """Return whether `key` is queued."""
        return key in self._pending

    def memory(self, size_bytes: int, blocks: int, more_bytes: int = 0) -> Bytes | None:
        """Return memory for a state of `size_bytes`, with room for `more_bytes`, whose pages are allocated on first use.

        If the queue or the memory is full, count `blocks` as dropped and return None. The memory is mapped separately,
        because the heap would not return it to the kernel.
        """
        with self._changed:
            why = "closed" if self._closed else "the queue is full" if self._is_full(size_bytes) else "memory is short"
            if why == "memory is short" and size_bytes <= tightest().spare_bytes // 2:
                with contextlib.suppress(OSError, MemoryError):
                    return huge_memory(size_bytes + more_bytes)
            self._drop(blocks, why, why)
            return None

    def make_room(self, size_bytes: int) -> bool:
        """Drop tasks, the newest first, until `size_bytes` of memory are available; return whether they are."""
        with self._changed:
            # The first task is being written, so its memory is in use.
            while (is_short := tightest().spare_bytes < size_bytes) and len(self._tasks) > 1:
                task = self._tasks.pop()
                self._end(task)
                self._drop(len(task.keys), "memory is short", "memory is short")
            return not is_short

    def _is_full(self, size_bytes: int) -> bool:
        return bool(self._tasks) and sum(other.size_bytes for other in self._tasks) + size_bytes > self._most

    def _drop(self, blocks: int, kind: str, why: object) -> None:
        """Count blocks that are not stored, and log why."""
        self._counters.dropped_blocks += blocks
        self.report(kind, "a prompt was not stored: %s", why)

    def report(self, kind: str, message: str, why: object) -> None:
        """Log a failure, at most one of its `kind` in LOG_S; the next line has the number of failures left out."""
        with self._changed:
            logged_s, left_out = self._reported.get(kind, (-LOG_S, 0))
            if time.monotonic() - logged_s < LOG_S:
                self._reported[kind] = (logged_s, left_out + 1)
                return
            self._reported[kind] = (time.monotonic(), 0)
            log.warning(message + " (%d more since the last line)" * bool(left_out), why, *([left_out] if left_out else []))

    def put(self, task: Task) -> None:
        """Queue `task`, or drop it."""
        with self._changed:
            if self._closed or self._is_full(task.size_bytes):
                task.is_done = True
                why = "closed" if self._closed else "the queue is full"
                self._drop(len(task.keys), why, why)
                return
            self._tasks.append(task)
            self._pending.update(task.keys)
            if self._thread is None or not self._thread.is_alive():  # a forked process does not have it
                self._thread = threading.Thread(target=self._run, name="llmcache-prefix", daemon=True)
                self._thread.start()
                atexit.register(self.close)
            self._changed.notify_all()

    def _end(self, task: Task) -> None:
        task.is_done = True
        task.block = _no_block  # to release the state
        self._pending.difference_update(task.keys)
        self._changed.notify_all()

    def flush(self, timeout_s: float | None) -> bool:
        """Wait up to `timeout_s` until the queue is empty; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._tasks, timeout_s)

    def close(self) -> None:
        """Write the queued tasks, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            atexit.unregister(self.close)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._closed)
                if not self._tasks:
                    return
                task = self._tasks[0]
            written = 0
            try:
                self._store.describe(task.model.name, {**task.model.description, "token_s": task.model.token_s})
                used_ns = self._store.used(_keys(task.model, task.tokens, part=True))
                for key in task.keys:
                    self._counters.stored_bytes += self._write(task, key, used_ns)
                    written += 1
            except (LlmcacheError, OSError, MemoryError) as error:
                self.report(type(error).__name__, "a prompt was not stored: %s", error)
            except Exception:  # a bug here must end neither storing nor generation
                log.exception("%d blocks were not stored", len(task.keys) - written)
            with self._changed:
                self._counters.stored_blocks += written
                self._counters.dropped_blocks += len(task.keys) - written
                self._end(self._tasks.popleft())
            del task  # to release the memory of its state

    def _write(self, task: Task, key: BlockKey, used_ns: int) -> int:
        block, links = task.block(key), list[str]()
        if key.kind != WHOLE:
            before = _keys(task.model, task.tokens[: key.index * BLOCK_TOKENS])[-1:]
            if before and before[0] not in self._store:
                raise MissingRequirement(f"{key.file}: the previous block was evicted: the prompt is larger than the limit")
            links = _links(before[0].name if before else task.model.root, block.tokens)
        written = self._store.write(key, block, links, used_ns)
        if self._shared is not None and task.pushed:
            self._shared.push(key, block, links)
        return written


def _block_of(state: State, tokens: list[int], key: BlockKey) -> Block:
    start = key.index * BLOCK_TOKENS
    end = min(start + BLOCK_TOKENS, len(tokens))
    payload = aligned((end - start) * state.layout.token_bytes)
    state.block(start, end, payload)
    return Block(payload, tuple(tokens[start:end]), state.layout)


def _copied(llama: Llama, memory: Bytes) -> Bytes:
    """Copy the state of `llama` to `memory`, and return the part that it fills."""
    return memory[: llama_cpp.llama_state_get_data(llama.ctx, memory.ctypes.data_as(_U8), len(memory))]


def _no_block(key: BlockKey) -> Block:
    raise ValueError(f"{key.file}: the state was given back")


def _describe(llama: Llama) -> _Model:
    """Describe everything except the tokens that the keys and values of `llama` depend on. OSError.

    Files are identified by all of their bytes, not by name or time, so a copy on another machine has the same fingerprint.
    """
    paths = [*shard_names(llama.model_path), *([llama.lora_path] if llama.lora_path else [])]
    metadata, handle = llama.metadata, llama.model
    context = {name: getattr(llama.context_params, name) for name in _CONTEXT}
    # Some models have two sets of rope factors: for contexts up to a length (default: that of training), and for longer.
    if any(".rope.scaling." in key for key in metadata) or context["yarn_orig_ctx"]:
        context["n_ctx"] = llama.n_ctx()
    else:
        context["n_ctx"] = llama.n_ctx() > llama_cpp.llama_model_n_ctx_train(handle)
    description: dict[str, Any] = {
        "format": FORMAT,
        "file": os.path.basename(llama.model_path),
        "architecture": metadata.get("general.architecture", ""),
        "name": metadata.get("general.name", ""),
        "lora": [llama.lora_scale] if llama.lora_path else None,
        "overrides": repr(llama.kv_overrides),
        "context": context,
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("LLAMA_ATTN")},
        "library": ["llama-cpp-python", llama_cpp.__version__, llama_cpp.LLAMA_STATE_SEQ_VERSION],
        "block_tokens": BLOCK_TOKENS,
    }
    whole = bool(llama_cpp.llama_model_is_recurrent(handle) or llama_cpp.llama_model_is_hybrid(handle))
    whole |= llama_cpp.llama_model_n_swa(handle) > 0 and not llama.context_params.swa_full
    if hasattr(llama.chat_handler, "clip_model_path"):
        return _Model(description, whole, "prompts with images cannot be identified by their tokens")
    if llama.context_params.embeddings:
        return _Model(description, whole, "the model computes embeddings")
    files = tuple(FileIdentity(path) for path in paths)
    # llama.cpp records the monotonic time at which it started to load.
    loaded_ns = time.time_ns() - time.monotonic_ns() + int(llama_cpp.llama_perf_context(llama.ctx).t_start_ms * 1e6)
    replaced = [f"{os.path.realpath(path)} (deleted)" for path in paths]
    maps = Path("/proc/self/maps").read_text(errors="surrogateescape")
    if any(file.stamp.ctime_ns > loaded_ns for file in files) or any(name in maps for name in replaced):
        return _Model(description, whole, "the file was changed or replaced after it was loaded")
    return _Model(description, whole, files=files)


def _keys(model: _Model, tokens: Sequence[int], part: bool = False) -> list[BlockKey]:
    """Return the keys of all whole blocks of `tokens`; with `part`, also of the rest if it has LEAST_TOKENS."""
    ids: NDArray[np.int32] = np.asarray(tokens, np.dtype("<i4"))
    name, keys = model.root, []
    for start in range(0, len(ids), BLOCK_TOKENS):
        block = ids[start : start + BLOCK_TOKENS]
        if len(block) < BLOCK_TOKENS and (not part or len(block) < LEAST_TOKENS):
            break
        name = _name(name, block)
        kind = PART if len(block) < BLOCK_TOKENS else WHOLE if model.whole else CUT
        keys.append(BlockKey(model.name, name, start // BLOCK_TOKENS, kind))
    return keys


def _name(parent: str, ids: NDArray[np.int32]) -> str:
    """Return the name of the block with the tokens `ids` that follows the block `parent`."""
    return hashlib.blake2b(bytes.fromhex(parent) + ids.tobytes(), digest_size=20).hexdigest()


def _is_of(model: _Model, keys: Sequence[BlockKey], key: BlockKey, block: Block) -> bool:
    """Return whether the tokens of `block` give the name in `key`, which is one of `keys` or their successor."""
    parent = keys[key.index - 1].name if key.index else model.root
    return _name(parent, np.asarray(block.tokens, np.dtype("<i4"))) == key.name


def _links(parent: str, tokens: Sequence[int]) -> list[str]:
    """Return the links to blocks after `parent` that begin like `tokens`, the longest beginning first."""
    ids = np.asarray(tokens[: LINKED_TOKENS[0]], np.dtype("<i4"))
    prefixes = [bytes.fromhex(parent) + ids[:count].tobytes() for count in LINKED_TOKENS if count <= len(ids)]
    return [hashlib.blake2b(prefix, digest_size=20, person=b"link").hexdigest() for prefix in prefixes]


def _common(have: NDArray[np.intc], tokens: Sequence[int]) -> int:
    """Return the length of the common prefix of two token sequences."""
    length = min(len(have), len(tokens))
    differ = np.flatnonzero(have[:length] != np.asarray(tokens[:length], np.intc))
    return int(differ[0]) if len(differ) else length


def _bytes(size: str | int) -> int:
    return size if isinstance(size, int) else parse_size(size)


_set_any_cache = Llama.set_cache


@functools.wraps(_set_any_cache)
def _set_cache(llama: Llama, cache: BaseLlamaCache | None) -> None:
    if isinstance(llama.cache, AttachedCache):
        llama.cache.detach(llama)
    _set_any_cache(llama, cache.attached(llama) if isinstance(cache, PrefixCache) else cache)


Llama.set_cache = _set_cache
