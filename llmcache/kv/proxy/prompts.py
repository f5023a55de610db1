"""The slot files of a llama-server, each stored as a whole state in a BlockStore and named by its tokens.

A slot file has no checksum, and another request may have used the slot before it was saved, so the tokens are read from
the file. Two formats of the token list are supported: the plain list, and since version 4 of llama.cpp's sequence files
-1, 1, the length, the list, 0. States are not cut into blocks, because their layout differs between versions of
llama.cpp. The state of an attention cache can be used up to any token, so storing a prompt removes stored prefixes of
it, except with sliding windows or recurrent layers.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import secrets
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmcache import files
from llmcache.errors import DataError
from llmcache.kv.prefix import common_length
from llmcache.kv.prefix.store import WHOLE, BlockKey, BlockStore, block_name, key_of
from llmcache.kv.proxy.slots import Tokens
from llmcache.kv.spill.checksum import RunningChecksum

log = logging.getLogger("llmcache.kv")

_HEAD = struct.Struct("<III")  # magic, version, words that follow
_MAGIC = 0x67677371  # "ggsq"
_PACKED = (-1, 1)
_MOST_TOKENS = 1 << 24
_STATES_ONLY = (b".attention.sliding_window", b".ssm.", b".wkv.", b".shortconv.")
"""Metadata keys of models whose states can be used only to their end."""
_MODEL_HEAD_BYTES = 16 << 20


@dataclass(frozen=True)
class Found:
    """A stored prompt; `common`: length of its common prefix with a request."""

    key: BlockKey
    tokens: Tokens
    common: int


def tokens_of(path: Path) -> Tokens:
    """Return the tokens of the slot file at `path`. DataError: unknown format; OSError."""
    with open(path, "rb") as file:
        magic, _, count = _HEAD.unpack((file.read(_HEAD.size) + bytes(_HEAD.size))[: _HEAD.size])
        if magic != _MAGIC or not 0 < count < _MOST_TOKENS:
            raise DataError(f"{path.name}: unknown format")
        words = np.fromfile(file, np.dtype("<i4"), count).astype(np.int32)
    if len(words) == count > 3 and tuple(words[:2]) == _PACKED and words[2] == count - 4 and words[-1] == 0:
        words = words[3:-1]
    if len(words) not in (count, count - 4) or not len(words) or (words < 0).any():  # negative: an image, or another format
        raise DataError(f"{path.name}: unknown format")
    return words


def uses_states(model: str) -> bool:
    """Return whether the GGUF model has sliding windows or recurrent layers: its states are usable only to their end."""
    with open(model, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        return any(data.find(word, 0, _MODEL_HEAD_BYTES) >= 0 for word in _STATES_ONLY)


class StoredPrompts:
    """The prompts in `store` of the server with `fingerprint`. Thread-safe; `states_only`: see `uses_states`."""

    def __init__(self, store: BlockStore, fingerprint: str, described: dict[str, Any], states_only: bool) -> None:
        self.store, self.fingerprint, self.states_only = store, fingerprint, states_only
        self._described = described
        self._tokens: dict[str, Tokens] = {}
        self._lock = threading.Lock()
        sum_ = RunningChecksum()
        sum_.add(np.zeros(40, np.uint8))  # load its code now, and not while a prompt waits
        sum_.result()

    def longest(self, tokens: Tokens) -> Found | None:
        found = [Found(key, stored, common_length(stored, tokens)) for key, stored in self._known()]
        return max(found, key=self.usable, default=None)

    def usable(self, found: Found) -> int:
        if self.states_only and found.common < len(found.tokens):
            return found.common // 2  # from a checkpoint of the server, if there is one
        return found.common

    def _known(self) -> list[tuple[BlockKey, Tokens]]:
        names = set()
        with contextlib.suppress(OSError):
            names = set(os.listdir(self.store.directory / self.fingerprint))
        with self._lock:
            for name in self._tokens.keys() - names:
                del self._tokens[name]
            known = []
            for name in names:
                key = key_of(self.fingerprint, name)
                if key is None or key.kind != WHOLE:
                    continue
                if name not in self._tokens:
                    block = self.store.read(key, payload=False)
                    if block is None:
                        continue
                    self._tokens[name] = np.array(block.tokens, np.int32)
                known.append((key, self._tokens[name]))
            return known

    def export(self, found: Found, path: Path) -> int:
        """Write the state of a stored prompt to the new file `path`; return its size, 0 if it was missing or damaged."""
        fd = files.create(path)
        try:
            directory = os.stat(path.parent)
            if os.geteuid() == 0 and directory.st_uid:  # let the server, which owns the directory, read it
                os.fchown(fd, directory.st_uid, directory.st_gid)
            block = self.store.read(found.key, copy_to=fd)
            size = os.fstat(fd).st_size
        finally:
            os.close(fd)
        if block is None or common_length(np.array(block.tokens, np.int32), found.tokens) != len(found.tokens):
            return 0
        return size

    def record_use(self, found: Found, tokens: int, size_bytes: int) -> None:
        with contextlib.suppress(OSError):
            self.store.used([found.key], tokens, size_bytes)

    def drop(self, found: Found) -> None:
        self.store.drop([found.key])

    def keep(self, path: Path, tokens: Tokens, token_s: float) -> int:
        """Store the slot file at `path`, and return its size; 0 if it is stored already. LlmcacheError; OSError."""
        key = BlockKey(self.fingerprint, block_name(self.fingerprint, tokens), len(tokens) - 1, WHOLE)
        if key in self.store:
            self.store.used([key])
            return 0
        self.store.describe(self.fingerprint, {**self._described, "token_s": token_s})
        written = self.store.write_file(key, tuple(tokens.tolist()), path)
        if not self.states_only:
            known = [(other, stored) for other, stored in self._known() if len(stored) < len(tokens)]
            self.store.drop(other for other, stored in known if common_length(stored, tokens) == len(stored))
        return written


def room(store: BlockStore, size_bytes: int) -> str:
    """Return why a state of about `size_bytes` cannot be stored; an empty string if it can."""
    if size_bytes > store.limit_bytes:
        return "it exceeds --limit"
    try:
        status = os.statvfs(store.directory)
    except OSError as error:
        return str(error.strerror)
    # The slot file and the stored file exist at the same time. Blocks that could be evicted are not counted as free.
    return "" if size_bytes < status.f_bavail * status.f_frsize else "the file system is full"


class Spool:
    """The server's directory for slot files. Names are unique to a process; files of ended processes are removed.

    A process that runs holds the lock on its own lock file. OSError.
    """

    def __init__(self, directory: Path) -> None:
        self.directory, self._made = directory, 0
        for lock in directory.glob("llmcache-*.lock"):
            with contextlib.suppress(OSError):
                self._sweep(lock)
        self._name = f"llmcache-{secrets.token_hex(8)}"
        new, flags = directory / f"{self._name}.new", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._lock = os.open(new, flags, files.PRIVATE)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(new, directory / f"{self._name}.lock")

    def _sweep(self, lock: Path) -> None:
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for left in (*self.directory.glob(f"{lock.stem}-*.slot"), lock):
                left.unlink()
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def file(self) -> Iterator[Path]:
        self._made += 1
        path = self.directory / f"{self._name}-{self._made}.slot"
        try:
            yield path
        finally:
            with contextlib.suppress(OSError):
                path.unlink()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            for left in self.directory.glob(f"{self._name}*"):
                left.unlink()
            os.close(self._lock)
