"""`llmcachefs SOURCE MOUNT`, also `llmcache mount`; and `llmcache config`, which shows its settings."""

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
    click.option(
        "--cache",
        metavar="SIZE",
        help="Budget: memory for cached files, e.g. 6G or 800Mi [default: what the machine can spare].",
    ),
    click.option(
        "--mode",
        type=click.Choice(["auto", "inplace", "steer", "arena"]),
        help="inplace: the page cache of the files themselves (needs root); steer: the page cache of a FUSE mount (needs to "
        "lock memory); arena: memory of the daemon (any user) [default: auto, the first that is possible].",
    ),
    click.option("--rw", is_flag=True, default=None, help="Make all files writable, not only those of --spill."),
    click.option(
        "--spill", multiple=True, metavar="GLOB", help="Over FUSE: make these files writable [default: *.kv; '' for none]."
    ),
    click.option(
        "--pin",
        multiple=True,
        metavar="GLOB",
        help="Cache these files before all others, and read them as soon as the mount serves.",
    ),
    click.option(
        "--read-ahead",
        metavar="SIZE",
        help="In place: set read_ahead_kb of the disk; 32Ki suits MoE models [default: unchanged].",
    ),
    click.option(
        "--access-log",
        type=types.FILE,
        metavar="FILE.parquet",
        help="Record all references to extents in a new trace.",
    ),
    click.option(
        "--metrics",
        metavar="127.0.0.1:PORT",
        help="Serve OpenMetrics at http://127.0.0.1:PORT/metrics; port 0 takes a free one.",
    ),
    click.option(
        "--metrics-files",
        is_flag=True,
        default=None,
        help="Include file names in the metrics; all local users can read them.",
    ),
    click.option(
        "--log",
        type=types.FILE,
        metavar="journal|FILE",
        help="Log to systemd's journal, or to FILE, which SIGHUP rotates [default: a file in /run/llmcache].",
    ),
    click.option(
        "--config",
        type=types.FILE,
        metavar="FILE.toml",
        help="Read settings from the table [mount] of a file; options and LLMCACHE_* take precedence.",
    ),
    click.option("-o", "options", multiple=True, metavar="OPT,…", help="Set mount options: ro, noallow_other, cache=6G, …"),
)


def settings_of_a_mount(command: Command) -> Command:
    """Add the arguments and options for the settings of a mount to a command."""
    for decorate in reversed(_SETTINGS):
        command = decorate(command)
    return command


@base.command("mount")
@click.option("-f", "--foreground", is_flag=True, help="Stay in the foreground and log to stderr; Ctrl-C unmounts.")
@click.option("--unless-served", is_flag=True, hidden=True)  # for mount.llmcachefs, because `mount -a` runs it again
@click.option("--while", "lifetime_pids", type=int, multiple=True, hidden=True)  # llmcache run: until all these have ended
@settings_of_a_mount
@base.json_option("llmcache.mount/1", " when the mount serves")
def command(
    foreground: bool, unless_served: bool, lifetime_pids: tuple[int, ...], config: str | None, as_json: bool, **flags: Any
) -> None:
    """Mount the model directory SOURCE on MOUNT with a cache budget.

    The first example is the best way to start: in place, as root, with SOURCE as MOUNT. It needs no other directory, and
    running programs benefit without a restart. Over FUSE, programs must open the files again, in MOUNT.

    \b
    Examples:
      sudo llmcachefs ~/models ~/models
      llmcachefs ~/models /mnt/models --cache 6G
      llmcachefs --config /etc/llmcache/models.toml
      llmcachefs ~/models ~/models --mode arena --json | jq .budget_bytes

    The command returns when the mount serves; `llmcache umount MOUNT` ends the mount. Settings can also come from --config
    or from variables (LLMCACHE_SOURCE, LLMCACHE_CACHE, …); `llmcache config --show` prints the result.
    """
    from llmcache.mount.client import mount
    from llmcache.mount.client.settings import resolve

    request = replace(mount.request_of(resolve(flags, config)), lifetime_pids=lifetime_pids)
    mount.mount(request, foreground=foreground, as_json=as_json, unless_served=unless_served)


@base.command("config")
@click.option("--show", is_flag=True, required=True, help="Print every setting and its origin.")
@base.json_option("llmcache.config/1")
@settings_of_a_mount
def config_command(show: bool, as_json: bool, config: str | None, **flags: Any) -> None:
    """Show the settings that `llmcache mount` would use with the same arguments, and where each comes from.

    \b
    Examples:
      llmcache config --show
      llmcache config --show --config /etc/llmcache/models.toml --cache 8G

    \b
    Origins, in order of precedence:
      flag         an argument, an option, or -o KEY=VALUE
      environment  LLMCACHE_CACHE=6G; lists with colons: LLMCACHE_PIN=a:b
      file         --config FILE or LLMCACHE_CONFIG: cache = "6G" below [mount]
      default

    Exit code 2 if a file has an unknown key, 5 if it is not TOML.
    """
    from llmcache.mount.client import settings

    settings.show(settings.resolve(flags, config), as_json)


def main() -> NoReturn:
    """Entry point of `llmcachefs`."""
    from llmcache.cli import run

    run(command, "llmcachefs")
