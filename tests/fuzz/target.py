"""A fuzz target: made inputs, and what must hold for any of them. pytest tries a few, `tools/fuzz` as many as it is given
time for.

The property of every parser here: for any bytes it returns something consistent, or raises an `LlmcacheError` that says
what is wrong and how to go on. No other exception, no hang, no memory beyond what the input's size allows, no file changed.
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
"""Address space that one input may take: it has a few KiB. Arenas and stacks of threads that libraries start are in it."""


@dataclass(frozen=True)
class Target:
    """`check(input)` fails for an input that the parser `name` does not take as it must; `inputs` makes inputs.

    It may be called within an `around()` only.
    """

    name: str
    inputs: st.SearchStrategy[bytes]
    check: Callable[[bytes], None]
    around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


@dataclass(frozen=True)
class Machine:
    """`operations` does random operations to something and to its model, and compares; within an `around()` only."""

    name: str
    operations: type[RuleBasedStateMachine]
    around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


@contextlib.contextmanager
def bounded(room_bytes: int = ROOM_BYTES) -> Iterator[None]:
    """A with block in which memory beyond `room_bytes` more than now cannot be had: a MemoryError, which no parser may
    raise."""
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
    """A with block whose objects never take more than `peak_bytes` at a time, whatever it is given."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= peak_bytes, f"{peak} bytes of objects"


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A directory for files of one input, in memory where the system has such a place: there are thousands."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


@contextlib.contextmanager
def refusal(kind: type[LlmcacheError] = DataError) -> Iterator[None]:
    """A with block that may be refused with an error of `kind` which says what is wrong in a line that can be printed."""
    try:
        yield
    except kind as error:
        assert error.message.strip()
        f"{error.message} {error.hint}".encode("utf-8", "surrogateescape")  # names of files may be any bytes
        assert len(error.message) < LONGEST_MESSAGE, "a message is for people"


def is_printable(text: str) -> bool:
    """True if `text` can be written to a terminal or a log: lone surrogates cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
