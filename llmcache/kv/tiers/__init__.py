"""KvStore: pages of keys and values in tiers (gpu, cpu, ssd), shared between sequences, counted wherever they move."""

from llmcache.kv.tiers.config import Gathered, Selection, StoreConfig, Traffic, Victims
from llmcache.kv.tiers.gather import FastTier, Staged
from llmcache.kv.tiers.store import KvStore

__all__ = ["FastTier", "Gathered", "KvStore", "Selection", "Staged", "StoreConfig", "Traffic", "Victims"]
