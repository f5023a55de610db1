"""The host's side of the *emulated* device: starts its process, gives it commands, notices its death, starts it again.

One thread at a time uses a device. It works on one command at a time; while an execution runs, its score blocks come in
as the host asks for them, and the host is free to score its own keys in between.

Ctrl-C may come anywhere in a command: what the device then still sends would be taken for the answer to the next one, and
pages that it has written are not known of. So a device that was interrupted is started anew before it is asked again.
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
from llmcache.errors import DataError, EnvironmentProblem, LlmcacheError
from llmcache.kv.csd.profile import PROFILES, CsdProfile, Report
from llmcache.kv.csd.wire import (
    BLOCK_TOKENS,
    WRITE_BYTES,
    Data,
    ScoreBlock,
    Shared,
    decode,
    receive,
    shares,
)
from llmcache.kv.spill import KvShape
from llmcache.kv.spill.layout import KEYS, VALUES, view_slots

ANSWER_S = 120.0
"""A device that says nothing for so long is taken for dead: the longest answer is a flush of a slow disk."""

Rows = NDArray[Any]
Pages = Int64s | list[int]


class EmulatedCsd:
    """An *emulated* computational SSD (CSx) over the spill file `path`; a context manager.

    `create` makes the file, else it is opened; `direct` and errors as there. `threads` of the engine: None for one
    a processor. `report` adds up what all commands took, `last` is what the last one took.
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
        self._amid = False  # from the first byte of a command to the last of its answer
        self.end: Connection | None = None
        self._pages = self._start(create)

    # The process

    def _start(self, create: bool, again: bool = False) -> dict[int, list[int]]:
        """Starts the process and has it open the file; returns the pages that are there."""
        ours, theirs = Pipe()
        memory = Shared.make()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "llmcache.kv.csd.device", str(theirs.fileno()), str(memory)],
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
            found = self._command("open", create=create, again=again, **opening)
        except BaseException:
            self.kill()
            raise
        self.direct: bool = found["direct"]
        pages: dict[int, list[int]] = found["pages"]
        return pages

    def restart(self) -> None:
        """Starts a device anew over the same file; DataError if acknowledged pages are missing."""
        self.kill()
        found = self._start(create=False, again=True)
        for sequence, pages in self._pages.items():
            there = found.get(sequence, [0] * len(pages))
            if any(mine > theirs for mine, theirs in zip(pages, there, strict=True)):
                lost = f"the file has {there} pages by layer, but {pages} were acknowledged"
                raise DataError(f"{self.path}: sequence {sequence}: {lost}", "compute the context again")
        self._pages = found

    def kill(self) -> None:
        """Ends the device at once, as a fault would; what it has acknowledged is in the file."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._amid = False
        if self.end is not None:
            self.end.close()
            self.end = None

    def close(self) -> None:
        """Ends the device once it has flushed its file; EnvironmentProblem if it did not end well."""
        if self.end is None:
            return
        try:
            if not self._amid:  # else it flushes as it sees that the host is gone
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
        else:  # the error that is under way says more than one that follows from it
            with contextlib.suppress(EnvironmentProblem):
                self.close()

    # Commands

    def _command(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Gives a command and returns its result."""
        self._send(command, **arguments)
        return self._ended(self._receive())

    def _change(self, command: str, **arguments: Any) -> None:
        """Gives a command that writes. DataError: nothing was done, and pages are lost that had been acknowledged."""
        try:
            self._command(command, **arguments)
        except DataError:
            self._pages = self._command("identify")["pages"]
            raise

    @property
    def _pipe(self) -> Connection:
        """What leads to the device; EnvironmentProblem if it does not run."""
        if self.end is None:
            raise EnvironmentProblem(f"{self.path}: the emulated device is not running", "call restart()")
        return self.end

    def _send(self, command: str, **arguments: Any) -> None:
        self._recover()
        pipe = self._pipe
        self._amid = True
        try:
            pipe.send((command, arguments))
        except (BrokenPipeError, ConnectionResetError):
            raise self._dead() from None

    def _recover(self) -> None:
        if self._amid:
            self.restart()

    def _receive(self) -> Data | dict[str, Any]:
        pipe = self._pipe
        self._amid = True
        try:
            if not pipe.poll(ANSWER_S):
                raise self._dead(silent=True)
            found: Data | dict[str, Any] | Exception = receive(pipe)
        except EOFError:
            raise self._dead() from None
        if isinstance(found, Exception):
            self._amid = False
            raise found
        return found

    def _dead(self, silent: bool = False) -> EnvironmentProblem:
        if silent:
            how = f"says nothing for {ANSWER_S:.0f} s"
        else:
            code = self.process.wait()
            how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self.kill()
        return EnvironmentProblem(f"{self.path}: the emulated device {how}", "call restart(): acknowledged data is intact")

    def _ended(self, found: Data | dict[str, Any]) -> dict[str, Any]:
        """Returns the result of a command that has ended, and adds its report."""
        assert not isinstance(found, Data), "what ends a command has no data"
        self._amid = False
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
        """Executes the program: starts to score the keys of a layer (of `pages`, if given), and returns blocks as they come.

        `queries` [heads, head_dim] float32, a multiple of kv_heads. The blocks that come are of `block_tokens` tokens or
        fewer; errors of the device are raised where they are iterated over. Only what is scored is read inside; pages that
        follow each other cost 8 bytes of the link, however many they are.
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
        except GeneratorExit:  # what is still to come must not be taken for the next answer
            with contextlib.suppress(LlmcacheError):
                while isinstance(found := self._receive(), Data):
                    self._shared.consumed(found)
                self._ended(found)
            raise
        self._ended(found)

    def append(self, sequence: int, layer: int, keys: Rows, values: Rows) -> None:
        """Writes pages of keys and values to a layer, over the link; arguments and errors as `SpillFile.append`."""
        for part in self._shares(keys.shape[1], self.shape.token_bytes):
            self._change("write", sequence=sequence, layer=layer, keys=keys[:, part], values=values[:, part])
            self._note(sequence, layer, part.stop - part.start)

    def append_tokens(self, sequence: int, ids: Int64s, positions: Int64s) -> None:
        """Writes the ids and positions of tokens; as `SpillFile.append_tokens`."""
        for part in self._shares(len(ids), 16):
            self._change("write_tokens", sequence=sequence, ids=ids[part], positions=positions[part])
            self._note(sequence, self.shape.layers, part.stop - part.start)

    def _shares(self, tokens: int, token_bytes: int) -> list[slice]:
        """Parts of whole pages, each for one command."""
        pages = max(1, WRITE_BYTES // (token_bytes * self.shape.page_tokens))
        step = pages * self.shape.page_tokens
        return [slice(first, min(tokens, first + step)) for first in range(0, tokens, step)]

    def _note(self, sequence: int, layer: int, tokens: int) -> None:
        pages = self._pages.setdefault(sequence, [0] * (self.shape.layers + 1))
        pages[layer] += self.shape.pages_of(tokens)

    def pages(self, sequence: int, layer: int) -> int:
        """Returns how many pages of a layer the device has acknowledged."""
        self._recover()
        return self._pages.get(sequence, [0] * (self.shape.layers + 1))[layer]

    def read(self, sequence: int, layer: int, pages: Pages, sides: Sequence[int] = (KEYS, VALUES)) -> list[Rows]:
        """Fetches whole pages of a layer over the link, keys and values or one of both; as `SpillFile.read`."""
        wanted = np.asarray(pages, np.int64)
        self._send("read", sequence=sequence, layer=layer, pages=wanted, sides=sides)
        slots = [np.empty((len(wanted), self.shape.slot_sizes[side]), np.uint8) for side in sides]
        # They come in turns, in parts.
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
        """Fetches single rows of a layer over the link; the pages that they lie in are read inside the device.

        `positions`: ascending token numbers of each key head. Returns keys and values [all, dim], those of one head after
        the other. ValueError: there is no such token; DataError: a page is damaged.
        """
        rows = [np.empty(*form) for form in self.shape.forms(sum(map(len, positions)))]
        if len(rows[0]):
            asked = [of_head.astype(np.uint32) for of_head in positions]
            self._send("gather", sequence=sequence, layer=layer, positions=asked)
            for _, parts in shares(self.shape, positions):
                for side in rows:
                    self._take(side, parts)
            self._ended(self._receive())
        return rows

    def _take(self, side: Rows, parts: list[slice]) -> None:
        """Copies what comes next over the link to `parts` of the rows of a side."""
        found = self._receive()
        assert isinstance(found, Data)
        data = self._shared.bytes_of(found).view(side.dtype).reshape(-1, *side.shape[1:])
        done = 0
        for part in parts:
            side[part] = data[done : done + part.stop - part.start]
            done += part.stop - part.start
        self._shared.consumed(found)

    def truncate(self, sequence: int, pages: int) -> None:
        """Deallocates all pages of a sequence from number `pages` on; as `SpillFile.truncate`."""
        if sequence in self._pages:  # before the command: what is gone then has not been lost
            self._pages[sequence] = [min(pages, there) for there in self._pages[sequence]]
        self._change("deallocate", sequence=sequence, pages=pages)

    def flush(self) -> None:
        """Returns when everything acknowledged is on the disk."""
        self._change("flush")


def page_runs(pages: Int64s) -> NDArray[np.uint32]:
    """Returns `pages` as runs [n, 2]: the first page, and how many follow each other from there on."""
    starts = np.flatnonzero(np.diff(pages, prepend=-2) != 1)
    counts = np.diff(starts, append=len(pages))
    return np.stack([pages[starts], counts], axis=1).astype(np.uint32)


def _environment() -> dict[str, str]:
    """The environment of the device: it must find this package wherever the program was started."""
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path}
