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
    help="Cache sizes: 16M,64M, percentages of the trace's distinct blocks: 2%,10%, or auto: ten sizes from 2 to 100 %.",
)
@click.option("--bw", metavar="RATE,…", help="Storage bandwidths: 100,500 (MB/s), 1GB/s [default: 100,200,500,1000].")
@click.option(
    "--setup",
    metavar="TIME",
    default="0",
    help="Time for each missed block in addition to its transfer: 80us for single random reads; the paper uses 50us.",
)
@click.option("--t", metavar="TIME", help="Also report stalls: slices of this length that miss more than storage delivers.")
@click.option("--mrc", is_flag=True, help="Also compute the hits of LRU at every cache size.")
@base.json_option("llmcache.simulate/1")
@click.option("--report", type=types.FILE, help="Also write an HTML page with plots of the results.")
@base.force_option()
@click.option("--jobs", type=types.Range(min=1), help="Number of threads [default: one for each core].")
@click.option("--scheduler", metavar="ADDRESS", help="Run on a Dask cluster: tcp://host:8786 (extra [cluster]).")
def command(
    traces: tuple[str, ...],
    as_json: bool,
    report: str | None,
    force: bool,
    jobs: int | None,
    scheduler: str | None,
    **options: Any,
) -> None:
    """Simulate caches of several sizes and policies on recorded traces.

    Hits and bytes are counted exactly, block by block. Latency and stalls are modelled: missed blocks are transferred at
    the storage bandwidth, as in sequential reads (--setup adds a time for each block), and all blocks read are then
    transferred to the GPU at 20 GB/s.

    \b
    Examples:
      llmcache simulate notes.parquet --policy lru,lecar,llmcache
      llmcache simulate a.parquet b.csv --cache 64M,1G --bw 100,1000 --t 0.1
      llmcache simulate run.parquet --policy lru --mrc --json > run.json

    --t divides the recorded time into slices of T. It reports how many slices miss more than storage delivers in T
    (formula 1: BW x T), and how long they wait in total.

    The policy belady uses future accesses: it keeps the whole trace in memory and rejects traces with lost events.

    --scheduler sends each trace to the workers.
    """
    from llmcache.cache.plan import plan_of
    from llmcache.cache.policies.base import report_compiling
    from llmcache.model.modelfile import ModelHeaders
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
    with progress() as shown, report_compiling(shown.compiling):
        if scheduler is not None:
            from llmcache.cache.cluster import simulate_on

            done = simulate_on(scheduler, traces, plan, progress=shown, models=models)
        else:
            from llmcache.cache.simulate import simulate_all

            done = simulate_all(traces, plan, jobs=jobs, progress=shown, models=models)
    tables.show(done, as_json)
    if report is not None:
        write_report(report, done, force)
