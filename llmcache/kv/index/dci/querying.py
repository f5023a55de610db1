"""The compiled query of a DCI-tree: algorithm 4, a node at a time by P-DCI, the best nodes of a level opened at the next.

Compiled loops call those of other files of this folder: numba notices that a file has changed only by that file, so who
edits this one removes the caches of `changing.py` and `building.py` too.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from llmcache.kv.index.dci.tree import COUNT, DIM, FOLLOW, HEAD, LEVELS, NONE, ROOT, SIZE, SLOTS
from llmcache.kv.kernels.compiled import widened
from llmcache.kv.kernels.top import select

EVERY_LEVEL = 0
"""As a target: points of all levels are found (the paper's -1)."""
RECORD = 4
"""Numbers of a record of a page or node."""
LINE = 32
"""Halves in a cache line."""
ALL = np.iinfo(np.int64).max
"""As a field of view or as keys to visit: without a bound."""


def compiled(function: Any) -> Any:
    """Returns `function` compiled when first called, without the GIL, sums in any order."""
    return numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"}, error_model="numpy")(function)


@intrinsic  # type: ignore[untyped-decorator]
def fetch_ahead(typing_context: Any, array: Any, index: Any) -> Any:
    """Begins to load the cache line of an entry of a flat array: the processor cannot guess where nodes lie."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, value=arguments[0]).data
        place = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place.type, number, number, number])
        hint = builder.module.declare_intrinsic("llvm.prefetch", [place.type], kind)
        builder.call(hint, [place, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(array, index), generate


@compiled
def fetch_page(tree, page):  # type: ignore[no-untyped-def]
    """Begins to load a page."""
    fetch_ahead(tree.children, page * tree.state[SLOTS])
    dim = tree.state[DIM]
    first = page * tree.state[SLOTS] * dim
    for at in range(first, first + tree.pages[page, COUNT] * dim, LINE):
        fetch_ahead(tree.rows, at)


@compiled
def product(rows, index, key):  # type: ignore[no-untyped-def]
    """The product of a key and row `index` of halves."""
    at = np.uint64(index * key.size)
    total = np.float32(0)
    for j in range(key.size):
        total += widened(rows[at + np.uint64(j)]) * key[j]
    return total


@compiled
def similarity(tree, slot, key, lift):  # type: ignore[no-untyped-def]
    """The product of transformed keys (equation 2; a query has lift 0, equation 3), times (c / s)^2."""
    return product(tree.rows, slot, key) + lift * tree.lifts[slot]


@compiled
def unpacked(rows, index, dim):  # type: ignore[no-untyped-def]
    """Returns row `index` of halves as float32."""
    key = np.empty(dim, np.float32)
    for j in range(dim):
        key[j] = widened(rows[index * dim + j])
    return key


@compiled
def sink(scores, slots, at, size):  # type: ignore[no-untyped-def]
    """Restores a heap whose least is on top, after its entry `at` was replaced; of equal scores the later slot is less."""
    score, slot = scores[at], slots[at]
    while True:
        down = 2 * at + 1
        if down >= size:
            break
        if down + 1 < size and (
            scores[down + 1] < scores[down] or (scores[down + 1] == scores[down] and slots[down + 1] > slots[down])
        ):
            down += 1
        if scores[down] > score or (scores[down] == score and slots[down] <= slot):
            break
        scores[at], slots[at] = scores[down], slots[down]
        at = down
    scores[at], slots[at] = score, slot


@compiled
def best_first(scores, slots):  # type: ignore[no-untyped-def]
    """Sorts both by scores, the largest first; of equal ones the earlier slot."""
    for at in range(scores.size // 2 - 1, -1, -1):
        sink(scores, slots, at, scores.size)
    for last in range(scores.size - 1, 0, -1):
        scores[0], scores[last] = scores[last], scores[0]
        slots[0], slots[last] = slots[last], slots[0]
        sink(scores, slots, 0, last)


@compiled
def scan(tree, node, key, lift, scores, slots, count):  # type: ignore[no-untyped-def]
    """Appends every point of a node with its similarity; returns the new count."""
    page = tree.nodes[node, HEAD]
    while page != NONE:
        after = tree.pages[page, FOLLOW]
        if after != NONE:
            fetch_page(tree, after)
        first, size = page * tree.state[SLOTS], tree.pages[page, COUNT]
        for i in range(size):
            scores[count + i] = product(tree.rows, first + i, key)
            slots[count + i] = first + i
        if lift:  # for a query it would be read for nothing
            for i in range(size):
                scores[count + i] += lift * tree.lifts[first + i]
        count += size
        page = after
    return count


@compiled
def bound(tree, slot, asked, simple):  # type: ignore[no-untyped-def]
    """P-DCI's lower bound of the distance: least over composite indices of the largest over their simple indices."""
    at = slot * asked.size
    least = np.float32(np.inf)
    for first in range(0, asked.size, simple):
        largest = np.float32(0)
        for j in range(first, first + simple):
            largest = max(largest, abs(tree.projections[at + j] - asked[j]))
        least = min(least, largest)
    return least


@compiled
def prioritized(tree, node, key, lift, asked, simple, take, scores, slots, count):  # type: ignore[no-untyped-def]
    """Appends the `take` points of a node that have the least bounds, with their similarities: Prioritized-DCI-Query.

    Differs from the paper's source (Li & Malik, 2017): the points with the least bounds are chosen from all bounds of the
    node, not met one by one along sorted lists: a node has tens of points, and nothing is to be kept sorted.
    """
    bounds, places = scores[count:], slots[count:]
    seen = 0
    page = tree.nodes[node, HEAD]
    while page != NONE:
        first = page * tree.state[SLOTS]
        for slot in range(first, first + tree.pages[page, COUNT]):
            # A heap of the least bounds, the largest of them on top.
            value = -bound(tree, slot, asked, simple)
            if seen < take:
                bounds[seen], places[seen] = value, slot
                seen += 1
                if seen == take:
                    for at in range(take // 2 - 1, -1, -1):
                        sink(bounds, places, at, take)
            elif value > bounds[0]:
                bounds[0], places[0] = value, slot
                sink(bounds, places, 0, take)
        page = tree.pages[page, FOLLOW]
    for at in range(count, count + take):
        scores[at] = similarity(tree, slots[at], key, lift)
    return count + take


@compiled
def opened(tree, scores, slots, view, visit, nodes):  # type: ignore[no-untyped-def]
    """Chooses the nodes below the best points: up to `view`, together up to `visit` points; at least one.

    Nodes without points are passed over. The candidates, of which nothing is left, become a heap whose best is on top.
    """
    count = scores.size
    records = tree.nodes.reshape(-1)
    for at in range(count):
        scores[at] = -scores[at]
        fetch_ahead(records, RECORD * tree.children[slots[at]])
    for at in range(count // 2 - 1, -1, -1):
        sink(scores, slots, at, count)
    width = 0
    while count and width < view:
        node = tree.children[slots[0]]
        count -= 1
        scores[0], slots[0] = scores[count], slots[count]
        sink(scores, slots, 0, count)
        size = tree.nodes[node, SIZE]
        if not size:
            continue
        visit -= size
        if visit < 0 and width:
            break
        nodes[width] = node
        width += 1
        fetch_ahead(tree.pages.reshape(-1), RECORD * tree.nodes[node, HEAD])
    return width


@compiled
def descend(tree, key, lift, target, limits, share, k, scratch):  # type: ignore[no-untyped-def]
    """Collects candidates in `scratch`; returns from where on they belong to the target, their number, and the products."""
    scores, slots, nodes = scratch[:3]
    view, visit, simple = limits
    asked = np.empty(tree.directions.shape[0] if share < 1 else 0, np.float32)
    for index in range(asked.size):
        asked[index] = projection(tree.directions[index], key, lift)
    width, nodes[0] = 1, ROOT
    start = count = 0
    for level in range(tree.state[LEVELS], max(target, 1) - 1, -1):
        start = count
        for index in range(width):
            if index + 1 < width:
                fetch_page(tree, tree.nodes[nodes[index + 1], HEAD])
            node = nodes[index]
            size = tree.nodes[node, SIZE]
            take = max(k, int(np.ceil(share * size)))
            if take < size:
                count = prioritized(tree, node, key, lift, asked, simple, take, scores, slots, count)
            else:
                count = scan(tree, node, key, lift, scores, slots, count)
        if level > max(target, 1):
            size = count - start
            # The heap takes a copy: what was seen on the way down counts at the end.
            for at in range(start, count):
                scores[at + size], slots[at + size] = scores[at], slots[at]
            width = opened(tree, scores[count : count + size], slots[count : count + size], view, visit, nodes)
    return (0 if target == EVERY_LEVEL else start), count


@compiled
def projection(direction, key, lift):  # type: ignore[no-untyped-def]
    """The product of a transformed key with a random direction."""
    total = lift * direction[key.size]
    for j in range(key.size):
        total += direction[j] * key[j]
    return total


@compiled
def ask(tree, keys, lifts, target, limits, share, scratch, found):  # type: ignore[no-untyped-def]
    """Finds for each of `keys` [n, dim] the points of level `target` (or EVERY_LEVEL) most similar to it; algorithm 4.

    `limits`: field of view, points to visit a level, simple indices. `scratch`: see `Scratch`. `found`: scores and slots
    [n, k], best first, then for each key how many there are and how many products were computed.
    """
    out_scores, out_slots, counts, touched = found
    scores, slots = scratch[:2]
    k = out_slots.shape[1]
    chosen = np.empty(k, np.int64)
    for index in range(keys.shape[0]):
        start, count = descend(tree, keys[index], lifts[index], target, limits, share, k, scratch)
        touched[index] = count
        size = min(k, count - start)
        counts[index] = size
        if not size:
            continue
        own, own_slots = scores[start:count], slots[start:count]
        best = chosen[:size]
        if k == 1:
            best[0] = np.argmax(own)
        else:
            select(own, size, scratch[3], scratch[4], scratch[5], best)
        for at in range(size):
            out_scores[index, at], out_slots[index, at] = own[best[at]], own_slots[best[at]]
        best_first(out_scores[index, :size], out_slots[index, :size])
