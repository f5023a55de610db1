"""A *synthetic* stream of keys, values and queries, of any shape and length, with the sparsity that the paper assumes.

Source: hillinfer.txt, section 1: "only a small subset of tokens, which is usually less than 20%, plays a critical role";
section 3.2: "temporal locality". A key is noise, plus the direction of its topic, plus (for a few) one that all queries
match, plus its position as slow rotations, so that close tokens match. A query matches the topic of its step, which
drifts, heavy hitters, and close tokens. Query heads that share a key head (GQA) differ by noise.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.arrays import Floats, Int64s
from llmcache.errors import UsageError
from llmcache.kv.spill import KvShape

SEGMENT_TOKENS = 128  # consecutive tokens on one topic
DWELL_STEPS = 32  # decode steps of a query from one topic to the next
COMMON = 0.7  # exponent of the frequency of topics by rank: some topics return often
INFORMATIVE = 0.35  # share of a segment's tokens that express its topic
HEAVY = 0.005  # share of the tokens that every query attends to, regardless of its topic
TOPICS = 24
TOPIC_LOGIT, HEAVY_LOGIT, RECENT_LOGIT = 6.0, 5.0, 4.0
"""Contributions to the logit of a token: of its topic, of being a heavy hitter, and of being close."""
QUERY_NOISE = 0.5  # standard deviation of a query's noise; that of keys and values is 1
MEMORY_STEPS = 8  # steps over which the noise of queries changes

# These separate the random numbers of each kind.
_SEGMENT, _TOKEN, _STEP = 1, 2, 3
_KEYS, _VALUES, _QUERIES, _GUESS, _DIRECTIONS = range(10, 15)
_UNIFORM = np.float32(2 * 3**0.5 / 255)  # of bytes: standard deviation 1


@dataclass(frozen=True)
class StreamSpec:
    """Shape of a *synthetic* stream: `context` tokens of prompt, then any number of decode steps."""

    layers: int
    kv_heads: int
    heads: int
    head_dim: int
    context: int
    batch: int = 1
    dtype: str = "float16"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.head_dim % 4:
            raise UsageError(f"head_dim: must be a multiple of 4, not {self.head_dim}", "see the model's config.json")

    @property
    def shape(self) -> KvShape:
        return KvShape(f"synthetic-{self.seed}", self.layers, self.kv_heads, self.head_dim, self.dtype)


class Topics:
    """The course of one *synthetic* sequence over `TOPICS`: topics of segments and queries, and strengths of tokens.

    Everything depends only on the number of a token or step, so that any part can be computed alone.
    """

    def __init__(self, seed: int, sequence: int) -> None:
        self._seed = (seed, sequence)
        weights = 1.0 / np.arange(1, TOPICS + 1) ** COMMON
        self._bounds = np.cumsum(weights / weights.sum())

    def _random(self, kind: int, number: int) -> np.random.Generator:
        return np.random.default_rng((*self._seed, kind, number))

    def _topic(self, kind: int, number: int) -> int:
        found = int(np.searchsorted(self._bounds, self._random(kind, number).random(), side="right"))
        return min(found, len(self._bounds) - 1)

    def of_segment(self, segment: int) -> int:
        return self._topic(_SEGMENT, segment)

    def strengths(self, segment: int) -> tuple[Floats, Floats]:
        """Return how strongly each token of `segment` expresses its topic, and whether it is a heavy hitter (0 or 1)."""
        random = self._random(_TOKEN, segment)
        informative = random.random(SEGMENT_TOKENS) < INFORMATIVE
        strength = np.where(informative, 0.6 + 0.6 * random.random(SEGMENT_TOKENS), 0.1)
        heavy = random.random(SEGMENT_TOKENS) < HEAVY
        return strength.astype(np.float32), heavy.astype(np.float32)

    def of_step(self, step: int) -> tuple[tuple[int, float], tuple[int, float]]:
        """Return the topics of a decode step (below 0: in the prompt) with their weights: the one left, then the next."""
        dwell, part = divmod(step + DWELL_STEPS, DWELL_STEPS)
        share = part / DWELL_STEPS
        to = share * share * (3 - 2 * share)
        return (self._topic(_STEP, dwell), 1 - to), (self._topic(_STEP, dwell + 1), to)


class SyntheticStream:
    """Keys, values and queries of a *synthetic* context: the same for the same spec, computed in any parts."""

    def __init__(self, spec: StreamSpec) -> None:
        self.spec = spec
        self._topics = [Topics(spec.seed, sequence) for sequence in range(spec.batch)]
        self._pairs = max(1, spec.head_dim // 16)

    def keys_values(self, layer: int, positions: range) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return keys and values [batch, kv_heads, tokens, head_dim] of `positions`; bfloat16 as its bits, uint16."""
        sides: list[list[NDArray[Any]]] = [[], []]
        for sequence in range(self.spec.batch):
            segments = range(positions.start // SEGMENT_TOKENS, -(-positions.stop // SEGMENT_TOKENS))
            parts = [self._segment(layer, sequence, segment) for segment in segments]
            skip = positions.start - segments.start * SEGMENT_TOKENS
            for side, found in enumerate(zip(*parts, strict=True)):
                sides[side].append(np.concatenate(found, axis=1)[:, skip : skip + len(positions)])
        return np.stack(sides[0]), np.stack(sides[1])

    def _segment(self, layer: int, sequence: int, segment: int) -> tuple[NDArray[Any], NDArray[Any]]:
        spec, topics = self.spec, self._topics[sequence]
        first = segment * SEGMENT_TOKENS
        keys, values = (self._noise(kind, layer, sequence, segment) for kind in (_KEYS, _VALUES))
        strength, heavy = topics.strengths(segment)
        about, shared = self._directions(layer)
        topic = topics.of_segment(segment) if first < spec.context else topics.of_step(first - spec.context)[0][0]
        keys += self._amplitude(TOPIC_LOGIT) * strength[None, :, None] * about[:, topic, None]
        keys += self._amplitude(HEAVY_LOGIT) * heavy[None, :, None] * shared[:, None]
        keys[:, :, -2 * self._pairs :] = self._rotations(np.arange(first, first + SEGMENT_TOKENS))
        return self._narrowed(keys), self._narrowed(values)

    def _noise(self, kind: int, layer: int, sequence: int, number: int) -> Floats:
        """Return uniform noise of standard deviation 1, from bytes: ten times as fast as normal noise."""
        spec = self.spec
        shape = (spec.kv_heads, SEGMENT_TOKENS, spec.head_dim)
        raw = np.random.default_rng((spec.seed, kind, layer, sequence, number)).bytes(int(np.prod(shape)))
        noise: Floats = np.frombuffer(raw, np.uint8).reshape(shape).astype(np.float32)
        noise -= np.float32(127.5)
        noise *= _UNIFORM
        return noise

    @functools.lru_cache(maxsize=256)  # noqa: B019 - a stream lives as long as its run
    def _directions(self, layer: int) -> tuple[Floats, Floats]:
        """Return unit vectors of topics [kv_heads, topics, head_dim] and of heavy hitters [kv_heads, head_dim]."""
        spec = self.spec
        random = np.random.default_rng((spec.seed, _DIRECTIONS, layer))
        found = random.standard_normal((spec.kv_heads, TOPICS + 1, spec.head_dim)).astype(np.float32)
        found[:, :, -2 * self._pairs :] = 0
        found /= np.linalg.norm(found, axis=2, keepdims=True)
        return found[:, :-1], found[:, -1]

    def _amplitude(self, logit: float) -> float:
        """Return the factor of a unit vector in a key and in a query, so that together they add `logit`."""
        return math.sqrt(logit * math.sqrt(self.spec.head_dim))

    def _rotations(self, positions: Int64s) -> Floats:
        speeds = np.geomspace(1 / 4, 1 / 256, self._pairs)
        angles = positions[:, None] * speeds
        amplitude = self._amplitude(RECENT_LOGIT) / math.sqrt(self._pairs)
        found: Floats = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
        found *= np.float32(amplitude)
        return found

    def _narrowed(self, rows: Floats) -> NDArray[Any]:
        if self.spec.dtype == "bfloat16":
            return (rows.view(np.uint32) >> 16).astype(np.uint16)
        return rows.astype(self.spec.dtype, copy=False)

    def queries(self, layer: int, step: int) -> Floats:
        """Return the queries [batch, heads, head_dim], float32, of decode step `step`; below 0: of the prompt."""
        return np.stack([self._query(layer, sequence, step) for sequence in range(self.spec.batch)])

    def prompt_queries(self, layer: int) -> Floats:
        return np.stack([self.queries(layer, step) for step in range(-DWELL_STEPS, 0)], axis=2)

    def _query(self, layer: int, sequence: int, step: int) -> Floats:
        spec = self.spec
        about, shared = self._directions(layer)
        query = self._amplitude(HEAVY_LOGIT) * shared
        for topic, weight in self._topics[sequence].of_step(step):
            query = query + np.float32(weight) * self._amplitude(TOPIC_LOGIT) * about[:, topic]
        query[:, -2 * self._pairs :] = self._rotations(np.array([spec.context + step]))
        each: Floats = query.repeat(spec.heads // spec.kv_heads, axis=0)
        return each + self._query_noise(_QUERIES, layer, sequence, step, QUERY_NOISE)

    def _query_noise(self, kind: int, layer: int, sequence: int, step: int, deviation: float) -> Floats:
        """Return noise [heads, head_dim] that differs from that of the step before only in its oldest part."""
        total = np.zeros((self.spec.heads, self.spec.head_dim), np.float32)
        for past in range(MEMORY_STEPS):
            random = np.random.default_rng((self.spec.seed, kind, layer, sequence, step + DWELL_STEPS + MEMORY_STEPS - past))
            total += random.standard_normal(total.shape, dtype=np.float32)
        total *= np.float32(deviation / math.sqrt(MEMORY_STEPS))
        return total

    def estimate(self, layer: int, step: int, error: float = 0.2) -> Floats:
        """Return an estimate of `queries` one layer ahead: with added noise of `error` times their length.

        Models a layer's projection of its predecessor's input (InfiniGen); the error is *assumed*.
        """
        exact = self.queries(layer, step)
        length = np.linalg.norm(exact, axis=2, keepdims=True) / self.spec.head_dim**0.5
        noise = [self._query_noise(_GUESS, layer, sequence, step, error) for sequence in range(self.spec.batch)]
        guessed: Floats = exact + np.stack(noise) * length
        return guessed

    def ids(self, positions: range) -> Int64s:
        topics = self._topics[0]
        return np.array([topics.of_segment(position // SEGMENT_TOKENS) for position in positions], np.int64)
