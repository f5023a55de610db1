"""The `llmcache` command: a table of commands, each imported only when it is called.

Commands are click commands without logic, in a file of their own or of their group. `run` gives all entry points the same
errors and exit codes.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from llmcache import __version__
from llmcache.cli.base import HELP_OPTIONS, LazyGroup, completion_variable
from llmcache.errors import EXIT_OK, MissingRequirement, UsageError, drop_output, run_cli

# Name: (module:attribute, line of `llmcache --help`). The lines are here because help must not import the commands.
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("llmcache.cli.run_engine:command", "Run an engine, or attach to one, and steer its model files."),
    "mount": ("llmcache.cli.mount:command", "Mount a model directory with a cache budget (also: llmcachefs)."),
    "umount": ("llmcache.cli.operation:umount_command", "End a mount and free its memory; --force also ends a dead one."),
    "stats": ("llmcache.cli.operation:stats_command", "Show what a mount caches, hits and reads, or list mounts."),
    "top": ("llmcache.cli.operation:top_command", "Watch a mount live: memory, loops, rates, waits, layers."),
    "tokens": ("llmcache.cli.tokens:command", "Print the time of each token and its causes, for any engine."),
    "resize": ("llmcache.cli.operation:resize_command", "Change the budget of a mount while it serves."),
    "warmup": ("llmcache.cli.operation:warmup_command", "Read files into the cache of a mount before they are used."),
    "evict": ("llmcache.cli.operation:evict_command", "Evict cached files from a mount."),
    "size": ("llmcache.cli.size:command", "Compute how large a cache a model needs, or what a cache gains."),
    "config": ("llmcache.cli.mount:config_command", "Show the settings of a mount and where each comes from."),
    "doctor": ("llmcache.cli.doctor:command", "Check what this machine supports and suggest fixes."),
    "info": ("llmcache.cli.traces:info_command", "Show the contents and the origin of a trace."),
    "convert": ("llmcache.cli.traces:convert_command", "Convert a trace: Parquet, CSV, oracleGeneral, strace logs."),
    "trace": ("llmcache.cli.trace:command", "Record which file blocks a process accesses."),
    "classify": ("llmcache.cli.traces:classify_command", "Find what a trace reads once, in loops, or all the time."),
    "plot": ("llmcache.cli.traces:plot_command", "Plot the accesses of a trace over time: PNG, SVG or HTML."),
    "simulate": ("llmcache.cli.simulate:command", "Simulate caches of several sizes and policies on traces."),
    "kv": ("llmcache.cli.kv:command", "Benchmark, plan and list KV caches that exceed memory."),
    "serve-llama": ("llmcache.cli.serve_llama:command", "Serve models with llama-cpp-python and cache prompts on disk."),
    "edram": ("llmcache.cli.edram:command", "Model KV caching on an eDRAM accelerator: energy, refresh."),
    "reproduce": ("llmcache.cli.reproduce:command", "Recompute the figures of a paper and check its claims."),
    "help": ("llmcache.cli.help:command", "Show the help of a command, or this."),
    "completion": ("llmcache.cli.completion:command", "Print a completion script for bash, zsh or fish."),
}

EPILOG = """\b
Examples:
  sudo llmcachefs ~/models ~/models
  llama-cli -m ~/models/llama-8b-q8_0.gguf -p "Hello"
  sudo llmcache stats ~/models 1
  sudo llmcache umount ~/models"""


@click.command(cls=LazyGroup, table=COMMANDS, epilog=EPILOG, invoke_without_command=True, context_settings=HELP_OPTIONS)
@click.version_option(__version__, "-V", "--version", prog_name="llmcache")
@click.pass_context
def app(context: click.Context) -> None:
    """Run models and contexts that are larger than memory, without page-cache thrashing."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def run(command: click.Command, prog_name: str, args: Sequence[str] | None = None) -> NoReturn:
    """Run `command` on `args` (default: the command line) and exit with its documented exit code."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the parent process: the next opened file would get its number
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open until the process ends
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() != "utf-8":
            stream.reconfigure(errors="replace")  # the terminal may lack a character
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="surrogateescape")  # file names may contain any bytes
    sys.exit(run_cli(lambda: _invoke(command, prog_name, args)))


def _invoke(command: click.Command, prog_name: str, args: Sequence[str] | None) -> int:
    """Return the exit code of `command`; exceptions of click become exceptions of llmcache.

    `command.main` is not used, because it returns 1 if the reader of a pipe has ended (`llmcache stats … | head`).
    """
    if completion_variable(prog_name) in os.environ:
        from llmcache.cli.completion import answer

        answer(command, prog_name)
        return EXIT_OK
    try:
        with command.make_context(prog_name, list(sys.argv[1:] if args is None else args)) as context:
            result = command.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as ending:
        return ending.exit_code
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else prog_name
        raise UsageError(error.format_message(), f"'{path} --help' shows the usage") from error
    except click.ClickException as error:
        raise UsageError(error.format_message()) from error
    except click.Abort as error:
        raise KeyboardInterrupt from error
    except SystemExit as ending:
        if isinstance(ending.__context__, BrokenPipeError):  # rich drops the output and then raises SystemExit
            return EXIT_OK
        raise
    except BrokenPipeError:
        if not _is_stdout_gone():
            raise
        drop_output(sys.stdout)
        return EXIT_OK
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        drop_output(sys.stdout)
        hint = "free space on the file systems of the output and of temporary files (TMPDIR)"
        raise MissingRequirement(f"cannot write the output: {error.strerror}", hint) from error
    return result if isinstance(result, int) else EXIT_OK


def _is_stdout_gone() -> bool:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def main() -> NoReturn:
    """Entry point of `llmcache`."""
    run(app, "llmcache")
