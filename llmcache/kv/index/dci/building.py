"""How a level of a DCI-tree is laid out when many keys come at once: algorithm 2.

Differs from the paper: its loop adds keys in the order of their tokens, so that a key whose parents come later hangs
elsewhere; from the top down every key can choose among all parents of the next level, and keys do not wait for each other.
"""

from __future__ import annotations

import numpy as np

from llmcache.kv.index.dci.changing import new_node, place, project
from llmcache.kv.index.dci.querying import best_first, compiled, product, unpacked
from llmcache.kv.index.dci.tree import COUNT, DIM, FOLLOW, HEAD, HOME, KEYS, LIVE_PAGES, NONE, PAGES, SIZE, SLOTS


@compiled
def lay(tree, level, members, ends, nodes, bits, lifts, tokens):  # type: ignore[no-untyped-def]
    """Lays a level out, node after node, the pages of a node side by side.

    `members` are numbers of keys in `bits` [n * dim], `lifts` and `tokens` [n]; up to `ends` [i] they belong to `nodes` [i].
    """
    tree.population[level] = members.size
    tree.state[KEYS] += members.size
    start = 0
    for index in range(nodes.size):
        own = members[start : ends[index]]
        arrange(bits, lifts, own, tree.state[SLOTS], tree.state[DIM])
        fill(tree, nodes[index], level, own, bits, lifts, tokens)
        start = ends[index]


@compiled
def fill(tree, node, level, members, bits, lifts, tokens):  # type: ignore[no-untyped-def]
    """Writes the points of a node to new pages."""
    slots, dim, first = tree.state[SLOTS], tree.state[DIM], tree.state[PAGES]
    pages = -(-members.size // slots)
    for page in range(first, first + pages):
        tree.pages[page, HOME] = node
        tree.pages[page, FOLLOW] = page + 1 if page + 1 < first + pages else NONE
        tree.pages[page, COUNT] = min(slots, members.size - (page - first) * slots)
    tree.nodes[node, HEAD], tree.nodes[node, SIZE] = first, members.size
    tree.state[PAGES] += pages
    tree.state[LIVE_PAGES] += pages
    for i in range(members.size):
        index = members[i]
        child = new_node(tree, tokens[index], level - 1) if level > 1 else NONE
        place(tree, first * slots + i, bits, index, lifts[index], tokens[index], child)
        if tree.directions.shape[0]:
            project(tree, first * slots + i, unpacked(bits, index, dim))


@compiled
def arrange(bits, lifts, members, slots, dim):  # type: ignore[no-untyped-def]
    """Orders the points of a node so that those of a page are alike: halved by two far points until a page holds them.

    Halves are whole pages, so that only the last page of a node is not full.
    """
    ends = np.empty(64, np.int64)  # of the parts that wait, the next on top
    start, waiting, ends[0] = 0, 1, members.size
    while waiting:
        size = ends[waiting - 1] - start
        if size <= slots:
            start = ends[waiting - 1]
            waiting -= 1
            continue
        halve(bits, lifts, members[start : start + size], dim)
        ends[waiting] = start + max(1, -(-size // slots) // 2) * slots
        waiting += 1


@compiled
def halve(bits, lifts, members, dim):  # type: ignore[no-untyped-def]
    """Sorts points by which of two far ones they are nearer to."""
    sides = np.zeros(members.size, np.float32)
    pivot = members[0]
    for sign in (0, 1, -1):  # the first only tells which is far
        key, lift = unpacked(bits, pivot, dim), lifts[pivot]
        far, least = pivot, np.float32(np.inf)
        for i in range(members.size):
            score = product(bits, members[i], key) + lift * lifts[members[i]]
            sides[i] += sign * score
            if score < least:
                far, least = members[i], score
        pivot = far
    best_first(sides, members)
