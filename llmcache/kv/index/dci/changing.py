"""The compiled changes of a DCI-tree: points are added (algorithm 1, lines 28 to 35), a full page is split, a point goes.

Parents have been found and room has been made (`tree.with_room`) before: queries are compiled once, in `querying.py`.
"""

from __future__ import annotations

import numpy as np

from llmcache.kv.index.dci.querying import best_first, compiled, projection, similarity, unpacked
from llmcache.kv.index.dci.tree import (
    BASE,
    COUNT,
    DIM,
    FOLLOW,
    FREE_NODE,
    FREE_PAGE,
    HEAD,
    HOME,
    KEYS,
    LEVEL,
    LEVELS,
    LIVE_PAGES,
    NODES,
    NONE,
    OWNER,
    PAGES,
    ROOT,
    SIZE,
    SLOTS,
)


@compiled
def new_page(tree, node):  # type: ignore[no-untyped-def]
    """Puts an empty page in front of the chain of a node and returns it."""
    state = tree.state
    page = state[FREE_PAGE]
    if page == NONE:
        page = state[PAGES]
        state[PAGES] += 1
    else:
        state[FREE_PAGE] = tree.pages[page, FOLLOW]
    state[LIVE_PAGES] += 1
    tree.pages[page, COUNT], tree.pages[page, HOME] = 0, node
    tree.pages[page, FOLLOW] = tree.nodes[node, HEAD]
    tree.nodes[node, HEAD] = page
    return page


@compiled
def free_page(tree, page):  # type: ignore[no-untyped-def]
    """Takes a page out of the chain of its node."""
    node, after = tree.pages[page, HOME], tree.pages[page, FOLLOW]
    if tree.nodes[node, HEAD] == page:
        tree.nodes[node, HEAD] = after
    else:
        before = tree.nodes[node, HEAD]
        while tree.pages[before, FOLLOW] != page:
            before = tree.pages[before, FOLLOW]
        tree.pages[before, FOLLOW] = after
    tree.pages[page, COUNT], tree.pages[page, HOME] = 0, NONE
    tree.pages[page, FOLLOW] = tree.state[FREE_PAGE]
    tree.state[FREE_PAGE] = page
    tree.state[LIVE_PAGES] -= 1


@compiled
def new_node(tree, owner, level):  # type: ignore[no-untyped-def]
    """Returns a node without pages, for points of `level` below the point of token `owner`."""
    node = tree.state[FREE_NODE]
    if node == NONE:
        node = tree.state[NODES]
        tree.state[NODES] += 1
    else:
        tree.state[FREE_NODE] = tree.nodes[node, HEAD]
    tree.nodes[node, HEAD], tree.nodes[node, OWNER], tree.nodes[node, LEVEL], tree.nodes[node, SIZE] = NONE, owner, level, 0
    return node


@compiled
def free_node(tree, node):  # type: ignore[no-untyped-def]
    """Gives back a node that has no pages."""
    tree.nodes[node, OWNER], tree.nodes[node, LEVEL], tree.nodes[node, SIZE] = NONE, 0, 0
    tree.nodes[node, HEAD] = tree.state[FREE_NODE]
    tree.state[FREE_NODE] = node


@compiled
def place(tree, slot, bits, index, lift, token, child):  # type: ignore[no-untyped-def]
    """Writes a point, of which the halves are row `index` of `bits`, to a slot."""
    dim = tree.state[DIM]
    for j in range(dim):
        tree.rows[slot * dim + j] = bits[index * dim + j]
    tree.lifts[slot], tree.tokens[slot], tree.children[slot] = lift, token, child
    tree.where[token - tree.state[BASE]] = slot


@compiled
def project(tree, slot, key):  # type: ignore[no-untyped-def]
    """Writes the products of the point in a slot with the random directions."""
    count = tree.directions.shape[0]
    for index in range(count):
        tree.projections[slot * count + index] = projection(tree.directions[index], key, tree.lifts[slot])


@compiled
def move(tree, old, new):  # type: ignore[no-untyped-def]
    """Copies a point to another slot; the old one is to be given up."""
    count = tree.directions.shape[0]
    place(tree, new, tree.rows, old, tree.lifts[old], tree.tokens[old], tree.children[old])
    for index in range(count):
        tree.projections[new * count + index] = tree.projections[old * count + index]


@compiled
def page_for(tree, node, key, lift):  # type: ignore[no-untyped-def]
    """Returns the page of a node that a new key belongs to: that of its nearest sibling; split if it is full."""
    page = tree.nodes[node, HEAD]
    if page == NONE:
        return new_page(tree, node)
    slots = tree.state[SLOTS]
    if tree.pages[page, FOLLOW] != NONE:
        best, nearest_page = np.float32(-np.inf), page
        while page != NONE:
            for slot in range(page * slots, page * slots + tree.pages[page, COUNT]):
                score = similarity(tree, slot, key, lift)
                if score > best:
                    best, nearest_page = score, page
            page = tree.pages[page, FOLLOW]
        page = nearest_page
    return page if tree.pages[page, COUNT] < slots else split(tree, page, key, lift)


@compiled
def split(tree, page, key, lift):  # type: ignore[no-untyped-def]
    """Moves the half of a full page that is on the side of `key` to a new one, and returns that.

    The sides are told by two pivots: the new key, and the key of the page that is farthest from it.
    """
    slots, first = tree.state[SLOTS], page * tree.state[SLOTS]
    towards, order = np.empty(slots, np.float32), np.arange(slots).astype(np.int32)
    for i in range(slots):
        towards[i] = similarity(tree, first + i, key, lift)
    far = np.argmin(towards)
    pivot, pivot_lift = unpacked(tree.rows, first + far, key.size), tree.lifts[first + far]
    for i in range(slots):
        towards[i] -= similarity(tree, first + i, pivot, pivot_lift)
    best_first(towards, order)
    leaves = slots // 2
    fresh = new_page(tree, tree.pages[page, HOME])
    for i in range(leaves):
        move(tree, first + order[i], fresh * slots + i)
    keep = np.sort(order[leaves:])
    for i in range(keep.size):
        if keep[i] != i:
            move(tree, first + keep[i], first + i)
    tree.pages[page, COUNT], tree.pages[fresh, COUNT] = slots - leaves, leaves
    return fresh


@compiled
def attach(tree, bits, lifts, tokens, level, nodes):  # type: ignore[no-untyped-def]
    """Adds keys at `level`, each to its node; `bits` [n * dim]."""
    dim = tree.state[DIM]
    for index in range(nodes.size):
        child = new_node(tree, tokens[index], level - 1) if level > 1 else NONE
        add(tree, nodes[index], bits, index, dim, lifts[index], tokens[index], child)
    tree.population[level] += nodes.size
    tree.state[KEYS] += nodes.size


@compiled
def add(tree, node, bits, index, dim, lift, token, child):  # type: ignore[no-untyped-def]
    """Adds a point to a node."""
    key = unpacked(bits, index, dim)
    page = page_for(tree, node, key, lift)
    slot = page * tree.state[SLOTS] + tree.pages[page, COUNT]
    place(tree, slot, bits, index, lift, token, child)
    project(tree, slot, key)
    tree.pages[page, COUNT] += 1
    tree.nodes[node, SIZE] += 1


@compiled
def start_level(tree, bits, lift, token):  # type: ignore[no-untyped-def]
    """Adds a key as the first of a new level: all that hung under the root hangs under it now."""
    level = tree.state[LEVELS] + 1
    child = new_node(tree, token, level - 1)
    take_over(tree, child, ROOT)
    tree.nodes[ROOT, LEVEL] = level
    tree.state[LEVELS] = level
    add(tree, ROOT, bits, 0, tree.state[DIM], lift, token, child)
    tree.population[level] += 1
    tree.state[KEYS] += 1


@compiled
def take_over(tree, node, other):  # type: ignore[no-untyped-def]
    """Gives the pages of `other` to `node`, which has none."""
    tree.nodes[node, HEAD], tree.nodes[node, SIZE] = tree.nodes[other, HEAD], tree.nodes[other, SIZE]
    tree.nodes[other, HEAD], tree.nodes[other, SIZE] = NONE, 0
    page = tree.nodes[node, HEAD]
    while page != NONE:
        tree.pages[page, HOME] = node
        page = tree.pages[page, FOLLOW]


@compiled
def detach(tree, slot):  # type: ignore[no-untyped-def]
    """Takes a point out of its page: the last of the page fills the place; pages that fit into one are joined."""
    slots = tree.state[SLOTS]
    page = slot // slots
    node = tree.pages[page, HOME]
    tree.where[tree.tokens[slot] - tree.state[BASE]] = NONE
    last = page * slots + tree.pages[page, COUNT] - 1
    if last != slot:
        move(tree, last, slot)
    tree.pages[page, COUNT] -= 1
    tree.nodes[node, SIZE] -= 1
    if tree.pages[page, COUNT] == 0:
        free_page(tree, page)
    elif tree.pages[page, COUNT] <= slots // 4:
        join(tree, page)


@compiled
def join(tree, page):  # type: ignore[no-untyped-def]
    """Moves what is left of a page to another of its node that has room for all of it, if there is one."""
    slots = tree.state[SLOTS]
    other = tree.nodes[tree.pages[page, HOME], HEAD]
    while other != NONE and (other == page or tree.pages[other, COUNT] + tree.pages[page, COUNT] > slots):
        other = tree.pages[other, FOLLOW]
    if other == NONE:
        return
    for i in range(tree.pages[page, COUNT]):
        move(tree, page * slots + i, other * slots + tree.pages[other, COUNT] + i)
    tree.pages[other, COUNT] += tree.pages[page, COUNT]
    free_page(tree, page)


@compiled
def take_away(tree, token):  # type: ignore[no-untyped-def]
    """Takes a token away, and its level if that has become empty.

    Returns the node that hung under it, which is not in the tree any more: its points need new parents (`rehang`); or NONE.
    """
    slot = tree.where[token - tree.state[BASE]]
    level = tree.nodes[tree.pages[slot // tree.state[SLOTS], HOME], LEVEL]
    below = tree.children[slot]
    detach(tree, slot)
    tree.population[level] -= 1
    tree.state[KEYS] -= 1
    if tree.population[level] == 0 and tree.state[LEVELS] > 1:
        if level == tree.state[LEVELS]:
            take_over(tree, ROOT, below)
        drop_level(tree, level)
    if below != NONE and tree.nodes[below, SIZE] == 0:
        free_node(tree, below)
        return NONE
    return below


@compiled
def drop_level(tree, level):  # type: ignore[no-untyped-def]
    """Closes the gap of an empty level: the levels above move down by one. Nodes of the lowest level just end."""
    state = tree.state
    for node in range(state[NODES]):
        if tree.nodes[node, LEVEL] == level == 1 and node != ROOT:
            owner = tree.where[tree.nodes[node, OWNER] - state[BASE]]
            tree.children[owner] = NONE
            free_node(tree, node)
        elif tree.nodes[node, LEVEL] >= level and (level > 1 or tree.nodes[node, LEVEL] > 1):
            tree.nodes[node, LEVEL] -= 1
    for above in range(level, state[LEVELS]):
        tree.population[above] = tree.population[above + 1]
    tree.population[state[LEVELS]] = 0
    state[LEVELS] -= 1


@compiled
def slots_of(tree, node):  # type: ignore[no-untyped-def]
    """Returns the slots of the points of a node."""
    slots = np.empty(tree.nodes[node, SIZE], np.int32)
    seen, page = 0, tree.nodes[node, HEAD]
    while page != NONE:
        for i in range(tree.pages[page, COUNT]):
            slots[seen] = page * tree.state[SLOTS] + i
            seen += 1
        page = tree.pages[page, FOLLOW]
    return slots


@compiled
def rehang(tree, node, bits, parents):  # type: ignore[no-untyped-def]
    """Moves the points of a node that is not in the tree, in the order of `slots_of`, into the nodes `parents`."""
    dim = tree.state[DIM]
    slots = slots_of(tree, node)
    lifts, tokens, children = tree.lifts[slots], tree.tokens[slots], tree.children[slots]
    while tree.nodes[node, HEAD] != NONE:
        free_page(tree, tree.nodes[node, HEAD])
    free_node(tree, node)
    for index in range(slots.size):
        add(tree, parents[index], bits, index, dim, lifts[index], tokens[index], children[index])
