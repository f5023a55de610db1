"""The `llmcache` command: a table of commands, each imported only when it is called.

A command is a click command without logic of its own, in a file of its own or of its group. `run` gives every entry point
the same errors and exit codes.
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
from llmcache.errors import EXIT_OK, EnvironmentProblem, UsageError, drop_output, run_cli

# name: (module:attribute, the line `llmcache --help` shows); help must not import the commands, so it is kept here.
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("llmcache.cli.run_engine:command", "Run an engine, or attach to one, with its model files steered."),
    "mount": ("llmcache.cli.mount:command", "Mount a model directory with a cache budget (also: llmcachefs)."),
    "umount": ("llmcache.cli.operation:umount_command", "Unmount, giving back all memory; --force cleans a dead mount."),
    "stats": ("llmcache.cli.operation:stats_command", "Show what a mount keeps, hits and reads; or list the mounts."),
    "top": ("llmcache.cli.operation:top_command", "Watch a mount live: memory, loops, rates, waits, layers."),
    "tokens": ("llmcache.cli.tokens:command", "Print the time of each token and its causes, for any engine."),
    "resize": ("llmcache.cli.operation:resize_command", "Give a mount another budget while it serves."),
    "warmup": ("llmcache.cli.operation:warmup_command", "Bring in what a mount would keep, before it is read."),
    "evict": ("llmcache.cli.operation:evict_command", "Give up what a mount keeps of files."),
    "size": ("llmcache.cli.size:command", "How large a cache a model needs, or what a cache can do."),
    "config": ("llmcache.cli.mount:config_command", "Show a mount's settings and where each comes from."),
    "doctor": ("llmcache.cli.doctor:command", "What this machine offers and lacks, with remedies."),
    "info": ("llmcache.cli.traces:info_command", "Show what a trace holds and where it comes from."),
    "convert": ("llmcache.cli.traces:convert_command", "Convert a trace: Parquet, CSV, oracleGeneral, strace logs."),
    "trace": ("llmcache.cli.trace:command", "Record which file blocks a process accesses."),
    "classify": ("llmcache.cli.traces:classify_command", "What of a trace is read once, in loops, or hot, by file."),
    "plot": ("llmcache.cli.traces:plot_command", "Draw which blocks a trace accesses when: PNG, SVG or HTML."),
    "simulate": ("llmcache.cli.simulate:command", "What caches of several sizes and policies hit on traces."),
    "kv": ("llmcache.cli.kv:command", "Keys and values beyond memory: benchmark, plans, profiles."),
    "serve-llama": ("llmcache.cli.serve_llama:command", "Serve models with llama-cpp-python; prompts are kept on disk."),
    "edram": ("llmcache.cli.edram:command", "KV caching on a modelled eDRAM accelerator: energy, refresh."),
    "reproduce": ("llmcache.cli.reproduce:command", "Recompute a paper's figures and claims, beside ours."),
    "help": ("llmcache.cli.help:command", "Show the help of a command, or this."),
    "completion": ("llmcache.cli.completion:command", "Print what makes bash, zsh or fish complete command lines."),
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
    """Run models and contexts larger than memory without the page cache falling off a cliff."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def run(command: click.Command, prog_name: str, args: Sequence[str] | None = None) -> NoReturn:
    """Run `command` on `args` (default: the command line) and leave the process with the documented exit code."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by who started us: the next file to be opened would get its number
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - as long as the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() != "utf-8":
            stream.reconfigure(errors="replace")  # of a terminal that has no such letter
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="surrogateescape")  # names of files may be any bytes
    sys.exit(run_cli(lambda: _invoke(command, prog_name, args)))


def _invoke(command: click.Command, prog_name: str, args: Sequence[str] | None) -> int:
    """Exit code of `command`, with click's own exceptions turned into ours.

    Not `command.main`, which makes exit code 1 of a reader that has gone away (`llmcache stats … | head`).
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
        if isinstance(ending.__context__, BrokenPipeError):  # how rich ends, when it has made sure that nothing follows
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
        raise EnvironmentProblem(f"cannot write the output: {error.strerror}", hint) from error
    return result if isinstance(result, int) else EXIT_OK


def _is_stdout_gone() -> bool:
    """Whether nobody reads our output any more."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def main() -> NoReturn:
    """Entry point of `llmcache`."""
    run(app, "llmcache")
