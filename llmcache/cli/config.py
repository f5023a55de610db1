"""`llmcache config --show`."""

from __future__ import annotations

from typing import Any

import click

from llmcache.cli import base
from llmcache.cli.mount import settings_of_a_mount


@base.command("config")
@click.option("--show", is_flag=True, required=True, help="Show every setting of a mount and where it comes from.")
@base.json_option("llmcache.config/1")
@settings_of_a_mount
def command(show: bool, as_json: bool, config: str | None, **flags: Any) -> None:
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
