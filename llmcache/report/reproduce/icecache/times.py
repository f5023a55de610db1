"""Claims about time and memory: figures 1, 7 and 8 of icecache; *measured here*, on this processor, with random weights."""

from __future__ import annotations

from collections.abc import Sequence

from llmcache.kv.bench.lengths import LengthRow, faster_from, stock_at
from llmcache.kv.bench.task_results import PARTS, QUERY, STOCK
from llmcache.report.claims import Claim, Finding, graded
from llmcache.report.reproduce.icecache.measured import ICE, REUSE

Rows = Sequence[LengthRow]
MEMORY = 0.05  # of the full cache's
SLOW_GROWTH = 0.5


def longest(rows: Rows, policy: str) -> LengthRow:
    """Returns the row of a policy at the longest context."""
    return max((row for row in rows if row.policy == policy), key=lambda row: row.tokens)


def trade_off(rows: Rows, policy: str) -> Finding:
    """Whether at the longest context it needs little of the memory, index included, and no more time than the full cache.

    Differs from the paper: it counts the memory of the GPU, and its index is in the host's; here there is one memory.
    """
    own, full = longest(rows, policy), longest(rows, STOCK)
    pages, whole, times = own.kv_share(full), own.share_with_index(full), own.times(full)
    faster = faster_from(rows, policy)
    told = "at no length measured" if faster is None else f"from {faster:,} tokens on"
    ours = f"{pages:.1%} of the memory ({whole:.1%} with index), {times:.2f} times the time at {own.tokens:,}; faster {told}"
    verdict = graded(whole <= MEMORY and times <= 1, pages <= MEMORY or times <= 1)
    return Finding(verdict, ours, {"kv_share": pages, "share_with_index": whole, "times": times})


def breakdown(rows: Rows, policy: str) -> Finding:
    """Whether choosing and decoding take more of a token's time than loading, at the longest context."""
    parts = longest(rows, policy).speed.parts_ns
    order = sorted(PARTS, key=lambda part: -parts[part])
    ours = ", ".join(f"{part} {parts[part] / 1e6:.1f} ms" for part in order)
    return Finding(
        graded(set(order[:2]) == {"query", "decoding"}, QUERY in order[:2] or order[0] == "decoding"), ours, dict(parts)
    )


def growth(rows: Rows, policy: str) -> Finding:
    """Whether the time of a token grows slower with the context than with the full cache."""
    grown = {}
    for name in (policy, STOCK):
        own = sorted((row for row in rows if row.policy == name), key=lambda row: row.tokens)
        grown[name] = own[-1].speed.tpot_ns - own[0].speed.tpot_ns
    ratio = grown[policy] / grown[STOCK] if grown[STOCK] > 0 else float("inf")
    first, last = min(row.tokens for row in rows), max(row.tokens for row in rows)
    ours = f"{grown[policy] / 1e6:+.1f} ms against {grown[STOCK] / 1e6:+.1f} ms from {first:,} to {last:,} tokens"
    return Finding(graded(ratio <= SLOW_GROWTH, ratio < 1), ours, {"ratio": ratio})


def reuse_faster(rows: Rows, policy: str) -> Finding:
    """Whether taking the choice of an anchor layer makes a token faster, at the longest context."""
    own, plain = longest(rows, policy).speed.tpot_ns, longest(rows, ICE).speed.tpot_ns
    ours = f"{own / 1e6:.1f} ms against {plain / 1e6:.1f} ms"
    return Finding(graded(own < 0.95 * plain, own < plain), ours, {"ratio": own / plain})


def share_of_stock(rows: Rows) -> list[tuple[LengthRow, LengthRow]]:
    """Returns each row with that of transformers' own cache at its length."""
    return [(row, stock_at(rows, row.tokens)) for row in rows]


CLAIMS: tuple[Claim[Rows], ...] = (
    Claim(
        "memory-and-time",
        "1",
        "significantly reducing CUDA memory usage and decoding latency compared to all existing baselines",
        "pages of keys and values in memory, with what trees or an exact scan keep beside, are 5 % of the full cache's, "
        "and a token takes no longer; partly: so without what is kept beside (in the paper it is in the host's memory), "
        "or a token takes no longer",
        trade_off,
        (ICE,),
    ),
    Claim(
        "breakdown",
        "5.3.2",
        "The largest contributors to latency are the DCI-query module (0.05 s) and decoding (0.04 s)",
        "query and decoding take most of a token; partly: query takes more than loading, or decoding most",
        breakdown,
        (ICE,),
    ),
    Claim(
        "slower-growth",
        "5.5",
        "exhibit a substantially slower increase in per-token decoding latency than Full-KV",
        "the time of a token grows by half as much as the full cache's, or less; partly: by less",
        growth,
        (ICE,),
    ),
    Claim(
        "reuse-is-faster",
        "5.3.2",
        "the reuse variant showing how our approach can further optimize latency",
        "a token takes 5 % less time, or less still; partly: less",
        reuse_faster,
        (REUSE,),
    ),
)
