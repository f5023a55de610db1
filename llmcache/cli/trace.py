"""`llmcache trace PID`, `llmcache trace NAME`, `llmcache trace -- CMD…`."""

from __future__ import annotations

from typing import Any

import click

from llmcache.cli import base, types


@base.command("trace", cls=base.CommandAfterDashes)
@click.argument("words", metavar="[PID | NAME | -- CMD…]", nargs=-1, type=types.FILE)
@base.output_option("Write the trace to this .parquet file [default: PROGRAM-PID.parquet].")
@click.option(
    "-d", "--duration", "seconds", type=types.TIME, help="Stop after this time: 90s, 5m [default: when the process ends]."
)
@click.option("--follow/--no-follow", default=True, help="Also record the processes that it starts.")
@click.option("--path", "glob", metavar="GLOB", help="Record only matching files: '*.gguf', '/models/*' [default: all].")
@click.option("--writes/--no-writes", default=True, help="Also record writes.")
@click.option("--block", is_flag=True, help="Also write block device requests and their latency to FILE.block.parquet.")
@click.option(
    "--mmap-rerefs", "rerefs_s", type=types.TIME, help="Also sample accesses to mapped pages, at this interval (x86-64)."
)
@click.option(
    "--tier",
    type=types.NameType("auto", "filemap", "fexit", "syscalls", "faults", several=False),
    default="auto",
    help="Data source: auto, filemap, fexit, syscalls or faults.",
)
@click.option("--coalesce/--no-coalesce", default=True, help="Join consecutive accesses to adjacent blocks.")
@click.option("--report", type=types.FILE, help="Also write an HTML page with a plot and the classes.")
@base.force_option()
@base.json_option("llmcache.capture/1")
def command(
    words: tuple[str, ...], output: str | None, report: str | None, force: bool, as_json: bool, **options: Any
) -> None:
    """Record which file blocks a process accesses: the process PID, the process NAME, or a command after --.

    \b
    Examples:
      sudo llmcache trace 4711 -o run.parquet -d 60
      sudo llmcache trace -o run.parquet -- llama-cli -m model.gguf -p "Hello"
      sudo llmcache trace llama-server --path '*.gguf' --report run.html
      llmcache classify run.parquet

    Ctrl-C ends the recording and completes the trace; the exit code is then 0. At the end, llmcache sends SIGTERM to a
    command that it started; other processes continue. If the recorder is killed, FILE.recording remains: info, classify and
    convert read it.

    Tiers, best first: filemap, fexit and syscalls use BPF; they need root and libbpf. faults records page faults, and
    reads if strace is installed; it needs no root for your own processes. By default, llmcache uses the best tier that
    works and prints its limits.
    """
    from llmcache.mount.client.mountpoint import locked_bytes
    from llmcache.trace.processes import target_of

    if report is not None:
        from llmcache.report.output import check_target

        check_target("--report", report, force)
    target = target_of(words)  # before numpy is imported: a process with threads must not fork
    from llmcache.trace import capture

    if output is None:
        output = capture.default_output(target)
    settings = capture.CaptureSettings(output, force=force, **options)
    captured = capture.record(target, settings, locked_bytes)
    captured.show(as_json)
    if report is not None and captured.rows:
        from llmcache.model.modelfile import ModelHeaders
        from llmcache.report.output import progress
        from llmcache.report.plot import plot

        with progress() as tell:
            plot(settings.output, report, lambda table: ModelHeaders((), table), tell, files=settings.glob, force=force)
