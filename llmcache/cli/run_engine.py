"""`llmcache run -- COMMAND…` and `llmcache run --pid PID`."""

from __future__ import annotations

import click

from llmcache.cli import base, types
from llmcache.errors import EXIT_INTERRUPTED, UsageError


@base.command(
    "run",
    interrupted=EXIT_INTERRUPTED,
    context_settings={**base.HELP_OPTIONS, "ignore_unknown_options": False, "allow_interspersed_args": False},
)
@click.argument("words", metavar="-- COMMAND…", nargs=-1, type=click.UNPROCESSED)
@click.option("--pid", type=int, metavar="PID", help="Attach to a running process until it ends, or until Ctrl-C.")
@click.option(
    "--cache",
    type=types.SIZE,
    metavar="SIZE",
    help="Budget: memory for cached files, e.g. 6G [default: what the machine can spare].",
)
@click.option(
    "--memory", type=types.SIZE, metavar="SIZE", help="Run in a memory cgroup of this size; needs root [default: no limit]."
)
@click.option("--user", metavar="NAME", help="Run the command as this user [default: the user that called sudo].")
@click.option(
    "--dir",
    "directories",
    multiple=True,
    type=types.DIRECTORY,
    help="Look for model files in DIR [default: in the arguments of the command].",
)
@click.option(
    "--files",
    "globs",
    multiple=True,
    metavar="GLOB",
    help="Steer only model files with this path or name; wildcards are allowed [default: all].",
)
@click.option(
    "--env/--no-env",
    default=True,
    help="Set variables that stop the engine from copying weights if the copy does not fit in memory.",
)
@base.json_option("llmcache.run/1", " as the summary, on stderr")
def command(
    words: tuple[str, ...],
    pid: int | None,
    cache: int | None,
    memory: int | None,
    user: str | None,
    directories: tuple[str, ...],
    globs: tuple[str, ...],
    env: bool,
    as_json: bool,
) -> int:
    """Run an engine and steer the page cache for its model files; no mount is needed.

    \b
    Examples:
      sudo llmcache run -- llama-server -m ~/models/llama-8b-q8_0.gguf
      sudo llmcache run --memory 12G -- llama-cli -m model.gguf -p "Hello"
      sudo llmcache run --pid 4711
      llmcache run -- llama-server -m model.gguf

    As root, model files are steered in place, including files that the command opens later. Without root, they are served
    over FUSE in a private mount namespace; then the arguments of the command, --dir or --files must name them.
    """
    from llmcache.run import session

    if (pid is None) == (not words):
        raise UsageError("run: give either a command after -- or --pid", "llmcache run -- llama-server -m model.gguf")
    settings = session.RunSettings(cache, memory, user, directories, globs, env, as_json)
    if pid is not None:
        if memory is not None or user is not None:
            raise UsageError("run: --memory and --user apply to a command, not to --pid", "omit them")
        return session.attach(pid, settings)
    return session.run(words, settings)
