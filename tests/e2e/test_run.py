"""`llmcache run` with the stock llama.cpp server and its default flags, in less memory than the model needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.mount.live import llmcache
from tools.bench.mount import answers
from tools.make_model import main as make_model

pytestmark = pytest.mark.bpf

TURNS, ANSWER = 2, 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Q4_K_M model, two thirds of which llama.cpp copies."""
    path = tmp_path_factory.mktemp("models") / "q4_k_m.gguf"
    make_model([str(path), "--size", "120M", "--type", "q4_k_m"])
    return path


def events(text: str) -> list[dict[str, Any]]:
    """Return the events of the client among the lines of a program's output."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def checksums(text: str) -> list[int]:
    return [event["crc"] for event in events(text) if event["event"] == "step"]


@pytest.mark.stock
def test_the_server_gives_the_same_answers_and_its_copies_are_reported(model: Path) -> None:
    """The pauses give `run` time to look for copies, which it does every 10 s."""
    command = [*answers(TURNS, 60, ANSWER)("", model), "--pause", "0.8"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as plain:
        done = llmcache("run", "--json", "--memory", "320Mi", "--", *command, timeout=240)
        expected, _ = plain.communicate(timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert checksums(done.stdout) == checksums(expected) and len(checksums(done.stdout)) == TURNS * ANSWER
    lines, summary = done.stderr.splitlines()[:-1], json.loads(done.stderr.splitlines()[-1])
    assert any("steering q4_k_m.gguf (" in line for line in lines), lines
    copied = next(line for line in lines if "has copied" in line)
    assert "by repacking" in copied and "--no-repack" in copied
    assert summary["schema"] == "llmcache.run/1" and summary["files"] == [str(model)]
    (steered,) = summary["steered"]
    assert steered["mode"] == "inplace"
    tokens = summary["tokens"]
    assert tokens["can_see_tokens"], tokens
    # After a pause, the prompt of each request is the last token: a pass of one row, like that of any other token.
    assert tokens["tokens"] + tokens["prefill_passes"] >= TURNS * ANSWER - 2


@pytest.mark.stock
def test_a_command_killed_for_memory_is_reported(model: Path) -> None:
    """The server copies its weights because it ignores LLAMA_ARG_NO_REPACK, and does not fit, with or without llmcache."""
    done = llmcache("run", "--memory", "72Mi", "--", *answers(1, 4, 2)("", model), timeout=240)
    assert done.returncode == -9, done.stderr[-2000:]
    assert "setting LLAMA_ARG_NO_REPACK=1" in done.stderr
    assert (
        "the kernel's OOM killer ended the command: it needs more memory than is available (--memory 75.5 MB)" in done.stderr
    )


GENERATE = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
print(*model.generate(torch.arange(8)[None] + 3, max_new_tokens=8, do_sample=False)[0].tolist())
"""


@pytest.mark.transformers
def test_a_model_in_a_hugging_face_cache_is_steered_by_its_name(tmp_path: Path) -> None:
    """The shards are links to blobs, as `huggingface-cli download` creates them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 4}
    saved, hub = tmp_path / "saved", tmp_path / "hub" / "models--org--name"
    LlamaForCausalLM(LlamaConfig(vocab_size=4000, **sizes)).save_pretrained(saved, max_shard_size="40MB")
    snapshot = hub / "snapshots" / ("5" * 40)
    snapshot.mkdir(parents=True)
    (hub / "blobs").mkdir()
    shards = sorted(saved.glob("*.safetensors"))
    assert len(shards) >= 2
    for number, file in enumerate(sorted(saved.iterdir())):
        blob = hub / "blobs" / f"{number:064x}"
        file.rename(blob)
        (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    command = [sys.executable, "-c", GENERATE, str(snapshot)]
    expected = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout
    done = llmcache("run", "--", *command, timeout=240)
    assert (done.returncode, done.stdout) == (0, expected), done.stderr[-2000:]
    assert f"steering org/name/{shards[0].name} (" in done.stderr and str(hub) in done.stderr
