"""Planning: the placement of weights and KV cache, and the latency of a token, before anything runs. *Modelled.*

Input: machines, models and workloads. Output: memory by tier, sizes of the two pools, latency by stage. Only `profile`
measures anything: the speeds of this machine, for `llmcache kv profile`.
"""
