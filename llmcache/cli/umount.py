"""`llmcache umount MOUNT`."""

from __future__ import annotations

import click


@click.command("umount", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("mount")
@click.option("--force", is_flag=True, help="Also a busy mount (its users get errors), and a dead one.")
def command(mount: str, force: bool) -> None:
    """End the mount on MOUNT: unpin, unmount, wait for its daemon."""
    from llmcache.fs.ending import end_mount

    end_mount(mount, force=force)
