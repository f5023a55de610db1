"""Questions about a long context with known answers: a policy answers wrongly if it evicted the tokens.

`models/recall` (1.8 MB) is part of the package, because `kv bench --task`, `kv bench --flips` and `edram accuracy` use it
by default, and have to work without a network.
"""

from llmcache.kv.tasks.recall import RECALL_MODEL, Questions, chain, passkey, recall

__all__ = ["RECALL_MODEL", "Questions", "chain", "passkey", "recall"]
