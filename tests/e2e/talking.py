"""Conversations in a separate process, `python -m tests.e2e.talking`: one JSON line per part, answered by one line.

A line has the arguments of `part`. The reply has the token ids, a checksum of the logits of each new token, and the
cache's traffic between tiers. `stock` computes both turns with transformers' own cache, all in memory.
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
CPU_PAGES = 8  # of 16 tokens, per layer; all others are on the mount


@functools.cache
def model() -> Any:
    """Return a Llama with random weights, the same in every process."""
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
    """Generate after `ids`; `cache` may contain the beginning of them."""
    output = model().generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), **cache_argument(cache), max_new_tokens=NEW_TOKENS,
        do_sample=False, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return {"ids": output.sequences[0].tolist(), "logits": [zlib.crc32(each.numpy().tobytes()) for each in output.logits]}


def next_turn(ids: list[int]) -> torch.Tensor:
    """Return the conversation with the user's next turn appended."""
    more = torch.randint(1, 199, (TURN_TOKENS,), generator=torch.Generator().manual_seed(7))
    return torch.cat([torch.tensor(ids), more])[None]


def part(name: str, path: str, last: int) -> dict[str, Any]:
    """Return the reply for a part of the conversation; `last`: the last token generated before it."""
    if name == "stock":
        cache = transformers.DynamicCache(config=model().config)
        first = turn(cache, prompt())
        return {"begin": first, "go-on": turn(cache, next_turn(first["ids"]))}
    enable(model())
    options: dict[str, Any] = {"token_budget": 8192, "cpu_pages": CPU_PAGES, "threads": 2}
    if name == "begin":
        with SpillCache(model().config, path=path, **options) as spilled:
            output = turn(spilled, prompt())
            spilled.save()
            return output | {"traffic": spilled.traffic.to_json()}
    with SpillCache.restore(model(), path, **options) as spilled:
        # The cache has the ids it stores; append the last generated token, whose keys it lacks.
        conversation = [*spilled.ids[0].tolist(), last]
        return turn(spilled, next_turn(conversation)) | {"traffic": spilled.traffic.to_json()}


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(part(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
