"""`llmcache kv plan` and `llmcache kv profile`, end to end: results, caching, and errors for bad input."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmcache.errors import MissingRequirement, UsageError
from llmcache.kv.planning import profile
from llmcache.kv.planning.plan import plan
from llmcache.kv.planning.profile import HostSpeeds, StorageSpeeds, hardware_of, key_of, profile_of
from tests.unit.command_parts import called
from tests.unit.forked_device import FORKED
from tests.unit.forked_device import forked as forked
from tests.unit.test_kv_planning import LLAMA_8B, QWEN3_30B_A3B

HOST = HostSpeeds(40e9, 30e9, 3e11)
STORAGE = StorageSpeeds(1e9, 3e9, 2e5, 2e9, 1e9, 32768, 1 << 27, True)
GIB = 1 << 30


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set and return an empty cache directory for the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "llmcache" / "kv-profile"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace measurements by fixed speeds, and return the list of measured directories."""
    measured_directories: list[str] = []

    def storage(directory: str | Path) -> StorageSpeeds:
        measured_directories.append(str(directory))
        return STORAGE

    monkeypatch.setattr(profile, "measure_storage", storage)
    monkeypatch.setattr(profile, "measure_host", lambda: HOST)
    return measured_directories


@pytest.fixture
def config(tmp_path: Path) -> str:
    directory = tmp_path / "Llama-8B"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA_8B))
    return str(directory)


def printed(*words: str | Path) -> str:
    done = called("kv", *words)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


# kv profile


@FORKED
def test_a_real_profile_of_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "FILE_BYTES", 16 << 20)
    monkeypatch.setattr(profile, "MEMORY_BYTES", 32 << 20)
    monkeypatch.setattr(profile, "READ_S", 0.1)
    monkeypatch.setattr(profile, "PROBE_S", 0.05)
    spill = tmp_path / "spill"
    spill.mkdir()
    found = profile_of(spill)
    assert not list(spill.iterdir())
    assert not found.cached and found.file is not None and found.file.is_file()
    host, storage = found.profile.host, found.profile.storage
    assert min(host.memory_bytes_per_s, host.score_bytes_per_s, host.flops) > 0
    assert storage.page_bytes == 32768 and storage.file_bytes >= 16 << 20
    assert min(storage.device_bytes_per_s, storage.link_bytes_per_s, storage.sequential_bytes_per_s) > 0
    again = profile_of(spill)
    assert again.cached and again.profile == found.profile and again.age_s >= 0
    machine = hardware_of(found.profile)
    assert machine.score_bytes_per_s == host.score_bytes_per_s and machine.origins["ssd_bytes_per_s"].kind == "measured"
    assert "emulated" in machine.origins["device_bytes_per_s"].text


def test_a_profile_is_measured_once_unless_forced(tmp_path: Path, measured: list[str]) -> None:
    first = json.loads(printed("profile", tmp_path, "--json"))
    assert first["schema"] == "llmcache.kv-profile/1" and first["cached"] is False and first["beta"] == 30
    assert first["storage"]["sequential_bytes_per_s"] == 2e9 and "device_bytes_per_s" in first["emulated"]
    second = json.loads(printed("profile", tmp_path, "--json"))
    assert second["cached"] is True and second["measured_at"] == first["measured_at"] and len(measured) == 1
    printed("profile", tmp_path, "--force")
    assert len(measured) == 2


def test_a_profile_that_is_damaged_or_of_another_machine_is_measured_again(
    tmp_path: Path, cache: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = profile_of(tmp_path).file
    assert file is not None and file.parent == cache
    for damage in ("{", '{"schema": "llmcache.kv-profile/0"}', '{"schema": "llmcache.kv-profile/1"}'):
        file.write_text(damage)
        assert not profile_of(tmp_path).cached and profile_of(tmp_path).cached
    assert [path.name for path in cache.iterdir()] == [file.name] and len(measured) == 4
    monkeypatch.setattr(profile, "processor", lambda: "another")
    assert not profile_of(tmp_path).cached and profile_of(tmp_path).profile.key.processor == "another"
    with pytest.raises(UsageError, match="DIR: "):
        key_of(tmp_path / "nowhere")


def test_a_tmpfs_is_refused_as_storage(
    tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    assert key_of("/proc").filesystem == "proc" and not key_of("/proc").in_memory
    monkeypatch.setattr(profile, "fstype_at", lambda _path: "tmpfs")
    assert "tmpfs is in memory" in printed("profile", tmp_path)
    output = printed("plan", "--model", config, "--context", "128k", "--gpu", "12G", "--ram", "32G", "--ssd", tmp_path)
    assert "not the speeds of an SSD" in " ".join(output.split()), "a warning"


def test_storage_that_cannot_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = called("kv", "profile", tmp_path / "nowhere")
    assert refused.returncode == 2 and "DIR: " in refused.stderr
    monkeypatch.setattr(profile, "FILE_BYTES", 1 << 60)
    with pytest.raises(MissingRequirement, match="No space left") as caught:
        profile.measure_storage(tmp_path)
    assert caught.value.message.startswith("DIR: ") and "free" in (caught.value.hint or "")

    def forbidden(*_args: object, **_options: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.undo()
    monkeypatch.setattr("tempfile.mkdtemp", forbidden)
    with pytest.raises(MissingRequirement, match=r"DIR: cannot measure in .*Permission denied"):
        profile.measure_storage(tmp_path)


def test_a_failed_probe_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_device: object) -> float:
        raise MissingRequirement("its emulated device ended by signal 9", "restart it")

    monkeypatch.setattr(profile, "FILE_BYTES", 16 << 20)
    monkeypatch.setattr(profile, "device_rate", fails)
    with pytest.raises(MissingRequirement, match="DIR: its emulated device ended"):
        profile.measure_storage(tmp_path)
    assert not list(tmp_path.iterdir())


# kv plan


def test_the_placement_on_a_typical_pc(config: str) -> None:
    sizes = ("--context", "128k", "--gpu", "12Gi", "--ram", "32Gi")
    output = json.loads(printed("plan", "--model", config, *sizes, "--json"))
    assert output["schema"] == "llmcache.kv-plan/1" and output["kind"] == "modelled" and output["fits"]
    assert output["model"]["name"] == "Llama-8B" and output["workload"]["context"] == 131072
    assert output["machine"]["name"] == "typical" and output["machine"]["gpu_bytes"]["origin"] == "given"
    assert output["memory"]["kv"] == 131072 * 131072 == sum(output["placement"][tier] for tier in ("gpu", "host", "ssd"))
    assert output["room"]["weights_on_gpu"] + output["room"]["weights_on_host"] == output["memory"]["weights"]
    assert output["m0_bytes"] == output["room"]["host_kv"] > output["placement"]["host"] and not output["m0_binds"]
    assert output["beta"] == pytest.approx(output["beta_rule"])
    by_name = {one["policy"]: one["token_ns"] for one in output["latencies"]}
    assert output["speedups"]["full"] == pytest.approx(by_name["full"] / by_name["hillinfer"]) and len(by_name) == 5
    (limit,) = [one for one in output["largest_context_tokens"] if one["batch"] == 1]
    assert limit["gpu"] == 0 < limit["gpu_and_ram"] and limit["with_ssd"] is None


def test_a_context_that_exceeds_the_ssd(
    config: str, tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=GIB))
    found = plan(config, 1 << 20, ram=24 * GIB, ssd=str(tmp_path))
    assert found.lacking_bytes == pytest.approx(found.places.ssd - GIB) and not found.latencies
    (limit,) = [one for one in found.limits if one.batch == 1]
    assert limit.gpu is None and limit.with_ssd is not None
    assert limit.with_ssd - limit.gpu_and_ram == pytest.approx(GIB / 131072, abs=1)
    fits = plan(config, limit.with_ssd - 200, ram=24 * GIB, ssd=str(tmp_path))
    assert fits.machine.name == "measured"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--context 0", "--context: '0'"),
        ("--alpha 0", "--alpha: "),
        ("--gpu apples", "--gpu: "),
        ("--ssd /nowhere/at/all", "--ssd: "),
        ("--profile measured", "--profile: measured needs"),
        ("--model /nowhere", "--model: "),
        ("--gpu 4G --ram 8G", "--gpu, --ram: the weights of Llama-8B alone take 16.1 GB"),
        ("--model list.json", "--model: "),
        ("--model deep.json", "--model: "),
    ],
)
def test_bad_options_are_named(config: str, words: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("list.json").write_text("[1]")
    Path("deep.json").write_text("[" * 100_000)
    refused = called("kv", "plan", "--model", config, "--context", "8k", *words.split())
    assert refused.returncode == 2 and f"error: {named}" in refused.stderr and "hint: " in refused.stderr


def test_an_moe_model_is_planned(tmp_path: Path) -> None:
    """All weights have to fit, and a token reads few of them; the KV cache is like any other."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    call = ("plan", "--model", tmp_path, "--context", "32k", "--gpu", "24G", "--ram", "64G")
    found = json.loads(printed(*call, "--json"))
    assert found["model"]["mixture"] == {"layers": 48, "experts": 128, "used": 8, "ffn": 768, "shared_ffn": 0}
    assert found["model"]["kv_token_bytes"] == 2 * 48 * 4 * 128 * 2
    assert found["model"]["token_parameters"] < found["model"]["parameters"] / 10
    assert found["memory"]["weights"] == found["model"]["weight_bytes"] and found["fits"]


def test_without_a_gpu_weights_and_context_share_the_memory(config: str) -> None:
    found = plan(config, 8192, gpu=0)
    assert found.limits[0].gpu is None
    assert found.limits[0].gpu_and_ram == int(found.found.host_kv // found.model.token_bytes)
