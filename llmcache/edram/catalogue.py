"""All that a command can name: models, workloads, systems and profiles; the paper's own, and the user's from a TOML file.

[profile.mine]              # any field of constants.Profile; `base` says what it begins with
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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from llmcache.edram.constants import PROFILES, Profile
from llmcache.edram.systems import BASELINE, MODELS, SYSTEMS, WORKLOADS, AcceleratorSystem, GenerationWorkload, LlmShape
from llmcache.errors import DataError, UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Part = TypeVar("Part")


@dataclass(frozen=True)
class Catalogue:
    """What there is, by name: the paper's own, where nothing else is said."""

    models: Mapping[str, LlmShape] = field(default_factory=lambda: MODELS)
    workloads: Mapping[str, GenerationWorkload] = field(default_factory=lambda: WORKLOADS)
    systems: Mapping[str, AcceleratorSystem] = field(default_factory=lambda: SYSTEMS)
    profiles: Mapping[str, Profile] = field(default_factory=lambda: PROFILES)

    @property
    def baseline(self) -> AcceleratorSystem:
        """The system that others are compared with."""
        return self.systems[BASELINE]


def named(kind: str, known: Mapping[str, Part], name: str) -> Part:
    """Returns what is called `name`, in any case, of the `known` ones; UsageError names the option `--kind`."""
    for key, value in known.items():
        if key.lower() == name.strip().lower():
            return value
    raise UsageError(f"--{kind}: there is no {kind} '{name.strip()}'", f"one of: {', '.join(known)}")


def listed(kind: str, known: Mapping[str, Part], text: str) -> list[Part]:
    """Returns what `text` names, a list with commas or "all", each once; errors as `named`."""
    names = list(known) if text.strip().lower() == "all" else text.split(",")
    return list(dict.fromkeys(named(kind, known, name) for name in names))


def catalogue(constants: str | None) -> Catalogue:
    """Returns the paper's catalogue, with what the user's file `constants` adds; errors as `read_constants`."""
    return Catalogue() if constants is None else read_constants(constants)


DEFAULTS = {"profile": "paper", "model": "llama2-7b", "workload": "PG19", "system": "Kelle+eDRAM"}
"""Kinds of tables, and what a new one of each begins with if it does not say."""
WANTED = {"bool": "true or false", "str": "a text", "int": "a whole number", "float": "a number"}


@dataclass(frozen=True)
class _Entry:
    """One table of the file: `where` it is (profile.mine), what it begins with, and what it changes."""

    where: str
    base: str
    changes: dict[str, Any]


def read_constants(path: str | Path) -> Catalogue:
    """Returns the paper's catalogue with what the TOML file `path` adds and changes.

    UsageError, naming file and key, for keys that are not known and values that are not possible; DataError if the file is
    no TOML.
    """
    tables = _tables(Path(path))
    known = Catalogue()
    parts: dict[str, dict[str, Any]] = {
        "profile": dict(known.profiles),
        "model": dict(known.models),
        "workload": dict(known.workloads),
        "system": dict(known.systems),
    }
    for kind, named in tables.items():
        _only(f"{path}", kind, tuple(DEFAULTS))
        if not isinstance(named, dict):
            raise UsageError(f"{path}: {kind}: a table is needed", f"write [{kind}.NAME]")
        for name, changes in named.items():
            entry = _entry(f"{path}: {kind}.{name}", changes, name if name in parts[kind] else DEFAULTS[kind])
            if entry.base not in parts[kind]:
                hint = f"one of: {', '.join(parts[kind])}"
                raise UsageError(f"{entry.where}.base: there is no {kind} '{entry.base}'", hint)
            made = _system if kind == "system" else _changed
            parts[kind][name] = made(parts[kind][entry.base], entry, name)
    return Catalogue(parts["model"], parts["workload"], parts["system"], parts["profile"])


def _tables(path: Path) -> dict[str, Any]:
    try:
        return dict(tomllib.loads(path.read_text()))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}", "name a TOML file with --constants") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not TOML: {error}", "see https://toml.io") from error


def _entry(where: str, changes: object, base: str) -> _Entry:
    if not isinstance(changes, dict):
        raise UsageError(f"{where}: a table is needed", "write [profile.NAME], then one constant a line")
    rest = dict(changes)
    chosen = rest.pop("base", base)
    if not isinstance(chosen, str):
        raise UsageError(f"{where}.base: '{chosen}' is not a name")
    return _Entry(where, chosen, rest)


def _only(where: str, key: str, known: tuple[str, ...]) -> None:
    if key not in known:
        raise UsageError(f"{where}: there is no constant '{key}'", f"one of: {', '.join(known)}")


def _changeable(part: object) -> dict[str, str]:
    """Returns the fields of `part` that a file may change, with the names of their types."""
    kinds = {field.name: str(field.type) for field in fields(part)}  # type: ignore[arg-type]
    return {name: kind for name, kind in kinds.items() if name != "name" and kind in WANTED}


def _changed(part: Part, entry: _Entry, name: str) -> Part:
    """Returns `part` with the changes of `entry` and the name `name`."""
    known = _changeable(part)
    values = {key: _value(f"{entry.where}.{key}", value, known[key]) for key, value in _checked(entry, known)}
    title = {"title": f"of the user, beginning with '{entry.base}'"} if "title" in known else {}
    return _built(part, entry.where, {**title, **values, "name": name})


def _checked(entry: _Entry, known: Iterable[str]) -> Iterator[tuple[str, object]]:
    """Yields the changes of `entry`; UsageError if one is none of `known`."""
    for key, value in entry.changes.items():
        _only(entry.where, key, tuple(known))
        yield key, value


def _built(part: Part, where: str, values: Mapping[str, Any]) -> Part:
    try:
        return replace(part, **values)  # type: ignore[type-var]
    except ValueError as error:  # the message of a part begins with the name of the field
        raise UsageError(f"{where}.{error}") from error


def _value(where: str, value: object, kind: str) -> Any:
    """Returns `value` as `kind` (the name of a type); UsageError if it is none. A whole number may be written as 128e9."""
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


def _system(system: AcceleratorSystem, entry: _Entry, name: str) -> AcceleratorSystem:
    """Returns `system` with the changes of `entry`, each in the part that has it."""
    hardware, policy = system.hardware, system.policy
    of_hardware, of_policy, of_intervals = _changeable(hardware), _changeable(policy), _changeable(policy.intervals)
    for key, value in _checked(entry, {**of_hardware, **of_policy, **of_intervals}):
        where = f"{entry.where}.{key}"
        if key in of_hardware:
            hardware = _built(hardware, entry.where, {key: _value(where, value, of_hardware[key])})
        elif key in of_policy:
            policy = _built(policy, entry.where, {key: _value(where, value, of_policy[key])})
        else:
            intervals = _built(policy.intervals, entry.where, {key: _value(where, value, of_intervals[key])})
            policy = replace(policy, intervals=intervals)
    return AcceleratorSystem(name, hardware, policy)
