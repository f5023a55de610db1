"""Questions about a long context whose answers are known: what a policy forgets, it answers wrongly."""

from llmcache.kv.tasks.chain import Chain, chain
from llmcache.kv.tasks.recall import RECALL_MODEL, Questions, multikey, passkey, recall

__all__ = ["RECALL_MODEL", "Chain", "Questions", "chain", "multikey", "passkey", "recall"]
