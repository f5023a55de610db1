"""PrefixCache: prompts that llama-cpp-python has evaluated, stored on disk and restored by prefix.

    llama.set_cache(PrefixCache("/mnt/nvme/kv", limit="20G"))

The name of a block of 256 tokens is a hash of the model's fingerprint and all tokens up to its end, so prompts with a
common prefix share its blocks (kv.prefix.store). `Llama` calls `cache[prompt]` before it evaluates a prompt, and
`cache[tokens] = state` after the answer, without passing itself. Therefore this module replaces `Llama.set_cache` to
give each Llama an AttachedCache, which replaces some of its methods.

- Nothing is restored or stored until all bytes of the model's files are hashed, nor after one of them was changed.
- The last bits of llama.cpp's results depend on how many tokens are evaluated together. The last token of a prompt is
  always evaluated alone, so answers to new and restored prompts are identical.
- States that cannot be cut (kv.prefix.state) are stored whole, after 1, 2, 4, 8... blocks and after the last.
- Not supported: `echo` with `logprobs`, because scores are not stored; chat handlers with images, which have no tokens.
  Control vectors set through the C interface are not detected: use another directory for them.

Threads: one thread at a time uses a Llama. It copies the state and passes it to a writer thread. One lock guards the
writer's queue, another the counters that several Llamas share.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import BaseLlamaCache, Llama
from llama_cpp.llama import LlamaState

from llmcache.arrays import Bytes
from llmcache.errors import LlmcacheError, MissingRequirement
from llmcache.kv.llama.model import BLOCK_TOKENS, LEAST_TOKENS, Model, describe, is_of, keys_of, links_of
from llmcache.kv.llama.writer import PrefixCounters, Task, Writer
from llmcache.kv.prefix import common_length, openmetrics
from llmcache.kv.prefix.shared import SharedTier
from llmcache.kv.prefix.state import Joined, State, Uncut, read_state
from llmcache.kv.prefix.store import WHOLE, Block, BlockKey, BlockStore
from llmcache.kv.spill.layout import aligned
from llmcache.units import format_size, parse_duration, parse_size

log = logging.getLogger("llmcache.kv")

WAIT_S = 2.0  # time for which the first look-up of a Llama waits for the digests of its files
LEAST_ROOM_BYTES = 1 << 20
EARLY_TOKENS = 64
"""Least number of evaluated tokens for which a prompt is stored before its answer; for fewer, the copy takes longer."""
GROWTH_TOKENS = 64  # interval in tokens at which available memory is checked while an answer is generated
_REPLACED = ("_create_completion", "eval", "save_state")
_SCORE_BYTES = 4
_READERS = 2
_U8 = ctypes.POINTER(ctypes.c_uint8)
_NOT_ATTACHED = "pass a PrefixCache to llama.set_cache, or call its methods restore() and keep() with a Llama"


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
            log.warning("%s: no space to store prompts: %s", directory, why)
        self.counters, self._counting = PrefixCounters(), threading.Lock()
        self._models: weakref.WeakKeyDictionary[Llama, Model] = weakref.WeakKeyDictionary()
        self._writer = Writer(self.store, self.shared, self.counters, _bytes(queue))

    # The interface of BaseLlamaCache

    @property
    def cache_size(self) -> int:
        return sum(entry.size_bytes for entry in self.store.entries())

    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        """Raise TypeError: this works only on the cache that `llama.set_cache` attaches to a Llama."""
        raise TypeError(_NOT_ATTACHED)

    def __contains__(self, key: object) -> bool:
        raise TypeError(_NOT_ATTACHED)

    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None:
        raise TypeError(_NOT_ATTACHED)

    def attached(self, llama: Llama) -> AttachedCache:
        """Return the cache that `llama.set_cache` attaches to `llama`, and start to identify the model's files."""
        if llama not in self._models:
            self._models[llama] = self._described(llama)
        return AttachedCache(self, llama)

    # Restoring and storing

    def restore(self, llama: Llama, tokens: Sequence[int]) -> int:
        """Restore the longest stored prefix of `tokens` into `llama`, and return its number of tokens.

        Return 0, without an effect, if none is longer than the one in the context. If states are stored whole, also evaluate
        `tokens` up to the last block boundary, store the states on the way, and return that boundary.
        """
        model = self._model(llama)
        if not model.usable:
            return 0
        started = time.perf_counter()
        with self._counting:
            self.counters.lookups += 1
        tokens = tokens[: llama.n_ctx()]
        live = common_length(llama.input_ids[: llama.n_tokens], tokens)
        # The last token is evaluated again for its logits. It can be cut off a state of blocks, but not a whole state.
        keys = keys_of(model, tokens[:-1] if model.whole else tokens)
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
        model = self._model(llama)
        return model.usable and any(True for _ in self._stored(keys_of(model, tokens), model.whole))

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
        """Queue the blocks of the evaluated tokens of `llama` that are not stored yet; return None if there are none.

        The memory of the task has room for an answer of `answer_tokens`, so that `handed` can use it again.
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
        """Return the state of `llama` without scores, empty if all blocks are stored. `stored`: see `keep_prompt`."""
        data: Bytes = np.empty(0, np.uint8)
        if missing := self._missing(llama, llama.input_ids[: llama.n_tokens].tolist()):
            memory = stored.memory if stored is not None and stored.is_done else None
            size = llama_cpp.llama_state_get_size(llama.ctx)
            if memory is None or len(memory) < size:
                memory = self._writer.memory(size, len(missing))
            data = data if memory is None else _copied(llama, memory)
        return LlamaState(llama.input_ids.copy(), llama.scores[:0], llama.n_tokens, data, len(data), llama._seed)

    def _put(self, llama: Llama, tokens: list[int], missing: list[BlockKey], data: Bytes) -> Task | None:
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
        model = self._model(llama)
        perf = llama_cpp.llama_perf_context(llama.ctx)
        if perf.n_p_eval >= BLOCK_TOKENS:
            model.token_s = perf.t_p_eval_ms / 1e3 / perf.n_p_eval
        if not model.usable or model.whole:
            return []
        keys = keys_of(model, tokens, part=True)
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
        """Write the queued blocks, and end the writer thread."""
        self._writer.close()
        if self.shared is not None:
            self.shared.close()

    def __enter__(self) -> PrefixCache:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Implementation

    def _model(self, llama: Llama) -> Model:
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

    def _described(self, llama: Llama) -> Model:
        try:
            model = describe(llama)
        except OSError as error:
            description = {"file": os.path.basename(llama.model_path)}
            model = Model(description, refused=f"the file cannot be read: {error.strerror}")
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
        self, model: Model, keys: list[BlockKey], stored: list[BlockKey], tokens: Sequence[int], live: int
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
            if not one or not is_of(model, keys, *one[0]):
                return {}
            stored += [key for key in missing if key.index <= one[0][0].index]
            return dict(one)
        if max(live, len(stored) * BLOCK_TOKENS) + LEAST_TOKENS > len(tokens):
            return {}
        fetched = dict(takewhile(lambda one: is_of(model, keys, *one), self.shared.fetch(missing, until)))
        stored += fetched
        parent = stored[-1].name if stored else model.root
        links = links_of(parent, tokens[len(stored) * BLOCK_TOKENS :])
        if links and self.store.newest(model.name, links, len(stored)) is None:
            partial = self.shared.newest(model.name, links, len(stored), until)
            fetched |= [partial] if partial and is_of(model, keys, *partial) else []
        return fetched

    def _read(self, model: Model, keys: list[BlockKey], key: BlockKey, fetched: dict[BlockKey, Block]) -> Block | None:
        block = fetched.get(key) or self.store.read(key)
        if block is None or (is_of(model, keys, key, block) and (block.layout is None) == (key.kind == WHOLE)):
            return block
        self.store.drop([key])
        return None

    def _set(self, llama: Llama, data: Bytes, tokens: Sequence[int]) -> bool:
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
        self, model: Model, keys: list[BlockKey], tokens: Sequence[int], live: int, fetched: dict[BlockKey, Block]
    ) -> tuple[Bytes | None, int, list[BlockKey]]:
        block = self._read(model, keys, keys[-1], fetched)
        return (block.payload, len(keys) * BLOCK_TOKENS, keys[-1:]) if block else (None, 0, keys[:-1])

    def _joined(
        self, model: Model, keys: list[BlockKey], tokens: Sequence[int], live: int, fetched: dict[BlockKey, Block]
    ) -> tuple[Bytes | None, int, list[BlockKey]]:
        """Join `keys`, and the beginning of a block after them that matches `tokens`, to one state.

        Return the state, its tokens, and the blocks used; or None, 0 and the usable ones of `keys` if the state would not
        exceed `live` tokens, or a block is damaged.
        """
        self.store.ahead(keys)
        at = len(keys) * BLOCK_TOKENS
        links = links_of(keys[-1].name if keys else model.root, tokens[at:])
        partial_key = next((key for key in fetched if key.index == len(keys)), None)
        partial_key = partial_key or self.store.newest(model.name, links, len(keys))
        partial = self._read(model, keys, partial_key, fetched) if partial_key else None
        common = common_length(np.asarray(partial.tokens, np.intc), tokens[at:]) if partial else 0
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

    def _evaluated(self, llama: Llama, model: Model, keys: list[BlockKey], tokens: Sequence[int]) -> int:
        live = common_length(llama.input_ids[: llama.n_tokens], tokens)
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

    def _account(self, model: Model, keys: list[BlockKey], tokens: int, size_bytes: int, seconds: float) -> None:
        with self._counting:
            counters = self.counters
            counters.hits += 1
            counters.restored_tokens += tokens
            counters.restored_bytes += size_bytes
            counters.restore_s += seconds
            counters.saved_s += max(0.0, tokens * model.token_s - seconds)
        with contextlib.suppress(OSError):  # the directory may be removed; the restored state is valid
            self.store.used(keys, tokens, size_bytes)


def _block_of(state: State, tokens: list[int], key: BlockKey) -> Block:
    start = key.index * BLOCK_TOKENS
    end = min(start + BLOCK_TOKENS, len(tokens))
    payload = aligned((end - start) * state.layout.token_bytes)
    state.block(start, end, payload)
    return Block(payload, tuple(tokens[start:end]), state.layout)


def _copied(llama: Llama, memory: Bytes) -> Bytes:
    return memory[: llama_cpp.llama_state_get_data(llama.ctx, memory.ctypes.data_as(_U8), len(memory))]


def _bytes(size: str | int) -> int:
    return size if isinstance(size, int) else parse_size(size)


class AttachedCache(BaseLlamaCache):
    """The cache of `llama`, which stores prompts in the PrefixCache `cache` and has its public attributes."""

    def __init__(self, cache: PrefixCache, llama: Llama) -> None:
        super().__init__(cache.capacity_bytes)
        self._cache, self._llama = cache, weakref.ref(llama)
        self._completing = self._echoes = False
        self._answer_tokens = 0
        self._prompt: Sequence[int] | None = None  # a prompt that was looked up and is not evaluated yet
        self._stored: Task | None = None  # the task that stores the prompt, while its answer is generated
        self._scored = 0  # tokens whose scores have memory already
        for name in _REPLACED:
            setattr(llama, name, getattr(self, name))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._cache, name)

    def detach(self, llama: Llama) -> None:
        for name in _REPLACED:
            vars(llama).pop(name, None)

    def _owner(self) -> Llama:
        llama = self._llama()
        if llama is None:
            raise ReferenceError("the Llama of this cache was deleted")
        return llama

    # The interface of BaseLlamaCache

    @property
    def cache_size(self) -> int:
        return self._cache.cache_size

    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        """Restore the longest stored prefix of `key`, and return its tokens; KeyError if there is none.

        The returned state has only the tokens that the Llama then holds, so the Llama does not load it.
        """
        llama = self._owner()
        self._prompt, self._stored = key, None
        self._make_room(llama, len(key))
        if llama._logits_all and self._echoes:
            llama.reset()  # it may have tokens that were restored without their scores
            raise KeyError("the request needs the scores of the prompt's tokens, which are not stored")
        self._prompt = None  # restoring may evaluate
        try:
            restored = self._cache.restore(llama, key)
        except (LlmcacheError, OSError, MemoryError) as error:
            log.warning("nothing was restored: %s", error)
            restored = 0
        self._prompt = key
        if not restored:
            raise KeyError("no stored prefix is longer than the one in the context")
        return LlamaState(llama.input_ids[: llama.n_tokens].copy(), llama.scores[:0], llama.n_tokens, b"", 0, 0)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, Sequence) and self._cache.has_prefix(self._owner(), key)

    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None:
        """Store the blocks of `value` that are not stored yet; its tokens replace `key`."""
        self._cache.keep(self._owner(), value)

    # Replaced methods of the Llama

    def _create_completion(self, *args: Any, **named: Any) -> Iterator[Any]:
        llama = self._owner()
        self._echoes = bool(named.get("echo")) and named.get("logprobs") is not None
        self._answer_tokens = max(0, named.get("max_tokens") or 0)
        completion = type(llama)._create_completion(llama, *args, **named)
        del llama  # so that it can be deleted while the client reads the answer
        try:
            while True:
                self._completing = True
                try:
                    part = next(completion)
                except StopIteration:
                    return
                finally:
                    self._completing = False
                yield part
        finally:
            completion.close()
            self._echoes, self._stored = False, None

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens, and store the prompt if they are the rest of one that was looked up."""
        llama, (prompt, self._prompt) = self._owner(), (self._prompt, None)
        evaluate: Callable[[Llama, Sequence[int]], None] = type(llama).eval
        is_prompt = prompt is not None and self._completing and self._cache.cuts(llama, len(prompt))
        if is_prompt and len(tokens) > 1:
            evaluate(llama, tokens[:-1])
        evaluate(llama, tokens[-1:] if is_prompt else tokens)
        if llama.n_tokens > self._scored + GROWTH_TOKENS - 1:
            self._scored = llama.n_tokens
            self._make_room(llama, llama.n_tokens)
        if is_prompt and len(tokens) >= EARLY_TOKENS:
            self._stored = self._cache.keep_prompt(llama, self._answer_tokens or llama.n_ctx())

    def save_state(self) -> LlamaState:
        """Return the state; during a completion without scores, and empty if all blocks are stored."""
        llama = self._owner()
        if not self._completing:
            return type(llama).save_state(llama)
        stored, self._stored = self._stored, None
        return self._cache.handed(llama, stored)

    def _make_room(self, llama: Llama, tokens: int) -> None:
        """Drop queued prompts if the scores of `tokens`, and of GROWTH_TOKENS more, need their memory.

        With logits_all, `Llama` and llama.cpp have rows of scores, whose memory is used only from the first access on.
        """
        if llama._logits_all:
            tokens = min(tokens + GROWTH_TOKENS, llama.n_ctx())
            rows = [min(count, llama.n_ctx()) + min(count, llama.n_batch) for count in (self._scored, tokens)]
            self._cache.make_room(max(0, rows[1] - rows[0]) * llama.scores.shape[1] * _SCORE_BYTES)


_set_any_cache = Llama.set_cache


@functools.wraps(_set_any_cache)
def _set_cache(llama: Llama, cache: BaseLlamaCache | None) -> None:
    if isinstance(llama.cache, AttachedCache):
        llama.cache.detach(llama)
    _set_any_cache(llama, cache.attached(llama) if isinstance(cache, PrefixCache) else cache)


Llama.set_cache = _set_cache
