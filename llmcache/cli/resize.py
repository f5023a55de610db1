"""`llmcache resize MOUNT SIZE`."""

from __future__ import annotations

import click


@click.command("resize", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("mount")
@click.argument("size")
@click.option("--json", "as_json", is_flag=True, help="What came of it as JSON, in bytes.")
def command(mount: str, size: str, as_json: bool) -> None:
    """Give the mount on MOUNT a budget of SIZE while it serves.

    \b
    llmcache resize /mnt/models 12G

    Returns when what is kept has shrunk to it; a larger budget fills as files are read. Exit code 3 if it does not fit.
    """
    from llmcache.fs import operating
    from llmcache.units import parse_size

    operating.resize(mount, parse_size(size), as_json=as_json)
