"""A policy over a small store, decoded step by step, and a copy of all keys and values to compute full attention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.kv.kernels import top
from llmcache.kv.pipeline import NO_TIMELINE, Timeline, attention, widened
from llmcache.kv.policies import policy_class
from llmcache.kv.policies.base import KvPolicy, PolicySettings
from llmcache.kv.spill import KvShape
from llmcache.kv.tiers import KvStore, Selection, StoreConfig, repeated
from tests.unit.kv_parts import carried

Array = NDArray[Any]
PAGE, DIM, KV_HEADS, LAYERS = 16, 16, 2, 2


@functools.cache
def _token(batch: int, seed: tuple[int, ...]) -> Array:
    """Return keys or values of one token, [batch, kv_heads, dim]; cached, because many tests have the same prompt."""
    return np.random.default_rng(seed).standard_normal((batch, KV_HEADS, DIM), np.float32)


@dataclass(frozen=True)
class Case:
    """Parameters of a store and its contents.

    `pool`: pages of the host's pool; None: no file and no limit; `rows`: cached rows of each head.
    """

    batch: int = 1
    heads: int = 4
    context: int = 300
    pool: int | None = 9
    ssd: str = "file"
    dtype: str = "float32"
    seed: int = 0
    rows: int = 0

    @property
    def shape(self) -> KvShape:
        return KvShape("contract", LAYERS, KV_HEADS, DIM, self.dtype, PAGE)

    def config(self, path: Path) -> StoreConfig:
        file = None if self.pool is None else path / "kv.spill"
        return StoreConfig(self.shape, self.batch, 16, 32, self.pool, file, self.ssd, threads=1, cpu_rows=self.rows)

    def side(self, layer: int, positions: range, side: int) -> Array:
        """Return keys (`side` 0) or values of tokens, [batch, kv_heads, tokens, dim].

        Independent of the division into parts.
        """
        return np.stack([_token(self.batch, (self.seed, layer, side, position)) for position in positions], axis=2)

    def stored(self, layer: int, positions: range) -> list[Array]:
        """Return keys and values in the type of the store."""
        return [carried(self.side(layer, positions, side), self.dtype) for side in (0, 1)]

    def queries(self, layer: int, step: int) -> Array:
        """Return the queries [batch, heads, dim] of a step; half of each is the same as in the previous step."""
        found = np.zeros((self.batch, self.heads, DIM), np.float32)
        for past in range(4):
            found += np.random.default_rng((self.seed, 2, layer, step - past + 4)).standard_normal(found.shape, np.float32)
        return found

    def prompt(self, layer: int) -> Array:
        """Return the queries [batch, heads, tokens, dim] of the prompt."""
        size = (self.batch, self.heads, self.context, DIM)
        return np.random.default_rng((self.seed, 3, layer)).standard_normal(size, np.float32)


def commit(store: KvStore, tokens: int) -> None:
    """End a step or a prefill of `tokens` tokens, whose ids are their numbers."""
    ids = np.broadcast_to(np.arange(store.length, store.length + tokens), (store.batch, tokens))
    store.commit(ids, ids)


class Run:
    """A policy in use. `keys`, `values`: all appended ones, by layer."""

    def __init__(self, case: Case, store: KvStore, policy: KvPolicy) -> None:
        self.case, self.store, self.policy = case, store, policy
        self.keys: list[Array] = []
        self.values: list[Array] = []
        self.steps = 0

    def prefill(self) -> None:
        for layer in range(LAYERS):
            rows = [self.case.side(layer, range(self.case.context), side) for side in (0, 1)]
            self.keys.append(rows[0])
            self.values.append(rows[1])
            self.store.append(layer, *self.case.stored(layer, range(self.case.context)))
            self.policy.prefilled(layer, self.case.prompt(layer), 0)
        commit(self.store, self.case.context)

    def step(self) -> list[tuple[Selection, Array]]:
        """Decode a token; return the selection and the output of attention of each layer."""
        found = [self._layer(layer) for layer in range(LAYERS)]
        commit(self.store, 1)
        self.steps += 1
        return found

    def _layer(self, layer: int) -> tuple[Selection, Array]:
        position = self.store.length
        queries = self.queries(layer)
        selection = self.policy.select(layer, queries)
        rows = [self.case.side(layer, range(position, position + 1), side)[: self.store.batch] for side in (0, 1)]
        self.keys[layer], self.values[layer] = (
            np.concatenate([old, new], axis=2) for old, new in zip((self.keys[layer], self.values[layer]), rows, strict=True)
        )
        stored = self.case.stored(layer, range(position, position + 1))
        self.store.append(layer, *(part[: self.store.batch] for part in stored))
        gathered = self.store.gather(layer, selection)
        out, weights = attention(queries, gathered.keys, gathered.values, repeated(gathered.positions))
        self.policy.attended(layer, selection, weights if self.policy.needs_weights else None)
        return selection, out

    def queries(self, layer: int) -> Array:
        return self.case.queries(layer, self.steps)[: self.store.batch]

    def full(self, layer: int) -> Array:
        """Return the output of full attention for the queries of the last step."""
        queries = self.case.queries(layer, self.steps - 1)[: self.store.batch]
        return attention(queries, self.keys[layer], self.values[layer])[0]

    def over(self, layer: int, attended: Array) -> Array:
        """Return the output of attention of the last step's queries over the tokens `attended` [batch, kv_heads, tokens]."""
        queries = self.case.queries(layer, self.steps - 1)[: self.store.batch]
        return attention(queries, self.keys[layer], self.values[layer], ~attended)[0]

    def crop(self, tokens: int) -> None:
        self.store.crop(tokens)
        self.policy.cropped(tokens)
        self.keys, self.values = ([rows[:, :, :tokens] for rows in side] for side in (self.keys, self.values))

    def reorder(self, index: list[int]) -> None:
        """Replace sequence i by sequence `index[i]`."""
        order = np.array(index)
        self.store.select(order)
        self.policy.reordered(order)
        self.keys, self.values = ([rows[order] for rows in side] for side in (self.keys, self.values))

    def scores(self, layer: int) -> Array:
        """Return the best products [batch, kv_heads, tokens] of this step's queries and all keys, rounded to fp16."""
        queries = self.queries(layer).reshape(self.store.batch, KV_HEADS, -1, DIM)
        found: Array = (queries @ widened(self.keys[layer]).swapaxes(2, 3)).max(axis=2).astype(np.float16)
        return found


@contextmanager
def running(
    name: str, settings: PolicySettings, case: Case, path: Path, first: int = 0, timeline: Timeline = NO_TIMELINE
) -> Iterator[Run]:
    """Return a policy over a store in `path` with the prompt of `case`; tokens before `first` are padding."""
    path.mkdir(exist_ok=True)
    with KvStore(case.config(path)) as store:
        made = policy_class(name)
        given = made.settings_class(**{field: getattr(settings, field) for field in ("alpha", "token_budget", "combine")})
        run = Run(case, store, made(store, given if type(settings) is PolicySettings else settings, timeline))
        run.policy.pad(np.full(case.batch, first))
        run.prefill()
        yield run


def variants(case: Case) -> list[Case]:
    """Return the case with one sequence and two, with and without groups of query heads (GQA, MHA)."""
    return [replace(case, batch=batch, heads=heads) for batch in (1, 2) for heads in (KV_HEADS, 2 * KV_HEADS)]


class Best(KvPolicy):
    """Chooses the tokens in memory with the largest products, and records its calls in `calls`."""

    name, title = "best", "best"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[tuple[str, int]] = []
        self.before_select: Callable[[int], None] = lambda layer: None
        self.before_update: Callable[[int], None] = lambda layer: None

    def choose(self, layer: int, queries: Array, tokens: int) -> Selection:
        self.before_select(layer)
        self.calls.append(("select", layer))
        rows = []
        for sequence, asked in enumerate(queries):
            pages, scores = self.store.score_cpu(layer, sequence, asked)
            positions = (pages[:, None] * self.page_tokens + np.arange(self.page_tokens)).reshape(-1)
            rows.append([np.sort(positions[top(head, tokens)]) for head in scores])
        return Selection(np.array(rows, np.int64))

    def attended(self, layer: int, selection: Selection, weights: Array | None = None) -> None:
        self.before_update(layer)
        self.calls.append(("attended", layer))
