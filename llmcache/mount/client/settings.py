"""Settings of a mount and their origins: flag > environment (`LLMCACHE_*`) > file (`--config`) > default.

    [mount]
    source = "/srv/models"
    mount = "/mnt/models"
    cache = "6G"
    pin = ["llama-8b*.gguf"]

Values are strings as on the command line, true or false, or lists of strings, which colons separate in the environment.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from llmcache.errors import DataError, UsageError
from llmcache.mount.source.tree import DEFAULT_SPILL

# Options in fstab for mount(8), systemd and others, without a meaning for a file system.
_NOISE = {
    *("defaults", "rw", "auto", "noauto", "nofail", "_netdev", "user", "nouser", "users", "owner", "group"),
    *("async", "relatime", "noatime", "nodiratime", "strictatime", "lazytime", "nolazytime", "norelatime", "nostrictatime"),
    *("noowner", "nogroup", "silent", "loud", "nomand", "noiversion"),
}
_NOISE_PREFIXES = ("x-", "comment=", "X-", "user=", "uhelper=", "helper=")
# In libfuse, a backslash escapes a comma within a value: fsname=a\,b.
_WORD = re.compile(r"(?:[^,\\]|\\.?)+", re.DOTALL)


def option_words(values: Iterable[str]) -> list[str]:
    """Split `-o a,b -o c`; escapes are kept."""
    return [word.strip() for value in values for word in _WORD.findall(value) if word.strip()]


def mount_options(values: Iterable[str]) -> tuple[str, ...]:
    """Return the options for a file system in `-o a,b -o c`."""
    return tuple(word for word in option_words(values) if word not in _NOISE and not word.startswith(_NOISE_PREFIXES))


SCHEMA = "llmcache.config/1"
PREFIX = "LLMCACHE_"
TABLE = "mount"
_LONGEST_FILE = 1 << 14  # tomllib's memory grows with the square of the number of dots in a key
TEXT, SWITCH, LIST = "a string", "true or false", "a list of strings"
_EXAMPLES = {TEXT: '"…", in quotes (sizes too: "6G")', SWITCH: "true", LIST: '["first", "second"]'}
FLAG, ENVIRONMENT, FILE, DEFAULT = "flag", "environment", "file", "default"
_SWITCHES = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off", ""), False)


@dataclass(frozen=True)
class SettingKey:
    """One setting: its name in files (and, in upper case, in the environment), its kind and its default."""

    name: str
    kind: str = TEXT
    default: Any = None

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()


KEYS = (
    SettingKey("source"),
    SettingKey("mount"),
    SettingKey("cache"),
    SettingKey("mode", default="auto"),
    SettingKey("rw", SWITCH, False),
    SettingKey("spill", LIST, DEFAULT_SPILL),
    SettingKey("pin", LIST, ()),
    SettingKey("read_ahead"),
    SettingKey("access_log"),
    SettingKey("log"),
    SettingKey("metrics"),
    SettingKey("metrics_files", SWITCH, False),
    SettingKey("options", LIST, ()),
)
NAMES = {key.name: key for key in KEYS}
# Settings by their names as mount options, with dashes. Without `rw`, which every fstab line has, the paths, which are
# arguments, and `options` itself.
_OWN_OPTIONS = {key.name.replace("_", "-"): key for key in KEYS if key.name not in ("source", "mount", "rw", "options")}
_OWN_OPTIONS["writable"] = NAMES["rw"]


@dataclass(frozen=True)
class Setting:
    """A value and its origin; `where` names the variable or the file."""

    value: Any
    origin: str
    where: str = ""


def resolve(flags: Mapping[str, Any], config: str | None, environment: Mapping[str, str] = os.environ) -> dict[str, Setting]:
    """Return all settings by name. Flags that are None or empty count as absent; `-o KEY=VALUE` counts as a flag.

    UsageError: a key is unknown or has an invalid value; DataError: the file is not TOML.
    """
    config = config or environment.get(PREFIX + "CONFIG")
    stored = read_file(config) if config else {}
    given = {name: value for name, value in flags.items() if value is not None and value != ()}
    options, own = split_options(given.pop("options", ()))
    given = {**own, **given}
    if options:
        given["options"] = options

    def one(key: SettingKey) -> Setting:
        if key.name in given:
            return Setting(given[key.name], FLAG)
        if key.variable in environment:
            return Setting(_from_text(key, environment[key.variable]), ENVIRONMENT, key.variable)
        if key.name in stored:
            return Setting(stored[key.name], FILE, config or "")
        return Setting(key.default, DEFAULT)

    return {key.name: one(key) for key in KEYS}


def mount_point(given: str | None, config: str | None) -> str:
    """Return `given`, else the mount point in the settings. UsageError: there is none."""
    found = resolve({"mount": given}, config)["mount"].value
    if found is None:
        raise UsageError("Missing argument 'MOUNT'", "name the mount point, or give --config FILE that sets it")
    return str(found)


def read_file(path: str) -> dict[str, Any]:
    """Return the values in a settings file; lists as tuples."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        with open(path, "rb") as file:
            text = file.read(_LONGEST_FILE + 1)
        if len(text) > _LONGEST_FILE:
            raise DataError(
                f"{path}: longer than {_LONGEST_FILE} bytes: this is not a settings file", "see llmcache mount --help"
            )
        tables: dict[str, Any] = tomllib.loads(text.decode())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", "name a TOML file with --config") from error
    except (ValueError, RecursionError) as error:  # also for numbers of 5000 digits, and other encodings
        raise DataError(f"{path}: not TOML: {error}", "see https://toml.io") from error
    table = tables.pop(TABLE, {})
    for name in tables:
        raise UsageError(f"{path}: unknown key {reprlib.repr(name)}", f"settings belong in the table [{TABLE}]")
    if not isinstance(table, dict):
        raise UsageError(f"{path}: {TABLE} is not a table", f"write [{TABLE}] on a line of its own")
    for name in (name for name in table if name not in NAMES):
        raise UsageError(f"{path}: unknown key {reprlib.repr(f'{TABLE}.{name}')}", f"use one of: {', '.join(NAMES)}")
    return {name: _from_file(NAMES[name], value, path) for name, value in table.items()}


def _from_file(key: SettingKey, value: object, path: str) -> Any:
    if key.kind == SWITCH and isinstance(value, bool):
        return value
    if key.kind == LIST and isinstance(value, list) and all(isinstance(entry, str) for entry in value):
        return tuple(value)
    if key.kind == TEXT and isinstance(value, str):
        return value
    entry_text = f"{path}: {TABLE}.{key.name}: {reprlib.repr(value)}"
    raise UsageError(f"{entry_text} is not {key.kind}", f"write {key.name} = {_EXAMPLES[key.kind]}")


def _from_text(key: SettingKey, text: str) -> Any:
    if key.kind == LIST:
        return tuple(text.split(":"))
    if key.kind == SWITCH:
        if text.lower() not in _SWITCHES:
            raise UsageError(f"{key.variable}: '{text}' is neither yes nor no", "use 1 or 0")
        return _SWITCHES[text.lower()]
    return text


def split_options(values: Iterable[str]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Split mount options (`-o a,b -o c`) into those for libfuse and our own settings."""
    rest: list[str] = []
    own: dict[str, Any] = {}
    for word in option_words(values):
        name, is_set, text = word.replace("\\,", ",").partition("=")
        key = _OWN_OPTIONS.get(name)
        if key is None or bool(is_set) == (key.kind == SWITCH):
            rest.append(word)
        elif key.kind == LIST:
            own[key.name] = (*own.get(key.name, ()), text)
        else:
            own[key.name] = True if key.kind == SWITCH else text
    return tuple(rest), own


def show(settings: dict[str, Setting], as_json: bool) -> None:
    """Print `settings`."""
    if as_json:
        entries = [
            {"name": name, **asdict(setting), "where": setting.where or None, "variable": NAMES[name].variable}
            for name, setting in settings.items()
        ]
        print(json.dumps({"schema": SCHEMA, "settings": entries}, indent=1))
        return
    from rich.console import Console  # imported here, because a daemon keeps all modules of its command
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("setting", "value", "origin"):
        table.add_column(name, overflow="fold")
    for name, setting in settings.items():
        origin = f"{setting.origin} ({setting.where})" if setting.where else setting.origin
        table.add_row(name, _shown(setting.value), origin, style="dim" if setting.origin == DEFAULT else None)
    Console(highlight=False, markup=False).print(table)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " ".join(value) or "-"
    return "-" if value is None else str(value)
