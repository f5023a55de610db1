"""The commands for a running mount: umount, stats, top, resize, warmup, evict."""

from __future__ import annotations

import json

import click

from llmcache.cli import base, types


@base.command("umount")
@click.argument("mount", required=False, type=types.MOUNT)
@base.force_option("Also end a mount that programs use, and clean up a dead one.")
@click.option("--config", type=types.FILE, metavar="FILE.toml", help="Take MOUNT from the settings in this file.")
@base.json_option("llmcache.umount/1")
def umount_command(mount: str | None, force: bool, config: str | None, as_json: bool) -> None:
    """End the mount on MOUNT, free its memory, and wait until its daemon has ended.

    \b
    Examples:
      llmcache umount /mnt/models
      llmcache umount --force /mnt/models
      llmcache umount --config /etc/llmcache/models.toml

    Without --force, a mount that programs use is not ended; the error names the programs.
    """
    from llmcache.mount.client.operation import end_mount
    from llmcache.mount.client.settings import mount_point

    ended = end_mount(mount_point(mount, config), force=force)
    if as_json:
        print(json.dumps(ended.document()))


@base.command("stats")
@click.argument("mount", required=False, type=types.MOUNT)
@click.argument("interval", required=False, type=types.TIME)
@click.argument("count", required=False, type=click.IntRange(min=1))
@base.json_option("llmcache.stats/1", ", one line for each sample; the list of mounts has schema llmcache.mounts/1")
@click.option(
    "--openmetrics", is_flag=True, help="Print OpenMetrics text 1.0 once, with the names of files that have loops."
)
def stats_command(mount: str | None, interval: float | None, count: int | None, as_json: bool, openmetrics: bool) -> None:
    """Show what the mount on MOUNT caches and reads; without MOUNT, list your mounts (root: all), also dead ones.

    With INTERVAL (e.g. 1s), print a line every INTERVAL, COUNT times or until Ctrl-C.

    \b
    Examples:
      llmcache stats
      llmcache stats /mnt/models
      llmcache stats /mnt/models 1s 10
      llmcache stats /mnt/models --openmetrics | grep byte_hit_ratio

    A mount can also serve the metrics over HTTP: llmcachefs … --metrics 127.0.0.1:9464
    """
    from llmcache.mount.client import operation

    if openmetrics:
        if interval is not None or as_json:
            raise click.UsageError("--openmetrics cannot be combined with INTERVAL or --json")
        if mount is None:
            raise click.UsageError("--openmetrics needs MOUNT: 'llmcache stats' lists the mounts")
        operation.show_openmetrics(mount)
        return
    if mount is None:
        operation.show_mounts(as_json)
        return
    operation.show_stats(mount, pause_s=interval, count=count, as_json=as_json)


@base.command("top")
@click.argument("mount", type=types.MOUNT)
@click.argument("interval", type=types.TIME, default="1s")
@click.argument("count", required=False, type=click.IntRange(min=1))
@click.option("--once", is_flag=True, help="Print one view as text, with the rates of one INTERVAL.")
@base.json_option("llmcache.top/1", ", one line for each sample")
def top_command(mount: str, interval: float, count: int | None, once: bool, as_json: bool) -> None:
    """Watch the mount on MOUNT live: memory, loops and their readers, rates, waits, and the cached part of each layer.

    \b
    Examples:
      llmcache top /mnt/models
      llmcache top /mnt/models 5s
      llmcache top /mnt/models --once
      llmcache top /mnt/models 10s 6 --json | jq .interval.hit_ratio

    The view changes every INTERVAL [default: 1s], COUNT times or until q or Ctrl-C. If stdout is not a terminal, one view
    (or COUNT) is printed as text.
    """
    from llmcache.mount.client import top

    with base.orderly_end():
        top.show(mount, pause_s=interval, count=count, once=once, as_json=as_json)


@base.command("resize")
@click.argument("mount", type=types.MOUNT)
@click.argument("size", type=types.SIZE)
@base.json_option("llmcache.resize/1")
def resize_command(mount: str, size: int, as_json: bool) -> None:
    """Change the budget of the mount on MOUNT to SIZE while it serves.

    \b
    Examples:
      llmcache resize /mnt/models 12G

    The command returns when the cache has shrunk to SIZE, or after 30 seconds. A larger budget fills as files are read.
    Exit code 3 if the machine cannot spare SIZE.
    """
    from llmcache.mount.client import operation

    operation.resize(mount, size, as_json=as_json)


@base.command("warmup")
@click.argument("mount", type=types.MOUNT)
@click.argument("globs", metavar="[GLOB…]", nargs=-1)
@click.option("--check", is_flag=True, help="Read nothing and report only; exit code 4 unless everything is cached.")
@base.json_option("llmcache.warmup/1")
def warmup_command(mount: str, globs: tuple[str, ...], check: bool, as_json: bool) -> None:
    """Read the data that the mount on MOUNT would cache, before programs use it.

    \b
    Examples:
      llmcache warmup /mnt/models
      llmcache warmup /mnt/models 'llama-70b*.gguf'
      llmcache warmup /mnt/models --check

    GLOBs match paths below MOUNT, file names and names of models (llama3.2:3b). Without GLOB, models and small files are
    read; larger files of an unknown format only if a GLOB matches them. Data beyond the budget is not read. Warmed data
    stays cached until programs have used it, or other files need the room.

    Exit code 4 if data that should be cached is not.
    """
    from llmcache.mount.client import operation

    operation.warmup(mount, globs, check=check, as_json=as_json)


@base.command("evict")
@click.argument("mount", type=types.MOUNT)
@click.argument("globs", metavar="[GLOB…]", nargs=-1)
@base.json_option("llmcache.evict/1")
def evict_command(mount: str, globs: tuple[str, ...], as_json: bool) -> None:
    """Evict files from the cache of the mount on MOUNT: all, or those that match a GLOB.

    \b
    Examples:
      llmcache evict /mnt/models
      llmcache evict /mnt/models 'llama-8b*' '*.json'
      llmcache evict ~/.ollama/models 'llama3.2:*'

    Shards of one model are evicted together. Files of --pin stay. If programs still use a file, it is cached again. The
    mount also forgets the loops that it has observed.
    """
    from llmcache.mount.client import operation

    operation.evict(mount, globs, as_json=as_json)
