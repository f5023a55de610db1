#!/usr/bin/env python3
"""A long context in little memory: the same prompt with transformers' own cache and with a spilled one.

    python examples/long_context.py                          # a tiny model with random weights: nothing is downloaded
    python examples/long_context.py ~/models/Llama-3.1-8B --tokens 16384 --budget 1024 --path /mnt/nvme

Before:

    model.generate(**inputs)

After:

    enable(model)
    with SpillCache(model.config, "icecache", token_budget=1024, path="/mnt/nvme") as cache:
        model.generate(**inputs, past_key_values=cache)
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from llmcache.errors import LlmcacheError
from llmcache.kv.transformers import SpillCache, enable

TEXT = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "


def tiny_model() -> Any:
    """A Llama of random weights: what it says means nothing, but its cache is like any other."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 1000}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1 << 17}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, eos_token_id=None)).eval()


def load(directory: str | None, tokens: int) -> tuple[Any, torch.Tensor]:
    """The model in `directory`, or a tiny one, and a prompt of `tokens` for it."""
    if directory is None:
        return tiny_model(), torch.randint(1, 1000, (1, tokens), generator=torch.Generator().manual_seed(1))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto").to(device).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    ids = tokenizer(TEXT * tokens, return_tensors="pt", truncation=True, max_length=tokens)["input_ids"]
    return model, ids.to(device)


def generate(model: Any, ids: torch.Tensor, cache: Any, new_tokens: int) -> tuple[torch.Tensor, float]:
    """The new tokens, and the seconds that they took with the prompt."""
    begin = time.perf_counter()
    asked = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    said = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **asked)
    return said[0, ids.shape[1] :], time.perf_counter() - begin


def main(arguments: Sequence[str] | None = None) -> int:
    """Generates twice and prints what both say, took and kept in memory."""
    parser = argparse.ArgumentParser(description="The same prompt with DynamicCache and with SpillCache.")
    parser.add_argument("model", nargs="?", help="a directory with a model and its tokenizer [default: a tiny random one]")
    parser.add_argument("--tokens", type=int, default=4096, help="of the prompt")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--budget", type=int, default=512, help="tokens that each new token attends to")
    parser.add_argument("--policy", default="icecache", help="icecache, hillinfer, quest, h2o, window, full …")
    parser.add_argument("--path", default=tempfile.gettempdir(), help="directory for the spill file, best on an NVMe SSD")
    asked = parser.parse_args(arguments)
    model, ids = load(asked.model, asked.tokens)

    stock = transformers.DynamicCache(config=model.config)
    plain, seconds = generate(model, ids, stock, asked.new_tokens)
    kept = sum(side.numel() * side.element_size() for layer in stock.layers for side in (layer.keys, layer.values))
    print(f"DynamicCache: {seconds:.2f} s, {kept / 1e6:.1f} MB of keys and values in memory")

    try:
        enable(model)
        with SpillCache(model.config, asked.policy, token_budget=asked.budget, path=asked.path) as cache:
            spilled, seconds = generate(model, ids, cache, asked.new_tokens)
            written = cache.traffic.bytes_between("cpu", "ssd")
            print(f"SpillCache:   {seconds:.2f} s, {cache.store.memory_bytes / 1e6:.1f} MB in memory,", end=" ")
            print(f"{written / 1e6:.1f} MB on the SSD; the index of {asked.policy} comes on top")
    except LlmcacheError as error:
        print(f"{error.message}\n{error.hint}", file=sys.stderr)
        return 2
    same = int((plain == spilled).sum())
    print(f"{same} of {asked.new_tokens} new tokens are the same")
    return 0


if __name__ == "__main__":
    sys.exit(main())
