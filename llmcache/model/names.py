"""Names of model files in caches and stores, where the real files are named by checksums.

    <cache>/models--ORG--NAME/snapshots/REVISION/FILE    a link to ../../blobs/CHECKSUM         ORG/NAME/FILE
    <store>/manifests/HOST/NAMESPACE/MODEL/TAG           names blobs/sha256-CHECKSUM in JSON    MODEL:TAG

The first is a Hugging Face hub cache, the second is Ollama's store. All input is untrusted: links are resolved from their
texts, no name leads out of the directory, and malformed documents are ignored. A scan ends after SCAN_S.

Locks: `_turn` is held during a scan; `_lock` protects the start of a scan thread. Readers use the immutable `_view`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from llmcache.errors import DataError
from llmcache.model.safetensors import SUFFIX, index_shards
from llmcache.model.tensors import shard_name, shard_names

log = logging.getLogger(__name__)

INDEX_SUFFIX = ".safetensors.index.json"
SHARDS_MAX = 1024
MANIFEST_BYTES, INDEX_BYTES = 1 << 20, 2 << 20  # the largest size of each document
DOCUMENTS_MAX, LAYERS_MAX = 1 << 12, 1 << 10  # documents in all; layers of one manifest
DIRECTORIES_MAX, NAMES_MAX = 1 << 14, 1 << 14  # names: links, and layers of manifests
SCAN_S = 2.0  # the longest scan
SCAN_REST, LEAST_REST_S = 20, 0.05  # pause between scans: a multiple of the duration of the last scan, and the minimum
WAIT_S = 0.5  # the longest time that an open waits for names
LINKS_MAX = 40  # in one path, as in the kernel
NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM)  # permanent errors, as of a dangling link
_SETTLED_NS = 2_000_000_000  # a later change of a directory with an older modification time changes that time

_SNAPSHOT = re.compile(r"(?P<hub>.*/)?models--(?P<repository>[^/]+)/snapshots/(?P<revision>[^/]+)/(?P<file>.+)", re.DOTALL)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MANIFESTS = re.compile(r"(?P<store>.*)/manifests/(?P<host>[^/]+)/(?P<space>[^/]+)/(?P<model>[^/]+)", re.DOTALL)
_LAYER = re.compile(r"application/vnd\.ollama\.image\.(?P<kind>[a-z]+)(?:;.*)?", re.DOTALL)
_DIGEST = re.compile(r"sha256:(?P<hex>[0-9a-f]{64})")
_CHECKSUM = re.compile(r"(?:sha256[-:])?[0-9a-f]{16,}")
_OLLAMA_HOST, _OLLAMA_SPACE = "registry.ollama.ai", "library"
_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_below(fd: int, steps: Iterable[str], flags: int = _STEP) -> int:
    """Open the directory at the path `steps` below the directory `fd`, without following links; OSError."""
    found = os.open(".", _STEP, dir_fd=fd)
    for step in steps:
        try:
            below = os.open(step, _STEP, dir_fd=found)
        finally:
            os.close(found)
        found = below
    if flags == _STEP:
        return found
    try:
        return os.open(".", flags, dir_fd=found)
    finally:
        os.close(found)


class Layer(NamedTuple):
    """A layer of an Ollama manifest: its kind ("model", "projector", ...) and its file name in `blobs`."""

    kind: str
    blob: str


def manifest_layers(text: bytes) -> tuple[Layer, ...]:
    """Return the layers of an Ollama manifest, its configuration last; DataError for other texts."""
    try:
        document = json.loads(text)
        layers = [(layer["mediaType"], layer["digest"]) for layer in document["layers"][:LAYERS_MAX]]
        found = [(_LAYER.fullmatch(kind), _DIGEST.fullmatch(digest)) for kind, digest in layers]
        config = _DIGEST.fullmatch(document.get("config", {}).get("digest", ""))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError("not an Ollama manifest: it has no 'layers' with 'mediaType' and 'digest'") from error
    known = [Layer(kind["kind"], f"sha256-{digest['hex']}") for kind, digest in found if kind and digest]
    return (*known, Layer("config", f"sha256-{config['hex']}")) if config else tuple(known)


def manifest_place(path: str) -> tuple[str, str] | None:
    """Return (store, model name such as `llama3.2:3b`) of the manifest at `path`, or None."""
    directory, _, tag = path.rpartition("/")
    found = _MANIFESTS.fullmatch(directory)
    if found is None:
        return None
    parts = [found["host"], found["space"], f"{found['model']}:{tag}"]
    if found["host"] == _OLLAMA_HOST:
        parts = parts[2:] if found["space"] == _OLLAMA_SPACE else parts[1:]
    return found["store"], "/".join(parts)


@dataclass(frozen=True, slots=True)
class _Directory:
    """Result of the scan of a directory. If `settled`, any later change of the directory changes `stamp`."""

    stamp: tuple[int, int, int]
    settled: bool
    directories: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    files: tuple[str, ...]


class _Document(NamedTuple):
    """A manifest or an index as read; `content` is empty if it is malformed."""

    stamp: tuple[int, int, int]
    settled: bool
    content: tuple[Layer, ...] | tuple[str, ...]


@dataclass(frozen=True)
class _View:
    """Results of one scan, by path.

    `links`: the real path of each link that stays in the directory. `paths`: the links to each file, most recently changed
    directory first. `names`: the names of each file that are not paths. `indexes`: the files that each index lists.
    """

    links: Mapping[str, str] = field(default_factory=dict)
    outside: tuple[str, ...] = ()
    paths: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    shown: Mapping[str, str] = field(default_factory=dict)
    indexes: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)


class ModelNames:
    """Names of the files below a directory; paths begin with a slash and are relative to it. Safe to use on any thread.

    `fd`: a descriptor of `directory`, whose path may lead elsewhere by now (a mount over it). `links_only`: do not read
    manifests and indexes.
    """

    def __init__(self, directory: str, fd: int, *, links_only: bool = False) -> None:
        self.directory = directory
        self._links_only = links_only
        self.version = 0  # changes with the names
        self.followed: Mapping[str, str] = {}  # for links in `outside`: the path that stands for the file
        self._fd = os.dup(fd)
        self._view = _View()
        self._directories: dict[str, _Directory] = {}
        self._texts: dict[str, str] = {}  # link path: its text
        self._documents: dict[str, _Document] = {}
        self._used: Mapping[str, str] = {}  # the `followed` from which `_view` was made
        self._unfinished = False
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._scan: threading.Thread | None = None
        self._began_s = 0.0  # start of `_scan`
        self._due_s = 0.0

    def close(self) -> None:
        """Prevent further scans and close the descriptor, unless a scan hangs."""
        if self._turn.acquire(timeout=SCAN_S):
            os.close(self._fd)
            self._fd = -1
            self._turn.release()

    # Names

    @property
    def outside(self) -> tuple[str, ...]:
        """Return links that lead out of the directory, or in a circle."""
        return self._view.outside

    @property
    def is_outdated(self) -> bool:
        return self.followed != self._used

    def all_of(self, path: str) -> tuple[str, ...]:
        view = self._view
        return path, *view.paths.get(path, ()), *view.names.get(path, ())

    def shown(self, path: str) -> str:
        return self._view.shown.get(path) or path.lstrip("/")

    def links_to(self, path: str) -> tuple[str, ...]:
        return self._view.paths.get(path, ())

    def shards(self, path: str) -> Iterator[tuple[str, ...]]:
        """Yield the real paths of all shards, in order, of each model of which a file is a shard. Some may not exist."""
        view = self._view
        for name in (path, *view.paths.get(path, ())):
            shard = shard_name(name)
            if shard is not None and 1 < shard.count <= SHARDS_MAX:
                yield tuple(view.links.get(sibling, sibling) for sibling in shard_names(name))
            directory, _, base = name.rpartition("/")
            for listed in view.indexes.get(directory, ()):
                if base in listed:
                    yield tuple(view.links.get(sibling, sibling) for sibling in (f"{directory}/{each}" for each in listed))

    # Scans

    def refresh(self, wait_s: float = WAIT_S, *, at_once: bool = False) -> None:
        """Start a scan if one is due (`at_once`: in any case); wait for it, at most until `wait_s` after its start."""
        with self._lock:
            is_busy = self._scan is not None and self._scan.is_alive()
            if not is_busy and (at_once or time.monotonic() >= self._due_s):
                self._scan = threading.Thread(target=self.scan, name="names", daemon=True)
                self._began_s = time.monotonic()
                try:
                    self._scan.start()
                except RuntimeError:  # the process, or the machine, is out of threads
                    self._scan = None
            scan, left_s = self._scan, self._began_s + wait_s - time.monotonic()
        if scan is not None:
            scan.join(max(0.0, left_s))

    def scan(self) -> None:
        with self._turn:
            if self._fd < 0:
                return
            began = time.monotonic()
            changed = self._visit(began + SCAN_S)
            changed = (not self._links_only and self._read_documents()) or changed
            if changed or self.is_outdated:
                self._used = self.followed
                self._view = self._make_view(self._used)
                self.version += 1
            now = time.monotonic()
            self._due_s = now + max(LEAST_REST_S, SCAN_REST * (now - began))

    def _visit(self, end_s: float) -> bool:
        found: dict[str, _Directory] = {}
        pending, links = deque([""]), 0
        while pending and time.monotonic() < end_s and len(found) < DIRECTORIES_MAX and links < NAMES_MAX:
            path = pending.popleft()
            known = self._directories.get(path)
            try:
                directory = self._scan_directory(path, known)
            except OSError as error:
                if known is None or error.errno in NOT_THERE:
                    continue
                directory = known  # a transient error, such as too many open files
            found[path] = directory
            links += len(directory.links)
            pending += [f"{path}/{name}" for name in directory.directories]
        if pending:
            if time.monotonic() >= end_s:
                found = {**self._directories, **found}
            if not self._unfinished:
                self._unfinished = True
                log.warning("SOURCE has too many directories or links: some files keep their own names")
        if found == self._directories:
            return False
        self._directories = found
        self._texts = {f"{path}/{name}": text for path, each in found.items() for name, text in each.links}
        return True

    def _scan_directory(self, path: str, known: _Directory | None) -> _Directory:
        if known is not None and known.settled and _stamp(self._status(path)) == known.stamp:
            return known
        fd = open_below(self._fd, _steps(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            is_manifests = _MANIFESTS.fullmatch(path) is not None
            directories: list[str] = []
            links: list[tuple[str, str]] = []
            files: list[str] = []
            with os.scandir(fd) as entries:
                for entry in entries:
                    if entry.is_symlink():
                        with contextlib.suppress(OSError):
                            links.append((entry.name, os.readlink(entry.name, dir_fd=fd)))
                    elif entry.is_dir(follow_symlinks=False):
                        directories.append(entry.name)
                    elif is_manifests or entry.name.endswith((SUFFIX, INDEX_SUFFIX)):
                        files.append(entry.name)
            return _Directory(
                _stamp(status), _settled(status), tuple(sorted(directories)), tuple(sorted(links)), tuple(sorted(files))
            )
        finally:
            os.close(fd)

    def _status(self, path: str) -> os.stat_result:
        return os.stat(path.lstrip("/") or ".", dir_fd=self._fd, follow_symlinks=False)

    def _read_documents(self) -> bool:
        found: dict[str, _Document] = {}
        layers = 0
        for path, real, limit, parse in self._wanted():
            if len(found) >= DOCUMENTS_MAX or layers >= NAMES_MAX:
                break
            known = self._documents.get(path)
            try:
                if known is None or not known.settled or _stamp(self._status(real)) != known.stamp:
                    known = self._read(real, limit, parse)
            except OSError as error:
                if known is None or error.errno in NOT_THERE:
                    continue
            found[path] = known
            layers += len(known.content)
        changed = found != self._documents
        self._documents = found
        return changed

    def _wanted(self) -> Iterator[tuple[str, str, int, Callable[[bytes], tuple[Layer, ...] | tuple[str, ...]]]]:
        for path, directory in self._directories.items():
            place = _MANIFESTS.fullmatch(path)
            if place is not None and self._resolved(f"{place['store']}/blobs") in self._directories:
                yield from (
                    (f"{path}/{name}", f"{path}/{name}", MANIFEST_BYTES, manifest_layers) for name in directory.files
                )
            names = [*directory.files, *(name for name, _ in directory.links)]
            if sum(name.endswith(SUFFIX) and shard_name(name) is None for name in names) < 2:
                continue  # shards usually have numbers in their names: then an index, of up to megabytes, adds nothing
            for name in names:
                real = self._resolved(f"{path}/{name}") if name.endswith(INDEX_SUFFIX) else None
                if real is not None:
                    yield f"{path}/{name}", real, INDEX_BYTES, index_shards

    def _read(self, real: str, limit: int, parse: Callable[[bytes], tuple[Layer, ...] | tuple[str, ...]]) -> _Document:
        *steps, name = _steps(real)
        parent = open_below(self._fd, steps)
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=parent)
        finally:
            os.close(parent)
        try:
            status = os.fstat(fd)
            content: tuple[Layer, ...] | tuple[str, ...] = ()
            try:
                if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
                    raise DataError("too large, or not a regular file")
                content = parse(_whole(fd, limit))
            except DataError as error:
                level = logging.WARNING if _settled(status) else logging.DEBUG  # a recent file may be incomplete
                # Only the text before the colon: the rest may quote the untrusted file.
                log.log(level, "inode %d is ignored for names: %s", status.st_ino, error.message.partition(":")[0])
            return _Document(_stamp(status), _settled(status), content)
        finally:
            os.close(fd)

    # The view

    def _resolved(self, path: str) -> str | None:
        rest, count = _steps(path)[::-1], 0
        done: list[str] = []
        while rest:
            step = rest.pop()
            if step == "..":
                if not done:
                    return None
                done.pop()
                continue
            done.append(step)
            text = self._texts.get("/" + "/".join(done))
            if text is None:
                continue
            count += 1
            if count > LINKS_MAX:
                return None
            done.pop()
            if text.startswith("/"):
                if not text.startswith(self.directory.rstrip("/") + "/"):
                    return None
                text, done = text[len(self.directory.rstrip("/")) :], []
            rest += _steps(text)[::-1]
        return "/" + "/".join(done)

    def _make_view(self, followed: Mapping[str, str]) -> _View:
        resolved = {path: self._resolved(path) for path in self._texts}
        links = {**followed, **{path: real for path, real in resolved.items() if real is not None}}
        outside = [path for path, real in resolved.items() if real is None]
        paths: dict[str, list[str]] = {}
        for path, real in links.items():
            if path != real:
                paths.setdefault(real, []).append(path)
        for found in paths.values():
            found.sort(key=lambda path: (-self._changed_ns(path), path))
        candidates = self._candidates(paths)
        return _View(
            links,
            tuple(sorted(outside, key=lambda path: ("." not in os.path.basename(path), path))),
            {real: tuple(found) for real, found in paths.items()},
            {real: candidates.names(real) for real in candidates.of},
            candidates.shown(),
            self._indexes(),
        )

    def _candidates(self, paths: Mapping[str, Iterable[str]]) -> _Candidates:
        found = _Candidates()
        for path, document in self._documents.items():
            for blob, names in _layer_names(path, [layer for layer in document.content if isinstance(layer, Layer)]):
                if (real := self._resolved(blob)) is not None:
                    found.add(real, 0, path.endswith("/latest"), names)
        own = "/" + os.path.basename(self.directory)
        for real, path in ((real, path) for real, each in paths.items() for path in each):
            if (variants := _snapshot_names(own + path, path)) is not None:
                found.add(real, 1, False, variants)
            elif _says_less(real, path):
                found.add(real, 2, False, (path.lstrip("/"),))
        return found

    def _indexes(self) -> dict[str, tuple[tuple[str, ...], ...]]:
        found: dict[str, tuple[tuple[str, ...], ...]] = {}
        for path, document in self._documents.items():
            listed = tuple(name for name in document.content if isinstance(name, str))
            if 1 < len(listed) <= SHARDS_MAX:
                directory = path.rpartition("/")[0]
                found[directory] = (*found.get(directory, ()), listed)
        return found

    def _changed_ns(self, path: str) -> int:
        directory = self._directories.get(path.rpartition("/")[0])
        return 0 if directory is None else directory.stamp[2]


def scanned(directory: str) -> ModelNames:
    """Return the names of the files below a directory, from one scan; OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        names = ModelNames(directory, fd)
    finally:
        os.close(fd)
    names.scan()
    names.close()
    return names


class _Candidates:
    """Possible names of each file: (rank, whether the tag is "latest", variants from the shortest to the most exact)."""

    def __init__(self) -> None:
        self.of: dict[str, list[tuple[int, bool, tuple[str, ...]]]] = {}
        self._owners: dict[str, set[str]] = {}

    def add(self, real: str, rank: int, is_latest: bool, variants: tuple[str, ...]) -> None:
        self.of.setdefault(real, []).append((rank, is_latest, variants))
        for variant in variants:
            self._owners.setdefault(variant, set()).add(real.replace("/sha256:", "/sha256-"))  # old and new name of one file

    def names(self, real: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(variant for *_, variants in self.of[real] for variant in variants))

    def shown(self) -> dict[str, str]:
        """Return the display name of each file: the shortest variant of its best name that no other file has."""
        found = {}
        for real, each in self.of.items():
            _, _, variants = min(each)
            found[real] = next((name for name in variants if len(self._owners[name]) == 1), variants[-1])
        return found


def _layer_names(path: str, layers: Iterable[Layer]) -> Iterator[tuple[str, tuple[str, ...]]]:
    place = manifest_place(path)
    if place is None:
        return
    store, name = place
    counts: dict[str, int] = {}
    for kind, blob in layers:
        count = counts[kind] = counts.get(kind, 0) + 1
        end = "" if kind == "model" else f"/{kind}"
        end += f"-{count}" if count > 1 else ""
        variants = (f"{name}{end}", f"{store}/{name}{end}".lstrip("/"))
        yield f"{store}/blobs/{blob}", variants
        yield f"{store}/blobs/{blob.replace('-', ':')}", variants  # the file name in old versions of Ollama


def _snapshot_names(path: str, below: str) -> tuple[str, ...] | None:
    """Return the names of a file in a snapshot of a hub cache, shortest first; None for any other file."""
    found = _SNAPSHOT.fullmatch(path)
    if found is None:
        return None
    repository, revision = found["repository"].replace("--", "/", 1), found["revision"]
    short = revision[:8] if _COMMIT.fullmatch(revision) else revision
    exact = f"{repository}@{short}/{found['file']}"
    return f"{repository}/{found['file']}", exact, below.lstrip("/")


def _says_less(path: str, link: str) -> bool:
    name = os.path.basename(path)
    return _CHECKSUM.fullmatch(name) is not None or ("." not in name and "." in os.path.basename(link))


def _steps(path: str) -> list[str]:
    return [step for step in path.split("/") if step not in ("", ".")]


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _settled(status: os.stat_result) -> bool:
    return not 0 <= time.time_ns() - status.st_mtime_ns < _SETTLED_NS


def _whole(fd: int, limit: int) -> bytes:
    parts: list[bytes] = []
    while part := os.pread(fd, 1 << 20, sum(map(len, parts))):
        parts.append(part)
        if sum(map(len, parts)) > limit:
            raise DataError("too large, or not a regular file")
    return b"".join(parts)
