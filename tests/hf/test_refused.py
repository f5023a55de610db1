"""A SpillCache refuses unsupported models and settings before or in the first step, by name, and never answers wrongly."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from llmcache.errors import DataError, MissingRequirement, UsageError
from llmcache.kv.transformers import SpillCache, cache_argument, disable, enable
from tests.hf.tiny_models import Enabled, check_same, generate, prompt, single, tiny


def config(name: str, **options: Any) -> Any:
    return getattr(transformers, f"{name}Config")(num_hidden_layers=2, **options)


def hybrid() -> Any:
    found = config("Llama")
    found.layer_types = ["hybrid", "full_attention"]
    return found


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"policy": "best"}, "policy"),
        ({"alpha": 0.0}, "alpha"),
        ({"alpha": 0.5, "token_budget": 100}, "token_budget"),
        ({"colour": "blue"}, "colour"),
        ({"policy": "hillinfer", "beta": 2.0}, "beta"),  # the pool's size is set by cpu_pages
        ({"policy": "hillinfer", "cpu_pages": 2, "path": "x.kv"}, "cpu_pages"),
        ({"cpu_pages": 20}, "cpu_pages"),
        ({"gpu_pages": 0}, "gpu_pages"),
        ({"gpu_pages": 9, "lookahead": True}, "gpu_pages"),
        ({"full_tokens": -1}, "full_tokens"),
        ({"policy": "h2o", "full_tokens": 100}, "full_tokens"),
        ({"token_budget": "1024"}, "token_budget"),
        ({"alpha": "0.5"}, "alpha"),
        ({"cpu_pages": "9"}, "cpu_pages"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(UsageError, match=f"^{field}: "):
        SpillCache(tiny("llama").config, **options)


@pytest.mark.parametrize(
    ("model", "field"),
    [
        (config("T5", num_layers=2), "is_encoder_decoder"),
        (config("DeepseekV3"), "kv_lora_rank"),
        (config("Mistral", sliding_window=64), "sliding_window"),
        (hybrid(), "layer_types"),
    ],
    ids=["encoder", "latent", "all sliding", "hybrid"],
)
def test_unsupported_models_are_refused(model: Any, field: str) -> None:
    with pytest.raises(UsageError, match=f"^{field}: "):
        SpillCache(model)


def family(name: str) -> Any:
    sizes = {"num_hidden_layers": 4, "vocab_size": 97, "hidden_size": 64, "num_attention_heads": 4}
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes)).eval()


def test_a_model_whose_attention_cannot_be_replaced_stays_unchanged() -> None:
    model = family("Bloom")
    expected = model(**single()).logits
    with pytest.raises(UsageError, match="model: the attention of BloomForCausalLM cannot be replaced"):
        enable(model)
    assert torch.equal(model(**single()).logits, expected)


def test_a_cache_for_another_object_is_refused() -> None:
    with pytest.raises(UsageError, match="config: a dict, not the configuration"):
        SpillCache({})


def test_two_threads_are_refused(llama: Any) -> None:
    with SpillCache(llama, "full") as cache:

        def other(*arguments: Any) -> None:
            hook.remove()
            thread = threading.Thread(target=lambda: llama(input_ids=torch.tensor([[5]]), **cache_argument(cache)))
            thread.start()
            thread.join()

        llama(**single(), **cache_argument(cache))
        hook = llama.model.layers[1].mlp.register_forward_pre_hook(other)
        with pytest.raises(UsageError, match="two threads"):
            llama(input_ids=torch.tensor([[5]]), **cache_argument(cache))


def test_a_model_that_is_not_enabled_is_refused() -> None:
    model = tiny("llama")
    with SpillCache(model.config, "full") as cache, pytest.raises(UsageError, match="attention") as error:
        generate(model, cache, single())
    assert "enable(model)" in str(error.value.hint)


def test_another_batch_without_a_reset_is_refused(llama: Any) -> None:
    with SpillCache(llama.config, "full") as cache:
        generate(llama, cache, single())
        with pytest.raises(UsageError, match="batch: must be the 1 sequences of the cache, not 2"):
            llama(input_ids=prompt()["input_ids"], **cache_argument(cache))
        cache.reset()
        assert cache.get_seq_length() == 0
        llama(input_ids=prompt()["input_ids"], **cache_argument(cache))
        assert cache.get_seq_length() == 150


def stopped_step(model: Any, cache: Any) -> None:
    """Interrupt a step after its second attention."""

    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[1].mlp.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(input_ids=torch.tensor([[5]]), **cache_argument(cache))
    hook.remove()


@pytest.mark.parametrize("cause", ["an interrupt", "a full disk"])
def test_an_interrupted_step_is_undone(llama: Any, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same step gives the same answer later; with a full disk, its tokens stay in memory."""
    results = []
    for broken in (False, True):
        with SpillCache(llama.config, token_budget=64, cpu_pages=4, path=tmp_path, threads=2) as cache:
            llama(**single(159), **cache_argument(cache))
            if broken and cause == "an interrupt":
                stopped_step(llama, cache)
            elif broken:
                with monkeypatch.context() as patch, pytest.raises(MissingRequirement):
                    patch.setattr(cache.store, "append", full_disk(cache.store.append))
                    llama(input_ids=torch.tensor([[5]]), **cache_argument(cache))
            results += [llama(input_ids=torch.tensor([[5]]), **cache_argument(cache)).logits for _ in range(3)]
    assert all(torch.equal(one, other) for one, other in zip(results[:3], results[3:], strict=True))


def test_an_interrupted_step_cannot_be_undone_in_sliding_layers(enabled: Enabled) -> None:
    model = enabled("gemma3")
    with SpillCache(model.config, "full") as cache:
        model(**single(), **cache_argument(cache))
        stopped_step(model, cache)
        with pytest.raises(DataError, match="middle of an earlier step"):
            model(input_ids=torch.tensor([[5]]), **cache_argument(cache))
        cache.reset()
        model(**single(), **cache_argument(cache))
        assert cache.get_seq_length() == 150


def full_disk(append: Any) -> Any:
    """Return an `append` that fails in layer 1, as on a full disk."""

    def failing(layer: int, *rows: Any) -> None:
        append(layer, *rows)
        if layer == 1:
            raise MissingRequirement("No space left on device")

    return failing


def test_methods_of_an_empty_cache_and_its_layers() -> None:
    with SpillCache(tiny("gemma3").config) as cache:
        for change in ("crop", "reorder_cache", "batch_repeat_interleave", "batch_select_indices"):
            with pytest.raises(TypeError, match="layer: "):
                getattr(cache.layers[1], change)(1)
        cache.crop(-3)
        cache.batch_repeat_interleave(2)
        assert cache.get_seq_length() == 0
        with pytest.raises(UsageError, match="cache: it is empty"):
            cache.store  # noqa: B018


def test_a_spill_file_is_kept_only_if_it_was_named(llama: Any, tmp_path: Path) -> None:
    for path, files_left in ((tmp_path, 0), (tmp_path / "kept.kv", 1)):
        with SpillCache(llama.config, path=path) as cache:
            llama(**single(), **cache_argument(cache))
            assert len(list(tmp_path.iterdir())) == 1
        assert len(list(tmp_path.iterdir())) == files_left


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3"])
def test_an_enabled_model_works_with_other_caches(family: str) -> None:
    model = tiny(family)
    expected = generate(model, None, prompt())
    enable(enable(model))
    got = generate(model, None, prompt())
    disable(model)
    check_same(expected, got)
    assert not [name for name in vars(model) if name.startswith("_llmcache")]
