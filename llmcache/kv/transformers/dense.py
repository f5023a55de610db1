"""Short contexts: attended to fully, from tensors like those of transformers' own cache, and how long they may be.

To choose takes about the same time for a few tokens as for many; to attend to all takes time by the token. So there is a
length below which choosing is slower, and no better: it differs by model, machine and policy, and is measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from llmcache.arrays import Int64s

Sides = tuple[torch.Tensor, torch.Tensor]

SHORT = 1024
"""Contexts up to here are attended to fully without a measurement: nothing gains from choosing among so few."""
LENGTHS = (1024, 4096)
"""Tokens at which both ways are measured; lines through them meet at the break-even."""
NEVER = 1 << 62


class DenseLayers:
    """Keys and values of the layers of a batch, [batch, kv_heads, tokens, dim] each, with room behind them.

    Transformers' own cache copies all that it has at each token; here that happens once in `ROOM`.
    """

    ROOM = 256

    def __init__(self, layers: int) -> None:
        self._sides: list[list[torch.Tensor]] = [[] for _ in range(layers)]
        self._lengths = [0] * layers
        self.ids = self.positions = np.empty((0, 0), np.int64)

    @property
    def length(self) -> int:
        """Tokens of each sequence, those of a step that is under way not included."""
        return int(self.ids.shape[1])

    @property
    def size_bytes(self) -> int:
        """Memory that they take; nothing is in their room, so the kernel has given none for it."""
        pairs = zip(self._sides, self._lengths, strict=True)
        return sum(side[:, :, :length].numel() * side.element_size() for sides, length in pairs for side in sides)

    def layer_length(self, layer: int) -> int:
        """Returns the tokens a layer has, those of a step that is under way included."""
        return self._lengths[layer]

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> Sides:
        """Adds keys and values of new tokens; returns all of them, which must not be kept."""
        news, first = (key, value), self._lengths[layer]
        end = first + key.shape[2]
        with _apart():
            if not self._sides[layer] or end > self._sides[layer][0].shape[2]:
                self._grow(layer, end + self.ROOM, news)
            for side, new in zip(self._sides[layer], news, strict=True):
                side.narrow(2, first, end - first).copy_(new)
        self._lengths[layer] = end
        return news if first == 0 else self.rows(layer, 0)

    def _grow(self, layer: int, room: int, news: Sides) -> None:
        sides = [new.new_empty((*new.shape[:2], room, new.shape[3])) for new in news]
        for side, old in zip(sides, self._sides[layer], strict=False):
            side[:, :, : old.shape[2]] = old
        self._sides[layer] = sides

    def rows(self, layer: int, start: int) -> Sides:
        """Returns the keys and values of a layer from token `start` on, not copied."""
        keys, values = self._sides[layer]
        count = self._lengths[layer] - start
        return keys.narrow(2, start, count), values.narrow(2, start, count)

    def commit(self, ids: Int64s, positions: Int64s) -> None:
        """Ends a step after all layers: takes the ids and positions [batch, tokens] of its tokens."""
        if not self.length:
            self.ids, self.positions = ids, positions
        else:
            self.ids, self.positions = np.append(self.ids, ids, 1), np.append(self.positions, positions, 1)

    def crop(self, tokens: int) -> None:
        """Cuts every sequence to its first `tokens`; takes a step that is under way back."""
        self._lengths = [min(tokens, length) for length in self._lengths]
        self.ids, self.positions = self.ids[:, :tokens], self.positions[:, :tokens]

    def choose(self, index: Int64s) -> None:
        """Makes sequence i what sequence `index[i]` was; there may be more or fewer than before."""
        with _apart():
            for layer, sides in enumerate(self._sides):
                self._sides[layer] = [side[torch.from_numpy(index).to(side.device)] for side in sides]
        self.ids, self.positions = self.ids[index], self.positions[index]


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Beside autograd and inference mode: nothing flows back through what is kept, and it outlives the mode."""
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield


def crossing(dense_s: Sequence[float], chosen_s: Sequence[float]) -> int:
    """Returns where lines through the times at both `LENGTHS` meet: 0 if choosing is faster from the beginning on."""
    slopes = [(side[1] - side[0]) / (LENGTHS[1] - LENGTHS[0]) for side in (dense_s, chosen_s)]
    gain_s = dense_s[0] - chosen_s[0]  # of choosing
    if slopes[0] <= slopes[1]:
        return 0 if gain_s > 0 else NEVER
    return max(0, int(LENGTHS[0] - gain_s / (slopes[0] - slopes[1])))
