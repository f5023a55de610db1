"""The model files of a command: in its words, or among the files that its processes have open or mapped.

Files are recognized by their content, because caches name them by checksums.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from llmcache import procfs
from llmcache.errors import LlmcacheError, MissingRequirement
from llmcache.files import is_below, open_regular
from llmcache.model import is_gguf
from llmcache.model.modelfile import model_bytes
from llmcache.model.moe import ModelBytes
from llmcache.model.names import scanned
from llmcache.model.safetensors import begins_safetensors
from llmcache.model.tensors import shard_names
from llmcache.mount.copies import Copied, client_facts, find_copy
from llmcache.procfs import descendants, mappings, mounts

LEAST_BYTES = 16 << 20
"""Smaller files are vocabularies and test models; the kernel keeps them well enough."""
VARIABLES = tuple(f"LLAMA_ARG_{name}" for name in ("MODEL", "MMPROJ", "SPEC_DRAFT_MODEL", "MODEL_DRAFT", "MODELS_DIR"))
"""Of llama.cpp, which name a model file or a directory with such files."""
DEPTH, DIRECTORIES_MAX = 5, 1 << 14
"""Levels and directories of --dir that are searched: a Hugging Face hub cache has four levels."""
_HASH = re.compile(r"sha256-[0-9a-f]{64}|[0-9a-f]{40,64}")


def is_model(path: str) -> bool:
    """Return whether a regular file of at least LEAST_BYTES begins as a GGUF or safetensors file does."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return False
    if not stat.S_ISREG(status.st_mode) or status.st_size < LEAST_BYTES:
        return False
    return _begins_as_model(path, status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=4096)
def _begins_as_model(path: str, dev: int, ino: int, _mtime_ns: int, size_bytes: int) -> bool:
    """Read the first bytes of a file once, because a mount observes each read."""
    try:
        fd = open_regular(path, lambda status: (status.st_dev, status.st_ino) == (dev, ino))
    except OSError:
        return False
    try:

        def read(offset: int, size: int) -> bytes:
            return os.pread(fd, size, offset)

        return is_gguf(read, size_bytes) or begins_safetensors(read, size_bytes)
    except OSError:
        return False
    finally:
        os.close(fd)


def in_words(words: Iterable[str], environment: Mapping[str, str], directory: str, depth: int = 1) -> list[str]:
    """Return the absolute paths of the model files, and their shards, that words and the engine's variables name.

    A word, or the value of `--option=value`, names a file, or a directory with model files in up to `depth` levels. A
    symbolic link stays the path.
    """
    found: dict[str, None] = {}
    named = [value for variable in VARIABLES if (value := environment.get(variable))]
    for word in (*words, *named):
        for text in {word, word.partition("=")[2]} - {""}:
            if "\0" not in text:
                path = os.path.normpath(os.path.join(directory, os.path.expanduser(text)))
                found |= dict.fromkeys(_models_at(path, depth))
    return list(found)


def _models_at(path: str, depth: int) -> Iterator[str]:
    if os.path.isdir(path):
        seen: set[str] = set()
        for where, directories, files in itertools.islice(os.walk(path), DIRECTORIES_MAX):
            directories.sort()
            if where.count(os.sep) - path.count(os.sep) >= depth - 1:
                directories.clear()
            for file in filter(is_model, (os.path.join(where, name) for name in sorted(files))):
                if (real := os.path.realpath(file)) not in seen:
                    seen.add(real)
                    yield file
    elif is_model(path):
        yield from shards_of(path)


def shards_of(path: str) -> list[str]:
    """Return all shards of a model in its directory, in the order of their numbers."""
    return [one for one in shard_names(path) if one == path or os.path.exists(one)]


def shown_name(path: str) -> str:
    """Return the name of a model file for people: for a blob of a cache or store that of its model."""
    source, real = source_of(path), os.path.realpath(path)
    if not is_below(real, source):
        return os.path.basename(path)
    return scanned(source).shown("/" + os.path.relpath(real, source))


def opened_by(pid: int) -> list[str]:
    """Return the model files that a process or its descendants have open or mapped."""
    seen: dict[tuple[int, int], str] = {}
    for each in descendants(pid):
        candidates = {part.path for part in mappings(each) if part.inode and part.path.startswith("/")}
        with contextlib.suppress(OSError):
            for number in os.listdir(f"/proc/{each}/fd"):
                with contextlib.suppress(OSError):
                    candidates.add(os.readlink(f"/proc/{each}/fd/{number}"))
        for path in candidates:
            if path.startswith("/") and (real := visible_path(each, path)) is not None and is_model(real):
                with contextlib.suppress(OSError):  # it was removed
                    status = os.stat(real)
                    seen[status.st_dev, status.st_ino] = real
    return sorted(seen.values())


def of_process(pid: int) -> list[str]:
    """Return the model files of a running process: open, mapped, or named by its arguments."""
    named: list[str] = []
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        found = in_words(map(os.fsdecode, words[1:]), {}, os.readlink(f"/proc/{pid}/cwd"))
        named = [own for path in found if (own := visible_path(pid, path)) is not None]
    return list(dict.fromkeys((*named, *opened_by(pid))))


def check_process(option: str, pid: int) -> None:
    """Raise an error unless `pid` is another process, which this user may examine."""
    fields = procfs.check_process(option, pid)
    if os.geteuid() not in (0, int(fields["Uid"].split()[1])):
        raise MissingRequirement(f"{option}: process {pid} ({fields['Name']}) belongs to another user", "use sudo")


def first_shards(paths: Iterable[str]) -> list[str]:
    """Return the first shard that exists of each model."""
    return list(dict.fromkeys(shards_of(path)[0] for path in paths))


def size_of(path: str) -> int:
    """Return the bytes of all shards of a model file."""
    return sum(os.stat(one).st_size for one in shards_of(path))


def bytes_of(path: str) -> ModelBytes | None:
    """Return the facts in a model's header; None if unreadable. It is read once, because a mount observes each read."""
    with contextlib.suppress(OSError):
        status = os.stat(path)
        return _bytes_of(path, status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
    return None


@functools.lru_cache(maxsize=256)
def _bytes_of(path: str, _dev: int, _ino: int, _mtime_ns: int, _size_bytes: int) -> ModelBytes | None:
    with contextlib.suppress(LlmcacheError, OSError):
        return model_bytes(path)
    return None


def copies_of(pid: int, paths: Iterable[str]) -> list[Copied]:
    """Return the copies of model files in the memory of a process and its descendants."""
    found = []
    for path in first_shards(paths):
        model = bytes_of(path)
        repacked_bytes = 0 if model is None else model.repacked_bytes
        for each in descendants(pid):
            with contextlib.suppress(OSError):
                copied = find_copy(client_facts(each, _keys_of(each, path)), size_of(path), repacked_bytes)
                found += [] if copied is None else [copied]
    return found


def _keys_of(pid: int, path: str) -> set[tuple[int, int]]:
    keys = set()
    for shard in shards_of(path):
        for seen in (shard, f"/proc/{pid}/root{shard}"):
            with contextlib.suppress(OSError):
                status = os.stat(seen)
                keys.add((status.st_dev, status.st_ino))
    return keys


def visible_path(pid: int, path: str) -> str | None:
    """Return this process's path for a file that process `pid` (in a container) sees as `path`; None if there is none."""
    try:
        wanted = os.stat(f"/proc/{pid}/root{path}")
        if _is_same(path, wanted):
            return path
        theirs = [mount for mount in mounts(pid).values() if mount.dev == wanted.st_dev and is_below(path, mount.point)]
        for mount in sorted(theirs, key=lambda one: len(one.point), reverse=True):
            inside = os.path.normpath(f"{mount.root}/{os.path.relpath(path, mount.point)}")
            for own in mounts().values():
                if own.dev == mount.dev and is_below(inside, own.root):
                    here = os.path.normpath(f"{own.point}/{os.path.relpath(inside, own.root)}")
                    if _is_same(here, wanted):
                        return here
    except OSError:
        pass
    return None


def _is_same(path: str, wanted: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path), wanted)
    except OSError:
        return False


def source_of(path: str) -> str:
    """Return the directory to steer for a model file: the one that holds it, or the cache or store that names it.

    A Hugging Face cache or an Ollama store names a blob in a directory next to that of the blobs. Mounts do not follow a
    link that leads elsewhere: then the directory of its target is steered.
    """
    real, parent = os.path.realpath(path), os.path.realpath(os.path.dirname(path))
    source = _with_names(parent, real)
    with contextlib.suppress(OSError):  # it was removed
        if not is_below(real, source) or os.stat(real).st_dev != os.stat(parent).st_dev:
            source = _with_names(os.path.dirname(real), real)
    return source


def _with_names(directory: str, real: str) -> str:
    above = Path(directory).parent
    is_blob = os.path.basename(directory) == "blobs" and _HASH.fullmatch(os.path.basename(real))
    if is_blob and any((above / name).is_dir() for name in ("manifests", "snapshots")):
        return str(above)
    if above.name == "snapshots" and (above.parent / "blobs").is_dir():
        return str(above.parent)
    return directory


def sources_of(paths: Sequence[str]) -> list[str]:
    """Return the directories to steer for model files, without subdirectories of others."""
    found = {source_of(path) for path in paths}
    return sorted(one for one in found if not any(is_below(one, other) for other in found - {one}))
