"""The arrays of a DCI-tree of one key head, and how they grow; the compiled loops of this folder work on nothing else.

A point (a key) lies in one slot; `page_slots` slots are a page; a chain of pages is a node: the points that share a parent.
A point of a level above the lowest owns the node below it. Node 0 is the root. Levels count from 1, the lowest.
Everything is an array of numbers, so that a tree is saved and restored as it lies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmcache.arrays import Floats, Int64s

NONE = -1
ROOT = 0
MAX_LEVELS = 32
LEVELS, PAGES, NODES, FREE_PAGE, FREE_NODE, KEYS, BASE, SLOTS, DIM, LIVE_PAGES = range(10)
COUNT, FOLLOW, HOME = range(3)
HEAD, OWNER, LEVEL, SIZE = range(4)
"""Places in `Tree.state`: levels, pages and nodes ever used, heads of the free lists, points, the number of the first
token that may come, slots a page, numbers a key, pages in use."""

Ints = NDArray[np.int32]


class Tree(NamedTuple):
    """The arrays: by slot, by page, by node, by token, and of the whole."""

    rows: NDArray[np.uint16]
    """[slots * dim] keys / s, the bits of halves; s is a power of two, so that halves stay exact."""
    lifts: Floats
    """[slots] the last coordinate of equation 2, times c / s."""
    tokens: Ints
    """[slots] the number of the token."""
    children: Ints
    """[slots] the node below the point, or NONE."""
    projections: Floats
    """[slots * directions] products with the random directions of P-DCI."""
    pages: Ints
    """[pages, 4] COUNT: slots in use, which come first; FOLLOW: the next page of the node (of the free list), or NONE; HOME:
    the node. A record to a page, so that a query finds all of it with one miss of the cache."""
    nodes: Ints
    """[nodes, 4] HEAD: the first page, or NONE (in the free list the next node); OWNER: the token of the point above, NONE
    for the root and free nodes; LEVEL: that of the points in it, 0 for free nodes; SIZE: points in it."""
    where: Ints
    """[tokens] the slot of token BASE + i, or NONE."""
    population: Int64s
    """[MAX_LEVELS + 1] points of each level."""
    state: Int64s
    directions: Floats
    """[simple * composite, dim + 1] random unit vectors."""


_TYPES: dict[str, Any] = {"rows": np.uint16, "lifts": np.float32, "projections": np.float32}
_TYPES |= dict.fromkeys(("tokens", "children", "pages", "nodes", "where"), np.int32)


def empty_tree(dim: int, page_slots: int, base: int, directions: Floats) -> Tree:
    """Returns a tree with an empty root, for tokens from number `base` on."""
    state, population = np.zeros(16, np.int64), np.zeros(MAX_LEVELS + 1, np.int64)
    state[[LEVELS, NODES, FREE_PAGE, FREE_NODE, BASE, SLOTS, DIM]] = 1, 1, NONE, NONE, base, page_slots, dim
    arrays: dict[str, NDArray[Any]]
    arrays = {name: np.zeros((0, 4) if name in ("pages", "nodes") else 0, kind) for name, kind in _TYPES.items()}
    tree = with_room(Tree(**arrays, population=population, state=state, directions=directions), 1, 1, 1)
    tree.nodes[ROOT] = NONE, NONE, 1, 0
    return tree


def _sizes(tree: Tree, pages: int, nodes: int, tokens: int) -> dict[str, int]:
    """How long the arrays of a tree are that has so many."""
    slots = pages * int(tree.state[SLOTS])
    sizes = {"rows": slots * int(tree.state[DIM]), "projections": slots * len(tree.directions)}
    return {**sizes, "lifts": slots, "tokens": slots, "children": slots, "pages": pages, "nodes": nodes, "where": tokens}


def with_room(tree: Tree, pages: int, nodes: int, last: int) -> Tree:
    """Returns the tree with room for `pages` and `nodes` more and for tokens below number `last`; itself if it has it.

    Arrays grow by a quarter, so that appending costs a fixed number of copies of each number, and no more than a fifth
    of them is ever unused.
    """
    has = [len(tree.pages), len(tree.nodes), len(tree.where)]
    needs = [int(tree.state[PAGES]) + pages, int(tree.state[NODES]) + nodes, last - int(tree.state[BASE])]
    if all(needed <= there for needed, there in zip(needs, has, strict=True)):
        return tree
    room = [max(needed, there + there // 4) if needed > there else there for needed, there in zip(needs, has, strict=True)]
    changed: dict[str, NDArray[Any]] = {}
    for name, size in _sizes(tree, *room).items():
        array: NDArray[Any] = getattr(tree, name)
        if size > len(array):
            changed[name] = np.empty((size, *array.shape[1:]), array.dtype)
            changed[name][: len(array)] = array
            changed[name][len(array) :] = NONE if name in ("tokens", "children", "where") else 0
    return tree._replace(**changed)


def trimmed(tree: Tree) -> Tree:
    """Returns the tree without the room it does not use: what is saved."""
    used = np.flatnonzero(tree.where >= 0)
    sizes = _sizes(tree, int(tree.state[PAGES]), int(tree.state[NODES]), int(used[-1]) + 1 if len(used) else 0)
    return tree._replace(**{name: getattr(tree, name)[:size] for name, size in sizes.items()})
