"""The sidecar: a small file next to a spill file with the states of sliding layers and the tokens of incomplete pages.

A save is atomic: the sidecar gets a new name, and takes effect when the page tables, which describe the spill file, name
it. A conversation that continues after a save can still be restored to it, because the spill file keeps all pages that
were complete at the last save.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llmcache.errors import DataError, LlmcacheError, MissingRequirement
from llmcache.files import remove, replacing
from llmcache.kv.tiers import KvStore
from llmcache.kv.tiers.table import Tables

_HINT = "restore the files that save() wrote, or compute the context again"


def path_of(spill: Path, name: str) -> Path:
    """Return the path of the sidecar `name`; it ends with the name of the spill file, as `--spill` patterns expect."""
    return spill.with_name(f"sliding-{name}-{spill.name}")


def write(spill: Path, store: KvStore, layers: list[Any]) -> str:
    """Write the states of sliding `layers`; return the sidecar's name, "" for no layers. MissingRequirement."""
    if not layers:
        return ""
    states = [{"keys": layer.keys.cpu(), "values": layer.values.cpu()} for layer in layers]
    ids, positions, rows = store.tail()
    tail = [[_as_bytes(array) for array in arrays] for arrays in rows]
    data = {"tokens": store.length, "states": states, "tail": tail, "ids": _as_bytes(ids), "positions": _as_bytes(positions)}
    saved = io.BytesIO()  # torch.save does not report the reason when a file cannot be written
    torch.save({**data, "before": _digest(store, store.length - ids.shape[1])}, saved)
    name = secrets.token_hex(8)
    path = path_of(spill, name)
    try:
        with replacing(path) as stream:
            stream.write(saved.getbuffer())
    except OSError as error:
        raise MissingRequirement(
            f"cannot write {path}: {error.strerror}", "name a writable directory with free space"
        ) from error
    return name


def prune(spill: Path, store: KvStore) -> None:
    """Remove the sidecars that the page tables do not name: those of earlier and of failed saves."""
    with contextlib.suppress(OSError, LlmcacheError):  # leftover files do no harm
        tables = Tables.read(spill)
        named = {path_of(spill, name).name for name in (store.sidecar, "" if tables is None else tables.sidecar)}
        for path in spill.parent.iterdir():
            if path.name.startswith("sliding-") and path.name.endswith(f"-{spill.name}") and path.name not in named:
                remove(path)


def read(spill: Path, store: KvStore, layers: list[Any], device: Any) -> None:
    """Restore the states of new sliding `layers`, and roll `store` back to the time of the save.

    DataError: the sidecar is missing, damaged, or of another conversation.
    """
    if not layers:
        return
    path = path_of(spill, store.sidecar)
    try:
        found = torch.load(path, map_location=device, weights_only=True)
        states, tokens, tail, before = found["states"], int(found["tokens"]), found["tail"], found["before"]
        ids, positions = (_as_array(found[side], np.dtype(np.int64), (store.batch, -1)) for side in ("ids", "positions"))
    except FileNotFoundError:
        raise DataError(f"{spill}: the states of {len(layers)} sliding layers are missing", _HINT) from None
    except Exception as error:
        raise DataError(f"{path}: damaged ({error})", _HINT) from error
    whole = tokens - ids.shape[1]
    if len(states) != len(layers) or store.length < whole or _digest(store, whole) != before:
        states_are = f"of {len(states)} layers after {tokens} tokens, not of the {len(layers)} after {store.length}"
        raise DataError(f"{path}: states {states_are} of this conversation", _HINT)
    if store.length != tokens:
        store.crop(whole)
        if tokens > whole:
            _append(store, tail, ids, positions)
    for layer, state in zip(layers, states, strict=True):
        layer.update(state["keys"], state["values"])
        layer.cumulative_length = tokens


def _append(store: KvStore, tail: list[list[torch.Tensor]], ids: Any, positions: Any) -> None:
    shape = store.shape
    for number, (keys, values) in enumerate(tail):
        sides = ((keys, shape.head_dim), (values, shape.value_dim))
        forms = [(side, shape.numpy_dtype, (store.batch, shape.kv_heads, ids.shape[1], dim)) for side, dim in sides]
        store.append(number, *(_as_array(*form) for form in forms))
    store.commit(ids, positions)


def _digest(store: KvStore, tokens: int) -> str:
    sides = [np.ascontiguousarray(side[:, :tokens]).tobytes() for side in (store.ids, store.positions)]
    return hashlib.sha256(b"".join([str(store.ids.shape[0]).encode(), *sides])).hexdigest()


def _as_bytes(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(array.tobytes(), np.uint8).copy())


def _as_array(data: torch.Tensor, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    return data.cpu().numpy().view(dtype).reshape(shape)
