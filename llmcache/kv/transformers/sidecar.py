"""What of a saved conversation is in no spill file: the states of sliding layers, in a small file beside it.

A save must be whole or not be: the states are written under a name of their own, and count once the page tables name
them, which say at the same time what the spill file holds. The states of the save before are taken away after that.
Until then, and while the conversation goes on without another save, the spill file has at least all pages that were full
when it was saved last; the tokens behind them are in here too.
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

from llmcache.errors import DataError, EnvironmentProblem, LlmcacheError
from llmcache.files import remove, replacing
from llmcache.kv.tiers import KvStore
from llmcache.kv.tiers.table import Tables

_HINT = "restore the files that save() wrote, or compute the context again"


def path_of(spill: Path, name: str) -> Path:
    """Returns where the states called `name` of a spill file are; it ends like its own (--spill globs)."""
    return spill.with_name(f"sliding-{name}-{spill.name}")


def write(spill: Path, store: KvStore, layers: list[Any]) -> str:
    """Writes the states of sliding `layers` beside the spill file of `store`; returns their name, "" for no layers.

    EnvironmentProblem if there is no room.
    """
    if not layers:
        return ""
    states = [{"keys": layer.keys.cpu(), "values": layer.values.cpu()} for layer in layers]
    ids, positions, rows = store.tail()
    tail = [[_as_bytes(array) for array in arrays] for arrays in rows]
    told = {"tokens": store.length, "states": states, "tail": tail, "ids": _as_bytes(ids), "positions": _as_bytes(positions)}
    saved = io.BytesIO()  # torch.save does not say what is wrong with a file
    torch.save({**told, "before": _digest(store, store.length - ids.shape[1])}, saved)
    name = secrets.token_hex(8)
    path = path_of(spill, name)
    try:
        with replacing(path) as stream:
            stream.write(saved.getbuffer())
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot write {path}: {error.strerror}", "name a writable directory with free space"
        ) from error
    return name


def prune(spill: Path, store: KvStore) -> None:
    """Takes away the states of earlier saves, and of one that failed: all that the page tables do not name."""
    with contextlib.suppress(OSError, LlmcacheError):  # they are in nobody's way
        told = Tables.read(spill)
        named = {path_of(spill, name).name for name in (store.sidecar, "" if told is None else told.sidecar)}
        for path in spill.parent.iterdir():
            if path.name.startswith("sliding-") and path.name.endswith(f"-{spill.name}") and path.name not in named:
                remove(path)


def read(spill: Path, store: KvStore, layers: list[Any], device: Any) -> None:
    """Gives fresh sliding `layers` their states, and takes `store` back to the moment that these are of.

    DataError if there are none, or of another conversation.
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
        told = f"of {len(states)} layers after {tokens} tokens, not of the {len(layers)} after {store.length}"
        raise DataError(f"{path}: states {told} of this conversation", _HINT)
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
    """What the ids and positions of the first `tokens` tokens are told by."""
    sides = [np.ascontiguousarray(side[:, :tokens]).tobytes() for side in (store.ids, store.positions)]
    return hashlib.sha256(b"".join([str(store.ids.shape[0]).encode(), *sides])).hexdigest()


def _as_bytes(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(array.tobytes(), np.uint8).copy())


def _as_array(data: torch.Tensor, dtype: np.dtype[Any], form: tuple[int, ...]) -> Any:
    return data.cpu().numpy().view(dtype).reshape(form)
