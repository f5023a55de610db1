"""Completes prompts of random tokens with llama.cpp, in sequence, and reports the time of each.

Prompts consist of `shared` tokens that all have in common and `own` tokens, the last `question` of which change with --turn.
Prints JSON lines: load, one line per prompt, end.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from tools.bench.clients import say


def prompts(shared: int, own: int, question: int, count: int, turn: int) -> list[list[int]]:
    """Return `count` prompts of shared + own tokens."""

    def drawn(seed: int, tokens: int) -> list[int]:
        return np.random.default_rng(seed).integers(1000, 30000, tokens).tolist()  # type: ignore[no-any-return]

    common = drawn(0, shared)
    return [
        common + drawn(1000 + number, own - question) + drawn(10**6 * (1 + turn) + number, question)
        for number in range(count)
    ]


def cache_of(where: str, shared_tier: str | None) -> Any:
    """Return the cache at `where`: a PrefixCache in a directory, llama-cpp-python's own for disk:DIR, None for an empty
    string.
    """
    if not where:
        return None
    if where.startswith("disk:"):
        import llama_cpp

        return llama_cpp.LlamaDiskCache(where.removeprefix("disk:"), 1 << 40)
    from llmcache.kv.llama import PrefixCache

    return PrefixCache(where, "1T", floor=0, shared=shared_tier, deadline=10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--cache", default="", help="directory; disk:DIR for the cache of llama-cpp-python [no cache]")
    parser.add_argument("--shared-tier", help="shared server of the prefix cache: redis://…")
    numbers = {"shared": 0, "own": 4096, "question": 0, "count": 1, "turn": 0, "tokens": 1, "threads": 2}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    import llama_cpp  # slow: not for --help

    begin = time.perf_counter()
    context = args.shared + args.own + args.tokens + 64
    threads = {"n_threads": args.threads, "n_threads_batch": args.threads}
    model = llama_cpp.Llama(args.model, n_ctx=context, flash_attn=True, verbose=False, **threads)
    model.eval([1, 2])  # loads the pages of the model that the first answer needs, as in a running server
    model.reset()
    cache = cache_of(args.cache, args.shared_tier)
    model.set_cache(cache)
    say(event="load", seconds=time.perf_counter() - begin, token_bytes=_token_bytes(model))
    for prompt in prompts(args.shared, args.own, args.question, args.count, args.turn):
        start, first, pieces = time.perf_counter(), 0.0, 0
        for _ in model.create_completion(prompt, max_tokens=args.tokens, temperature=0, stream=True):
            first = first or time.perf_counter() - start
            pieces += 1
        whole = time.perf_counter() - start
        say(event="answer", first_s=first, whole_s=whole, pieces=pieces, prompt_tokens=len(prompt))
    if hasattr(cache, "flush"):
        cache.close()
        say(event="cache", **vars(cache.counters))
    say(event="end", wrong=0)


def _token_bytes(model: Any) -> int:
    import llama_cpp

    model.eval([1])
    one = llama_cpp.llama_state_seq_get_size(model.ctx, 0)
    model.eval([1])
    two = llama_cpp.llama_state_seq_get_size(model.ctx, 0)
    model.reset()
    return int(two - one)


if __name__ == "__main__":
    main()
