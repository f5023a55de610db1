"""`llmcache kv list`, `show` and `prune`: what they tell of a directory of stored prompts, and what they remove."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from llmcache.cli import app
from llmcache.errors import LlmcacheError, UsageError
from llmcache.kv.prefix.store import PART, BlockStore
from tests.unit.test_kv_prefix import FILE_BYTES, MODEL, SECOND, Clock, block, key, numbers

OTHER = "f" * 32


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Three blocks of one model, unused for a day, and one of another, of which one prompt was restored."""
    clock = Clock()
    clock.now = 1_700_000_000 * SECOND
    store = BlockStore(tmp_path / "kv", 10**9, clock=clock)
    told = {"file": "a.gguf", "block_tokens": 256, "context": {"type_k": 1}}
    store.describe(MODEL, told)
    store.describe(OTHER, {**told, "file": "b.gguf"})
    for index in range(2):
        store.write(key(index, index), block(index))
    store.write(key(2, 2, PART), block(2))
    clock.now += 86400 * SECOND
    store.write(key(3, model=OTHER), block(3))
    store.used([key(3, model=OTHER)], 256, 8192)
    (store.directory / "foreign").write_text("mine")
    return store.directory


def said(*words: object) -> Any:
    result = CliRunner().invoke(app, ["kv", *map(str, words), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def shown(*words: object) -> str:
    return CliRunner().invoke(app, ["kv", *map(str, words)], catch_exceptions=False).stdout


def test_list_tells_of_every_model(directory: Path) -> None:
    told = said("list", directory)
    assert told["schema"] == "llmcache.kv-list/1"
    first, second = told["models"]
    assert (first["fingerprint"], first["file"], first["blocks"]) == (OTHER, "b.gguf", {"kv": 1})
    assert (first["restores"], first["restored_tokens"], first["restored_bytes"]) == (1, 256, 8192)
    assert (second["blocks"], second["size_bytes"], second["longest_tokens"]) == ({"kv": 2, "part": 1}, 3 * FILE_BYTES, 512)
    assert second["used_ns_ago"] - first["used_ns_ago"] == pytest.approx(86400 * SECOND, rel=0.01)
    text = shown("list", directory)
    assert [line.split()[0] for line in text.splitlines()[1:]] == ["model", "b.gguf", "a.gguf"]
    assert "…" not in text, "nothing is cut off"


def test_show_tells_what_a_fingerprint_stands_for(directory: Path) -> None:
    told = said("show", directory, MODEL[:6])
    assert told["schema"] == "llmcache.kv-show/1" and told["described"]["context"] == {"type_k": 1}
    assert 'context      {"type_k": 1}' in shown("show", directory, "a.gguf")
    with pytest.raises(UsageError, match="no model"):
        said("show", directory, "c.gguf")
    with pytest.raises(UsageError, match="several"):
        said("show", directory, "")


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (("--model", OTHER[:5]), {0, 1, 2}),
        (("--model", "a.gguf", "--keep", FILE_BYTES), {2, 3}),
        (("--keep", 0), set()),
        (("--unused", "1s", "--model", "b.gguf"), {0, 1, 2}),
        (("--keep", "1G", "--unused", "100000d"), {0, 1, 2, 3}),
    ],
)
def test_prune_removes_what_is_said_and_nothing_foreign(directory: Path, words: tuple[str, ...], left: set[int]) -> None:
    told, removed = said("prune", directory, *words), 4 - len(left)
    assert (told["removed_blocks"], told["removed_bytes"]) == (removed, removed * FILE_BYTES)
    assert (told["left_blocks"], told["left_bytes"]) == (len(left), len(left) * FILE_BYTES)
    store = BlockStore(directory, None)
    assert numbers(store) == left
    assert store.models() == sorted({OTHER if number == 3 else MODEL for number in left}), "one without blocks is forgotten"
    assert (directory / "foreign").read_text() == "mine"


def test_prune_removes_what_was_not_used_for_so_long(tmp_path: Path) -> None:
    clock = Clock()
    store = BlockStore(tmp_path, 10**9, clock=clock)
    for number in range(4):
        clock.now += 10 * SECOND
        store.write(key(number), block(number))
    store.prune(unused_ns=25 * SECOND)
    assert numbers(store) == {1, 2, 3}


@pytest.mark.parametrize(
    ("words", "code"),
    [(("prune", "."), 2), (("list", "."), 2), (("list", "/nowhere"), 2), (("prune", ".", "--unused", "long"), 2)],
)
def test_what_cannot_be_done_is_refused(words: tuple[str, ...], code: int, tmp_path: Path) -> None:
    with pytest.raises(LlmcacheError) as caught:
        CliRunner().invoke(app, ["kv", words[0], str(tmp_path / words[1]), *words[2:]], catch_exceptions=False)
    assert caught.value.exit_code == code and caught.value.hint
    assert not list(tmp_path.iterdir()), "nothing is made by looking"
