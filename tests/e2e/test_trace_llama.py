"""The stock llama.cpp server with a limited page cache: the trace has the model's loop, with the period of the tokens."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from llmcache.cache.classify import SAME_PASSES
from tests.mount.live import run_json
from tools.bench.runner import Recording, cap_bytes, client, loop_bytes, record
from tools.make_model import main as make_model

pytestmark = [pytest.mark.long, pytest.mark.filemap, pytest.mark.stock, pytest.mark.cgroup]

CACHED_SHARE = 0.25  # cached share of the loop; with much more, a part stays mapped, where reads cause no faults
TOKENS = 8
PAUSE_S = 0.5  # between tokens, so that other load on the disk changes the time of a token little


@dataclass(frozen=True)
class Run:
    """A recording, its classes, and the loop of the model."""

    recording: Recording
    classes: dict[str, Any]
    loop_bytes: int

    @property
    def loops(self) -> list[dict[str, Any]]:
        """Return the loops read once per token, the largest first.

        There is one loop, unless the kernel keeps a part mapped for some tokens; that part is then read less often.
        """
        loops = [row for row in self.classes["rows"] if row["class"] == "LOOP" and row["op"] == "read"]
        return sorted((row for row in loops if row["passes"] >= 0.75 * TOKENS), key=lambda row: -int(row["accesses"]))


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        model = Path(directory) / "model.gguf"
        make_model([str(model), "--size", "80M"])
        loop = loop_bytes(model)
        words = ("--turns", 1, "--prompt", 4, "--answer", TOKENS, "--pause", PAUSE_S)
        command = client("server_tokens", model, *words)
        cap = cap_bytes(model, command, int(CACHED_SHARE * loop))
        recording = record(model, command, Path(directory) / "trace.parquet", cap)
        yield Run(recording, run_json("classify", recording.trace), loop)


def test_the_loop_has_the_size_of_the_tensors(run: Run) -> None:
    assert run.classes["lost_events"] == 0
    assert run.classes["totals"]["loop_bytes"] == pytest.approx(run.loop_bytes, rel=0.02)
    main, *parts = run.loops
    mapped_bytes = sum(part["bytes"] for part in parts if part["passes"] < (1 - SAME_PASSES) * main["passes"])
    assert main["bytes"] + mapped_bytes > 0.75 * run.loop_bytes, "parts read equally often are one loop"
    assert main["passes"] >= TOKENS


def test_the_period_is_the_time_of_a_token(run: Run) -> None:
    steps = [after - before for before, after in pairwise(run.recording.starts)]
    assert min(steps) > PAUSE_S
    # on a quiet machine, all tokens but the first take the same time; on a busy one, the last ones may differ
    assert 0.95 * min(steps[1:]) <= run.loops[0]["period_s"] <= 1.05 * max(steps[1:])


def test_layers_are_read_in_order_and_from_storage(run: Run) -> None:
    layers = run.classes["layers"]
    numbered = [layer for layer in layers if layer["layer"].startswith("blk.")]
    assert [layer["layer"] for layer in numbered] == [f"blk.{number}" for number in range(len(numbered))]
    assert [layer["place"] for layer in numbered] == list(range(len(numbered)))
    for layer in numbered:
        assert layer["accesses_known"] == layer["accesses"] >= 0.75 * TOKENS * layer["bytes"] / 4096
        assert layer["miss_ratio"] > 0.5
    (output,) = (layer for layer in layers if layer["layer"] == "output.weight")
    assert output["place"] > numbered[-1]["place"]
