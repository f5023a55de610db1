"""llama.cpp goes on from prompts on disk as if it had evaluated them, and evaluates what is not, or not rightly, there."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llmcache.cgroup import Cgroup
from llmcache.kv.prefix.state import StateLayout, Uncut
from llmcache.kv.prefix.store import Block, BlockKey, BlockStore
from llmcache.units import parse_size
from tests.conftest import GEMMA
from tools.make_model import main as generate

if TYPE_CHECKING:
    from llmcache.kv.llama import PrefixCache

ROOT = Path(__file__).resolve().parents[2]
Q8_0 = 8
CONTEXT = 1024

pytestmark = pytest.mark.llama

Open = Callable[..., Any]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def make_model(path: Path, *more: str) -> Path:
    generate([str(path), "--size", "3M", *more])
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens models, with one thread and without a word, and closes them."""
    import llama_cpp

    models = []

    def make(path: Path, cache: PrefixCache | None = None, **settings: Any) -> llama_cpp.Llama:
        settings = {"n_ctx": CONTEXT, "n_threads": 1, "n_threads_batch": 1, "n_batch": 128, **settings}
        models.append(llama_cpp.Llama(str(path), verbose=False, **settings))
        models[-1].set_cache(cache)
        return models[-1]

    yield make
    for model in models:
        model.close()


def stored(directory: Path, **settings: Any) -> PrefixCache:
    from llmcache.kv.llama import PrefixCache  # needs llama-cpp-python

    return PrefixCache(directory, **{"floor": 0, **settings})


@pytest.fixture(autouse=True)
def identities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of files are remembered in a cache directory of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[PrefixCache]:
    with stored(tmp_path / "kv") as made:
        yield made


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(300, 900, tokens).tolist()  # type: ignore[no-any-return]


def answer(model: Any, tokens: list[int] | str, length: int = 16) -> str:
    """The greedy continuation, stored when this returns."""
    text = model.create_completion(tokens, max_tokens=length, temperature=0)["choices"][0]["text"]
    if model.cache is not None:
        assert model.cache.flush(60)
    return text  # type: ignore[no-any-return]


def reused(model: Any, wrote: list[int], tokens: list[int], common: int, length: int = 16) -> str:
    """The greedy continuation of `tokens` by `model`, which has evaluated `wrote` and keeps the first `common` tokens of it.

    What llama.cpp computes of a token depends on how many are evaluated with it: this is what goes on from the same state.
    """
    if model.input_ids[: len(wrote)].tolist() != wrote:
        model.reset()
        model.eval(wrote)
    model.n_tokens = min(common, len(tokens) - 1)
    return answer(model, tokens, length)


def logits(model: Any) -> bytes:
    import llama_cpp

    return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(model.ctx, -1), (model.n_vocab(),)).tobytes()


LAYOUTS = {
    "transposed": {"flash_attn": False},
    "flash": {"flash_attn": True},
    "q8_0": {"flash_attn": True, "type_k": Q8_0, "type_v": Q8_0},
    "q8_0 keys": {"flash_attn": False, "type_k": Q8_0},
}


@pytest.mark.parametrize("settings", LAYOUTS.values(), ids=list(LAYOUTS))
def test_a_restored_prompt_goes_on_as_an_evaluated_one(
    tiny: Path, opened: Open, cache: PrefixCache, settings: dict[str, Any]
) -> None:
    tokens = prompt(600)
    live = opened(tiny, cache, **settings)
    assert answer(live, tokens, 64) == answer(opened(tiny, **settings), tokens, 64)
    assert cache.counters.stored_blocks == 4 and cache.counters.hits == 0, "the last one again, with the answer"
    assert len(cache.store.entries()) == 3
    restored = opened(tiny, cache, **settings)
    assert answer(restored, tokens, 64) == reused(opened(tiny, **settings), tokens, tokens, 600, 64)
    assert (cache.counters.hits, cache.counters.restored_tokens) == (1, 600)
    again = opened(tiny, cache, **settings)
    for model in (live, again):  # one has the prompt and evaluates the last token anew, the other restores it before
        answer(model, tokens, 1)
    assert cache.counters.hits == 2
    assert logits(live) == logits(again)


def test_a_restored_prompt_has_the_same_answer_as_the_first_time(tiny: Path, opened: Open, cache: PrefixCache) -> None:
    """Also a conversation, whose later turns go on from answers; one turn is stored with its answer only."""
    live, tokens = opened(tiny, cache), prompt(600)
    for turn, more in enumerate((100, 20, 300)):
        answer(live, tokens, 1)
        first = logits(live)
        text = answer(live, tokens, 24)
        restored = opened(tiny, cache)
        answer(restored, tokens, 1)
        assert cache.counters.hits == 1 + 2 * turn and logits(restored) == first
        assert answer(opened(tiny, cache), tokens, 24) == text
        tokens = live.input_ids[: live.n_tokens].tolist() + prompt(more, seed=turn + 1)


@pytest.mark.parametrize("common", [513, 300, 17])
def test_a_prompt_that_differs_restores_what_is_common(tiny: Path, opened: Open, cache: PrefixCache, common: int) -> None:
    answer(opened(tiny, cache), prompt(600), 1)
    other = prompt(600)[:common] + prompt(50, seed=1)
    restored = common if common != 513 else 512  # 16 tokens of a block at least
    assert answer(opened(tiny, cache), other, 64) == reused(opened(tiny), prompt(600), other, restored, 64)
    assert cache.counters.restored_tokens == restored
    assert cache.restore(opened(tiny, n_ctx=512), prompt(600)) == 512, "what fits into the context"


def test_what_the_model_still_has_is_not_restored(tiny: Path, opened: Open, cache: PrefixCache) -> None:
    model = opened(tiny, cache)
    answer(model, prompt(600), 1)
    answer(model, prompt(600) + prompt(10, seed=1), 1)
    assert (cache.counters.lookups, cache.counters.hits) == (2, 0)
    answer(model, prompt(300, seed=2), 1)
    answer(model, prompt(600) + prompt(10, seed=3), 1)
    assert cache.counters.hits == 1


def test_prompts_share_their_blocks(tiny: Path, opened: Open, cache: PrefixCache) -> None:
    model = opened(tiny, cache)
    for seed in range(1, 5):
        answer(model, prompt(512) + prompt(100, seed=seed), 4)
    assert sorted(entry.key.kind for entry in cache.store.entries()) == ["kv", "kv", *["part"] * 4]
    for seed in range(1, 5):
        answer(opened(tiny, cache), prompt(512) + prompt(100, seed=seed), 1)
        assert cache.counters.restored_tokens == 612 * seed
    for seed in range(1, 5):
        answer(model, prompt(512) + prompt(256, seed=seed), 4)
    assert sorted(entry.key.kind for entry in cache.store.entries()) == ["kv"] * 6 + ["part"] * 4


def test_of_a_prompt_larger_than_the_limit_the_beginning_is_restored(tiny: Path, opened: Open, tmp_path: Path) -> None:
    with stored(tmp_path / "all") as whole:
        answer(opened(tiny, whole), prompt(900))
        sizes = {entry.key.index: entry.size_bytes for entry in whole.store.entries()}
    with stored(tmp_path / "few", limit=int(2.5 * sizes[0])) as few:
        answer(opened(tiny, few), prompt(900))
        answer(opened(tiny, few), prompt(900))
        assert few.counters.restored_tokens >= 256


def test_another_model_of_the_same_name_and_other_settings_have_other_blocks(
    tiny: Path, tmp_path: Path, opened: Open, cache: PrefixCache
) -> None:
    other = make_model(tmp_path / "other" / tiny.name, "--seed", "1")
    assert other.stat().st_size == tiny.stat().st_size
    plain = answer(opened(other), prompt(300), 16)
    answer(opened(tiny, cache), prompt(300), 16)
    assert answer(opened(other, cache), prompt(300), 16) == plain
    assert cache.counters.hits == 0 and len(cache.store.models()) == 2
    for settings in ({"rope_freq_base": 5e4}, {"rope_freq_scale": 0.5}, {"flash_attn": True}, {"type_k": Q8_0}):
        plain = answer(opened(tiny, **settings), prompt(300))
        assert answer(opened(tiny, cache, **settings), prompt(300)) == plain
        assert cache.counters.hits == 0, settings
    copy = tmp_path / "copied.gguf"
    copy.write_bytes(tiny.read_bytes())
    answer(opened(copy, cache), prompt(300), 16)
    assert cache.counters.hits == 1, "a copy is the same model"


def changed(path: Path, tmp_path: Path) -> Path:
    """A model with four changed rows, in bytes that samples of it miss."""
    data = bytearray(path.read_bytes())
    head = 4 << 20
    at = head + (len(data) - head) // 1024 * 500 + 4200  # between two samples of 4 KiB
    data[at : at + 1000] = bytes(byte ^ 1 for byte in data[at : at + 1000])
    (tmp_path / "changed.gguf").write_bytes(data)
    return tmp_path / "changed.gguf"


def test_a_model_with_a_few_other_weights_has_other_blocks(opened: Open, tmp_path: Path, cache: PrefixCache) -> None:
    path = make_model(tmp_path / "model.gguf", "--size", "14M")
    other = changed(path, tmp_path)
    plain = answer(opened(other), prompt(300))
    answer(opened(path, cache), prompt(300))
    assert answer(opened(other, cache), prompt(300)) == plain
    assert cache.counters.hits == 0 and len(cache.store.models()) == 2


def test_a_lora_adapter_and_a_context_beyond_that_of_training_have_other_blocks(
    tiny: Path, opened: Open, tmp_path: Path, cache: PrefixCache
) -> None:
    adapters = [tmp_path / "one", tmp_path / "two"]
    for adapter, content in zip(adapters, (b"a" * 9000, b"a" * 8999 + b"b"), strict=True):
        adapter.write_bytes(content)
    for path in (None, *adapters):
        model = opened(tiny)
        model.lora_path = path and str(path)
        model.set_cache(cache)
        answer(model, prompt(300))
    for settings in ({"n_ctx": 512}, {"n_ctx": 2048}, {"n_ctx": 2304}):
        hits = cache.counters.hits
        answer(opened(tiny, cache, **settings), prompt(300))
        assert cache.counters.hits - hits == (settings["n_ctx"] <= 2048), "it is trained with 2,048"
    assert len(cache.store.models()) == 4


@pytest.mark.parametrize("moment", ["before set_cache", "after it", "after an answer"])
@pytest.mark.parametrize("mapped", [True, False])
def test_a_model_whose_file_is_written_to_after_it_was_loaded_is_not_restored_or_stored(
    tiny: Path, opened: Open, tmp_path: Path, cache: PrefixCache, caplog: pytest.LogCaptureFixture, moment: str, mapped: bool
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny.read_bytes())
    answer(opened(path, cache), prompt(300), 1)
    files, status = {entry.key for entry in cache.store.entries()}, path.stat()
    model = opened(path, use_mmap=mapped)
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
    opened: Open,
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
    model = opened(tiny, cache)
    text = answer(model, prompt(300))
    answer(opened(tiny, cache), prompt(300))
    assert not cache.store.entries() and cache.counters.lookups == 0
    assert len(caplog.messages) == 2, "one line for each Llama"
    assert "once the file is identified" in caplog.text and "0 B of " in caplog.text
    may_end.set()
    identity.FileIdentity(tiny).digest(60)
    model.reset()
    assert answer(model, prompt(300)) == text
    assert len(cache.store.entries()) == 2 and "identified: prompts are" in caplog.messages[-1]
    assert answer(opened(tiny, cache), prompt(300)) == text and cache.counters.hits == 1


@pytest.mark.parametrize("index", [0, 2])
def test_a_damaged_block_ends_what_is_restored(
    tiny: Path, opened: Open, cache: PrefixCache, index: int, caplog: pytest.LogCaptureFixture
) -> None:
    plain = answer(opened(tiny), prompt(600))
    answer(opened(tiny, cache), prompt(600), 1)
    (entry,) = (entry for entry in cache.store.entries() if entry.key.index == index)
    with open(cache.store.directory / entry.key.file, "r+b") as stream:
        stream.seek(-1000, os.SEEK_END)
        stream.write(b"wrong")
    assert answer(opened(tiny, cache), prompt(600)) == plain
    assert cache.counters.restored_tokens == 256 * index
    assert len(caplog.messages) == 1 and "removed" in caplog.text
    assert answer(opened(tiny, cache), prompt(600)) == reused(opened(tiny), prompt(600), prompt(600), 600)
    assert cache.counters.restored_tokens == 256 * index + 600, "it was stored again"


def test_a_state_that_llama_cpp_does_not_take_is_dropped(
    tiny: Path, opened: Open, cache: PrefixCache, caplog: pytest.LogCaptureFixture
) -> None:
    plain = answer(opened(tiny), prompt(600))
    answer(opened(tiny, cache), prompt(600), 1)
    for entry in cache.store.entries():
        block = cache.store.read(entry.key)
        assert block and block.layout
        told: Any = block.layout.to_json()
        told[0][1][0] = (Q8_0, *told[0][1][0][1:])  # type of the first keys
        cache.store.write(entry.key, Block(block.payload, block.tokens, StateLayout.from_json(told)))
    assert answer(opened(tiny, cache), prompt(600)) == plain
    assert cache.counters.hits == 0 and "rejected" in caplog.text
    answer(opened(tiny, cache), prompt(600))
    assert cache.counters.hits == 1


def test_blocks_of_another_layout_or_other_tokens_are_not_used_and_stored_anew(
    tiny: Path, opened: Open, cache: PrefixCache
) -> None:
    """Right checksums, as another build of the library or a hostile server writes them."""
    plain = reused(opened(tiny), prompt(600), prompt(600), 600)

    answer(opened(tiny, cache), prompt(600), 1)
    for change, index in itertools.product(("layout", "tokens", "no layout"), range(3)):
        for key in [entry.key for entry in cache.store.entries() if entry.key.index == index]:
            block = cache.store.read(key)
            assert block and block.layout
            (part,) = block.layout.parts
            changed = {
                "layout": replace(block, layout=StateLayout((replace(part, values=tuple(reversed(part.keys))),))),
                "tokens": replace(block, payload=block.payload[: -block.layout.token_bytes], tokens=block.tokens[:-1]),
                "no layout": replace(block, layout=None),
            }
            cache.store.write(key, changed[change])
        answer(opened(tiny, cache), prompt(600), 1)
        before = cache.counters.restored_tokens
        assert answer(opened(tiny, cache), prompt(600)) == plain
        assert cache.counters.restored_tokens - before == 600, (change, index)


def test_a_link_to_a_block_behind_other_tokens_is_not_followed(tiny: Path, opened: Open, cache: PrefixCache) -> None:
    one, two = prompt(256) + prompt(100, seed=2), prompt(256, seed=1) + prompt(100, seed=2)
    plain = reused(opened(tiny), one, one, 256)
    for tokens in (one, two):
        answer(opened(tiny, cache), tokens, 1)
    first, second = (entry.key for entry in cache.store.entries() if entry.key.kind == "part")
    for path in (cache.store.directory / first.model).glob("*.next"):
        target = os.path.basename((first if path.readlink().name == os.path.basename(second.file) else second).file)
        path.unlink()
        path.symlink_to(target)
    assert answer(opened(tiny, cache), one) == plain
    assert cache.counters.restored_tokens == 256


@pytest.mark.parametrize(("gone", "told"), [(False, "replaced"), (True, "cannot be read")])
def test_a_model_whose_file_was_replaced_or_is_gone_answers_and_nothing_of_it_is_stored(
    tiny: Path, tmp_path: Path, opened: Open, cache: PrefixCache, caplog: pytest.LogCaptureFixture, gone: bool, told: str
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny.read_bytes())
    model = opened(path, cache)
    if gone:
        path.unlink()
    else:
        make_model(tmp_path / "other.gguf", "--seed", "1").replace(path)
    assert answer(model, prompt(300)) == answer(opened(tiny), prompt(300))
    assert len(caplog.messages) == 1 and told in caplog.text and not cache.store.entries()


def test_states_that_cannot_be_cut_are_stored_whole(
    tiny: Path, opened: Open, cache: PrefixCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def read_state(*_: object) -> None:
        raise Uncut("of another library")

    monkeypatch.setattr("llmcache.kv.llama.cache.read_state", read_state)
    plain = answer(opened(tiny), prompt(600))
    model = opened(tiny, cache)
    assert answer(model, prompt(600)) == plain
    assert "stored whole, at block boundaries: of another library" in caplog.text and not cache.store.entries()
    answer(model, prompt(300, seed=1))
    assert answer(model, prompt(900)) == answer(opened(tiny), prompt(900))
    kinds = sorted((entry.key.kind, entry.key.index) for entry in cache.store.entries())
    assert kinds == [("state", 0), ("state", 0), ("state", 1), ("state", 2)], (
        "1 of the second, 1, 2 and the last of the third"
    )


def make_recurrent(path: Path) -> Path:
    """The smallest Mamba that llama.cpp loads, of random weights."""
    import gguf

    width, inner, state, rank, vocabulary = 64, 128, 16, 4, 1024
    writer, drawn = gguf.GGUFWriter(path, "mamba"), np.random.default_rng(0)
    told = {
        "context_length": 4096, "embedding_length": width, "block_count": 2, "feed_forward_length": 0, "head_count": 0,
        "ssm_conv_kernel": 4, "ssm_inner_size": inner, "ssm_state_size": state, "ssm_time_step_rank": rank,
        "layer_norm_rms_eps": 1e-5, "tokenizer_model": "llama",
        "token_list": ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(3, vocabulary))],
        "token_scores": [0.0] * vocabulary, "token_types": [2, 3, 3, *[1] * (vocabulary - 3)],
    }  # fmt: skip
    for name, value in told.items():
        getattr(writer, f"add_{name}")(value)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocabulary, width), "output_norm.weight": (width,)}
    mamba = {"in.weight": (2 * inner, width), "conv1d.weight": (inner, 4), "conv1d.bias": (inner,), "dt.bias": (inner,)}
    mamba |= {"x.weight": (rank + 2 * state, inner), "dt.weight": (inner, rank), "a": (inner, state), "d": (inner,)}
    mamba |= {"out.weight": (width, inner)}
    for layer in range(2):
        shapes |= {f"blk.{layer}.ssm_{name}": shape for name, shape in mamba.items()}
        shapes[f"blk.{layer}.attn_norm.weight"] = (width,)
    for name, shape in shapes.items():
        values = np.ones(shape) if "norm" in name else drawn.standard_normal(shape) / 4
        writer.add_tensor(name, (-abs(values) if name.endswith("ssm_a") else values).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_recurrent_states_are_stored_whole(
    tmp_path: Path, opened: Open, cache: PrefixCache, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_recurrent(tmp_path / "recurrent.gguf")
    model, other = opened(path, cache), prompt(512, seed=1) + prompt(600)[512:]
    answer(model, prompt(600), 1)
    evaluated = logits(model)
    answer(model, other, 1)
    assert logits(model) != evaluated, "what is before matters"
    assert [entry.key.kind for entry in cache.store.entries()] == ["state"] * 4
    for tokens, hits in ((prompt(600), 1), (prompt(530), 2)):
        restored = opened(path, cache)
        answer(restored, tokens, 1)
        assert (cache.counters.hits, cache.counters.restored_tokens) == (hits, 512 * hits)
        assert (logits(restored) == evaluated) is (tokens == prompt(600))
    assert caplog.messages == ["recurrent.gguf: states are stored whole, at block boundaries"] * 3


def test_what_llama_evaluates_anew_is_not_stored(
    tmp_path: Path, opened: Open, cache: PrefixCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A library that asks for what is behind of all sequences, not of the first, has all of it evaluated."""
    import llama_cpp

    def remove(context: Any, _: int, start: int, end: int) -> Any:
        return llama_cpp.llama_memory_seq_rm(context.memory, -1, start, end)

    path = make_recurrent(tmp_path / "recurrent.gguf")
    plain = answer(opened(path), prompt(600))
    monkeypatch.setattr("llama_cpp._internals.LlamaContext.kv_cache_seq_rm", remove)
    model = opened(path, cache)
    for _ in range(2):
        assert answer(model, prompt(600)) == plain
        model.reset()
    assert "stored whole" in caplog.text and "again" in caplog.text and len(caplog.messages) == 2
    assert not cache.store.entries()


def test_embeddings_are_refused(tiny: Path, opened: Open, cache: PrefixCache, caplog: pytest.LogCaptureFixture) -> None:
    model = opened(tiny, cache, embedding=True)
    assert cache.restore(model, prompt(300)) == 0
    cache.keep(model, model.save_state())
    assert len(caplog.messages) == 1 and "embeddings" in caplog.text
    assert cache.flush(10) and not cache.store.entries()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # llama-cpp-python takes logarithms of rows that it does not tell of
def test_probabilities_are_those_of_evaluated_tokens(tiny: Path, opened: Open, cache: PrefixCache) -> None:
    def told(model: Any, echo: bool) -> list[float]:
        settings = {"max_tokens": 4, "temperature": 0, "logprobs": 1, "echo": echo}
        answered = model.create_completion(TEXT[:400], **settings)["choices"][0]["logprobs"]["token_logprobs"]
        return [probability for probability in answered if probability is not None]

    answer(opened(tiny, cache), TEXT[:400], 1)
    plain, model = opened(tiny, logits_all=True), opened(tiny, cache, logits_all=True)
    assert told(model, echo=False) == pytest.approx(told(plain, echo=False), abs=1e-4)
    assert cache.counters.hits == 1
    echoed = told(model, echo=True)
    assert echoed == pytest.approx(told(plain, echo=True), abs=1e-4)
    assert cache.counters.hits == 1 and len(echoed) > 160


def test_a_state_that_a_user_saves_is_what_llama_itself_saves(tiny: Path, opened: Open, cache: PrefixCache) -> None:
    model = opened(tiny, cache)
    answer(model, prompt(300), 8)
    own, ours = type(model).save_state(model), model.save_state()
    assert ours.llama_state == own.llama_state and ours.scores.shape == own.scores.shape
    assert (ours.input_ids == own.input_ids).all() and (ours.n_tokens, ours.seed) == (own.n_tokens, own.seed)
    with stored(cache.store.directory.parent / "other") as other:
        other.keep(model, own)
        assert other.flush(10) and other.counters.stored_blocks == 2


def test_what_cannot_be_written_is_dropped_with_a_line(
    tiny: Path, opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with stored(tmp_path / "kv", limit="200k") as cache:
        plain = answer(opened(tiny), prompt(600))
        assert answer(opened(tiny, cache), prompt(600)) == plain
        assert cache.counters.dropped_blocks > 0 and len(caplog.messages) == 2
        assert "no room" in caplog.messages[0] and "limit" in caplog.messages[1], "one line for all of them"
    with stored(tmp_path / "kv", queue=1) as cache:
        model = opened(tiny, cache)
        assert answer(model, prompt(600, seed=1)), "one may wait, whatever its size"
        assert cache.counters.stored_blocks > 0
    caplog.clear()
    assert answer(model, prompt(600, seed=2))
    assert caplog.messages and "closed" in caplog.text


def test_a_small_disk_stores_prompts_and_one_without_room_is_reported_at_the_start(
    tiny: Path, opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = 300 * 10**6 // 4096
    status = os.statvfs_result((4096, 4096, blocks, 0, blocks, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: status)
    with stored(tmp_path / "kv", limit="200M", floor=None) as cache:
        answer(opened(tiny, cache), prompt(600))
        assert cache.store.entries() and not caplog.messages
    for settings, told in (({"limit": "500k"}, "limit is 500 KB"), ({"floor": "1G"}, "1.00 GB of the file system")):
        with stored(tmp_path / "other", **settings):
            assert len(caplog.messages) == 1 and "no room" in caplog.text and told in caplog.text
        caplog.clear()


CHILD = f"""
from __future__ import annotations
import sys
import numpy as np
from llama_cpp import Llama
from llmcache.kv.llama import PrefixCache
{inspect.getsource(prompt)}
model = Llama(sys.argv[1], n_ctx=1024, n_threads=1, n_batch=128, verbose=False)
model.set_cache(PrefixCache(sys.argv[2], floor=0))
print("ready", flush=True)
seed = int(sys.argv[3])
while True:
    model.create_completion(prompt(512) + prompt(256, seed=seed), max_tokens=4, temperature=0)
    seed += 1
"""


def test_after_a_kill_everything_restored_is_right(
    tiny: Path, opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = opened(tiny)
    with stored(tmp_path / "kv") as cache:
        for turn in range(2):
            command = [sys.executable, "-c", CHILD, str(tiny), str(tmp_path / "kv"), str(turn * 100)]
            pair = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
            for process in pair:
                assert process.stdout and process.stdout.readline() == "ready\n"
            deadline = time.monotonic() + 120
            while len(cache.store.entries()) < 4 * (turn + 1) and time.monotonic() < deadline:
                time.sleep(0.01)
            for process in pair:
                process.send_signal(signal.SIGKILL)
                process.wait()
            tokens = prompt(512) + prompt(256, seed=turn * 100)
            assert answer(opened(tiny, cache), tokens) == reused(plain, tokens, tokens, len(tokens))
        assert cache.counters.hits == 2 and not caplog.messages
    BlockStore(tmp_path / "kv", 10**9)
    assert not list((tmp_path / "kv").rglob("new-*"))


def test_what_waits_is_written_when_a_process_ends(tiny: Path, tmp_path: Path) -> None:
    code = CHILD.replace("while True:", "for _ in range(1):")
    subprocess.run([sys.executable, "-c", code, str(tiny), str(tmp_path / "kv"), "0"], cwd=ROOT, check=True, timeout=120)
    assert sorted(entry.key.kind for entry in BlockStore(tmp_path / "kv", None).entries()) == ["kv"] * 3


@pytest.mark.parametrize("available", [-1, 0, 10**12])
def test_prompts_wait_in_memory_only_while_there_is_enough(
    tiny: Path,
    opened: Open,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    available: int,
) -> None:
    spare = available
    monkeypatch.setattr("llmcache.kv.llama.cache.tightest", lambda: SimpleNamespace(spare_bytes=spare))
    with stored(tmp_path / "kv") as cache:
        model = opened(tiny, cache)
        for seed in range(3):
            assert answer(model, prompt(600, seed=seed)) == answer(opened(tiny), prompt(600, seed=seed))
        assert bool(cache.store.entries()) is (available > 0)
        assert len(caplog.messages) == (available <= 0), "one line for many prompts"
        assert ("memory is short" in caplog.text) is (available <= 0)
        spare = -1
        caplog.clear()
        assert answer(opened(tiny, cache), prompt(600)) == answer(opened(tiny), prompt(600))
        assert cache.counters.hits == 0


def test_prompts_that_wait_are_dropped_for_the_scores_of_the_next_one(
    tiny: Path, opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed: list[int] = []

    def make_room(writer: object, size_bytes: int) -> bool:
        needed.append(size_bytes)
        return True

    monkeypatch.setattr("llmcache.kv.llama.cache._Writer.make_room", make_room)
    with stored(tmp_path / "kv") as cache:
        model = opened(tiny, cache, logits_all=True)
        row = model.scores.shape[1] * 4
        answer(model, prompt(300), 100)
        assert needed[0] == (364 + 128) * row, "64 more, and a batch in llama.cpp"
        assert needed[1:] == [64 * row] * 2, "while the answer is generated"
        needed.clear()
        answer(model, prompt(300), 10)
        answer(model, prompt(400), 10)
        assert needed == [100 * row], "the rest has memory since the prompt before"


def test_the_queue_gives_up_what_came_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt that is being written stays; those behind it make room, and their memory is free."""
    from llmcache.kv.llama import cache as module

    may_write = threading.Event()
    gone: list[int] = []

    class Freed(np.ndarray[Any, Any]):
        def __del__(self) -> None:
            gone.append(len(self))

    def write(writer: Any, task: Any, key: Any, used_ns: int) -> int:
        assert may_write.wait(60)
        task.block(key)
        return 1

    def task(number: int) -> Any:
        memory = np.zeros(100 + number, np.uint8).view(Freed)
        keys = [BlockKey("0" * 32, f"{number:040x}", 0)]
        return module.Task(module._Model({}, root="0" * 40), keys, [1] * 20, 100, lambda key: Block(memory, (1,)))

    monkeypatch.setattr(module._Writer, "_write", write)
    monkeypatch.setattr(module, "tightest", lambda: SimpleNamespace(spare_bytes=100 * len(gone)))
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
        assert len(gone) == 4, "nor does it keep one that is written"


def make_wide(path: Path) -> Path:
    """A model whose keys and values are large, and its weights small: 8 KB a token with F32, and 32 KB of scores."""
    import gguf

    width, heads, size, vocabulary = 64, 8, 128, 8192
    writer, drawn = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    told = {
        "context_length": 4096, "embedding_length": width, "block_count": 1, "feed_forward_length": width,
        "head_count": heads, "head_count_kv": heads, "key_length": size, "value_length": size, "rope_dimension_count": size,
        "layer_norm_rms_eps": 1e-5, "vocab_size": vocabulary, "tokenizer_model": "llama",
        "token_list": ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(3, vocabulary))],
        "token_scores": [0.0] * vocabulary, "token_types": [2, 3, 3, *[1] * (vocabulary - 3)],
    }  # fmt: skip
    for name, value in told.items():
        getattr(writer, f"add_{name}")(value)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocabulary, width), "output_norm.weight": (width,)}
    inner = heads * size
    layer = {"attn_norm": (width,), "attn_q": (inner, width), "attn_k": (inner, width), "attn_v": (inner, width)}
    layer |= {"attn_output": (width, inner), "ffn_norm": (width,), "ffn_gate": (width, width), "ffn_up": (width, width)}
    shapes |= {f"blk.0.{name}.weight": shape for name, shape in {**layer, "ffn_down": (width, width)}.items()}
    for name, shape in shapes.items():
        values = np.ones(shape) if "norm" in name else drawn.standard_normal(shape) / 8
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
    """LLMCACHE_PREFIX_CROWD (400M 36 1000): memory of the cgroup, prompts, and tokens of each."""
    limit, count, tokens = os.environ.get("LLMCACHE_PREFIX_CROWD", "400M 36 1000").split()
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
def test_a_prompt_survives_a_kill_during_its_answer(tiny: Path, opened: Open, tmp_path: Path) -> None:
    """LLMCACHE_ANSWER_KILLS (24): how often a process is killed at a random moment of an answer of 1,000 tokens."""
    context, turns = multiprocessing.get_context("forkserver"), np.random.default_rng(0)
    context.set_forkserver_preload(["llama_cpp", __name__])
    kills, lost = int(os.environ.get("LLMCACHE_ANSWER_KILLS", "24")), 0
    with stored(tmp_path / "kv") as cache:
        model = opened(tiny, cache)
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
        assert lost <= kills // 2
        assert answer(model, prompt(600), 32) == reused(opened(tiny), prompt(600), prompt(600), 600, 32)


TEXT = "".join(f"Item {i}: the value of register {i * 7919 % 1000} is {i * i % 977}.\n" for i in range(20))


@pytest.mark.gemma
@pytest.mark.parametrize("full", [True, False], ids=["full-size", "window"])
def test_sliding_windows_are_cut_where_they_keep_all_and_else_stored_whole(
    opened: Open, cache: PrefixCache, full: bool, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"swa_full": full, "n_batch": 64, "n_ubatch": 64}
    model = opened(GEMMA, cache, **settings)
    tokens = (model.tokenize(TEXT.encode()) * 2)[:560]  # more than a window
    plain = answer(model, tokens, 8)
    if full:
        model.set_cache(None)
        plain = reused(model, tokens, tokens, 560, 8)
    assert answer(opened(GEMMA, cache, **settings), tokens, 8) == plain
    assert cache.counters.restored_tokens == (560 if full else 512)
    assert {entry.key.kind for entry in cache.store.entries()} == ({"kv", "part"} if full else {"state"})
    assert ("stored whole" in caplog.text) is not full


@pytest.fixture
def served(tiny: Path, tmp_path: Path) -> Iterator[Callable[[], tuple[subprocess.Popen[bytes], str]]]:
    """Starts `llmcache serve-llama`, and returns it with its address once it answers."""
    running: list[subprocess.Popen[bytes]] = []

    def start() -> tuple[subprocess.Popen[bytes], str]:
        port = free_port()
        words = f"--floor 0 --queue 100M -- --model {tiny} --n_ctx {CONTEXT} --n_threads 1".split()
        words += ["--host", "127.0.0.1", "--port", str(port)]
        command = [sys.executable, "-m", "llmcache", "serve-llama", str(tmp_path / "kv"), *words]
        with open(tmp_path / "log", "ab") as log:
            running.append(subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log))
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and running[-1].poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).close()
                return running[-1], f"http://127.0.0.1:{port}"
            time.sleep(0.1)
        raise AssertionError((tmp_path / "log").read_text())

    yield start
    for process in running:
        process.kill()
        process.wait()


def metrics(address: str) -> dict[str, float]:
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"{address}/metrics", timeout=10) as response:
        assert response.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
        families = text_string_to_metric_families(response.read().decode())  # type: ignore[no-untyped-call]
        return {sample.name: sample.value for family in families for sample in family.samples}


@pytest.mark.server
def test_a_server_that_was_killed_goes_on_from_the_disk(
    served: Callable[[], tuple[subprocess.Popen[bytes], str]],
) -> None:
    def ask(address: str) -> str:
        told = json.dumps({"prompt": TEXT[:500], "max_tokens": 8, "temperature": 0}).encode()
        request = urllib.request.Request(f"{address}/v1/completions", told, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            return str(json.load(response)["choices"][0]["text"])

    process, address = served()
    first = ask(address)
    deadline = time.monotonic() + 60
    while not metrics(address)["llmcache_prefix_stored_blocks_total"] and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    process, address = served()
    assert ask(address) == first
    told = metrics(address)
    assert told["llmcache_prefix_hits_total"] == 1 and told["llmcache_prefix_restored_tokens_total"] > 256
    assert told["llmcache_prefix_restored_bytes_total"] > 0 and told["llmcache_prefix_restore_seconds_total"] > 0
    assert told["llmcache_prefix_saved_seconds_total"] > 0
    process.terminate()
    assert process.wait(60) == 0, "it ends in order, and writes what waits"


@pytest.mark.server
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--model", "x", "--cache", "true"), "--cache"),
        ((), "--model FILE"),
    ],
)
def test_what_the_server_cannot_do_is_refused(tmp_path: Path, words: tuple[str, ...], told: str) -> None:
    command = [sys.executable, "-m", "llmcache", "serve-llama", str(tmp_path), "--", *words]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 2 and told in result.stderr and "Traceback" not in result.stderr
