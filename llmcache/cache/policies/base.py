"""Base class of all policies: state arrays over dense block ids, and a compiled loop that replays runs over them.

All policies insert every missed block (no bypass), and count reads and writes alike, so that their hit ratios are
comparable. On a loop of N blocks this limits Belady to (S-1)/(N-1).
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numba
import numpy as np
from numba.core.event import Event, Listener, install_listener

from llmcache.arrays import Flags, Int64s
from llmcache.errors import MissingRequirement
from llmcache.model.modelfile import Models
from llmcache.trace.record import BlockSpace, Provenance, TraceFile

F = TypeVar("F", bound=Callable[..., Any])


_SHARED = ("base.py", "structures.py", "../loops.py")
"""Sources of functions and constants that numba compiles into the kernels of other files."""


def _version_of(names: Sequence[str]) -> str:
    contents = (Path(__file__).parent.joinpath(name).read_bytes() for name in names)
    return hashlib.blake2b(b"".join(contents), digest_size=6).hexdigest()


_VERSION = _version_of(_SHARED)


def kernel(function: F, **options: bool) -> F:
    """Compile `function` without the GIL, so that replays run in threads; numba caches the result on disk.

    The cache is next to the source, or in ~/.cache/numba if that is not writable; MissingRequirement if neither is.
    """
    # numba reuses a cached result while the file of `function` is unchanged, and names it after `__qualname__`.
    function.__qualname__ += f"-{_VERSION}"
    compiler: Any = numba.njit  # its type annotations lack some options that numba itself uses
    try:
        compiled: F = compiler(cache=True, nogil=True, no_cfunc_wrapper=True, **options)(function)
    except RuntimeError as error:
        hint = "set NUMBA_CACHE_DIR to a writable directory"
        raise MissingRequirement(f"cannot write the compilation cache of the replay kernels: {error}", hint) from error
    return compiled


def subroutine(function: F) -> F:
    """Mark `function` for inlining into kernels, because separate kernels would double the time of compilation.

    It is compiled once per combination of argument types, so callers should use the same types.
    """
    registered: F = numba.extending.register_jitable(nogil=True, no_cfunc_wrapper=True, _nrt=False)(function)
    return registered


def lean_kernel(function: F) -> F:
    """Compile a `kernel` that allocates nothing, without reference counts of its arrays: 2 to 8 times as fast.

    Without numba's runtime, an allocation fails to compile.
    """
    return kernel(function, _nrt=False)


@contextmanager
def report_compiling(tell: Callable[[bool], None]) -> Iterator[None]:
    """Call `tell(True)` when a compilation begins within the with block, and `tell(False)` when it ends."""

    class Depth(Listener):  # type: ignore[misc]  # numba is not typed
        depth = 0  # numba compiles under a lock, so that these calls never overlap

        def on_start(self, event: Event) -> None:
            self.depth += 1
            if self.depth == 1:
                tell(True)

        def on_end(self, event: Event) -> None:
            self.depth -= 1
            if self.depth == 0:
                tell(False)

    with install_listener("numba:compile", Depth()):
        yield


class Policy(ABC):
    """A cache of `capacity` blocks over ids 0 .. `blocks` - 1. `replay` continues after the last call."""

    name: ClassVar[str]  # on the command line
    title: ClassVar[str]  # in tables and legends
    offline: ClassVar[bool] = False  # True if the policy must see the future: the whole trace in one call of `replay`

    def __init__(self, capacity: int, blocks: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity: must be at least 1 block, not {capacity}")
        if blocks < 1:
            raise ValueError(f"blocks: must be at least 1, not {blocks}")
        self.capacity = capacity
        self.blocks = blocks
        self._missed = 0

    def describe(self, space: BlockSpace, files: Sequence[TraceFile], provenance: Provenance, models: Models) -> None:
        """Set facts about the trace, before the first `replay`; `models` are headers of its files that still exist."""
        return

    def replay(self, first: Int64s, count: Int64s) -> Int64s:
        """Return the hit blocks of each run; run i references ids first[i] .. first[i] + count[i] - 1 in this order."""
        hits = np.zeros(len(first), np.int64)
        self._run(first, count, hits)
        self._missed += int(count.sum() - hits.sum())
        return hits

    def resident(self) -> Int64s:
        """Return the ids in the cache, ascending."""
        return np.flatnonzero(self._resident()).astype(np.int64, copy=False)

    @property
    def evictions(self) -> int:
        """Return the number of blocks evicted, given that every missed block was inserted."""
        return self._missed - len(self.resident())

    @abstractmethod
    def _run(self, first: Int64s, count: Int64s, hits: Int64s) -> None:
        """Replay the runs and set their `hits`, which are initially 0."""

    @abstractmethod
    def _resident(self) -> Flags:
        """Return for each id whether it is in the cache."""
