"""JSON documents that commands have written, read back into their dataclasses."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from llmcache.errors import DataError, UsageError

LARGEST_BYTES = 1 << 28


def read_json(path: str | os.PathLike[str], hint: str) -> Any:
    """Return the JSON value in a file; UsageError if it cannot be read, DataError if it is not JSON."""
    try:
        with Path(path).open("rb") as stream:
            return json.loads(stream.read(LARGEST_BYTES))
    except OSError as error:
        raise UsageError(f"{os.fspath(path)}: cannot be read: {error.strerror}", hint) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{os.fspath(path)}: not JSON: {error}", hint) from error


@contextmanager
def invalid(source: str, hint: str) -> Iterator[None]:
    """Convert errors in the values of a document to a DataError that names `source`."""
    try:
        yield
    except KeyError as error:
        raise DataError(f"{source}: {error.args[0]}: missing".removeprefix(": "), hint) from error
    except (TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{source}: {error}".removeprefix(": "), hint) from error


def check_schema(document: Any, *known: str) -> None:
    """Raise a ValueError unless `document` is a JSON object of one of the schemas `known`."""
    found = document.get("schema") if isinstance(document, dict) else None
    if found not in known:
        wanted = " or ".join(f"'{schema}'" for schema in known)
        raise ValueError(f"schema: must be {wanted}, not {found!r}")


def from_json(kind: Any, data: Any, name: str = "") -> Any:
    """Return a value of type `kind` from the JSON of `dataclasses.asdict`; unknown fields are ignored.

    KeyError and ValueError name a field by its path, such as `rows[1].policy`.
    """
    if kind in (int, float):
        if isinstance(data, bool) or not isinstance(data, int | float) or not _is_finite(data):
            raise ValueError(f"{name}: '{data}' is not a number")
        return data if kind is float else _a(int, data, name)
    if kind in (str, bool):
        return _a(kind, data, name)
    inside = get_args(kind)
    if type(None) in inside:
        return None if data is None else from_json(inside[0], data, name)
    if isinstance(kind, type) and is_dataclass(kind):
        return _dataclass(kind, data, name)
    if get_origin(kind) is tuple:
        return tuple(from_json(inside[0], value, f"{name}[{at}]") for at, value in enumerate(_a((list, tuple), data, name)))
    if get_origin(kind) is Mapping:
        return {key: from_json(inside[1], value, f"{name}.{key}") for key, value in _a(dict, data, name).items()}
    return data


_types_of = functools.cache(get_type_hints)


def _dataclass(kind: Any, data: Any, name: str) -> Any:
    types, values = _types_of(kind), {}
    for field in fields(kind):
        path = f"{name}.{field.name}".removeprefix(".")
        if field.name in _a(dict, data, name or "document"):
            values[field.name] = from_json(types[field.name], data[field.name], path)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise KeyError(path)
    return kind(**values)


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer that no float can hold
        return False


def _a(kind: type | tuple[type, ...], data: Any, name: str) -> Any:
    if not isinstance(data, kind):
        wanted = kind[0] if isinstance(kind, tuple) else kind
        raise ValueError(f"{name}: must be a {wanted.__name__}, not {repr(data)[:60]}")
    return data
