"""The host's side of the *emulated* device.

Only one thread at a time may use a device. After Ctrl-C, the remaining replies would be taken for those of the next command,
so an interrupted device is restarted first.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.arrays import Floats, Int64s
from llmcache.errors import DataError, LlmcacheError, MissingRequirement
from llmcache.kv.spill import KvShape
from llmcache.kv.spill.layout import KEYS, VALUES, view_slots
from llmcache.papers.csd.profile import PROFILES, CsdProfile, Report
from llmcache.papers.csd.wire import (
    BLOCK_TOKENS,
    WRITE_BYTES,
    Data,
    ScoreBlock,
    Shared,
    decode,
    receive,
    shares,
)

ANSWER_S = 120.0
"""Seconds without a reply after which a device counts as dead; the slowest command is a flush to a slow disk."""

Rows = NDArray[Any]
Pages = Int64s | list[int]


class EmulatedCsd:
    """An *emulated* computational SSD (CSx) over the spill file `path`; a context manager.

    `direct`, and arguments and errors of methods, are those of `SpillFile`. `threads` of the engine: None for one per CPU.
    `report` is the total of all commands, `last` the report of the last one.
    """

    def __init__(
        self,
        path: str | Path,
        shape: KvShape,
        profile: CsdProfile = PROFILES["none"],
        *,
        create: bool = False,
        direct: bool | None = None,
        threads: int | None = None,
    ) -> None:
        self.path, self.shape, self.profile = Path(path), shape, profile
        self.report, self.last = Report(), Report()
        self._options: dict[str, Any] = {"direct": direct, "threads": threads}
        self._in_command = False  # True from the first byte of a command to the last of its reply
        self.end: Connection | None = None
        self._pages = self._start(create)

    # The process

    def _start(self, create: bool, restarted: bool = False) -> dict[int, list[int]]:
        ours, theirs = Pipe()
        memory = Shared.make()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "llmcache.papers.csd.device", str(theirs.fileno()), str(memory)],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), memory),
                env=_environment(),
            )
            self.end, self._shared = ours, Shared(memory)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(memory)
        opening = {"path": self.path.absolute(), "shape": self.shape, "profile": self.profile, **self._options}
        try:
            found = self._command("open", create=create, restarted=restarted, **opening)
        except BaseException:
            self.kill()
            raise
        self.direct: bool = found["direct"]
        pages: dict[int, list[int]] = found["pages"]
        return pages

    def restart(self) -> None:
        """Restart the device with its file; DataError if acknowledged pages are missing."""
        self.kill()
        found = self._start(create=False, restarted=True)
        for sequence, pages in self._pages.items():
            found_pages = found.get(sequence, [0] * len(pages))
            if any(mine > theirs for mine, theirs in zip(pages, found_pages, strict=True)):
                lost = f"the file has {found_pages} pages by layer, but {pages} were acknowledged"
                raise DataError(f"{self.path}: sequence {sequence}: {lost}", "compute the context again")
        self._pages = found

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._in_command = False
        if self.end is not None:
            self.end.close()
            self.end = None

    def close(self) -> None:
        """Flush the file and end the process; MissingRequirement if that fails."""
        if self.end is None:
            return
        try:
            if not self._in_command:  # otherwise the device flushes when the pipe is closed
                self.flush()
        finally:
            if self.end is not None:
                self.end.close()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(ANSWER_S)
            self.kill()

    def __enter__(self) -> EmulatedCsd:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:  # the original error is more useful than one that follows from it
            with contextlib.suppress(MissingRequirement):
                self.close()

    # Commands

    def _command(self, command: str, **arguments: Any) -> dict[str, Any]:
        self._send(command, **arguments)
        return self._ended(self._receive())

    def _change(self, command: str, **arguments: Any) -> None:
        """Send a command that writes. On DataError, nothing was written, and acknowledged pages are lost."""
        try:
            self._command(command, **arguments)
        except DataError:
            self._pages = self._command("identify")["pages"]
            raise

    @property
    def _pipe(self) -> Connection:
        if self.end is None:
            raise MissingRequirement(f"{self.path}: the emulated device is not running", "call restart()")
        return self.end

    def _send(self, command: str, **arguments: Any) -> None:
        self._recover()
        pipe = self._pipe
        self._in_command = True
        try:
            pipe.send((command, arguments))
        except (BrokenPipeError, ConnectionResetError):
            raise self._dead() from None

    def _recover(self) -> None:
        if self._in_command:
            self.restart()

    def _receive(self) -> Data | dict[str, Any]:
        pipe = self._pipe
        self._in_command = True
        try:
            if not pipe.poll(ANSWER_S):
                raise self._dead(silent=True)
            found: Data | dict[str, Any] | Exception = receive(pipe)
        except EOFError:
            raise self._dead() from None
        if isinstance(found, Exception):
            self._in_command = False
            raise found
        return found

    def _dead(self, silent: bool = False) -> MissingRequirement:
        if silent:
            how = f"says nothing for {ANSWER_S:.0f} s"
        else:
            code = self.process.wait()
            how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self.kill()
        return MissingRequirement(f"{self.path}: the emulated device {how}", "call restart(): acknowledged data is intact")

    def _ended(self, found: Data | dict[str, Any]) -> dict[str, Any]:
        assert not isinstance(found, Data), "what ends a command has no data"
        self._in_command = False
        self.last = found["report"]
        self.report.add(self.last)
        return found

    def _block(self, data: Data) -> ScoreBlock:
        block = decode(data.head, data.base, self._shared.bytes_of(data).view(np.uint16).reshape(-1, 2))
        self._shared.consumed(data)
        return block

    def execute(
        self,
        queries: Floats,
        sequence: int,
        layer: int,
        *,
        pages: Pages | None = None,
        combine: str = "max",
        block_tokens: int = BLOCK_TOKENS,
    ) -> Iterator[ScoreBlock]:
        """Start to score the keys of a layer (or of `pages`), and return an iterator over the score blocks.

        `queries` [heads, head_dim] float32. The iteration raises the errors of the device.
        """
        if queries.ndim != 2 or queries.shape[1] != self.shape.head_dim or queries.dtype != np.float32:
            raise ValueError(f"queries: must be float32 [heads, {self.shape.head_dim}], not {queries.dtype} {queries.shape}")
        runs = page_runs(np.asarray([] if pages is None else pages, np.int64))
        if pages is not None and not len(runs):
            raise ValueError("pages: must not be empty")
        options = {"queries": queries, "runs": runs, "combine": combine, "block_tokens": block_tokens}
        self._send("execute_program", sequence=sequence, layer=layer, **options)
        return self._blocks()

    def _blocks(self) -> Iterator[ScoreBlock]:
        found = self._receive()
        try:
            while isinstance(found, Data):
                yield self._block(found)
                found = self._receive()
        except GeneratorExit:  # the remaining blocks must not be taken for the next reply
            with contextlib.suppress(LlmcacheError):
                while isinstance(found := self._receive(), Data):
                    self._shared.consumed(found)
                self._ended(found)
            raise
        self._ended(found)

    def append(self, sequence: int, layer: int, keys: Rows, values: Rows) -> None:
        for part in self._shares(keys.shape[1], self.shape.token_bytes):
            self._change("write", sequence=sequence, layer=layer, keys=keys[:, part], values=values[:, part])
            self._count_pages(sequence, layer, part.stop - part.start)

    def append_tokens(self, sequence: int, ids: Int64s, positions: Int64s) -> None:
        for part in self._shares(len(ids), 16):
            self._change("write_tokens", sequence=sequence, ids=ids[part], positions=positions[part])
            self._count_pages(sequence, self.shape.layers, part.stop - part.start)

    def _shares(self, tokens: int, token_bytes: int) -> list[slice]:
        pages = max(1, WRITE_BYTES // (token_bytes * self.shape.page_tokens))
        step = pages * self.shape.page_tokens
        return [slice(first, min(tokens, first + step)) for first in range(0, tokens, step)]

    def _count_pages(self, sequence: int, layer: int, tokens: int) -> None:
        pages = self._pages.setdefault(sequence, [0] * (self.shape.layers + 1))
        pages[layer] += self.shape.pages_of(tokens)

    def pages(self, sequence: int, layer: int) -> int:
        self._recover()
        return self._pages.get(sequence, [0] * (self.shape.layers + 1))[layer]

    def read(self, sequence: int, layer: int, pages: Pages, sides: Sequence[int] = (KEYS, VALUES)) -> list[Rows]:
        wanted = np.asarray(pages, np.int64)
        self._send("read", sequence=sequence, layer=layer, pages=wanted, sides=sides)
        slots = [np.empty((len(wanted), self.shape.slot_sizes[side]), np.uint8) for side in sides]
        # The sides alternate, in batches.
        left = [of_side.reshape(-1) for of_side in slots]
        turn = 0
        while isinstance(found := self._receive(), Data):
            left[turn][: found.size_bytes] = self._shared.bytes_of(found)
            left[turn] = left[turn][found.size_bytes :]
            self._shared.consumed(found)
            turn = (turn + 1) % len(left)
        self._ended(found)
        return [view_slots(self.shape, of_side, side) for of_side, side in zip(slots, sides, strict=True)]

    def gather(self, sequence: int, layer: int, positions: list[Int64s]) -> list[Rows]:
        """Read single rows of a layer over the link; the device reads their pages.

        `positions`: ascending token numbers of each key head. Returns keys and values [all, dim], ordered by head.
        DataError: a page is damaged.
        """
        rows = [np.empty(*form) for form in self.shape.forms(sum(map(len, positions)))]
        if len(rows[0]):
            token_numbers = [of_head.astype(np.uint32) for of_head in positions]
            self._send("gather", sequence=sequence, layer=layer, positions=token_numbers)
            for _, parts in shares(self.shape, positions):
                for side in rows:
                    self._take(side, parts)
            self._ended(self._receive())
        return rows

    def _take(self, side: Rows, parts: list[slice]) -> None:
        found = self._receive()
        assert isinstance(found, Data)
        data = self._shared.bytes_of(found).view(side.dtype).reshape(-1, *side.shape[1:])
        done = 0
        for part in parts:
            side[part] = data[done : done + part.stop - part.start]
            done += part.stop - part.start
        self._shared.consumed(found)

    def truncate(self, sequence: int, pages: int) -> None:
        if sequence in self._pages:  # before the command, so that removed pages do not count as lost
            self._pages[sequence] = [min(pages, count) for count in self._pages[sequence]]
        self._change("deallocate", sequence=sequence, pages=pages)

    def flush(self) -> None:
        self._change("flush")


def page_runs(pages: Int64s) -> NDArray[np.uint32]:
    """Return `pages` as runs [n, 2]: first page, number of pages."""
    starts = np.flatnonzero(np.diff(pages, prepend=-2) != 1)
    counts = np.diff(starts, append=len(pages))
    return np.stack([pages[starts], counts], axis=1).astype(np.uint32)


def _environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path}
