"""A conversation in a process of its own: `python -m tests.e2e.talking begin|go-on|stock FILE.kv --ssd file|csd`.

Prints one JSON line: the token ids, a checksum of the logits of each new token, and what the cache moved between its
tiers. `stock` has both turns with transformers' own cache, everything in memory.
"""

from __future__ import annotations

import argparse
import functools
import json
import zlib
from typing import Any

import torch
import transformers

from llmcache.kv.transformers import SpillCache, enable

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
        input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=NEW_TOKENS,
        do_sample=False, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return {"ids": said.sequences[0].tolist(), "logits": [zlib.crc32(each.numpy().tobytes()) for each in said.logits]}


def next_turn(ids: list[int]) -> torch.Tensor:
    """Return what was said so far and a user's next turn."""
    more = torch.randint(1, 199, (TURN_TOKENS,), generator=torch.Generator().manual_seed(7))
    return torch.cat([torch.tensor(ids), more])[None]


def main() -> None:
    """Run one process of the conversation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("begin", "go-on", "stock"))
    parser.add_argument("path", nargs="?")
    parser.add_argument("--ssd", default="file")
    args = parser.parse_args()
    if args.part == "stock":
        cache = transformers.DynamicCache(config=model().config)
        first = turn(cache, prompt())
        print(json.dumps({"begin": first, "go-on": turn(cache, next_turn(first["ids"]))}))
        return
    enable(model())
    options: dict[str, Any] = {"token_budget": 8192, "cpu_pages": CPU_PAGES, "ssd": args.ssd, "threads": 2}
    if args.part == "begin":
        with SpillCache(model().config, path=args.path, **options) as spilled:
            said = turn(spilled, prompt())
            spilled.save()
            print(json.dumps(said | {"traffic": spilled.traffic.to_json()}))
        return
    with SpillCache.restore(model(), args.path, **options) as spilled:
        # What it holds, and the last token that was said, whose keys it lacks.
        known = [*spilled.ids[0].tolist(), int(input())]
        print(json.dumps(turn(spilled, next_turn(known)) | {"traffic": spilled.traffic.to_json()}))


if __name__ == "__main__":
    main()
