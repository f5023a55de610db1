"""`llmcache convert IN OUT`."""

from __future__ import annotations

import click

EPILOG = """\b
Formats, by the ending of the name:
  .parquet        llmcache's own: every column, read and written
  .csv            file,offset,length,op[,time] in bytes and seconds; read, written
  .oracleGeneral  libCacheSim's, 24 bytes a record; read, and written by block
  .strace         log of: strace -f -ttt -y -e trace=desc,process -o OUT; read

\b
Examples:
  llmcache convert app.strace app.parquet
  llmcache convert app.parquet app.oracleGeneral --force"""


@click.command("convert", epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("source", metavar="IN")
@click.argument("target", metavar="OUT")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
def command(source: str, target: str, force: bool) -> None:
    """Convert the trace IN to OUT; the endings of the names tell the formats."""
    from llmcache.trace.convert import convert
    from llmcache.units import format_size

    done = convert(source, target, force)
    click.echo(f"{done.path}: {done.rows} rows, {format_size(done.size_bytes)}", err=True)
