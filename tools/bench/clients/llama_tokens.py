"""Client: llama.cpp decodes single tokens with a mapped model, or with one that it has read.

The event of a token has the `crc` of the logits; it differs between plain storage and a mount only if a byte was wrong.

`--compute SECONDS` *emulates* a slower processor: each token takes that much longer, by sleeping in equal parts between the
operations of llama.cpp's graph. A token then takes about the same time on a busy and on an idle machine.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Python searches the directory of a script for modules, not the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tools.bench.clients import StepFields, steps

LEAST_SLEEP_S = 0.002


class SlowProcessor:
    """Sleeps `seconds` per token, in equal parts between operations, and corrects for oversleeping."""

    def __init__(self, context: Any, seconds: float) -> None:
        """Sleep from the second token on, as long as this object exists; the first token counts the operations."""
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
        """Sleep as needed before an operation of llama.cpp; return whether to abort."""
        self._done += 1
        if self._operations:
            due_s = self._seconds * self._done / self._operations - self._slept_s
            if due_s >= LEAST_SLEEP_S:
                start = time.perf_counter()
                time.sleep(due_s)
                self._slept_s += time.perf_counter() - start
        return False


def main() -> None:
    """Load the model, evaluate a short prompt, then time single tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("tokens", type=int)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--no-mmap", action="store_true", help="read the model into memory instead of mapping it")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between tokens")
    parser.add_argument("--compute", type=float, default=0.0, help="seconds of a slower processor per token (emulated)")
    args = parser.parse_args()

    import llama_cpp  # slow: not for --help

    begin = time.perf_counter()
    context = max(256, args.tokens + 4)
    model = llama_cpp.Llama(args.model, n_ctx=context, n_threads=args.threads, use_mmap=not args.no_mmap, verbose=False)
    vocabulary = model.n_vocab()
    slow = SlowProcessor(model.ctx, args.compute) if args.compute else None
    model.eval([1, 300, 301, 302])

    def token(index: int) -> Callable[[], StepFields]:
        if slow is not None:
            slow.begin()
        model.eval([300 + index % 1000])
        return lambda: {"crc": zlib.crc32(ctypes.string_at(llama_cpp.llama_get_logits(model.ctx), 4 * vocabulary))}

    steps(begin, args.tokens, token, pause=args.pause)


if __name__ == "__main__":
    main()
