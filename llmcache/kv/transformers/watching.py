"""Watching a policy choose: how much of the attention over everything falls on what it has chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.kv.pipeline.attention import widened
from llmcache.kv.policies.base import Floats, KvPolicy
from llmcache.kv.tiers import Selection
from llmcache.kv.transformers.cache import SpillCache


class Watch:
    """Stands where a policy stood, and computes exact attention beside each choice (slow: everything is read).

    `recalls` and `masses` are means over the batch and the heads, one for each step and layer where there was a choice:
    see `Attention`. The newest token, which no choice is about, is not counted.
    """

    def __init__(self, policy: KvPolicy) -> None:
        self._policy = policy
        self.recalls: list[float] = []
        self.masses: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def prefilled(self, layer: int, queries: Floats, start: int) -> None:
        """As the policy's own."""
        self._policy.prefilled(layer, queries, start)

    def select(self, layer: int, queries: Floats) -> Selection:
        """Returns what the policy selects."""
        selection = self._policy.select(layer, queries)
        self._note(layer, queries, selection)
        return selection

    def _note(self, layer: int, queries: Floats, selection: Selection) -> None:
        store, size = self._policy.store, self._policy.page_tokens
        inside = slice(store.middle.start * size, store.middle.stop * size)
        if selection.count >= inside.stop - inside.start:
            return
        everything = store.gather(layer, Selection.of_all(store.middle, store.batch, self._policy.kv_heads, size))
        weights = _weights(queries, widened(everything.keys), self._policy.scale)
        everything.release()
        chosen = np.zeros(weights.shape[:2] + weights.shape[3:], bool)
        np.put_along_axis(chosen, selection.positions, True, 2)
        if selection.count:
            self.recalls.append(_recalled(weights[..., inside], chosen[..., inside], selection.count))
        chosen[..., : inside.start] = chosen[..., inside.stop :] = True
        self.masses.append(float((weights * chosen[:, :, None]).sum(-1).mean()))


def _weights(queries: Floats, keys: Floats, scale: float) -> Floats:
    """Softmax weights [batch, kv_heads, heads of each, tokens]."""
    batch, kv_heads, _, dim = keys.shape
    scores = queries.reshape(batch, kv_heads, -1, dim) @ keys.swapaxes(2, 3) * np.float32(scale)
    scores -= scores.max(-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(-1, keepdims=True)
    found: Floats = scores
    return found


def _recalled(weights: Floats, chosen: NDArray[np.bool_], count: int) -> float:
    """Share of the `count` tokens with the largest weights, added up by key head, that were chosen."""
    best = np.argpartition(-weights.sum(2), count - 1, axis=-1)[..., :count]
    return float(np.take_along_axis(chosen, best, 2).mean())


def watch(cache: SpillCache) -> Watch:
    """Returns a watch over the policy of `cache`, which has read a prompt, from now on."""
    engine: Any = cache.conversation.engine
    if engine is None:
        raise ValueError("cache: it has no policy before its first token")
    engine.policy = Watch(engine.policy)
    found: Watch = engine.policy
    return found
