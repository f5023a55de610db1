"""`llmcachefs SOURCE MOUNT`, also `llmcache mount`."""

from __future__ import annotations

from typing import NoReturn

import click


@click.command("mount", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("source")
@click.argument("mount")
@click.option(
    "--cache",
    "cache",
    metavar="SIZE",
    envvar="LLMCACHE_CACHE",
    help="Memory it may hold, e.g. 6G or 800Mi [default: fitting].",
)
@click.option(
    "--mode",
    type=click.Choice(["auto", "steer", "arena"]),
    default="auto",
    envvar="LLMCACHE_MODE",
    show_default=True,
    help="steer keeps data in the kernel's page cache (needs locked memory), arena in its own memory.",
)
@click.option("-f", "--foreground", is_flag=True, help="Stay in the foreground, log on stderr; Ctrl-C unmounts.")
@click.option("--rw", "writable", is_flag=True, help="Let everything be written, not only spill files.")
@click.option("--spill", multiple=True, metavar="GLOB", help="Files that may be written [default: *.kv; '' for none].")
@click.option("--access-log", metavar="FILE.parquet", help="Record every reference to an extent: a trace to replay.")
@click.option("-o", "options", multiple=True, metavar="OPT,…", help="Mount options: ro, allow_other, …")
def command(
    source: str,
    mount: str,
    cache: str | None,
    mode: str,
    foreground: bool,
    writable: bool,
    spill: tuple[str, ...],
    access_log: str | None,
    options: tuple[str, ...],
) -> None:
    """Mount the model directory SOURCE on MOUNT (they may be the same) with a cache budget.

    Returns once the mount serves. Ends with `llmcache umount MOUNT`.
    """
    from llmcache.fs import mounting
    from llmcache.units import parse_size

    request = mounting.request_of(
        source,
        mount,
        cache_bytes=None if cache is None else parse_size(cache),
        mode=mode,
        writable=writable,
        spill=spill,
        option_values=options,
        access_log=access_log,
    )
    mounting.mount(request, foreground=foreground)


def main() -> NoReturn:
    """Entry point of `llmcachefs`."""
    from llmcache.cli import run

    run(command, "llmcachefs")
