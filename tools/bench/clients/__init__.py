"""Clients of the benchmarks: scripts that run in their own process and print one line of JSON per event.

Events: load; step (a token or a pass), with `start` (seconds since the client began), `seconds` and fields of the client;
end, with the client's private memory (`anon_bytes`) and the number of `wrong` MiB.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

StepFields = dict[str, int]


def say(**fields: object) -> None:
    """Print one event at once; the reader of the output samples the storage counters when it arrives."""
    print(json.dumps(fields), flush=True)


def anon_bytes() -> int:
    """Return the private memory and page tables of this process; pages shared with forks count proportionally."""
    rows = (
        line.split() for name in ("status", "smaps_rollup") for line in Path("/proc/self", name).read_text().splitlines()
    )
    table = {row[0]: row[1] for row in rows if len(row) > 1}
    return 1024 * (int(table["Pss_Anon:"]) + int(table["VmPTE:"]))


def steps(
    begin: float,
    count: int,
    step: Callable[[int], Callable[[], StepFields]],
    seconds: float = float("inf"),
    pause: float = 0.0,
    anon: Callable[[], int] = anon_bytes,
) -> None:
    """Run and report `count` steps, or as many as begin within `seconds` of `begin`, with a pause between them.

    `step(index)` is timed; it returns a function that is called afterwards and returns more fields of the event. `anon`
    returns the client's private memory.
    """
    wrong = 0
    say(event="load", seconds=time.perf_counter() - begin)
    for index in range(count):
        start = time.perf_counter()
        finish = step(index)
        took = time.perf_counter() - start
        fields = finish()
        wrong += fields.get("wrong", 0)
        say(event="step", index=index, start=start - begin, seconds=took, **fields)
        if time.perf_counter() - begin > seconds:
            break
        if pause:
            time.sleep(pause)
    say(event="end", anon_bytes=anon(), wrong=wrong)
