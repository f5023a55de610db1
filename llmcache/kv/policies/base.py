"""KvPolicy: what every policy does, so that a file of one contains little but its way to choose; and its settings.

Concurrency: the engine calls a policy from one thread at a time, its worker's where it looks ahead, so a policy needs no
lock. What a policy remembers is kept by layer, so that layers may come in any order.
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
from llmcache.kv.csd.wire import MOST_TOKENS
from llmcache.kv.kernels.scores import COMBINE
from llmcache.kv.pipeline.timeline import NO_TIMELINE, Timeline
from llmcache.kv.spill import KvShape
from llmcache.kv.tiers import KvStore, Selection, StoreConfig

PAPER_ALPHA = 0.2
"""hillinfer.txt, section 4.2: "we set the importance rate alpha as 0.2"."""
SLACK = 1024
"""Tokens that a table grows by at least: growing is a copy."""

Kind = TypeVar("Kind", bound=np.generic)


def setting(default: Any, holds: Callable[[Any], bool], hint: str) -> Any:
    """Returns a field of settings: UsageError, with `hint`, names it where a value other than None does not hold."""
    return field(default=default, metadata={"holds": holds, "hint": hint})


def one_of(default: str, names: Collection[str]) -> Any:
    """Returns a field of settings that takes one of `names`."""
    return setting(default, lambda value: value in names, f"one of: {', '.join(names)}")


@dataclass(frozen=True)
class PolicySettings:
    """What all policies have in common.

    `alpha` (0, 1]: the share of the context that a step attends to; or `token_budget`: how many tokens. Both include sink,
    window and tail, which are always attended. Neither: alpha 0.2. `score_block_tokens` (n): tokens of a score block.
    `combine`: "max" or "sum" over the query heads of a key head. `scale` of the softmax: None for 1/sqrt(head_dim); only
    policies that add up attention need it. UsageError names the field that is wrong.
    """

    alpha: float | None = setting(None, lambda share: 0 < share <= 1, "use a share of the context above 0 and at most 1")
    token_budget: int | None = setting(
        None,
        lambda tokens: isinstance(tokens, (int, np.integer)) and bool(tokens >= 1),
        "use a whole number of at least 1",
    )
    score_block_tokens: int = setting(256, lambda n: 1 <= n <= MOST_TOKENS, f"use 1 to {MOST_TOKENS} tokens")
    combine: str = one_of("max", COMBINE)
    scale: float | None = setting(None, lambda scale: 0 < scale < math.inf, "use a finite number above 0")

    def __post_init__(self) -> None:
        if self.alpha is not None and self.token_budget is not None:
            raise UsageError("token_budget: cannot be combined with alpha", "give only one of them")
        for one in fields(self):
            value = getattr(self, one.name)
            try:
                holds = value is None or not one.metadata or one.metadata["holds"](value)
            except TypeError:  # a string where a number belongs
                holds = False
            if not holds:
                raise UsageError(f"{one.name}: {value!r} is out of range", one.metadata["hint"])

    def check_store(self, config: StoreConfig) -> None:
        """Raises UsageError if the budget does not even hold the sink and the window of a store."""
        pinned = (config.sink_pages + config.window_pages) * config.shape.page_tokens
        if self.token_budget is not None and self.token_budget < pinned:
            hint = "increase the budget, or reduce the sink or the window"
            raise UsageError(
                f"token_budget: must be at least {pinned}, which sink and window take, not {self.token_budget}", hint
            )

    def attended(self, length: int) -> int:
        """Returns how many tokens of a context of `length` are attended to: the budget, or alpha of it rounded up."""
        if self.token_budget is not None:
            return min(length, self.token_budget)
        share = PAPER_ALPHA if self.alpha is None else self.alpha
        return min(length, math.ceil(share * length - 1e-9))  # 0.1 * 30 is 3.0000000000000004


class Remembered(Protocol):
    """Something kept for each token, which has to follow when a store is cropped or its sequences change."""

    @property
    def size_bytes(self) -> int:
        """Memory it takes."""

    def crop(self, tokens: int) -> None:
        """Forgets all tokens from number `tokens` on."""

    def reorder(self, index: Int64s) -> None:
        """Gives sequence i what was of sequence `index[i]`."""


class TokenTable(Generic[Kind]):
    """Rows of `shape` for each token (or page: whatever is counted); zero until they are written.

    One thread at a time uses the tables of one layer.
    """

    def __init__(self, layers: int, batch: int, shape: tuple[int, ...], dtype: type[Kind]) -> None:
        empty: NDArray[Any] = np.zeros((0, *shape), dtype)
        self._tables = [[empty] * batch for _ in range(layers)]

    @property
    def size_bytes(self) -> int:
        """Memory of all rows, room for growth included."""
        return sum(table.nbytes for tables in self._tables for table in tables)

    def rows(self, layer: int, sequence: int, count: int) -> NDArray[Kind]:
        """Returns the first `count` rows [count, *shape]; a view to read and to write."""
        table = self._tables[layer][sequence]
        if len(table) < count:
            grown = np.zeros((count + max(SLACK, count // 8), *table.shape[1:]), table.dtype)
            grown[: len(table)] = table
            self._tables[layer][sequence] = table = grown
        return table[:count]

    def crop(self, count: int) -> None:
        """Sets all rows from number `count` on to zero."""
        for tables in self._tables:
            for table in tables:
                table[count:] = 0

    def reorder(self, index: Int64s) -> None:
        """Gives sequence i the rows of what was sequence `index[i]`."""
        self._tables = [[tables[old].copy() for old in index] for tables in self._tables]


class KvPolicy(ABC):
    """Chooses, for each step and layer, the tokens of the middle to attend to: as many as its settings say.

    Sink, window and tail are attended in any case. Made for one `store`, and called by one engine:
    `prefilled` after a prefill's append, then in each step `select`, and `attended` once it has been attended to. `first`
    [batch]: first token of each sequence that is not padding.

    A policy defines `choose`, which is called only where there is a choice, and `begin` if it keeps anything. What it keeps
    for tokens it puts into `remembered`. Policies of `whole_pages` choose pages, all of whose tokens are attended to.
    """

    name: ClassVar[str]
    """What `--policy` takes."""
    title: ClassVar[str]
    """What tables and plots call it."""
    needs_weights: ClassVar[bool] = False
    """True if `attended` needs the weights of attention, and `prefilled` the queries of a prompt."""
    ssd: ClassVar[str] = "file"
    """Which ssd tier it is meant for: "file", read by the host; or "csd", the *emulated* device."""
    ahead: ClassVar[bool] = False
    """True if it is meant to run with look-ahead, one layer before the one that computes."""
    interleaved: ClassVar[bool] = False
    """True if it reads no keys of a file to choose by: keys and values may lie together there."""
    whole_pages: ClassVar[bool] = False
    """True if it chooses pages rather than tokens."""
    sink_tokens: ClassVar[int] = 16
    """First tokens that a cache keeps attended for it unless it is told otherwise."""
    window_tokens: ClassVar[int] = 32
    """Last tokens likewise."""
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
        """Returns the pages of a pool for no more than `token_budget` tokens, or than sink and window if these are more."""
        pinned = sum(-(-tokens // KvShape.page_tokens) for tokens in (cls.sink_tokens, cls.window_tokens))
        return max(pinned, -(-token_budget // KvShape.page_tokens))

    def begin(self) -> None:  # noqa: B027 - not all keep anything
        """Makes what it keeps, for `store` and by `settings`; nothing is stored yet, unless a file is restored."""

    @abstractmethod
    def choose(self, layer: int, queries: Floats, tokens: int) -> Selection:
        """Returns `tokens` tokens of the middle for each head of each sequence; more than 0, fewer than the middle has.

        Heads of a layer may share theirs: some then have more, and others fewer (see `Selection`).
        `queries` [batch, heads, head_dim] float32. With `whole_pages`, `tokens` is a multiple of the page.
        """

    def prefilled(self, layer: int, queries: Floats, start: int) -> None:  # noqa: B027 - not all take note
        """Takes note of a prefill that `layer` has appended, or a part of it; `KvStore.commit` has not followed yet.

        `queries` [batch, heads, rows, dim] float32, from position `start` on; no rows unless `needs_weights`.
        """

    def attended(  # noqa: B027 - not all take note
        self, layer: int, selection: Selection, weights: Floats | None = None
    ) -> None:
        """Takes note of what `layer` has attended to in a step; moves of the pool happen here, off the critical path.

        `weights` [batch, heads, k] float32: those of softmax over sink, `selection`, window and tail, in this order of
        ascending positions, as `KvStore.gather` gives them; None unless `needs_weights`.
        """

    def unseen(self, layer: int, selection: Selection, queries: Floats, keys: NDArray[Any]) -> tuple[Floats, Floats] | None:
        """Returns what stands for the tokens that were not chosen: its share [batch, heads] of the attention of each query
        head, and its values [batch, kv_heads, value_dim], float32. None: nothing does.

        `queries` [batch, heads, dim] float32 and `keys` [batch, kv_heads, 1, dim] are the newest token's.
        """
        return None

    def select(self, layer: int, queries: Floats) -> Selection:
        """Returns the tokens to attend to besides sink, window and tail, for `queries` [batch, heads, head_dim] float32."""
        tokens = self.tokens
        if tokens == 0:
            return Selection.none(self.store.batch, self.kv_heads)
        if tokens == len(self.store.middle) * self.page_tokens:
            return self.store.everything
        return self.choose(layer, queries, tokens)

    @property
    def index_bytes(self) -> int:
        """Memory of what it keeps for tokens."""
        return sum(table.size_bytes for table in self.remembered)

    # What policies ask

    @property
    def inside(self) -> slice:
        """The tokens of the middle, of which it chooses."""
        return slice(self.store.middle.start * self.page_tokens, self.store.middle.stop * self.page_tokens)

    @property
    def scale(self) -> float:
        """What products of queries and keys are multiplied by before softmax."""
        return self.settings.scale or 1 / math.sqrt(self.store.shape.head_dim)

    @property
    def tokens(self) -> int:
        """How many tokens of the middle are chosen now; whole pages where the policy needs them.

        0 where those attended in any case are more than the budget: with a tail, or alpha of a short context.
        """
        inside = len(self.store.middle) * self.page_tokens
        pinned = self.store.length - inside
        wanted = min(inside, max(0, self.settings.attended(self.store.length) - pinned))
        return wanted - wanted % self.page_tokens if self.whole_pages else wanted

    def saved(self) -> None:  # noqa: B027 - not all keep anything
        """Follows `KvStore.save`, between steps: keeps beside the spill file what takes long to make again."""

    def restored(self) -> None:  # noqa: B027 - not all keep anything
        """Takes back what `saved` has kept, before the first step over a store that was restored; after `pad`."""

    # What happens to the sequences

    def pad(self, first: Int64s) -> None:
        """Says that the tokens of sequence i before number `first[i]` are padding: they are chosen last of all."""
        self.first = first.astype(np.int64)

    def cropped(self, tokens: int) -> None:
        """Follows the store after `KvStore.crop(tokens)`."""
        for table in self.remembered:
            table.crop(tokens)

    def reordered(self, index: Int64s) -> None:
        """Follows the store after sequence i has become what was sequence `index[i]` (`KvStore.select`)."""
        self.first = self.first[index]
        for table in self.remembered:
            table.reorder(index)
