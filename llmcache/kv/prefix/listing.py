"""What a directory of blocks holds, by model, for those who look at it and prune it."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcache.errors import UsageError
from llmcache.kv.prefix.store import PART, BlockStore, Entry
from llmcache.units import parse_duration, parse_size


@dataclass(frozen=True)
class StoredModel:
    """What is stored of one model: blocks by kind, bytes, ages in ns, and what was restored of it."""

    fingerprint: str
    file: str  # of the model; empty if that is lost
    blocks: dict[str, int]
    size_bytes: int
    longest_tokens: int  # of a prompt, in whole blocks
    used_ns_ago: int
    unused_ns: int  # the age of its oldest block
    restores: int
    restored_tokens: int
    restored_bytes: int
    described: dict[str, Any]  # what the fingerprint stands for


@dataclass(frozen=True)
class Pruned:
    """What was removed, and what is left."""

    removed_blocks: int
    removed_bytes: int
    left_blocks: int
    left_bytes: int


def listed(directory: str | Path) -> list[StoredModel]:
    """Returns what is stored below `directory`, the most recently used model first; UsageError if it holds nothing of it."""
    store = BlockStore(directory, None)
    by_model: dict[str, list[Entry]] = defaultdict(list)
    for entry in store.entries():
        by_model[entry.key.model].append(entry)
    now = time.time_ns()
    found = [_stored(store, model, by_model[model], now) for model in store.models()]
    return sorted((model for model in found if model.blocks or model.described), key=lambda model: model.used_ns_ago)


def _stored(store: BlockStore, model: str, entries: list[Entry], now: int) -> StoredModel:
    described, uses = store.description(model), store.uses(model)
    kinds: dict[str, int] = defaultdict(int)
    for entry in entries:
        kinds[entry.key.kind] += 1
    tokens = described.get("block_tokens")
    return StoredModel(
        fingerprint=model,
        file=str(described.get("file", "")),
        blocks=dict(sorted(kinds.items())),
        size_bytes=sum(entry.size_bytes for entry in entries),
        longest_tokens=max((entry.key.index + (entry.key.kind != PART) for entry in entries), default=0)
        * (tokens if isinstance(tokens, int) else 0),
        used_ns_ago=max(0, now - max((entry.used_ns for entry in entries), default=now)),
        unused_ns=max(0, now - min((entry.used_ns for entry in entries), default=now)),
        restores=uses.restores,
        restored_tokens=uses.tokens,
        restored_bytes=uses.restored_bytes,
        described=described,
    )


def chosen(models: list[StoredModel], name: str) -> StoredModel:
    """Returns the one of `models` whose fingerprint begins with, or whose file is, `name`; UsageError if not one is."""
    found = [model for model in models if model.fingerprint.startswith(name) or model.file == name]
    if len(found) != 1:
        one = "several models" if found else "no model"
        known = ", ".join(f"{model.fingerprint[:8]} ({model.file})" for model in found or models)
        raise UsageError(f"'{name}' is {one} of it", f"name one by its fingerprint: {known}" if known else None)
    return found[0]


def pruned(directory: str | Path, unused: str | None, keep: str | None, model: str | None) -> Pruned:
    """Removes blocks below `directory`: unused for longer than `unused`, the oldest above `keep` bytes; of `model` alone.

    UsageError if nothing says which, or one cannot be understood; of a model alone: all of it.
    """
    if unused is None and keep is None and model is None:
        raise UsageError("nothing says what is to go", "--unused 30d, --keep 10G, --model NAME; --keep 0 removes all")
    unused_ns = None if unused is None else parse_duration(unused)
    keep_bytes = None if keep is None else parse_size(keep)
    store = BlockStore(directory, None)
    fingerprint = None if model is None else chosen(listed(directory), model).fingerprint
    gone = store.prune(keep_bytes, unused_ns, fingerprint)
    left = store.entries()
    return Pruned(len(gone), sum(entry.size_bytes for entry in gone), len(left), sum(entry.size_bytes for entry in left))
