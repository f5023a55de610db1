"""The benchmark behind `llmcache kv bench`: policies on the real engine with a synthetic stream, or the paper's model."""

from llmcache.kv.bench.results import SCHEMA, Bench, Marks, Observed, Row, read_bench

__all__ = ["SCHEMA", "Bench", "Marks", "Observed", "Row", "read_bench"]
