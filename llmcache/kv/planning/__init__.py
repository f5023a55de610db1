"""Planning: what fits where, and how long a token takes, before anything runs. All of it is *modelled*.

Machines, models and workloads go in; memory by tier, sizes of the two pools, latency by stage come out. Only
`profile` measures anything: the speeds of this machine, for `llmcache kv profile`.
"""
