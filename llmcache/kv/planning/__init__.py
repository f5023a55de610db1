"""Planning: what fits where, and how long a token takes, before anything runs. All of it is *modelled*.

Machines, models and workloads go in; memory by tier, sizes of the two pools, latency by stage come out. Only
`machine` and `probes` measure anything: the speeds of this machine, for `llmcache kv profile`.
"""

from llmcache.kv.planning.hardware import MACHINES, PAPER_PC, TYPICAL_PC, Hardware
from llmcache.kv.planning.latency import Latency, latency
from llmcache.kv.planning.memory import MemoryUse, memory_use
from llmcache.kv.planning.models import MODELS, ModelShape
from llmcache.kv.planning.placement import Placement, Room
from llmcache.kv.planning.work import SYSTEMS, System, hillinfer
from llmcache.kv.planning.workload import Workload

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
