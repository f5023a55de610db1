"""Client: reads files as a stage of a pattern specifies (see `tools/bench/patterns.py`), pass by pass.

PLAN is the JSON of the stage, FILE the files in the order of their numbers. For a stage of several readers, the process
forks one child per reader. They start each pass together, and a pass lasts until the last of them has finished it.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Python searches the directory of a script for modules, not the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tools.bench.clients import StepFields, anon_bytes, steps

PAGE = 4096
MIB = 1 << 20


class Reader:
    """One reader of the stage, with its files."""

    def __init__(self, plan: dict[str, Any], fds: list[int]) -> None:
        self.how: str = plan["how"]
        self.idle_s: float = plan["idle_s"]
        self.passes = [array("Q", one) for one in plan["passes"]]  # lists of integers take four times the memory
        self.fds = fds
        self.views: list[memoryview] = []
        if self.how == "mmap":
            maps = [mmap.mmap(fd, 0, prot=mmap.PROT_READ) for fd in fds]
            for number in plan["advised"]:
                maps[number].madvise(mmap.MADV_RANDOM)
            self.views = [memoryview(one) for one in maps]
        size = sum(sum(one[2::3]) for one in self.passes) if plan["copies"] else MIB
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.memory = memoryview(mmap.mmap(-1, size, flags=private))  # page-aligned, as O_DIRECT needs it
        self.copies: bool = plan["copies"]
        self.copied_bytes = 0

    def run_pass(self, index: int) -> None:
        flat = self.passes[index]
        for at in range(0, len(flat), 3):
            number, first, size = flat[at : at + 3]
            if self.how != "mmap":
                self._pread(self.fds[number], first, size)
            elif self.copies:
                self.memory[self.copied_bytes : self.copied_bytes + size] = self.views[number][first : first + size]
                self.copied_bytes += size
            else:
                bytes(self.views[number][first : first + size : PAGE])  # faults every page and copies only one byte of each
        if not flat:
            time.sleep(self.idle_s)

    def _pread(self, fd: int, first: int, size: int) -> None:
        """Read a range, 1 MiB at a time; EOFError if the file is shorter."""
        for offset in range(first, first + size, MIB):
            wanted = min(MIB, first + size - offset)
            got = os.preadv(fd, [self.memory[self.copied_bytes : self.copied_bytes + wanted]], offset)
            if got != wanted:
                raise EOFError(f"{offset}: {got} of {wanted} bytes")
            self.copied_bytes += wanted if self.copies else 0


def opened(plan: dict[str, Any], files: list[str]) -> Reader:
    """Return a reader with its own file descriptors."""
    flags = os.O_RDONLY | (os.O_DIRECT if plan["how"] == "direct" else 0)
    return Reader(plan, [os.open(file, flags) for file in files])


class Forks:
    """A process for each reader. All run a pass between two barriers."""

    def __init__(self, plans: list[dict[str, Any]], files: list[str], shared: bool) -> None:
        context = multiprocessing.get_context("fork")
        self.barrier = context.Barrier(len(plans) + 1)
        self.anon = context.Array("Q", len(plans), lock=False)
        fds = [os.open(file, os.O_RDONLY) for file in files] if shared else []
        self.children = [
            context.Process(target=self._serve, args=(number, plan, files, fds), daemon=True)
            for number, plan in enumerate(plans)
        ]
        for child in self.children:
            child.start()

    def _serve(self, number: int, plan: dict[str, Any], files: list[str], fds: list[int]) -> None:
        try:
            reader = Reader(plan, fds) if fds else opened(plan, files)
            for index in range(len(reader.passes)):
                self.barrier.wait()
                reader.run_pass(index)
                self.barrier.wait()
            self.anon[number] = anon_bytes()
            self.barrier.wait()
        except BaseException:
            self.barrier.abort()
            raise

    def run_pass(self, _index: int) -> None:
        self.barrier.wait()
        self.barrier.wait()

    def anon_bytes(self) -> int:
        self.barrier.wait()
        return anon_bytes() + sum(int(one) for one in self.anon)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("files", nargs="+")
    args = parser.parse_args()
    stage = json.loads(args.plan.read_text())
    plans = stage["readers"]
    begin = time.perf_counter()
    forks = Forks(plans, args.files, stage["shared"]) if len(plans) > 1 else None
    reader = forks or opened(plans[0], args.files)

    def one_pass(index: int) -> Callable[[], StepFields]:
        reader.run_pass(index)
        return dict

    steps(begin, len(plans[0]["passes"]), one_pass, anon=forks.anon_bytes if forks else anon_bytes)


if __name__ == "__main__":
    main()
