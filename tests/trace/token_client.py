"""Client that makes passes over a mapped model, tensor by tensor in the order of a decoder, and prints a line per pass.

`--skip TEXT` skips tensors with TEXT in their name, like an engine that has copied them. `--read` reads the file into
memory first and makes the passes there. `--cold` drops the file from the page cache before each pass, `--random` disables
readahead. `--pause` sleeps after each pass.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from llmcache.model import read_layout
from llmcache.model.tensors import is_embedding

PAGE = 4096
PIECE = 64 << 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("passes", type=int)
    parser.add_argument("--skip", default="?")
    parser.add_argument("--read", action="store_true")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--settle", type=float, default=1.0, help="seconds between loading and the first pass")
    args = parser.parse_args()
    fd = os.open(args.file, os.O_RDONLY)
    size = os.fstat(fd).st_size
    layout = read_layout(lambda offset, count: os.pread(fd, count, offset), size, args.file)
    assert layout is not None
    regions = [one for one in layout.regions()[1:] if not is_embedding(one.name) and args.skip not in one.name]
    shared = mmap.mmap(-1 if args.read else fd, 0 if not args.read else PAGE, prot=mmap.PROT_READ)
    if args.random:
        shared.madvise(mmap.MADV_RANDOM)
    data: mmap.mmap | bytes = shared
    if args.read:
        data = b"".join(os.pread(fd, PIECE, offset) for offset in range(0, size, PIECE))
    time.sleep(args.settle)
    for number in range(args.passes):
        if args.cold:
            shared.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        for region in regions:
            for offset in range(region.first_byte, region.end, PIECE):
                bytes(data[offset : min(offset + PIECE, region.end)])
        print(number, flush=True)
        time.sleep(args.pause)


if __name__ == "__main__":
    main()
