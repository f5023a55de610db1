"""The knobs of a DCI-tree."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class DciSettings:
    """How a tree is built and asked.

    `promotion` is the paper's r; `first_promotion` that from the lowest level, which the authors' code sets apart: nodes of
    the lowest level are to fill pages. `field_of_view`: how many nodes a query opens on each level; `visit`: what share of
    all keys these may hold on a level, on top of `visit_each` for each key that is asked for. `build_view`: field of view
    of the search for a parent; 0: all, for a nearest parent without exception. `simple`, `composite`: indices of P-DCI;
    `retrieve`: the share of a node's keys (at least k) that P-DCI lets through to products of keys; 1: all of them, then no
    random directions are kept. `margin`: a level is left before its bounds are reached when the points below the next node
    would have to be so many standard deviations better than those seen so far, relative to the points above them, to be
    among the best; infinity: never.
    Differs from the paper: a query opens at most so many nodes (in algorithm 4, up to k for each node of the level above)
    and stops early by `margin`: 1.5 % of 256 k keys looked at instead of 2.1 %, at the same recall. And by default it looks
    at all keys of a node (the authors' code at .6 to .8 of them): at 64 k clustered keys, with one projection and .8, a
    query takes 1.9 times as long and finds .88 of the best instead of .94.
    Source: icecache.txt, sections 3.3 and 4.2, algorithms 2 and 4.
    """

    promotion: float = 0.1
    first_promotion: float = 0.03
    field_of_view: int = 112
    visit: float = 0.012
    visit_each: int = 3
    build_view: int = 6
    simple: int = 1
    composite: int = 1
    retrieve: float = 1.0
    margin: float = 2.4
    page_slots: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("promotion", "first_promotion"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)}, a number between 0 and 1 is needed")
        for name in ("visit", "retrieve"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}: {getattr(self, name)}, above 0 and at most 1 is needed")
        if not self.margin >= 0:
            raise ValueError(f"margin: {self.margin}, at least 0 is needed")
        for name, least in (("field_of_view", 1), ("visit_each", 0), ("build_view", 0), ("simple", 1), ("composite", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: {getattr(self, name)}, at least {least} is needed")
        if not 1 <= self.page_slots <= 4096:
            raise ValueError(f"page_slots: {self.page_slots}, 1 to 4096 are possible")

    @property
    def directions(self) -> int:
        """How many random directions each key is projected on."""
        return self.simple * self.composite if self.retrieve < 1 else 0

    def visited(self, keys: int, k: int) -> int:
        """Returns how many keys a query for `k` of `keys` may visit on each level."""
        return max(1, int(self.visit * keys) + self.visit_each * k)

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data."""
        return asdict(self)
