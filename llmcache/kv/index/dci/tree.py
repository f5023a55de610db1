"""The DCI-tree of one key head: its arrays, their growth, and the compiled loops that query and change it.

A point (a key) is in one slot; `page_slots` slots are a page; a chain of pages is a node, which contains the points with
the same parent. A point above the lowest level owns the node below it. Node 0 is the root. Levels count from 1, the
lowest.

A query is algorithm 4. Points are added by algorithm 1, lines 28 to 35, after the caller has found the parents and
reserved room (`with_room`). Many keys at once are laid out by algorithm 2. Differs from the paper: from the top down,
each key can choose among all parents of the next level; the paper adds keys in the order of tokens.

numba's cache depends on the date of this file only, so the loops call only `widened`, `select` and `sort` in other files.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from llmcache.arrays import Floats, Int64s
from llmcache.kv.kernels.scores import widened
from llmcache.kv.kernels.top import select, sort

NONE = -1
ROOT = 0
MAX_LEVELS = 32
LEVELS, PAGES, NODES, FREE_PAGE, FREE_NODE, KEYS, BASE, SLOTS, DIM, LIVE_PAGES = range(10)
COUNT, FOLLOW, HOME = range(3)
HEAD, OWNER, LEVEL, SIZE = range(4)
"""Indexes in `Tree.state`: levels, pages and nodes ever used, heads of the free lists, points, the number of the first
possible token, slots per page, numbers per key, pages in use. Then those of `Tree.pages` and `Tree.nodes`."""

EVERY_LEVEL = 0  # as a target: find points of all levels (the paper's -1)
RECORD = 4  # numbers in the record of a page or node
FIRST = 512  # points to visit before the first check whether the rest is hopeless; doubled for each further check
LINE = 32  # fp16 numbers in a cache line
ALL = np.iinfo(np.int64).max  # as a field of view or as keys to visit: no limit

Ints = NDArray[np.int32]


class Tree(NamedTuple):
    """Arrays by slot, by page, by node, by token, and of the whole tree."""

    rows: NDArray[np.uint16]  # [slots * dim] keys / s, the bits of fp16; s is a power of two, so that no precision is lost
    lifts: Floats  # [slots] the last coordinate of equation 2, times c / s
    tokens: Ints  # [slots] token numbers
    children: Ints  # [slots] the node below the point, or NONE
    projections: Floats  # [slots * directions] products with the random directions of P-DCI
    pages: Ints
    """[pages, 4] COUNT: slots in use, from the first; FOLLOW: the next page of the node (or free list), or NONE; HOME: the
    node. One record per page, so that a query reads it with one cache miss."""
    nodes: Ints
    """[nodes, 4] HEAD: the first page, or NONE (in the free list, the next node); OWNER: the token of the point above, NONE
    for the root and free nodes; LEVEL: that of its points, 0 for free nodes; SIZE: number of points."""
    where: Ints  # [tokens] the slot of token BASE + i, or NONE
    population: Int64s  # [MAX_LEVELS + 1] number of points on each level
    state: Int64s
    directions: Floats  # [simple * composite, dim + 1] random unit vectors


_TYPES: dict[str, Any] = {"rows": np.uint16, "lifts": np.float32, "projections": np.float32}
_TYPES |= dict.fromkeys(("tokens", "children", "pages", "nodes", "where"), np.int32)


def empty_tree(dim: int, page_slots: int, base: int, directions: Floats) -> Tree:
    """Return a tree with an empty root, for tokens from number `base` on."""
    state, population = np.zeros(16, np.int64), np.zeros(MAX_LEVELS + 1, np.int64)
    state[[LEVELS, NODES, FREE_PAGE, FREE_NODE, BASE, SLOTS, DIM]] = 1, 1, NONE, NONE, base, page_slots, dim
    arrays: dict[str, NDArray[Any]]
    arrays = {name: np.zeros((0, 4) if name in ("pages", "nodes") else 0, kind) for name, kind in _TYPES.items()}
    tree = with_room(Tree(**arrays, population=population, state=state, directions=directions), 1, 1, 1)
    tree.nodes[ROOT] = NONE, NONE, 1, 0
    return tree


def sizes_of(tree: Tree, pages: int, nodes: int, tokens: int) -> dict[str, int]:
    slots = pages * int(tree.state[SLOTS])
    sizes = {"rows": slots * int(tree.state[DIM]), "projections": slots * len(tree.directions)}
    return {**sizes, "lifts": slots, "tokens": slots, "children": slots, "pages": pages, "nodes": nodes, "where": tokens}


def with_room(tree: Tree, pages: int, nodes: int, last: int) -> Tree:
    """Return the tree with room for `pages` and `nodes` more and for tokens below `last`; arrays grow by a quarter."""
    has = [len(tree.pages), len(tree.nodes), len(tree.where)]
    needs = [int(tree.state[PAGES]) + pages, int(tree.state[NODES]) + nodes, last - int(tree.state[BASE])]
    if all(needed <= old for needed, old in zip(needs, has, strict=True)):
        return tree
    room = [max(needed, old + old // 4) if needed > old else old for needed, old in zip(needs, has, strict=True)]
    changed: dict[str, NDArray[Any]] = {}
    for name, size in sizes_of(tree, *room).items():
        array: NDArray[Any] = getattr(tree, name)
        if size > len(array):
            changed[name] = np.empty((size, *array.shape[1:]), array.dtype)
            changed[name][: len(array)] = array
            changed[name][len(array) :] = NONE if name in ("tokens", "children", "where") else 0
    return tree._replace(**changed)


def trimmed(tree: Tree) -> Tree:
    used = np.flatnonzero(tree.where >= 0)
    sizes = sizes_of(tree, int(tree.state[PAGES]), int(tree.state[NODES]), int(used[-1]) + 1 if len(used) else 0)
    return tree._replace(**{name: getattr(tree, name)[:size] for name, size in sizes.items()})


OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": {"reassoc", "contract", "nsz"}, "error_model": "numpy"}
"""Options of all compiled functions: release the GIL, allow sums in any order."""


def compiled(function: Any) -> Any:
    """Return `function`, compiled on its first call and cached on disk."""
    return numba.njit(cache=True, **OPTIONS)(function)


def part(function: Any) -> Any:
    """Return `function` for compiled functions only, because a separate compilation takes twice as long."""
    return numba.extending.register_jitable(**OPTIONS)(function)


@intrinsic  # type: ignore[untyped-decorator]
def fetch_ahead(typing_context: Any, array: Any, index: Any) -> Any:
    """Prefetch the cache line of an element of a flat array."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, value=arguments[0]).data
        place = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place.type, number, number, number])
        hint = builder.module.declare_intrinsic("llvm.prefetch", [place.type], kind)
        builder.call(hint, [place, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(array, index), generate


@part
def fetch_page(rows, children, pages, page, slots, dim):  # type: ignore[no-untyped-def]
    fetch_ahead(children, page * slots)
    first = page * slots * dim
    for at in range(first, first + pages[page, COUNT] * dim, LINE):
        fetch_ahead(rows, at)


@part
def product(rows, index, key):  # type: ignore[no-untyped-def]
    at = np.uint64(index * key.size)
    total = np.float32(0)
    for j in range(key.size):
        total += widened(rows[at + np.uint64(j)]) * key[j]
    return total


@part
def four_products(rows, index, key):  # type: ignore[no-untyped-def]
    """Return the products of a key and four rows from `index` on."""
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


@part
def similarity(tree, slot, key, lift):  # type: ignore[no-untyped-def]
    """Return the product of transformed keys (equation 2; a query has lift 0, equation 3), times (c / s)^2."""
    return product(tree.rows, slot, key) + lift * tree.lifts[slot]


@part
def unpacked(rows, index, dim):  # type: ignore[no-untyped-def]
    key = np.empty(dim, np.float32)
    for j in range(dim):
        key[j] = widened(rows[index * dim + j])
    return key


@part
def sink(scores, slots, at, size):  # type: ignore[no-untyped-def]
    """Restore a min-heap after its entry `at` was replaced; of equal scores, the later slot is smaller."""
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


@part
def best_first(scores, slots):  # type: ignore[no-untyped-def]
    """Sort both by descending scores; of equal scores, the earlier slot is first."""
    for at in range(scores.size // 2 - 1, -1, -1):
        sink(scores, slots, at, scores.size)
    for last in range(scores.size - 1, 0, -1):
        scores[0], scores[last] = scores[last], scores[0]
        slots[0], slots[last] = slots[last], slots[0]
        sink(scores, slots, 0, last)


@part
def scan(tree, nodes, key, lift, scores, slots, count):  # type: ignore[no-untyped-def]
    """Append every point of `nodes` with its similarity; return the new count.

    A call costs as much as ten keys, because it updates the reference counts of the tree's arrays.
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
            first, points = page * size, pages[page, COUNT]
            for at in range(0, points - 3, 4):
                a, b, c, d = four_products(rows, first + at, key)
                scores[count + at], scores[count + at + 1], scores[count + at + 2], scores[count + at + 3] = a, b, c, d
            for at in range(points - points % 4, points):
                scores[count + at] = product(rows, first + at, key)
            for at in range(points):
                slots[count + at] = first + at
            if lift:  # 0 for a query, where reading the lifts would be wasted
                for at in range(points):
                    scores[count + at] += lift * tree.lifts[first + at]
            count += points
            page = after
    return count


@part
def bound(tree, slot, projected, simple):  # type: ignore[no-untyped-def]
    """Return P-DCI's lower bound of the distance."""
    at = slot * projected.size
    least = np.float32(np.inf)
    for first in range(0, projected.size, simple):
        largest = np.float32(0)
        for j in range(first, first + simple):
            largest = max(largest, abs(tree.projections[at + j] - projected[j]))
        least = min(least, largest)
    return least


@part
def prioritized(tree, node, key, lift, projected, simple, take, scores, slots, count):  # type: ignore[no-untyped-def]
    """Append the `take` points of a node with the smallest bounds: Prioritized-DCI-Query.

    Differs from the source (Li & Malik, 2017): points are chosen from all bounds of the node, not from sorted lists.
    """
    take = min(take, tree.nodes[node, SIZE])
    bounds, places = scores[count:], slots[count:]
    seen = 0
    page = tree.nodes[node, HEAD]
    while page != NONE:
        first = page * tree.state[SLOTS]
        for slot in range(first, first + tree.pages[page, COUNT]):
            # A heap of the smallest bounds, with the largest of them on top.
            value = -bound(tree, slot, projected, simple)
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


@part
def heap_of(tree, scores, slots, start, count, half):  # type: ignore[no-untyped-def]
    """Copy the points found on a level to index `half` and after it, as a heap of negated scores."""
    records, size = tree.nodes.reshape(-1), count - start
    for at in range(size):
        scores[half + at], slots[half + at] = -scores[start + at], slots[start + at]
        fetch_ahead(records, RECORD * tree.children[slots[start + at]])
    heap, heap_slots = scores[half : half + size], slots[half : half + size]
    for at in range(size // 2 - 1, -1, -1):
        sink(heap, heap_slots, at, size)
    return heap, heap_slots


@part
def opened(tree, heap, heap_slots, left, width, limits, batch, nodes, above):  # type: ignore[no-untyped-def]
    """Open the nodes below the best of `left` points of a heap until these have `batch` points.

    `limits`: nodes, points. Returns how many points are left (0 at a limit), and the new width.
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


@part
def hopeless(scores, k, best, spread, margin, rest):  # type: ignore[no-untyped-def]
    """Return True if points below a point of score `best` are unlikely to be among the `k` best of `scores`.

    `spread`: number, sum and sum of squares of the differences between visited points and their parents.
    """
    if scores.size < max(k, 2 * FIRST):
        return False  # too few points to save time
    chosen = rest[3][:k]
    select(scores, k, rest[0], rest[1], rest[2], chosen)
    least = np.float32(np.inf)
    for at in range(k):
        least = min(least, scores[chosen[at]])
    mean = spread[1] / spread[0]
    return best + mean + margin * np.sqrt(max(spread[2] / spread[0] - mean * mean, 0.0)) < least


@part
def descend(tree, key, lift, target, limits, share, k, scratch):  # type: ignore[no-untyped-def]
    """Collect candidates in `scratch`; return where those of the target level start, and the number of all."""
    scores, slots, nodes, above = scratch[:4]
    view, visit, simple, margin = limits
    half, patient = scores.size // 2, np.isinf(margin)
    projected = np.empty(tree.directions.shape[0] if share < 1 else 0, np.float32)
    for index in range(projected.size):
        projected[index] = projection(tree.directions[index], key, lift)
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
                count = prioritized(tree, nodes[index], key, lift, projected, simple, take, scores, slots, count)
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


@part
def note_spread(tree, nodes, above, scores, spread):  # type: ignore[no-untyped-def]
    """Add to `spread` the differences between the scores of points and of their parents."""
    at = 0
    for index in range(nodes.size):
        for _ in range(tree.nodes[nodes[index], SIZE]):
            difference = scores[at] - above[index]
            spread[1] += difference
            spread[2] += difference * difference
            at += 1
    spread[0] += at


@part
def projection(direction, key, lift):  # type: ignore[no-untyped-def]
    total = lift * direction[key.size]
    for j in range(key.size):
        total += direction[j] * key[j]
    return total


@compiled
def ask(tree, keys, lifts, target, limits, share, scratch, found):  # type: ignore[no-untyped-def]
    """Find for each of `keys` [n, dim] the most similar points of level `target` (or EVERY_LEVEL); algorithm 4.

    `limits`: field of view, points to visit per level, simple indices, margin. `found`: scores and slots [n, k], best first,
    and for each key the number of points and of products.
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


@part
def new_page(tree, node):  # type: ignore[no-untyped-def]
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


@part
def free_page(tree, page):  # type: ignore[no-untyped-def]
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


@part
def new_node(tree, owner, level):  # type: ignore[no-untyped-def]
    node = tree.state[FREE_NODE]
    if node == NONE:
        node = tree.state[NODES]
        tree.state[NODES] += 1
    else:
        tree.state[FREE_NODE] = tree.nodes[node, HEAD]
    tree.nodes[node, HEAD], tree.nodes[node, OWNER], tree.nodes[node, LEVEL], tree.nodes[node, SIZE] = NONE, owner, level, 0
    return node


@part
def free_node(tree, node):  # type: ignore[no-untyped-def]
    tree.nodes[node, OWNER], tree.nodes[node, LEVEL], tree.nodes[node, SIZE] = NONE, 0, 0
    tree.nodes[node, HEAD] = tree.state[FREE_NODE]
    tree.state[FREE_NODE] = node


@part
def place(tree, slot, bits, index, lift, token, child):  # type: ignore[no-untyped-def]
    dim = tree.state[DIM]
    for j in range(dim):
        tree.rows[slot * dim + j] = bits[index * dim + j]
    tree.lifts[slot], tree.tokens[slot], tree.children[slot] = lift, token, child
    tree.where[token - tree.state[BASE]] = slot


@part
def project(tree, slot, key):  # type: ignore[no-untyped-def]
    count = tree.directions.shape[0]
    for index in range(count):
        tree.projections[slot * count + index] = projection(tree.directions[index], key, tree.lifts[slot])


@part
def move(tree, old, new):  # type: ignore[no-untyped-def]
    count = tree.directions.shape[0]
    place(tree, new, tree.rows, old, tree.lifts[old], tree.tokens[old], tree.children[old])
    for index in range(count):
        tree.projections[new * count + index] = tree.projections[old * count + index]


@part
def page_for(tree, node, key, lift):  # type: ignore[no-untyped-def]
    """Return the page of a node for a new key: that of its nearest sibling, split if it is full."""
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


@part
def split(tree, page, key, lift):  # type: ignore[no-untyped-def]
    """Move the half of a full page that is on the side of `key` to a new page, and return that."""
    slots, first = tree.state[SLOTS], page * tree.state[SLOTS]
    towards, order = np.empty(slots, np.float32), np.arange(slots).astype(np.int32)
    for i in range(slots):
        towards[i] = similarity(tree, first + i, key, lift)
    far = np.argmin(towards)
    pivot, pivot_lift = unpacked(tree.rows, first + far, key.size), tree.lifts[first + far]
    for i in range(slots):
        towards[i] -= similarity(tree, first + i, pivot, pivot_lift)
    best_first(towards, order)
    moved = slots // 2
    new = new_page(tree, tree.pages[page, HOME])
    for i in range(moved):
        move(tree, first + order[i], new * slots + i)
    keep = order[moved:]
    sort(keep)
    for i in range(keep.size):
        if keep[i] != i:
            move(tree, first + keep[i], first + i)
    tree.pages[page, COUNT], tree.pages[new, COUNT] = slots - moved, moved
    return new


@compiled
def attach(tree, bits, lifts, tokens, level, nodes):  # type: ignore[no-untyped-def]
    """Add keys at `level`, each to its node; `bits` [n * dim]."""
    dim = tree.state[DIM]
    for index in range(nodes.size):
        child = new_node(tree, tokens[index], level - 1) if level > 1 else NONE
        add(tree, nodes[index], bits, index, dim, lifts[index], tokens[index], child)
    tree.population[level] += nodes.size
    tree.state[KEYS] += nodes.size


@part
def add(tree, node, bits, index, dim, lift, token, child):  # type: ignore[no-untyped-def]
    key = unpacked(bits, index, dim)
    page = page_for(tree, node, key, lift)
    slot = page * tree.state[SLOTS] + tree.pages[page, COUNT]
    place(tree, slot, bits, index, lift, token, child)
    project(tree, slot, key)
    tree.pages[page, COUNT] += 1
    tree.nodes[node, SIZE] += 1


@compiled
def start_level(tree, bits, lift, token):  # type: ignore[no-untyped-def]
    """Add a key as the first of a new level, above the points below the root."""
    level = tree.state[LEVELS] + 1
    child = new_node(tree, token, level - 1)
    take_over(tree, child, ROOT)
    tree.nodes[ROOT, LEVEL] = level
    tree.state[LEVELS] = level
    add(tree, ROOT, bits, 0, tree.state[DIM], lift, token, child)
    tree.population[level] += 1
    tree.state[KEYS] += 1


@part
def take_over(tree, node, other):  # type: ignore[no-untyped-def]
    """Move the pages of `other` to `node`, which has none."""
    tree.nodes[node, HEAD], tree.nodes[node, SIZE] = tree.nodes[other, HEAD], tree.nodes[other, SIZE]
    tree.nodes[other, HEAD], tree.nodes[other, SIZE] = NONE, 0
    page = tree.nodes[node, HEAD]
    while page != NONE:
        tree.pages[page, HOME] = node
        page = tree.pages[page, FOLLOW]


@part
def detach(tree, slot):  # type: ignore[no-untyped-def]
    """Remove a point from its page, and merge a small page with another."""
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


@part
def join(tree, page):  # type: ignore[no-untyped-def]
    """Move the points of a page to another page of its node that has room for all."""
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
    """Remove a token, and its level if that is now empty.

    Returns the removed node below it, whose points need new parents (`rehang`), or NONE.
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


@part
def drop_level(tree, level):  # type: ignore[no-untyped-def]
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
    """Move the points of a removed node, in the order of `slots_of`, to the nodes `parents`."""
    dim = tree.state[DIM]
    slots = slots_of(tree, node)
    lifts, tokens, children = tree.lifts[slots], tree.tokens[slots], tree.children[slots]
    while tree.nodes[node, HEAD] != NONE:
        free_page(tree, tree.nodes[node, HEAD])
    free_node(tree, node)
    for index in range(slots.size):
        add(tree, parents[index], bits, index, dim, lifts[index], tokens[index], children[index])


@compiled
def lay(tree, level, members, ends, nodes, bits, lifts, tokens):  # type: ignore[no-untyped-def]
    """Write the points of a level to adjacent pages, node by node.

    `members` are rows in `bits` [n * dim], `lifts` and `tokens` [n]; those up to `ends` [i] belong to `nodes` [i].
    """
    tree.population[level] = members.size
    tree.state[KEYS] += members.size
    start = 0
    for index in range(nodes.size):
        own = members[start : ends[index]]
        arrange(bits, lifts, own, tree.state[SLOTS], tree.state[DIM])
        fill(tree, nodes[index], level, own, bits, lifts, tokens)
        start = ends[index]


@part
def fill(tree, node, level, members, bits, lifts, tokens):  # type: ignore[no-untyped-def]
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


@part
def arrange(bits, lifts, members, slots, dim):  # type: ignore[no-untyped-def]
    """Order the points of a node by bisection, so that those of a page are similar, in whole pages."""
    ends = np.empty(64, np.int64)  # a stack of the ends of pending parts
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


@part
def halve(bits, lifts, members, dim):  # type: ignore[no-untyped-def]
    """Sort points by which of two distant points they are nearer to."""
    sides = np.zeros(members.size, np.float32)
    pivot = members[0]
    for sign in (0, 1, -1):  # the first pass only finds a distant point
        key, lift = unpacked(bits, pivot, dim), lifts[pivot]
        far, least = pivot, np.float32(np.inf)
        for i in range(members.size):
            score = product(bits, members[i], key) + lift * lifts[members[i]]
            sides[i] += sign * score
            if score < least:
                far, least = members[i], score
        pivot = far
    best_first(sides, members)
