"""llama.cpp continues restored prompts as if it had evaluated them, and evaluates missing or damaged prompts."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llmcache.kv.prefix.state import StateLayout, Uncut
from llmcache.kv.prefix.store import Block, BlockStore
from tests.conftest import GEMMA
from tests.e2e.test_proxy import free_port
from tools.make_model import main as generate

if TYPE_CHECKING:
    from llmcache.kv.llama import PrefixCache

ROOT = Path(__file__).resolve().parents[2]
Q8_0 = 8
CONTEXT = 1024

pytestmark = pytest.mark.llama

Open = Callable[..., Any]


def make_model(path: Path, *more: str) -> Path:
    generate([str(path), "--size", "3M", *more])
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture
def open_model() -> Iterator[Open]:
    """Return a function that opens models with one thread; close them at the end."""
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
    with stored(tmp_path / "kv") as prefix_cache:
        yield prefix_cache


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(300, 900, tokens).tolist()  # type: ignore[no-any-return]


def answer(model: Any, tokens: list[int] | str, length: int = 16) -> str:
    """Return the greedy continuation; its blocks are stored when this returns."""
    text = model.create_completion(tokens, max_tokens=length, temperature=0)["choices"][0]["text"]
    if model.cache is not None:
        assert model.cache.flush(60)
    return text  # type: ignore[no-any-return]


def reused(model: Any, wrote: list[int], tokens: list[int], common: int, length: int = 16) -> str:
    """Return the greedy continuation of `tokens` by a model that has evaluated `wrote` and keeps its first `common` tokens.

    The logits of a token depend on how many tokens llama.cpp evaluates at once, so this starts from the same state.
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
def test_a_restored_prompt_continues_like_an_evaluated_one(
    tiny: Path, open_model: Open, cache: PrefixCache, settings: dict[str, Any]
) -> None:
    tokens = prompt(600)
    live = open_model(tiny, cache, **settings)
    assert answer(live, tokens, 64) == answer(open_model(tiny, **settings), tokens, 64)
    assert cache.counters.stored_blocks == 4 and cache.counters.hits == 0, "the last one again, with the answer"
    assert len(cache.store.entries()) == 3
    restored = open_model(tiny, cache, **settings)
    assert answer(restored, tokens, 64) == reused(open_model(tiny, **settings), tokens, tokens, 600, 64)
    assert (cache.counters.hits, cache.counters.restored_tokens) == (1, 600)
    again = open_model(tiny, cache, **settings)
    for model in (live, again):  # one model has the prompt and evaluates its last token again, the other restores it first
        answer(model, tokens, 1)
    assert cache.counters.hits == 2
    assert logits(live) == logits(again)


def test_a_restored_prompt_has_the_same_answer_as_the_first_time(tiny: Path, open_model: Open, cache: PrefixCache) -> None:
    """Also a conversation, whose later turns go on from answers; one turn is stored with its answer only."""
    live, tokens = open_model(tiny, cache), prompt(600)
    for turn, more in enumerate((100, 20, 300)):
        answer(live, tokens, 1)
        first = logits(live)
        text = answer(live, tokens, 24)
        restored = open_model(tiny, cache)
        answer(restored, tokens, 1)
        assert cache.counters.hits == 1 + 2 * turn and logits(restored) == first
        assert answer(open_model(tiny, cache), tokens, 24) == text
        tokens = live.input_ids[: live.n_tokens].tolist() + prompt(more, seed=turn + 1)


@pytest.mark.parametrize("common", [513, 300, 17])
def test_a_different_prompt_restores_the_common_prefix(
    tiny: Path, open_model: Open, cache: PrefixCache, common: int
) -> None:
    answer(open_model(tiny, cache), prompt(600), 1)
    other = prompt(600)[:common] + prompt(50, seed=1)
    restored = common if common != 513 else 512  # at least 16 tokens of a block
    assert answer(open_model(tiny, cache), other, 64) == reused(open_model(tiny), prompt(600), other, restored, 64)
    assert cache.counters.restored_tokens == restored
    assert cache.restore(open_model(tiny, n_ctx=512), prompt(600)) == 512, "as much as fits into the context"


def test_tokens_that_the_model_still_has_are_not_restored(tiny: Path, open_model: Open, cache: PrefixCache) -> None:
    model = open_model(tiny, cache)
    answer(model, prompt(600), 1)
    answer(model, prompt(600) + prompt(10, seed=1), 1)
    assert (cache.counters.lookups, cache.counters.hits) == (2, 0)
    answer(model, prompt(300, seed=2), 1)
    answer(model, prompt(600) + prompt(10, seed=3), 1)
    assert cache.counters.hits == 1


def test_prompts_share_their_blocks(tiny: Path, open_model: Open, cache: PrefixCache) -> None:
    model = open_model(tiny, cache)
    for seed in range(1, 5):
        answer(model, prompt(512) + prompt(100, seed=seed), 4)
    assert sorted(entry.key.kind for entry in cache.store.entries()) == ["kv", "kv", *["part"] * 4]
    for seed in range(1, 5):
        answer(open_model(tiny, cache), prompt(512) + prompt(100, seed=seed), 1)
        assert cache.counters.restored_tokens == 612 * seed
    for seed in range(1, 5):
        answer(model, prompt(512) + prompt(256, seed=seed), 4)
    assert sorted(entry.key.kind for entry in cache.store.entries()) == ["kv"] * 6 + ["part"] * 4


def test_other_models_and_other_settings_have_other_blocks(
    tiny: Path, tmp_path: Path, open_model: Open, cache: PrefixCache
) -> None:
    other = make_model(tmp_path / "other" / tiny.name, "--seed", "1")
    assert other.stat().st_size == tiny.stat().st_size
    plain = answer(open_model(other), prompt(300), 16)
    answer(open_model(tiny, cache), prompt(300), 16)
    assert answer(open_model(other, cache), prompt(300), 16) == plain
    assert cache.counters.hits == 0 and len(cache.store.models()) == 2
    for settings in ({"rope_freq_base": 5e4}, {"rope_freq_scale": 0.5}, {"flash_attn": True}, {"type_k": Q8_0}):
        plain = answer(open_model(tiny, **settings), prompt(300))
        assert answer(open_model(tiny, cache, **settings), prompt(300)) == plain
        assert cache.counters.hits == 0, settings
    copy = tmp_path / "copied.gguf"
    copy.write_bytes(tiny.read_bytes())
    answer(open_model(copy, cache), prompt(300), 16)
    assert cache.counters.hits == 1, "a copy is the same model"


@pytest.mark.parametrize("index", [0, 2])
def test_restoring_stops_at_a_damaged_block(
    tiny: Path, open_model: Open, cache: PrefixCache, index: int, caplog: pytest.LogCaptureFixture
) -> None:
    plain = answer(open_model(tiny), prompt(600))
    answer(open_model(tiny, cache), prompt(600), 1)
    (entry,) = (entry for entry in cache.store.entries() if entry.key.index == index)
    with open(cache.store.directory / entry.key.file, "r+b") as stream:
        stream.seek(-1000, os.SEEK_END)
        stream.write(b"wrong")
    assert answer(open_model(tiny, cache), prompt(600)) == plain
    assert cache.counters.restored_tokens == 256 * index
    assert len(caplog.messages) == 1 and "removed" in caplog.text
    assert answer(open_model(tiny, cache), prompt(600)) == reused(open_model(tiny), prompt(600), prompt(600), 600)
    assert cache.counters.restored_tokens == 256 * index + 600, "the block was stored again"


def test_a_state_rejected_by_llama_cpp_is_dropped(
    tiny: Path, open_model: Open, cache: PrefixCache, caplog: pytest.LogCaptureFixture
) -> None:
    plain = answer(open_model(tiny), prompt(600))
    answer(open_model(tiny, cache), prompt(600), 1)
    for entry in cache.store.entries():
        block = cache.store.read(entry.key)
        assert block and block.layout
        layout: Any = block.layout.to_json()
        layout[0][1][0] = (Q8_0, *layout[0][1][0][1:])  # type of the first keys
        cache.store.write(entry.key, Block(block.payload, block.tokens, StateLayout.from_json(layout)))
    assert answer(open_model(tiny, cache), prompt(600)) == plain
    assert cache.counters.hits == 0 and "rejected" in caplog.text
    answer(open_model(tiny, cache), prompt(600))
    assert cache.counters.hits == 1


def test_blocks_of_another_layout_or_other_tokens_are_replaced(tiny: Path, open_model: Open, cache: PrefixCache) -> None:
    """The blocks have valid checksums, as from another build of the library or a hostile server."""
    plain = reused(open_model(tiny), prompt(600), prompt(600), 600)

    answer(open_model(tiny, cache), prompt(600), 1)
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
        answer(open_model(tiny, cache), prompt(600), 1)
        before = cache.counters.restored_tokens
        assert answer(open_model(tiny, cache), prompt(600)) == plain
        assert cache.counters.restored_tokens - before == 600, (change, index)


def test_a_link_to_a_block_after_other_tokens_is_not_followed(tiny: Path, open_model: Open, cache: PrefixCache) -> None:
    one, two = prompt(256) + prompt(100, seed=2), prompt(256, seed=1) + prompt(100, seed=2)
    plain = reused(open_model(tiny), one, one, 256)
    for tokens in (one, two):
        answer(open_model(tiny, cache), tokens, 1)
    first, second = (entry.key for entry in cache.store.entries() if entry.key.kind == "part")
    for path in (cache.store.directory / first.model).glob("*.next"):
        target = os.path.basename((first if path.readlink().name == os.path.basename(second.file) else second).file)
        path.unlink()
        path.symlink_to(target)
    assert answer(open_model(tiny, cache), one) == plain
    assert cache.counters.restored_tokens == 256


@pytest.mark.parametrize(("deleted", "message"), [(False, "replaced"), (True, "cannot be read")])
def test_prompts_of_a_replaced_or_deleted_model_are_not_stored(
    tiny: Path,
    tmp_path: Path,
    open_model: Open,
    cache: PrefixCache,
    caplog: pytest.LogCaptureFixture,
    deleted: bool,
    message: str,
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny.read_bytes())
    model = open_model(path, cache)
    if deleted:
        path.unlink()
    else:
        make_model(tmp_path / "other.gguf", "--seed", "1").replace(path)
    assert answer(model, prompt(300)) == answer(open_model(tiny), prompt(300))
    assert len(caplog.messages) == 1 and message in caplog.text and not cache.store.entries()


def test_states_that_cannot_be_cut_are_stored_whole(
    tiny: Path, open_model: Open, cache: PrefixCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def read_state(*_: object) -> None:
        raise Uncut("of another library")

    monkeypatch.setattr("llmcache.kv.llama.cache.read_state", read_state)
    plain = answer(open_model(tiny), prompt(600))
    model = open_model(tiny, cache)
    assert answer(model, prompt(600)) == plain
    assert "stored whole, at block boundaries: of another library" in caplog.text and not cache.store.entries()
    answer(model, prompt(300, seed=1))
    assert answer(model, prompt(900)) == answer(open_model(tiny), prompt(900))
    kinds = sorted((entry.key.kind, entry.key.index) for entry in cache.store.entries())
    assert kinds == [("state", 0), ("state", 0), ("state", 1), ("state", 2)], (
        "one state of the second prompt, three of the third"
    )


def write_model(path: Path, kind: str, metadata: dict[str, Any], layer: dict[str, tuple[int, ...]]) -> Path:
    """Write a GGUF file with random weights; `layer` has the shapes of the weights of each layer by name."""
    import gguf

    writer, drawn = gguf.GGUFWriter(path, kind), np.random.default_rng(0)
    vocabulary, width = metadata.pop("vocabulary"), metadata["embedding_length"]
    metadata |= {
        "context_length": 4096, "layer_norm_rms_eps": 1e-5, "tokenizer_model": "llama",
        "token_list": ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(3, vocabulary))],
        "token_scores": [0.0] * vocabulary, "token_types": [2, 3, 3, *[1] * (vocabulary - 3)],
    }  # fmt: skip
    for name, value in metadata.items():
        getattr(writer, f"add_{name}")(value)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocabulary, width), "output_norm.weight": (width,)}
    for number in range(metadata["block_count"]):
        shapes |= {f"blk.{number}.{name}": shape for name, shape in layer.items()}
    for name, shape in shapes.items():
        values = np.ones(shape) if "norm" in name else drawn.standard_normal(shape) / 4
        writer.add_tensor(name, (-abs(values) if name.endswith("ssm_a") else values).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def make_recurrent(path: Path) -> Path:
    """Write the smallest Mamba model that llama.cpp loads."""
    width, inner, state, rank = 64, 128, 16, 4
    metadata = {
        "vocabulary": 1024, "embedding_length": width, "block_count": 2, "feed_forward_length": 0, "head_count": 0,
        "ssm_conv_kernel": 4, "ssm_inner_size": inner, "ssm_state_size": state, "ssm_time_step_rank": rank,
    }  # fmt: skip
    layer = {
        "attn_norm.weight": (width,), "ssm_in.weight": (2 * inner, width), "ssm_conv1d.weight": (inner, 4),
        "ssm_conv1d.bias": (inner,), "ssm_dt.bias": (inner,), "ssm_x.weight": (rank + 2 * state, inner),
        "ssm_dt.weight": (inner, rank), "ssm_a": (inner, state), "ssm_d": (inner,), "ssm_out.weight": (width, inner),
    }  # fmt: skip
    return write_model(path, "mamba", metadata, layer)


def test_recurrent_states_are_stored_whole(
    tmp_path: Path, open_model: Open, cache: PrefixCache, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_recurrent(tmp_path / "recurrent.gguf")
    model, other = open_model(path, cache), prompt(512, seed=1) + prompt(600)[512:]
    answer(model, prompt(600), 1)
    evaluated = logits(model)
    answer(model, other, 1)
    assert logits(model) != evaluated, "the beginning of the prompt matters"
    assert [entry.key.kind for entry in cache.store.entries()] == ["state"] * 4
    for tokens, hits in ((prompt(600), 1), (prompt(530), 2)):
        restored = open_model(path, cache)
        answer(restored, tokens, 1)
        assert (cache.counters.hits, cache.counters.restored_tokens) == (hits, 512 * hits)
        assert (logits(restored) == evaluated) is (tokens == prompt(600))
    assert caplog.messages == ["recurrent.gguf: states are stored whole, at block boundaries"] * 3


def test_prompts_that_llama_always_evaluates_again_are_not_stored(
    tmp_path: Path, open_model: Open, cache: PrefixCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A library that removes the tail from all sequences, not only the first, must evaluate all of it again."""
    import llama_cpp

    def remove(context: Any, _: int, start: int, end: int) -> Any:
        return llama_cpp.llama_memory_seq_rm(context.memory, -1, start, end)

    path = make_recurrent(tmp_path / "recurrent.gguf")
    plain = answer(open_model(path), prompt(600))
    monkeypatch.setattr("llama_cpp._internals.LlamaContext.kv_cache_seq_rm", remove)
    model = open_model(path, cache)
    for _ in range(2):
        assert answer(model, prompt(600)) == plain
        model.reset()
    assert "stored whole" in caplog.text and "again" in caplog.text and len(caplog.messages) == 2
    assert not cache.store.entries()


def test_embeddings_are_refused(tiny: Path, open_model: Open, cache: PrefixCache, caplog: pytest.LogCaptureFixture) -> None:
    model = open_model(tiny, cache, embedding=True)
    assert cache.restore(model, prompt(300)) == 0
    cache.keep(model, model.save_state())
    assert len(caplog.messages) == 1 and "embeddings" in caplog.text
    assert cache.flush(10) and not cache.store.entries()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # llama-cpp-python takes the logarithm of rows that it does not report
def test_probabilities_are_those_of_evaluated_tokens(tiny: Path, open_model: Open, cache: PrefixCache) -> None:
    def probabilities(model: Any, echo: bool) -> list[float]:
        settings = {"max_tokens": 4, "temperature": 0, "logprobs": 1, "echo": echo}
        answered = model.create_completion(TEXT[:400], **settings)["choices"][0]["logprobs"]["token_logprobs"]
        return [probability for probability in answered if probability is not None]

    answer(open_model(tiny, cache), TEXT[:400], 1)
    plain, model = open_model(tiny, logits_all=True), open_model(tiny, cache, logits_all=True)
    assert probabilities(model, echo=False) == pytest.approx(probabilities(plain, echo=False), abs=1e-4)
    assert cache.counters.hits == 1
    echoed = probabilities(model, echo=True)
    assert echoed == pytest.approx(probabilities(plain, echo=True), abs=1e-4)
    assert cache.counters.hits == 1 and len(echoed) > 160


def test_a_state_saved_by_a_user_equals_that_of_llama(tiny: Path, open_model: Open, cache: PrefixCache) -> None:
    model = open_model(tiny, cache)
    answer(model, prompt(300), 8)
    own, ours = type(model).save_state(model), model.save_state()
    assert ours.llama_state == own.llama_state and ours.scores.shape == own.scores.shape
    assert (ours.input_ids == own.input_ids).all() and (ours.n_tokens, ours.seed) == (own.n_tokens, own.seed)
    with stored(cache.store.directory.parent / "other") as other:
        other.keep(model, own)
        assert other.flush(10) and other.counters.stored_blocks == 2


def test_blocks_that_cannot_be_written_are_dropped_with_a_message(
    tiny: Path, open_model: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with stored(tmp_path / "kv", limit="200k") as cache:
        plain = answer(open_model(tiny), prompt(600))
        assert answer(open_model(tiny, cache), prompt(600)) == plain
        assert cache.counters.dropped_blocks > 0 and len(caplog.messages) == 2
        assert "no space" in caplog.messages[0] and "limit" in caplog.messages[1], "one line for all of them"
    with stored(tmp_path / "kv", queue=1) as cache:
        model = open_model(tiny, cache)
        assert answer(model, prompt(600, seed=1)), "one block may wait, whatever its size"
        assert cache.counters.stored_blocks > 0
    caplog.clear()
    assert answer(model, prompt(600, seed=2))
    assert caplog.messages and "closed" in caplog.text


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


def test_the_queue_is_written_when_a_process_ends(tiny: Path, tmp_path: Path) -> None:
    code = CHILD.replace("while True:", "for _ in range(1):")
    subprocess.run([sys.executable, "-c", code, str(tiny), str(tmp_path / "kv"), "0"], cwd=ROOT, check=True, timeout=120)
    assert sorted(entry.key.kind for entry in BlockStore(tmp_path / "kv", None).entries()) == ["kv"] * 3


TEXT = "".join(f"Item {i}: the value of register {i * 7919 % 1000} is {i * i % 977}.\n" for i in range(20))


@pytest.mark.gemma
@pytest.mark.parametrize("full", [True, False], ids=["full-size", "window"])
def test_sliding_windows_are_stored_whole_unless_they_keep_all(
    open_model: Open, cache: PrefixCache, full: bool, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"swa_full": full, "n_batch": 64, "n_ubatch": 64}
    model = open_model(GEMMA, cache, **settings)
    tokens = (model.tokenize(TEXT.encode()) * 2)[:560]  # more than a window
    plain = answer(model, tokens, 8)
    if full:
        model.set_cache(None)
        plain = reused(model, tokens, tokens, 560, 8)
    assert answer(open_model(GEMMA, cache, **settings), tokens, 8) == plain
    assert cache.counters.restored_tokens == (560 if full else 512)
    assert {entry.key.kind for entry in cache.store.entries()} == ({"kv", "part"} if full else {"state"})
    assert ("stored whole" in caplog.text) is not full


@pytest.fixture
def served(tiny: Path, tmp_path: Path) -> Iterator[Callable[[], tuple[subprocess.Popen[bytes], str]]]:
    """Return a function that starts `llmcache serve-llama` and returns its process and address once it answers."""
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
def test_a_killed_server_restores_from_the_disk(
    served: Callable[[], tuple[subprocess.Popen[bytes], str]],
) -> None:
    def ask(address: str) -> str:
        body = json.dumps({"prompt": TEXT[:500], "max_tokens": 8, "temperature": 0}).encode()
        request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
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
    values = metrics(address)
    assert values["llmcache_prefix_hits_total"] == 1 and values["llmcache_prefix_restored_tokens_total"] > 256
    assert values["llmcache_prefix_restored_bytes_total"] > 0 and values["llmcache_prefix_restore_seconds_total"] > 0
    assert values["llmcache_prefix_saved_seconds_total"] > 0
    process.terminate()
    assert process.wait(60) == 0, "it exits in order after writing the queue"


@pytest.mark.server
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "x", "--cache", "true"), "--cache"),
        ((), "--model FILE"),
    ],
)
def test_unsupported_options_of_the_server_are_refused(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    command = [sys.executable, "-m", "llmcache", "serve-llama", str(tmp_path), "--", *words]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr
