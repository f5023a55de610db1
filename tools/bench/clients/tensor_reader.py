"""Client: makes passes over a model (GGUF or safetensors), as a decoder does for each token, without computing.

A pass touches the tensors in the order in which a decoder computes, but only one row of the embedding. The file is mapped
and used in place, as llama.cpp and the safetensors library do. `--load` first touches every tensor once in the order of the
file. `--skip TEXT` skips tensors with TEXT in their name, like an engine that has copied them. `--read` reads the file into
private memory and makes the passes there. `--cold` drops the file from the page cache before each pass, and `--random`
disables readahead.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Python searches the directory of a script for modules, not the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from llmcache.model import read_layout
from llmcache.model.tensors import is_embedding
from tools.bench.clients import StepFields, steps

PAGE = 4096
PIECE = 64 << 10


def touch(data: memoryview) -> None:
    """Read every byte, because `llmcache tokens` sets breakpoints on single addresses."""
    for first in range(0, len(data), PIECE):
        bytes(data[first : first + PIECE])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("passes", type=int)
    parser.add_argument("--load", action="store_true", help="touch every tensor once before the first pass")
    parser.add_argument("--skip", default="?", metavar="TEXT", help="skip tensors with TEXT in their name")
    parser.add_argument("--read", action="store_true", help="make the passes over a private copy of the file")
    parser.add_argument("--cold", action="store_true", help="drop the file from the page cache before each pass")
    parser.add_argument("--random", action="store_true", help="disable readahead")
    parser.add_argument("--settle", type=float, default=0.0, help="seconds between loading and the first pass")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between passes")
    args = parser.parse_args()
    begin = time.perf_counter()
    fd = os.open(args.file, os.O_RDONLY)
    layout = read_layout(lambda offset, count: os.pread(fd, count, offset), os.fstat(fd).st_size, args.file)
    assert layout is not None
    shared = mmap.mmap(-1, PAGE) if args.read else mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    if args.random:
        shared.madvise(mmap.MADV_RANDOM)
    data = memoryview(Path(args.file).read_bytes() if args.read else shared)
    regions = [one for one in layout.regions()[1:] if args.skip not in one.name]
    if args.load:
        for tensor in layout.tensors:
            touch(data[tensor.offset : tensor.end])
    time.sleep(args.settle)

    def one_pass(index: int) -> Callable[[], StepFields]:
        if args.cold:
            shared.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        for region in regions:
            first, size = region.first_byte, region.size_bytes
            if is_embedding(region.name):
                first, size = first + PAGE * (index * 7919 % max(1, size // PAGE)), min(PAGE, size)
            touch(data[first : first + size])
        return dict

    steps(begin, args.passes, one_pass, pause=args.pause)


if __name__ == "__main__":
    main()
