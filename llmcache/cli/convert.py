"""`llmcache convert IN OUT`."""

from __future__ import annotations

import json

import click

from llmcache.cli import base, types

EPILOG = """\b
Formats, by the ending of the name:
  .parquet        llmcache's own: every column
  .csv            file,offset,length,op[,time] in bytes and seconds
  .oracleGeneral  libCacheSim's, 24 bytes a record; written by block
  .strace         only read: strace -f -ttt -y -e trace=desc,process -o OUT …

\b
Examples:
  llmcache convert app.strace app.parquet
  llmcache convert app.parquet app.oracleGeneral --force"""


@base.command("convert", epilog=EPILOG)
@click.argument("source", metavar="IN", type=types.FILE)
@click.argument("target", metavar="OUT", type=types.FILE)
@base.force_option()
@base.json_option("llmcache.convert/1")
def command(source: str, target: str, force: bool, as_json: bool) -> None:
    """Convert the trace IN to OUT; the endings of the names tell the formats."""
    from llmcache.trace.formats import convert
    from llmcache.units import format_size

    done = convert(source, target, force)
    if as_json:
        click.echo(json.dumps(done.document()))
    click.echo(f"{done.path}: {done.rows} rows, {format_size(done.size_bytes)}", err=True)
