"""Questions about a long context with known answers: a policy answers wrongly if it evicted the tokens."""

from llmcache.kv.tasks.recall import RECALL_MODEL, Questions, chain, passkey, recall

__all__ = ["RECALL_MODEL", "Questions", "chain", "passkey", "recall"]
