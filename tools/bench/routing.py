"""Generated routings of MoE models, and the ranges of a model that tokens read by them.

Published properties of real routings: the experts of a layer are used unevenly, and consecutive tokens often use the same
(Jiang et al. 2024, "Mixtral of Experts", section 5; Eliseev and Mazur 2023, "Fast Inference of Mixture-of-Experts Language
Models with Offloading", section 3.1, which concludes that keeping the last used experts pays). The popular experts change
with the text.

The generated ones: popularities follow Zipf's law over a permutation of the experts of each layer, each expert of the
previous token stays with some probability, and occasionally a part of the popularities is permuted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmcache.cache.hotset import HotSet
from llmcache.cache.policies.belady import Belady
from llmcache.cache.policies.lru import LRU
from llmcache.model import read_layout
from llmcache.model.tensors import Experts, ModelLayout
from llmcache.mount.readahead import LARGE_SLICE_BYTES, MOE_READ_AHEAD_KB, SMALL_READ_AHEAD_KB

Routing = NDArray[np.int64]
"""[token, layer, used]: numbers of experts, sorted."""


@dataclass(frozen=True)
class Habits:
    """Parameters of generated routings.

    `zipf`: exponent of the popularities. `stay`: probability that an expert is used by the next token without being chosen.
    `drift`: probability per token and layer that a quarter of the popularities is permuted.
    """

    zipf: float = 1.0
    stay: float = 0.15
    drift: float = 0.01

    def popularities(self, experts: int) -> NDArray[np.float64]:
        """Return the logarithms of the popularities of the experts of a layer, in descending order."""
        return np.log(np.arange(1, experts + 1.0) ** -self.zipf)


def ranked(
    tokens: int, layers: int, experts: int, used: int, habits: Habits = Habits(), seed: int = 0
) -> tuple[Routing, NDArray[np.int64]]:
    """Return a routing of `tokens` tokens, and the popularity rank of each expert [token, layer, expert], 0 for the most
    popular.
    """
    random = np.random.default_rng(seed)
    popularity = habits.popularities(experts)
    routing = np.empty((tokens, layers, used), np.int64)
    ranks = np.empty((tokens, layers, experts), np.int64)
    for layer in range(layers):
        places = random.permutation(experts)
        before = np.zeros(0, np.int64)
        for token in range(tokens):
            if random.random() < habits.drift:
                moved = random.choice(experts, experts // 4, replace=False)
                places[moved] = places[random.permutation(moved)]
            wish = popularity[places] + random.gumbel(size=experts)
            wish[before[random.random(len(before)) < habits.stay]] = np.inf
            before = np.sort(np.argpartition(-wish, used)[:used])
            routing[token, layer], ranks[token, layer] = before, places
    return routing, ranks


def layout_of(path: Path) -> ModelLayout:
    with path.open("rb") as file:
        layout = read_layout(lambda offset, size: os.pread(file.fileno(), size, offset), path.stat().st_size, path.name)
    assert layout is not None
    return layout


def read_ahead_kb(layout: ModelLayout) -> int:
    """Return the `--read-ahead` that the documentation advises for an MoE model in place."""
    return MOE_READ_AHEAD_KB if max(Experts(layout).sizes) < LARGE_SLICE_BYTES else SMALL_READ_AHEAD_KB


def dense_bytes(layout: ModelLayout) -> int:
    """Return the bytes of a model that every token reads: all except experts and the embedding."""
    return sum(region.size_bytes for region in layout.regions() if region.role == "loop" and not region.sparse)


def ranges(layout: ModelLayout, tokens: Iterable[Sequence[Iterable[int]]]) -> Iterator[list[tuple[int, int]]]:
    """Yield the ranges of a model that each token reads, in order, as pairs of first byte and size.

    Dense tensors are read in full, and of expert tensors the slices of the experts in `tokens` [token][layer].
    """
    number = {name: index for index, (name, _, _) in enumerate(Experts(layout).layers)}
    regions = [region for region in layout.regions() if region.role == "loop"]
    tensors = {tensor.offset: tensor for tensor in layout.tensors}
    for token in tokens:
        found: list[tuple[int, int]] = []
        for region in regions:
            tensor = tensors[region.first_byte]
            if tensor.experts == 1:
                found.append((region.first_byte, region.size_bytes))
                continue
            size = tensor.size_bytes // tensor.experts
            found += [(tensor.offset + int(expert) * size, size) for expert in token[number[tensor.layer]]]
        yield found


def keys(routing: Routing) -> tuple[NDArray[np.int64], int]:
    """Return the uses of experts in order, with experts numbered across layers, and the number of experts."""
    experts = int(routing.max()) + 1
    return (routing + experts * np.arange(routing.shape[1])[:, None]).ravel(), experts * routing.shape[1]


def replay(routing: Routing, room: int, is_loaded: bool = False) -> dict[str, NDArray[np.int64]]:
    """Return the misses of each token in a cache of `room` whole experts, by policy. `belady` knows the future uses.

    The cache is empty at first. With `is_loaded` it begins with the experts that are used first, as many as fit, which is
    the best possible state for `belady` after an engine has loaded the model.
    """
    uses, count = keys(routing)
    loaded = list(dict.fromkeys(uses.tolist()))[:room][::-1] if is_loaded else []
    uses = np.concatenate((np.array(loaded, uses.dtype), uses))
    each = np.ones_like(uses)
    hits = {name: policy(room, count).replay(uses, each) for name, policy in (("lru", LRU), ("belady", Belady))}
    hits["llmcache"] = _hot(uses, routing.shape[1] * routing.shape[2], room)
    return {name: (1 - hit[len(loaded) :]).reshape(len(routing), -1).sum(1) for name, hit in hits.items()}


def misses(routing: Routing, ranks: NDArray[np.int64], habits: Habits, room: int, warmup: int) -> dict[str, float]:
    """Return the mean misses of a token after `warmup` tokens by policy, for those of `replay` and two with more knowledge.

    `known` evicts the expert with the lowest probability of being used by the next token, given the popularities of the
    moment. `learned` does the same with popularities inferred from earlier uses by the model that generates them, which is
    the best that a policy without knowledge of the future can do.
    """
    chances = _chances(habits, ranks.shape[2], routing.shape[2])
    learner = _Learner(habits, chances, ranks.shape[1], ranks.shape[2])
    known = _by_chance(routing, habits, room, lambda token, layer: chances[ranks[token, layer]])
    learned = _by_chance(routing, habits, room, lambda token, layer: learner.learn(layer, routing[token, layer]))
    found = {name: (1 - hit).reshape(len(routing), -1).sum(1) for name, hit in (("known", known), ("learned", learned))}
    return {name: float(each[warmup:].mean()) for name, each in (replay(routing, room) | found).items()}


@dataclass(frozen=True)
class Locality:
    """How much a routing repeats itself; means over layers and tokens.

    `reused`: share of a token's experts that one of the last 1, 4 or 16 tokens used. `ninety`: share of a layer's experts,
    the most used first, that serve 90 % of the uses. `top`: share of the uses of the most used expert of a layer.
    """

    reused: dict[int, float]
    ninety: float
    top: float


def locality(routing: Routing, experts: int) -> Locality:
    """Return the locality of a routing through layers of `experts` experts."""
    tokens, layers, used = routing.shape
    uses = np.zeros((tokens, layers, experts), bool)
    np.put_along_axis(uses, routing, True, axis=2)
    reused = {}
    for window in (1, 4, 16):
        recent = np.stack([uses[window - back : tokens - back] for back in range(1, window + 1)]).any(0)
        reused[window] = float((uses[window:] & recent).sum() / uses[window:].sum())
    shares = np.sort(uses.sum(0) / (tokens * used), axis=1)[:, ::-1]
    ninety = float(((shares.cumsum(1) < 0.9).sum(1) + 1).mean() / experts)
    return Locality(reused, ninety, float(shares[:, 0].mean()))


def _hot(uses: NDArray[np.int64], token_uses: int, room: int) -> NDArray[np.int64]:
    hot, hits, every = HotSet(), np.zeros(len(uses), np.int64), range(int(uses.max()) + 1)
    hot.token_uses = token_uses
    for place, key in enumerate(uses.tolist()):
        hits[place] = key in hot
        hot.use(key)
        if place % token_uses == 0:
            hot.retire(every)
        hot.keep(key)
        while len(hot) > room and (victim := hot.least()) is not None:
            hot.drop(victim)
    return hits


def _chances(habits: Habits, experts: int, used: int) -> NDArray[np.float64]:
    """Return the probability that a token uses the expert of each rank, if no expert stays."""
    wishes = habits.popularities(experts) + np.random.default_rng(0).gumbel(size=(4096, experts))
    drawn = np.argpartition(-wishes, used)[:, :used]
    return np.bincount(drawn.ravel(), minlength=experts) / len(drawn)


class _Learner:
    """Infers popularities by Bayes' rule: the probability of every rank of every expert [layer, expert, rank]."""

    def __init__(self, habits: Habits, chances: NDArray[np.float64], layers: int, experts: int) -> None:
        self.habits, self.chances = habits, chances
        self.ranks = np.full((layers, experts, experts), 1 / experts)
        self.before = [np.zeros(0, np.int64)] * layers

    def learn(self, layer: int, now: NDArray[np.int64]) -> NDArray[np.float64]:
        """Update the ranks with the experts that a token uses; return the probability of each to be used next, if none
        stays.
        """
        moved, stay = self.habits.drift / 4, self.habits.stay
        ranks = (1 - moved) * self.ranks[layer] + moved / len(self.chances)
        likely = np.tile(self.chances, (len(ranks), 1))
        likely[self.before[layer]] = stay + (1 - stay) * self.chances
        is_used = np.isin(np.arange(len(ranks)), now)[:, None]
        ranks *= np.where(is_used, likely, 1 - likely)
        self.ranks[layer], self.before[layer] = ranks / ranks.sum(1, keepdims=True), now
        found: NDArray[np.float64] = self.ranks[layer] @ self.chances
        return found


def _by_chance(
    routing: Routing, habits: Habits, room: int, chance_of: Callable[[int, int], NDArray[np.float64]]
) -> NDArray[np.int64]:
    """Return the hits if the expert with the lowest probability of being used next is evicted.

    `chance_of(token, layer)` returns these probabilities after that token.
    """
    tokens, layers, used = routing.shape
    experts = int(routing.max()) + 1
    kept, chances = np.zeros((layers, experts), bool), np.zeros((layers, experts))
    hits = np.empty((tokens, layers, used), np.int64)
    for token, layer in np.ndindex(tokens, layers):
        now = routing[token, layer]
        hits[token, layer] = kept[layer, now]
        kept[layer, now] = True
        chances[layer] = chance_of(token, layer)
        chances[layer, now] = habits.stay + (1 - habits.stay) * chances[layer, now]
        if (excess := int(kept.sum()) - room) > 0:
            spared = chances[layer, now]
            chances[layer, now] = 2.0  # experts of the token being computed are never evicted
            kept.ravel()[np.argpartition(np.where(kept, chances, 3.0), excess, axis=None)[:excess]] = False
            chances[layer, now] = spared
    return hits.ravel()
