"""What of a saved conversation is in no spill file: the states of sliding layers, in a small file beside it."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch

from llmcache.errors import DataError, EnvironmentProblem
from llmcache.files import create

_HINT = "restore what save() wrote, or compute the context again"


def path_of(spill: Path) -> Path:
    """Returns the name of the file beside the spill file `spill`."""
    return spill.with_name(spill.name + ".sliding")


def write(spill: Path, layers: list[Any], tokens: int) -> None:
    """Writes the states of sliding `layers` after `tokens`, under a temporary name first; removes the file for none."""
    path = path_of(spill)
    try:
        if not layers:
            path.unlink(missing_ok=True)
            return
        states = [{"keys": layer.keys.cpu(), "values": layer.values.cpu()} for layer in layers]
        saved = io.BytesIO()  # torch.save does not say what is wrong with a file
        torch.save({"tokens": tokens, "states": states}, saved)
        _replace(path, saved.getbuffer())
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {path}: {error.strerror}", "name a place with room") from error


def _replace(path: Path, data: memoryview) -> None:
    """Gives `path` other contents; they are on the disk when it returns, and nothing half written stays."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with open(create(temporary), "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read(spill: Path, layers: list[Any], tokens: int, device: Any) -> None:
    """Gives fresh sliding `layers` their states; DataError if there are none, or of another moment than `tokens`."""
    if not layers:
        return
    path = path_of(spill)
    try:
        found = torch.load(path, map_location=device, weights_only=True)
        states, then = found["states"], found["tokens"]
    except FileNotFoundError:
        raise DataError(f"{path}: the states of {len(layers)} sliding layers are missing", _HINT) from None
    except Exception as error:
        raise DataError(f"{path}: damaged ({error})", _HINT) from error
    if then != tokens or len(states) != len(layers):
        raise DataError(f"{path}: of {len(states)} layers after {then} tokens, not of {len(layers)} after {tokens}", _HINT)
    for layer, state in zip(layers, states, strict=True):
        layer.update(state["keys"], state["values"])
        layer.cumulative_length = tokens
