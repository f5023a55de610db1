"""Client: reads a file from begin to end, again and again, in one thread; prints one JSON line per pass.

`--how read` preads blocks into one buffer, `direct` does so with O_DIRECT, `mmap` touches every 4 KiB page.
`--check FILE` compares the CRC of every MiB with a JSON list (see `crcs`), and counts wrong ones.
`--compute SECONDS` sleeps in place of computing, as long for each pass, a part of it after each block.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

MIB = 1 << 20


def say(**fields: object) -> None:
    """Print one event at once; the reader samples the storage counters when it sees it."""
    print(json.dumps(fields), flush=True)


def crcs(path: Path) -> list[int]:
    """Return the CRC of every MiB of a file."""
    with path.open("rb") as file:
        return [zlib.crc32(block) for block in iter(lambda: file.read(MIB), b"")]


def anon_bytes() -> int:
    """Return the private memory and page tables of this process."""
    rows = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    table = {row[0]: row[1] for row in rows if len(row) > 1}
    return 1024 * (int(table["RssAnon:"]) + int(table["VmPTE:"]))


class LoopReader:
    """Gives the blocks of one file, one after the other."""

    def __init__(self, path: str, how: str, block: int) -> None:
        self.how, self.block = how, block
        self.fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if how == "direct" else 0))
        self.size = os.fstat(self.fd).st_size
        self.buffer = memoryview(mmap.mmap(-1, block))
        self.map = memoryview(mmap.mmap(self.fd, self.size, prot=mmap.PROT_READ)) if how == "mmap" else None

    def blocks(self) -> Iterator[memoryview]:
        """Yield every block; a short file is an error."""
        for offset in range(0, self.size, self.block):
            size = min(self.block, self.size - offset)
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
    """Read the file once, spending `compute_s` on it; returns how many MiB were wrong."""
    wrong = 0
    pause_s = compute_s / max(1, -(-reader.size // reader.block))
    for index, block in enumerate(reader.blocks()):
        if expected is not None:
            wrong += zlib.crc32(block) != expected[index]
        elif reader.how == "mmap":
            bytes(block[::4096])  # one byte of each page: faults it, copies next to nothing
        if pause_s:
            time.sleep(pause_s)
    return wrong


def main() -> None:
    """Run the passes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--how", choices=("read", "mmap", "direct"), default="read")
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after the pass that reaches this")
    parser.add_argument("--block", type=int, default=MIB, help="bytes per read (1048576 with --check)")
    parser.add_argument("--check", type=Path, help="JSON list of the CRC of every MiB")
    parser.add_argument("--compute", type=float, default=0.0, help="seconds of computing per pass")
    args = parser.parse_args()

    expected = json.loads(args.check.read_text()) if args.check else None
    begin = time.perf_counter()
    reader = LoopReader(args.file, args.how, MIB if expected is not None else args.block)
    say(event="load", seconds=time.perf_counter() - begin)
    bad = 0
    for index in range(args.passes):
        start = time.perf_counter()
        wrong = run_pass(reader, expected, args.compute)
        say(event="step", index=index, seconds=time.perf_counter() - start, bytes=reader.size, wrong=wrong)
        bad += wrong
        if time.perf_counter() - begin > args.seconds:
            break
    say(event="end", anon_bytes=anon_bytes(), wrong=bad)


if __name__ == "__main__":
    main()
