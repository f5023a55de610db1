"""Generated models: readable by llama.cpp, the gguf package and our parser, and reproducible byte by byte."""

import hashlib
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmcache.errors import run_cli
from tests.unit.command_parts import ended
from tools.bench.clients.llama_tokens import text
from tools.bench.harness import ROOT
from tools.bench.routing import layout_of, locality
from tools.bench.runner import client
from tools.bench.sides import environment
from tools.make_model import LIKE, TOPIC_TOKENS, TYPES, Heads, Shape, gguf_tensors, main, make_model

TOOL = ROOT / "tools" / "make_model.py"


# Small models of the architectures of --like; their vocabulary has 4 topics.
QWEN = Shape(1024, 256, 6144, 2, False, 16, 4, "qwen3moe", Heads(8, 2, 128))
GPT_OSS = Shape(1024, 256, 6144, 2, False, 16, 4, "gpt-oss", Heads(16, 2, 64))


def make(out: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return ended(lambda: sys.exit(run_cli(lambda: main([str(out), *args]))))


def made(out: Path, *args: str) -> list[Path]:
    done = make(out, *args)
    assert done.returncode == 0, done.stderr
    return [Path(line) for line in done.stdout.splitlines()]


def digest(paths: list[Path]) -> list[str]:
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]


def test_the_bytes_depend_only_on_the_arguments(tmp_path: Path) -> None:
    first = made(tmp_path / "a" / "m.gguf", "--size", "3M")
    command = [sys.executable, str(TOOL), str(tmp_path / "b" / "m.gguf"), "--size", "3M"]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    second = [Path(line) for line in output.splitlines()]
    other = made(tmp_path / "c" / "m.gguf", "--size", "3M", "--seed", "1")
    assert digest(first) == digest(second) != digest(other)


@pytest.mark.parametrize(
    ("file_type", "size_bytes", "error"),
    [("q8_0", 3e6, 0.2), ("q8_0", 12e6, 0.2), ("q4_k_m", 6e6, 0.12), ("q4_k_m", 60e6, 0.12)],
)
def test_models_have_about_the_requested_size(file_type: str, size_bytes: float, error: float, tmp_path: Path) -> None:
    (path,) = made(tmp_path / "m.gguf", "--size", f"{size_bytes:.0f}", "--type", file_type)
    assert path.stat().st_size == pytest.approx(size_bytes, rel=error)


def test_a_matching_file_is_kept_and_any_other_replaced(tmp_path: Path) -> None:
    (path,) = made(tmp_path / "m.gguf", "--size", "3M")
    first = path.stat()
    made(path, "--size", "3M")
    assert path.stat().st_ino == first.st_ino and path.stat().st_mtime_ns == first.st_mtime_ns
    with path.open("ab") as file:
        file.write(b"x")
    made(path, "--size", "3M")
    assert path.stat().st_size == first.st_size
    made(path, "--size", "3M", "--layers", "1")
    assert path.stat().st_size < first.st_size
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["m.gguf", "m.gguf.json"]


def test_impossible_models_are_refused_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    wrong_type = ["x/m.safetensors", "--format", "safetensors", "--type", "q4_k_m"]
    other_size = ["x/m.gguf", "--like", "gpt-oss-20b", "--size", "3M"]
    usage = (["x/m.gguf", "--split", "9999"], ["x/m.gguf", "--size", "huge"], wrong_type, other_size)
    for args, code in (*((args, 2) for args in usage), (["file/m.gguf"], 3)):
        result = make(tmp_path / args[0], *args[1:])
        assert result.returncode == code, result.stderr
        assert result.stderr.startswith("llmcache: error: ")
    assert not (tmp_path / "x").exists()


@pytest.mark.llama
@pytest.mark.parametrize("file_type", ["q8_0", "q4_k_m"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_gguf_package_reads_the_same_as_our_parser(tied: bool, file_type: str, tmp_path: Path) -> None:
    from gguf import GGUFReader

    (path,) = made(tmp_path / "m.gguf", "--size", "3M", "--type", file_type, *["--tied"] * tied)
    reader = GGUFReader(path)
    layout = layout_of(path)
    theirs = [(t.name, int(t.data_offset), int(t.n_bytes), t.tensor_type.name) for t in reader.tensors]
    assert theirs == [(t.name, t.offset, t.size_bytes, t.dtype) for t in layout.tensors]
    assert layout.header_bytes == reader.data_offset
    assert layout.has_output is not tied
    assert layout.regions()[-1].name == ("token_embd.weight" if tied else "output.weight")
    assert sum(region.size_bytes for region in layout.regions()) == pytest.approx(path.stat().st_size, abs=4096)


def types_of(path: Path) -> dict[str, tuple[str, int]]:
    from gguf import GGUFReader

    return {tensor.name: (tensor.tensor_type.name, int(tensor.n_bytes)) for tensor in GGUFReader(path).tensors}


@pytest.mark.llama
@pytest.mark.parametrize(
    "shape",
    [*(Shape(256, 768, 2000, layers, tied) for layers in (8, 13) for tied in (False, True)), replace(QWEN, layers=13)],
    ids=["8 layers", "8 layers tied", "13 layers", "13 layers tied", "qwen3moe"],
)
def test_q4_k_m_has_the_tensor_types_of_llama_cpp(shape: Shape, tmp_path: Path) -> None:
    (source,) = make_model(tmp_path / "q8_0.gguf", shape, "gguf", 1, 0)
    (path,) = make_model(tmp_path / "q4_k_m.gguf", shape, "gguf", 1, 0, file_type="q4_k_m")
    code = (
        "import ctypes, sys, llama_cpp\n"
        "parameters = llama_cpp.llama_model_quantize_default_params()\n"
        "parameters.ftype, parameters.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M, True\n"
        "source, target = (name.encode() for name in sys.argv[1:])\n"
        "sys.exit(llama_cpp.llama_model_quantize(source, target, ctypes.byref(parameters)))\n"
    )
    theirs = tmp_path / "theirs.gguf"
    command = [sys.executable, "-c", code, str(source), str(theirs)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert types_of(path) == types_of(theirs)


@pytest.mark.stock
@pytest.mark.parametrize(
    "args",
    [[], ["--tied", "--split", "3"], ["--type", "q4_k_m"], ["--type", "q4_k_m", "--experts", "8", "--slice", "100K"]],
    ids=["whole", "tied shards", "q4_k_m", "q4_k_m experts"],
)
def test_llama_cpp_loads_and_decodes(args: list[str], tmp_path: Path) -> None:
    first, *_ = made(tmp_path / "m.gguf", "--size", "3M", *args)
    # In a separate process, so that a crash of the server fails only this test.
    code = (
        "import sys; from tools.bench.clients.server_tokens import answer, serve\n"
        "server = serve(sys.argv[1])\n"
        "print(*(each.log_probability for each in answer(server.listening_address, [1, 300, 301], 4)))\n"
    )
    command = [sys.executable, "-c", code, str(first)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment())
    assert result.returncode == 0, result.stderr
    probabilities = [float(word) for word in result.stdout.split()]
    vocabulary = 8000 if "--experts" in args else 2000
    assert len(probabilities) == 4
    assert all(-math.log(vocabulary) < each < 0 for each in probabilities), "neither NaN nor uniform"


@pytest.mark.parametrize(("name", "size_gb"), [("qwen3-30b-a3b", 18.6), ("gpt-oss-20b", 12.1)])
def test_published_shapes_have_the_size_of_the_published_files(name: str, size_gb: float) -> None:
    shape, file_type = LIKE[name]
    tensors = gguf_tensors(shape, TYPES[file_type])
    assert sum(tensor.size_bytes for tensor in tensors) / 1e9 == pytest.approx(size_gb, rel=0.01)


def routed(shape: Shape, file_type: str, topics: int, tmp_path: Path) -> NDArray[np.int64]:
    """Return the experts that llama.cpp chooses for 120 tokens of a text."""
    (path,) = make_model(tmp_path / "m.gguf", shape, "gguf", 1, 0, file_type=file_type)
    out = tmp_path / "routing.npy"
    command = client("llama_tokens", path, 120, "--threads", 1, "--topics", topics, "--routing", out)
    subprocess.run(command, check=True, capture_output=True, timeout=120, env=environment())
    chosen: NDArray[np.int64] = np.load(out)
    return chosen


@pytest.mark.llama
@pytest.mark.parametrize(("shape", "file_type"), [(QWEN, "q4_k_m"), (GPT_OSS, "mxfp4")], ids=["qwen3moe", "gpt-oss"])
def test_llama_cpp_chooses_experts_by_token_and_topic(shape: Shape, file_type: str, tmp_path: Path) -> None:
    chosen, tokens = routed(shape, file_type, 2, tmp_path), text(120, shape.vocabulary, 2)
    assert chosen.shape == (120, shape.layers, shape.used) and chosen.min() == 0 and chosen.max() == shape.experts - 1
    uses = np.zeros((120, shape.layers, shape.experts))
    np.put_along_axis(uses, chosen, 1, axis=2)
    shared = np.einsum("ale,ble->ab", uses, uses) / (shape.layers * shape.used)
    at = np.array(tokens)
    same, other = (at[:, None] == at) & ~np.eye(120, dtype=bool), at[:, None] != at
    topic = at // TOPIC_TOKENS
    same_topic = other & (topic[:, None] == topic)
    assert shared[same].mean() > 0.8 > shared[same_topic].mean() > shared[other & ~same_topic].mean()
    assert locality(chosen, shape.experts).top > 1.3 / shape.experts


@pytest.mark.llama
@pytest.mark.parametrize(
    ("shape", "file_type"),
    [(Shape(256, 768, 4000, 2, False), "q8_0"), (QWEN, "q4_k_m"), (GPT_OSS, "mxfp4")],
    ids=["llama", "qwen3moe", "gpt-oss"],
)
def test_logits_have_the_spread_of_trained_models(shape: Shape, file_type: str, tmp_path: Path) -> None:
    (path,) = make_model(tmp_path / "m.gguf", shape, "gguf", 1, 0, file_type=file_type)
    code = (
        "import sys, llama_cpp, numpy\n"
        "model = llama_cpp.Llama(sys.argv[1], n_ctx=256, verbose=False)\n"
        "model.eval([1, 300, 2000, 3000])\n"
        "logits = llama_cpp.llama_get_logits(model.ctx)\n"
        "print(numpy.ctypeslib.as_array(logits, shape=(model.n_vocab(),)).std())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True, timeout=120)
    assert 0.1 < float(done.stdout) < 10


def test_a_text_repeats_words_and_changes_its_topic() -> None:
    tokens = np.array(text(1000, 6144, 2))
    topics = tokens // TOPIC_TOKENS
    assert set(topics[:500]) == {1, 2} and set(topics[500:]) == {1, 3}
    assert 0.35 < (topics == 1).mean() < 0.55 and len(set(tokens.tolist())) < 600
    assert text(1000, 6144, 2) == tokens.tolist() != text(1000, 6144, 2, seed=1)
    with pytest.raises(ValueError, match="has 4 topics, not 5"):
        text(10, 6144, 5)
