"""Settings of a mount: origins, errors that name the key, and their display."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from llmcache.errors import DataError, UsageError
from llmcache.mount.client import mount
from llmcache.mount.client.settings import (
    DEFAULT,
    ENVIRONMENT,
    FILE,
    FLAG,
    KEYS,
    mount_point,
    read_file,
    resolve,
    split_options,
)

PLACES = {"source": "/src", "mount": "/mnt"}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "models.toml"
    path.write_text('[mount]\nsource = "/a"\nmount = "/b"\ncache = "6G"\nmode = "arena"\nrw = true\npin = ["x", "y"]\n')
    return path


def origins(flags: Mapping[str, Any], config: Path | None, environment: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    found = resolve(flags, str(config) if config else None, environment)
    return {name: (setting.value, setting.origin) for name, setting in found.items()}


def test_precedence_is_flags_environment_file_defaults(config: Path) -> None:
    environment = {"LLMCACHE_MODE": "steer", "LLMCACHE_CACHE": "7G", "LLMCACHE_CI": "1", "HOME": "/"}
    found = origins({"cache": "8G", "mode": None, "pin": (), "options": ()}, config, environment)
    assert found["cache"] == ("8G", FLAG)
    assert found["mode"] == ("steer", ENVIRONMENT)
    assert found["source"] == ("/a", FILE) and found["pin"] == (("x", "y"), FILE) and found["rw"] == (True, FILE)
    assert found["spill"] == (("*.kv",), DEFAULT) and found["log"] == (None, DEFAULT)
    assert origins({}, None, {"LLMCACHE_CONFIG": str(config)})["cache"] == ("6G", FILE)
    assert mount_point("/x", str(config)) == "/x" and mount_point(None, str(config)) == "/b"


def test_every_key_can_be_set_in_every_way(tmp_path: Path) -> None:
    for key in KEYS:
        text = {"true or false": "true", "a list of strings": '["v"]'}.get(key.kind, '"v"')
        path = tmp_path / f"{key.name}.toml"
        path.write_text(f"[mount]\n{key.name} = {text}\n")
        value = {"true or false": True, "a list of strings": ("v",)}.get(key.kind, "v")
        assert origins({}, path, {})[key.name] == (value, FILE)
        word = "1" if value is True else "v"
        assert origins({}, None, {f"LLMCACHE_{key.name.upper()}": word})[key.name] == (value, ENVIRONMENT)
        assert origins({key.name: value}, None, {})[key.name] == (value, FLAG)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[mount]\ncach = '6G'\n", "unknown key 'mount.cach'"),
        ("cache = '6G'\n", "unknown key 'cache'"),
        ("[mount]\ncache = 6\n", "mount.cache: 6 is not a string"),
        ("[mount]\nrw = 'yes'\n", "mount.rw: 'yes' is not true or false"),
        ("[mount]\npin = 'x'\n", "mount.pin: 'x' is not a list of strings"),
        ("[mount]\npin = ['x', 1]\n", "mount.pin"),
        ("mount = 1\n", "mount is not a table"),
    ],
)
def test_wrong_keys_and_values_are_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "f.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_file(str(path))
    assert said in caught.value.message and str(path) in caught.value.message
    if "is not a list" in said:
        assert caught.value.hint == 'write pin = ["first", "second"]'


def test_missing_and_invalid_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_file(str(tmp_path / "none"))
    (tmp_path / "f").write_text("[mount\n")
    with pytest.raises(DataError, match="not TOML"):
        read_file(str(tmp_path / "f"))
    with pytest.raises(UsageError, match="MOUNT"):
        mount_point(None, None)


def test_values_of_environment_variables_are_checked() -> None:
    assert origins({}, None, {"LLMCACHE_PIN": "a.gguf:b.gguf"})["pin"][0] == ("a.gguf", "b.gguf")
    for name, value, said in (
        ("LLMCACHE_RW", "maybe", "LLMCACHE_RW: 'maybe'"),
        ("LLMCACHE_CACHE", "lots", "LLMCACHE_CACHE"),
        ("LLMCACHE_MODE", "fast", "mode: 'fast'"),
        ("LLMCACHE_METRICS", "0.0.0.0:9464", "metrics: '0.0.0.0' is not a loopback address"),
    ):
        with pytest.raises(UsageError, match=said):
            mount.request_of(resolve(PLACES, None, {name: value}))


def test_fstab_options_are_split_into_settings_and_mount_options() -> None:
    words = ["rw,nofail,_netdev,x-systemd.automount,cache=6G,pin=a,pin=b", "writable,access-log=/l.parquet,ro,mode,rw=1"]
    rest, own = split_options(words)
    assert own == {"cache": "6G", "pin": ("a", "b"), "rw": True, "access_log": "/l.parquet"}
    assert rest == ("rw", "nofail", "_netdev", "x-systemd.automount", "ro", "mode", "rw=1")
    found = origins({"cache": "8G", "options": ("cache=6G,nofail,allow_other",)}, None, {})
    assert found["cache"] == ("8G", FLAG)
    escaped = split_options([r"pin=a\,b,fsname=/srv\,x\\,allow_other"])
    assert escaped == ((r"fsname=/srv\,x\\", "allow_other"), {"pin": ("a,b",)})
    request = mount.request_of(resolve({**PLACES, "options": ("nofail,user=me,x-y,allow_other",)}, None, {}))
    assert request.options[0].endswith("nosuid,allow_other")


def test_a_mount_without_spill_globs_is_read_only(tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_text("[mount]\nspill = []\n")
    for flags, config in (({"spill": ("",)}, None), ({}, str(tmp_path / "f.toml"))):
        request = mount.request_of(resolve({**PLACES, **flags}, config, {}))
        assert request.spill == () and request.options[0].endswith(",ro")


def test_settings_are_shown_with_their_origins(config: Path) -> None:
    command = [sys.executable, "-m", "llmcache", "config", "--show", "--config", str(config), "-o", "log=journal"]
    environment = {**os.environ, "LLMCACHE_CACHE": "7G"}
    shown = subprocess.run([*command, "--json"], capture_output=True, text=True, env=environment, check=True)
    document = json.loads(shown.stdout)
    assert document["schema"] == "llmcache.config/1"
    found = {entry["name"]: (entry["value"], entry["origin"], entry["where"]) for entry in document["settings"]}
    assert found["cache"] == ("7G", "environment", "LLMCACHE_CACHE")
    assert found["pin"] == (["x", "y"], "file", str(config)) and found["log"] == ("journal", "flag", None)
    subprocess.run(command, capture_output=True, env=environment, check=True)  # as a table
