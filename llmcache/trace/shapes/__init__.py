"""Generated traces: the paper's eight applications and shapes that are hard to cache. Everything in them is synthetic.

`SHAPES` maps names to functions of a seed (each has its own by default); `GROUPS` tells which belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llmcache.trace.record import Trace
from llmcache.trace.shapes import hard, models, on_device, remote

SHAPES: Mapping[str, Callable[..., Trace]] = {
    "ai_notes": on_device.ai_notes,
    "ai_translate": on_device.ai_translate,
    "text_embedder": on_device.text_embedder,
    "text_classification": on_device.text_classification,
    "copilot": remote.copilot,
    "perplexity": remote.perplexity,
    "claude": remote.claude,
    "gemini": remote.gemini,
    "interleave": hard.interleave,
    "noisy": hard.noisy,
    "kilobytes": hard.kilobytes,
    "model_switch": models.model_switch,
    "prefill_decode": models.prefill_decode,
    "moe_routing": models.moe_routing,
    "page_order": hard.page_order,
    "random": hard.random,
    "multi_loop": models.multi_loop,
    "write_loops": hard.write_loops,
}
_NAMES = tuple(SHAPES)
GROUPS: Mapping[str, tuple[str, ...]] = {"on_device": _NAMES[:4], "remote": _NAMES[4:8], "hard": _NAMES[8:]}
