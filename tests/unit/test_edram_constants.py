"""Constants of the user: what a TOML file may change, and what it is told where it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmcache.edram.constants import KELLE_INTERVALS, PAPER
from llmcache.edram.models import MODELS
from llmcache.edram.systems import SYSTEMS
from llmcache.edram.userconstants import read_constants
from llmcache.edram.workloads import WORKLOADS
from llmcache.errors import DataError, UsageError

MINE = """
[profile.mine]
refresh_pass_j = 3.65e-6
[profile.silicon]
sfu_w = 1
[model.tiny]
base = "llama3-8b"
layers = 8
[workload.chat]
base = "TQ"
batch = 1
[system.half]
kv_bytes_per_s = 128e9
hst_msb_ns = 180_000
evict = false
[system."Original+SRAM"]
array_rows = 32
"""


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    return file


def test_everything_can_be_added_and_changed(tmp_path: Path) -> None:
    found = read_constants(written(tmp_path, MINE))
    mine = found.profile("mine")
    assert (mine.refresh_pass_j, mine.dram_j_per_byte) == (3.65e-6, PAPER.dram_j_per_byte)
    assert mine.name == "mine" and "of the user" in mine.title
    assert found.profile("silicon").sfu_w == 1.0
    assert found.profile("silicon").refresh_pass_j == pytest.approx(3.65e-6, rel=1e-3)
    assert (found.model("tiny").layers, found.model("tiny").kv_heads) == (8, MODELS["llama3-8b"].kv_heads)
    assert (found.workload("chat").batch, found.workload("chat").budget) == (1, WORKLOADS["TQ"].budget)
    half = found.system("half")
    assert half.hardware.kv_bytes_per_s == 128e9 and half.hardware.overlap and not half.policy.evict
    assert half.policy.intervals.in_order() == (180_000, *KELLE_INTERVALS.in_order()[1:])
    assert found.baseline.hardware.array_rows == 32
    assert list(found.systems) == [*SYSTEMS, "half"] and found.profile("PAPER") == PAPER


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[profile.mine]\nrefresh_j = 1", "profile.mine: there is no constant 'refresh_j'"),
        ("[profiles.mine]\nsfu_w = 1", "there is no constant 'profiles'"),
        ("[model.x]\nlayer = 3", "model.x: there is no constant 'layer'"),
        ("[model.x]\nlayers = 1.5", "model.x.layers: '1.5' is not a whole number"),
        ("[model.x]\nlayers = true", "model.x.layers: 'True' is not a whole number"),
        ("[model.x]\ngated = 1", "model.x.gated: '1' is not true or false"),
        ("[model.x]\nkv_heads = 5", "model.x.kv_heads: 5 do not divide"),
        ("[model.x]\nname = 'y'", "model.x: there is no constant 'name'"),
        ("[workload.x]\nbudget = 3", "workload.x.budget: 3"),
        ("[workload.x]\nbase = 'nothing'", "workload.x.base: there is no workload 'nothing'"),
        ("[workload.x]\nbase = 3", "workload.x.base: '3' is not a name"),
        ("[system.x]\nintervals = 3", "system.x: there is no constant 'intervals'"),
        ("[system.x]\nhst_msb_ns = 0", "system.x.hst_msb_ns: 0"),
        ("[system.x]\nrecompute = 'often'", "system.x.recompute: 'often'"),
        ("[system.x]\nrecompute = 1", "system.x.recompute: '1' is not a text"),
        ("[profile.x]\nsfu_w = nan", "profile.x.sfu_w: 'nan' is not a number"),
        ("[profile.x]\nsfu_w = 1" + "0" * 400, "profile.x.sfu_w: '10"),
        ("[model.x]\nlayers = 1" + "0" * 400, "model.x.layers: '10"),
        ("[profile.x]\nsfu_w = -1", "profile.x.sfu_w: -1"),
        ("profile = 3", "profile: a table is needed"),
        ("[profile]\nmine = 3", "profile.mine: a table is needed"),
    ],
)
def test_what_is_wrong_is_named(text: str, named: str, tmp_path: Path) -> None:
    file = written(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        read_constants(file)
    assert named in caught.value.message and str(file) in caught.value.message


def test_what_is_no_toml_is_bad_data(tmp_path: Path) -> None:
    for text in ("[profile", "a = = 1"):
        with pytest.raises(DataError, match="not TOML"):
            read_constants(written(tmp_path, text))
    with pytest.raises(UsageError, match="cannot be read"):
        read_constants(tmp_path / "none.toml")
