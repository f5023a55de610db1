"""Names of model files: caches and stores name the real files by checksums, people do not.

    <cache>/models--ORG--NAME/snapshots/REVISION/FILE    a link to ../../blobs/CHECKSUM         ORG/NAME/FILE
    <store>/manifests/HOST/NAMESPACE/MODEL/TAG           names blobs/sha256-CHECKSUM in JSON    MODEL:TAG

The first is a Hugging Face hub cache, the second is Ollama's store. `ModelNames` scans a directory for symbolic links,
manifests and safetensors indexes, and maps the real files below the directory to names and to the shards of their models.

Everything that it reads is untrusted. Links are resolved by their texts, and nothing is opened through a link; a name never
leads out of the directory. Documents of more than a bounded size, or of another form, are ignored. A scan
visits the directories that have changed since the last one, and ends after SCAN_S.
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
from llmcache.fs.layout.safetensors import SUFFIX, index_shards
from llmcache.fs.layout.tensors import shard_name, shard_names

log = logging.getLogger(__name__)

INDEX_SUFFIX = ".safetensors.index.json"
SHARDS_MAX = 1024
MANIFEST_BYTES, INDEX_BYTES = 1 << 20, 2 << 20  # the longest documents
DOCUMENTS_MAX, LAYERS_MAX = 1 << 12, 1 << 10  # documents that are read, and layers of one manifest
DIRECTORIES_MAX, NAMES_MAX = 1 << 14, 1 << 14  # that are known: links and layers have names
SCAN_S = 2.0  # the longest scan
SCAN_REST, LEAST_REST_S = 20, 0.05  # the next scan is due after so many times as long as the last one took
WAIT_S = 0.5  # that an open file waits for names
LINKS_MAX = 40  # in one path, as in the kernel
NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM)  # for good: a link that leads nowhere, say
_SETTLED_NS = 2_000_000_000  # a time of modification older than this changes with the next modification

_SNAPSHOT = re.compile(r"(?P<hub>.*/)?models--(?P<repository>[^/]+)/snapshots/(?P<revision>[^/]+)/(?P<file>.+)", re.DOTALL)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MANIFESTS = re.compile(r"(?P<store>.*)/manifests/(?P<host>[^/]+)/(?P<space>[^/]+)/(?P<model>[^/]+)", re.DOTALL)
_LAYER = re.compile(r"application/vnd\.ollama\.image\.(?P<kind>[a-z]+)(?:;.*)?", re.DOTALL)
_DIGEST = re.compile(r"sha256:(?P<hex>[0-9a-f]{64})")
_CHECKSUM = re.compile(r"(?:sha256[-:])?[0-9a-f]{16,}")
_OLLAMA_HOST, _OLLAMA_SPACE = "registry.ollama.ai", "library"
_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_below(fd: int, steps: Iterable[str], flags: int = _STEP) -> int:
    """Return a new descriptor of the directory that `steps` lead to from the directory `fd`, through no link. OSError."""
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
    """A layer of an Ollama manifest: "model", "projector", "template" and so on, and the name of its file in `blobs`."""

    kind: str
    blob: str


def manifest_layers(text: bytes) -> tuple[Layer, ...]:
    """Return the layers of an Ollama manifest, its configuration last; DataError when it is not one."""
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
    """Return the store and the name (`llama3.2:3b`) of the model whose manifest is at `path`; None at any other place."""
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
    """A directory as it was scanned: once it is settled, a change of the directory changes `stamp`.

    `links`: name and text of each. `files`: regular files that are read, or that an index may name.
    """

    stamp: tuple[int, int, int]
    settled: bool
    directories: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    files: tuple[str, ...]


class _Document(NamedTuple):
    """A document as it was read; `content` is empty if the document has another form."""

    stamp: tuple[int, int, int]
    settled: bool
    content: tuple[Layer, ...] | tuple[str, ...]


@dataclass(frozen=True)
class _View:
    """Findings of one scan, by path. `links`: the real path of each link that stays in the directory; `outside`: the others.

    `paths`: the links to a file, those in the directory that was changed last first. `names`: all names of a file that are
    no paths, `shown`: the one that is shown. `indexes`: by directory, the files of each index in it.
    """

    links: Mapping[str, str] = field(default_factory=dict)
    outside: tuple[str, ...] = ()
    paths: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    shown: Mapping[str, str] = field(default_factory=dict)
    indexes: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)


class ModelNames:
    """Names of the files below a directory; paths begin with a slash and are relative to it. Safe to use on any thread."""

    def __init__(self, directory: str, fd: int, *, links_only: bool = False) -> None:
        """`fd`: of the directory, which `directory` may not lead to any more; stays the caller's.

        `links_only`: manifests and indexes are not read.
        """
        self.directory = directory
        self._links_only = links_only
        self.version = 0  # changes with the names
        self.followed: Mapping[str, str] = {}  # of links in `outside`: the path by which the file that they lead to is known
        self._fd = os.dup(fd)
        self._view = _View()
        self._directories: dict[str, _Directory] = {}
        self._texts: dict[str, str] = {}  # of all links
        self._documents: dict[str, _Document] = {}
        self._used: Mapping[str, str] = {}  # `followed` as the view has it
        self._unfinished = False
        self._turn = threading.Lock()  # of scans
        self._lock = threading.Lock()
        self._scan: threading.Thread | None = None
        self._began_s = 0.0  # when it did
        self._due_s = 0.0

    def close(self) -> None:
        """End scans. One that hangs keeps its descriptor."""
        if self._turn.acquire(timeout=SCAN_S):
            os.close(self._fd)
            self._fd = -1
            self._turn.release()

    # Names

    @property
    def outside(self) -> tuple[str, ...]:
        """The links that lead out of the directory, or nowhere."""
        return self._view.outside

    @property
    def is_outdated(self) -> bool:
        """True if `followed` has changed since the last scan."""
        return self.followed != self._used

    def all_of(self, path: str) -> tuple[str, ...]:
        """Return all names of a file: its path, the paths of links to it, and the names of models."""
        view = self._view
        return path, *view.paths.get(path, ()), *view.names.get(path, ())

    def shown(self, path: str) -> str:
        """Return the name of a file to be shown: a short one where its own says nothing, else its path without a slash."""
        return self._view.shown.get(path) or path.lstrip("/")

    def links_to(self, path: str) -> tuple[str, ...]:
        """Return the paths of the links to a file, those in the directory that was changed last first."""
        return self._view.paths.get(path, ())

    def shards(self, path: str) -> Iterator[tuple[str, ...]]:
        """Yield the real paths of all shards of each model of which a file is one, in their order. They need not exist."""
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
        """Have a scan made if one is due (`at_once`: in any case), and wait until it ends or has taken `wait_s`."""
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
        """Scan the directory."""
        with self._turn:
            if self._fd < 0:
                return
            began = time.monotonic()
            changed = self._visit(began + SCAN_S)
            changed = (not self._links_only and self._read_documents()) or changed
            if changed or self.is_outdated:
                self._used = self.followed
                self._view = self._viewed(self._used)
                self.version += 1
            now = time.monotonic()
            self._due_s = now + max(LEAST_REST_S, SCAN_REST * (now - began))

    def _visit(self, end_s: float) -> bool:
        """Visit directories until a time, those of one level after those above; returns True if something has changed."""
        found: dict[str, _Directory] = {}
        pending, links = deque([""]), 0
        while pending and time.monotonic() < end_s and len(found) < DIRECTORIES_MAX and links < NAMES_MAX:
            path = pending.popleft()
            known = self._directories.get(path)
            try:
                directory = self._looked(path, known)
            except OSError as error:
                if known is None or error.errno in NOT_THERE:
                    continue
                directory = known  # too many open files, an error of storage
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

    def _looked(self, path: str, known: _Directory | None) -> _Directory:
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
        """Read the documents that have changed; returns True if there are some, or some have gone."""
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
        """Yield (path, real path, greatest size, parser) of each document that says something that no name says."""
        for path, directory in self._directories.items():
            place = _MANIFESTS.fullmatch(path)
            if place is not None and self._resolved(f"{place['store']}/blobs") in self._directories:
                yield from (
                    (f"{path}/{name}", f"{path}/{name}", MANIFEST_BYTES, manifest_layers) for name in directory.files
                )
            names = [*directory.files, *(name for name, _ in directory.links)]
            if sum(name.endswith(SUFFIX) and shard_name(name) is None for name in names) < 2:
                continue  # shards have numbers, as a rule: an index, of up to megabytes, says no more
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
            except DataError as error:  # its text may quote the file
                level = logging.WARNING if _settled(status) else logging.DEBUG  # it may be being written
                log.log(level, "inode %d is ignored for names: %s", status.st_ino, error.message.partition(":")[0])
            return _Document(_stamp(status), _settled(status), content)
        finally:
            os.close(fd)

    # The view

    def _resolved(self, path: str) -> str | None:
        """Return the real path of a path, by the texts of the links in it; None if it leads out of the directory."""
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

    def _viewed(self, followed: Mapping[str, str]) -> _View:
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
        """Return the names of all files, by manifests and by links to them."""
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


class _Candidates:
    """The names that each file may be shown under: (rank, is a "latest", variants from the shortest to the most exact)."""

    def __init__(self) -> None:
        self.of: dict[str, list[tuple[int, bool, tuple[str, ...]]]] = {}
        self._owners: dict[str, set[str]] = {}

    def add(self, real: str, rank: int, is_latest: bool, variants: tuple[str, ...]) -> None:
        """Add one name of a file."""
        self.of.setdefault(real, []).append((rank, is_latest, variants))
        for variant in variants:
            self._owners.setdefault(variant, set()).add(real.replace("/sha256:", "/sha256-"))  # one file, old and new name

    def names(self, real: str) -> tuple[str, ...]:
        """Return all names of a file."""
        return tuple(dict.fromkeys(variant for *_, variants in self.of[real] for variant in variants))

    def shown(self) -> dict[str, str]:
        """Return the name of each file that is shown: the shortest variant of the best name that no other file has."""
        found = {}
        for real, each in self.of.items():
            _, _, variants = min(each)
            found[real] = next((name for name in variants if len(self._owners[name]) == 1), variants[-1])
        return found


def _layer_names(path: str, layers: Iterable[Layer]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the real path and the names of each layer of a manifest."""
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
        yield f"{store}/blobs/{blob.replace('-', ':')}", variants  # as old versions name it


def _snapshot_names(path: str, below: str) -> tuple[str, ...] | None:
    """Return the names of a file of a snapshot in a hub cache; `path` begins with the directory itself, `below` is below it.

    A second revision with the same file has names of its own, and so has the same model in a second cache.
    """
    found = _SNAPSHOT.fullmatch(path)
    if found is None:
        return None
    repository, revision = found["repository"].replace("--", "/", 1), found["revision"]
    short = revision[:8] if _COMMIT.fullmatch(revision) else revision
    exact = f"{repository}@{short}/{found['file']}"
    return f"{repository}/{found['file']}", exact, below.lstrip("/")


def _says_less(path: str, link: str) -> bool:
    """Return True if the name of a file says less than that of a link to it."""
    name = os.path.basename(path)
    return _CHECKSUM.fullmatch(name) is not None or ("." not in name and "." in os.path.basename(link))


def _steps(path: str) -> list[str]:
    return [step for step in path.split("/") if step not in ("", ".")]


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _settled(status: os.stat_result) -> bool:
    return not 0 <= time.time_ns() - status.st_mtime_ns < _SETTLED_NS


def _whole(fd: int, limit: int) -> bytes:
    """Return what a file contains. DataError if it is longer than `limit`."""
    parts: list[bytes] = []
    while part := os.pread(fd, 1 << 20, sum(map(len, parts))):
        parts.append(part)
        if sum(map(len, parts)) > limit:
            raise DataError("too large, or not a regular file")
    return b"".join(parts)
