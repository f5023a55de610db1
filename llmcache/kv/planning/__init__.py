"""Planning: the placement of weights and KV cache, and the latency of a token, before anything runs. *Modelled.*

Only `profile` measures anything: the speeds of this machine, for `llmcache kv profile`.
"""
