"""Kelle under transformers: as good as the layers of `edram.aerp` in numpy, which are the model that transformers runs."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llmcache.edram.accuracy import CacheVariant, accuracy, evaluate
from llmcache.edram.aerp import AerpSettings
from llmcache.edram.decoder import Decoder
from llmcache.edram.flips import CellSettings
from llmcache.kv.bench.subject import accuracy as answered
from llmcache.kv.bench.subject import answer, load_model
from llmcache.kv.tasks import RECALL_MODEL, Questions, recall
from llmcache.kv.transformers import SpillCache


@functools.cache
def model() -> Any:
    return load_model(RECALL_MODEL)


@functools.cache
def questions() -> Questions:
    return recall(np.random.default_rng(17), 4, 1024)


@functools.cache
def share(budget: int, **options: Any) -> float:
    return answered(model(), questions(), "kelle", token_budget=budget, threads=2, **options)


def test_the_decoder_in_numpy_is_the_model() -> None:
    ids = questions().ids[0, :300]
    with torch.no_grad():
        wanted = model()(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy()
    found = Decoder.load(RECALL_MODEL).prompt(ids)[1]
    np.testing.assert_allclose(found, wanted, atol=2e-3)


def test_it_answers_as_well_as_the_layers_of_aerp() -> None:
    budget = 256
    # As many tokens, split alike: 16 sinks, a window of 32; the store's pages make the window up to 15 tokens longer.
    layers = CacheVariant("aerp", AerpSettings(budget, 16, 40), CellSettings("exact"))
    wanted = accuracy(evaluate(Decoder.load(RECALL_MODEL), questions(), [layers])["aerp"])
    assert abs(share(budget) - wanted.mean) < 0.08
    assert share(128) < share(budget) < share(2048) == 1.0


def test_spilled_tokens_come_back_from_the_ssd_as_they_were(tmp_path: Path) -> None:
    """A pool of 24 pages and a file give the very answers that memory for all gives; most pages are in the file alone."""
    pooled = SpillCache(
        model().config, "kelle", token_budget=256, threads=2, evicted="spilled", path=tmp_path / "kv.spill", cpu_pages=24
    )
    with pooled as cache:
        assert float(answer(model(), cache, questions()).mean()) == share(256, evicted="spilled")
        engine = cache.conversation.engine
        assert engine is not None
        moved = engine.store.traffic.to_json()
    assert moved["pages_down"] > 0 and moved["hits_ssd"] > moved["hits_cpu"] > 0
    assert share(256, evicted="spilled") > share(256) - 0.04  # five questions
