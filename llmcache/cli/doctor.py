"""`llmcache doctor [DIR]`."""

from __future__ import annotations

import click

from llmcache.cli import base, types


@base.command("doctor")
@click.argument("directory", metavar="[DIR]", required=False, type=types.DIRECTORY)
@click.option(
    "--pid",
    type=int,
    metavar="PID",
    help="Check a running engine instead: its model files, and whether it has copied the weights.",
)
@base.json_option("llmcache.doctor/1")
def command(directory: str | None, pid: int | None, as_json: bool) -> int:
    """Check what this machine supports, and suggest fixes; with DIR, measure its storage.

    \b
    Examples:
      llmcache doctor
      sudo llmcache doctor ~/models
      sudo llmcache doctor --pid 4711
      llmcache doctor --json | jq '.findings[] | select(.status != "ok")'

    \b
    ok       works without limits
    limited  works with limits; the remedy says how to lift them
    failed   must be fixed before a mount is possible
    skipped  not checked, because no DIR was given

    Exit code 3 if a check has failed, 2 if DIR is not a directory.
    """
    from llmcache.doctor import examine, show

    diagnosis = examine(directory, pid)
    show(diagnosis, as_json)
    return diagnosis.exit_code
