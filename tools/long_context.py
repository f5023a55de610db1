#!/usr/bin/env python3
"""Has a transformers model answer questions about a long text twice: with transformers' own cache, and with a SpillCache.

    tools/long_context.py                                            the recall model of the tests, 4096 tokens of noise
    tools/long_context.py MODEL --text book.txt --ask "Who is Ishmael?"     your own model, from its directory

In your own script, before:

    model.generate(**inputs)

After:

    enable(model)
    with SpillCache(model.config, token_budget=1024, path="/mnt/nvme") as cache:
        model.generate(**inputs, cache=cache)  # transformers before 5.24: past_key_values=cache

Times are measured on this machine. The spilled cache has memory for its budget only, and chooses tokens from the first one
on. In your own script, short contexts are attended to fully, and pages use free memory. The model runs on a GPU if torch
finds one. The index of keys, which some policies have, counts as memory.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llmcache.errors import DataError, UsageError, run_cli
from llmcache.kv.bench.subject import Run, Subject, answer
from llmcache.kv.policies import policy_class
from llmcache.kv.tasks import RECALL_MODEL, Questions, recall
from llmcache.kv.transformers import SpillCache, cache_argument
from llmcache.units import format_size


def ask(subject: Subject, answering: Callable[[Any], str], cache: Any) -> str:
    """Return the answer of `answering(cache)` with its costs."""
    begin = time.perf_counter()
    answered = answering(cache)
    seconds = time.perf_counter() - begin
    taken = Run(subject.model, cache).memory()
    written = read = 0
    if isinstance(cache, SpillCache):
        written, read = (cache.traffic.bytes_between(*way) for way in (("cpu", "ssd"), ("ssd", "cpu")))
    sizes = {"in memory": taken.kv_bytes + taken.index_bytes, "written": written, "read": read}
    costs = ", ".join(f"{format_size(size):>8} {what}" for what, size in sizes.items())
    return f"{seconds:6.2f} s, {costs}: {answered}"


def from_noise(tokens: int) -> tuple[Subject, Callable[[Any], str]]:
    """Return the recall model, and a function that returns the share of 32 values that it finds in noise."""
    subject = Subject(RECALL_MODEL)
    questions: Questions = recall(np.random.default_rng(0), 1, tokens)
    return subject, lambda cache: f"{answer(subject.model, cache, questions).mean():.0%} right"


def from_text(options: argparse.Namespace) -> tuple[Subject, Callable[[Any], str]]:
    """Return the user's model, and a function that returns its answer to the question about the text."""
    if options.text is None or options.ask is None:
        raise UsageError("--text, --ask: both are needed with MODEL", "add --text FILE and --ask QUESTION")
    try:
        text = options.text.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--text: {options.text}: {error}", "name a text file in UTF-8") from error
    subject = Subject(options.model)
    tokenizer: Any = subject.tokenizer
    inputs = tokenizer(f"{text}\n\n{options.ask}\n", return_tensors="pt").to(subject.model.device)

    def generate(cache: Any) -> str:
        ids = subject.model.generate(**inputs, **cache_argument(cache), max_new_tokens=64, do_sample=False)
        return str(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip()

    return subject, generate


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", metavar="MODEL", help="directory of a model and its tokenizer")
    parser.add_argument("--text", type=Path, help="file that the question is about")
    parser.add_argument("--ask", help="the question")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of noise, without MODEL (default: %(default)s)")
    parser.add_argument("--policy", default="mass")
    parser.add_argument("--budget", type=int, default=128, help="tokens that each new one attends to (default: %(default)s)")
    parser.add_argument("--dir", type=Path, help="directory for the spill file (default: the one for temporary files)")
    return parser.parse_args()


def main() -> int:
    options = _arguments()
    subject, answering = from_noise(options.tokens) if options.model is None else from_text(options)
    config, directory = subject.model.config, options.dir or tempfile.gettempdir()
    pages = policy_class(options.policy).least_pages(options.budget)  # as with no memory beyond the budget
    with SpillCache(
        config, options.policy, token_budget=options.budget, path=directory, cpu_pages=pages, full_tokens=0
    ) as spilled:
        rows = {
            "transformers": ask(subject, answering, transformers.DynamicCache(config=config)),
            f"{options.policy}, {options.budget}": ask(subject, answering, spilled),
        }
    for name, result in rows.items():
        print(f"{name:<16} {result}")
    return 0


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(run_cli(main))
