"""Fuzz targets: generated inputs, and a check that must hold for each. pytest tries a few, `tools/fuzz` runs for a set time.

For any bytes, every parser must return a consistent result or raise an `LlmcacheError` with a message and a hint. It must
not raise another exception, hang, use more memory than the size of the input justifies, or change a file.
"""

from __future__ import annotations

import contextlib
import os
import resource
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine

from llmcache.errors import DataError, LlmcacheError

LONGEST_MESSAGE = 1 << 13
ROOM_BYTES = 1 << 30
"""Additional address space for an input of a few KiB, including the arenas and stacks of threads that libraries start."""


@dataclass(frozen=True)
class Target:
    """`check(input)` fails if the parser `name` handles an input wrongly; `inputs` generates inputs.

    `check` may be called only inside `around()`.
    """

    name: str
    inputs: st.SearchStrategy[bytes]
    check: Callable[[bytes], None]
    around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


@dataclass(frozen=True)
class Machine:
    """A state machine compares random operations with a model, inside `around()`."""

    name: str
    operations: type[RuleBasedStateMachine]
    around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


@contextlib.contextmanager
def bounded(room_bytes: int = ROOM_BYTES) -> Iterator[None]:
    """Limit the address space to `room_bytes` more than now.

    Beyond that, a parser gets a MemoryError, which it must not raise.
    """
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + room_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def light(peak_bytes: int) -> Iterator[None]:
    """Check that the objects of the body never take more than `peak_bytes` at a time."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= peak_bytes, f"{peak} bytes of objects"


def scratch() -> tempfile.TemporaryDirectory[str]:
    """Return a temporary directory for the files of one input, in memory if possible: there are thousands of inputs."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


@contextlib.contextmanager
def refusal(kind: type[LlmcacheError] = DataError) -> Iterator[None]:
    """Allow the body to raise an error of `kind`, whose message must be a printable line."""
    try:
        yield
    except kind as error:
        assert error.message.strip()
        f"{error.message} {error.hint}".encode("utf-8", "surrogateescape")  # file names may be any bytes
        assert len(error.message) < LONGEST_MESSAGE, "the message is readable"


def is_printable(text: str) -> bool:
    """Return whether `text` can be written to a terminal or a log; lone surrogates cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
