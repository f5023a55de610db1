"""MoE models, in all modes: how many experts are cached, and that every byte is right."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import random
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from llmcache.bpf.pagetables import PageTables, Unreadable
from llmcache.cgroup import Cgroup
from llmcache.model.tensors import Experts
from llmcache.mount.backends.touches import why_not
from llmcache.mount.readahead import SMALL_READ_AHEAD_KB
from tests.mount.live import OVERHEAD_BYTES, Live, live, wait_for
from tests.unit.gguf_bytes import Gguf
from tools.bench import patterns, routing
from tools.bench.runner import client, forget, run_client
from tools.bench.sides import read_ahead
from tools.make_model import BYTES_PER_VALUE, MoeShape, choose_shape, make_model

pytestmark = [pytest.mark.mount, pytest.mark.bpf]

EXPERTS, USED = 32, 4
TOKENS, WARM = 60, 20
Q8_0 = 8  # its number in GGUF files


@dataclass(frozen=True)
class Model:
    """A generated MoE model, alone in its directory."""

    path: Path
    experts: Experts
    layers: int
    expert_bytes: int
    dense_bytes: int

    @property
    def budget(self) -> int:
        """The budget for everything dense and a third of the experts."""
        return self.dense_bytes + self.experts.count * self.expert_bytes // 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = tmp_path_factory.mktemp("mixture")
    shape = choose_shape(256 * 10**6, BYTES_PER_VALUE["gguf"], None, False, MoeShape(EXPERTS, USED, 200_000))
    (path,) = make_model(directory / "mixture.gguf", shape, "gguf", 1, 0)
    os.utime(path, (0, 0))
    layout = routing.layout_of(path)
    experts = Experts(layout)
    dense = sum(tensor.size_bytes for tensor in layout.tensors if tensor.experts == 1)
    return Model(path, experts, shape.layers, experts.bytes_of(0), dense)


@pytest.fixture(params=["inplace", "steer", "arena"])
def mode(request: pytest.FixtureRequest, model: Model) -> str:
    if request.param == "inplace" and (reason := why_not(str(model.path.parent))):
        pytest.skip(reason)
    return str(request.param)


@pytest.mark.cgroup
@pytest.mark.parametrize("mode", ["inplace", "steer"], indirect=True)
def test_reads_are_close_to_those_of_lru_over_experts(model: Model, tmp_path: Path, mode: str) -> None:
    """The reference is an exact LRU cache of whole experts with the same budget, with 32 experts per layer."""
    habits = routing.Habits(zipf=1.2)
    routed, ranks = routing.ranked(TOKENS, model.layers, EXPERTS, USED, habits)
    passes = patterns.routed_passes(routing.layout_of(model.path), routed.tolist())
    (tmp_path / "plan").write_text(json.dumps(patterns.Stage((patterns.Reader(passes),)).to_json()))
    room = (model.budget - model.dense_bytes) // model.expert_bytes
    expected = routing.misses(routed, ranks, habits, room, WARM)["lru"] * (TOKENS - WARM) * model.expert_bytes
    source = model.path.parent
    with (
        read_ahead(source, SMALL_READ_AHEAD_KB),
        Cgroup(f"{mode}-mixture", directory=source, memory_bytes=model.budget + OVERHEAD_BYTES) as group,
        live(source, tmp_path / "mnt", str(model.budget), "--mode", mode, wrap=group.wrap) as mount,
    ):
        forget(model.path)
        done = run_client(group, client("zoo_reader", tmp_path / "plan", mount.mountpoint / model.path.name), 300)
        (file,) = mount.stats()["files"]
    assert len(done.steps) == TOKENS
    assert 0.2 * model.experts.count < file["experts"]["kept"] < 0.7 * model.experts.count
    # On a quiet machine 0.7 to 1; on a busy one, the kernel reads further around each fault, because faults take longer.
    assert sum(step.storage_bytes for step in done.steps[WARM:]) < 1.2 * expected


@pytest.mark.parametrize("mode", ["steer", "arena"], indirect=True)
def test_uses_of_cached_experts_are_seen_without_requests(model: Model, tmp_path: Path, mode: str) -> None:
    """Everything fits and no page is evicted, so that only page tables show which experts are used."""
    try:
        PageTables().close()
    except Unreadable as reason:
        pytest.skip(str(reason))
    expert = model.experts.count - 1
    with (
        live(model.path.parent, tmp_path / "mnt", str(2 * model.path.stat().st_size), "--mode", mode) as mount,
        (mount.mountpoint / model.path.name).open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view,
    ):

        def uses_seen() -> int:
            """Read an expert and return how often the mount has counted a use of it."""
            for offset, length in model.experts.ranges(expert):
                bytes(view[offset : offset + length : mmap.PAGESIZE])
            return int(mount.stats()["hit_bytes"]) // model.expert_bytes

        wait_for(lambda: uses_seen() >= 1, "a use was seen", 60)
        before = mount.stats()["backing_read_bytes"]
        wait_for(lambda: uses_seen() >= 5, "uses were seen", 60)
        assert mount.stats()["backing_read_bytes"] == before, "no request reached storage"


def test_every_byte_is_right_while_experts_are_loaded_and_evicted(model: Model, tmp_path: Path, mode: str) -> None:
    """Four threads read by mmap and pread, whole slices and ranges across their ends; then the file changes."""
    source = tmp_path / "source"
    source.mkdir()
    path = source / "mixture.gguf"
    shutil.copy(model.path, path)
    os.utime(path, (0, 0))
    wrong: list[tuple[int, int]] = []
    rounds = itertools.count()

    def read(number: int, through: Path, content: bytes, ended: threading.Event) -> None:
        chance = random.Random(number)
        with through.open("rb", buffering=0) as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
            while not ended.is_set():
                expert = min(int(chance.paretovariate(0.7)), model.experts.count) - 1
                for offset, length in model.experts.ranges(expert):
                    first = max(0, offset - chance.choice((0, 1, 5000)))
                    end = min(len(content), offset + length + chance.choice((0, 1, 5000)))
                    found = view[first:end] if number % 2 else os.pread(file.fileno(), end - first, first)
                    if found != content[first:end]:
                        wrong.append((first, end))
                next(rounds)

    def read_for(rounds_more: int, through: Path) -> None:
        content, ended = path.read_bytes(), threading.Event()
        until = next(rounds) + rounds_more
        readers = [threading.Thread(target=read, args=(number, through, content, ended)) for number in range(4)]
        for reader in readers:
            reader.start()
        try:
            wait_for(lambda: next(rounds) > until or bool(wrong), "experts were read", 120)
        finally:
            ended.set()
            for reader in readers:
                reader.join()

    with live(source, tmp_path / "mnt", "64M", "--mode", mode) as mount:
        through = mount.mountpoint / path.name
        read_for(1500, through)
        stats = mount.stats()
        assert stats["files"][0]["experts"]["kept"] > 0
        # In place, pages beyond the budget stay while memory is free.
        assert mode == "inplace" or stats["invalidated_bytes"] > 0
        last = bytes(byte ^ 255 for byte in path.read_bytes()[-(1 << 20) :])
        with path.open("r+b") as file:  # change the experts of the last layer
            file.seek(-len(last), os.SEEK_END)
            file.write(last)
        os.utime(path, (1, 1))
        read_for(500, through)
    assert not wrong


SHAPES = {
    "548 GB": [(61, 384, 7168 * 1024)],  # 70,272 slices: the experts of the largest open models
    "2 x 31 GB": [(48, 128, 2048 * 768), (48, 128, 2048 * 768)],
}
"""Layers, experts of each, and values of a slice of models much larger than memory and disk: the files are sparse."""


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_large_models_are_steered(shapes: list[tuple[int, int, int]], tmp_path: Path, mode: str) -> None:
    (tmp_path / "source").mkdir()
    for number, (layers, count, values) in enumerate(shapes):
        model, tensor_bytes = Gguf(), count * values // 32 * 34
        names = [f"blk.{layer}.ffn_{part}_exps.weight" for layer in range(layers) for part in ("gate", "up", "down")]
        for name in names:
            model.tensor(name, [2048, values // 2048, count], Q8_0, len(model.tensors) * tensor_bytes)
        (tmp_path / "source" / f"{number}.gguf").write_bytes(model.file())
        os.truncate(tmp_path / "source" / f"{number}.gguf", len(model.file()) + len(names) * tensor_bytes)
    with live(tmp_path / "source", tmp_path / "mnt", "256M", "--mode", mode) as mount:
        for number in range(len(shapes)):
            path = mount.mountpoint / f"{number}.gguf"
            experts = Experts(routing.layout_of(path))
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
                unread = iter(range(0, experts.count, experts.count // 200))

                def keeps_what_is_read() -> bool:
                    for offset, length in experts.ranges(next(unread)):  # noqa: B023
                        assert not any(view[offset : offset + length : mmap.PAGESIZE])
                    return kept_of(mount, path.name) >= 2  # noqa: B023

                wait_for(keeps_what_is_read, "experts are cached")
        most = OVERHEAD_BYTES * 5 // 4 + (256 << 20 if mode == "arena" else 0)
        assert mount.memory_bytes() < most


def kept_of(mount: Live, name: str) -> int:
    """Return how many experts of a file are cached; 0 if it is not steered."""
    files = [entry for entry in mount.stats()["files"] if entry["path"].lstrip("/") == name]
    return int(files[0]["experts"]["kept"]) if files and files[0].get("experts") else 0
