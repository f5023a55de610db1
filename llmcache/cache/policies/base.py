"""What every policy is: state arrays over dense block ids, and a compiled loop that replays runs over them.

One convention for all, so that hit ratios can be compared: a missed block is always inserted (no bypass), every block
takes one place, reads and writes are both references. On a loop of N blocks this caps Belady at (S-1)/(N-1).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numba
import numpy as np
from numba.core.event import Event, Listener, install_listener

from llmcache.arrays import Flags, Int64s
from llmcache.cache.models import Models
from llmcache.errors import EnvironmentProblem
from llmcache.trace.record import BlockSpace, Provenance, TraceFile

F = TypeVar("F", bound=Callable[..., Any])


def _forget_stale(folder: Path) -> None:
    """Removes kept compilations that are older than a source file beside them.

    A compiled loop contains the functions it calls, but numba compares only the date of the file that the loop is in.
    """
    newest = max(source.stat().st_mtime for source in folder.glob("*.py"))
    for index in folder.glob("__pycache__/*.nbi"):
        with suppress(OSError):  # gone already, or not ours to remove: then it is not ours to be changed either
            if index.stat().st_mtime < newest:
                index.unlink()


_forget_stale(Path(__file__).parent)
_forget_stale(Path(__file__).parent.parent)


def kernel(function: F, **options: bool) -> F:
    """Compiles `function` without the GIL, so that a grid of replays runs in threads; the result is kept on disk.

    Beside the source, or in the user's ~/.cache/numba if that is another's; EnvironmentProblem if neither can be written.
    """
    compiler: Any = numba.njit  # its types do not know all options, which numba itself uses throughout
    try:
        compiled: F = compiler(cache=True, nogil=True, no_cfunc_wrapper=True, **options)(function)
    except RuntimeError as error:
        hint = "set NUMBA_CACHE_DIR to a writable directory"
        raise EnvironmentProblem(f"cannot write the compilation cache of the replay kernels: {error}", hint) from error
    return compiled


def subroutine(function: F) -> F:
    """Is `function`, which kernels take into themselves where they call it; outside of them it is plain Python.

    Compiled as kernels of their own, each kept and callable, the parts of a policy take twice as long. One is compiled
    for each kind of argument that it is given (int32 or int64, an integer or a bool), so callers do well to agree.
    """
    known: F = numba.extending.register_jitable(nogil=True, no_cfunc_wrapper=True, _nrt=False)(function)
    return known


def lean_kernel(function: F) -> F:
    """Is `kernel` for a function that allocates nothing: its arrays are not counted in and out (2 to 8 times as fast).

    Numba counts references to arrays atomically at every call and branch where it cannot prove that it need not. Without
    its run-time such a function cannot allocate, which is what a replay wants anyway: an allocation fails to compile.
    """
    return kernel(function, _nrt=False)


@contextmanager
def told_compiling(tell: Callable[[bool], None]) -> Iterator[None]:
    """Tells `tell` True when something begins to be compiled within the with block, and False when it is done."""

    class Depth(Listener):  # type: ignore[misc]  # numba is not typed
        depth = 0  # numba compiles under a lock: these calls come one after the other

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
    """A cache of `capacity` blocks over ids 0 .. `blocks` - 1. `replay` goes on where the last call ended."""

    name: ClassVar[str]  # what the command line calls it
    title: ClassVar[str]  # what tables and legends call it
    offline: ClassVar[bool] = False  # true when it must see the future: the whole trace in one call of `replay`

    def __init__(self, capacity: int, blocks: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity: must be at least 1 block, not {capacity}")
        if blocks < 1:
            raise ValueError(f"blocks: must be at least 1, not {blocks}")
        self.capacity = capacity
        self.blocks = blocks
        self._missed = 0

    def describe(self, space: BlockSpace, files: Sequence[TraceFile], provenance: Provenance, models: Models) -> None:
        """Takes what is known of the trace beside its runs, before the first `replay`. Most policies need nothing.

        `models`: the headers of its files, where these are still there.
        """
        return

    def replay(self, first: Int64s, count: Int64s) -> Int64s:
        """Returns the hit blocks of each run; run i references ids first[i] .. first[i] + count[i] - 1 in this order."""
        hits = np.zeros(len(first), np.int64)
        self._run(first, count, hits)
        self._missed += int(count.sum() - hits.sum())
        return hits

    def resident(self) -> Int64s:
        """Returns the ids that the cache holds now, ascending."""
        return np.flatnonzero(self._resident()).astype(np.int64, copy=False)

    @property
    def evictions(self) -> int:
        """Blocks that have left: every missed one came in."""
        return self._missed - len(self.resident())

    @abstractmethod
    def _run(self, first: Int64s, count: Int64s, hits: Int64s) -> None:
        """Replays the runs and sets their `hits`, which are 0."""

    @abstractmethod
    def _resident(self) -> Flags:
        """Returns of each id whether the cache holds it now."""
