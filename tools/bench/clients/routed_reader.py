"""Client: reads of a mapped model what a routing says, token by token, as a decoder of a mixture does; one JSON line each.

The plan (see `tools/bench/routing.py`) is an array of u64: for each token the number of its ranges, then their offsets and
lengths, in the order in which they are read. A byte of each page is touched.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

# Run as a script, Python looks for modules beside it and not in the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tools.bench.clients import anon_bytes, say

PAGE = 4096


def tokens(plan: array[int]) -> Iterator[list[tuple[int, int]]]:
    """Yield the ranges of each token."""
    at = 0
    while at < len(plan):
        count = plan[at]
        flat = plan[at + 1 : at + 1 + 2 * count]
        yield list(zip(flat[::2], flat[1::2], strict=True))
        at += 1 + 2 * count


def main() -> None:
    """Read the tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("plan", type=Path)
    args = parser.parse_args()
    plan = array("Q", args.plan.read_bytes())
    begin = time.perf_counter()
    fd = os.open(args.file, os.O_RDONLY)
    view = memoryview(mmap.mmap(fd, 0, prot=mmap.PROT_READ))
    say(event="load", seconds=time.perf_counter() - begin)
    for index, ranges in enumerate(tokens(plan)):
        start = time.perf_counter()
        for offset, length in ranges:
            bytes(view[offset // PAGE * PAGE : offset + length : PAGE])
        say(event="step", index=index, seconds=time.perf_counter() - start)
    say(event="end", anon_bytes=anon_bytes(), wrong=0)


if __name__ == "__main__":
    main()
