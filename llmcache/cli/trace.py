"""`llmcache trace PID`, `llmcache trace NAME`, `llmcache trace -- CMD…`."""

from __future__ import annotations

from typing import Any

import click

from llmcache.cli import base, types


@base.command("trace", cls=base.CommandAfterDashes)
@click.argument("words", metavar="[PID | NAME | -- CMD…]", nargs=-1, type=types.FILE)
@base.output_option("The trace, .parquet [default: PROGRAM-PID.parquet].")
@click.option(
    "-d", "--duration", "seconds", type=types.TIME, help="How long: 30, 90s, 5m [default: until the process ends]."
)
@click.option("--follow/--no-follow", default=True, help="Record processes that it starts as well.")
@click.option("--path", "glob", metavar="GLOB", help="Only these files: '*.gguf', '/models/*'.")
@click.option("--writes/--no-writes", default=True, help="Record writes as well as reads.")
@click.option("--block", is_flag=True, help="Write requests to block devices, with latency, to FILE.block.parquet.")
@click.option("--mmap-rerefs", "rerefs_s", type=types.TIME, help="Sample mapped pages at this interval (x86-64).")
@click.option(
    "--tier",
    type=types.NameType("auto", "filemap", "fexit", "syscalls", "faults", several=False),
    default="auto",
    help="filemap, fexit, syscalls or faults.",
)
@click.option("--coalesce/--no-coalesce", default=True, help="Join accesses to adjacent blocks.")
@click.option("--report", type=types.FILE, help="Also classify and draw what was recorded, as an HTML page.")
@base.force_option()
@base.json_option("llmcache.capture/1")
def command(
    words: tuple[str, ...], output: str | None, report: str | None, force: bool, as_json: bool, **options: Any
) -> None:
    """Record which file blocks a process accesses: PID, the only one called NAME, or a command after --.

    \b
    Examples:
      sudo llmcache trace 4711 -o run.parquet -d 60
      sudo llmcache trace -o run.parquet -- llama-cli -m model.gguf -p "Hello"
      sudo llmcache trace llama-server --path '*.gguf' --report run.html
      llmcache classify run.parquet

    Ctrl-C ends the recording normally: the file is complete. A command that still runs then, or after -d, is ended
    (SIGTERM); a PID goes on. What a killed recorder leaves, FILE.recording, is read by info, classify and convert.

    Tiers, best first: filemap, fexit, syscalls (BPF: root and libbpf), faults (page faults, and reads where strace is
    installed; no root for your own processes). The best that works is taken; what it cannot see is printed.
    """
    from llmcache.fs.client.mountpoint import locked_bytes
    from llmcache.trace import capture
    from llmcache.trace.processes import target_of

    if report is not None:
        from llmcache.report.output import check_target

        check_target("--report", report, force)
    target = target_of(words)
    if output is None:
        output = capture.default_output(target)
    settings = capture.CaptureSettings(output, force=force, **options)
    captured = capture.record(target, settings, locked_bytes)
    captured.show(as_json)
    if report is not None and captured.rows:
        from llmcache.fs.layout.modelfile import ModelHeaders
        from llmcache.report.output import progress
        from llmcache.report.plot import plot

        with progress() as tell:
            plot(settings.output, report, lambda table: ModelHeaders((), table), tell, files=settings.glob, force=force)
