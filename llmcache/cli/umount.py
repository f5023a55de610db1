"""`llmcache umount MOUNT`."""

from __future__ import annotations

import json

import click

from llmcache.cli import base, types


@base.command("umount")
@click.argument("mount", required=False, type=types.MOUNT)
@base.force_option("Also a busy mount (its users get errors), and a dead one.")
@click.option("--config", type=types.FILE, metavar="FILE.toml", help="Take MOUNT from the settings in FILE.toml.")
@base.json_option("llmcache.umount/1")
def command(mount: str | None, force: bool, config: str | None, as_json: bool) -> None:
    """End the mount on MOUNT: unpin, unmount, wait for its daemon.

    \b
    Examples:
      llmcache umount /mnt/models
      llmcache umount --force /mnt/models
      llmcache umount --config /etc/llmcache/models.toml

    A mount that programs use is not ended without --force: the error names them.
    """
    from llmcache.fs.client.operation import end_mount
    from llmcache.fs.client.settings import mount_point

    ended = end_mount(mount_point(mount, config), force=force)
    if as_json:
        print(json.dumps(ended.document()))
