"""How BPF programs observe accesses to the page cache in this kernel."""

from __future__ import annotations

from llmcache.bpf.libbpf import has_function, has_tracepoint

TRACEPOINTS = ("mm_filemap_get_pages", "mm_filemap_fault", "mm_filemap_map_pages")
"""Linux 6.12 and later have them."""
FUNCTIONS = ("filemap_get_read_batch", "filemap_fault", "filemap_map_pages")
"""The functions with these tracepoints. The first one is static, so a compiler may inline it."""
BY_TRACEPOINT, BY_FUNCTION = "tracepoints", "functions"


def observable_by() -> str | None:
    """Return BY_TRACEPOINT, else BY_FUNCTION, else None, according to the kernel's BTF. MissingRequirement: no libbpf.

    The kernel may reject programs at functions: it needs CONFIG_FUNCTION_TRACER for them, and on arm64 Linux 6.4.
    """
    if all(map(has_tracepoint, TRACEPOINTS)):
        return BY_TRACEPOINT
    return BY_FUNCTION if all(map(has_function, FUNCTIONS)) else None
