"""KvStore: pages of keys and values in tiers (gpu, cpu, ssd), shared between sequences, with counters of all transfers."""

from llmcache.kv.tiers.config import Gathered, Selection, StoreConfig, Traffic, Victims, repeated, side_by_side
from llmcache.kv.tiers.store import FastTier, KvStore, Staged

__all__ = [
    "FastTier", "Gathered", "KvStore", "Selection", "Staged", "StoreConfig", "Traffic", "Victims", "repeated",
    "side_by_side",
]  # fmt: skip
