"""Models, workloads, systems and profiles by name: those of the paper, and the user's from a TOML file.

[profile.mine]              # any field of constants.Profile; the others are those of `base`
base = "paper"
refresh_pass_j = 3.65e-6
[model.tiny]                # any field of systems.LlmShape
base = "llama2-7b"
layers = 8
[workload.chat]             # any field of systems.GenerationWorkload
base = "TQ"
batch = 1
[system.half]               # any field of systems.AcceleratorHardware and RetentionPolicy; a group's interval: hst_msb_ns, …
base = "Kelle+eDRAM"
kv_bytes_per_s = 128e9
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from llmcache.errors import DataError, UsageError
from llmcache.papers.edram.constants import PROFILES, Profile
from llmcache.papers.edram.systems import (
    BASELINE,
    MODELS,
    SYSTEMS,
    WORKLOADS,
    AcceleratorSystem,
    GenerationWorkload,
    LlmShape,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Part = TypeVar("Part")


@dataclass(frozen=True)
class Catalogue:
    """Models, workloads, systems and profiles by name."""

    models: Mapping[str, LlmShape] = field(default_factory=lambda: MODELS)
    workloads: Mapping[str, GenerationWorkload] = field(default_factory=lambda: WORKLOADS)
    systems: Mapping[str, AcceleratorSystem] = field(default_factory=lambda: SYSTEMS)
    profiles: Mapping[str, Profile] = field(default_factory=lambda: PROFILES)

    @property
    def baseline(self) -> AcceleratorSystem:
        return self.systems[BASELINE]


def named(kind: str, known: Mapping[str, Part], name: str) -> Part:
    """Return an entry by name, in any case; UsageError names the option `--kind`."""
    for key, value in known.items():
        if key.lower() == name.strip().lower():
            return value
    raise UsageError(f"--{kind}: there is no {kind} '{name.strip()}'", f"one of: {', '.join(known)}")


def listed(kind: str, known: Mapping[str, Part], text: str) -> list[Part]:
    """Return the distinct entries of a list separated by commas, or "all"; UsageError as for `named`."""
    names = list(known) if text.strip().lower() == "all" else text.split(",")
    return list(dict.fromkeys(named(kind, known, name) for name in names))


DEFAULTS = {"profile": "paper", "model": "llama2-7b", "workload": "PG19", "system": "Kelle+eDRAM"}
"""Kinds of tables, and the default `base` of a new entry of each."""
WANTED = {"bool": "true or false", "str": "a string", "int": "a whole number", "float": "a number"}


def read_constants(path: str | Path | None) -> Catalogue:
    """Return the paper's catalogue with the changes of the TOML file `path`.

    UsageError for unknown keys and invalid values; DataError if the file is not TOML.
    """
    known = {f"{kind}s": dict(getattr(Catalogue(), f"{kind}s")) for kind in DEFAULTS}
    for kind, tables in ({} if path is None else _document(Path(path))).items():
        _check_key(f"{path}", kind, DEFAULTS)
        if not isinstance(tables, dict):
            raise UsageError(f"{path}: {kind}: must be a table", f"write [{kind}.NAME]")
        parts = known[f"{kind}s"]
        for name, table in tables.items():
            where = f"{path}: {kind}.{name}"
            if not isinstance(table, dict):
                raise UsageError(f"{where}: must be a table", f"write [{kind}.NAME], then one constant per line")
            changes = dict(table)
            base = changes.pop("base", name if name in parts else DEFAULTS[kind])
            if not isinstance(base, str):
                raise UsageError(f"{where}.base: must be a name, not {base!r}", f"one of: {', '.join(parts)}")
            if base not in parts:
                raise UsageError(f"{where}.base: there is no {kind} '{base}'", f"one of: {', '.join(parts)}")
            parts[name] = _derived(parts[base], name, changes, where)
    return Catalogue(**known)


def _document(path: Path) -> dict[str, Any]:
    try:
        return dict(tomllib.loads(path.read_text()))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}", "name a TOML file with --constants") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not TOML: {error}", "see https://toml.io") from error


def _check_key(where: str, key: str, known: Iterable[str]) -> None:
    if key not in known:
        raise UsageError(f"{where}: there is no constant '{key}'", f"one of: {', '.join(known)}")


def _derived(base: Any, name: str, changes: dict[str, object], where: str) -> Any:
    if isinstance(base, AcceleratorSystem):
        parts = [base.hardware, base.policy, base.policy.intervals]
        hardware, policy, intervals = _changed(parts, changes, where)
        return AcceleratorSystem(name, hardware, replace(policy, intervals=intervals))
    (made,) = _changed([base], changes, where)
    title = f"defined by the user, based on '{base.name}'"
    return replace(made, name=name, **({"title": title} if "title" not in changes and hasattr(base, "title") else {}))


def _changed(parts: list[Any], changes: dict[str, object], where: str) -> list[Any]:
    kinds = [{one.name: str(one.type) for one in fields(part) if one.name != "name"} for part in parts]
    known = {name: kind for of_part in kinds for name, kind in of_part.items() if kind in WANTED}
    values = {}
    for key, value in changes.items():
        _check_key(where, key, known)
        values[key] = _value(f"{where}.{key}", value, known[key])
    try:
        made = [{key: value for key, value in values.items() if key in of_part} for of_part in kinds]
        return [replace(part, **own_values) for part, own_values in zip(parts, made, strict=True)]
    except ValueError as error:  # the message begins with the name of the field
        raise UsageError(f"{where}.{error}") from error


def _value(where: str, value: object, kind: str) -> Any:
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "str" and isinstance(value, str):
        return value
    if kind in ("int", "float") and isinstance(value, int | float) and not isinstance(value, bool):
        fits = abs(value) <= sys.float_info.max
        if fits and kind == "float":
            return float(value)
        if fits and float(value).is_integer():
            return int(value)
    raise UsageError(f"{where}: '{value}' is not {WANTED[kind]}")
