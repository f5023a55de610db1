"""Client: llama.cpp evaluates given tokens one at a time over a mapped model (or one that it has read into memory).

The event of each token has the `crc` of the logits: the same over plain storage and over a mount, or a byte was wrong.

By default the tokens count up. With `--topics N` they are a generated text (`text`) of N topics, one after the other, for
the models of `tools/make_model.py --like`, whose routers choose experts by token and topic. `--routing FILE` records which
experts llama.cpp chose.

`--compute SECONDS` emulates a slower processor: each token takes so much longer, slept between the operations of llama.cpp's
graph in equal parts. A token then takes about as long on a busy machine as on a quiet one.
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

# Run as a script, Python looks for modules beside it and not in the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
from numpy.typing import NDArray

from tools.bench.clients import Told, steps
from tools.make_model import TOPIC_TOKENS

LEAST_SLEEP_S = 0.002
PROMPT = [1, 300, 301, 302]
COMMON = 0.45
"""Share of a text that are common words: tokens of the first topic after the one with the control tokens."""
REPEATED, REPEATED_WITHIN = 0.15, 16
"""Share of a text that repeats one of so many tokens before."""


def text(count: int, vocabulary: int, topics: int, seed: int = 0) -> list[int]:
    """Return `count` tokens of a generated text with `topics` topics, each for an equal share of the text.

    Common words are the same in all topics. Common words, and the words of a topic, are each used by Zipf's law, and a word
    is likely to be repeated soon. ValueError if the vocabulary has fewer topics.
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
    """Records which experts llama.cpp chooses; llama-cpp-python has no parameter for the callback that this needs."""

    def __init__(self) -> None:
        """Have every context that is made from now on call this object, which must stay referenced."""
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
        """Forget what has been recorded."""
        self._chosen.clear()

    def routing(self, tokens: int) -> NDArray[np.int64]:
        """Return the experts of so many tokens, evaluated one at a time: [token, layer, used]."""
        return np.stack(self._chosen).astype(np.int64).reshape(tokens, -1, len(self._chosen[0]))

    def _computed(self, address: int, is_question: bool, _data: object) -> bool:
        """Return whether a tensor is wanted, before it is computed; copy it afterwards."""
        tensor = ctypes.c_void_p(address)
        if not self._ggml.ggml_get_name(tensor).startswith(b"ffn_moe_topk"):
            return not is_question
        if not is_question:
            data = ctypes.string_at(self._ggml.ggml_get_data(tensor), self._ggml.ggml_nbytes(tensor))
            self._chosen.append(np.frombuffer(data, np.int32))
        return True


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

    def token(index: int) -> Callable[[], Told]:
        if slow is not None:
            slow.begin()
        model.eval([tokens[index]])
        return lambda: {"crc": zlib.crc32(ctypes.string_at(llama_cpp.llama_get_logits(model.ctx), 4 * vocabulary))}

    steps(begin, args.tokens, token, pause=args.pause)
    if recorder is not None:
        np.save(args.routing, recorder.routing(args.tokens))


if __name__ == "__main__":
    main()
