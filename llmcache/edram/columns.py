"""Configurations of the accelerator model as columns of arrays to compute with at once, and their decode steps in groups.

What a step costs depends on how many tokens are cached at it. While the cache grows, consecutive steps form groups of one
mean; once eviction keeps it at its budget all steps are one group. Costs are linear in the cached tokens and in the rows of
array tiles that they fill, of which both the group has the exact means, save where one resource takes over from another as
the slowest, or an activation lives one interval longer: there a group is as good as its mean (energies within 1e-4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcache.arrays import Doubles
from llmcache.edram.systems import Configuration

Array = Doubles


class ConfigurationColumns:
    """Numbers of many configurations as columns, [n, 1]; ValueError if there are none.

    An attribute of a model, workload, hardware, policy or profile is a column under its name, in its unit: float64, or bool
    where it is one. `refresh_hz` is [n, 4], in the order of `constants.GROUPS`; `matrices` is [n, 3 * kinds].
    """

    def __init__(self, configurations: Sequence[Configuration]) -> None:
        if not configurations:
            raise ValueError("configurations: none are given")
        parts = ("model", "workload", "hardware", "policy", "profile")
        self._parts = [[getattr(one, part) for one in configurations] for part in parts]

    def __getattr__(self, name: str) -> Array:
        values = next((of_part for of_part in self._parts if hasattr(of_part[0], name)), None)
        if values is None:
            raise AttributeError(name)
        known: dict[int, Any] = {id(value): value for value in values}  # a sweep has few different parts
        read = {key: getattr(value, name) for key, value in known.items()}
        found = np.array([read[id(value)] for value in values])
        column: Array = (found if found.dtype == bool else found.astype(np.float64)).reshape(len(values), -1)
        setattr(self, name, column)
        return column


STEP_GROUPS = 64
"""Groups that the growing part is divided into; a test compares with every step by itself."""


@dataclass(frozen=True)
class Steps:
    """Groups of decode steps, float64 [n, groups + 1] each; the last group is the steps at the budget.

    `cached`: mean tokens that a step attends to, its own included; `row_tiles`: mean tiles of `array_rows` tokens that
    they fill, the last one partly; `count`: steps of the group, 0 for an empty one.
    """

    cached: Array
    row_tiles: Array
    count: Array


def steps_of(columns: ConfigurationColumns, groups: int | None = STEP_GROUPS) -> Steps:
    """Returns the decode steps of `columns` in `groups` groups and one more; None: as many as the longest has steps."""
    end = columns.context + columns.decode
    kept = np.where(columns.evict, np.minimum(end, columns.budget), end)
    growing = np.clip(kept - columns.context, 0, columns.decode)
    groups = int(growing.max()) or 1 if groups is None else groups
    edges = np.floor(growing * (np.arange(groups + 1) / groups) + 0.5)
    first, last = columns.context + 1 + edges[:, :-1], columns.context + edges[:, 1:]
    count = np.diff(edges, axis=1)
    cached = np.where(count > 0, (first + last) / 2, first)
    filled = _tiles_up_to(last, columns.array_rows) - _tiles_up_to(first - 1, columns.array_rows)
    row_tiles = np.where(count > 0, filled / np.maximum(count, 1), np.ceil(cached / columns.array_rows))
    budget = np.maximum(columns.budget, 1)
    return Steps(
        np.hstack((cached, budget)),
        np.hstack((row_tiles, np.ceil(budget / columns.array_rows))),
        np.hstack((count, columns.decode - growing)),
    )


def _tiles_up_to(tokens: Array, rows: Array) -> Array:
    """Returns the sum of ceil(i / rows) over i = 1 .. tokens."""
    whole, rest = np.divmod(tokens, rows)
    return np.asarray(rows * whole * (whole + 1) / 2 + rest * (whole + 1))
