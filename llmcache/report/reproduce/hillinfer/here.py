"""What the runs on this machine say of the claims: speed-ups, parts and ratio of the pools; *measured here*, in small.

The machine has no GPU and its device is emulated: these verdicts are of this project's systems, not of the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmcache.kv.bench.results import Bench, Row
from llmcache.report.claims import Claim, Finding, graded
from llmcache.report.reproduce.hillinfer.figure10 import LEAST, MOST
from llmcache.report.reproduce.hillinfer.readings import BASELINES

HERE = "this machine"
NOISE = 0.05  # by which two medians may differ on a machine that does other things too


@dataclass(frozen=True)
class Runs:
    """A benchmark of all systems."""

    bench: Bench

    def row(self, name: str) -> Row:
        """Returns the row called `name`."""
        return next(row for row in self.bench.rows if row.policy == name)


def speedups(data: Runs, _variant: str) -> Finding:
    """Whether HillInfer's speed-ups over the baselines lie in the paper's range on this machine."""
    ours = data.row("hillinfer")
    found = {name: ours.speedup_over(data.row(name)) for name in BASELINES}
    inside = [LEAST <= value <= MOST for value in found.values()]
    told = ", ".join(f"{data.row(name).title} {value:.2f}x" for name, value in found.items())
    return Finding(graded(all(inside), sum(inside) >= len(inside) / 2), told, found)


def parts(data: Runs, _variant: str) -> Finding:
    """Whether each part of HillInfer makes a step faster here."""
    names = ("prefetch", "hillinfer-no-app", "hillinfer")
    times = [data.row(name).token_ns for name in names]
    faster = [after <= before * (1 - NOISE) for before, after in zip(times[:-1], times[1:], strict=True)]  # noqa: RUF007
    told = ", ".join(f"{data.row(name).title} {time / 1e6:.1f} ms" for name, time in zip(names, times, strict=True))
    return Finding(graded(all(faster), any(faster)), told, dict(zip(names, times, strict=True)))


def link_bytes(data: Runs, _variant: str) -> Finding:
    """Whether near-data evaluation moves far fewer bytes from the SSD to the host than evaluation on the host."""
    moved = {name: _evaluated(data.row(name)) for name in ("prefetch", "hillinfer")}
    ratio = moved["prefetch"] / moved["hillinfer"] if moved["hillinfer"] else float("inf")
    ours = f"{moved['prefetch'] / 1e6:.3g} MB a step against {moved['hillinfer'] / 1e6:.3g} MB: {ratio:.0f} times fewer"
    return Finding(graded(ratio >= 50, ratio >= 10), ours, moved)


def _evaluated(row: Row) -> float:
    """Bytes a step that cross from the SSD to the host for evaluation."""
    return sum(size for link, size in row.moved_bytes.items() if link.startswith("ssd to cpu") and "scor" in link)


def beta(data: Bench, _variant: str) -> Finding:
    """Whether latency is least where rule and memory expect it, within one step of the sweep."""
    rows = sorted(data.rows, key=lambda row: row.beta or 0.0)
    times = [row.token_ns for row in rows]
    best = rows[times.index(min(times))].beta or 0.0
    expected = data.marks.expected if data.marks is not None else 0.0
    place = min(range(len(rows)), key=lambda number: abs((rows[number].beta or 0.0) - expected))
    near = abs(times.index(min(times)) - place) <= 1
    excess = times[place] / min(times) - 1
    told = ", ".join(f"{row.beta or 0:.3g}: {row.token_ns / 1e6:.1f} ms" for row in rows)
    ours = f"least at {best:.3g}, expected at {expected:.3g} ({excess:+.0%} there); {told}"
    return Finding(graded(near, excess <= NOISE), ours, {"best": best, "expected": expected, "excess": excess})


CLAIMS: tuple[Claim[Runs], ...] = (
    Claim(
        "speed-up-here",
        "4.3",
        "achieves a speedup of 4.21 ~ 8.56×",
        "each of the four speed-ups is in the range; partly: two of them",
        speedups,
        (HERE,),
    ),
    Claim(
        "parts-here",
        "4.4",
        "both designs contribute to lowering inference latency",
        "both steps are faster by 5 % or more; partly: one of them",
        parts,
        (HERE,),
    ),
    Claim(
        "link-bytes-here",
        "1",
        "in-storage importance evaluation substantially reduces data transfer",
        "evaluation moves 50 times fewer bytes to the host, or fewer still; partly: 10 times",
        link_bytes,
        (HERE,),
    ),
)
SWEEP_CLAIMS: tuple[Claim[Bench], ...] = (
    Claim(
        "beta-here",
        "4.4",
        "the latency is minimized when β ≈ fc/fs",
        "the least of the sweep is where f_c/f_s, or the memory, expects it, or one step beside; partly: within 5 % of it",
        beta,
        (HERE,),
    ),
)
