"""`llmcache kv profile`."""

from __future__ import annotations

import click

from llmcache.cli import base, kinds


@base.command("profile")
@click.argument("directory", metavar="DIR", type=kinds.DIRECTORY)
@base.json_option("llmcache.kv-profile/1")
@base.force_option("Measure again, also if there is a profile of this machine and device.")
def command(directory: str, as_json: bool, force: bool) -> None:
    """Measure this machine for planning: scoring, storage below DIR, an emulated device, memory.

    It takes about 10 seconds and 140 MB in DIR (twice that must be free), which are removed at the end. What was measured
    is kept in the user's cache directory, per processor, kernel and device of DIR, and shown with its age from then on.

    \b
    Examples:
      llmcache kv profile /var/tmp
      llmcache kv profile ~/spill --json | jq '.storage'
    """
    from llmcache.kv.planning.machine import profile_of
    from llmcache.report import kv_profile
    from llmcache.report.output import tell

    kv_profile.show(profile_of(directory, force=force, progress=tell), as_json)
