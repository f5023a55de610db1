"""Reproduces the four papers: each has a module, a table of claims (`NAME.toml`) and measurements (`NAME.json`)."""

from __future__ import annotations

REPRODUCTIONS: dict[str, str] = {
    "io-caching": "Rethinking I/O Caching for LLM Inference (2025): figures 1, 2, 4, 5 and section 4.2",
    "hillinfer": "HillInfer, KV eviction with a SmartSSD (ACL submission): figures 2, 3, 8, 9, 10, 11",
    "icecache": "IceCache, trees of keys for long contexts (ICLR 2026): figures 1, 6, 7, 8 and the tables' claims",
    "kelle": "Kelle: Co-design KV Caching and eDRAM for Efficient LLM Serving in Edge Computing (2025): "
    "tables, text, figures",
}
"""Papers of `llmcache reproduce`, with the recomputed parts; the module `llmcache.papers.NAME` recomputes each."""
