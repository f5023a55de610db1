"""`llmcache info FILE`."""

from __future__ import annotations

import click

from llmcache.cli import base, types


@base.command("info")
@click.argument("file", type=types.FILE)
@base.json_option("llmcache.info/1")
def command(file: str, as_json: bool) -> None:
    """Show what the trace in FILE (.parquet, .csv, .strace, .oracleGeneral) holds and where it comes from.

    \b
    Examples:
      llmcache info run.parquet
      llmcache info run.parquet --json | jq .provenance
    """
    from llmcache.trace import info

    info.show(file, as_json=as_json)
