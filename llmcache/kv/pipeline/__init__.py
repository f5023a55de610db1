"""The decoding pipeline: a policy chooses and fetches for the next layer while this one computes, on a timeline."""

from llmcache.kv.pipeline.engine import KvEngine, attention, widened
from llmcache.kv.pipeline.timeline import NO_TIMELINE, Span, Timeline

__all__ = ["NO_TIMELINE", "KvEngine", "Span", "Timeline", "attention", "widened"]
