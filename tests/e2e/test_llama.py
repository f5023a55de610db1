"""llama.cpp computes the same over a mount as over the plain file, in all modes, with a budget that is too small."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llmcache.model.modelfile import model_bytes
from tests.mount.live import live
from tools.bench.mount import answers, tokens
from tools.make_model import main as make_model

TOKENS = 5


@dataclass(frozen=True)
class Engine:
    """A program that runs llama.cpp, and the file type of its model."""

    file_type: str
    command: Callable[[str, Path], list[str]]


ENGINES = {
    "logits": Engine("q8_0", tokens(1, TOKENS)),
    "stock server": Engine("q4_k_m", answers(1, 4, TOKENS)),
}
"""llama-cpp-python, for its logits; and the server, which copies three quarters of its weights on x86."""


def events(model: Path, command: Callable[[str, Path], list[str]]) -> list[dict[str, Any]]:
    result = subprocess.run(command("", model), capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr[-1000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


def checksums(model: Path, engine: Engine) -> list[int]:
    """Return a checksum per token: of its logits, or of all tokens up to it with their probabilities."""
    return [event["crc"] for event in events(model, engine.command) if event["event"] == "step"]


def make_file(directory: Path, file_type: str) -> Path:
    path = directory / f"{file_type}.gguf"
    make_model([str(path), "--size", "48M", "--type", file_type])
    return path


@pytest.fixture(
    scope="module",
    params=[pytest.param("logits", marks=pytest.mark.llama), pytest.param("stock server", marks=pytest.mark.stock)],
)
def engine(request: pytest.FixtureRequest) -> Engine:
    return ENGINES[request.param]


@pytest.fixture(scope="module")
def model(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_file(tmp_path_factory.mktemp("models"), engine.file_type)


@pytest.fixture(scope="module")
def expected(engine: Engine, model: Path) -> list[int]:
    plain = checksums(model, engine)
    assert len(plain) == len(set(plain)) == TOKENS
    return plain


@pytest.mark.mount
@pytest.mark.parametrize("mode", ["steer", "arena", pytest.param("inplace", marks=pytest.mark.bpf)])
def test_llama_computes_the_same_over_a_mount(
    engine: Engine, model: Path, expected: list[int], tmp_path: Path, mode: str
) -> None:
    with live(model.parent, tmp_path / "mnt", "32Mi", "--mode", mode) as mount:
        assert checksums(mount.mountpoint / model.name, engine) == expected
        entry = next(each for each in mount.stats()["files"] if each["path"].lstrip("/") == model.name)
        assert (entry["class"], entry["size_bytes"]) == ("loop", model.stat().st_size), "the header identifies a loop"
        assert checksums(mount.mountpoint / model.name, engine) == expected, "also with the cache that the first run left"
        stats = mount.stats()
    assert stats["mode"] == mode
    assert stats["read_bytes"] > 0
    assert stats["backing_read_bytes"] > 0 or mode == "inplace", "in place, the kernel may have cached all of it"


@pytest.mark.stock
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors repack other types")
def test_the_stock_server_copies_the_predicted_bytes(tmp_path: Path) -> None:
    command = ENGINES["stock server"].command
    mapped, copied = (make_file(tmp_path, file_type) for file_type in ("q8_0", "q4_k_m"))
    anon_bytes = {path: int(events(path, command)[-1]["anon_bytes"]) for path in (mapped, copied)}
    assert model_bytes(str(mapped)).repacked_bytes == 0 and anon_bytes[mapped] < 0.6 * mapped.stat().st_size
    # The model of six layers also has a larger KV cache than the one of three.
    assert anon_bytes[copied] - anon_bytes[mapped] == pytest.approx(model_bytes(str(copied)).repacked_bytes, rel=0.2)
