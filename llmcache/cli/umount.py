"""`llmcache umount MOUNT`."""

from __future__ import annotations

import click


@click.command("umount", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("mount", required=False)
@click.option("--force", is_flag=True, help="Also a busy mount (its users get errors), and a dead one.")
@click.option("--config", metavar="FILE.toml", help="Take MOUNT from the settings in FILE.")
def command(mount: str | None, force: bool, config: str | None) -> None:
    """End the mount on MOUNT: unpin, unmount, wait for its daemon."""
    from llmcache.fs.ending import end_mount
    from llmcache.fs.settings import mount_point

    end_mount(mount_point(mount, config), force=force)
