"""H2O-like: heavy hitters, by the attention of each token, summed over all queries.

The attention matrix of a prompt is never stored: four rows at a time are computed and added up. These are compiled loops,
because matrix products took 25 times as long with busy CPUs (4096 queries of 32 heads, measured): the threads of a BLAS
wait for each other. The loops call only `single_of` outside this file.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import njit

from llmcache.arrays import Floats
from llmcache.kv.kernels import top
from llmcache.kv.kernels.scores import single_of
from llmcache.kv.kernels.threads import Job, processors, run_all
from llmcache.kv.pipeline import widened
from llmcache.kv.policies.base import KvPolicy, TokenTable
from llmcache.kv.tiers import Selection

ROWS = 4
"""Rows computed at a time, so that a key is loaded once for all of them."""
_LOG2_E = np.float32(1.4426950408889634)
# 2^x on [0, 1), fitted at Chebyshev nodes: relative error 1.7e-7.
_C1, _C2, _C3, _C4, _C5 = (np.float32(c) for c in (0.69315135, 0.24016416, 0.05580045, 0.00901669, 0.00186718))


class H2O(KvPolicy):
    """H2O-like: heavy hitters, the tokens with the largest attention summed over all queries.

        prefilled: sums[token] += attention of every query of the prompt
        select:    the tokens of the middle with the largest sums
        attended:  sums[token] += attention of this step's queries, if the token was attended to

    The host evaluates 4 bytes per token and key head, reads no keys, and fetches the chosen rows.

    Source: Zhang et al., H2O, NeurIPS 2023, section 4 and algorithm 1; hillinfer.txt, section 4.2, baseline (2). Differs
    from H2O: a token that is not chosen is not lost, only its sum no longer changes; and recent tokens are the store's
    window, not half of the budget.

    `sums`: the attention of each token, rows [tokens, kv_heads] float32.
    """

    name = "h2o"
    title = "H2O-like"
    needs_weights = True

    def begin(self) -> None:
        """See `KvPolicy.begin`."""
        self.sums = TokenTable(self.store.shape.layers, self.store.batch, (self.kv_heads,), np.float32)
        self.remembered.append(self.sums)

    def prefilled(self, layer: int, queries: Floats, start: int) -> None:
        """Add the attention of a prompt."""
        everything = widened(self.store.gather(layer, self.store.everything).keys)
        for sequence, (of_sequence, keys) in enumerate(zip(queries, everything, strict=True)):
            rows = self.sums.rows(layer, sequence, keys.shape[1])
            rows += column_sums(of_sequence, keys, start, int(self.first[sequence]), self.scale).T

    def choose(self, layer: int, queries: Floats, tokens: int) -> Selection:
        """Return the heavy hitters, regardless of the queries; padding has no attention."""
        inside = self.inside
        sums = [self.sums.rows(layer, sequence, inside.stop)[inside.start :].T for sequence in range(len(queries))]
        return Selection(top(np.stack(sums), tokens) + inside.start)

    def attended(self, layer: int, selection: Selection, weights: Floats | None = None) -> None:
        """Add the attention of a step, summed over the query heads of a key head (GQA)."""
        assert weights is not None, "it needs_weights"
        positions = self.store.attended_positions(layer, selection)
        by_head = weights.reshape(*positions.shape[:2], -1, positions.shape[2]).sum(axis=2)
        for sequence, added in enumerate(by_head):
            rows = self.sums.rows(layer, sequence, self.store.layer_length(layer))
            for head, (own, by_token) in enumerate(zip(positions[sequence], added, strict=True)):
                rows[own, head] += by_token


def column_sums(queries: Floats, keys: Floats, start: int, first: int, scale: float) -> Floats:
    """Return the column sums [kv_heads, tokens], float32, of causal softmax(queries keys^T scale).

    `queries` [heads, rows, dim] float32 have the positions from `start` on; `keys` [kv_heads, tokens, dim] float32 those
    from 0 to the last query's. Sums are over the query heads of a key head (GQA). Tokens before `first` are padding and are
    ignored.

    Source: Zhang et al., H2O, NeurIPS 2023, section 4.1 (accumulated attention); kelle.txt, section 4.1.
    """
    kv_heads, tokens, _ = keys.shape
    group = len(queries) // kv_heads
    scaled = np.ascontiguousarray(queries) * np.float32(scale)
    keys = np.ascontiguousarray(keys)
    begin = max(start, first)
    # Later rows are longer, so each thread gets some of them, to balance the load.
    parts = max(1, min(-(-2 * processors() // len(queries)), (tokens - begin) // (16 * ROWS)))
    sums = np.zeros((parts, len(queries), tokens), np.float32)
    jobs: list[Job] = []
    for head, rows in enumerate(scaled):
        for part in range(parts):
            place = (begin - first, part, parts)
            of_head = keys[head // group, first:]
            jobs.append(partial(_add_rows, rows[begin - start :], of_head, *place, sums[part, head, first:]))
    run_all(jobs)
    found: Floats = sums.sum(axis=0).reshape(kv_heads, group, tokens).sum(axis=1)
    return found


@njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"}, error_model="numpy")
def _add_rows(queries, keys, begin, part, parts, sums):  # type: ignore[no-untyped-def]
    """Add the softmax of every `parts`-th block of four rows of `queries`, from `part` on; row 0 is at position `begin`."""
    logits = np.empty((ROWS, len(keys)), np.float32)
    dim = keys.shape[1]
    for above in range(part * ROWS, len(queries), parts * ROWS):
        count = min(ROWS, len(queries) - above)
        last = above + count - 1  # repeated and ignored if there are fewer than four rows
        one, two, three, four = queries[above], queries[min(above + 1, last)], queries[min(above + 2, last)], queries[last]
        for key in range(begin + above + count):
            a = b = c = d = np.float32(0)
            for j in range(dim):
                number = keys[key, j]
                a += one[j] * number
                b += two[j] * number
                c += three[j] * number
                d += four[j] * number
            logits[0, key], logits[1, key], logits[2, key], logits[3, key] = a, b, c, d
        for row in range(count):
            _add_softmax(logits[row, : begin + above + row + 1], sums)


@njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
def _add_softmax(logits, sums):  # type: ignore[no-untyped-def]
    """Add the softmax of `logits` to `sums`; overwrites `logits`."""
    most = logits[0]
    for i in range(logits.size):
        most = max(most, logits[i])
    total = np.float32(0)
    for i in range(logits.size):
        # 2^x, x <= 0: the integer part becomes the exponent, the rest is a polynomial.
        x = max((logits[i] - most) * _LOG2_E, np.float32(-126))
        whole = np.floor(x)
        rest = x - whole
        power = np.float32(1) + rest * (_C1 + rest * (_C2 + rest * (_C3 + rest * (_C4 + rest * _C5))))
        power *= single_of(np.uint32(np.uint32(np.int32(whole) + np.int32(127)) << np.uint32(23)))
        logits[i] = power
        total += power
    share = np.float32(1) / total
    for i in range(logits.size):
        sums[i] += logits[i] * share
