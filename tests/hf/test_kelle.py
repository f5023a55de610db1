"""Kelle with transformers is as accurate as the numpy layers of `edram.aerp`, for the same model."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llmcache.kv.bench.subject import answer
from llmcache.kv.tasks import RECALL_MODEL
from llmcache.kv.transformers import SpillCache
from llmcache.papers.edram.accuracy import CacheVariant, accuracy, evaluate
from llmcache.papers.edram.aerp import AerpSettings
from llmcache.papers.edram.decoder import Decoder
from llmcache.papers.edram.flips import CellSettings
from tests.hf.test_recall import model, questions, share


@functools.cache
def kelle_share(budget: int, **options: Any) -> float:
    return share("kelle", 1024, token_budget=budget, **options)


def test_the_numpy_decoder_equals_the_model() -> None:
    ids = questions(1024).ids[0, :300]
    with torch.no_grad():
        expected = model()(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy()
    found = Decoder.load(RECALL_MODEL).prompt(ids)[1]
    np.testing.assert_allclose(found, expected, atol=2e-3)


def test_kelle_answers_as_well_as_the_aerp_layers() -> None:
    budget = 256
    # The same number of tokens: 16 sinks and a window of 32, which pages extend by up to 15 tokens.
    layers = CacheVariant("aerp", AerpSettings(budget, 16, 40), CellSettings("exact"))
    expected = accuracy(evaluate(Decoder.load(RECALL_MODEL), questions(1024), [layers])["aerp"])
    assert abs(kelle_share(budget) - expected.mean) < 0.08
    assert kelle_share(128) < kelle_share(budget) < kelle_share(2048) == 1.0


def test_spilled_tokens_are_restored_exactly(tmp_path: Path) -> None:
    """A pool of 24 pages with a file gives the same answers as a pool for all pages; most pages are only in the file."""
    pooled = SpillCache(
        model().config, "kelle", token_budget=256, threads=2, evicted="spilled", path=tmp_path / "kv.spill", cpu_pages=24
    )
    with pooled as cache:
        assert float(answer(model(), cache, questions(1024)).mean()) == kelle_share(256, evicted="spilled")
        engine = cache.conversation.engine
        assert engine is not None
        moved = engine.store.traffic.to_json()
    assert moved["pages_down"] > 0 and moved["hits_ssd"] > moved["hits_cpu"] > 0
    assert kelle_share(256, evicted="spilled") > kelle_share(256) - 0.04  # five questions
