"""`llmcache tokens` on real processes: a client with known passes, and llama.cpp."""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llmcache.bpf import perf
from llmcache.model import read_layout
from llmcache.tokens import Token, TokenSummary, TokenWatch, observer
from llmcache.tokens import watch as watch_module
from llmcache.tokens.passes import Event
from tests.mount.live import llmcache, wait_for
from tools.bench.runner import client as bench_client
from tools.bench.sides import environment
from tools.make_model import main as make_model

pytestmark = pytest.mark.bpf

ROOT = Path(__file__).resolve().parents[2]
PASSES = 12


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model(directory: Path) -> Path:
    make_model([str(directory / "dense.gguf"), "--size", "24M"])
    return directory / "dense.gguf"


@pytest.fixture(scope="module")
def moe(directory: Path) -> Path:
    make_model([str(directory / "moe.gguf"), "--size", "40M", "--experts", "8", "--used", "2"])
    return directory / "moe.gguf"


def client(model: Path, *words: object) -> list[str]:
    """Return the command of a program with known passes over `model`."""
    return bench_client("tensor_reader", model, *words, "--settle", 1)


def observed(command: Sequence[str], json_lines: Path, code: int = 0) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the passes and the summary that the command reports of `command`."""
    done = llmcache("tokens", "--json", "--force", "-o", json_lines, "--", *command)
    assert done.returncode == code, done.stderr
    lines = [json.loads(line) for line in json_lines.read_text().splitlines()]
    return lines[:-1], lines[-1]


def watched(command: Sequence[str]) -> tuple[list[Token], TokenSummary]:
    """Return the passes of a process that is observed from before it maps its model."""
    found: list[Token] = []
    with subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL) as process:
        watch = TokenWatch(process.pid, on_token=found.append)
        try:
            watch.start()
            process.wait(120)
            watch.wait(60)
        finally:
            process.kill()
            summary = watch.stop()
    return found, summary


def loop_bytes(path: Path) -> int:
    data = path.read_bytes()
    layout = read_layout(lambda offset, count: data[offset : offset + count], len(data), path.name)
    assert layout is not None
    return sum(region.size_bytes for region in layout.regions() if region.role == "loop")


def test_passes_over_resident_data_are_seen_one_by_one(model: Path, tmp_path: Path) -> None:
    passes, summary = observed(client(model, PASSES, "--pause", 0.05), tmp_path / "lines")
    assert len(passes) == PASSES
    assert summary["can_see_tokens"]
    assert summary["tokens"] + summary["prefill_passes"] == PASSES
    assert sum(one["read_bytes"] for one in passes[1:]) == 0
    for one in passes:
        assert one["time_ns"] == one["compute_ns"] + one["storage_ns"] + one["other_ns"]
        assert one["model"] == str(model)
    starts = [one["start_ns"] for one in passes]
    assert starts == sorted(starts)
    # The pause is not part of a pass, and no other time is missing.
    assert all(after - before >= one["time_ns"] for before, after, one in zip(starts, starts[1:], passes, strict=False))


def test_passes_over_data_on_storage_name_their_causes(model: Path, tmp_path: Path) -> None:
    passes, _ = observed(client(model, PASSES, "--cold"), tmp_path / "lines")
    assert len(passes) == PASSES
    for one in passes[1:-1]:
        assert one["major_faults"] > 0
        assert one["storage_ns"] > 0
        assert 0.5 * loop_bytes(model) < one["read_bytes"] < 2 * loop_bytes(model)
        assert one["slowest_layer"] is not None
        assert 0 < one["slowest_layer_ns"] <= one["storage_ns"]
    layers = {one["slowest_layer"] for one in passes if one["slowest_layer"]}
    assert layers <= {*map(str, range(100)), "output", "output_norm", "token_embd", "header"}


def test_missing_experts_are_counted(moe: Path, tmp_path: Path) -> None:
    cold, _ = observed(client(moe, 3, "--cold", "--random"), tmp_path / "lines")
    assert all(one["experts_missed"] > 0 for one in cold[1:])
    assert all(one["experts_used"] for one in cold)
    warm, _ = observed(client(moe, 5), tmp_path / "lines")
    assert [one["experts_missed"] for one in warm[1:]] == [0] * (len(warm) - 1)


def test_a_child_whose_norms_were_copied_is_seen_by_other_tensors(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "TRIAL_NS", 100_000_000)
    command = client(model, 300, "--skip", "norm", "--pause", 0.01)
    found, summary = watched(["sh", "-c", '"$@"; true', "sh", *command])
    assert summary.can_see_tokens
    assert all(one.rows is None for one in found)
    assert 20 < len(found) <= 300


def test_a_process_that_copies_its_weights_is_reported(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, summary = watched(client(model, 3, "--read"))
    assert not found
    assert not summary.can_see_tokens
    assert "--no-mmap" in str(summary.why_not)
    found, summary = watched(client(model, 3, "--skip", "."))
    assert not summary.can_see_tokens
    assert "dense.gguf" in str(summary.why_not)


def test_a_program_after_exec_is_observed_with_its_own_model(model: Path, moe: Path) -> None:
    first, second = client(model, 4, "--pause", 0.05), client(moe, 4, "--pause", 0.05)
    found, _ = watched(["sh", "-c", f"{shlex.join(first)}; exec {shlex.join(second)}"])
    names = [Path(one.model).name for one in found]
    assert names == sorted(names)
    assert {name: names.count(name) in (3, 4) for name in names} == {"dense.gguf": True, "moe.gguf": True}, (
        "the first pass of a program may begin before its model is found"
    )


def test_the_command_keeps_its_output_and_exit_code(tmp_path: Path) -> None:
    done = llmcache("tokens", "--", "sh", "-c", "echo out; exit 7")
    assert (done.returncode, done.stdout) == (7, "out\n")
    assert "no tokens were seen" in done.stderr


@pytest.mark.parametrize("words", [[], ["--force", "-o", "/dev/full"]])
def test_the_command_continues_when_its_output_cannot_be_written(model: Path, words: list[str]) -> None:
    command = [sys.executable, "-m", "llmcache", "tokens", *words, "--", "sh", "-c", '"$@" > /dev/null; echo end', "sh"]
    command += client(model, 8, "--pause", 0.3)
    with open("/dev/full", "w") as full:
        stderr = subprocess.PIPE if words else full
        done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, stderr=stderr, text=True, check=False)
    assert done.stdout == "end\n"
    assert done.returncode == (3 if words else 0)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((), 2, "no process"),
        (("--",), 2, "no process"),
        (("99999999",), 3, "does not exist"),
        (("no-such-thing",), 2, "neither"),
        (("/",), 4, "no llmcachefs is mounted on /"),
        (("1", "2"), 2, "give one process or mount"),
        (("-d", "0", str(os.getpid())), 2, "-d"),
        (("--", "no-such-program"), 127, "no such program"),
        (("--", "/etc/passwd"), 126, "not executable"),
    ],
)
def test_bad_arguments_are_refused(words: tuple[str, ...], code: int, message: str) -> None:
    done = llmcache("tokens", *words)
    assert done.returncode == code
    assert message in done.stderr


def test_an_observation_ends_with_its_process_and_with_ctrl_c(model: Path) -> None:
    with subprocess.Popen(client(model, 30, "--pause", 0.1), env=environment(), stdout=subprocess.DEVNULL) as process:
        done = llmcache("tokens", "-d", "1", str(process.pid))
        assert done.returncode == 0, done.stderr
        assert "tokens" in done.stdout
        done = llmcache("tokens", "--json", str(process.pid))
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["kind"] == "summary"
        assert process.wait(60) == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_an_observation_with_its_summary(model: Path, number: signal.Signals, code: int) -> None:
    with subprocess.Popen(client(model, 600, "--pause", 0.1), env=environment(), stdout=subprocess.DEVNULL) as process:
        command = [sys.executable, "-m", "llmcache", "tokens", "--json", str(process.pid)]
        with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as watching:
            assert watching.stdout is not None and watching.stdout.readline()
            watching.send_signal(number)
            out, _ = watching.communicate(timeout=60)
        assert watching.returncode == code and json.loads(out.splitlines()[-1])["kind"] == "summary"
        assert process.poll() is None
        process.kill()


def test_without_tracepoints_of_files_tokens_are_observed_but_layers_are_not(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer, "observable_by", lambda: None)
    found, _ = watched(client(model, 6, "--cold"))
    assert len(found) == 6
    assert sum(one.storage_ns for one in found) > 0
    assert {one.slowest_layer for one in found} == {None}


def test_without_hardware_breakpoints_no_tokens_are_observed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(observer, "open_breakpoint", refused)
    found, summary = watched(client(model, 6, "--cold"))
    assert not found
    assert "hardware breakpoints" in str(summary.why_not)


def test_waiting_for_a_processor_is_not_idle_time() -> None:
    processor = min(os.sched_getaffinity(0))
    spin = ["taskset", "-c", str(processor), sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(spin) as one, subprocess.Popen(spin) as other:
        watching = observer.Observer()
        try:
            watching.look(one.pid)
            events: list[Event] = []
            wait_for(lambda: bool(watching.look(one.pid) and _queued(events, watching.events())), "it waits")
        finally:
            watching.close()
            one.kill()
            other.kill()
    assert events[-1].idle_ns < events[-1].queued_ns


def _queued(events: list[Event], new: list[Event]) -> bool:
    events += new
    return bool(events) and events[-1].queued_ns > 200_000_000


def test_two_observers_see_the_same_tokens(model: Path) -> None:
    seen: list[list[Token]] = [[], []]
    with subprocess.Popen(client(model, 8, "--pause", 0.05), env=environment(), stdout=subprocess.DEVNULL) as process:
        watches = [TokenWatch(process.pid, on_token=one.append) for one in seen]
        for watch in watches:
            watch.start()
        process.wait(120)
        summaries = [watch.stop() for watch in watches]
    assert [one.tokens + one.prefill_passes for one in summaries] == [8, 8]
    for one, other in zip(*seen, strict=True):
        assert abs(one.start_ns - other.start_ns) < one.time_ns


@pytest.mark.clang
def test_a_rebuilt_object_behaves_the_same(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run([ROOT / "bpf" / "build", tmp_path], check=True)
    monkeypatch.setattr(observer, "OBJECT", tmp_path / observer.OBJECT.name)
    found, summary = watched(client(model, 5, "--pause", 0.05))
    assert len(found) == 5
    assert summary.lost_events == 0


@pytest.mark.stock
def test_tokens_and_prompts_of_the_stock_server_are_counted_exactly(directory: Path, tmp_path: Path) -> None:
    """The server uses its default flags and therefore repacks the weights of a Q4_K_M model."""
    model = directory / "q4.gguf"
    make_model([str(model), "--size", "60M", "--type", "q4_k_m"])
    script, events = ROOT / "tools" / "bench" / "clients" / "server_tokens.py", tmp_path / "events"
    words = [sys.executable, str(script), str(model), "--turns", "3", "--prompt", "60", "--answer", "20"]
    passes, summary = observed(["sh", "-c", f"{shlex.join(words)} > {shlex.quote(str(events))}"], tmp_path / "lines")
    # The prompt's pass gives the first token of an answer. The first turn may begin before the clock is set.
    assert [one["rows"] for one in passes if one["kind"] == "prefill"][-2:] == [61, 61]
    assert 2 * 19 <= summary["tokens"] <= 3 * 20
    steps = [event for event in map(json.loads, events.read_text().splitlines()) if event["event"] == "step"]
    seen_s = sum(one["time_ns"] for one in [one for one in passes if one["kind"] == "decode"][-38:]) / 1e9
    assert 0.5 < seen_s / sum(step["seconds"] for step in steps[20:] if step["index"] % 20) < 1.5


@pytest.mark.llama
def test_a_thread_with_two_breakpoints_counts_each_read_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that start while breakpoints are set may inherit one and get another."""
    own, others = perf.open_breakpoint, list[int]()

    def open_twice(tid: int, address: int, program_fd: int) -> int:
        others.append(own(tid, address, program_fd))
        return own(tid, address, program_fd)

    monkeypatch.setattr(observer, "open_breakpoint", open_twice)
    code = (
        "import sys, time, llama_cpp\n"
        "m = llama_cpp.Llama(sys.argv[1], n_ctx=512, n_threads=2, verbose=False)\n"
        "time.sleep(2)\n"
        "m.eval(list(range(300, 337)))\n"
        "for token in range(8): m.eval([400 + token])\n"
    )
    try:
        found, _ = watched([sys.executable, "-c", code, str(model)])
    finally:
        for fd in others:
            os.close(fd)
    assert [one.rows for one in found] == [37, *[1] * 8]


@pytest.mark.llama
def test_tokens_and_prompts_of_llama_cpp_are_counted_exactly(model: Path, tmp_path: Path) -> None:
    code = (
        "import sys, time, llama_cpp\n"
        "m = llama_cpp.Llama(sys.argv[1], n_ctx=512, n_threads=2, n_batch=256, n_ubatch=64, verbose=False)\n"
        "time.sleep(2)\n"
        "for prompt in (37, 150, 5):\n"
        "    m.reset(); m.eval(list(range(300, 300 + prompt)))\n"
        "    for token in range(8): m.eval([400 + token])\n"
        "    time.sleep(1)\n"
    )
    passes, summary = observed([sys.executable, "-c", code, str(model)], tmp_path / "lines")
    assert [one["rows"] for one in passes if one["kind"] == "prefill"] == [37, 150, 5]
    assert [one["rows"] for one in passes if one["kind"] == "decode"] == [1] * 24
    assert (summary["tokens"], summary["prefill_tokens"]) == (24, 192)
    assert summary["prefill_tokens_per_s"] > 0
