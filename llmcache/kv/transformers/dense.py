"""Short contexts: attended to fully, from tensors like those of transformers' own cache, and how long they may be.

To choose takes about the same time for a few tokens as for many; to attend to all takes time by the token. So there is a
length below which choosing is slower, and no better: it differs by model, machine and policy, and is measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from llmcache.arrays import Int64s
from llmcache.kv.pipeline import KvEngine
from llmcache.kv.policies.base import KvPolicy, PolicySettings
from llmcache.kv.spill import KvShape
from llmcache.kv.tiers import KvStore, StoreConfig
from llmcache.kv.transformers.tensors import as_array, as_tensor

if TYPE_CHECKING:
    from llmcache.kv.transformers.conversation import Call

Sides = tuple[torch.Tensor, torch.Tensor]

SHORT = 1024
"""Contexts up to here are attended to fully without a measurement: nothing gains from choosing among so few."""
LENGTHS = (1024, 4096)
"""Tokens at which both ways are measured; lines through them meet at the break-even."""
_LAYERS, _STEPS = 4, 5
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
        # Beside autograd and inference mode: nothing flows back through them, and they outlive the mode.
        with torch.inference_mode(False), torch.no_grad():
            if not self._sides[layer] or end > self._sides[layer][0].shape[2]:
                self._grow(layer, end + self.ROOM, news)
            for side, new in zip(self._sides[layer], news, strict=True):
                side[:, :, first:end] = new
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
        rows = slice(start, self._lengths[layer])
        return keys[:, :, rows], values[:, :, rows]

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
        with torch.inference_mode(False), torch.no_grad():
            for layer, sides in enumerate(self._sides):
                self._sides[layer] = [side[torch.from_numpy(index).to(side.device)] for side in sides]
        self.ids, self.positions = self.ids[index], self.positions[index]


# The break-even

_known: dict[Any, int] = {}


def break_even(policy: type[KvPolicy], chosen: PolicySettings, shape: KvShape, call: Call, threads: int | None) -> int:
    """Returns up to how many tokens a decode step attends to all in less time than `policy` chooses some of them.

    `call`: any of this model's. *Measured* on keys drawn by chance, once in a process for each kind of model, policy and
    batch, in a twentieth of a second or so; rounded up to a power of two, as a process like this one shall find the same.
    """
    batch, device = len(call.query), call.key.device
    kind = (policy, chosen, replace(shape, model="", layers=1), batch, call.query.shape[1], device, threads)
    if kind not in _known:
        found = crossing(*zip(*(_times(policy, chosen, shape, call, threads, tokens) for tokens in LENGTHS), strict=True))
        _known[kind] = found if found in (0, NEVER) else 1 << max(0, found - 1).bit_length()
    return max(SHORT, _known[kind])


def crossing(dense_s: Sequence[float], chosen_s: Sequence[float]) -> int:
    """Returns where lines through the times at both `LENGTHS` meet: 0 if choosing is faster from the beginning on."""
    slopes = [(side[1] - side[0]) / (LENGTHS[1] - LENGTHS[0]) for side in (dense_s, chosen_s)]
    gain_s = dense_s[0] - chosen_s[0]  # of choosing
    if slopes[0] <= slopes[1]:
        return 0 if gain_s > 0 else NEVER
    return max(0, int(LENGTHS[0] - gain_s / (slopes[0] - slopes[1])))


def _times(
    policy: type[KvPolicy], chosen: PolicySettings, shape: KvShape, call: Call, threads: int | None, tokens: int
) -> tuple[float, float]:
    """Seconds of a layer that attends to all of `tokens`, and of one that attends to what is chosen."""
    shape = replace(shape, layers=_LAYERS)
    query = call.query[:, :, -1:]
    once = replace(call, query=query, key=call.key[:, :, -1:], value=call.value[:, :, -1:], mask=None)
    random = torch.Generator().manual_seed(0)
    keys, values = (
        torch.randn((*side.shape[:2], tokens, side.shape[3]), generator=random).to(side.device, side.dtype)
        for side in (call.key, call.value)
    )
    ids = np.zeros((len(query), tokens), np.int64)

    dense = DenseLayers(_LAYERS)
    for layer in range(_LAYERS):
        dense.append(layer, keys, values)

    def attend_all(layer: int) -> None:
        once.run(*dense.append(layer, once.key, once.value), None)

    config = StoreConfig(shape, len(query), policy.sink_tokens, policy.window_tokens, threads=threads)
    with KvStore(config) as store, KvEngine(store, policy(store, chosen), app=False) as engine:
        none: Any = np.empty((*query.shape[:2], 0, query.shape[3]), np.float32)
        for layer in range(_LAYERS):
            engine.prefill(layer, none, as_array(keys), as_array(values))
        engine.finish_step(ids, ids)

        def attend_chosen(layer: int) -> None:
            arrays = [as_array(side) for side in (query[:, :, 0].float().contiguous(), once.key, once.value)]
            gathered = engine.step(layer, *arrays)
            chosen_keys, chosen_values = (
                as_tensor(side, call.key.dtype, call.key.device) for side in (gathered.keys, gathered.values)
            )
            once.run(chosen_keys, chosen_values, None)
            engine.attended(layer)
            gathered.release()
            if layer == _LAYERS - 1:
                engine.finish_step(ids[:, :1], ids[:, :1])

        return _seconds(attend_all), _seconds(attend_chosen)


def _seconds(attend: Callable[[int], None]) -> float:
    """The time of a layer in the middle of some steps, of which the first, that compiles or indexes, does not count."""
    taken = []
    with torch.no_grad():
        for _ in range(_STEPS + 1):
            begin_s = time.perf_counter()
            for layer in range(_LAYERS):
                attend(layer)
            taken.append(time.perf_counter() - begin_s)
    return statistics.median(taken[1:]) / _LAYERS
