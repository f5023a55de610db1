"""*Synthetic* streams of keys, values and queries: nothing here comes from a model, and every output has to say so."""

from llmcache.kv.workload.stream import StreamSpec, SyntheticStream

__all__ = ["StreamSpec", "SyntheticStream"]
