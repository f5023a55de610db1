"""Small policies for tests of the engine: one that chooses by the keys it sees, one that does what it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.kv.kernels import top
from llmcache.kv.policies.base import KvPolicy
from llmcache.kv.tiers import Selection

Floats = NDArray[np.float32]


class Best(KvPolicy):
    """Chooses the tokens in memory with the largest products; notes what it is called for, in `calls`."""

    name, title = "best", "best"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[tuple[str, int]] = []
        self.before_select: Callable[[int], None] = lambda layer: None
        self.before_update: Callable[[int], None] = lambda layer: None

    def choose(self, layer: int, queries: Floats, tokens: int) -> Selection:
        """Return the `tokens` best of each head."""
        self.before_select(layer)
        self.calls.append(("select", layer))
        rows = []
        for sequence, asked in enumerate(queries):
            pages, scores = self.store.score_cpu(layer, sequence, asked)
            positions = (pages[:, None] * self.page_tokens + np.arange(self.page_tokens)).reshape(-1)
            rows.append([np.sort(positions[top(head, tokens)]) for head in scores])
        return Selection(np.array(rows, np.int64))

    def prefilled(self, layer: int, queries: Floats, start: int) -> None:
        """Note it."""
        self.calls.append((f"prefilled {queries.shape[2]} from {start}", layer))

    def attended(self, layer: int, selection: Selection, weights: Floats | None = None) -> None:
        """Note it."""
        self.before_update(layer)
        self.calls.append(("attended" if weights is None else f"attended {weights.shape}", layer))
