"""Fuzz target: settings in TOML, in the environment, and in mount options."""

from __future__ import annotations

from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmcache.errors import LlmcacheError
from llmcache.mount.client.settings import KEYS, LIST, PREFIX, SWITCH, mount_options, resolve, split_options
from tests.conftest import examples
from tests.fuzz.mutations import mutated
from tests.fuzz.target import Target, bounded, refusal, scratch

FILES = [
    b'[mount]\nsource = "/srv/models"\nmount = "/mnt"\ncache = "6G"\nrw = true\npin = ["a*.gguf", "b"]\n',
    b'[mount]\nmode = "arena"\nspill = []\nlog = "journal"\noptions = ["allow_other", "cache=1G"]\naccess_log = "x"\n',
]
WORDS = ["cache=6G", "pin=*.gguf", "writable", "rw", "ro", "nofail", "x-a=b", "spill=", "=", "cache", "access-log=/a", ""]


def check(data: bytes) -> None:
    """Check that any bytes as a settings file give settings of the right types, or a refusal that names the file."""
    with scratch() as directory:
        path = Path(directory) / "llmcache.toml"
        path.write_bytes(data)
        with bounded(), refusal(LlmcacheError):
            try:
                found = resolve({}, str(path), {})
            except LlmcacheError as error:
                assert str(path) in error.message
                raise
            assert list(found) == [key.name for key in KEYS]
            for key in KEYS:
                kinds = {SWITCH: bool, LIST: tuple}
                value = found[key.name].value
                assert value == key.default or isinstance(value, kinds.get(key.kind, str))
        assert path.read_bytes() == data


def check_options(data: bytes) -> None:
    """Check that any `-o` and any environment are split into our options and libfuse's, without overlap."""
    words = data.decode("utf-8", "surrogateescape").split("\n")
    rest, own = split_options(words)
    assert not set(rest) & {f"{name}={value}" for name, value in own.items()}
    assert set(mount_options(rest)) <= set(rest)
    environment = {f"{PREFIX}{key.name.upper()}": word for key, word in zip(KEYS, words, strict=False)}
    with bounded(), refusal(LlmcacheError):
        found = resolve({"options": tuple(words)}, None, environment)
        assert set(own) <= {name for name, setting in found.items() if setting.origin == "flag"}


OPTIONS = st.lists(st.sampled_from(WORDS), max_size=6).map(lambda words: ",".join(words).encode())
TARGET = Target("settings", mutated(FILES), check)
MOUNT_OPTIONS = Target(
    "mount-options", mutated([",".join(WORDS).encode(), b"\n".join(map(str.encode, WORDS))]) | OPTIONS, check_options
)


def test_the_seeds_are_read() -> None:
    for data in FILES:
        check(data)
    check_options(",".join(WORDS).encode())


@given(TARGET.inputs)
@settings(max_examples=examples(100))
@example(b"a = " + b"[" * 10_000)
@example(b"a = " + b"{a=" * 4_000)
@example(b"a" + b".a" * 2_000 + b" = 1")
@example(b"a" + b".a" * 100_000 + b" = 1")
@example(b"[mount]\ncache = " + b"9" * 5000)
@example(b"\xff")
def test_any_file(data: bytes) -> None:
    check(data)


@given(MOUNT_OPTIONS.inputs)
@settings(max_examples=examples(100))
def test_any_options(data: bytes) -> None:
    check_options(data)
