"""KvPolicy: the base class of all policies, and their settings.

The engine calls a policy from one thread at a time, so a policy needs no lock. A policy keeps its state by layer,
because layers may come in any order.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmcache.arrays import Floats, Int64s
from llmcache.errors import UsageError
from llmcache.kv.kernels.scores import COMBINE
from llmcache.kv.pipeline.timeline import NO_TIMELINE, Timeline
from llmcache.kv.spill import KvShape
from llmcache.kv.tiers import KvStore, Selection, StoreConfig
from llmcache.papers.csd.wire import MOST_TOKENS

PAPER_ALPHA = 0.2  # hillinfer.txt, section 4.2: "we set the importance rate alpha as 0.2"
SLACK = 1024  # minimum growth of a table in tokens, because growing copies it

Kind = TypeVar("Kind", bound=np.generic)


def setting(default: Any, holds: Callable[[Any], bool], hint: str) -> Any:
    """Return a dataclass field; UsageError, with `hint`, if a value other than None does not satisfy `holds`."""
    return field(default=default, metadata={"holds": holds, "hint": hint})


def one_of(default: str, names: Collection[str]) -> Any:
    """Return a field that accepts one of `names`."""
    return setting(default, lambda value: value in names, f"one of: {', '.join(names)}")


@dataclass(frozen=True)
class PolicySettings:
    """Settings of all policies. UsageError names an invalid field.

    A step attends to the share `alpha` (0, 1] of the context (default 0.2), or to `token_budget` tokens, including sink,
    window and tail. `score_block_tokens` (n): tokens of a score block. `combine`: "max" or "sum" over the query heads of a
    key head. `scale` of the softmax: None for 1/sqrt(head_dim).
    """

    alpha: float | None = setting(None, lambda share: 0 < share <= 1, "use a share of the context above 0 and at most 1")
    token_budget: int | None = setting(
        None, lambda tokens: isinstance(tokens, (int, np.integer)) and bool(tokens >= 1), "use a whole number of at least 1"
    )
    score_block_tokens: int = setting(256, lambda n: 1 <= n <= MOST_TOKENS, f"use 1 to {MOST_TOKENS} tokens")
    combine: str = one_of("max", COMBINE)
    scale: float | None = setting(None, lambda scale: 0 < scale < math.inf, "use a finite number above 0")

    def __post_init__(self) -> None:
        if self.alpha is not None and self.token_budget is not None:
            raise UsageError("token_budget: cannot be combined with alpha", "give only one of them")
        for setting_ in fields(self):
            value = getattr(self, setting_.name)
            try:
                holds = value is None or not setting_.metadata or setting_.metadata["holds"](value)
            except TypeError:  # for instance, a string instead of a number
                holds = False
            if not holds:
                raise UsageError(f"{setting_.name}: {value!r} is out of range", setting_.metadata["hint"])

    def check_store(self, config: StoreConfig) -> None:
        pinned = (config.sink_pages + config.window_pages) * config.shape.page_tokens
        if self.token_budget is not None and self.token_budget < pinned:
            hint = "increase the budget, or reduce the sink or the window"
            raise UsageError(
                f"token_budget: must be at least {pinned}, which sink and window take, not {self.token_budget}", hint
            )

    def attended(self, length: int) -> int:
        """Return how many tokens of a context of `length` are attended to."""
        if self.token_budget is not None:
            return min(length, self.token_budget)
        share = PAPER_ALPHA if self.alpha is None else self.alpha
        return min(length, math.ceil(share * length - 1e-9))  # 0.1 * 30 is 3.0000000000000004


class Remembered(Protocol):
    """Per-token state of a policy, which must follow when a store is cropped or reordered."""

    @property
    def size_bytes(self) -> int:
        pass

    def bytes_at(self, tokens: int) -> int:
        """Return the bytes of one layer and sequence for `tokens` tokens."""

    def crop(self, tokens: int) -> None: ...

    def reorder(self, index: Int64s) -> None: ...


class TokenTable(Generic[Kind]):
    """Rows of `shape` for each token (or page), zero until written; one thread at a time uses a layer's tables."""

    def __init__(self, layers: int, batch: int, shape: tuple[int, ...], dtype: type[Kind]) -> None:
        empty: NDArray[Any] = np.zeros((0, *shape), dtype)
        self._tables = [[empty] * batch for _ in range(layers)]

    @property
    def size_bytes(self) -> int:
        return sum(table.nbytes for tables in self._tables for table in tables)

    def bytes_at(self, tokens: int) -> int:
        table = self._tables[0][0]
        return math.prod(table.shape[1:]) * table.itemsize * (tokens + max(SLACK, tokens // 8))

    def rows(self, layer: int, sequence: int, count: int) -> NDArray[Kind]:
        """Return a writable view of the first `count` rows [count, *shape]."""
        table = self._tables[layer][sequence]
        if len(table) < count:
            grown = np.zeros((count + max(SLACK, count // 8), *table.shape[1:]), table.dtype)
            grown[: len(table)] = table
            self._tables[layer][sequence] = table = grown
        return table[:count]

    def crop(self, count: int) -> None:
        for tables in self._tables:
            for table in tables:
                table[count:] = 0

    def reorder(self, index: Int64s) -> None:
        self._tables = [[tables[old].copy() for old in index] for tables in self._tables]


class KvPolicy(ABC):
    """Chooses, in each step and layer, which tokens of the middle of `store` to attend to; the settings set their number.

    The engine calls `prefilled` after each append of a prefill, and in each step `select`, then `attended`. `first` [batch]:
    the first token that is not padding. A subclass defines `choose`, which is called only if there is a choice, and `begin`;
    it adds per-token state to `remembered`. With `whole_pages`, it chooses pages, all of whose tokens are attended to.
    """

    name: ClassVar[str]  # argument of `--policy`
    title: ClassVar[str]  # name in tables and plots
    needs_weights: ClassVar[bool] = False
    """True if `attended` needs the attention weights, and `prefilled` the queries of a prompt."""
    ssd: ClassVar[str] = "file"
    """The ssd tier for which it is designed: "file", read by the host; or "csd", the *emulated* device."""
    ahead: ClassVar[bool] = False  # true if it is designed for lookahead, one layer before the one that computes
    interleaved: ClassVar[bool] = False
    """True if it never reads keys alone from a file, so that keys and values may be interleaved."""
    whole_pages: ClassVar[bool] = False  # true if it chooses pages instead of tokens
    sink_tokens: ClassVar[int] = 16  # default number of first tokens that a cache always attends to
    window_tokens: ClassVar[int] = 32  # default number of last tokens that a cache always attends to
    settings_class: ClassVar[type[PolicySettings]] = PolicySettings

    def __init__(self, store: KvStore, settings: PolicySettings | None = None, timeline: Timeline = NO_TIMELINE) -> None:
        self.store, self.timeline = store, timeline
        self.kv_heads, self.page_tokens = store.shape.kv_heads, store.shape.page_tokens
        self.settings = self.settings_class() if settings is None else settings
        self.settings.check_store(store.config)
        self.first: Int64s = np.zeros(store.batch, np.int64)
        self.remembered: list[Remembered] = []
        self.begin()

    @classmethod
    def least_pages(cls, token_budget: int) -> int:
        """Return the smallest pool, in pages, for `token_budget` tokens, and at least for sink and window."""
        pinned = sum(-(-tokens // KvShape.page_tokens) for tokens in (cls.sink_tokens, cls.window_tokens))
        return max(pinned, -(-token_budget // KvShape.page_tokens))

    def begin(self) -> None:  # noqa: B027 - not all keep anything
        """Create the policy's state; the store is empty unless a file was restored."""

    @abstractmethod
    def choose(self, layer: int, queries: Floats, tokens: int) -> Selection:
        """Return `tokens` tokens of the middle for each head of each sequence; more than 0, fewer than the middle has.

        Heads of a layer may share a budget. `queries` [batch, heads, head_dim] float32. With `whole_pages`, `tokens` is a
        multiple of the page size.
        """

    def prefilled(self, layer: int, queries: Floats, start: int) -> None:  # noqa: B027 - not all take note
        """Process a part of a prefill that was appended to `layer`, before `KvStore.commit`.

        `queries` [batch, heads, rows, dim] float32, from position `start` on; no rows unless `needs_weights`.
        """

    def attended(  # noqa: B027 - not all take note
        self, layer: int, selection: Selection, weights: Floats | None = None
    ) -> None:
        """Process the attention of `layer` in a step, and move pages of the pool, off the critical path.

        `weights` [batch, heads, k] float32: softmax weights in the order of `KvStore.gather`; None unless `needs_weights`.
        """

    def unseen(self, layer: int, selection: Selection, queries: Floats, keys: NDArray[Any]) -> tuple[Floats, Floats] | None:
        """Return a replacement for the tokens that were not chosen, or None.

        It consists of its share [batch, heads] of each query head's attention, and its values [batch, kv_heads, value_dim],
        float32. `queries` [batch, heads, dim] float32 and `keys` [batch, kv_heads, 1, dim] are those of the newest token.
        """
        return None

    def select(self, layer: int, queries: Floats) -> Selection:
        """Return the tokens of the middle to attend to, for `queries` [batch, heads, head_dim] float32."""
        tokens = self.tokens
        if tokens == 0:
            return Selection.none(self.store.batch, self.kv_heads)
        if tokens == len(self.store.middle) * self.page_tokens:
            return self.store.everything
        return self.choose(layer, queries, tokens)

    @property
    def index_bytes(self) -> int:
        return sum(table.size_bytes for table in self.remembered)

    def index_bytes_at(self, tokens: int) -> int:
        return sum(table.bytes_at(tokens) for table in self.remembered)

    # For subclasses

    @property
    def inside(self) -> slice:
        return slice(self.store.middle.start * self.page_tokens, self.store.middle.stop * self.page_tokens)

    @property
    def scale(self) -> float:
        return self.settings.scale or 1 / math.sqrt(self.store.shape.head_dim)

    @property
    def tokens(self) -> int:
        """The number of tokens of the middle to choose now; 0 if sink, window and tail exceed the budget."""
        inside = len(self.store.middle) * self.page_tokens
        pinned = self.store.length - inside
        wanted = min(inside, max(0, self.settings.attended(self.store.length) - pinned))
        return wanted - wanted % self.page_tokens if self.whole_pages else wanted

    def saved(self) -> None:  # noqa: B027 - not all keep anything
        """Save state that takes long to recompute next to the spill file, after `KvStore.save`."""

    def restored(self) -> None:  # noqa: B027 - not all keep anything
        """Restore what `saved` has written, after `pad` and before the first step."""

    # Changes of sequences

    def pad(self, first: Int64s) -> None:
        """Set the number of padding tokens of each sequence, which are chosen only if there are no others."""
        self.first = first.astype(np.int64)

    def cropped(self, tokens: int) -> None:
        for table in self.remembered:
            table.crop(tokens)

    def reordered(self, index: Int64s) -> None:
        self.first = self.first[index]
        for table in self.remembered:
            table.reorder(index)
