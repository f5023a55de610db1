"""`llmcache doctor [DIR]`."""

from __future__ import annotations

import click

from llmcache.cli import base, types


@base.command("doctor")
@click.argument("directory", metavar="[DIR]", required=False, type=types.DIRECTORY)
@click.option("--pid", type=int, metavar="PID", help="Examine a running engine instead: has it copied its weights?")
@base.json_option("llmcache.doctor/1")
def command(directory: str | None, pid: int | None, as_json: bool) -> int:
    """Say what this machine offers to llmcache, and what to do about what it lacks; DIR's storage is measured.

    \b
    Examples:
      llmcache doctor
      sudo llmcache doctor ~/models
      sudo llmcache doctor --pid 4711
      llmcache doctor --json | jq '.findings[] | select(.status != "ok")'

    \b
    ok       as good as it gets
    limited  works, with less: the remedy says how to have more
    failed   a mount is not possible before this is cured
    skipped  was not asked for

    Exit code 3 if something that a mount needs has failed, 2 if DIR is no directory.
    """
    from llmcache.doctor import examine, show

    diagnosis = examine(directory, pid)
    show(diagnosis, as_json)
    return diagnosis.exit_code
