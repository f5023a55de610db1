"""Conversations in a process of its own, `python -m tests.e2e.talking`: a JSON line for each part, answered by one.

A line is the arguments of `part`. What is answered: the token ids, a checksum of the logits of each new token, and what the
cache moved between its tiers. `stock` has both turns with transformers' own cache, everything in memory.
"""

from __future__ import annotations

import functools
import json
import sys
import zlib
from typing import Any

import torch
import transformers

from llmcache.kv.transformers import SpillCache, cache_argument, enable

transformers.logging.set_verbosity_error()
torch.set_num_threads(2)

PROMPT_TOKENS, TURN_TOKENS, NEW_TOKENS = 2200, 40, 8
CPU_PAGES = 8  # of 16 tokens, per layer: all else is on the mount


@functools.cache
def model() -> Any:
    """Return a Llama of random weights, the same in every process."""
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=199, hidden_size=256, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=8192, initializer_range=0.1, eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def prompt() -> torch.Tensor:
    """Return the first turn [1, PROMPT_TOKENS]."""
    return torch.randint(1, 199, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(6))


def turn(cache: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Generate behind `ids`, of which `cache` may hold the beginning."""
    said = model().generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), **cache_argument(cache), max_new_tokens=NEW_TOKENS,
        do_sample=False, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return {"ids": said.sequences[0].tolist(), "logits": [zlib.crc32(each.numpy().tobytes()) for each in said.logits]}


def next_turn(ids: list[int]) -> torch.Tensor:
    """Return what was said so far and a user's next turn."""
    more = torch.randint(1, 199, (TURN_TOKENS,), generator=torch.Generator().manual_seed(7))
    return torch.cat([torch.tensor(ids), more])[None]


def part(name: str, path: str, last: int) -> dict[str, Any]:
    """Return what a part of the conversation says; `last`: the last token that was said before it."""
    if name == "stock":
        cache = transformers.DynamicCache(config=model().config)
        first = turn(cache, prompt())
        return {"begin": first, "go-on": turn(cache, next_turn(first["ids"]))}
    enable(model())
    options: dict[str, Any] = {"token_budget": 8192, "cpu_pages": CPU_PAGES, "threads": 2}
    if name == "begin":
        with SpillCache(model().config, path=path, **options) as spilled:
            said = turn(spilled, prompt())
            spilled.save()
            return said | {"traffic": spilled.traffic.to_json()}
    with SpillCache.restore(model(), path, **options) as spilled:
        # What it holds, and the last token that was said, whose keys it lacks.
        known = [*spilled.ids[0].tolist(), last]
        return turn(spilled, next_turn(known)) | {"traffic": spilled.traffic.to_json()}


def main() -> None:
    """Answer every line."""
    for line in sys.stdin:
        print(json.dumps(part(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
