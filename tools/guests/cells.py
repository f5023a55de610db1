"""The comparison of tools/vm: `python3 -m tools.guests.cells` in a guest prints the bytes from storage per pass as JSON.

Bytes from storage do not depend on the speed of the machine, so an emulated processor measures them as well. The sides are
those of `tools/bench mount` (page cache, mode inplace, mode steer), each in a memory cgroup with the same limit, with MGLRU
on and off. Dense loops are read through a mapping; MoE models by a generated routing, as in cases (f) and (g) there.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmcache.mount.readahead import SMALL_READ_AHEAD_KB
from tools.bench import routing
from tools.bench.experiment import Experiment, Rig
from tools.bench.mount import passes
from tools.bench.patterns import Reader, Stage, routed_passes
from tools.bench.runner import MIB, client, loop_file
from tools.bench.sides import Mounted, Plain
from tools.make_model import BYTES_PER_VALUE, MoeShape, choose_shape, make_model

MGLRU = Path("/sys/kernel/mm/lru_gen/enabled")
LOOP_BYTES = 1000 * MIB  # a tenth of it is more than the 64 MiB by which the page cache may exceed the budget
LOOP_SHARES = (0.6, 0.9)
LOOP_STEPS = (7, 4)  # passes, and warm-up passes among them
MOE_BYTES, EXPERTS, USED, SLICE_BYTES = 1_000_000_000, 64, 4, 500_000
MOE_SHARES = (0.12, 0.3, 0.5)
MOE_STEPS = (60, 35)


def dense(directory: Path, scale: float) -> Iterator[Experiment]:
    """Yield the loops."""
    size = int(LOOP_BYTES * scale) // MIB * MIB
    file = loop_file(directory / "loop.bin", size)
    steps, warmup = LOOP_STEPS
    for share in LOOP_SHARES:
        name = f"dense loop, {share:.0%} in memory"
        yield Experiment("f", name, file, size, int(share * size), passes("mmap", steps), steps, warmup)
    file.unlink()


def mixtures(directory: Path, scale: float) -> Iterator[Experiment]:
    """Yield the MoE cells."""
    shape = choose_shape(int(MOE_BYTES * scale), BYTES_PER_VALUE["gguf"], None, False, MoeShape(EXPERTS, USED, SLICE_BYTES))
    (file,) = make_model(directory / "moe.gguf", shape, "gguf", 1, 0)
    size, layout = file.stat().st_size, routing.layout_of(file)
    steps, warmup = MOE_STEPS
    routings, _ = routing.ranked(steps, shape.layers, EXPERTS, USED)
    stage = directory / "moe.json"
    stage.write_text(json.dumps(Stage((Reader(routed_passes(layout, routings.tolist())),)).to_json()))
    for share in MOE_SHARES:
        yield Experiment(
            "g",
            f"MoE, {share:.0%} in memory",
            file,
            size,
            int(share * size),
            lambda _side, path: client("zoo_reader", stage, path),
            steps,
            warmup,
            read_ahead_kb=routing.read_ahead_kb(layout),
            mean_reads=True,
        )
    file.unlink()


def measure(kinds: list[str], scale: float, say: Any) -> Iterator[dict[str, Any]]:
    """Yield a result for each cell and setting of MGLRU: bytes from storage per pass of each side, and problems."""
    with tempfile.TemporaryDirectory(dir="/data") as name:
        directory, scratch = Path(name) / "source", Path(name) / "mounts"
        directory.mkdir()
        for kind in kinds:
            for experiment in {"dense": dense, "moe": mixtures}[kind](directory, scale):
                ahead = experiment.read_ahead_kb
                # The documentation advises the small read-ahead for MoE models; the page cache gets it too.
                plain = (Plain(), Plain(f"kernel-{ahead}", ahead)) if ahead != SMALL_READ_AHEAD_KB else (Plain(),)
                more = ("--read-ahead", f"{ahead}Ki") if kind == "moe" else ()
                sides = (
                    *plain,
                    Mounted(options=("--mode", "inplace", *more), name="inplace"),
                    Mounted(options=("--mode", "steer"), name="steer"),
                )
                for enabled in (True, False) if MGLRU.exists() else (None,):
                    if enabled is not None:
                        MGLRU.write_text("y" if enabled else "n")
                    say(f"{experiment.name}, MGLRU {enabled}")
                    outcome = Rig(scratch, sides, 1, say).measure(experiment)
                    yield {
                        "cell": experiment.name,
                        "mglru": enabled,
                        "size_bytes": experiment.loop_bytes,
                        "cache_bytes": experiment.cache_bytes,
                        "cap_bytes": outcome.cap_bytes,
                        "steps": experiment.steps - experiment.warmup,
                        "storage_bytes": {run.side: run.storage_bytes_per_step(experiment) for run in outcome.runs},
                        "problems": {side: found for side in outcome.sides if (found := outcome.problems(side))},
                    }


def main() -> None:
    """Print a line of JSON for each cell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", choices=("dense", "moe"))
    parser.add_argument("--scale", type=float, default=1.0, help="size of the files, relative to the default")
    args = parser.parse_args()
    for result in measure(args.kinds or ["dense", "moe"], args.scale, lambda text: print(text, file=sys.stderr, flush=True)):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
