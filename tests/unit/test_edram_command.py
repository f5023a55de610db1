"""`llmcache edram`: what its commands print and write, the user's constants, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llmcache import cli
from llmcache.edram.accelerator import LATENCIES
from llmcache.edram.catalogue import named, read_constants
from llmcache.edram.constants import GROUPS, KELLE_INTERVALS, PAPER, PROFILES
from llmcache.edram.energy import COMPONENTS
from llmcache.edram.systems import MODELS, SYSTEMS, WORKLOADS
from llmcache.errors import DataError, UsageError
from llmcache.report.edram_plot import (
    KIND_LOOKS,
    MOST_GROUPS,
    MOST_LINES,
    SYSTEM_LOOKS,
    SavedResult,
    lines_left_out,
    saved,
    varied_most,
)
from llmcache.report.output import UNBOUND
from tests.unit.accelerator_parts import outcome
from tests.unit.report_parts import unlaid as unlaid
from tests.unit.test_edram_refresh import changing

pytestmark = pytest.mark.usefixtures("unlaid")


def run(*args: str, group: str = "edram") -> int:
    with pytest.raises(SystemExit) as caught:
        cli.run(cli.app, "llmcache", [group, *args])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    assert run(*args, "--json") == 0
    told = capsys.readouterr()
    assert told.err == ""
    return json.loads(told.out)


def test_model_says_everything_in_base_units(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "model", "llama3-8b", "--workload", "TQ", "--batch", "4")
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
        assert row["power_w"] == pytest.approx(row["energy_j"] / row["latency_s"])
        assert (row["mean_interval_ns"] is None) == row["system"].endswith("SRAM")
    assert rows["Kelle+eDRAM", "paper"]["mean_interval_ns"] == pytest.approx(KELLE_INTERVALS.mean_ns)
    assert set(found["rooflines"]) == {"AERP+SRAM", "Kelle+eDRAM"}
    plain, kelle = (found["lifetimes"][name] for name in ("Original+eDRAM", "Kelle+eDRAM"))
    assert kelle["total_ns"] < plain["total_ns"] / 1.5 and kelle["k_ns"] == kelle["v_ns"] == 0
    assert set(found["evictors"]) == {"AEP+SRAM", "AERP+SRAM", "Kelle+eDRAM"}
    for name, evictor in found["evictors"].items():
        assert evictor["joules"] * found["workload"]["decode"] < rows[name, "paper"]["energies_j"]["evictor"]
    assert found["systems"]["Original+SRAM"]["area"]["chip_mm2"] == pytest.approx(9.19, abs=0.01)


def test_model_prints_both_refresh_energies_and_that_it_is_modelled(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("model", "--workload", "LA") == 0
    told = capsys.readouterr().out
    tables = ("Profile paper", "Profile silicon", "Kelle+eDRAM", "equations 4-8", "Systolic evictor", "mm²")
    for words in ("modelled", *tables, "fits", "recomputed"):
        assert words in told
    assert max(map(len, told.splitlines())) <= UNBOUND


def test_the_paper_systems_of_all_models_are_swept(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "sweep", "--model", "all", "--workload", "all", "--system", "all", "--profile", "all")
    assert found["schema"] == "llmcache.edram-sweep/1"
    assert found["configurations"] == len(found["results"]) == 7 * 4 * 5 * 3
    assert {row["model"] for row in found["results"]} == set(MODELS)
    assert {row["profile"] for row in found["results"]} == set(PROFILES)
    for row in found["results"]:
        if row["system"] == "Original+SRAM":
            assert row["speedup"] == row["efficiency"] == 1


def test_every_axis_of_a_sweep_is_varied(capsys: pytest.CaptureFixture[str]) -> None:
    axes = ["--context", "100,200", "--decode", "10,20", "--batch", "1,2", "--budget", "64,128"]
    more = ["--interval-scale", "0.5,1", "--dram-bw", "32GB/s,64GB/s", "--kv-memory", "4Mi,8Mi"]
    found = printed(capsys, "sweep", *axes, *more)["results"]
    keys = ("context", "decode", "batch", "budget", "mean_interval_ns", "dram_bytes_per_s", "kv_capacity_bytes")
    assert len({tuple(row[key] for key in keys) for row in found}) == len(found) == 2**7
    assert {row["dram_bytes_per_s"] for row in found} == {32e9, 64e9}
    assert {row["kv_capacity_bytes"] for row in found} == {4 << 20, 8 << 20}
    assert run("sweep", *axes, *more) == 0
    told = capsys.readouterr().out
    assert "the 40 most efficient of 128" in told and "128 configurations in " in told


MANY = ",".join(map(str, range(1, 1002)))


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("model", "gpt-5"), "--model: there is no model 'gpt-5'"),
        (("model", "--workload", "X"), "--workload: there is no workload 'X'"),
        (("model", "--profile", "paper,x"), "--profile: there is no profile 'x'"),
        (("model", "--system", "x"), "--system: there is no system 'x'"),
        (("model", "--recompute", "x"), "--recompute: there is no mode 'x'"),
        (("model", "--batch", "0"), "--batch: 0 is too small"),
        (("model", "--context", "many"), "--context: 'many' is not a whole number"),
        (("model", "--budget", "10"), "--budget: 10"),
        (("sweep", "--batch", "1,-2"), "--batch: '-2'"),
        (("sweep", "--budget", "10"), "--budget: 10, more than the 10 sinks"),
        (("sweep", "--interval-scale", "0"), "--interval-scale: '0'"),
        (("sweep", "--dram-bw", "fast"), "--dram-bw: 'fast'"),
        (("sweep", "--dram-bw", "0"), "--dram-bw: '0' is no bandwidth: it must be above 0"),
        (("sweep", "--kv-memory", "x"), "--kv-memory: 'x'"),
        (("sweep", "--constants", "/nowhere.toml"), "/nowhere.toml: cannot be read"),
        (("sweep", "--batch", MANY, "--decode", MANY), "1,002,001 configurations are more than"),
        (("plot", "/nowhere.json", "-o", "x.gif"), "-o: 'x.gif' must end in"),
        (("plot", "/nowhere.json", "-o", "/tmp/x.png"), "/nowhere.json: cannot be read"),
        (("report", "/nowhere.json"), "run: '/nowhere.json' cannot be read"),
        (("paint",), "paint"),
    ],
)
def test_what_cannot_be_asked_is_named(args: Sequence[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*args) == 2
    told = capsys.readouterr()
    assert told.out == "" and named in told.err and "Traceback" not in told.err


def test_a_saved_model_and_a_saved_sweep_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, sweep = tmp_path / "m.json", tmp_path / "s.json"
    model.write_text(json.dumps(printed(capsys, "model", "--workload", "LA")))
    sweep.write_text(json.dumps(printed(capsys, "sweep", "--budget", "512,1024,2048", "--system", "all")))
    page = tmp_path / "m.html"
    assert run("plot", str(model), "-o", str(page)) == 0
    text = page.read_text()
    assert text.count("<figure>") == 4 and "Modelled" in text and 'src="http' not in text
    for source, what in ((model, "energy"), (model, "speedup"), (model, "refresh"), (model, "roofline"), (sweep, "sweep")):
        target = tmp_path / f"{what}.png"
        assert run("plot", str(source), "-o", str(target), "--what", what) == 0
        assert target.read_bytes().startswith(b"\x89PNG")
    assert run("plot", str(sweep), "-o", str(tmp_path / "s.svg")) == 0
    assert "budget N' (tokens)" in (tmp_path / "s.svg").read_text()
    assert run("plot", str(sweep), "-o", str(tmp_path / "s.svg")) == 2
    told = capsys.readouterr().err
    assert "--force" in told and "not drawn" not in told
    assert run("plot", str(sweep), "-o", str(tmp_path / "x.svg"), "--what", "roofline") == 2
    assert "--what: there is no picture 'roofline'" in capsys.readouterr().err
    assert not (tmp_path / "x.svg").exists()


def test_a_picture_says_what_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = tmp_path / "s.json"
    sweep.write_text(json.dumps(printed(capsys, "sweep", "--model", "all", "--workload", "all")))
    assert run("plot", str(sweep), "-o", str(tmp_path / "s.png")) == 0
    assert f"{28 - MOST_GROUPS} are not drawn" in capsys.readouterr().err


def test_a_sweep_is_drawn_along_what_it_varies(capsys: pytest.CaptureFixture[str]) -> None:
    """Systems imply refresh intervals and capacities; those are no axes."""

    def rows(*args: str) -> Sequence[SavedResult]:
        return saved(printed(capsys, "sweep", *args)).rows

    assert varied_most(rows("--system", "all", "--model", "all")) is None
    assert varied_most(rows("--system", "all", "--batch", "1,2", "--budget", "64,128,256")) == "budget"
    assert varied_most(rows("--interval-scale", "0.5,1")) == "mean_interval_ns"
    assert lines_left_out(rows("--batch", "1,2,4", "--budget", "64,128", "--system", "all")) == 10 - MOST_LINES
    assert lines_left_out(rows("--model", "all", "--workload", "all")) == 28 - MOST_GROUPS
    assert lines_left_out(rows("--model", "all")) == 0


def test_every_component_and_system_has_a_look() -> None:
    from llmcache.edram.energy import KINDS

    assert list(KIND_LOOKS) == list(KINDS) and list(SYSTEM_LOOKS) == list(SYSTEMS)
    assert len({colour for colour, _ in KIND_LOOKS.values()}) == len(KIND_LOOKS)
    assert len({look.colour for look in SYSTEM_LOOKS.values()}) == len(SYSTEM_LOOKS)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda data: data.update(schema="llmcache.size/1"), "schema: 'llmcache.size/1'"),
        (lambda data: data.pop("results"), "results: missing"),
        (lambda data: data.update(results=[]), "results: there are none"),
        (lambda data: data["results"][1].pop("speedup"), "results[1].speedup: missing"),
        (lambda data: data["results"][0].update(energy_j="much"), "results[0].energy_j: 'much'"),
        (lambda data: data["results"][0].update(energy_j=float("nan")), "results[0].energy_j: 'nan'"),
        (lambda data: data["results"][0].update(energy_j=10**400), "results[0].energy_j: '10"),
        (lambda data: data["results"][0].update(system=3), "results[0].system: not a str"),
        (lambda data: data["rooflines"]["Kelle+eDRAM"].pop("points"), "rooflines.Kelle+eDRAM.points: missing"),
        (lambda data: data["results"].insert(0, 7), "results[0]: not an object"),
        (lambda data: data["results"][0].update(energies_j=[1]), "results[0].energies_j: not a dict"),
        (lambda data: data["rooflines"]["Kelle+eDRAM"].update(dram_bytes_per_s=0), "dram_bytes_per_s: 0, more than 0"),
    ],
)
def test_a_damaged_document_is_named(change: Any, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = printed(capsys, "model", "--workload", "LA")
    change(data)
    file = tmp_path / "m.json"
    file.write_text(json.dumps(data))
    assert run("plot", str(file), "-o", str(tmp_path / "m.png")) == 5
    told = capsys.readouterr()
    assert named in told.err and str(file) in told.err and not (tmp_path / "m.png").exists()
    file.write_bytes(b"{")
    assert run("plot", str(file), "-o", str(tmp_path / "m.png")) == 5


def test_a_recorded_run_is_accounted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    changing(120).save(file)
    found = printed(capsys, "report", str(file), "--profile", "all")
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
    assert run("report", str(file), "--intervals", "1ms", "--step", "20ms", "--capacity", "1Ki", "--rule", "expected") == 0
    told = capsys.readouterr().out
    for words in ("(modelled)", "every step takes 20.0 ms", "1.00 ms", "of the living bytes"):
        assert words in told


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--intervals", "1ms,2ms"), "--intervals: '1ms,2ms' is neither one interval nor four"),
        (("--intervals", "soon"), "--intervals: 'soon'"),
        (("--intervals", "0"), "--intervals: '0' is neither"),
        (("--rule", "x"), "--rule: there is no rule 'x'"),
        (("--profile", "x"), "--profile: there is no profile 'x'"),
        (("--capacity", "x"), "--capacity: 'x'"),
        (("--step", "x"), "--step: 'x'"),
        (("--step", "0ms"), "--step: '0ms', more than 0"),
        (("--capacity", "0"), "--capacity: '0', more than 0"),
    ],
)
def test_what_cannot_be_accounted_is_named(
    args: Sequence[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.json"
    changing(5).save(file)
    assert run("report", str(file), *args) == 2
    told = capsys.readouterr()
    assert told.out == "" and named in told.err


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
    mine = found.profiles["mine"]
    assert (mine.refresh_pass_j, mine.dram_j_per_byte) == (3.65e-6, PAPER.dram_j_per_byte)
    assert mine.name == "mine" and "of the user" in mine.title
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
        ("[profiles.mine]\nsfu_w = 1", "there is no constant 'profiles'"),
        ("[model.x]\nlayer = 3", "model.x: there is no constant 'layer'"),
        ("[model.x]\nlayers = 1.5", "model.x.layers: '1.5' is not a whole number"),
        ("[model.x]\nlayers = true", "model.x.layers: 'True' is not a whole number"),
        ("[model.x]\ngated = 1", "model.x.gated: '1' is not true or false"),
        ("[model.x]\nlayers = 0", "model.x.layers: 0"),
        ("[model.x]\nkv_heads = 5", "model.x.kv_heads: 5 do not divide"),
        ("[model.x]\nname = 'y'", "model.x: there is no constant 'name'"),
        ("[workload.x]\nbudget = 3", "workload.x.budget: 3"),
        ("[workload.x]\ncontext = 0", "workload.x.context: 0"),
        ("[workload.x]\nbase = 'nothing'", "workload.x.base: there is no workload 'nothing'"),
        ("[workload.x]\nbase = 3", "workload.x.base: '3' is not a name"),
        ("[system.x]\nintervals = 3", "system.x: there is no constant 'intervals'"),
        ("[system.x]\nhst_msb_ns = 0", "system.x.hst_msb_ns: 0"),
        ("[system.x]\narray_rows = 0", "system.x.array_rows: 0"),
        ("[system.x]\nkv_capacity_bytes = -1", "system.x.kv_capacity_bytes: -1"),
        ("[system.x]\nhst_share = 1.5", "system.x.hst_share: 1.5"),
        ("[system.x]\nrecompute_share = 2", "system.x.recompute_share: 2"),
        ("[system.x]\nactivation_interval_ns = 0", "system.x.activation_interval_ns: 0"),
        ("[system.x]\nrecompute = 'often'", "system.x.recompute: 'often'"),
        ("[system.x]\nrecompute = 1", "system.x.recompute: '1' is not a text"),
        ("[profile.x]\nsfu_w = nan", "profile.x.sfu_w: 'nan' is not a number"),
        ("[profile.x]\nsfu_w = 1" + "0" * 400, "profile.x.sfu_w: '10"),
        ("[model.x]\nlayers = 1" + "0" * 400, "model.x.layers: '10"),
        ("[profile.x]\nsfu_w = -1", "profile.x.sfu_w: -1"),
        ("[profile.x]\naccess_bytes = 0", "profile.x.access_bytes: 0"),
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
