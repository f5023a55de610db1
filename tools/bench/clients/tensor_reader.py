"""Client: reads a safetensors file as the safetensors library does for transformers.

The header is read with read(). Then the file is mapped and every tensor is a slice of the mapping, used in place. Loading
touches every tensor once in the order of the header. A pass (one token) touches the tensors in the order in which a decoder
computes, but only one row of the embedding.
"""

from __future__ import annotations

import argparse
import json
import mmap
import struct
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

# Python searches the directory of a script for modules, not the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from llmcache.model.tensors import compute_key, is_embedding
from tools.bench.clients import StepFields, steps

PAGE = 4096
ROW_BYTES = 4096


class Tensors:
    """The tensors of one mapped file, by name."""

    def __init__(self, path: str) -> None:
        with open(path, "rb", buffering=0) as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
            self._map = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        header.pop("__metadata__", None)
        self.places: dict[str, tuple[int, int]] = {
            name: (8 + length + entry["data_offsets"][0], 8 + length + entry["data_offsets"][1])
            for name, entry in header.items()
        }

    def __getitem__(self, name: str) -> memoryview:
        begin, end = self.places[name]
        return self._map[begin:end]


def touch(data: memoryview) -> int:
    return zlib.crc32(bytes(data[::PAGE]) + bytes(data[-1:]))


def token(tensors: Tensors, order: list[str], index: int) -> int:
    """Read the data that one token needs; return a checksum."""
    crc = 0
    for name in order:
        data = tensors[name]
        if is_embedding(name):
            row = ROW_BYTES * (index * 7919 % max(1, len(data) // ROW_BYTES))
            data = data[row : row + ROW_BYTES]
        crc ^= touch(data)
    return crc


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("passes", type=int)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between passes")
    args = parser.parse_args()
    begin = time.perf_counter()
    tensors = Tensors(args.file)
    for name in tensors.places:
        touch(tensors[name])
    order = sorted(tensors.places, key=compute_key)

    def one_pass(index: int) -> Callable[[], StepFields]:
        crc = token(tensors, order, index)
        return lambda: {"crc": crc}

    steps(begin, args.passes, one_pass, pause=args.pause)


if __name__ == "__main__":
    main()
