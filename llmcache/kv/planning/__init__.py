"""Planning: what fits where, and how long a token takes, before anything runs. All of it is *modelled*.

Machines, models and workloads go in; memory by tier, sizes of the two pools, latency by stage come out. Only
`profile` measures anything: the speeds of this machine, for `llmcache kv profile`.
"""

from llmcache.kv.planning.hardware import MACHINES, PAPER_PC, TYPICAL_PC, Hardware
from llmcache.kv.planning.latency import SYSTEMS, Latency, System, hillinfer, latency
from llmcache.kv.planning.models import MODELS, ModelShape
from llmcache.kv.planning.placement import MemoryUse, Placement, Room, Workload, memory_use

__all__ = [
    "MACHINES",
    "MODELS",
    "PAPER_PC",
    "SYSTEMS",
    "TYPICAL_PC",
    "Hardware",
    "Latency",
    "MemoryUse",
    "ModelShape",
    "Placement",
    "Room",
    "System",
    "Workload",
    "hillinfer",
    "latency",
    "memory_use",
]
