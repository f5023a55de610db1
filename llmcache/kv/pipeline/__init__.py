"""The decoding pipeline: the policy chooses and fetches for the next layer while the current one computes.

Timelines of it.
"""

from llmcache.kv.pipeline.engine import KvEngine, attention, widened
from llmcache.kv.pipeline.timeline import NO_TIMELINE, Span, Timeline

__all__ = ["NO_TIMELINE", "KvEngine", "Span", "Timeline", "attention", "widened"]
