"""`llmcachefs SOURCE MOUNT`, also `llmcache mount`; and `llmcache config`, which shows the same settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import click

from llmcache.cli import base, types

Command = TypeVar("Command", bound=Callable[..., Any])

_SETTINGS = (
    click.argument("source", required=False, type=types.DIRECTORY),
    click.argument("mount", required=False, type=types.DIRECTORY),
    click.option("--cache", metavar="SIZE", help="Memory it may hold, e.g. 6G or 800Mi [default: fitting]."),
    click.option(
        "--mode",
        type=click.Choice(["auto", "inplace", "steer", "arena"]),
        help="inplace steers the files' own page cache (root), steer that of the mount (locked memory), arena has its own "
        "memory [default: auto].",
    ),
    click.option("--rw", is_flag=True, default=None, help="Let everything be written, not only spill files."),
    click.option("--spill", multiple=True, metavar="GLOB", help="Files that may be written [default: *.kv; '' for none]."),
    click.option("--pin", multiple=True, metavar="GLOB", help="Files to keep before all others, brought in at once."),
    click.option("--read-ahead", metavar="SIZE", help="In place, read_ahead_kb of SOURCE's storage: 32Ki for mixtures."),
    click.option(
        "--access-log",
        type=types.FILE,
        metavar="FILE.parquet",
        help="Record every reference to an extent: a trace to replay.",
    ),
    click.option("--metrics", metavar="127.0.0.1:PORT", help="Serve /metrics (OpenMetrics) there; port 0 for any."),
    click.option("--metrics-files", is_flag=True, default=None, help="Name files in them: any local user can read that."),
    click.option("--log", type=types.FILE, metavar="journal|FILE", help="Where the log goes; SIGHUP rotates a FILE."),
    click.option(
        "--config",
        type=types.FILE,
        metavar="FILE.toml",
        help="Settings in the table [mount]; flags and LLMCACHE_* come first.",
    ),
    click.option("-o", "options", multiple=True, metavar="OPT,…", help="Mount options: ro, noallow_other, cache=6G, …"),
)


def settings_of_a_mount(command: Command) -> Command:
    """Gives a command the arguments and options that settings of a mount can come from."""
    for decorate in reversed(_SETTINGS):
        command = decorate(command)
    return command


@base.command("mount")
@click.option("-f", "--foreground", is_flag=True, help="Stay in the foreground, log on stderr; Ctrl-C unmounts.")
@click.option("--unless-served", is_flag=True, hidden=True)  # for mount.llmcachefs, which `mount -a` runs again
@click.option("--while", "lifetime_pids", type=int, multiple=True, hidden=True)  # llmcache run: until all these have ended
@settings_of_a_mount
@base.json_option("llmcache.mount/1", ", once it serves")
def command(
    foreground: bool, unless_served: bool, lifetime_pids: tuple[int, ...], config: str | None, as_json: bool, **flags: Any
) -> None:
    """Mount the model directory SOURCE on MOUNT with a cache budget.

    The best first command is the first example: in place, as root, with SOURCE as MOUNT. It needs no other directory, and
    programs that run already gain from it without a restart. Over FUSE they have to open the files again, in MOUNT.

    \b
    Examples:
      sudo llmcachefs ~/models ~/models
      llmcachefs ~/models /mnt/models --cache 6G
      llmcachefs --config /etc/llmcache/models.toml
      llmcachefs ~/models ~/models --mode arena --json | jq .budget_bytes

    Returns once the mount serves. Ends with `llmcache umount MOUNT`. Every setting may also stand in --config FILE or in
    LLMCACHE_SOURCE, LLMCACHE_CACHE, …; `llmcache config --show` tells which is taken.
    """
    from llmcache.fs.client import mount
    from llmcache.fs.client.settings import resolve

    request = replace(mount.request_of(resolve(flags, config)), lifetime_pids=lifetime_pids)
    mount.mount(request, foreground=foreground, as_json=as_json, unless_served=unless_served)


@base.command("config")
@click.option("--show", is_flag=True, required=True, help="Show every setting of a mount and where it comes from.")
@base.json_option("llmcache.config/1")
@settings_of_a_mount
def config_command(show: bool, as_json: bool, config: str | None, **flags: Any) -> None:
    """Show the settings that `llmcache mount` would take with the same arguments, and the origin of each.

    \b
    Examples:
      llmcache config --show
      llmcache config --show --config /etc/llmcache/models.toml --cache 8G

    \b
    Origins, first come first:
      flag         an argument, an option, or -o KEY=VALUE
      environment  LLMCACHE_CACHE=6G; lists with colons: LLMCACHE_PIN=a:b
      file         --config FILE, LLMCACHE_CONFIG: cache = "6G" below [mount]
      default

    A key of a file that is not known is an error that names it (exit code 2); a file that is no TOML: 5.
    """
    from llmcache.fs.client import settings

    settings.show(settings.resolve(flags, config), as_json)


def main() -> NoReturn:
    """Entry point of `llmcachefs`."""
    from llmcache.cli import run

    run(command, "llmcachefs")
