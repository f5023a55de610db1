"""An *emulated* computational SSD: a process owns a spill file, scores keys where they are, and sends the scores.

Bytes are counted, time is modelled, wall time is separate. Terms are those of SNIA's computational storage API and NVMe's
Computational Programs: CSx (the device), CSE (its engine), CSF (the function it runs), FDM (the function's memory). "Gather"
reads pages into the FDM and sends only the requested rows.
"""

from llmcache.papers.csd.host import EmulatedCsd
from llmcache.papers.csd.profile import PROFILES, CsdProfile, Report
from llmcache.papers.csd.wire import ScoreBlock

__all__ = ["PROFILES", "CsdProfile", "EmulatedCsd", "Report", "ScoreBlock"]
