"""`llmcache kv profile`."""

from __future__ import annotations

import click


@click.command("profile", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("directory", metavar="DIR")
@click.option("--json", "as_json", is_flag=True, help="The profile as JSON, in bytes and seconds.")
@click.option("--force", is_flag=True, help="Measure again, also if there is a profile of this machine and device.")
def command(directory: str, as_json: bool, force: bool) -> None:
    """Measure this machine for planning: scoring, storage below DIR, an emulated device, memory.

    It takes about 10 seconds and 140 MB in DIR (twice that must be free), which are removed at the end. What was measured
    is kept in the user's cache directory, per processor, kernel and device of DIR, and shown with its age from then on.

    \b
    llmcache kv profile /var/tmp
    llmcache kv profile ~/spill --json | jq '.storage'
    """
    from llmcache.kv.planning.machine import profile_of
    from llmcache.report import kv_profile
    from llmcache.report.progress import tell

    kv_profile.show(profile_of(directory, force=force, progress=tell), as_json)
