"""PrefixCache: prompts that llama.cpp has evaluated, kept on disk by llama-cpp-python and restored by prefix.

    llama.set_cache(PrefixCache("/mnt/nvme/kv", limit="20G"))

A prompt is cut into blocks of 256 tokens, each named by a hash of the model's fingerprint and of all tokens to its end: a
prefix that many prompts share is stored once, and the longest stored one is found with a look-up for each block. The last
block may have fewer tokens, and of a block that begins like the prompt the first tokens serve (kv.prefix.store).

The cache that `llama.set_cache` attaches to a Llama (kv.llama.attached) calls this one before and after a prompt is
evaluated, and after its answer. It restores a prefix by llama_state_seq_set_data and the public `input_ids` and `n_tokens`:
`Llama` finds the prompt's beginning in its context, and evaluates the rest. Its own `load_state` takes whole contexts only,
with copies of them and of all scores.

Nothing is restored or stored before the model's files are identified by all of their bytes (kv.prefix.identity), nor after
one of them was changed or replaced.

What llama.cpp computes of a token depends, in the last bits, on how many are evaluated with it. So the last token of a
prompt, which is evaluated again after the prompt was restored, is evaluated alone also the first time.

Layouts that cannot be cut (kv.prefix.state: recurrent layers, windows that have dropped tokens) are stored whole, at block
boundaries: the prompt is evaluated up to 1, 2, 4, 8… blocks and the last, and the state taken there. One log line says so.
Where `Llama` would evaluate the prompt anew all the same, as its llama.cpp does not remove "nothing behind it" from a
recurrent state, nothing is restored or stored, and another line says that.

Nothing is restored for a completion that tells the probabilities of the prompt's tokens (`echo` with `logprobs`): their
scores are not stored. Nothing is restored or stored for a Llama with a chat handler of images, which have no tokens.
Control vectors set through the C interface are not noticed: use another directory for them.

Threads: a Llama is used by one thread at a time. What is to be stored is copied there and handed to one thread that cuts,
checks and writes it, through a queue bounded by bytes and by the memory of the machine and the cgroup. One lock guards the
queue, another what several Llamas count.
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
from llmcache.errors import EnvironmentProblem, LlmcacheError
from llmcache.kv.llama.attached import AttachedCache
from llmcache.kv.prefix.identity import FileIdentity, model_files
from llmcache.kv.prefix.metrics import openmetrics
from llmcache.kv.prefix.shared import SharedTier
from llmcache.kv.prefix.state import Joined, State, Uncut, read_state
from llmcache.kv.prefix.store import CUT, PART, WHOLE, Block, BlockKey, BlockStore
from llmcache.kv.spill.layout import aligned
from llmcache.kv.spill.raw import huge_memory
from llmcache.memory import tightest
from llmcache.units import format_size, parse_duration, parse_size

log = logging.getLogger("llmcache.kv")

BLOCK_TOKENS = 256
LINKED_TOKENS = (128, 64, 32, 16)
"""By so many of its first tokens a block is found; fewer are not stored as a last block, nor taken from one."""
LEAST_TOKENS = LINKED_TOKENS[-1]
FORMAT = 2
"""Of fingerprints: raised when other things go into them, or blocks lie otherwise."""
WAIT_S = 2.0
"""A Llama's first look-up waits so long for the identity of its files."""
LOG_S = 60.0
"""Lines about the same failure have at least this distance."""
LEAST_ROOM_BYTES = 1 << 20
_READERS = 2
_ROPE = ("rope_scaling_type", "rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast")
_CACHE = ("type_k", "type_v", "flash_attn_type", "attention_type", "swa_full", "n_seq_max", "kv_unified")
_CONTEXT = (*_ROPE, "yarn_beta_slow", "yarn_orig_ctx", *_CACHE)
_U8 = ctypes.POINTER(ctypes.c_uint8)
_NOT_ATTACHED = "pass a PrefixCache to llama.set_cache, or call its methods restore() and keep() with a Llama"


@dataclass
class PrefixCounters:
    """What a cache has done since it was made. `restore_s` is the time of restoring, reading included."""

    lookups: int = 0
    hits: int = 0
    restored_tokens: int = 0
    restored_bytes: int = 0
    restore_s: float = 0.0
    saved_s: float = 0.0  # evaluating what was restored would have taken, less `restore_s`; 0 while its speed is not known
    stored_blocks: int = 0
    stored_bytes: int = 0
    dropped_blocks: int = 0


@dataclass
class _Model:
    """What is known of a Llama: the fingerprint, what it stands for, and whether its states are stored whole.

    `root`: the fingerprint, hexadecimal, or empty while its files are not identified; the first block's name is made from
    it, in place of the block before it.
    """

    told: dict[str, Any]
    whole: bool = False
    refused: str = ""
    files: tuple[FileIdentity, ...] = ()  # those of the model, and a LoRA adapter
    root: str = ""
    has_waited: bool = False
    token_s: float = 0.0  # of evaluating, a token; 0: not known yet

    @property
    def name(self) -> str:
        """The directory of its blocks."""
        return self.root[:32]

    @property
    def usable(self) -> bool:
        """Whether prompts are restored and stored."""
        return bool(self.root) and not self.refused

    def identify(self, digests: list[str]) -> None:
        """Set the fingerprint, which depends on the digests of `files`."""
        models = len(self.files) - (self.told["lora"] is not None)
        self.told["files"] = [
            [file.stamp.size_bytes, digest] for file, digest in zip(self.files[:models], digests, strict=False)
        ]
        if self.told["lora"] is not None:
            self.told["lora"] = [digests[-1], self.told["lora"][-1]]
        identity = {key: value for key, value in self.told.items() if key not in ("file", "name")}
        text = json.dumps(identity, sort_keys=True)
        self.root = hashlib.blake2b(text.encode(), digest_size=32).hexdigest()[:40]


@dataclass
class Task:
    """Blocks to be written, with the tokens before the end of each: `block` makes one when its turn has come.

    `pushed`: they are given to the shared tier as well; not those that are from there. `memory`: what the state was copied
    to, which is free for another one when `is_done`.
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
    """Prompts below `directory`, at most `limit` bytes ("20G") of them; for one Llama or several, of any models.

    `ttl`: a duration ("30d"), after which a block that was not used goes; `floor`: bytes of the file system that are left
    free, by default 1 GB or 5 % of a smaller file system; `queue`: bytes that may wait to be written, and no more than half
    of the memory that is available: prompts beyond are not stored; `shared`: the address of a Redis-compatible server
    (redis://host:6379/0), which has `deadline` seconds for what a prompt asks of it. Several processes may have the same
    directory. Close it, or end the process normally, to have written what waits. UsageError, EnvironmentProblem as
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
        """Raise TypeError: only the cache that `llama.set_cache` makes of this one knows its Llama."""
        raise TypeError(_NOT_ATTACHED)

    def __contains__(self, key: object) -> bool:
        """Raise TypeError, as `cache[key]`."""
        raise TypeError(_NOT_ATTACHED)

    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None:
        """Raise TypeError, as `cache[key]`."""
        raise TypeError(_NOT_ATTACHED)

    def attached(self, llama: Llama) -> AttachedCache:
        """Return this cache for `llama` alone, as `llama.set_cache` sets it; begin to identify the files of its model."""
        if llama not in self._models:
            self._models[llama] = self._described(llama)
        return AttachedCache(self, llama)

    # What it does

    def restore(self, llama: Llama, tokens: Sequence[int]) -> int:
        """Restores the longest stored prefix of `tokens` in `llama`, and returns its tokens; 0, and nothing done, if none.

        It is none where `llama` has as long a prefix already. Where states are stored whole, `tokens` are evaluated up to
        the last block boundary, with the states on the way stored.
        """
        model = self._model(llama)
        if not model.usable:
            return 0
        started = time.perf_counter()
        with self._counting:
            self.counters.lookups += 1
        tokens = tokens[: llama.n_ctx()]
        live = _common(llama.input_ids[: llama.n_tokens], tokens)
        # The last token is evaluated in any case, for its logits: it can be cut off again, but not from a whole state.
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
                log.warning("%s: llama.cpp rejected the stored state; its blocks were removed", model.told["file"])
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
        """Return whether a prompt of so many tokens is stored for `llama`, in blocks."""
        model = self._model(llama)
        return tokens >= LEAST_TOKENS and not model.refused and not model.whole

    def make_room(self, size_bytes: int) -> bool:
        """Drop prompts that wait to be written until so much memory is available; return whether it is."""
        return not size_bytes or self._writer.make_room(size_bytes)

    def keep(self, llama: Llama, state: LlamaState) -> None:
        """Write the blocks of `state`, which `llama.save_state` returned, that are not stored yet, in the background."""
        tokens, data = state.input_ids[: state.n_tokens].tolist(), np.frombuffer(state.llama_state, np.uint8)
        if len(data) and (missing := self._missing(llama, tokens)):
            self._put(llama, tokens, missing, data)

    def keep_prompt(self, llama: Llama, answer_tokens: int) -> Task | None:
        """Write the blocks of what `llama` has evaluated that are not stored yet, in the background.

        Its answer may have `answer_tokens`. Returns what was begun, for `handed` to use its memory again.
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
        """Return the state of `llama` as a completion stores it: without scores, and empty if all its blocks are stored.

        `stored`: what `keep_prompt` returned for the prompt.
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
        """Have the blocks `missing` of the state `data` of `tokens` written; None if they cannot be."""
        model = self._model(llama)
        try:
            cut = read_state(data, model.told["architecture"])
        except Uncut as reason:
            log.warning("%s: states are stored whole, at block boundaries: %s", model.told["file"], reason)
            model.whole = True
            return None
        if cut.tokens < len(tokens):
            log.warning("%s: a state was not stored: it has %d tokens, not %d", model.told["file"], cut.tokens, len(tokens))
            return None
        task = Task(model, missing, tokens, len(data), functools.partial(_block_of, cut, tokens))
        self._writer.put(task)
        return task

    def _missing(self, llama: Llama, tokens: Sequence[int]) -> list[BlockKey]:
        """The blocks of what `llama` has evaluated, `tokens`, that are not stored and do not wait to be."""
        model = self._model(llama)
        perf = llama_cpp.llama_perf_context(llama.ctx)
        if perf.n_p_eval >= BLOCK_TOKENS:
            model.token_s = perf.t_p_eval_ms / 1e3 / perf.n_p_eval
        if not model.usable or model.whole:
            return []
        keys = _keys(model, tokens, part=True)
        return [key for key in keys if not self._writer.has(key) and key not in self.store]

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until all that waits is written or dropped; returns whether it is, after `timeout_s` at most."""
        return self._writer.flush(timeout_s)

    def metrics(self) -> str:
        """Returns what it has done since it was made, in OpenMetrics text."""
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
        """Writes what waits, and ends the thread; nothing is stored after that."""
        self._writer.close()
        if self.shared is not None:
            self.shared.close()

    def __enter__(self) -> PrefixCache:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Parts of it

    def _model(self, llama: Llama) -> _Model:
        """What is known of `llama`, whose files are looked at: they are identified, or were changed meanwhile."""
        model = self._models.get(llama)
        if model is None:
            model = self._models[llama] = self._described(llama)
        if model.refused:
            return model
        is_first, model.has_waited = not model.has_waited, True
        until = time.monotonic() + (WAIT_S if is_first else 0)
        try:
            digests = [file.digest(max(0.0, until - time.monotonic())) for file in model.files]
        except EnvironmentProblem as error:
            model.refused = error.message
            log.warning("%s: nothing is restored or stored: %s", model.told["file"], model.refused)
            return model
        known = [digest for digest in digests if digest]
        if not model.root and len(known) == len(digests):
            model.identify(known)
            # How fast the process was that stored first, until this one knows its own speed.
            speed = self.store.description(model.name).get("token_s")
            model.token_s = speed if isinstance(speed, float) else 0.0
            if not is_first:
                log.warning("%s: identified: prompts are restored and stored from now on", model.told["file"])
        elif not model.root and is_first:
            done, size = (
                sum(sizes) for sizes in zip(*((f.hashed_bytes, f.stamp.size_bytes) for f in model.files), strict=True)
            )
            log.warning(
                "%s: prompts are restored and stored once the file is identified, which reads all of it: %s of %s",
                model.told["file"],
                format_size(done),
                format_size(size),
            )
        return model

    def _described(self, llama: Llama) -> _Model:
        """What there is to know of `llama` before its files are identified, which begins."""
        try:
            model = _describe(llama)
        except OSError as error:
            told = {"file": os.path.basename(llama.model_path)}
            model = _Model(told, refused=f"the file cannot be read: {error.strerror}")
        if model.refused:
            log.warning("%s: nothing is restored or stored: %s", model.told["file"], model.refused)
        elif model.whole:
            log.warning("%s: states are stored whole, at block boundaries", model.told["file"])
        return model

    def _stored(self, keys: list[BlockKey], whole: bool) -> Iterator[BlockKey]:
        """Returns the blocks that are stored, from the first one on; of whole states all to the last that is stored."""
        if not whole:
            return takewhile(self.store.__contains__, keys)
        last = next((at for at in range(len(keys), 0, -1) if keys[at - 1] in self.store), 0)
        return iter(keys[:last])

    def _fetched(
        self, model: _Model, keys: list[BlockKey], stored: list[BlockKey], tokens: Sequence[int], live: int
    ) -> dict[BlockKey, Block]:
        """Blocks that the shared tier has behind those of `keys` that are `stored`, which they are added to."""
        if self.shared is None:
            return {}
        until = time.monotonic() + self.shared.deadline_s
        missing = keys[len(stored) :]
        if model.whole:
            # States of 1, 2, 4, 8… blocks and the last are there; the longest that is serves.
            wanted = [key for key in missing if key is keys[-1] or not (key.index + 1) & key.index]
            one = next((got for key in reversed(wanted) if (got := self.shared.fetch([key], until))), [])
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
            behind = self.shared.newest(model.name, links, len(stored), until)
            fetched |= [behind] if behind and _is_of(model, keys, *behind) else []
        return fetched

    def _read(self, model: _Model, keys: list[BlockKey], key: BlockKey, fetched: dict[BlockKey, Block]) -> Block | None:
        """The block `key`, which is one of `keys` or behind them; None if there is none, or not a right one: that goes."""
        block = fetched.get(key) or self.store.read(key)
        if block is None or (_is_of(model, keys, key, block) and (block.layout is None) == (key.kind == WHOLE)):
            return block
        self.store.drop([key])
        return None

    def _set(self, llama: Llama, data: Bytes, tokens: Sequence[int]) -> bool:
        """Gives `llama` the state `data` of `tokens`; if it does not take it, it is empty afterwards."""
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
        """As `_joined`, of the state that is stored as the last of `keys`."""
        block = self._read(model, keys, keys[-1], fetched)
        return (block.payload, len(keys) * BLOCK_TOKENS, keys[-1:]) if block else (None, 0, keys[:-1])

    def _joined(
        self, model: _Model, keys: list[BlockKey], tokens: Sequence[int], live: int, fetched: dict[BlockKey, Block]
    ) -> tuple[Bytes | None, int, list[BlockKey]]:
        """The state of `keys` and of what begins like `tokens` behind them; its tokens; and the blocks that it is made of.

        None, 0 and those of `keys` that can be used, if it would not have more than `live` tokens, or one is damaged.
        """
        self.store.ahead(keys)
        at = len(keys) * BLOCK_TOKENS
        links = _links(keys[-1].name if keys else model.root, tokens[at:])
        behind = next((key for key in fetched if key.index == len(keys)), None)
        behind = behind or self.store.newest(model.name, links, len(keys))
        part = self._read(model, keys, behind, fetched) if behind else None
        common = _common(np.asarray(part.tokens, np.intc), tokens[at:]) if part else 0
        if common < LEAST_TOKENS:
            part, common = None, 0
        if at + common <= live:
            return None, 0, keys
        first = self._read(model, keys, keys[0], fetched) if keys else part
        layout = first.layout if first else None
        if layout is None:
            return None, 0, []
        if behind and part and part.layout != layout:
            self.store.drop([behind])
            part, common = None, 0
        if not self.make_room((at + common) * layout.token_bytes):
            self._writer.report("restored", "a prompt was not restored: %s", "memory is short")
            return None, 0, keys
        joined = Joined(layout, at + common)
        if part:
            joined.put(at, part.payload, common)

        def place(key: BlockKey) -> bool:
            block = self._read(model, keys, key, fetched) if key.index else first
            if block is None or block.layout != layout:
                self.store.drop([key])  # so that it is stored anew
                return False
            joined.put(key.index * BLOCK_TOKENS, block.payload)
            return True

        with ThreadPoolExecutor(_READERS) as readers:
            placed = list(readers.map(place, keys))
        if not all(placed):
            return None, 0, keys[: placed.index(False)]
        return joined.data, joined.tokens, [*keys, behind] if behind and part else keys

    def _evaluated(self, llama: Llama, model: _Model, keys: list[BlockKey], tokens: Sequence[int]) -> int:
        """Evaluates `tokens` to their last block boundary, and stores states on the way; returns the tokens it has then."""
        live = _common(llama.input_ids[: llama.n_tokens], tokens)
        if live < llama.n_tokens or not live:
            llama.reset()  # what is whole cannot be cut back
            live = 0
        for blocks in range(1, len(keys) + 1):
            at = blocks * BLOCK_TOKENS
            if at <= live or (blocks & (blocks - 1) and blocks < len(keys)):
                continue
            llama.eval(tokens[live:at])
            live = at
            if not llama._ctx.kv_cache_seq_rm(-1, live, -1):
                model.refused = "the model cannot continue from a state without evaluating the whole prompt again"
                log.warning("%s: nothing is restored or stored: %s", model.told["file"], model.refused)
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
        with contextlib.suppress(OSError):  # the directory may be gone; what was restored is right
            self.store.used(keys, tokens, size_bytes)


class _Writer:
    """One thread that writes blocks, behind a queue of at most `most_bytes` and half of the memory that is available.

    What does not fit is dropped.
    """

    def __init__(self, store: BlockStore, shared: SharedTier | None, counters: PrefixCounters, most_bytes: int) -> None:
        self._store, self._shared, self._counters, self._most = store, shared, counters, most_bytes
        self._changed = threading.Condition()
        self._tasks: deque[Task] = deque()
        self._pending: set[BlockKey] = set()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._reported: dict[str, tuple[float, int]] = {}  # by kind: when it was logged, and what was not since

    def has(self, key: BlockKey) -> bool:
        """True if `key` waits to be written."""
        return key in self._pending

    def memory(self, size_bytes: int, blocks: int, more_bytes: int = 0) -> Bytes | None:
        """Return memory for a state of `blocks` that is to wait; None, with the blocks dropped, if there is none for it.

        It has room for `more_bytes`, which take no memory until they are used. It does not come from the heap, which would
        not return it to the kernel.
        """
        with self._changed:
            why = "closed" if self._closed else "the queue is full" if self._is_full(size_bytes) else "memory is short"
            if why == "memory is short" and size_bytes <= tightest().spare_bytes // 2:
                with contextlib.suppress(OSError, MemoryError):
                    return huge_memory(size_bytes + more_bytes)
            self._drop(blocks, why, why)
            return None

    def make_room(self, size_bytes: int) -> bool:
        """Drop tasks, the last one first, until so much memory is available; return whether it is."""
        with self._changed:
            while (is_short := tightest().spare_bytes < size_bytes) and len(self._tasks) > 1:  # the first is being written
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
        """Log a failure, unless one of its kind was logged less than LOG_S ago; the next line says how many were not."""
        with self._changed:
            logged_s, left_out = self._reported.get(kind, (-LOG_S, 0))
            if time.monotonic() - logged_s < LOG_S:
                self._reported[kind] = (logged_s, left_out + 1)
                return
            self._reported[kind] = (time.monotonic(), 0)
            log.warning(message + " (%d more since the last line)" * bool(left_out), why, *([left_out] if left_out else []))

    def put(self, task: Task) -> None:
        """Have `task` written, unless too much waits already."""
        with self._changed:
            if self._closed or self._is_full(task.size_bytes):
                task.is_done = True
                why = "closed" if self._closed else "the queue is full"
                self._drop(len(task.keys), why, why)
                return
            self._tasks.append(task)
            self._pending.update(task.keys)
            if self._thread is None or not self._thread.is_alive():  # of a process that forked it has none
                self._thread = threading.Thread(target=self._run, name="llmcache-prefix", daemon=True)
                self._thread.start()
                atexit.register(self.close)
            self._changed.notify_all()

    def _end(self, task: Task) -> None:
        """Note that `task`, which is not in the queue any more, is written or dropped."""
        task.is_done = True
        task.block = _no_block  # the state that it holds
        self._pending.difference_update(task.keys)
        self._changed.notify_all()

    def flush(self, timeout_s: float | None) -> bool:
        """Returns whether nothing waits, after `timeout_s` at most."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._tasks, timeout_s)

    def close(self) -> None:
        """Writes what waits, and ends the thread."""
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
                self._store.describe(task.model.name, {**task.model.told, "token_s": task.model.token_s})
                used_ns = self._store.used(_keys(task.model, task.tokens, part=True))
                for key in task.keys:
                    self._counters.stored_bytes += self._write(task, key, used_ns)
                    written += 1
            except (LlmcacheError, OSError, MemoryError) as error:
                self.report(type(error).__name__, "a prompt was not stored: %s", error)
            except Exception:  # a bug here must not end storing, nor generation
                log.exception("%d blocks were not stored", len(task.keys) - written)
            with self._changed:
                self._counters.stored_blocks += written
                self._counters.dropped_blocks += len(task.keys) - written
                self._end(self._tasks.popleft())
            del task  # with the memory of its state

    def _write(self, task: Task, key: BlockKey, used_ns: int) -> int:
        block, links = task.block(key), list[str]()
        if key.kind != WHOLE:
            before = _keys(task.model, task.tokens[: key.index * BLOCK_TOKENS])[-1:]
            if before and before[0] not in self._store:
                raise EnvironmentProblem(f"{key.file}: the previous block was evicted: the prompt is larger than the limit")
            links = _links(before[0].name if before else task.model.root, block.tokens)
        written = self._store.write(key, block, links, used_ns)
        if self._shared is not None and task.pushed:
            self._shared.push(key, block, links)
        return written


def _block_of(state: State, tokens: list[int], key: BlockKey) -> Block:
    """The block `key` of `state`, whose tokens are `tokens`."""
    start = key.index * BLOCK_TOKENS
    end = min(start + BLOCK_TOKENS, len(tokens))
    payload = aligned((end - start) * state.layout.token_bytes)
    state.block(start, end, payload)
    return Block(payload, tuple(tokens[start:end]), state.layout)


def _copied(llama: Llama, memory: Bytes) -> Bytes:
    """The state of `llama`, in `memory`."""
    return memory[: llama_cpp.llama_state_get_data(llama.ctx, memory.ctypes.data_as(_U8), len(memory))]


def _no_block(key: BlockKey) -> Block:
    raise ValueError(f"{key.file}: the state was given back")


def _describe(llama: Llama) -> _Model:
    """What names the blocks of `llama`: all that its keys and values depend on besides the tokens. OSError.

    Its files count by all their bytes, not by name or time, so that a copy on another machine has the same blocks.
    """
    paths = [*model_files(llama.model_path), *([llama.lora_path] if llama.lora_path else [])]
    metadata, handle = llama.metadata, llama.model
    context = {name: getattr(llama.context_params, name) for name in _CONTEXT}
    # Some models have two sets of rope factors, for contexts up to a length (by default that of training) and beyond.
    if any(".rope.scaling." in key for key in metadata) or context["yarn_orig_ctx"]:
        context["n_ctx"] = llama.n_ctx()
    else:
        context["n_ctx"] = llama.n_ctx() > llama_cpp.llama_model_n_ctx_train(handle)
    told: dict[str, Any] = {
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
        return _Model(told, whole, "prompts with images cannot be identified by their tokens")
    if llama.context_params.embeddings:
        return _Model(told, whole, "the model computes embeddings")
    files = tuple(FileIdentity(path) for path in paths)
    # llama.cpp notes when it began to load, by the monotonic clock.
    loaded_ns = time.time_ns() - time.monotonic_ns() + int(llama_cpp.llama_perf_context(llama.ctx).t_start_ms * 1e6)
    replaced = [f"{os.path.realpath(path)} (deleted)" for path in paths]
    maps = Path("/proc/self/maps").read_text(errors="surrogateescape")
    if any(file.stamp.ctime_ns > loaded_ns for file in files) or any(name in maps for name in replaced):
        return _Model(told, whole, "the file was changed or replaced after it was loaded")
    return _Model(told, whole, files=files)


def _keys(model: _Model, tokens: Sequence[int], part: bool = False) -> list[BlockKey]:
    """The keys of all whole blocks of `tokens`, and with `part` of what is left behind them, if that is worth it."""
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
    """The name of the block of the tokens `ids` behind the block `parent`."""
    return hashlib.blake2b(bytes.fromhex(parent) + ids.tobytes(), digest_size=20).hexdigest()


def _is_of(model: _Model, keys: Sequence[BlockKey], key: BlockKey, block: Block) -> bool:
    """True if `block` has the tokens of which `key`, which is one of `keys` or behind them, is the name."""
    parent = keys[key.index - 1].name if key.index else model.root
    return _name(parent, np.asarray(block.tokens, np.dtype("<i4"))) == key.name


def _links(parent: str, tokens: Sequence[int]) -> list[str]:
    """The links to blocks behind the block `parent` that begin like `tokens`, the longest beginning first."""
    ids = np.asarray(tokens[: LINKED_TOKENS[0]], np.dtype("<i4"))
    begun = [bytes.fromhex(parent) + ids[:count].tobytes() for count in LINKED_TOKENS if count <= len(ids)]
    return [hashlib.blake2b(beginning, digest_size=20, person=b"link").hexdigest() for beginning in begun]


def _common(have: NDArray[np.intc], tokens: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
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
