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


_BY_SLOT = {"lifts": (np.float32, 0), "tokens": (np.int32, NONE), "children": (np.int32, NONE)}


def empty_tree(dim: int, page_slots: int, base: int, directions: Floats) -> Tree:
    """Returns a tree with an empty root, for tokens from number `base` on."""
    state = np.zeros(16, np.int64)
    state[[LEVELS, NODES, FREE_PAGE, FREE_NODE, BASE, SLOTS, DIM]] = 1, 1, NONE, NONE, base, page_slots, dim
    columns: dict[str, NDArray[Any]] = {"rows": np.zeros(0, np.uint16), "projections": np.zeros(0, np.float32)}
    columns |= {name: np.zeros(0, dtype) for name, (dtype, _) in _BY_SLOT.items()}
    tree = Tree(
        **columns,
        pages=np.zeros((0, 4), np.int32),
        nodes=np.zeros((0, 4), np.int32),
        where=np.zeros(0, np.int32),
        population=np.zeros(MAX_LEVELS + 1, np.int64),
        state=state,
        directions=directions,
    )
    tree = with_room(tree, 1, 1, 1)
    tree.nodes[ROOT] = NONE, NONE, 1, 0
    return tree


def with_room(tree: Tree, pages: int, nodes: int, last: int) -> Tree:
    """Returns the tree with room for `pages` and `nodes` more and for tokens below number `last`; itself if it has it.

    Arrays grow by a quarter, so that appending costs a fixed number of copies of each number, and no more than a fifth
    of them is ever unused.
    """
    used_pages, used_nodes = int(tree.state[PAGES]), int(tree.state[NODES])
    has_pages, has_nodes, has_tokens = len(tree.pages), len(tree.nodes), len(tree.where)
    wants_tokens = last - int(tree.state[BASE])
    changed: dict[str, NDArray[Any]] = {}
    if used_pages + pages > has_pages:
        size = _grown(has_pages, used_pages + pages)
        slots, dim = size * int(tree.state[SLOTS]), int(tree.state[DIM])
        changed["rows"] = _longer(tree.rows, slots * dim, 0)
        changed["projections"] = _longer(tree.projections, slots * len(tree.directions), 0)
        changed |= {name: _longer(getattr(tree, name), slots, fill) for name, (_, fill) in _BY_SLOT.items()}
        changed["pages"] = _longer(tree.pages, size, 0)
    if used_nodes + nodes > has_nodes:
        changed["nodes"] = _longer(tree.nodes, _grown(has_nodes, used_nodes + nodes), 0)
    if wants_tokens > has_tokens:
        changed["where"] = _longer(tree.where, _grown(has_tokens, wants_tokens), NONE)
    return tree._replace(**changed) if changed else tree


def trimmed(tree: Tree) -> Tree:
    """Returns the tree without the room it does not use: what is saved."""
    pages, nodes = int(tree.state[PAGES]), int(tree.state[NODES])
    slots = pages * int(tree.state[SLOTS])
    cut: dict[str, NDArray[Any]] = {name: getattr(tree, name)[:slots] for name in _BY_SLOT}
    cut |= {"pages": tree.pages[:pages], "nodes": tree.nodes[:nodes]}
    cut["rows"] = tree.rows[: slots * int(tree.state[DIM])]
    cut["projections"] = tree.projections[: slots * len(tree.directions)]
    used = np.flatnonzero(tree.where >= 0)
    cut["where"] = tree.where[: int(used[-1]) + 1 if len(used) else 0]
    return tree._replace(**cut)


def _grown(has: int, needs: int) -> int:
    return max(needs, has + has // 4)


def _longer(array: NDArray[Any], size: int, fill: int) -> NDArray[Any]:
    longer = np.empty((size, *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    longer[len(array) :] = fill
    return longer
