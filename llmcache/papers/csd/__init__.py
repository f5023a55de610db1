"""An *emulated* computational SSD: a process that owns a spill file, scores keys where they are, and sends the scores.

There is no device: a process stands for it, shared memory for its link, and a model for its speeds. Reports separate bytes
(counted), modelled time and wall time. Terms are those of SNIA's computational storage API and NVMe's Computational
Programs: CSx (the device), CSE (its engine), CSF (the function it runs), FDM (the function's memory). Its only program,
which scores keys, is active from the start; the host executes it. Other commands are those of a disk (write, read,
deallocate, flush), and "gather", which reads pages into the FDM and sends only the requested rows over the link.
"""

from llmcache.papers.csd.host import EmulatedCsd
from llmcache.papers.csd.profile import PROFILES, CsdProfile, Report
from llmcache.papers.csd.wire import ScoreBlock

__all__ = ["PROFILES", "CsdProfile", "EmulatedCsd", "Report", "ScoreBlock"]
