"""Client: llama.cpp, one token at a time over a mapped model (or one that it has read); prints one JSON line per token.

Lines: {"event": "load"|"step"|"end", ...}. A step has `start` (seconds since the client began), `seconds`, `read_bytes`
(what this process itself caused the block layer to read, so 0 over a mount) and `crc` (of the logits: the same over
plain storage and over a mount, or a byte was wrong).

`--compute SECONDS` stands for a slower processor, *emulated*: so much longer per token, slept between the operations of
llama.cpp's graph in equal parts. A token then takes about as long on a busy machine as on a quiet one.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
import zlib
from pathlib import Path
from typing import Any

LEAST_SLEEP_S = 0.002


def say(**fields: object) -> None:
    """Print one event at once; the reader samples the storage counters when it sees it."""
    print(json.dumps(fields), flush=True)


def status_bytes(field: str) -> int:
    """Return a kB field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def read_bytes() -> int:
    """Return the bytes that this process has caused storage to read."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes"):
            return int(line.split()[1])
    raise KeyError("read_bytes")


class SlowProcessor:
    """Sleeps `seconds` during each token, a part of it between each two operations; what is overslept is made up for."""

    def __init__(self, context: Any, seconds: float) -> None:
        """Is in effect as long as it lives, from the second token on: the first one tells how many operations there are."""
        import llama_cpp

        self._seconds = seconds
        self._operations = self._done = 0
        self._slept_s = 0.0
        self._callback = llama_cpp.llama_cpp.ggml_abort_callback(self._operation)
        llama_cpp.llama_set_abort_callback(context, self._callback, ctypes.c_void_p(None))

    def begin(self) -> None:
        """Begin a token."""
        self._operations, self._done, self._slept_s = self._done, 0, 0.0

    def _operation(self, _data: object) -> bool:
        """What llama.cpp asks before each operation: whether to give up."""
        self._done += 1
        if self._operations:
            due_s = self._seconds * self._done / self._operations - self._slept_s
            if due_s >= LEAST_SLEEP_S:
                start = time.perf_counter()
                time.sleep(due_s)
                self._slept_s += time.perf_counter() - start
        return False


def main() -> None:
    """Load the model, feed a short prompt, then time single tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("tokens", type=int)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long")
    parser.add_argument("--no-mmap", action="store_true", help="read the model into memory in place of mapping it")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between tokens")
    parser.add_argument("--compute", type=float, default=0.0, help="seconds of a slower processor per token (emulated)")
    parser.add_argument("--json", action="store_true", help="accepted for symmetry: output is always JSON lines")
    args = parser.parse_args()

    import llama_cpp  # slow: not for --help

    begin = time.perf_counter()
    model = llama_cpp.Llama(args.model, n_ctx=256, n_threads=args.threads, use_mmap=not args.no_mmap, verbose=False)
    vocabulary = model.n_vocab()
    slow = SlowProcessor(model.ctx, args.compute) if args.compute else None
    model.eval([1, 300, 301, 302])
    say(event="load", seconds=time.perf_counter() - begin)
    for index in range(args.tokens):
        if slow is not None:
            slow.begin()
        before, start = read_bytes(), time.perf_counter()
        model.eval([300 + index % 1000])
        took = time.perf_counter() - start
        crc = zlib.crc32(ctypes.string_at(llama_cpp.llama_get_logits(model.ctx), 4 * vocabulary))
        say(event="step", index=index, start=start - begin, seconds=took, read_bytes=read_bytes() - before, crc=crc)
        if time.perf_counter() - begin > args.seconds:
            break
        time.sleep(args.pause)
    say(event="end", anon_bytes=status_bytes("RssAnon") + status_bytes("VmPTE"), wrong=0)


if __name__ == "__main__":
    main()
