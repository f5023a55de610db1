"""Losses of texts whose prompts a method of kvpress has compressed to a budget.

`python -m tools.bench.clients.kvpress_losses MODEL TEXTS.npz THREADS BUDGET...` prints the outcomes of each method and
budget and of the full cache as JSON. The packages of `.venv/kvpress` must precede the environment's, because kvpress needs
its own version of transformers. TEXTS: `ids` [texts, tokens], and `following`, the tokens after them.

The prompt is read once and compressed by all methods. Differs from kvpress: its hook cuts the cache in place, one method
per prompt. Gemma 3's sliding layers are not compressed in models for text either, as in `SpillCache`; ExpectedAttention gets
the rotary embedding of full attention there. As in kvpress, all tokens after the prompt are kept in addition to the budget.
SnapKV has a window of 64 tokens, which is all that it keeps with a budget of 64.
"""

from __future__ import annotations

import copy
import inspect
import json
import sys
from collections import defaultdict
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from kvpress import ExpectedAttentionPress, KnormPress, SnapKVPress, StreamingLLMPress

from llmcache.arrays import Floats, Int64s
from llmcache.errors import DataError
from llmcache.kv.bench.subject import Subject, logits, stock
from llmcache.kv.bench.task import Candidate, CollectedAnswers

PRESSES = {"snapkv": SnapKVPress, "expected": ExpectedAttentionPress, "knorm": KnormPress, "streaming": StreamingLLMPress}
Kept = dict[Candidate, list[tuple[torch.Tensor, torch.Tensor]]]
"""Keys and values [1, heads, budget, dim] of the layers with full attention, in their order."""


def presses(budgets: list[int], tokens: int) -> dict[Candidate, Any]:
    """Return each method with its default settings, for each of `budgets` out of `tokens`."""
    # kvpress rounds the number of kept tokens down; half a token more makes the result independent of the last bit.
    return {
        Candidate(f"kvpress-{name}", budget): kind(compression_ratio=1 - (budget + 0.5) / tokens)
        for name, kind in PRESSES.items()
        for budget in budgets
    }


def read(model: Any, cache: Any, ids: Int64s, methods: dict[Candidate, Any]) -> Kept:
    """Read the prompt `ids` [1, tokens] into `cache`, uncompressed; return the selection of each method."""
    kept: Kept = defaultdict(list)

    def cut(module: Any, _inputs: Any, options: dict[str, Any], output: Any) -> None:
        layer = cache.layers[module.layer_idx]
        for one, press in methods.items():
            sides = press.compress(module, options["hidden_states"], layer.keys, layer.values, output[1], options)
            if sides[0].shape[2] != one.budget:
                raise DataError(f"{one.policy}: {sides[0].shape[2]} tokens are kept, not {one.budget}")
            kept[one].append(sides)

    rotary = model.model.rotary_emb
    if "layer_type" in inspect.signature(rotary.forward).parameters:
        rotary = partial(rotary, layer_type="full_attention")
    hooks = []
    for layer, place in zip(model.model.layers, cache.layers, strict=True):
        if not place.is_sliding:
            layer.self_attn.rotary_emb = rotary  # the attribute that kvpress reads
            hooks.append(layer.self_attn.register_forward_hook(cut, with_kwargs=True))
    logits(model, cache, ids)
    for hook in hooks:
        hook.remove()
    return kept


def cut_cache(model: Any, whole: Any, kept: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> Any:
    """Return a cache with one sequence per selection in `kept`, all of one budget, and the sliding layers of `whole`."""
    cache, layers = stock(model), iter(zip(*kept, strict=True))
    for index, layer in enumerate(whole.layers):
        if layer.is_sliding:
            cache.layers[index] = copy.deepcopy(layer)
            cache.layers[index].batch_repeat_interleave(len(kept))
        else:
            cache.update(*(torch.cat(sides) for sides in zip(*next(layers), strict=True)), index)
    return cache


def follow(model: Any, cache: Any, following: Int64s, begin: int, batch: int = 1) -> Floats:
    """Return log-probabilities as `subject.follow` does, for each of `batch` sequences.

    The first token of `following` [1, n] is at position `begin`, however few tokens are kept.
    """
    found = []
    for at, token in enumerate(torch.from_numpy(following[0, :-1]).to(model.device)):
        place = torch.tensor([begin + at], device=model.device)
        where = {"position_ids": place.expand(batch, 1), "cache_position": place}
        with torch.no_grad():
            ids = token.expand(batch, 1)
            found.append(model(input_ids=ids, past_key_values=cache, use_cache=True, **where).logits[:, -1])
    said: Floats = torch.stack(found, 1).float().log_softmax(-1).cpu().numpy()
    return said


def main() -> int:
    path, threads, budgets = sys.argv[2], int(sys.argv[3]), [int(word) for word in sys.argv[4:]]
    torch.set_num_threads(threads)
    model = Subject(sys.argv[1]).model
    outcomes: dict[Candidate, CollectedAnswers] = defaultdict(CollectedAnswers)
    with np.load(path) as texts:
        pairs = list(zip(texts["ids"][:, None], texts["following"][:, None], strict=True))
    for number, (ids, following) in enumerate(pairs):
        tokens, true = ids.shape[1], following[0, 1:]
        print(f"{tokens} tokens, part {number + 1}: kvpress", file=sys.stderr, flush=True)
        whole = stock(model)
        kept = read(model, whole, ids, presses(budgets, tokens))
        full = follow(model, copy.deepcopy(whole), following, tokens)[0]
        outcomes[Candidate("kvpress-full", None)].add_text(full, full, true)
        for budget in budgets:
            alike = [one for one in kept if one.budget == budget]
            cache = cut_cache(model, whole, [kept[one] for one in alike])
            for one, said in zip(alike, follow(model, cache, following, tokens, len(alike)), strict=True):
                outcomes[one].add_text(said, full, true)
    versions = {name: version(name) for name in ("kvpress", "transformers")}
    print(json.dumps({"versions": versions, "answers": [{**asdict(one), **asdict(of)} for one, of in outcomes.items()]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
