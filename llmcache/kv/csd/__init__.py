"""An *emulated* computational SSD: a process that owns a spill file, scores keys where they lie, and sends scores.

Nothing here is a device. A process of its own stands for one, shared memory for its link, and a model for its speeds; its
reports keep bytes (counted), modelled time and wall time apart. Words are those of SNIA's computational storage API and
of NVMe's Computational Programs: CSx (the device), CSE (its engine), CSF (the function it runs), FDM (the memory the
function works in). Its one program, which scores keys, is loaded and activated when it starts; the host executes it. Besides
what a disk does (write, read, deallocate, flush) it has a data path of its own, "gather": pages are read into the FDM, and
only the rows asked for cross the link.
"""

from llmcache.kv.csd.host import EmulatedCsd
from llmcache.kv.csd.profile import PROFILES, CsdProfile, Report
from llmcache.kv.csd.wire import ScoreBlock

__all__ = ["PROFILES", "CsdProfile", "EmulatedCsd", "Report", "ScoreBlock"]
