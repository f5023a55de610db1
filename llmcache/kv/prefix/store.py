"""BlockStore: a directory with one file for each block, which several processes read and write at once.

    DIR/lock                          used bytes and the newest time of use, changed only under its lock (flock)
    DIR/MODEL/model.json, uses        the input of the fingerprint MODEL; counters of restores
    DIR/MODEL/NAME-INDEX.kv           a block; INDEX counts from 0, NAME is a hash of all tokens up to its end
    DIR/MODEL/NAME-INDEX.part         the last block of a prompt, with fewer tokens
    DIR/MODEL/NAME-INDEX.state        a whole state that ends with this block, for states that cannot be cut
    DIR/MODEL/LINK-INDEX.next         a link to the newest block INDEX whose first tokens have the hash LINK

A file is synced before it is renamed to its final name. A reader verifies the checksum and removes a damaged block. Links
lead to parts, and to blocks of which only the first tokens can be used. A part is removed when a block is stored that begins
with all of its tokens.

The lock is held to create and to publish a file, to evict and to record a use, never while a block is read or written. A
writer locks its temporary file, so a sweep recognizes the files of dead writers.

The modification time of a file is the time of its last use, which increases even if the clock goes back. Among the blocks of
one use, the last is evicted first, because a block cannot be used without those before it.

Blocks are not compressed: zstd (level 1) saves 7 % of F16 keys and values at 0.5 GB/s (measured by `tools/bench prefix` on
SmolLM2), and storage is as fast.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import stat
import struct
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmcache import files
from llmcache.arrays import Bytes
from llmcache.errors import DataError, LlmcacheError, MissingRequirement, UsageError
from llmcache.kv.prefix.state import StateLayout
from llmcache.kv.spill.checksum import RunningChecksum, checksums
from llmcache.kv.spill.layout import aligned, whole_blocks
from llmcache.kv.spill.raw import RawFile
from llmcache.units import format_size, parse_duration, parse_size

log = logging.getLogger("llmcache.kv")

CUT, PART, WHOLE = "kv", "part", "state"  # kinds of blocks; also the suffixes of their files
VERSION = 1
_MAGIC = b"llmcKVB1"
_HEAD = struct.Struct("<8sIII")  # magic, version, bytes of the JSON behind it, their CRC
_LOCK = struct.Struct("<8sQQ")  # magic, used bytes, newest stamp
_USES = struct.Struct("<QQQ")  # restores, tokens, bytes
_MOST_USES = (1 << 64) - 1
_READING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # O_NONBLOCK: opening a FIFO must not block
_MOST_DESCRIBED = 1 << 20
_MOST_HEAD = 1 << 16  # largest header in bytes: room for 256 tokens and the layout of the deepest model
_MOST_WHOLE_HEAD = 1 << 26  # largest header of a whole state in bytes; it may list all tokens of the state
_COPY_BYTES = 8 << 20
_MODEL = re.compile(r"[0-9a-f]{32}")
_BLOCK = re.compile(rf"([0-9a-f]{{40}})-(0|[1-9][0-9]{{0,8}})\.({CUT}|{PART}|{WHOLE})")
_NEXT = re.compile(r"[0-9a-f]{40}-[0-9]{1,9}\.next")
_TEMPORARY = re.compile(r"new-([0-9a-f]{16}\.tmp|[0-9]+-model\.json)")
FLOOR_BYTES, FLOOR_SHARE = 10**9, 0.05
"""Free space to leave by default: the smaller of a size in bytes and a share of the file system."""
_SPARE = 0.95  # eviction frees space down to this share of the limit, so that not every write has to list all blocks


@dataclass(frozen=True)
class BlockKey:
    """Identifies a block by the model's fingerprint, the block's name, its index from 0, and its kind."""

    model: str
    name: str
    index: int
    kind: str = CUT

    @property
    def base(self) -> str:
        return f"{self.name}-{self.index}.{self.kind}"

    @property
    def file(self) -> str:
        return f"{self.model}/{self.base}"


@dataclass(frozen=True)
class Block:
    """The contents of a block: its tokens, and their keys and values in `layout`, None for a whole state."""

    payload: Bytes
    tokens: tuple[int, ...]
    layout: StateLayout | None = None


@dataclass(frozen=True)
class Entry:
    """A stored block, and the time of its last use (ns since 1970)."""

    key: BlockKey
    size_bytes: int
    used_ns: int


class Uses(NamedTuple):
    """Totals of the restores of one model."""

    restores: int = 0
    restored_tokens: int = 0
    restored_bytes: int = 0


@dataclass(frozen=True)
class StoredModel:
    """Summary of one model in a store."""

    fingerprint: str
    file: str  # name of the model's file; empty if `model.json` is missing
    blocks: dict[str, int]  # number by kind
    size_bytes: int
    longest_tokens: int  # longest stored prompt, in whole blocks
    used_ns_ago: int
    unused_ns: int  # age of the least recently used block
    restores: int
    restored_tokens: int
    restored_bytes: int
    described: dict[str, Any]  # contents of `model.json`


@dataclass(frozen=True)
class Pruned:
    """The removed and the remaining blocks."""

    removed_blocks: int
    removed_bytes: int
    left_blocks: int
    left_bytes: int


class BlockStore:
    """The blocks below `directory`, which is created if it does not exist (mode 0700; files have 0600).

    The store keeps at most `limit_bytes`, evicts blocks that were not used for `ttl_ns` (0: no expiry; checked when the
    store is opened, written or restored from), and leaves `floor_bytes` of the file system free (None: FLOOR_BYTES or
    FLOOR_SHARE). `limit_bytes` None opens an existing store for listing and pruning.

    UsageError: not a directory, or without `limit_bytes` not a store; MissingRequirement: it is not writable.
    """

    def __init__(
        self,
        directory: str | Path,
        limit_bytes: int | None,
        ttl_ns: int = 0,
        floor_bytes: int | None = 0,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self.directory = Path(directory)
        self.limit_bytes = _NO_LIMIT if limit_bytes is None else limit_bytes
        self.ttl_ns, self.floor_bytes = ttl_ns, floor_bytes or 0
        self._clock = clock
        self.evicted = 0  # blocks
        self._looked_ns = clock()  # time of the last check for expired blocks
        if limit_bytes is None:
            if not (self.directory / "lock").is_file():
                raise UsageError(
                    f"{self.directory}: has no stored prompts", "name the directory of a PrefixCache or of serve-llama"
                )
            return
        _checksum(np.zeros(8, np.uint8))  # load its code now, and not while a prompt waits
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if floor_bytes is None:
                status = os.statvfs(self.directory)
                self.floor_bytes = min(FLOOR_BYTES, int(FLOOR_SHARE * status.f_blocks * status.f_frsize))
            with self._account() as account:
                self._sweep()
                self._evict(account, 0)
        except FileExistsError:
            raise UsageError(f"{self.directory}: not a directory", "give a directory for the blocks") from None
        except OSError as error:
            raise MissingRequirement(f"{self.directory}: {error.strerror}", "give a writable directory") from None

    # Reading

    def __contains__(self, key: BlockKey) -> bool:
        """Return whether the block is stored and not expired; it may be damaged, or evicted before it is read."""
        try:
            with self._opened(key.model) as directory:
                status = os.stat(key.base, dir_fd=directory, follow_symlinks=False)
        except OSError:
            return False
        return stat.S_ISREG(status.st_mode) and not self._is_old(status.st_mtime_ns)

    def ahead(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            with contextlib.suppress(OSError), self._opened(key.model) as directory:
                fd = os.open(key.base, _READING | os.O_CLOEXEC, dir_fd=directory)
                try:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
                finally:
                    os.close(fd)

    def newest(self, model: str, links: Iterable[str], index: int) -> BlockKey | None:
        for link in links:
            with contextlib.suppress(OSError), self._opened(model) as directory:
                key = key_of(model, os.readlink(f"{link}-{index}.next", dir_fd=directory))
                if key is not None and key.index == index and key in self:
                    return key
        return None

    def read(self, key: BlockKey, payload: bool = True, copy_to: int | None = None) -> Block | None:
        """Return the block stored as `key`; None if it is missing, or damaged and removed.

        With `payload` False, only the header is read. With `copy_to`, an empty file open for writing, the payload is copied
        to it instead of being returned. OSError: `copy_to` cannot be written.
        """
        path = self.directory / key.file
        try:
            with self._opened(key.model) as directory:
                raw = RawFile(path, _READING, directory=directory)
        except (OSError, MissingRequirement):
            return None
        try:
            status = os.fstat(raw.fd)
            if not stat.S_ISREG(status.st_mode):
                return None
            end, crc, block = _head(_head_bytes(raw, key), status.st_size, key, path)
            if copy_to is not None:
                _copied(raw, end, status.st_size, crc, copy_to)
            if not payload or copy_to is not None:
                return block
            data = aligned(status.st_size - end)
            raw.read_into(data, end)
            return _filled(block, data, crc, path)
        except (LlmcacheError, MemoryError) as error:
            log.warning("%s: block removed", error.message if isinstance(error, LlmcacheError) else f"{path}: too large")
            self.drop([key])
            return None
        finally:
            raw.close()

    def used(self, keys: list[BlockKey], tokens: int = 0, size_bytes: int = 0) -> int:
        """Set the time of last use of `keys`, the blocks of one prompt, to now, and return it. OSError.

        `tokens` and `size_bytes` are added to the totals of restores, unless `tokens` is 0.
        """
        with self._account() as account:
            stamp = account.stamp()
            for key in keys:
                with contextlib.suppress(FileNotFoundError), self._opened(key.model) as directory:
                    os.utime(key.base, ns=(stamp, stamp), dir_fd=directory, follow_symlinks=False)
            if not tokens:
                return stamp
            uses = zip(self.uses(keys[0].model), (1, tokens, size_bytes), strict=True)
            packed = _USES.pack(*(min(sum(pair), _MOST_USES) for pair in uses))
            with self._opened(keys[0].model) as directory:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                fd = os.open("uses", flags, files.PRIVATE, dir_fd=directory)
            try:
                os.pwrite(fd, packed, 0)
            finally:
                os.close(fd)
            return stamp

    # Writing

    def describe(self, model: str, described: dict[str, Any]) -> None:
        """Write `described`, the input of the fingerprint, to `model.json`, unless that exists. OSError."""
        if not (self.directory / model / "model.json").exists():
            # Under the lock, so that a sweep, or `_forget` of a model without blocks, sees no unfinished file.
            with (
                self._account(),
                self._opened(model, make=True) as directory,
                files.replacing(f"/proc/self/fd/{directory}/model.json") as stream,
            ):
                stream.write(json.dumps(described, indent=1).encode())

    def write(self, key: BlockKey, block: Block, links: Iterable[str] = (), used_ns: int | None = None) -> int:
        """Store `block` as `key`, point `links` to it, and return the size of its file.

        With `used_ns`, the result of `used` for the prompt, the first blocks of a prompt that is too large are not evicted
        for the last ones. MissingRequirement: no space, or writing failed.
        """
        return self._publish(key, pack(key, block), links, block, used_ns)

    def write_file(self, key: BlockKey, tokens: tuple[int, ...], path: Path) -> int:
        """Store the contents of the file at `path` as `key`, like `write`, without loading it into memory. OSError."""
        with open(path, "rb", buffering=0) as file:
            size, sum_ = os.fstat(file.fileno()).st_size, RunningChecksum()
            for piece in _pieces(file.fileno(), 0, size, path):
                sum_.add(piece)
            head = _packed_head(key, size, sum_.result(), tokens, None)
            block = Block(np.empty(0, np.uint8), tokens)
            return self._publish(key, [head], (), block, None, (file.fileno(), size))

    def _publish(
        self,
        key: BlockKey,
        parts: Sequence[Bytes | bytes],
        links: Iterable[str],
        block: Block,
        used_ns: int | None,
        behind: tuple[int, int] | None = None,
    ) -> int:
        size = sum(len(part) for part in parts) + (behind[1] if behind else 0)
        more = _pieces(behind[0], 0, behind[1], key.file) if behind else ()
        if size > self.limit_bytes:
            raise MissingRequirement(
                f"{key.file}: {format_size(size)} is more than the limit of {format_size(self.limit_bytes)}"
            )
        directory = self.directory / key.model
        try:
            self._make_room(size)
            with self._written(key.model, chain(parts, more)) as (raw, opened), self._account() as account:
                if account.used_bytes + size > self.limit_bytes:
                    self._evict(account, size)
                stamp = account.stamp() if used_ns is None else used_ns
                os.utime(raw.fd, ns=(stamp, stamp))
                # If another process has stored the same block, its bytes are the same.
                replaced_bytes = self._size(key)
                # The directory is not synced: a name that is lost in a crash costs only a hit.
                os.replace(raw.path.name, key.base, src_dir_fd=opened, dst_dir_fd=opened)
                account.used_bytes += size - replaced_bytes
                account.used_bytes -= self._link(key, block, links)
        except OSError as error:
            raise MissingRequirement(f"{directory}: cannot store a block: {error.strerror}") from None
        return size

    @contextlib.contextmanager
    def _written(self, model: str, parts: Iterable[Bytes | bytes]) -> Iterator[tuple[RawFile, int]]:
        """Yield a new, locked, synced file and its open directory; remove the file unless it was renamed."""
        temporary, at = self.directory / model / f"new-{secrets.token_hex(8)}.tmp", 0
        with contextlib.ExitStack() as stack:
            with self._account():  # so that a sweep, or `_forget` of a model without blocks, never sees it unlocked
                directory = stack.enter_context(self._opened(model, make=True))
                raw = RawFile(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, directory=directory)
                stack.callback(raw.close)
                raw.lock()
            try:
                for part in parts:
                    raw.write(part, at)
                    at += len(part)
                raw.sync()
                yield raw, directory
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(temporary.name, dir_fd=directory)

    def _link(self, key: BlockKey, block: Block, links: Iterable[str]) -> int:
        """Point `links` to `key`; remove the parts they pointed to that `block` begins with, and return their bytes."""
        freed = 0
        for link in links:
            before = self.newest(key.model, [link], key.index)
            temporary = f"new-{secrets.token_hex(8)}.tmp"
            # Ignore file systems without symbolic links: blocks are not found by their first tokens there.
            with contextlib.suppress(OSError), self._opened(key.model) as directory:
                os.symlink(key.base, temporary, dir_fd=directory)
                os.replace(temporary, f"{link}-{key.index}.next", src_dir_fd=directory, dst_dir_fd=directory)
            if before is not None and before != key and before.kind == PART:
                part = self.read(before, payload=False)
                if part is not None and part.tokens == block.tokens[: len(part.tokens)]:
                    freed += self._size(before)
                    self.drop([before])
        return freed

    def drop(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            with contextlib.suppress(OSError), self._opened(key.model) as directory:
                os.unlink(key.base, dir_fd=directory)

    def prune(self, keep_bytes: int | None = None, unused_ns: int | None = None, model: str | None = None) -> list[Entry]:
        """Remove blocks of `model` (None: of all models), and return them. OSError.

        With `unused_ns`, blocks unused for longer are removed; with `keep_bytes`, the least recently used ones above it;
        without both, all.
        """
        if keep_bytes is None:
            keep_bytes = -1 if unused_ns is None else _NO_LIMIT  # -1: also remove empty files
        with self._account() as account:
            entries = [entry for entry in self._aged() if model in (None, entry.key.model)]
            gone = self._remove_oldest(entries, keep_bytes, unused_ns)
            rest = self._aged()
            account.used_bytes = sum(entry.size_bytes for entry in rest)
            if gone:
                self._forget({entry.key.model for entry in gone} - {entry.key.model for entry in rest})
        return gone

    # Listing

    def entries(self) -> list[Entry]:
        found = []
        for model in self.models():
            for item in self._files(model):
                key = key_of(model, item.name)
                with contextlib.suppress(FileNotFoundError):
                    if key is not None and item.is_file(follow_symlinks=False):
                        status = item.stat(follow_symlinks=False)
                        found.append(Entry(key, status.st_size, status.st_mtime_ns))
        return found

    def models(self) -> list[str]:
        with os.scandir(self.directory) as listing:
            return sorted(i.name for i in listing if _MODEL.fullmatch(i.name) and i.is_dir(follow_symlinks=False))

    def description(self, model: str) -> dict[str, Any]:
        try:
            described = json.loads(self._small_file(model, "model.json"))
        except (OSError, ValueError, RecursionError):
            return {}
        return described if isinstance(described, dict) else {}

    def uses(self, model: str) -> Uses:
        try:
            return Uses(*_USES.unpack(self._small_file(model, "uses")))
        except (OSError, struct.error):
            return Uses()

    # Implementation

    @contextlib.contextmanager
    def _opened(self, model: str, make: bool = False) -> Iterator[int]:
        if make:
            (self.directory / model).mkdir(mode=0o700, exist_ok=True)
        fd = os.open(self.directory / model, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)

    def _small_file(self, model: str, name: str) -> bytes:
        with self._opened(model) as directory:
            fd = os.open(name, _READING | os.O_CLOEXEC, dir_fd=directory)
        with open(fd, "rb") as file:
            return file.read(_MOST_DESCRIBED)

    def _files(self, model: str) -> list[os.DirEntry[str]]:
        with contextlib.suppress(OSError), os.scandir(self.directory / model) as listing:
            return list(listing)
        return []

    def _size(self, key: BlockKey) -> int:
        try:
            return os.stat(self.directory / key.file, follow_symlinks=False).st_size
        except FileNotFoundError:
            return 0

    def _is_old(self, used_ns: int) -> bool:
        return bool(self.ttl_ns) and self._clock() - used_ns > self.ttl_ns

    def _make_room(self, size: int) -> None:
        """Evict until `size` more bytes leave the floor free; MissingRequirement if eviction does not free enough."""
        if self.lacking(size) > 0:
            with self._account() as account:
                self._evict(account, 0, self.lacking(size))
            if self.lacking(size) > 0:
                left = format_size(self.floor_bytes)
                raise MissingRequirement(f"{self.directory}: the file system would have less than {left} of free space")

    def lacking(self, size: int) -> int:
        """Return the bytes to free before `size` more can be written; 0 or less: none."""
        status = os.statvfs(self.directory)
        return self.floor_bytes + size - status.f_bavail * status.f_frsize

    def room_bytes(self) -> int:
        """Return how many bytes of blocks fit: those that are stored, and those that can still be written."""
        stored = sum(entry.size_bytes for entry in self.entries())
        return min(self.limit_bytes, stored - self.lacking(0))

    def _aged(self) -> list[Entry]:
        return sorted(self.entries(), key=lambda entry: (entry.used_ns, -entry.key.index))

    def _evict(self, account: _Account, size: int, least: int = 0) -> None:
        self._looked_ns = self._clock()
        entries = self._aged()
        account.newest_ns = max((entry.used_ns for entry in entries), default=0)
        used = sum(entry.size_bytes for entry in entries)
        aim = int(self.limit_bytes * _SPARE) - size if used + size > self.limit_bytes else used
        gone = self._remove_oldest(entries, min(aim, used - least), self.ttl_ns or None)
        self.evicted += len(gone)
        account.used_bytes = used - sum(entry.size_bytes for entry in gone)

    def _remove_oldest(self, entries: list[Entry], keep_bytes: int, unused_ns: int | None) -> list[Entry]:
        now, left, gone = self._clock(), sum(entry.size_bytes for entry in entries), []
        for entry in entries:
            if left <= keep_bytes and (unused_ns is None or now - entry.used_ns <= unused_ns):
                break
            with contextlib.suppress(FileNotFoundError), self._opened(entry.key.model) as directory:
                os.unlink(entry.key.base, dir_fd=directory)
            gone.append(entry)
            left -= entry.size_bytes
        for model in self.models():
            for item in self._files(model):
                if _NEXT.fullmatch(item.name) and item.is_symlink() and not os.path.exists(item.path):
                    os.unlink(item.path)
        return gone

    def _forget(self, models: Iterable[str]) -> None:
        for model in models:
            for name in ("model.json", "uses"):
                with contextlib.suppress(OSError):
                    os.unlink(self.directory / model / name)
            with contextlib.suppress(OSError):  # it has files of others, or one that is being written
                os.rmdir(self.directory / model)

    def _sweep(self) -> None:
        for model in self.models():
            for item in self._files(model):
                if not _TEMPORARY.fullmatch(item.name):
                    continue
                with contextlib.suppress(LlmcacheError, OSError):
                    if item.is_symlink():
                        os.unlink(item.path)
                        continue
                    raw = RawFile(Path(item.path), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
                    try:
                        raw.lock()
                        os.unlink(item.path)
                    finally:
                        raw.close()

    @contextlib.contextmanager
    def _account(self) -> Iterator[_Account]:
        """Yield the account while holding the lock of the directory; write it back at the end. OSError."""
        fd = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, files.PRIVATE)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            packed = os.pread(fd, _LOCK.size, 0)
            magic, used, newest = _LOCK.unpack(packed) if len(packed) == _LOCK.size else (b"", 0, 0)
            is_whole = magic == _MAGIC and max(used, newest) < _NO_LIMIT
            account = _Account(self._clock, *((used, newest) if is_whole else (0, 0)))
            if not is_whole or (self.ttl_ns and abs(self._clock() - self._looked_ns) > self.ttl_ns // 16):
                self._evict(account, 0)
            try:
                yield account
            finally:
                os.pwrite(fd, _LOCK.pack(_MAGIC, max(0, account.used_bytes), account.newest_ns), 0)
        finally:
            os.close(fd)


_NO_LIMIT = 1 << 63


@dataclass
class _Account:
    clock: Callable[[], int]
    used_bytes: int
    newest_ns: int

    def stamp(self) -> int:
        """Return the time for a new use: now, but always later than every earlier one."""
        self.newest_ns = max(self.clock(), self.newest_ns + 1)
        return self.newest_ns


def listed(directory: str | Path) -> list[StoredModel]:
    """Return the models stored below `directory`, most recently used first; UsageError: not the directory of a store."""
    store, now = BlockStore(directory, None), time.time_ns()
    by_model: dict[str, list[Entry]] = defaultdict(list)
    for entry in store.entries():
        by_model[entry.key.model].append(entry)
    found = []
    for model in store.models():
        entries, described = by_model[model], store.description(model)
        if not entries and not described:
            continue
        tokens, ages = described.get("block_tokens"), [max(0, now - entry.used_ns) for entry in entries]
        longest = max((entry.key.index + (entry.key.kind != PART) for entry in entries), default=0)
        found.append(
            StoredModel(
                fingerprint=model,
                file=str(described.get("file", "")),
                blocks=dict(sorted(Counter(entry.key.kind for entry in entries).items())),
                size_bytes=sum(entry.size_bytes for entry in entries),
                longest_tokens=longest * (tokens if isinstance(tokens, int) else 0),
                used_ns_ago=min(ages, default=0),
                unused_ns=max(ages, default=0),
                **store.uses(model)._asdict(),
                described=described,
            )
        )
    return sorted(found, key=lambda model: model.used_ns_ago)


def chosen(models: list[StoredModel], name: str) -> StoredModel:
    """Return the only model whose fingerprint begins with `name` or whose file is `name`; UsageError: none, or several."""
    found = [model for model in models if model.fingerprint.startswith(name) or model.file == name]
    if len(found) != 1:
        matched = "several models" if found else "no model"
        known = ", ".join(f"{model.fingerprint[:8]} ({model.file})" for model in found or models)
        raise UsageError(f"'{name}' matches {matched}", f"give a fingerprint: {known}" if known else None)
    return found[0]


def pruned(directory: str | Path, unused: str | None, keep: str | None, model: str | None) -> Pruned:
    """Remove blocks below `directory`: unused for longer than `unused`, and the least recently used above `keep` bytes.

    `model` restricts both to one model, and alone removes all of its blocks. UsageError: no condition, or an invalid one.
    """
    if unused is None and keep is None and model is None:
        raise UsageError(
            "none of --unused, --keep and --model is given", "for example --unused 30d, or --keep 10G; --keep 0 removes all"
        )
    unused_ns = None if unused is None else parse_duration(unused)
    keep_bytes = None if keep is None else parse_size(keep)
    store = BlockStore(directory, None)
    fingerprint = None if model is None else chosen(listed(directory), model).fingerprint
    gone = store.prune(keep_bytes, unused_ns, fingerprint)
    left = store.entries()
    return Pruned(len(gone), sum(entry.size_bytes for entry in gone), len(left), sum(entry.size_bytes for entry in left))


def block_name(parent: str, ids: NDArray[Any]) -> str:
    """Return the name of the block with the tokens `ids` that follows the block `parent`."""
    return hashlib.blake2b(bytes.fromhex(parent) + ids.astype("<i4").tobytes(), digest_size=20).hexdigest()


def key_of(model: str, name: str) -> BlockKey | None:
    """Return the key of the block in the file `name`; None if it is another file."""
    match = _BLOCK.fullmatch(name)
    return BlockKey(model, match[1], int(match[2]), match[3]) if match else None


def pack(key: BlockKey, block: Block) -> list[Bytes | bytes]:
    """Return the header and the payload of `block`."""
    head = _packed_head(key, len(block.payload), _checksum(block.payload), block.tokens, block.layout)
    return [head, block.payload]


def _packed_head(key: BlockKey, size: int, crc: int, tokens: tuple[int, ...], layout: StateLayout | None) -> bytes:
    header = {
        "key": [key.model, key.name, key.index, key.kind],
        "bytes": size,
        "crc": crc,
        "tokens": tokens,
        "layout": layout.to_json() if layout else None,
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    head = _HEAD.pack(_MAGIC, VERSION, len(text), zlib.crc32(text)) + text
    return head.ljust(whole_blocks(len(head)), b"\0")


def unpack(data: Bytes, key: BlockKey, where: object) -> Block:
    """Return the block that `pack` packed as `key`; DataError names `where` if the data is damaged."""
    end, crc, block = _head(data[:_MOST_HEAD].tobytes(), len(data), key, where)
    return _filled(block, data[end:], crc, where)


def _head_bytes(raw: RawFile, key: BlockKey) -> bytes:
    data = raw.read(_MOST_HEAD, 0)
    if key.kind == WHOLE and len(data) >= _HEAD.size:
        wanted = _HEAD.size + _HEAD.unpack_from(data)[2]
        if _MOST_HEAD < wanted <= _MOST_WHOLE_HEAD:
            return raw.read(wanted, 0)
    return data


def _pieces(fd: int, start: int, end: int, where: object) -> Iterator[Bytes]:
    """Yield the bytes from `start` to `end` in a buffer that is reused. DataError: truncated."""
    buffer = aligned(min(_COPY_BYTES, max(1, end - start)))
    while start < end:
        count = os.preadv(fd, [buffer[: min(len(buffer), end - start)].data], start)
        if not count:
            raise DataError(f"{where}: truncated")
        yield buffer[:count]
        start += count


def _copied(raw: RawFile, start: int, end: int, crc: int, copy_to: int) -> None:
    sum_ = RunningChecksum()
    for piece in _pieces(raw.fd, start, end, raw.path):
        sum_.add(piece)
        view = piece.data
        while len(view):
            view = view[os.write(copy_to, view) :]
    if sum_.result() != crc:
        raise DataError(f"{raw.path}: wrong checksum")


def _head(data: bytes, size_bytes: int, key: BlockKey, where: object) -> tuple[int, int, Block]:
    """Return the size of the header of `data`, the payload's checksum, and the block without payload; DataError."""
    if len(data) < _HEAD.size:
        raise DataError(f"{where}: truncated")
    magic, version, length, crc = _HEAD.unpack_from(data)
    text = data[_HEAD.size : _HEAD.size + length]
    if magic != _MAGIC or version != VERSION or len(text) != length or zlib.crc32(text) != crc:
        raise DataError(f"{where}: the header is damaged, or of another version")
    try:
        header = json.loads(text)
        layout = StateLayout.from_json(header["layout"]) if header["layout"] is not None else None
        payload_bytes, sum_, named, tokens = header["bytes"], header["crc"], header["key"], header["tokens"]
        if any(type(token) is not int or not 0 <= token < 1 << 31 for token in tokens):
            raise ValueError("invalid tokens")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{where}: header: {str(error)[:200]}") from None
    if named != [key.model, key.name, key.index, key.kind]:
        raise DataError(f"{where}: not this block, but another one")
    end = whole_blocks(_HEAD.size + length)
    is_whole = payload_bytes == size_bytes - end and type(payload_bytes) is int
    if not is_whole or (layout and payload_bytes != len(tokens) * layout.token_bytes):
        raise DataError(f"{where}: wrong size")
    return end, sum_, Block(np.empty(0, np.uint8), tuple(tokens), layout)


def _filled(block: Block, payload: Bytes, crc: int, where: object) -> Block:
    if _checksum(payload) != crc:
        raise DataError(f"{where}: wrong checksum")
    return replace(block, payload=payload)


def _checksum(payload: Bytes) -> int:
    if rest := -len(payload) % 8:
        payload = np.concatenate([payload, np.zeros(rest, np.uint8)])
    return int(checksums(payload[None])[0, 0])
