"""A thread that writes the blocks of prompts."""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from llmcache.arrays import Bytes
from llmcache.errors import LlmcacheError, MissingRequirement
from llmcache.kv.llama.model import BLOCK_TOKENS, Model, keys_of, links_of
from llmcache.kv.prefix.shared import SharedTier
from llmcache.kv.prefix.store import WHOLE, Block, BlockKey, BlockStore
from llmcache.kv.spill.raw import huge_memory
from llmcache.memory import tightest

log = logging.getLogger("llmcache.kv")

LOG_S = 60.0  # least interval between log lines about the same kind of failure


@dataclass
class PrefixCounters:
    """Counters of a cache since its creation. `restore_s` includes reads."""

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
class Task:
    """Blocks to write; `tokens` are all tokens of the prompt, and `block` cuts a block when it is written.

    `pushed`: also send them to the shared tier. `memory` has the copy of the state, and is free for reuse when `is_done`.
    """

    model: Model
    keys: list[BlockKey]
    tokens: list[int]
    size_bytes: int
    block: Callable[[BlockKey], Block]
    pushed: bool = True
    memory: Bytes | None = None
    is_done: bool = False


class Writer:
    """Writes blocks from a queue that is limited to `most_bytes` and half of the available memory.

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
        return key in self._pending

    def memory(self, size_bytes: int, blocks: int, more_bytes: int = 0) -> Bytes | None:
        """Return memory for a state of `size_bytes`, with room for `more_bytes`, or None if the queue or the memory is full.

        In that case, `blocks` count as dropped. The memory is mapped, because the heap would not return it to the kernel.
        """
        with self._changed:
            why = "closed" if self._closed else "the queue is full" if self._is_full(size_bytes) else "memory is short"
            if why == "memory is short" and size_bytes <= tightest().spare_bytes // 2:
                with contextlib.suppress(OSError, MemoryError):
                    return huge_memory(size_bytes + more_bytes)
            self._drop(blocks, why, why)
            return None

    def make_room(self, size_bytes: int) -> bool:
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
        self._counters.dropped_blocks += blocks
        self.report(kind, "a prompt was not stored: %s", why)

    def report(self, kind: str, message: str, why: object) -> None:
        with self._changed:
            logged_s, left_out = self._reported.get(kind, (-LOG_S, 0))
            if time.monotonic() - logged_s < LOG_S:
                self._reported[kind] = (logged_s, left_out + 1)
                return
            self._reported[kind] = (time.monotonic(), 0)
            log.warning(message + " (%d more since the last line)" * bool(left_out), why, *([left_out] if left_out else []))

    def put(self, task: Task) -> None:
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
        with self._changed:
            return self._changed.wait_for(lambda: not self._tasks, timeout_s)

    def close(self) -> None:
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
                used_ns = self._store.used(keys_of(task.model, task.tokens, part=True))
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
            before = keys_of(task.model, task.tokens[: key.index * BLOCK_TOKENS])[-1:]
            if before and before[0] not in self._store:
                raise MissingRequirement(f"{key.file}: the previous block was evicted: the prompt is larger than the limit")
            links = links_of(before[0].name if before else task.model.root, block.tokens)
        written = self._store.write(key, block, links, used_ns)
        if self._shared is not None and task.pushed:
            self._shared.push(key, block, links)
        return written


def _no_block(key: BlockKey) -> Block:
    raise ValueError(f"{key.file}: the state was released")
