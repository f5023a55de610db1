"""Questions about a long context with known answers: a policy answers wrongly if it evicted the tokens.

The package includes `models/recall` (1.8 MB), so that commands that use it by default work without a network.
"""

from llmcache.kv.tasks.recall import RECALL_MODEL, Questions, chain, passkey, recall

__all__ = ["RECALL_MODEL", "Questions", "chain", "passkey", "recall"]
