"""Client: llama.cpp evaluates given tokens one at a time with a mapped model, or with one that it has read.

The event of a token has the `crc` of the logits; it differs between plain storage and a mount only if a byte was wrong.

By default the tokens count up. With `--topics N` they are a generated text (`text`) with N successive topics, for the models
of `tools/make_model.py --like`, whose routers choose experts by token and topic. `--routing FILE` records the experts that
llama.cpp chose.

`--compute SECONDS` emulates a slower processor: each token takes that much longer, by sleeping in equal parts between the
operations of llama.cpp's graph. A token then takes about the same time on a busy and on an idle machine.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import random
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Python searches the directory of a script for modules, not the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
from numpy.typing import NDArray

from tools.bench.clients import StepFields, steps
from tools.make_model import TOPIC_TOKENS

LEAST_SLEEP_S = 0.002
PROMPT = [1, 300, 301, 302]
COMMON = 0.45
"""Share of common words in a text: tokens of the topic after the one with the control tokens."""
REPEATED, REPEATED_WITHIN = 0.15, 16
"""Share of tokens that repeat one of the last `REPEATED_WITHIN` tokens."""


def text(count: int, vocabulary: int, topics: int, seed: int = 0) -> list[int]:
    """Return `count` tokens of a generated text with `topics` topics, each for an equal share of the text.

    Common words are the same in all topics. The frequencies of common words, and of the words of a topic, follow Zipf's law,
    and a word is likely to be repeated soon. ValueError if the vocabulary has fewer topics.
    """
    known = vocabulary // TOPIC_TOKENS - 2
    if not 1 <= topics <= known:
        raise ValueError(f"a vocabulary of {vocabulary} tokens has {max(0, known)} topics, not {topics}")
    words = random.Random(seed)
    weights = list(itertools.accumulate(1 / rank for rank in range(1, TOPIC_TOKENS + 1)))
    tokens: list[int] = []
    for index in range(count):
        topic = 1 if words.random() < COMMON else 2 + index * topics // count
        recent = [token for token in tokens[-REPEATED_WITHIN:] if token // TOPIC_TOKENS == topic]
        if recent and words.random() < REPEATED:
            tokens.append(words.choice(recent))
        else:
            tokens.append(TOPIC_TOKENS * topic + words.choices(range(TOPIC_TOKENS), cum_weights=weights)[0])
    return tokens


class RoutingRecorder:
    """Records the experts that llama.cpp chooses, by a callback for which llama-cpp-python has no parameter."""

    def __init__(self) -> None:
        """Let all contexts created from now on call this object, which must stay referenced."""
        from llama_cpp import _ggml, llama_cpp

        self._ggml = _ggml.libggml
        self._ggml.ggml_get_name.restype = ctypes.c_char_p
        self._ggml.ggml_get_data.restype = ctypes.c_void_p
        self._ggml.ggml_nbytes.restype = ctypes.c_size_t
        self._callback = llama_cpp.ggml_backend_sched_eval_callback(self._computed)
        self._chosen: list[NDArray[np.int32]] = []
        default = llama_cpp.llama_context_default_params

        def parameters() -> Any:
            made = default()
            made.cb_eval = self._callback
            return made

        llama_cpp.llama_context_default_params = parameters

    def clear(self) -> None:
        self._chosen.clear()

    def routing(self, tokens: int) -> NDArray[np.int64]:
        """Return the experts of `tokens` tokens that were evaluated one at a time: [token, layer, used]."""
        return np.stack(self._chosen).astype(np.int64).reshape(tokens, -1, len(self._chosen[0]))

    def _computed(self, address: int, is_question: bool, _data: object) -> bool:
        """Return whether the result of a tensor is needed, before it is computed; copy it afterwards."""
        tensor = ctypes.c_void_p(address)
        if not self._ggml.ggml_get_name(tensor).startswith(b"ffn_moe_topk"):
            return not is_question
        if not is_question:
            data = ctypes.string_at(self._ggml.ggml_get_data(tensor), self._ggml.ggml_nbytes(tensor))
            self._chosen.append(np.frombuffer(data, np.int32))
        return True


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
    parser.add_argument("--topics", type=int, help="evaluate a generated text of so many topics")
    parser.add_argument("--seed", type=int, default=0, help="seed of the text [%(default)s]")
    parser.add_argument("--routing", type=Path, help="write the experts of each token and layer to this .npy file")
    args = parser.parse_args()

    import llama_cpp  # slow: not for --help

    recorder = RoutingRecorder() if args.routing else None
    begin = time.perf_counter()
    context = max(256, args.tokens + len(PROMPT))
    model = llama_cpp.Llama(args.model, n_ctx=context, n_threads=args.threads, use_mmap=not args.no_mmap, verbose=False)
    vocabulary = model.n_vocab()
    slow = SlowProcessor(model.ctx, args.compute) if args.compute else None
    if args.topics is None:
        tokens = [300 + index % 1000 for index in range(args.tokens)]
    else:
        try:
            tokens = text(args.tokens, vocabulary, args.topics, args.seed)
        except ValueError as error:
            parser.error(f"--topics: {error}")
    model.eval(PROMPT)
    if recorder is not None:
        recorder.clear()

    def token(index: int) -> Callable[[], StepFields]:
        if slow is not None:
            slow.begin()
        model.eval([tokens[index]])
        return lambda: {"crc": zlib.crc32(ctypes.string_at(llama_cpp.llama_get_logits(model.ctx), 4 * vocabulary))}

    steps(begin, args.tokens, token, pause=args.pause)
    if recorder is not None:
        np.save(args.routing, recorder.routing(args.tokens))


if __name__ == "__main__":
    main()
