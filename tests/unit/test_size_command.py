"""The `llmcache size` command: the answers of the paper, JSON, exit codes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from llmcache.cache.sizing import SECOND_NS, SizingParameters, ask, need, passes
from llmcache.memory import total_bytes
from llmcache.model.moe import ModelBytes, MoeBytes
from llmcache.mount.client import advice
from llmcache.mount.client.advice import mount_cache_bytes, mount_keeps_bytes
from llmcache.report.size import lines
from tests.unit.command_parts import called
from tests.unit.test_modelfile import EMBEDDING, LAYER, OUTPUT, gguf
from tools.make_model import Shape, make_model

MB, GB = 10**6, 10**9


def size(*args: str) -> subprocess.CompletedProcess[str]:
    return called("size", *args)


def answered(*args: str) -> dict[str, Any]:
    result = size(*args, "--json")
    assert result.returncode == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    assert document["schema"] == "llmcache.size/1" and document["kind"] == "modelled"
    return document


def test_the_cache_for_a_loop_is_computed() -> None:
    found = answered("--bw", "100", "--loop", "70M")
    assert (found["loop_cache_bytes"], found["cache_bytes"], found["loop_bytes"]) == (60 * MB, 64 * MB, 70 * MB)
    assert (found["period_s"], found["hot_bytes"], found["bandwidth_bytes_per_s"]) == (0.1, 4 * MB, 100 * MB)
    assert [(row["change"], row["loop_cache_bytes"]) for row in found["sensitivity"]] == [
        (-0.3, 63 * MB), (-0.2, 62 * MB), (0.0, 60 * MB), (0.2, 58 * MB), (0.3, 57 * MB)
    ]  # fmt: skip
    assert (found["ram"]["ram_bytes"], found["ram"]["source"]) == (total_bytes(), "machine")
    assert answered("--bw", "100", "--loop", "70M", "--cache", "64M")["ram"] is None
    found = answered("--bw", "100", "--loop", "70M", "--tokens-per-second", "20")
    assert (found["period_s"], found["loop_cache_bytes"]) == (0.05, 65 * MB)


@pytest.mark.parametrize(
    ("args", "loop"),
    [
        (("--cache", "64M", "--bw", "100"), "70 MB"),
        (("--cache", "512M", "--bw", "1000", "--hot", "0"), "612 MB"),
        (("--device", "watch"), "70 MB"),
        (("--device", "phone"), "612 MB"),
    ],
)
def test_the_largest_loop_for_a_cache_is_computed(args: tuple[str, ...], loop: str) -> None:
    assert f"largest loop without stalls  {loop}" in size(*args).stdout


def test_stalls_of_a_given_cache_are_reported() -> None:
    assert "stall-free" in size("--bw", "100", "--loop", "70M", "--cache", "64M").stdout
    passes = answered("--bw", "100", "--loop", "100M", "--cache", "64M")["caches"][0]["passes"]
    assert (passes["stall_free"], passes["stall_s"], passes["missing_bytes"]) == (False, 0.3, 40 * MB)
    assert (passes["tokens_per_s"], passes["tokens_per_s_lost"]) == (2.5, 7.5)


def test_speed_with_a_given_memory_is_reported() -> None:
    """16 GB of memory, a dense model of 22.6 GB, storage of 3 GB/s, no period given."""
    call = ("--bw", "3GB/s", "--loop", "22.6G", "--ram", "16G")
    found = answered(*call)
    ram, mount, page_cache = found["ram"], found["ram"]["llmcachefs"], found["ram"]["page_cache"]
    assert (ram["ram_bytes"], ram["source"], found["period_source"]) == (16 * GB, "given", "assumed")
    assert 15 * GB < ram["llmcachefs_cache_bytes"] < 15.2 * GB  # 5 % are reserved
    assert mount["missing_bytes"] == 22.6 * GB - mount["loop_cache_bytes"] and 0 < mount["missing_bytes"] < 7.7 * GB
    assert mount["tokens_per_s"] == pytest.approx(3 * GB / mount["missing_bytes"])
    assert page_cache["missing_bytes"] == 22.6 * GB and page_cache["tokens_per_s"] == pytest.approx(3 / 22.6)
    assert ram["needed_bandwidth_bytes_per_s"] == pytest.approx(mount["missing_bytes"] / 0.1)
    enough = answered(*call[:-1], f"{ram['needed_ram_bytes']}B")["ram"]["llmcachefs"]
    assert enough["stall_free"] and enough["tokens_per_s"] == 10


def test_loop_and_hot_set_come_from_the_model(tmp_path: Path) -> None:
    path = gguf(tmp_path / "m.gguf", EMBEDDING, LAYER, OUTPUT)
    found = answered("--bw", "100", "--model", str(path))
    assert found["loop_bytes"] == 320 and found["model"]["row_bytes"] == 128
    assert found["hot_bytes"] == found["model"]["hot_bytes"] > 0
    assert answered("--bw", "100", "--model", str(path), "--hot", "4M")["hot_bytes"] == 4 * MB


MIXTURE = Shape(256, 704, 2000, layers=2, tied=False, experts=16, used=2)


@pytest.mark.parametrize(("model_format", "fused"), [("gguf", False), ("safetensors", False), ("safetensors", True)])
def test_an_moe_model_reads_only_the_experts_in_use(tmp_path: Path, model_format: str, fused: bool) -> None:
    path = make_model(tmp_path / f"m.{model_format}", MIXTURE, model_format, 1, 0, fused)[0]
    if model_format == "safetensors":
        assert answered("--bw", "1", "--model", str(path))["mixture"] is None  # the experts per token are unknown
        assert "an upper bound" in size("--bw", "1", "--model", str(path)).stdout
        (tmp_path / "config.json").write_text(json.dumps({"num_experts_per_tok": 2}))
    found = answered("--bw", "1", "--model", str(path), "--ram", "1G")
    mixture, ram = found["mixture"], found["ram"]
    assert (mixture["experts"], mixture["used"], mixture["popularity"]["source"]) == (16, 2, "assumed")
    assert mixture["dense_bytes"] + mixture["expert_bytes"] == found["loop_bytes"]
    assert mixture["token_bytes"] == mixture["dense_bytes"] + mixture["expert_bytes"] // 8
    assert mixture["dense_bytes"] < found["loop_cache_bytes"] < found["loop_bytes"]
    inplace, fuse = found["llmcachefs_modes"]
    assert max(inplace["cache_bytes"], fuse["cache_bytes"]) < found["loop_bytes"]
    assert ram["llmcachefs"]["expert_hit_ratio"] == ram["page_cache"]["expert_hit_ratio"] == 1
    assert "read per token: 2 of 16 in each layer" in size("--bw", "1", "--model", str(path), "--cache", "16M").stdout


def test_memory_for_an_moe_model_without_stalls() -> None:
    """4 GB dense, 32 GB of experts, storage of 3 GB/s: without a cache, a token reads 6 GB in 2 s."""
    setting = SizingParameters(3 * GB, SECOND_NS // 10, 0)
    mixture = MoeBytes(4 * GB, 32 * GB, 64, 4)
    assert passes(mixture, 0, setting).tokens_per_s == pytest.approx(0.5)
    cache = mount_cache_bytes(mixture, need(mixture, setting).loop_cache_bytes, 0)
    assert passes(mixture, mount_keeps_bytes(mixture, cache, 0), setting).stall_free
    assert not passes(mixture, mount_keeps_bytes(mixture, cache - MB, 0), setting).stall_free
    assert mount_keeps_bytes(mixture, 3 * GB, 0) < 3 * GB  # dense tensors are streamed and need a window
    assert mount_keeps_bytes(mixture, 50 * GB, 0) == 36 * GB


def test_weights_that_llama_cpp_copies_count_as_memory(tmp_path: Path) -> None:
    shape = Shape(256, 768, 2048, layers=2, tied=False)
    copied = make_model(tmp_path / "q4.gguf", shape, "gguf", 1, 0, file_type="q4_k_m")[0]
    mapped = make_model(tmp_path / "q8.gguf", shape, "gguf", 1, 0)[0]
    call = ("--bw", "100", "--ram", "1G", "--model")
    found, other = answered(*call, str(copied)), answered(*call, str(mapped))
    assert 0 < found["model"]["repacked_bytes"] < found["loop_bytes"] and found["ram"]["fits_repacked"] is True
    assert other["model"]["repacked_bytes"] == 0 and other["ram"]["fits_repacked"] is None
    assert "--no-repack" in size(*call, str(copied)).stdout and "repack" not in size(*call, str(mapped)).stdout
    model = ModelBytes("m", "gguf", 1, 20 * GB, 0, 0, 0, repacked_bytes=18 * GB)
    question = ask(bw=GB, model="m", ram=16 * GB)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advice, "model_bytes", lambda path: model)
        said = "\n".join(lines(advice.advise(question)))
    assert "llama.cpp copies 18 GB of the model, which does not fit: the kernel kills it" in said


def test_even_routing_bounds_the_misses_of_an_moe_model() -> None:
    setting = SizingParameters(GB, SECOND_NS // 10, 0)
    mixture = MoeBytes(4 * GB, 32 * GB, 64, 4)
    for kept in (3 * GB, 5 * GB, 12 * GB, 20 * GB, 35 * GB, 36 * GB):
        went = passes(mixture, kept, setting)
        assert went.even is not None and went.even.missing_bytes >= went.missing_bytes, kept
    went = passes(mixture, 20 * GB, setting)
    assert went.even is not None and went.even.expert_hit_ratio == 0.5 and went.even.missing_bytes == GB
    assert passes(10 * GB, GB, setting).even is None


WRONG_TEXTS: dict[str, tuple[str, ...]] = {
    "--bw": ("0", "-1GB/s", "fast", "", "nan", "1e400", "99999999999999"),
    "--loop": ("70", "-70M", "0", "70X", "1e99"),
    "--cache": ("64", "-64M", "100B"),
    "--hot": ("4", "-4M"),
    "--t": ("0", "-1", "soon"),
    "--tokens-per-second": ("0", "-3", "many", "inf"),
    "--device": ("fridge",),
}
PLAIN = {"--bw": "100", "--loop": "70M"}
WRONG: list[tuple[dict[str, str], int, str]] = [
    *(({**PLAIN, option: text}, 2, option) for option, texts in WRONG_TEXTS.items() for text in texts),
    ({"--loop": "70M"}, 2, "--bw is missing"),
    ({"--bw": "100"}, 2, "--loop, --model and --cache"),
    ({**PLAIN, "--model": "m.gguf"}, 2, "--loop and --model"),
    ({**PLAIN, "--measure": "/data"}, 2, "--bw and --measure"),
    ({**PLAIN, "--t": "1", "--tokens-per-second": "1"}, 2, "--t and --tokens-per-second"),
    ({"--bw": "100", "--cache": "2M"}, 2, "--cache"),
    ({"--bw": "100", "--cache": "64M", "--ram": "1G"}, 2, "--ram"),
    ({"--measure": "/dev/null", "--loop": "70M"}, 2, "--measure"),
    ({"--bw": "100", "--model": "/nowhere.gguf"}, 2, "--model"),
    ({"--bw": "100", "--model": __file__}, 5, "--model"),
]


def test_bad_options_are_named_with_their_exit_code() -> None:
    for options, code, named in WRONG:
        result = size(*(word for pair in options.items() for word in pair))
        assert result.returncode == code and result.stdout == "", options
        assert result.stderr.startswith("llmcache: error: ") and named in result.stderr, options
        assert code == 5 or "hint: " in result.stderr, options
