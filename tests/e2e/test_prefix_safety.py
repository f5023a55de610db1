"""Never another model's keys, no more memory than there is, and no prompt lost: the prefix cache in bad conditions."""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llmcache.cgroup import Cgroup
from llmcache.kv.prefix.store import Block, BlockKey, BlockStore
from llmcache.units import parse_size
from tests.e2e.test_prefix import ROOT, Open, answer, make_model, prompt, reused, stored, write_model
from tests.e2e.test_prefix import cache as cache
from tests.e2e.test_prefix import identities as identities
from tests.e2e.test_prefix import open_model as open_model
from tests.e2e.test_prefix import tiny as tiny

if TYPE_CHECKING:
    from llmcache.kv.llama import PrefixCache

pytestmark = pytest.mark.llama


def changed(path: Path, tmp_path: Path) -> Path:
    """A model with four changed rows, in bytes that samples of it miss."""
    data = bytearray(path.read_bytes())
    head = 4 << 20
    at = head + (len(data) - head) // 1024 * 500 + 4200  # between two samples of 4 KiB
    data[at : at + 1000] = bytes(byte ^ 1 for byte in data[at : at + 1000])
    (tmp_path / "changed.gguf").write_bytes(data)
    return tmp_path / "changed.gguf"


def test_a_model_with_a_few_other_weights_has_other_blocks(open_model: Open, tmp_path: Path, cache: PrefixCache) -> None:
    path = make_model(tmp_path / "model.gguf", "--size", "14M")
    other = changed(path, tmp_path)
    plain = answer(open_model(other), prompt(300))
    answer(open_model(path, cache), prompt(300))
    assert answer(open_model(other, cache), prompt(300)) == plain
    assert cache.counters.hits == 0 and len(cache.store.models()) == 2


def test_a_lora_adapter_and_a_context_beyond_that_of_training_have_other_blocks(
    tiny: Path, open_model: Open, tmp_path: Path, cache: PrefixCache
) -> None:
    adapters = [tmp_path / "one", tmp_path / "two"]
    for adapter, content in zip(adapters, (b"a" * 9000, b"a" * 8999 + b"b"), strict=True):
        adapter.write_bytes(content)
    for path in (None, *adapters):
        model = open_model(tiny)
        model.lora_path = path and str(path)
        model.set_cache(cache)
        answer(model, prompt(300))
    for settings in ({"n_ctx": 512}, {"n_ctx": 2048}, {"n_ctx": 2304}):
        hits = cache.counters.hits
        answer(open_model(tiny, cache, **settings), prompt(300))
        assert cache.counters.hits - hits == (settings["n_ctx"] <= 2048), "it is trained with 2,048"
    assert len(cache.store.models()) == 4


@pytest.mark.parametrize("moment", ["before set_cache", "after it", "after an answer"])
@pytest.mark.parametrize("mapped", [True, False])
def test_a_model_whose_file_is_written_to_after_it_was_loaded_is_not_restored_or_stored(
    tiny: Path,
    open_model: Open,
    tmp_path: Path,
    cache: PrefixCache,
    caplog: pytest.LogCaptureFixture,
    moment: str,
    mapped: bool,
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny.read_bytes())
    answer(open_model(path, cache), prompt(300), 1)
    files, status = {entry.key for entry in cache.store.entries()}, path.stat()
    model = open_model(path, use_mmap=mapped)
    if moment != "before set_cache":
        model.set_cache(cache)
    if moment == "after an answer":
        answer(model, prompt(300), 1)
    time.sleep(0.05)  # the kernel's clock for change times is coarse
    with open(path, "r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\1")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    model.set_cache(cache)
    hits = cache.counters.hits
    for seed in range(2):
        answer(model, prompt(300, seed=seed), 1)
    assert cache.counters.hits == hits and {entry.key for entry in cache.store.entries()} == files
    assert len(caplog.messages) == 1 and "changed or replaced" in caplog.text


def test_nothing_is_restored_or_stored_until_the_file_is_identified(
    tiny: Path,
    open_model: Open,
    tmp_path: Path,
    cache: PrefixCache,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from llmcache.kv.llama import cache as module
    from llmcache.kv.prefix import identity

    hashed, may_end = identity._hash, threading.Event()

    def hash_late(job: Any) -> str:
        assert may_end.wait(60)
        return hashed(job)

    monkeypatch.setattr(identity, "_hasher", identity._Hasher())
    monkeypatch.setattr(identity, "_hash", hash_late)
    monkeypatch.setattr(module, "WAIT_S", 0.1)
    model = open_model(tiny, cache)
    text = answer(model, prompt(300))
    answer(open_model(tiny, cache), prompt(300))
    assert not cache.store.entries() and cache.counters.lookups == 0
    assert len(caplog.messages) == 2, "one line for each Llama"
    assert "once the file is identified" in caplog.text and "0 B of " in caplog.text
    may_end.set()
    identity.FileIdentity(tiny).digest(60)
    model.reset()
    assert answer(model, prompt(300)) == text
    assert len(cache.store.entries()) == 2 and "identified: prompts are" in caplog.messages[-1]
    assert answer(open_model(tiny, cache), prompt(300)) == text and cache.counters.hits == 1


def test_a_small_disk_stores_prompts_and_one_without_room_is_reported_at_the_start(
    tiny: Path, open_model: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = 300 * 10**6 // 4096
    status = os.statvfs_result((4096, 4096, blocks, 0, blocks, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: status)
    with stored(tmp_path / "kv", limit="200M", floor=None) as cache:
        answer(open_model(tiny, cache), prompt(600))
        assert cache.store.entries() and not caplog.messages
    for settings, told in (({"limit": "500k"}, "limit is 500 KB"), ({"floor": "1G"}, "1.00 GB of the file system")):
        with stored(tmp_path / "other", **settings):
            assert len(caplog.messages) == 1 and "no space" in caplog.text and told in caplog.text
        caplog.clear()


@pytest.mark.parametrize("available", [-1, 0, 10**12])
def test_prompts_wait_in_memory_only_while_there_is_enough(
    tiny: Path,
    open_model: Open,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    available: int,
) -> None:
    spare = available
    monkeypatch.setattr("llmcache.kv.llama.writer.tightest", lambda: SimpleNamespace(spare_bytes=spare))
    with stored(tmp_path / "kv") as cache:
        model = open_model(tiny, cache)
        for seed in range(3):
            assert answer(model, prompt(600, seed=seed)) == answer(open_model(tiny), prompt(600, seed=seed))
        assert bool(cache.store.entries()) is (available > 0)
        assert len(caplog.messages) == (available <= 0), "one line for many prompts"
        assert ("memory is short" in caplog.text) is (available <= 0)
        spare = -1
        caplog.clear()
        assert answer(open_model(tiny, cache), prompt(600)) == answer(open_model(tiny), prompt(600))
        assert cache.counters.hits == 0


def test_the_newest_queued_prompts_are_dropped_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt that is being written stays; the memory of the others is freed."""
    from llmcache.kv.llama import model, writer

    may_write = threading.Event()
    gone: list[int] = []

    class Freed(np.ndarray[Any, Any]):
        def __del__(self) -> None:
            gone.append(len(self))

    def write(own: Any, task: Any, key: Any, used_ns: int) -> int:
        assert may_write.wait(60)
        task.block(key)
        return 1

    def task(number: int) -> Any:
        memory = np.zeros(100 + number, np.uint8).view(Freed)
        keys = [BlockKey("0" * 32, f"{number:040x}", 0)]
        return writer.Task(model.Model({}, root="0" * 40), keys, [1] * 20, 100, lambda key: Block(memory, (1,)))

    monkeypatch.setattr(writer.Writer, "_write", write)
    monkeypatch.setattr(writer, "tightest", lambda: SimpleNamespace(spare_bytes=100 * len(gone)))
    with stored(tmp_path / "kv") as cache:
        for number in range(4):
            cache._writer.put(task(number))
        assert cache.make_room(150) and sorted(gone) == [102, 103]
        assert not cache.make_room(10**6) and sorted(gone) == [101, 102, 103]
        assert cache.counters.dropped_blocks == 3
        may_write.set()
        assert cache.flush(10) and cache.counters.stored_blocks == 1
        deadline = time.monotonic() + 10
        while len(gone) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(gone) == 4, "the memory of a written prompt is freed too"


def make_wide(path: Path) -> Path:
    """A model whose keys and values are large, and its weights small: 8 KB a token with F32, and 32 KB of scores."""
    width, heads, size = 64, 8, 128
    metadata = {
        "vocabulary": 8192, "vocab_size": 8192, "embedding_length": width, "block_count": 1, "feed_forward_length": width,
        "head_count": heads, "head_count_kv": heads, "key_length": size, "value_length": size, "rope_dimension_count": size,
    }  # fmt: skip
    inner = heads * size
    layer = {"attn_norm": (width,), "attn_q": (inner, width), "attn_k": (inner, width), "attn_v": (inner, width)}
    layer |= {"attn_output": (width, inner), "ffn_norm": (width,), "ffn_gate": (width, width), "ffn_up": (width, width)}
    layer |= {"ffn_down": (width, width)}
    return write_model(path, "llama", metadata, {f"{name}.weight": shape for name, shape in layer.items()})


CROWDED = f"""
from __future__ import annotations
import os, sys, time
import numpy as np
from llama_cpp import Llama
from llmcache.kv.llama import PrefixCache
from llmcache.kv.prefix.store import BlockStore
{inspect.getsource(prompt)}
rate, count, tokens = map(int, sys.argv[3:])
write = BlockStore.write
def write_slowly(store, key, block, *rest):
    time.sleep(len(block.payload) / rate)
    return write(store, key, block, *rest)
BlockStore.write = write_slowly
model = Llama(sys.argv[1], n_ctx=tokens + 48, n_threads=1, type_k=0, type_v=0, logits_all=True, verbose=False)
cache = PrefixCache(sys.argv[2], floor=0)
model.set_cache(cache)
for seed in range(count):
    model.create_completion(prompt(tokens, seed=seed), max_tokens=8, temperature=0)
    print(seed, flush=True)
print(cache.counters, file=sys.stderr)
os._exit(0)
"""


@pytest.mark.cgroup
@pytest.mark.long
@pytest.mark.parametrize("rate", [200_000, 10**12], ids=["slow", "fast"])
def test_a_slow_disk_does_not_exhaust_memory(tmp_path: Path, rate: int) -> None:
    """LLMCACHE_PREFIX_CROWD (400M 18 1000): memory of the cgroup, prompts, and tokens of each."""
    limit, count, tokens = os.environ.get("LLMCACHE_PREFIX_CROWD", "400M 18 1000").split()
    path = make_wide(tmp_path / "wide.gguf")
    with Cgroup("crowd", directory=None, memory_bytes=parse_size(limit)) as group:
        command = [sys.executable, "-c", CROWDED, str(path), str(tmp_path / "kv"), str(rate), count, tokens]
        result = subprocess.run(group.wrap(command), capture_output=True, text=True, cwd=ROOT, timeout=590, check=False)
        assert group.usage().oom_kills == 0 and result.returncode == 0, result.stderr
    assert result.stdout.split() == [str(seed) for seed in range(int(count))]
    assert BlockStore(tmp_path / "kv", None).entries() or rate < 10**6
    assert ("memory is short" in result.stderr) is (rate < 10**6)


def answer_at_length(model: Path, directory: Path, seed: int, said: Connection) -> None:
    """Answer a prompt, and say for each token of the answer whether the prompt is written."""
    import llama_cpp

    llama = llama_cpp.Llama(str(model), n_ctx=2048, n_threads=1, n_batch=128, verbose=False)
    cache = stored(directory)
    llama.set_cache(cache)

    def send(*_: object) -> bool:
        said.send(cache.flush(0))
        return False

    said.send(False)
    criteria = llama_cpp.StoppingCriteriaList([send])
    llama.create_completion(prompt(600, seed=seed), max_tokens=1000, temperature=0, stopping_criteria=criteria)


@pytest.mark.long
def test_a_prompt_survives_a_kill_during_its_answer(tiny: Path, open_model: Open, tmp_path: Path) -> None:
    """LLMCACHE_ANSWER_KILLS (8): how often a process is killed at a random moment of an answer of 1,000 tokens."""
    context, turns = multiprocessing.get_context("forkserver"), np.random.default_rng(0)
    context.set_forkserver_preload(["llama_cpp", __name__])
    kills, lost = int(os.environ.get("LLMCACHE_ANSWER_KILLS", "8")), 0
    with stored(tmp_path / "kv") as cache:
        model = open_model(tiny, cache)
        for seed in range(kills):
            hears, says = context.Pipe(duplex=False)
            process = context.Process(target=answer_at_length, args=(tiny, tmp_path / "kv", seed, says), daemon=True)
            process.start()
            says.close()
            for _ in range(1 + turns.integers(40)):
                assert hears.poll(120)
                is_written = hears.recv()
            time.sleep(turns.random() * 0.05)
            process.kill()
            process.join()
            with contextlib.suppress(EOFError):
                while True:
                    is_written = hears.recv()
            model.reset()
            restored = cache.restore(model, prompt(600, seed=seed))
            assert restored == 600 or not is_written, seed
            lost += restored < 600
        print(f"{lost} of {kills} prompts were lost, before they were evaluated or written")
        assert lost < kills
        assert answer(model, prompt(600), 32) == reused(open_model(tiny), prompt(600), prompt(600), 600, 32)
