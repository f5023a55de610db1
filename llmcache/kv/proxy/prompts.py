"""Stored prompts: files that llama-server saves of its slots, each a whole state in a BlockStore, named by its tokens.

A saved file has neither a name nor a checksum of its own. Its tokens are read from the file itself, so that it is stored as
what it is, whichever request the slot has served meanwhile. Two forms of its head are known: a list of tokens, and since
version 4 of llama.cpp's sequence files that list behind -1, 1 and its length, and before a 0. Files of another form are not
stored.

A state is stored whole: its form differs between versions of llama.cpp. The state of an attention cache can be used up to
any token, so a stored prompt replaces those that it begins with. States of sliding windows and recurrent layers can be used
to their end, and in part from the server's checkpoints, so all of them stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
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
from llmcache.kv.prefix.store import WHOLE, BlockKey, BlockStore, key_of
from llmcache.kv.proxy.slots import Tokens, common
from llmcache.kv.spill.checksum import RunningChecksum

log = logging.getLogger("llmcache.kv")

_HEAD = struct.Struct("<III")  # magic, version, words that follow
_MAGIC = 0x67677371  # "ggsq"
_PACKED = (-1, 1)
_MOST_TOKENS = 1 << 24
_STATES_ONLY = (b".attention.sliding_window", b".ssm.", b".wkv.", b".shortconv.")
"""Keys of models whose states cannot be used up to any token."""
_MODEL_HEAD_BYTES = 16 << 20


@dataclass(frozen=True)
class Found:
    """A stored prompt that begins like a request's: its block, its tokens, and how many the two have in common."""

    key: BlockKey
    tokens: Tokens
    common: int


def tokens_of(path: Path) -> Tokens:
    """Return the tokens of the slot file at `path`. DataError: its form is not known; OSError."""
    with open(path, "rb") as file:
        magic, _, count = _HEAD.unpack((file.read(_HEAD.size) + bytes(_HEAD.size))[: _HEAD.size])
        if magic != _MAGIC or not 0 < count < _MOST_TOKENS:
            raise DataError(f"{path.name}: its form is not known")
        words = np.fromfile(file, np.dtype("<i4"), count).astype(np.int32)
    if len(words) == count > 3 and tuple(words[:2]) == _PACKED and words[2] == count - 4 and words[-1] == 0:
        words = words[3:-1]
    if len(words) not in (count, count - 4) or not len(words) or (words < 0).any():  # negative: an image, or another form
        raise DataError(f"{path.name}: its form is not known")
    return words


def uses_states(model: str) -> bool:
    """Return whether states of the GGUF model can be used to their end only, because of windows or recurrent layers."""
    with open(model, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        return any(data.find(word, 0, _MODEL_HEAD_BYTES) >= 0 for word in _STATES_ONLY)


class StoredPrompts:
    """The prompts of one server and model, below `store`, named by `fingerprint`. Methods may run on several threads."""

    def __init__(self, store: BlockStore, fingerprint: str, described: dict[str, Any], states_only: bool) -> None:
        self.store, self.fingerprint, self.states_only = store, fingerprint, states_only
        self._described = described
        self._tokens: dict[str, Tokens] = {}
        self._lock = threading.Lock()
        sum_ = RunningChecksum()
        sum_.add(np.zeros(40, np.uint8))  # its code is loaded now, and not while a prompt waits
        sum_.result()

    def longest(self, tokens: Tokens) -> Found | None:
        """Return the stored prompt of which most can be used for `tokens`; None if there is none."""
        found = [Found(key, stored, common(stored, tokens)) for key, stored in self._known()]
        return max(found, key=self.usable, default=None)

    def usable(self, found: Found) -> int:
        """Return how many tokens of the state can probably be used."""
        if self.states_only and found.common < len(found.tokens):
            return found.common // 2  # from a checkpoint of the server, if there is one
        return found.common

    def _known(self) -> list[tuple[BlockKey, Tokens]]:
        """All stored prompts; those that other processes have stored meanwhile are read."""
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
        """Write the state of a stored prompt to the new file `path`, and return its bytes; 0 if it is gone or damaged.

        A damaged one is removed. OSError.
        """
        fd = files.create(path)
        try:
            directory = os.stat(path.parent)
            if os.geteuid() == 0 and directory.st_uid:  # the server runs as the owner of its directory
                os.fchown(fd, directory.st_uid, directory.st_gid)
            block = self.store.read(found.key, copy_to=fd)
            size = os.fstat(fd).st_size
        finally:
            os.close(fd)
        if block is None or common(np.array(block.tokens, np.int32), found.tokens) != len(found.tokens):
            return 0
        return size

    def note_use(self, found: Found, tokens: int, size_bytes: int) -> None:
        """Record that `tokens` of a stored prompt were restored."""
        with contextlib.suppress(OSError):
            self.store.used([found.key], tokens, size_bytes)

    def drop(self, found: Found) -> None:
        """Remove a stored prompt that the server does not take."""
        self.store.drop([found.key])

    def keep(self, path: Path, tokens: Tokens, token_s: float) -> int:
        """Store the slot file at `path`, and return its bytes: 0 if it is stored already. LlmcacheError; OSError.

        `token_s`: seconds of evaluating a token.
        """
        key = BlockKey(self.fingerprint, _name(self.fingerprint, tokens), len(tokens) - 1, WHOLE)
        if key in self.store:
            self.store.used([key])
            return 0
        self.store.describe(self.fingerprint, {**self._described, "token_s": token_s})
        written = self.store.write_file(key, tuple(tokens.tolist()), path)
        if not self.states_only:
            known = [(other, stored) for other, stored in self._known() if len(stored) < len(tokens)]
            self.store.drop(other for other, stored in known if common(stored, tokens) == len(stored))
        return written


def room(store: BlockStore, size_bytes: int) -> str:
    """Return why a state of about `size_bytes` cannot be stored; empty if it can."""
    if size_bytes > store.limit_bytes:
        return "it does not fit the limit"
    try:
        status = os.statvfs(store.directory)
    except OSError as error:
        return str(error.strerror)
    # The server's file and the stored one exist together for a moment. What can be evicted is not counted here.
    return "" if size_bytes < status.f_bavail * status.f_frsize else "the file system is full"


def _name(fingerprint: str, tokens: Tokens) -> str:
    return hashlib.blake2b(bytes.fromhex(fingerprint) + tokens.astype("<i4").tobytes(), digest_size=20).hexdigest()


class Spool:
    """The server's directory for slot files, with names of this process; those of processes that have ended are removed.

    A lock on a file of its own says that a process still runs.
    """

    def __init__(self, directory: Path) -> None:
        """OSError."""
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
        """Yield a path for one slot file, which is removed afterwards."""
        self._made += 1
        path = self.directory / f"{self._name}-{self._made}.slot"
        try:
            yield path
        finally:
            with contextlib.suppress(OSError):
                path.unlink()

    def close(self) -> None:
        """Remove what this process has made."""
        with contextlib.suppress(OSError):
            self._sweep_own()

    def _sweep_own(self) -> None:
        for left in self.directory.glob(f"{self._name}*"):
            left.unlink()
        os.close(self._lock)
