"""SharedTier: blocks on a Redis-compatible server, through which several machines share them.

The value of the key `llmcache:MODEL:NAME-INDEX.kind` has the contents of a block's file; the value of a link,
`llmcache:MODEL:LINK-INDEX.next`, is the name of a block (kv.prefix.store). Blocks are never removed explicitly:
configure the server with `maxmemory` and `allkeys-lru`, or pass a `ttl`. Checksums detect damage, not malice: a client
that may write to the server can substitute other states for a prompt.

A failed or late request costs only the hit. Then no requests are sent for PAUSE_S.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from llmcache.errors import DataError, MissingRequirement, UsageError
from llmcache.kv.prefix.store import Block, BlockKey, key_of, pack, unpack
from llmcache.kv.spill.layout import aligned

log = logging.getLogger("llmcache.kv")

PAUSE_S = 10.0
LARGEST = 512 << 20  # largest value in bytes that these servers accept
Answer = TypeVar("Answer")


class SharedTier:
    """The blocks on the server at `address` (redis://, rediss://, unix://), with `deadline_s` for each request.

    `ttl_ns`: expiry of a pushed block (0: none). UsageError: invalid `address`; MissingRequirement: redis-py is not
    installed; ValueError: `deadline_s` is not positive.
    """

    def __init__(self, address: str, deadline_s: float = 1.0, ttl_ns: int = 0) -> None:
        try:
            import redis
        except ImportError as error:
            raise MissingRequirement(f"shared: {error}", "pip install 'llmcache-toolkit[redis]'") from error
        if deadline_s <= 0:
            raise ValueError(f"deadline_s: must be more than 0, not {deadline_s}")
        self.deadline_s, self._expire_ms = deadline_s, ttl_ns // 10**6 or None
        try:
            self._redis: Any = redis.Redis.from_url(
                address, socket_timeout=deadline_s, socket_connect_timeout=deadline_s, retry=None
            )
        except ValueError as error:
            raise UsageError(f"shared: {error}", "for example redis://host:6379/0") from None
        self._silent_until = 0.0
        self.fetched_blocks = self.pushed_blocks = self.failures = 0

    def fetch(self, keys: Sequence[BlockKey], until_s: float) -> list[tuple[BlockKey, Block]]:
        """Return the blocks of `keys` up to the first missing, damaged or late one (`until_s`: `time.monotonic()`)."""
        found: list[tuple[BlockKey, Block]] = []
        for key in keys:
            begin = time.monotonic()
            block = self._block(key, until_s)
            if block is None:
                break
            found.append((key, block))
            if 2 * time.monotonic() - begin > until_s:
                break  # the next one would probably be late, which would count as a failure
        return found

    def newest(self, model: str, links: Sequence[str], index: int, until_s: float) -> tuple[BlockKey, Block] | None:
        names = self._asked(lambda: self._redis.mget([_link(model, link, index) for link in links]), until_s)
        found = names if isinstance(names, list) else []
        name = next((name for name in found if isinstance(name, bytes)), b"")
        key = key_of(model, name.decode(errors="replace"))
        block = self._block(key, until_s) if key is not None and key.index == index else None
        return (key, block) if key is not None and block is not None else None

    def push(self, key: BlockKey, block: Block, links: Sequence[str]) -> None:
        if len(block.payload) > LARGEST // 2:
            return
        value = b"".join(bytes(part) for part in pack(key, block))

        def put() -> bool:
            self._redis.set(_name(key), value, px=self._expire_ms)
            for link in links:
                self._redis.set(_link(key.model, link, key.index), key.file.rpartition("/")[2], px=self._expire_ms)
            return True

        self.pushed_blocks += bool(self._asked(put, time.monotonic() + self.deadline_s))

    def close(self) -> None:
        self._redis.close()

    def _block(self, key: BlockKey, until_s: float) -> Block | None:
        value = self._asked(lambda: self._redis.get(_name(key)), until_s)
        if not isinstance(value, bytes):
            return None
        buffer = aligned(len(value))
        buffer[:] = np.frombuffer(value, np.uint8)
        try:
            block = unpack(buffer, key, f"shared: {_name(key)}")
        except DataError as error:
            log.warning("%s: block ignored", error.message)
            self.failures += 1
            return None
        self.fetched_blocks += 1
        return block

    def _asked(self, request: Callable[[], Answer], until_s: float) -> Answer | None:
        """Return the result of `request`; None if the server fails or is late, or during a pause."""
        left = min(self.deadline_s, until_s - time.monotonic())
        if left <= 0 or time.monotonic() < self._silent_until:
            return None
        answers: list[Answer] = []
        errors: list[Exception] = []

        def ask() -> None:
            try:
                answers.append(request())
            except Exception as error:  # noqa: BLE001 - redis-py raises many types on invalid replies
                errors.append(error)

        thread = threading.Thread(target=ask, name="llmcache-shared", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # at interpreter exit, Python 3.12 and later start no more threads
            return None
        thread.join(left)
        if answers:
            return answers[0]
        self.failures += 1
        self._silent_until = time.monotonic() + PAUSE_S
        why = errors[0] if errors else f"no answer within {left:.1f} s"
        log.warning("shared: %s; no requests for %.0f s", why, PAUSE_S)
        if not errors:
            self._redis.connection_pool.disconnect()
        return None


def _name(key: BlockKey) -> str:
    return f"llmcache:{key.file.replace('/', ':')}"


def _link(model: str, link: str, index: int) -> str:
    return f"llmcache:{model}:{link}-{index}.next"
