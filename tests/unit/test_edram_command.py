"""The `llmcache edram` commands: output, files, constants of the user, and bad input."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llmcache.errors import DataError, UsageError
from llmcache.kv.tasks import RECALL_MODEL
from llmcache.papers.edram.accelerator import LATENCIES
from llmcache.papers.edram.catalogue import named, read_constants
from llmcache.papers.edram.constants import GROUPS, KELLE_INTERVALS, PAPER, PROFILES
from llmcache.papers.edram.energy import COMPONENTS
from llmcache.papers.edram.systems import MODELS, SYSTEMS, WORKLOADS
from tests.unit.command_parts import called
from tests.unit.edram_parts import outcome
from tests.unit.report_parts import unlaid as unlaid
from tests.unit.test_edram_refresh import changing

pytestmark = pytest.mark.usefixtures("unlaid")
RECALL = ("--model", str(RECALL_MODEL))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a recorded run and a model result once, because they take longer to compute than to draw."""
    directory = tmp_path_factory.mktemp("written")
    changing(120).save(directory / "run.json")
    (directory / "model.json").write_text(called("edram", "model", "--workload", "LA", "--json").stdout)
    return directory


def printed(*args: str | Path) -> Any:
    done = called("edram", *args, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_model_prints_all_results_in_base_units() -> None:
    found = printed("model", "llama3-8b", "--workload", "TQ", "--batch", "4")
    assert found["schema"] == "llmcache.edram-model/1" and found["kind"] == "modelled"
    assert (found["model"]["name"], found["workload"]["batch"], found["workload"]["name"]) == ("llama3-8b", 4, "TQ, changed")
    assert set(found["profiles"]) == {"paper", "silicon"} and set(found["systems"]) == set(SYSTEMS)
    rows = {(row["system"], row["profile"]): row for row in found["results"]}
    assert len(rows) == 10
    ours = outcome("llama3-8b", "TQ", "Kelle+eDRAM", batch=4)
    row = rows["Kelle+eDRAM", "paper"]
    assert row["latency_s"] == ours.latency_s and row["energy_j"] == pytest.approx(ours.energy_j)
    for row in rows.values():
        assert set(row["energies_j"]) == set(COMPONENTS) and set(row["latencies_s"]) == set(LATENCIES)
        assert sum(row["energies_j"].values()) == pytest.approx(row["energy_j"], rel=1e-9)
        assert sum(row["latencies_s"].values()) == pytest.approx(row["latency_s"], rel=1e-9)
        base = rows["Original+SRAM", row["profile"]]
        assert row["speedup"] == pytest.approx(base["latency_s"] / row["latency_s"])
        assert row["efficiency"] == pytest.approx(base["energy_j"] / row["energy_j"])
        assert (row["mean_interval_ns"] is None) == row["system"].endswith("SRAM")
    assert rows["Kelle+eDRAM", "paper"]["mean_interval_ns"] == pytest.approx(KELLE_INTERVALS.mean_ns)
    assert set(found["rooflines"]) == {"AERP+SRAM", "Kelle+eDRAM"}
    plain, kelle = (found["lifetimes"][name] for name in ("Original+eDRAM", "Kelle+eDRAM"))
    assert kelle["total_ns"] < plain["total_ns"] / 1.5 and kelle["k_ns"] == kelle["v_ns"] == 0
    assert set(found["evictors"]) == {"AEP+SRAM", "AERP+SRAM", "Kelle+eDRAM"}
    assert found["systems"]["Original+SRAM"]["area"]["chip_mm2"] == pytest.approx(9.19, abs=0.01)


def test_a_sweep_varies_every_axis() -> None:
    axes = ["--context", "100,200", "--decode", "10,20", "--batch", "1,2", "--budget", "64,128"]
    more = ["--interval-scale", "0.5,1", "--dram-bw", "32GB/s,64GB/s", "--kv-memory", "4Mi,8Mi"]
    names = ["--model", "all", "--workload", "all", "--system", "all", "--profile", "all"]
    every = printed("sweep", *names)
    assert every["schema"] == "llmcache.edram-sweep/1"
    assert every["configurations"] == len(every["results"]) == len(MODELS) * len(WORKLOADS) * len(SYSTEMS) * len(PROFILES)
    assert all(row["speedup"] == row["efficiency"] == 1 for row in every["results"] if row["system"] == "Original+SRAM")
    found = printed("sweep", *axes, *more)["results"]
    keys = ("context", "decode", "batch", "budget", "mean_interval_ns", "dram_bytes_per_s", "kv_capacity_bytes")
    assert len({tuple(row[key] for key in keys) for row in found}) == len(found) == 2**7
    assert {row["dram_bytes_per_s"] for row in found} == {32e9, 64e9}
    assert {row["kv_capacity_bytes"] for row in found} == {4 << 20, 8 << 20}
    assert called("edram", "sweep", *axes, *more).returncode == 0


MANY = ",".join(map(str, range(1, 1002)))


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("model", "gpt-5"), "--model: there is no model 'gpt-5'"),
        (("sweep", "--budget", "10"), "--budget: must be more than the 10 sinks, not 10"),
        (("sweep", "--dram-bw", "0"), "--dram-bw: '0' is not a bandwidth: it must be above 0"),
        (("sweep", "--batch", MANY, "--decode", MANY), "1,002,001 configurations are more than"),
        (("report", "/nowhere.json"), "/nowhere.json: cannot be read"),
        (("report", "run.json", "--intervals", "1ms,2ms"), "--intervals: '1ms,2ms' is neither one interval nor four"),
        (("accuracy", *RECALL, "--flips", "1e-3"), "flips"),
        (("accuracy", *RECALL, "--record", "x.json", "--budget", "4"), "--budget"),
        (("accuracy", *RECALL, "--context", "100", "--pairs", "64"), "--context: 100 tokens"),
    ],
)
def test_bad_arguments_are_named(args: Sequence[str], named: str, written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(written)
    done = called("edram", *args)
    assert (done.returncode, done.stdout) == (2, "") and f"error: {named}" in done.stderr and "Traceback" not in done.stderr


def test_saved_models_and_sweeps_are_plotted(written: Path, tmp_path: Path) -> None:
    model, sweep, page = written / "model.json", tmp_path / "s.json", tmp_path / "m.html"
    sweep.write_text(json.dumps(printed("sweep", "--budget", "512,1024,2048", "--system", "all")))
    assert called("edram", "plot", model, "-o", page).returncode == 0
    assert page.read_text().count("<figure>") == 4
    picture = tmp_path / "roofline.png"
    assert called("edram", "plot", model, "-o", picture, "--what", "roofline").returncode == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert called("edram", "plot", sweep, "-o", tmp_path / "s.svg").returncode == 0
    for name, more, message in (("s.svg", (), "--force"), ("x.svg", ("--what", "roofline"), "--what: there is no picture")):
        refused = called("edram", "plot", sweep, "-o", tmp_path / name, *more)
        assert refused.returncode == 2 and message in refused.stderr
    assert not (tmp_path / "x.svg").exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda data: data.update(schema="llmcache.size/1"), "not 'llmcache.size/1'"),
        (lambda data: data["results"][1].pop("speedup"), "results[1].speedup: missing"),
        (lambda data: data["results"][0].update(energy_j=10**400), "results[0].energy_j: '10"),
        (
            lambda data: data["rooflines"]["Kelle+eDRAM"].update(dram_bytes_per_s=0),
            "dram_bytes_per_s: must be more than 0, not 0",
        ),
        (None, "not JSON"),
    ],
)
def test_a_damaged_document_is_refused_by_field(change: Any, named: str, written: Path, tmp_path: Path) -> None:
    data, file = json.loads((written / "model.json").read_text()), tmp_path / "m.json"
    if change is not None:
        change(data)
    file.write_text("{" if change is None else json.dumps(data))
    done = called("edram", "plot", file, "-o", tmp_path / "m.png")
    assert done.returncode == 5 and named in done.stderr and str(file) in done.stderr and not (tmp_path / "m.png").exists()


def test_the_report_accounts_a_recorded_run(written: Path) -> None:
    file = written / "run.json"
    found = printed("report", file, "--profile", "all")
    assert found["schema"] == "llmcache.edram-report/1" and found["kind"] == "modelled"
    for one in found["profiles"].values():
        assert [group["group"] for group in one["groups"]] == list(GROUPS)
        assert sum(group["joules"] for group in one["groups"]) == pytest.approx(one["joules"], rel=1e-9)
        assert one["watts"] == pytest.approx(one["joules"] / one["seconds"])
    rules = {rule: one["joules"] for rule, one in found["rules"].items()}
    assert rules["floor"] <= rules["ticks"] <= rules["ceil"] and rules["expected"] == pytest.approx(rules["ticks"], rel=0.05)
    strategies = [found["strategies"][name]["paper"]["joules"] for name in ("kelle", "uni", "org")]
    assert strategies == sorted(strategies) and strategies[0] == found["profiles"]["paper"]["joules"]
    assert found["profiles"]["paper"]["joules"] / found["profiles"]["silicon"]["joules"] == pytest.approx(312, rel=0.01)
    options = ["--intervals", "1ms", "--step", "20ms", "--capacity", "1Ki", "--rule", "expected"]
    assert "every step takes 20.0 ms" in called("edram", "report", file, *options).stdout


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


def test_constants_can_be_added_and_changed(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(MINE)
    found = read_constants(file)
    mine = found.profiles["mine"]
    assert (mine.refresh_pass_j, mine.dram_j_per_byte) == (3.65e-6, PAPER.dram_j_per_byte)
    assert mine.name == "mine" and "by the user" in mine.title
    assert found.profiles["silicon"].sfu_w == 1.0
    assert found.profiles["silicon"].refresh_pass_j == pytest.approx(3.65e-6, rel=1e-3)
    assert (found.models["tiny"].layers, found.models["tiny"].kv_heads) == (8, MODELS["llama3-8b"].kv_heads)
    assert (found.workloads["chat"].batch, found.workloads["chat"].budget) == (1, WORKLOADS["TQ"].budget)
    half = found.systems["half"]
    assert half.hardware.kv_bytes_per_s == 128e9 and half.hardware.overlap and not half.policy.evict
    assert half.policy.intervals.in_order() == (180_000, *KELLE_INTERVALS.in_order()[1:])
    assert found.baseline.hardware.array_rows == 32
    assert list(found.systems) == [*SYSTEMS, "half"] and named("profile", found.profiles, "PAPER") == PAPER


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[profile.mine]\nrefresh_j = 1", "profile.mine: there is no constant 'refresh_j'"),
        ("[model.x]\nlayers = true", "model.x.layers: 'True' is not a whole number"),
        ("[model.x]\nkv_heads = 5", "model.x.kv_heads: must divide the 32 heads, not 5"),
        (
            "[system.x]\nrecompute = 'often'",
            "system.x.recompute: must be one of none, first-principles, declared, not 'often'",
        ),
        ("[profile.x]\nsfu_w = nan", "profile.x.sfu_w: 'nan' is not a number"),
        ("[profile", "not TOML"),
    ],
)
def test_wrong_constants_are_named(text: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(DataError if named == "not TOML" else UsageError) as caught:
        read_constants(file)
    assert named in caught.value.message and str(file) in caught.value.message
