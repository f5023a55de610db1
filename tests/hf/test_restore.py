"""A conversation continues after its process has ended."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from llmcache import files
from llmcache.errors import DataError, MissingRequirement, UsageError
from llmcache.kv.index.dci import DciIndex
from llmcache.kv.spill.raw import RawFile
from llmcache.kv.transformers import SpillCache, cache_argument, enable
from llmcache.kv.transformers.cache import SpillLayer
from tests.hf.tiny_models import Enabled, check_same, generate, longer, prompt, tiny
from tests.unit.kv_parts import small_disk
from tests.unit.store_parts import crash


@pytest.mark.parametrize(
    ("family", "ssd", "full_tokens"),
    [("llama", "file", 0), ("gemma3", "csd", 0), ("gemma3", "file", 165), ("llama", "file", 4096)],
)
def test_a_restored_conversation_continues_unchanged(
    enabled: Enabled, family: str, ssd: str, full_tokens: int, tmp_path: Path
) -> None:
    """With selections, with full attention, and with a change from full attention to selections afterwards."""
    model, path, copied = enabled(family), tmp_path / "talk.kv", tmp_path / "kept"
    options: dict[str, Any] = {"token_budget": 64, "cpu_pages": 4, "ssd": ssd, "threads": 2, "full_tokens": full_tokens}
    with SpillCache(model.config, path=path, **options) as cache:
        inputs = longer(generate(model, cache, prompt()))
        cache.save()
        length, ids = cache.get_seq_length(), cache.ids.copy()
        shutil.copytree(tmp_path, copied)
        expected = generate(model, cache, inputs)
    with SpillCache.restore(model, copied / "talk.kv", **options) as cache:
        assert cache.get_seq_length() == length
        assert (cache.ids == ids).all()
        check_same(expected, generate(model, cache, inputs))


def test_a_short_conversation_cropped_and_reordered_after_a_save(llama: Any, tmp_path: Path) -> None:
    """The saved file then has another beginning than the tensors; the second save rewrites it."""
    path = tmp_path / "talk.kv"
    with SpillCache(llama.config, path=path, full_tokens=4096, threads=2) as cache:
        generate(llama, cache, prompt())
        cache.save()
        cache.crop(100)
        cache.reorder_cache(torch.tensor([1, 1]))
        with torch.no_grad():
            expected = llama(input_ids=torch.full((2, 30), 7), **cache_argument(cache)).logits
        ids = cache.ids.copy()
        assert (ids[0] == ids[1]).all() and torch.equal(expected[0], expected[1])
        cache.save()
    with SpillCache.restore(llama, path, full_tokens=4096, threads=2) as cache:
        assert (cache.ids == ids).all()
        cache.crop(100)
        with torch.no_grad():
            got = llama(input_ids=torch.full((2, 30), 7), **cache_argument(cache)).logits
    assert torch.equal(expected, got)


def test_trees_of_keys_are_saved_and_restored(llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"policy": "icecache", "token_budget": 64, "scorer": "dci", "threads": 2}
    with SpillCache(llama.config, path=tmp_path / "talk.kv", **options) as cache:
        inputs = longer(generate(llama, cache, prompt()))
        cache.save()
        shutil.copytree(tmp_path, tmp_path / "kept")
        expected = generate(llama, cache, inputs)
    monkeypatch.setattr(DciIndex, "build", None)  # a tree that is built again fails the test
    with SpillCache.restore(llama, tmp_path / "kept" / "talk.kv", **options) as cache:
        check_same(expected, generate(llama, cache, inputs))


def test_files_of_a_killed_process_are_removed(llama: Any, tmp_path: Path) -> None:
    """The next process with its own file in the directory removes them; files in use and files with user's names stay."""
    named = tmp_path / "llmcache-mine.kv"
    named.touch()
    killed, alive, last = (SpillCache(llama.config, path=tmp_path, threads=1) for _ in range(3))
    for cache in (killed, alive):
        generate(llama, cache, prompt(40, 0), max_new_tokens=1)
        cache.reorder_cache(torch.tensor([1, 0]))
    assert len(list(tmp_path.glob("tables-llmcache-*.kv"))) == 2
    assert alive.store.config.path is not None
    files_left = {path for path in tmp_path.iterdir() if alive.store.config.path.name not in path.name}
    crash(killed.store)
    generate(llama, last, prompt(40, 0), max_new_tokens=1)
    files_now = set(tmp_path.iterdir())
    assert files_now & files_left == {named} and {cache.store.config.path for cache in (alive, last)} < files_now
    alive.reorder_cache(torch.tensor([1, 0]))
    for cache in (alive, last):
        cache.close()
    assert set(tmp_path.iterdir()) == {named}
    killed.conversation.close()


def _state(cache: SpillCache) -> tuple[Any, ...]:
    """Return the contents of a cache with sliding layers, as bytes."""
    store = cache.store
    everything = store.everything
    found = [store.gather(layer, everything) for layer in range(store.shape.layers)]
    spilled = [(one.keys.tobytes(), one.values.tobytes()) for one in found]
    sliding = [
        (layer.keys.numpy().tobytes(), layer.get_seq_length()) for layer in cache.layers if not isinstance(layer, SpillLayer)
    ]
    return cache.ids.tobytes(), store.positions.tobytes(), spilled, sliding


@pytest.mark.parametrize("more", [2, 20])
def test_an_interrupted_save_leaves_the_previous_one(
    enabled: Enabled, more: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may be killed anywhere between two saves, and before each file change of the second."""
    model, copied, own = enabled("gemma3"), tmp_path / "kept", tmp_path / "own"
    own.mkdir()
    options: dict[str, Any] = {"token_budget": 64, "cpu_pages": 4, "threads": 1}
    copies: dict[int, Path] = {}

    def with_copy(call: Any) -> Any:
        def copying(*arguments: Any, **named: Any) -> Any:
            copy()
            return call(*arguments, **named)

        return copying

    def copy() -> None:
        content = tuple((path.name, path.read_bytes()) for path in sorted(own.iterdir()))
        if hash(content) not in copies:
            copies[hash(content)] = target = copied / str(len(copies))
            shutil.copytree(own, target)

    with SpillCache(model.config, path=own / "talk.kv", **options) as cache:
        ids = generate(model, cache, prompt(40, 5), max_new_tokens=2).sequences
        cache.save()
        states = [_state(cache)]
        with monkeypatch.context() as patched:
            patched.setattr(RawFile, "write", with_copy(RawFile.write))
            for name in ("rename", "remove"):
                for module in ("llmcache.files", *(["llmcache.kv.transformers.sidecar"] if name == "remove" else [])):
                    patched.setattr(f"{module}.{name}", with_copy(getattr(files, name)))
            generate(model, cache, {"input_ids": ids}, max_new_tokens=more)
            cache.save()
            states.append(_state(cache))
            copy()
    assert len(copies) > 12
    found = []
    for path in copies.values():
        with SpillCache.restore(model, path / "talk.kv", **options) as cache:
            found.append(states.index(_state(cache)))
    assert found == sorted(found) and set(found) == {0, 1}
    assert len(list(own.glob("sliding-*-talk.kv"))) == 1


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_conversation_that_was_not_saved(enabled: Enabled, family: str, tmp_path: Path) -> None:
    model, path = enabled(family), tmp_path / "talk.kv"
    with SpillCache(model.config, path=path, threads=2) as cache:
        generated = generate(model, cache, prompt())
    if family == "gemma3":
        with pytest.raises(DataError, match="sliding layers are missing"):
            SpillCache.restore(model, path)
        return
    with SpillCache.restore(model, path) as cache:
        length = cache.get_seq_length()
        assert length == (generated.sequences.shape[1] - 1) // 16 * 16
        assert (cache.ids == generated.sequences[:, :length].numpy()).all()


def test_temporary_files_cannot_be_saved_and_other_models_not_restored(llama: Any, tmp_path: Path) -> None:
    for directory in (tmp_path, None):
        with SpillCache(llama.config, path=directory) as cache:
            generate(llama, cache, prompt())
            with pytest.raises(UsageError, match="path: the cache has only a temporary"):
                cache.save()
    path = tmp_path / "talk.kv"
    assert not list(tmp_path.iterdir())
    with SpillCache(llama.config, path=path) as cache:
        generate(llama, cache, prompt())
        cache.save()
    with pytest.raises(DataError, match=r"talk\.kv"):
        SpillCache.restore(tiny("qwen2"), path)
    with pytest.raises(DataError, match=r"talk\.kv"):
        SpillCache.restore(tiny("llama", "bfloat16"), path)
    with pytest.raises(UsageError, match="path: "):
        SpillCache.restore(tiny("llama"), tmp_path)


# The identity of a model

CHANGES: dict[str, Callable[[Any], object]] = {
    "a layer of keys is scaled": lambda model: model.model.layers[1].self_attn.k_proj.weight.mul_(1.5),
    "one weight of the last layer": lambda model: model.model.layers[-1].mlp.down_proj.weight[3].mul_(1.001),
    "one element of the embeddings": lambda model: model.model.embed_tokens.weight[40, 7:8].add_(1e-3),
    "the rotary frequencies": lambda model: model.model.rotary_emb.inv_freq.mul_(0.5),
    "a setting": lambda model: setattr(model.config, "rms_norm_eps", 1e-3),
}


def saved_model(path: Path, change: Callable[[Any], object] = lambda model: None) -> Any:
    """Write the tiny Llama to `path`, load it, apply `change`, and return it enabled."""
    tiny("llama").save_pretrained(path)
    model = transformers.LlamaForCausalLM.from_pretrained(path).eval()
    with torch.no_grad():
        change(model)
    return enable(model)


def test_the_same_weights_in_another_directory_are_the_same_model(tmp_path: Path) -> None:
    path = tmp_path / "talk.kv"
    one, other = (saved_model(tmp_path / name) for name in ("here", "there"))
    with SpillCache(one, path=path) as cache:  # a model works like its configuration
        generate(one, cache, prompt())
        cache.save()
        ids = cache.ids.copy()
    with SpillCache.restore(other, path) as cache:
        assert (cache.ids == ids).all()


@pytest.mark.parametrize("change", CHANGES)
def test_one_changed_weight_or_setting_is_another_model(tmp_path: Path, change: str) -> None:
    path, model = tmp_path / "talk.kv", saved_model(tmp_path / "model")
    with SpillCache(model, path=path) as cache:
        generate(model, cache, prompt())
        cache.save()
    with pytest.raises(DataError, match="spill file of another model"):
        SpillCache.restore(saved_model(tmp_path / "model", CHANGES[change]), path)
    with torch.no_grad():
        CHANGES[change](model)
    with pytest.raises(DataError, match="spill file of another model"):
        SpillCache.restore(model, path)
    with SpillCache(model, path=tmp_path / "next.kv") as cache:  # the identity includes the change
        generate(model, cache, prompt())
        cache.save()
    with SpillCache.restore(model, tmp_path / "next.kv") as cache:
        assert cache.get_seq_length()


def test_a_model_with_unknown_weights_cannot_be_saved(tmp_path: Path) -> None:
    class Packed(torch.Tensor):  # type: ignore[misc]  # torch has no types here
        """Weights of a quantization library."""

    model, path = saved_model(tmp_path / "model"), tmp_path / "talk.kv"
    weight = model.model.norm.weight
    model.model.norm.weight = torch.nn.Parameter(weight.detach().as_subclass(Packed), requires_grad=False)
    with SpillCache(model, path=path) as cache:
        generate(model, cache, prompt())
        with pytest.raises(UsageError, match=r"model: the weight norm.weight is a Packed"):
            cache.save()
    model.model.norm.weight = weight
    with pytest.raises(DataError, match="spill file of another model"):
        SpillCache.restore(model, path)


@pytest.mark.parametrize("named", [False, True])
def test_the_end_of_a_forked_child_does_not_remove_files(llama: Any, tmp_path: Path, named: bool) -> None:
    with SpillCache(llama, path=tmp_path / "talk.kv" if named else tmp_path, full_tokens=0, threads=1) as cache:
        inputs = longer(generate(llama, cache, prompt()))
        before = sorted(os.listdir(tmp_path))
        child = os.fork()
        if not child:
            try:
                cache.close()
                cache._finalizer()
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert before and sorted(os.listdir(tmp_path)) == before
        generate(llama, cache, inputs)


# A full disk gives an error and no partial files, and the conversation can continue

CASES = [("llama", "hillinfer", {"ssd": "csd"}), ("gemma3", "hillinfer", {}), ("llama", "icecache", {"scorer": "dci"})]


def fill(disk: Path) -> Path:
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(1 << 16))
    return ballast


@pytest.mark.parametrize(("family", "policy", "options"), CASES)
def test_a_full_disk_during_a_save(
    enabled: Enabled, tmp_path: Path, family: str, policy: str, options: dict[str, Any]
) -> None:
    model, options = enabled(family), {"token_budget": 64, "threads": 2, **options}
    with small_disk(tmp_path, "30m") as disk:
        with SpillCache(model.config, policy, path=disk / "talk.kv", **options) as cache:
            inputs = longer(generate(model, cache, prompt()))
            before = sorted(os.listdir(disk))
            ballast = fill(disk)
            for _ in range(2):
                with pytest.raises(MissingRequirement, match=r"talk\.kv") as caught:
                    cache.save()
                assert caught.value.hint and caught.value.exit_code == 3
            ballast.unlink()
            assert sorted(os.listdir(disk)) == before, "nothing is left behind"
            cache.save()
            length, ids = cache.get_seq_length(), cache.ids.copy()
        with SpillCache.restore(model, disk / "talk.kv", policy, **options) as cache:
            assert cache.get_seq_length() == length and (cache.ids == ids).all()
            generate(model, cache, inputs)


@pytest.mark.parametrize("full_tokens", [0, 165])
def test_a_full_disk_while_generating(llama: Any, tmp_path: Path, full_tokens: int) -> None:
    """The step is undone, and after space is freed the conversation continues unchanged.

    The error may occur while the store takes over a context that was attended to fully.
    """
    with small_disk(tmp_path, "30m") as disk:
        with SpillCache(llama.config, path=disk / "talk.kv", token_budget=64, threads=2, full_tokens=full_tokens) as cache:
            inputs = longer(generate(llama, cache, prompt()), 1100)
            ballast, ids = fill(disk), cache.ids.copy()
            with pytest.raises(MissingRequirement, match="no space left"):
                generate(llama, cache, inputs)
            ballast.unlink()
            cache.save()
        with SpillCache.restore(llama, disk / "talk.kv", token_budget=64, threads=2, full_tokens=full_tokens) as cache:
            assert (cache.ids == ids).all()
            generate(llama, cache, inputs)
