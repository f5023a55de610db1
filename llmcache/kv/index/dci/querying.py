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
FIRST = 512
"""Points that are looked at before it is asked whether the rest is hopeless; then twice as many, and so on."""
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
def fetch_page(rows, children, pages, page, slots, dim):  # type: ignore[no-untyped-def]
    """Begins to load a page."""
    fetch_ahead(children, page * slots)
    first = page * slots * dim
    for at in range(first, first + pages[page, COUNT] * dim, LINE):
        fetch_ahead(rows, at)


@compiled
def product(rows, index, key):  # type: ignore[no-untyped-def]
    """The product of a key and row `index` of halves."""
    at = np.uint64(index * key.size)
    total = np.float32(0)
    for j in range(key.size):
        total += widened(rows[at + np.uint64(j)]) * key[j]
    return total


@compiled
def four_products(rows, index, key):  # type: ignore[no-untyped-def]
    """The products of a key and four rows from `index` on: the key is read once for all of them."""
    dim = key.size
    at = np.uint64(index * dim)
    second, third, fourth = at + np.uint64(dim), at + np.uint64(2 * dim), at + np.uint64(3 * dim)
    a = b = c = d = np.float32(0)
    for i in range(dim):
        j, factor = np.uint64(i), key[i]
        a += widened(rows[at + j]) * factor
        b += widened(rows[second + j]) * factor
        c += widened(rows[third + j]) * factor
        d += widened(rows[fourth + j]) * factor
    return a, b, c, d


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
def scan(tree, nodes, key, lift, scores, slots, count):  # type: ignore[no-untyped-def]
    """Appends every point of `nodes` with its similarity; returns the new count.

    One call for many nodes: each call counts references to the arrays of the tree, which takes as long as ten keys.
    """
    rows, children, pages, size, dim = tree.rows, tree.children, tree.pages, tree.state[SLOTS], tree.state[DIM]
    for index in range(nodes.size):
        page = tree.nodes[nodes[index], HEAD]
        if index + 1 < nodes.size:
            fetch_page(rows, children, pages, tree.nodes[nodes[index + 1], HEAD], size, dim)
        while page != NONE:
            after = pages[page, FOLLOW]
            if after != NONE:
                fetch_page(rows, children, pages, after, size, dim)
            first, held = page * size, pages[page, COUNT]
            for at in range(0, held - 3, 4):
                a, b, c, d = four_products(rows, first + at, key)
                scores[count + at], scores[count + at + 1], scores[count + at + 2], scores[count + at + 3] = a, b, c, d
            for at in range(held - held % 4, held):
                scores[count + at] = product(rows, first + at, key)
            for at in range(held):
                slots[count + at] = first + at
            if lift:  # for a query it would be read for nothing
                for at in range(held):
                    scores[count + at] += lift * tree.lifts[first + at]
            count += held
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
    """Appends the `take` points of a node (all, if it has fewer) that have the least bounds: Prioritized-DCI-Query.

    Differs from the paper's source (Li & Malik, 2017): the points with the least bounds are chosen from all bounds of the
    node, not met one by one along sorted lists: a node has tens of points, and nothing is to be kept sorted.
    """
    take = min(take, tree.nodes[node, SIZE])
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
def heap_of(tree, scores, slots, start, count, half):  # type: ignore[no-untyped-def]
    """Copies the points found on a level behind `half`, as a heap whose best is on top: scores are turned around."""
    records, size = tree.nodes.reshape(-1), count - start
    for at in range(size):
        scores[half + at], slots[half + at] = -scores[start + at], slots[start + at]
        fetch_ahead(records, RECORD * tree.children[slots[start + at]])
    heap, heap_slots = scores[half : half + size], slots[half : half + size]
    for at in range(size // 2 - 1, -1, -1):
        sink(heap, heap_slots, at, size)
    return heap, heap_slots


@compiled
def opened(tree, heap, heap_slots, left, width, limits, batch, nodes, above):  # type: ignore[no-untyped-def]
    """Takes nodes below the best of `left` points off a heap, until they have `batch` points; those without are passed over.

    Up to `limits`: nodes, points. Returns how many points are left (0 when a limit is reached), and the new width.
    """
    view, visit = limits
    pages = tree.pages.reshape(-1)
    while left and width < view and batch > 0:
        best, node = -heap[0], tree.children[heap_slots[0]]
        left -= 1
        heap[0], heap_slots[0] = heap[left], heap_slots[left]
        sink(heap, heap_slots, 0, left)
        size = tree.nodes[node, SIZE]
        if not size:
            continue
        visit -= size
        batch -= size
        if visit < 0 and width:
            return 0, width
        nodes[width], above[width] = node, best
        width += 1
        fetch_ahead(pages, RECORD * tree.nodes[node, HEAD])
    return left if width < view else 0, width


@compiled
def hopeless(scores, k, best, spread, margin, rest):  # type: ignore[no-untyped-def]
    """True if points below a point with score `best` or less can hardly be among the `k` best of `scores`.

    `spread`: number, sum and sum of squares of the differences of the points seen from those above them.
    """
    if scores.size < max(k, 2 * FIRST):
        return False  # there is little to be saved
    chosen = rest[3][:k]
    select(scores, k, rest[0], rest[1], rest[2], chosen)
    least = np.float32(np.inf)
    for at in range(k):
        least = min(least, scores[chosen[at]])
    mean = spread[1] / spread[0]
    return best + mean + margin * np.sqrt(max(spread[2] / spread[0] - mean * mean, 0.0)) < least


@compiled
def descend(tree, key, lift, target, limits, share, k, scratch):  # type: ignore[no-untyped-def]
    """Collects candidates in `scratch`; returns from where on they belong to the target, their number, and the products."""
    scores, slots, nodes, above = scratch[:4]
    view, visit, simple, margin = limits
    half, patient = scores.size // 2, np.isinf(margin)
    asked = np.empty(tree.directions.shape[0] if share < 1 else 0, np.float32)
    for index in range(asked.size):
        asked[index] = projection(tree.directions[index], key, lift)
    spread = np.zeros(3)
    width, first, left, batch, nodes[0] = 1, 0, 0, visit if patient else FIRST, ROOT
    heap, heap_slots = scores[half:half], slots[half:half]
    start = count = 0
    level = tree.state[LEVELS]
    while True:
        before = count
        if share < 1:
            for index in range(first, width):
                take = max(k, int(np.ceil(share * tree.nodes[nodes[index], SIZE])))
                count = prioritized(tree, nodes[index], key, lift, asked, simple, take, scores, slots, count)
        else:
            count = scan(tree, nodes[first:width], key, lift, scores, slots, count)
            if left and not patient:
                note_spread(tree, nodes[first:width], above[first:width], scores[before:count], spread)
        visit -= count - before
        if not left or (share >= 1 and not patient and hopeless(scores[:count], k, -heap[0], spread, margin, scratch[4:])):
            if level == max(target, 1):
                break
            heap, heap_slots = heap_of(tree, scores, slots, start, count, half)
            left, start, level, width = count - start, count, level - 1, 0
            visit, batch = limits[1], limits[1] if patient else FIRST
            spread[:] = 0
        first = width
        left, width = opened(tree, heap, heap_slots, left, width, (view, visit), batch, nodes, above)
        batch *= 2
    return (0 if target == EVERY_LEVEL else start), count


@compiled
def note_spread(tree, nodes, above, scores, spread):  # type: ignore[no-untyped-def]
    """Adds up how much the scores of points differ from those of the points above them."""
    at = 0
    for index in range(nodes.size):
        for _ in range(tree.nodes[nodes[index], SIZE]):
            difference = scores[at] - above[index]
            spread[1] += difference
            spread[2] += difference * difference
            at += 1
    spread[0] += at


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

    `limits`: field of view, points to visit a level, simple indices, margin. `scratch`: see `_Scratch`. `found`: scores
    and slots [n, k], best first, then for each key how many there are and how many products were computed.
    """
    out_scores, out_slots, counts, touched = found
    scores, slots = scratch[:2]
    k = out_slots.shape[1]
    chosen = scratch[7]
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
            select(own, size, scratch[4], scratch[5], scratch[6], best)
        for at in range(size):
            out_scores[index, at], out_slots[index, at] = own[best[at]], own_slots[best[at]]
        best_first(out_scores[index, :size], out_slots[index, :size])
