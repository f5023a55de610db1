"""From events to passes, tokens, causes and a summary: the parts of `llmcache tokens` that work without the kernel."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest

from llmcache.model.tensors import ModelLayout, Tensor
from llmcache.tokens import Interval, Token, TokenWatch
from llmcache.tokens import watch as watch_module
from llmcache.tokens.causes import Attribution
from llmcache.tokens.clock import Key, candidates
from llmcache.tokens.passes import HIT, LOOK, Event, Kinds, Pass, Passes, Role, Where
from llmcache.tokens.render import summary_lines
from llmcache.tokens.summary import Totals
from tests.mount.live import wait_for

MS = 10**6
FILE: Key = (8, 99)


@dataclass
class Process:
    """A simulated process that spends its time as a test says; `passes` observes its reads."""

    passes: Passes
    found: list[Pass]
    now_ns: int = 10**9
    compute_ns: int = 0
    storage_ns: int = 0
    other_ns: int = 0
    queued_ns: int = 0

    def compute(self, ms: float) -> None:
        self.now_ns += int(ms * MS)
        self.compute_ns += int(ms * MS)

    def block(self, ms: float) -> None:
        self.now_ns += int(ms * MS)
        self.storage_ns += int(ms * MS)
        self.passes.wait(Where("blk.1"), int(ms * MS))

    def sleep(self, ms: float) -> None:
        self.now_ns += int(ms * MS)
        self.other_ns += int(ms * MS)

    def wait_for_processor(self, ms: float) -> None:
        self.sleep(ms)
        self.queued_ns += int(ms * MS)

    def read(self, role: Role, times: int = 1) -> None:
        for _ in range(times):
            self._send(HIT, role)

    def look(self) -> None:
        self._send(LOOK, 0)

    def _send(self, kind: int, place: int) -> None:
        sums = (self.compute_ns, self.storage_ns, self.other_ns, self.storage_ns)
        event = Event(self.now_ns, kind, 1, place, 0, 0, *sums, queued_ns=self.queued_ns)
        self.found += self.passes.take(event)

    def token(self, compute_ms: float = 10, storage_ms: float = 0, rows: int = 1, has_later: bool = True) -> None:
        """Run one pass, a fifth of whose computation follows the layers."""
        self.read(Role.FIRST, rows)
        self.compute(compute_ms * 0.8)
        if storage_ms:
            self.block(storage_ms)
        if has_later:
            self.read(Role.LATER)
        self.compute(compute_ms * 0.2)


@pytest.fixture
def process() -> Process:
    return Process(Passes(), [])


def test_consecutive_tokens_have_their_compute_and_storage_time(process: Process) -> None:
    for _ in range(4):
        process.token(compute_ms=10, storage_ms=5)
    assert len(process.found) == 3, "the end of the last token is not known yet"
    process.found += process.passes.finish()
    assert len(process.found) == 4
    for found in process.found[:3]:
        assert (found.compute_ns, found.storage_ns, found.other_ns) == (10 * MS, 5 * MS, 0)
        assert found.time_ns == 15 * MS
        assert found.waits == {Where("blk.1"): 5 * MS}
    assert [found.is_first for found in process.found] == [True, False, False, False]


@pytest.mark.parametrize("looks", [True, False])
def test_idle_time_after_a_token_is_not_part_of_it(process: Process, looks: bool) -> None:
    process.token()
    process.token()
    for _ in range(20):
        process.sleep(490)
        process.compute(10)  # a server that polls for work
        if looks:
            process.look()
    process.token()
    process.token()
    assert process.found[0].time_ns == 10 * MS
    idle = process.found[1]
    assert idle.other_ns == 0
    assert idle.time_ns == (20 * MS if looks else 210 * MS), (
        "time until the first look or the next pass belongs to the token"
    )
    assert [found.is_first for found in process.found] == [True, False, True]


def test_a_pause_within_a_pass_is_part_of_it(process: Process) -> None:
    """On a GPU, the process sleeps between the first and the last layer."""
    process.token()
    process.read(Role.FIRST)
    for _ in range(5):
        process.sleep(1000)
        process.look()
    process.read(Role.LATER)
    process.token()
    assert [found.time_ns // MS for found in process.found] == [10, 5000]


def test_without_an_end_marker_a_short_pause_is_part_of_the_pass(process: Process) -> None:
    process.passes.restart(shows_end=False)
    for pause_ms in (500, 5000, 0):
        process.token()
        process.sleep(pause_ms)
        process.look()
    assert [found.time_ns // MS for found in process.found] == [510, 10]


def test_rows_of_a_batch_are_counted_and_a_prompt_is_one_pass(process: Process) -> None:
    process.token()
    process.token(rows=64, has_later=False)  # only the last part of a prompt computes logits
    process.token(rows=64, has_later=False)
    process.token(rows=22)
    process.token()
    assert [(found.rows, found.time_ns // MS) for found in process.found] == [(1, 10), (150, 30)]


def test_a_wait_for_a_processor_is_part_of_a_prompt(process: Process) -> None:
    process.token()
    process.token(rows=64, has_later=False)
    process.wait_for_processor(2000)
    process.look()
    process.token(rows=22)
    process.wait_for_processor(100)
    process.look()
    process.token()
    assert [(found.rows, found.time_ns // MS) for found in process.found] == [(1, 10), (86, 2120)]


def test_an_aborted_prompt_ends_before_the_next_one(process: Process) -> None:
    process.token()
    process.token(rows=64, has_later=False)
    process.sleep(60_000)
    process.look()
    process.token(rows=5)
    process.token()
    assert [(found.rows, found.time_ns // MS, found.is_first) for found in process.found] == [
        (1, 10, True),
        (64, 10, False),
        (5, 10, True),
    ]


def test_tokens_are_found_with_the_first_layer_alone(process: Process) -> None:
    for _ in range(200):
        process.token(has_later=False)
    assert process.passes.seems_lone
    assert not process.found, "they could be rows of one batch"
    process.passes.restart(is_lone=True)
    process.read(Role.FIRST, 3)
    process.compute(10)
    process.read(Role.FIRST)
    process.sleep(5000)
    process.read(Role.FIRST)
    assert [(found.rows, found.time_ns) for found in process.found] == [(3, 10 * MS), (1, 0)]


def test_the_first_batch_of_several_threads_is_one_pass(process: Process) -> None:
    process.read(Role.FIRST, 2)
    process.sleep(6)
    process.read(Role.FIRST, 2)
    process.read(Role.LATER)
    process.token()
    assert [found.rows for found in process.found] == [4]


def made(compute_ms: int, rows: int = 1, is_first: bool = False, storage_ms: int = 0) -> Pass:
    return Pass(0, compute_ms * MS, storage_ms * MS, 0, 0, 0, 0, rows, is_first)


@pytest.mark.parametrize(
    ("passes", "kinds"),
    [  # p: a prompt, d: a token
        ([made(300, 37, True), made(10), made(10)], "pdd"),
        ([made(300, 512, True), made(300, 512), made(20, 7), made(10)], "pppd"),
        ([made(10, 1, True), made(10), made(50, 5, True), made(10)], "ddpd"),  # a short prompt
        ([made(10), made(11, 2), made(12, 4), made(13, 4)], "dddd"),  # parallel sequences
        ([made(300, 37, True), made(15, 9), made(15, 9), made(15, 9)], "ppdd"),  # speculative decoding
        ([made(10), made(10, storage_ms=900), made(10)], "ddd"),  # slow because of storage
    ],
)
def test_prompts_are_distinguished_from_tokens_by_rows(passes: list[Pass], kinds: str) -> None:
    kinds_seen = Kinds()
    assert "".join(kinds_seen.kind_of(one, are_rows_tokens=True)[0] for one in passes) == kinds


def test_prompts_are_distinguished_by_compute_time_without_rows() -> None:
    kinds_seen, times = Kinds(), [(300, True), (10, False), (12, False), (200, True), (11, False), (11, True)]
    found = (kinds_seen.kind_of(made(ms, is_first=first), are_rows_tokens=False)[0] for ms, first in times)
    assert "".join(found) == "pddpdd"


def layout(layers: int = 3, experts: int = 0, names: str = "gguf") -> ModelLayout:
    parts = ["attn_norm", "attn_q", "ffn_norm", *(["ffn_up_exps"] if experts else ["ffn_up"])]
    wanted = ["token_embd", *(f"blk.{layer}.{part}" for layer in range(layers) for part in parts), "output_norm", "output"]
    size = 64 << 10
    tensors = [
        Tensor(f"{name}.weight", 4096 + at * size, size, "Q8_0", experts if "exps" in name else 1)
        for at, name in enumerate(wanted)
    ]
    return ModelLayout("gguf" if names == "gguf" else "safetensors", 4096, tuple(tensors), None, 2 if experts else None)


def test_the_best_clock_uses_the_first_and_last_norm() -> None:
    clocks = candidates({FILE: layout()})
    names = {role: place.name for role, place in clocks[0].places.items()}
    assert names == {Role.FIRST: "blk.0.attn_norm.weight", Role.LATER: "output_norm.weight"}
    later = [clock.places[Role.LATER].name for clock in clocks if clock.places[Role.FIRST] == clocks[0].places[Role.FIRST]]
    assert later == [f"{name}.weight" for name in ("output_norm", "blk.2.attn_norm", "output", "blk.1.attn_norm")]
    assert clocks[0].are_rows_tokens
    firsts = [clock.places[Role.FIRST].name for clock in clocks]
    assert firsts[:4] == [f"blk.0.{part}.weight" for part in ("attn_norm", "ffn_norm", "attn_q", "ffn_up")]
    assert not next(clock for clock in clocks if "attn_q" in clock.places[Role.FIRST].name).are_rows_tokens
    for clock in clocks:
        for place in clock.places.values():
            assert place.offset % 8 == 0


def test_clocks_span_shards_and_never_use_experts() -> None:
    whole = layout(experts=4)
    shards = {
        (8, 1): ModelLayout("gguf", 4096, whole.tensors[:5], (0, 2), 2),
        (8, 2): ModelLayout("gguf", 4096, whole.tensors[5:], (1, 2), 2),
    }
    clocks = candidates(shards)
    assert clocks[0].places[Role.FIRST].file == (8, 1)
    assert clocks[0].places[Role.LATER].file == (8, 2)
    assert not [place for clock in clocks for place in clock.places.values() if "exps" in place.name or "embd" in place.name]


def test_clocks_of_models_with_one_or_no_layer() -> None:
    one = candidates({FILE: layout(layers=1)})
    assert {clock.places[Role.LATER].name for clock in one} == {"output_norm.weight", "output.weight"}
    no_output = ModelLayout("gguf", 4096, layout(layers=1).tensors[:4])
    assert [set(clock.places) for clock in candidates({FILE: no_output})] == [{Role.FIRST}] * 3
    assert candidates({FILE: layout(layers=0)}) == []
    assert candidates({}) == []
    assert not candidates({FILE: layout(names="safetensors")})[0].are_rows_tokens


def test_waits_are_attributed_to_layers_and_experts() -> None:
    model = layout(experts=4)
    by_name = {tensor.name: tensor for tensor in model.tensors}
    up = by_name["blk.1.ffn_up_exps.weight"]
    page = up.offset // 4096
    expert_pages = up.size_bytes // 4 // 4096
    attribution = Attribution({FILE: model})
    pages = (page, page + 1, page + 3 * expert_pages, by_name["blk.2.attn_q.weight"].offset // 4096)
    places = [attribution.where(*FILE, number) for number in pages]
    assert [place and place.layer for place in places] == ["blk.1", "blk.1", "blk.1", "blk.2"]
    assert places[0] == places[1] != places[2]
    assert places[3] == Where("blk.2")
    assert attribution.where(7, FILE[1], page) == places[0], "overlayfs reports another device"
    assert attribution.where(1, 1, 0) is None
    waits = {place: 30 for place in places if place is not None}
    causes = attribution.causes(waits, 90)
    assert attribution.experts_used == 6
    assert causes.experts_missed == 2
    assert causes.slowest == ("1", 60)
    assert attribution.causes(waits, 9).slowest == ("1", 6), "concurrent waits of threads share the time"
    assert attribution.causes({}, 0).slowest is None
    assert Attribution({FILE: layout()}).causes(waits, 100).experts_missed is None


def token(number: int, storage_ms: int = 0, kind: str = "decode", rows: int | None = 1) -> Token:
    return Token(
        pid=1,
        model="/m.gguf",
        number=number if kind == "decode" else 0,
        kind="decode" if kind == "decode" else "prefill",
        start_ns=0,
        compute_ns=10 * MS,
        storage_ns=storage_ms * MS,
        other_ns=0,
        wait_ns=0,
        read_bytes=1000,
        major_faults=2,
        rows=rows,
    )


def test_the_summary_adds_up_tokens_without_prompts() -> None:
    totals = Totals()
    totals.add(token(0, 90, "prefill", 50))
    for number in range(1, 101):
        totals.add(token(number, 90 if number % 10 == 0 else 0))
    summary = totals.summary(observed_s=10.0)
    assert (summary.tokens, summary.prefill_passes, summary.prefill_tokens) == (100, 1, 50)
    assert summary.seconds == pytest.approx(1.9)
    assert summary.median_s == pytest.approx(0.010)
    assert summary.p99_s == pytest.approx(0.100)
    assert summary.storage_share == pytest.approx(0.9 / 1.9)
    assert summary.read_bytes_per_token == 1000
    assert summary.prefill_tokens_per_s == pytest.approx(500)
    assert [one.number for one in summary.slowest] == [10 * number for number in range(1, 11)]
    text = "\n".join(summary_lines(summary))
    assert "100 tokens in 1.90 s: 52.6 tokens/s" in text
    assert "waiting for storage 47 %, computing 53 %" in text
    document = summary.document()
    assert document["schema"] == "llmcache.tokens/1"
    assert document["slowest"][0]["time_ns"] == 100 * MS


def test_a_prompt_with_unknown_rows_has_no_speed() -> None:
    totals = Totals()
    totals.add(token(0, 0, "prefill", None))
    assert totals.summary().prefill_tokens_per_s is None
    assert "tokens/s" not in "\n".join(summary_lines(totals.summary()))


def test_without_root_counters_come_from_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(watch_module, "INTERVAL_S", 0.2)
    found: list[Interval] = []
    notes: list[str] = []
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        watch = TokenWatch(busy.pid, on_interval=found.append, on_note=notes.append)
        try:
            watch.start()
            wait_for(lambda: sum(one.cpu_ns for one in found) > 0, "CPU time is counted")
            busy.kill()
            busy.wait()
            watch.wait(60)
            assert watch._finished.is_set()
        finally:
            busy.kill()
            summary = watch.stop()
    assert not summary.can_see_tokens
    assert "root" in str(summary.why_not)
    assert "cannot see tokens" in notes[0]
    assert sum(one.time_ns for one in found) <= time.monotonic_ns() - found[0].start_ns
