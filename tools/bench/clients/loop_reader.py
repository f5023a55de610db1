"""Client: reads a file from begin to end repeatedly, in one thread; the event of a pass has the number of `wrong` MiB.

`--how read` preads blocks into one buffer, `direct` does so with O_DIRECT, and `mmap` touches every 4 KiB page. `--check
FILE` compares the CRC of every MiB with a JSON list (see `crcs`) and counts wrong ones. `--compute SECONDS` sleeps for this
time in each pass, in equal parts after the blocks, in place of computing.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

# Python searches the directory of a script for modules, not the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tools.bench.clients import StepFields, steps

MIB = 1 << 20


def crcs(path: Path) -> list[int]:
    with path.open("rb") as file:
        return [zlib.crc32(block) for block in iter(lambda: file.read(MIB), b"")]


class LoopReader:
    """Yields the blocks of a file, 1 MiB each, in order."""

    def __init__(self, path: str, how: str) -> None:
        self.how = how
        self.fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if how == "direct" else 0))
        self.size = os.fstat(self.fd).st_size
        self.buffer = memoryview(mmap.mmap(-1, MIB))
        self.map = memoryview(mmap.mmap(self.fd, self.size, prot=mmap.PROT_READ)) if how == "mmap" else None

    def blocks(self) -> Iterator[memoryview]:
        """Yield every block; EOFError if the file has become shorter."""
        for offset in range(0, self.size, MIB):
            size = min(MIB, self.size - offset)
            if self.map is not None:
                yield self.map[offset : offset + size]
                continue
            got = 0
            while got < size:
                count = os.preadv(self.fd, [self.buffer[got:]], offset + got)
                if count == 0:
                    raise EOFError(f"{offset + got}: end of file, expected {self.size} bytes")
                got += count
            yield self.buffer[:size]


def run_pass(reader: LoopReader, expected: list[int] | None, compute_s: float = 0.0) -> int:
    """Read the file once, sleeping `compute_s` in total; return the number of wrong MiB."""
    wrong = 0
    pause_s = compute_s / max(1, -(-reader.size // MIB))
    for index, block in enumerate(reader.blocks()):
        if expected is not None:
            wrong += zlib.crc32(block) != expected[index]
        elif reader.how == "mmap":
            bytes(block[::4096])  # faults every page and copies only one byte of each
        if pause_s:
            time.sleep(pause_s)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--how", choices=("read", "mmap", "direct"), default="read")
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after the pass in which this time is over")
    parser.add_argument("--check", type=Path, help="JSON list of the CRC of every MiB")
    parser.add_argument("--compute", type=float, default=0.0, help="seconds of computing per pass")
    args = parser.parse_args()

    expected = json.loads(args.check.read_text()) if args.check else None
    begin = time.perf_counter()
    reader = LoopReader(args.file, args.how)

    def one_pass(_index: int) -> Callable[[], StepFields]:
        wrong = run_pass(reader, expected, args.compute)
        return lambda: {"wrong": wrong}

    steps(begin, args.passes, one_pass, args.seconds)


if __name__ == "__main__":
    main()
