"""Dense attention for short contexts, over tensors like those of transformers' own cache.

Below the measured break-even, full attention is both faster than choosing tokens and exact.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from llmcache.arrays import Int64s

Sides = tuple[torch.Tensor, torch.Tensor]

SHORT = 1024  # contexts of up to this many tokens get full attention without a measurement: choosing does not pay off
SPILLED = 4096
"""Contexts of up to this many tokens do not use a spill file, if their memory is not limited in bytes.

*Measured* with pools of 128 and 1,024 tokens, and 8 layers with the shape of SmolLM2 on two cores: at 2,048 tokens, a token
takes 2.6 to 2.8 times as long as with transformers' own cache (1.4 times without a file); at 4,096 tokens 0.8 to 2.6 times,
depending on the load of the machine.
"""
LENGTHS = (1024, 4096)  # context lengths at which both methods are measured; lines through the times meet at the break-even
NEVER = 1 << 62


class DenseLayers:
    """Keys and values of the layers of a batch, [batch, kv_heads, tokens, dim] each, with spare room at the end.

    Transformers' own cache copies all tensors for each new token; this one once in `ROOM` tokens.
    """

    ROOM = 256

    def __init__(self, layers: int) -> None:
        self._sides: list[list[torch.Tensor]] = [[] for _ in range(layers)]
        self._lengths = [0] * layers
        self.ids = self.positions = np.empty((0, 0), np.int64)

    @property
    def length(self) -> int:
        return int(self.ids.shape[1])

    @property
    def size_bytes(self) -> int:
        return sum(side.numel() * side.element_size() for sides in self._sides for side in sides)

    @property
    def is_on_host(self) -> bool:
        return all(side.device.type == "cpu" for sides in self._sides for side in sides)

    def layer_length(self, layer: int) -> int:
        return self._lengths[layer]

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> Sides:
        """Append keys and values of new tokens; return those of all tokens, valid until the next call."""
        new_sides, first = (key, value), self._lengths[layer]
        end = first + key.shape[2]
        with _without_autograd():
            if not self._sides[layer] or end > self._sides[layer][0].shape[2]:
                self._grow(layer, end + self.ROOM, new_sides)
            for side, new in zip(self._sides[layer], new_sides, strict=True):
                side.narrow(2, first, end - first).copy_(new)
        self._lengths[layer] = end
        return new_sides if first == 0 else self.rows(layer, 0)

    def _grow(self, layer: int, room: int, new_sides: Sides) -> None:
        sides = [new.new_empty((*new.shape[:2], room, new.shape[3])) for new in new_sides]
        for side, old in zip(sides, self._sides[layer], strict=False):
            side[:, :, : old.shape[2]] = old
        self._sides[layer] = sides

    def rows(self, layer: int, start: int) -> Sides:
        keys, values = self._sides[layer]
        count = self._lengths[layer] - start
        return keys.narrow(2, start, count), values.narrow(2, start, count)

    def commit(self, ids: Int64s, positions: Int64s) -> None:
        if not self.length:
            self.ids, self.positions = ids, positions
        else:
            self.ids, self.positions = np.append(self.ids, ids, 1), np.append(self.positions, positions, 1)

    def crop(self, tokens: int) -> None:
        self._lengths = [min(tokens, length) for length in self._lengths]
        self.ids, self.positions = self.ids[:, :tokens], self.positions[:, :tokens]

    def choose(self, index: Int64s) -> None:
        with _without_autograd():
            for layer, sides in enumerate(self._sides):
                self._sides[layer] = [side[torch.from_numpy(index).to(side.device)] for side in sides]
        self.ids, self.positions = self.ids[index], self.positions[index]


@contextlib.contextmanager
def _without_autograd() -> Iterator[None]:
    """Leave autograd and inference mode: no gradient flows through stored tensors, and they outlive the mode."""
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield


def crossing(dense_s: Sequence[float], chosen_s: Sequence[float]) -> int:
    """Return where lines through the times at both `LENGTHS` meet, in tokens; 0 if choosing is always faster."""
    slopes = [(side[1] - side[0]) / (LENGTHS[1] - LENGTHS[0]) for side in (dense_s, chosen_s)]
    gain_s = dense_s[0] - chosen_s[0]
    if slopes[0] <= slopes[1]:
        return 0 if gain_s > 0 else NEVER
    return max(0, int(LENGTHS[0] - gain_s / (slopes[0] - slopes[1])))
