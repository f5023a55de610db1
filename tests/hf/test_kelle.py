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
from llmcache.kv.bench.subject import answer
from llmcache.kv.tasks import RECALL_MODEL
from llmcache.kv.transformers import SpillCache
from tests.hf.test_recall import model, questions, share


@functools.cache
def kelles_share(budget: int, **options: Any) -> float:
    return share("kelle", 1024, token_budget=budget, **options)


def test_the_decoder_in_numpy_is_the_model() -> None:
    ids = questions(1024).ids[0, :300]
    with torch.no_grad():
        wanted = model()(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy()
    found = Decoder.load(RECALL_MODEL).prompt(ids)[1]
    np.testing.assert_allclose(found, wanted, atol=2e-3)


def test_it_answers_as_well_as_the_layers_of_aerp() -> None:
    budget = 256
    # As many tokens, split alike: 16 sinks, a window of 32; the store's pages make the window up to 15 tokens longer.
    layers = CacheVariant("aerp", AerpSettings(budget, 16, 40), CellSettings("exact"))
    wanted = accuracy(evaluate(Decoder.load(RECALL_MODEL), questions(1024), [layers])["aerp"])
    assert abs(kelles_share(budget) - wanted.mean) < 0.08
    assert kelles_share(128) < kelles_share(budget) < kelles_share(2048) == 1.0


def test_spilled_tokens_come_back_from_the_ssd_as_they_were(tmp_path: Path) -> None:
    """A pool of 24 pages and a file give the very answers that memory for all gives; most pages are in the file alone."""
    pooled = SpillCache(
        model().config, "kelle", token_budget=256, threads=2, evicted="spilled", path=tmp_path / "kv.spill", cpu_pages=24
    )
    with pooled as cache:
        assert float(answer(model(), cache, questions(1024)).mean()) == kelles_share(256, evicted="spilled")
        engine = cache.conversation.engine
        assert engine is not None
        moved = engine.store.traffic.to_json()
    assert moved["pages_down"] > 0 and moved["hits_ssd"] > moved["hits_cpu"] > 0
    assert kelles_share(256, evicted="spilled") > kelles_share(256) - 0.04  # five questions
