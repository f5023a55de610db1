"""The decoding pipeline, which looks one layer ahead, and its timeline."""

from llmcache.kv.pipeline.engine import KvEngine, attention, widened
from llmcache.kv.pipeline.timeline import NO_TIMELINE, Span, Timeline

__all__ = ["NO_TIMELINE", "KvEngine", "Span", "Timeline", "attention", "widened"]
