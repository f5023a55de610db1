"""Questions about a long context whose answers are known: what a policy forgets, it answers wrongly."""

from llmcache.kv.tasks.recall import RECALL_MODEL, Questions, chain, passkey, recall

__all__ = ["RECALL_MODEL", "Questions", "chain", "passkey", "recall"]
