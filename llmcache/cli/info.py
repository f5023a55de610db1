"""`llmcache info FILE`."""

from __future__ import annotations

import click


@click.command("info", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("file")
@click.option("--json", "as_json", is_flag=True, help="Everything as JSON, in base units.")
def command(file: str, as_json: bool) -> None:
    """Show what the trace in FILE (.parquet, .csv, .strace, .oracleGeneral) holds and where it comes from."""
    from llmcache.trace import info

    info.show(file, as_json=as_json)
