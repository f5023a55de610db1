"""`llmcache simulate TRACE…`."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from llmcache.cli import base, types


@base.command("simulate")
@click.argument("traces", metavar="TRACE…", nargs=-1, required=True, type=types.FILE)
@click.option(
    "--policy",
    type=types.NameType(table="llmcache.cache.policies:POLICIES"),
    default="lru,llmcache",
    help="Policies to compare.",
)
@click.option(
    "--cache",
    metavar="SIZE,…",
    default="auto",
    help="16M,64M, or shares of the blocks that a trace touches: 2%,10%, or auto: ten of them, 2 to 100 %.",
)
@click.option("--bw", metavar="RATE,…", help="Bandwidths of storage: 100,500 (MB/s), 1GB/s [default: 100,200,500,1000].")
@click.option(
    "--setup",
    metavar="TIME",
    default="0",
    help="What a missed block takes beside its transfer: 80us for random reads one by one; the paper has 50us.",
)
@click.option("--t", metavar="TIME", help="Say where more is missed within T than storage delivers in it: stalls.")
@click.option("--mrc", is_flag=True, help="Add the hits of LRU at every cache size.")
@base.json_option("llmcache.simulate/1")
@click.option("--report", type=types.FILE, help="Write an HTML page with pictures of the rows and curves.")
@base.force_option()
@click.option("--jobs", type=types.Range(min=1), help="Threads [default: one per core].")
@click.option("--scheduler", metavar="ADDRESS", help="Run on a Dask cluster instead: tcp://host:8786 ([cluster] extra).")
def command(
    traces: tuple[str, ...],
    as_json: bool,
    report: str | None,
    force: bool,
    jobs: int | None,
    scheduler: str | None,
    **options: Any,
) -> None:
    """What caches of several sizes and policies hit on recorded traces.

    Hits and bytes are counted exactly, block by block. Latency and stalls are modelled from the misses: they come at the
    bandwidth of storage, as blocks do that are read in sequence, unless --setup gives each a time of its own; what is
    read goes on to the GPU at 20 GB/s.

    \b
    Examples:
      llmcache simulate notes.parquet --policy lru,lecar,llmcache
      llmcache simulate a.parquet b.csv --cache 64M,1G --bw 100,1000 --t 0.1
      llmcache simulate run.parquet --policy lru --mrc --json > run.json

    --t cuts the trace's own time into slices and tells in how many of them more is missed than storage delivers in one
    (formula 1: BW x T), and how long they wait for it in all.

    belady sees the future: it holds the whole trace in memory, and is refused where accesses were lost.

    With --scheduler each trace is sent to the workers.
    """
    from llmcache.cache.plan import plan_of
    from llmcache.cache.policies.base import told_compiling
    from llmcache.fs.layout.modelfile import ModelHeaders
    from llmcache.report import simulate as tables
    from llmcache.report.output import check_target, progress

    if scheduler is not None and jobs is not None:
        raise click.UsageError(
            "--jobs and --scheduler cannot be combined: workers of a cluster set their own number of threads"
        )
    models = partial(ModelHeaders, ())
    plan = plan_of(**options, drawn=report is not None)
    if report is not None:
        from llmcache.report.simulate_page import write_report

        check_target("--report", report, force)
    with progress() as shown, told_compiling(shown.compiling):
        if scheduler is not None:
            from llmcache.cache.cluster import simulate_on

            done = simulate_on(scheduler, traces, plan, progress=shown, models=models)
        else:
            from llmcache.cache.simulate import simulate_all

            done = simulate_all(traces, plan, jobs=jobs, progress=shown, models=models)
    tables.show(done, as_json)
    if report is not None:
        write_report(report, done, force)
