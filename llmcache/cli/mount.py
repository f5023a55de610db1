"""`llmcachefs SOURCE MOUNT`, also `llmcache mount`; and the settings that it shares with `llmcache config`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

_SETTINGS = (
    click.argument("source", required=False),
    click.argument("mount", required=False),
    click.option("--cache", metavar="SIZE", help="Memory it may hold, e.g. 6G or 800Mi [default: fitting]."),
    click.option(
        "--mode",
        type=click.Choice(["auto", "steer", "arena"]),
        help="steer keeps data in the kernel's page cache (needs locked memory), arena in its own memory [default: auto].",
    ),
    click.option("--rw", is_flag=True, default=None, help="Let everything be written, not only spill files."),
    click.option("--spill", multiple=True, metavar="GLOB", help="Files that may be written [default: *.kv; '' for none]."),
    click.option("--pin", multiple=True, metavar="GLOB", help="Files to keep before all others, brought in at once."),
    click.option("--access-log", metavar="FILE.parquet", help="Record every reference to an extent: a trace to replay."),
    click.option("--log", metavar="journal|FILE", help="Where the log goes; SIGHUP rotates a FILE."),
    click.option("--config", metavar="FILE.toml", help="Settings in the table [mount]; flags and LLMCACHE_* come first."),
    click.option("-o", "options", multiple=True, metavar="OPT,…", help="Mount options: ro, allow_other, cache=6G, …"),
)


def settings_of_a_mount(command: Command) -> Command:
    """Gives a command the arguments and options that settings of a mount can come from."""
    for decorate in reversed(_SETTINGS):
        command = decorate(command)
    return command


@click.command("mount", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-f", "--foreground", is_flag=True, help="Stay in the foreground, log on stderr; Ctrl-C unmounts.")
@settings_of_a_mount
def command(foreground: bool, config: str | None, **flags: Any) -> None:
    """Mount the model directory SOURCE on MOUNT (they may be the same) with a cache budget.

    \b
    llmcachefs ~/models /mnt/models --cache 6G
    llmcachefs --config /etc/llmcache/models.toml

    Returns once the mount serves. Ends with `llmcache umount MOUNT`. Every setting may also stand in --config FILE or in
    LLMCACHE_SOURCE, LLMCACHE_CACHE, …; `llmcache config --show` tells which is taken.
    """
    from llmcache.fs import mounting
    from llmcache.fs.settings import resolve

    mounting.mount(mounting.request_of(resolve(flags, config)), foreground=foreground)


def main() -> NoReturn:
    """Entry point of `llmcachefs`."""
    from llmcache.cli import run

    run(command, "llmcachefs")
