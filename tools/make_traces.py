#!/usr/bin/env python3
"""Writes the generated traces of traces/ and their table in traces/README.md.

    tools/make_traces.py                       # all of traces/
    tools/make_traces.py OUT --seed 7          # the same shapes with another seed, uncut
    tools/make_traces.py OUT ai_notes claude   # some of them

The same arguments give the same rows. The traces in the tree use a seed for each shape, and large ones are cut.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

# Python searches the directory of a script for modules, not the repository above it.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llmcache.errors import UsageError, run_cli
from llmcache.papers.traces import GROUPS, SHAPES
from llmcache.trace.record import BlockSpace, Trace
from llmcache.units import BLOCK_BYTES, format_duration, format_size

TRACES = Path(__file__).resolve().parent.parent / "traces"
# Random rows do not compress, so these traces are cut to keep the repository small.
SAMPLE_ROWS = {"noisy": 40_000, "random": 40_000}
_BEGIN, _END = "<!-- table: written by tools/make_traces.py -->\n", "<!-- end of table -->\n"


def sample(name: str) -> Trace:
    whole = SHAPES[name]()
    rows = SAMPLE_ROWS.get(name, len(whole))
    if rows >= len(whole):
        return whole
    cut = whole.slice(0, rows)
    extra = {**whole.provenance.extra, "cut": f"the first {rows} of {len(whole)} rows"}
    return Trace(cut.columns, cut.files, dataclasses.replace(whole.provenance, extra=extra))


def make_traces(out: Path, names: Sequence[str], seed: int | None) -> list[Trace]:
    out.mkdir(parents=True, exist_ok=True)
    made = [sample(name) if seed is None else SHAPES[name](seed) for name in names]
    for name, trace in zip(names, made, strict=True):
        trace.save(out / f"{name}.parquet", force=True)
    return made


def table(traces: Sequence[Trace]) -> str:
    groups = {name: group for group, names in GROUPS.items() for name in names}
    lines = ["| trace | group | rows | accesses (blocks) | writes | distinct | lasts |", "|---|---|---|---|---|---|---|"]
    for name, trace in zip(SHAPES, traces, strict=True):
        distinct = format_size(BlockSpace.of([trace]).footprint * BLOCK_BYTES)
        writes = 100 * int(trace.count[trace.op == 1].sum()) / trace.accesses
        lasts = format_duration(int(trace.t_ns[-1]) - int(trace.t_ns[0]))
        cells = (f"`{name}`", groups[name], len(trace), trace.accesses, f"{writes:.0f} %", distinct, lasts)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def with_table(readme: str, traces: Sequence[Trace]) -> str:
    before, begin, rest = readme.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise UsageError(
            "traces/README.md has no marks for the table", f"restore the lines {_BEGIN.strip()} and {_END.strip()}"
        )
    return before + begin + table(traces) + end + after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=TRACES, metavar="OUT", help="directory (default: traces/)")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"shapes (default: all): {', '.join(SHAPES)}")
    parser.add_argument("--seed", type=int, help="one seed for all shapes, without cuts")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(SHAPES):
        raise UsageError(f"NAME: there is no shape {min(unknown)!r}", f"one of: {', '.join(SHAPES)}")
    names = arguments.names or list(SHAPES)
    made = make_traces(arguments.out, names, arguments.seed)
    if arguments.out == TRACES and not arguments.names and arguments.seed is None:
        readme = TRACES / "README.md"
        readme.write_text(with_table(readme.read_text(), made))
    print(*(arguments.out / f"{name}.parquet" for name in names), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
