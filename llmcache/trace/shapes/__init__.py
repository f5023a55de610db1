"""Generated traces: the paper's eight applications and shapes that are hard to cache. Everything in them is synthetic.

`SHAPES` maps names to functions of a seed (each has its own by default); `GROUPS` tells which belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llmcache.trace.record import Trace
from llmcache.trace.shapes import hard, paper

SHAPES: Mapping[str, Callable[..., Trace]] = {
    "ai_notes": paper.ai_notes,
    "ai_translate": paper.ai_translate,
    "text_embedder": paper.text_embedder,
    "text_classification": paper.text_classification,
    "copilot": paper.copilot,
    "perplexity": paper.perplexity,
    "claude": paper.claude,
    "gemini": paper.gemini,
    "interleave": hard.interleave,
    "noisy": hard.noisy,
    "kilobytes": hard.kilobytes,
    "model_switch": hard.model_switch,
    "prefill_decode": hard.prefill_decode,
    "moe_routing": hard.moe_routing,
    "page_order": hard.page_order,
    "random": hard.random,
    "multi_loop": hard.multi_loop,
    "write_loops": hard.write_loops,
}
_NAMES = tuple(SHAPES)
GROUPS: Mapping[str, tuple[str, ...]] = {"on_device": _NAMES[:4], "remote": _NAMES[4:8], "hard": _NAMES[8:]}
