"""What icecache prints and is shown on the page as it is; nothing of it enters a number of ours."""

from __future__ import annotations

PAPER = {
    "title": "IceCache: Memory-efficient KV-cache Management for Long-Sequence LLMs",
    "authors": "Y. Mao and others (yuzhenmao.github.io/IceCache)",
    "published": "ICLR 2026",
    "machine": "A100 40 GB or H100 80 GB, PCIe, 64 threads of the host, transformers 4.57.1 (section 5.1)",
}
BUDGETS = (64, 128, 256)

TABLE1: tuple[tuple[str, int | None, float, float], ...] = (
    ("Full KV", None, 49.5, 42.2),
    ("true top-k", 256, 49.8, 42.6),
    ("SnapKV", 256, 40.8, 31.8),
    ("StreamingLLM", 256, 33.5, 27.8),
    ("OmniKV", 256, 46.3, 33.0),
    ("MagicPig", 256, 44.6, 39.1),
    ("PQCache", 256, 47.3, 37.4),
    ("ArkVale", 256, 42.8, 33.0),
    ("IceCache", 64, 47.8, 39.0),
    ("IceCache", 128, 48.6, 40.4),
    ("IceCache", 256, 49.0, 41.7),
    ("IceCache (reuse)", 256, 47.7, float("nan")),
)
"""Averages over LongBench: method, budget, Llama-3.1-8B-Instruct (tables 1 and 5), Mistral-7B-Instruct-v0.2 (table 1)."""

TABLE2: tuple[tuple[str, int | None, float, float], ...] = (
    ("Full KV", None, 43.4, 35.2),
    ("IceCache", 64, 42.2, 33.9),
    ("IceCache", 128, 42.6, 34.3),
    ("IceCache", 256, 43.1, 35.0),
)
"""The same for Qwen3-32B and LongChat-7B-v1.5."""

TABLE3: tuple[tuple[str, str, float], ...] = (
    ("Full KV", "all", 48.2),
    ("IceCache", "10 %", 47.4),
    ("PQCache", "10 %", 46.2),
    ("SnapKV", "10 %", 44.7),
    ("StreamingLLM", "10 %", 44.4),
    ("MagicPig", "10 %", 43.1),
    ("OmniKV", "10 %", 42.7),
    ("ArkVale", "10 %", 30.9),
)
"""GSM8K with chains of thought, Mistral-7B-Instruct-v0.2."""

TABLE4: tuple[tuple[str, int, float, float, float], ...] = (
    ("Full KV", 150, 100.0, 97.0, 93.0),
    ("IceCache", 150, 100.0, 98.0, 92.0),
    ("IceCache (reuse)", 150, 100.0, 98.0, 91.0),
    ("Full KV", 200, 100.0, 92.0, 95.0),
    ("IceCache", 200, 100.0, 91.3, 95.0),
    ("IceCache (reuse)", 200, 100.0, 91.0, 94.3),
    ("Full KV", 250, 100.0, 91.0, 91.3),
    ("IceCache", 250, 100.0, 93.0, 91.7),
    ("IceCache (reuse)", 250, 100.0, 92.0, 92.0),
)
"""RULER, Qwen3-4B-Instruct: method, thousands of tokens, single needle, several keys, questions."""

TABLE6: tuple[tuple[str, float, float], ...] = (
    ("Full KV", 97.627, 0.324),
    ("IceCache", 95.322, 0.331),
    ("PQCache", 88.691, 0.273),
)
"""LongGenBench, Llama-3.1-8B-Instruct, budget 256: completion rate, average accuracy."""

FIGURE7: tuple[tuple[str, float | None, float | None], ...] = (
    ("IceCache", 7.7, 0.11),
    ("IceCache (reuse)", 5.9, 0.06),
    ("OmniKV", 5.8, 0.05),
    ("ArkVale", 7.4, None),
    ("PQCache", 13.3, 0.13),
    ("SnapKV", 0.55, 0.03),
    ("StreamingLLM", 0.13, 0.03),
)
"""Seconds to the second token, and a token, at 36 k tokens on an A100, as section 5.3.2 tells them."""
FIGURE7C = {"query": 0.05, "decoding": 0.04, "loading": 0.015, "others": 0.005}
"""Seconds of IceCache's token. Source: section 5.3.2."""

BLANK: tuple[tuple[str, str, str], ...] = (
    (
        "table 1, 5",
        "LongBench by data set, Llama-3.1-8B and Mistral-7B",
        "needs the models and LongBench; averages as printed",
    ),
    ("table 2", "LongBench, Qwen3-32B and LongChat-7B", "needs the models and LongBench"),
    ("table 3", "GSM8K with chains of thought", "needs Mistral-7B and GSM8K; a generated chain is asked instead"),
    ("table 4", "RULER at 150 k to 250 k tokens", "needs Qwen3-4B, RULER and an H100; one of many pairs is asked instead"),
    ("table 6", "LongGenBench", "needs Llama-3.1-8B and LongGenBench; a generated chain is asked instead"),
    (
        "figure 1",
        "memory of a GPU against time",
        "needs a GPU; resident memory and time of this processor are shown instead",
    ),
    ("figure 7", "times at 36 k tokens on an A100", "needs the model and a GPU; times of this processor are shown instead"),
    (
        "figure 8",
        "times at 150 k to 300 k tokens on an H100",
        "needs the model and a GPU; shorter contexts are shown instead",
    ),
    ("figures 2 to 5", "drawings of the method", "nothing to measure"),
    (
        "all",
        "SnapKV, OmniKV, MagicPig, PQCache, ArkVale",
        "not built here; Quest chooses pages as ArkVale does, by their bounds",
    ),
)
"""What stays blank, and why."""
