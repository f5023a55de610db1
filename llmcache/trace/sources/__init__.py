"""Where live traces come from: one file per source of records, and the table of all of them, best first."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmcache.trace.sources.base import Source

AUTO = "auto"
# Each is loaded only when it is asked for: some need libraries that a machine may lack.
SOURCES = {
    "filemap": "llmcache.trace.sources.bpf:FilemapSource",
    "fexit": "llmcache.trace.sources.bpf:FexitSource",
    "syscalls": "llmcache.trace.sources.bpf:SyscallSource",
    "faults": "llmcache.trace.sources.faults:FaultSource",
}


def source_class(name: str) -> type[Source]:
    """The class of the source called `name` in `SOURCES`; KeyError for another name."""
    module, _, attribute = SOURCES[name].partition(":")
    found: type[Source] = getattr(importlib.import_module(module), attribute)
    return found
