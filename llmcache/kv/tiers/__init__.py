"""KvStore: pages of keys and values in tiers (gpu, cpu, ssd), shared between sequences, counted wherever they move."""

from llmcache.kv.tiers.config import Gathered, Selection, StoreConfig, Victims
from llmcache.kv.tiers.fast import FastTier, HostFastTier
from llmcache.kv.tiers.gathering import Staged
from llmcache.kv.tiers.store import KvStore
from llmcache.kv.tiers.traffic import Traffic

__all__ = ["FastTier", "Gathered", "HostFastTier", "KvStore", "Selection", "Staged", "StoreConfig", "Traffic", "Victims"]
