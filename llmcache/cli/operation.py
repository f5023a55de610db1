"""The commands for a running mount: what it keeps, its budget, its end."""

from __future__ import annotations

import json

import click

from llmcache.cli import base, types


@base.command("umount")
@click.argument("mount", required=False, type=types.MOUNT)
@base.force_option("Also a busy mount (its users get errors), and a dead one.")
@click.option("--config", type=types.FILE, metavar="FILE.toml", help="Take MOUNT from the settings in FILE.toml.")
@base.json_option("llmcache.umount/1")
def umount_command(mount: str | None, force: bool, config: str | None, as_json: bool) -> None:
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


@base.command("stats")
@click.argument("mount", required=False, type=types.MOUNT)
@click.argument("interval", required=False, type=types.TIME)
@click.argument("count", required=False, type=click.IntRange(min=1))
@base.json_option("llmcache.stats/1", "; one line for each sample; of a list llmcache.mounts/1")
@click.option("--openmetrics", is_flag=True, help="Print OpenMetrics text 1.0, once, with the names of looping files.")
def stats_command(mount: str | None, interval: float | None, count: int | None, as_json: bool, openmetrics: bool) -> None:
    """Show what the mount on MOUNT keeps and reads; every INTERVAL (e.g. 1s), COUNT times or until Ctrl-C.

    Without MOUNT it lists your mounts (root: all), also dead ones.

    \b
    Examples:
      llmcache stats
      llmcache stats /mnt/models
      llmcache stats /mnt/models 1s 10
      llmcache stats /mnt/models --openmetrics | grep byte_hit_ratio

    For a scraper, a mount can serve the same over HTTP itself: llmcachefs … --metrics 127.0.0.1:9464
    """
    from llmcache.fs.client import operation

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
@base.json_option("llmcache.top/1", "; one line for each sample")
def top_command(mount: str, interval: float, count: int | None, once: bool, as_json: bool) -> None:
    """Watch the mount on MOUNT live: who has the memory, loops and their readers, rates, waits, heat of each layer.

    \b
    Examples:
      llmcache top /mnt/models
      llmcache top /mnt/models 5s
      llmcache top /mnt/models --once
      llmcache top /mnt/models 10s 6 --json | jq .interval.hit_ratio

    A new look every INTERVAL [default: 1s], COUNT of them or until q or Ctrl-C. Where stdout is no terminal, one view (or
    COUNT) is printed as text.
    """
    from llmcache.fs.client import top

    with base.orderly_end():
        top.show(mount, pause_s=interval, count=count, once=once, as_json=as_json)


@base.command("resize")
@click.argument("mount", type=types.MOUNT)
@click.argument("size", type=types.SIZE)
@base.json_option("llmcache.resize/1")
def resize_command(mount: str, size: int, as_json: bool) -> None:
    """Give the mount on MOUNT a budget of SIZE while it serves.

    \b
    Examples:
      llmcache resize /mnt/models 12G

    Returns when what is kept has shrunk to it; a larger budget fills as files are read. Exit code 3 if it does not fit.
    """
    from llmcache.fs.client import operation

    operation.resize(mount, size, as_json=as_json)


@base.command("warmup")
@click.argument("mount", type=types.MOUNT)
@click.argument("globs", metavar="[GLOB…]", nargs=-1)
@click.option("--check", is_flag=True, help="Bring nothing in: say how much is there, exit code 4 if some is not.")
@base.json_option("llmcache.warmup/1")
def warmup_command(mount: str, globs: tuple[str, ...], check: bool, as_json: bool) -> None:
    """Bring in what the mount on MOUNT would keep of its files, before they are read.

    \b
    Examples:
      llmcache warmup /mnt/models
      llmcache warmup /mnt/models 'llama-70b*.gguf'
      llmcache warmup /mnt/models --check

    GLOBs are matched with paths below MOUNT, names of files and names of models (llama3.2:3b). Without one: models and
    small files; files of no known format only if a GLOB names them. What would stream through the budget is not read.
    What was brought in is kept until it has been used, or others need the room. Sizes are by the mount's own count.

    Exit code 4 if something that should be kept is not there.
    """
    from llmcache.fs.client import operation

    operation.warmup(mount, globs, check=check, as_json=as_json)


@base.command("evict")
@click.argument("mount", type=types.MOUNT)
@click.argument("globs", metavar="[GLOB…]", nargs=-1)
@base.json_option("llmcache.evict/1")
def evict_command(mount: str, globs: tuple[str, ...], as_json: bool) -> None:
    """Give up what the mount on MOUNT keeps of files, and what it learned about them: all, or those that match a GLOB.

    \b
    Examples:
      llmcache evict /mnt/models
      llmcache evict /mnt/models 'llama-8b*' '*.json'
      llmcache evict ~/.ollama/models 'llama3.2:*'

    Shards of one model go together. Files of --pin stay. Programs that read on bring their files back.
    """
    from llmcache.fs.client import operation

    operation.evict(mount, globs, as_json=as_json)
