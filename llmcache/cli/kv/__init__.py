"""`llmcache kv`: the commands for keys and values in tiers; a table, each command imported when it is called."""

from __future__ import annotations

import click

from llmcache.cli.base import HELP_OPTIONS, LazyGroup, orderly_end

# name: (module:attribute, the line `llmcache kv --help` shows)
COMMANDS: dict[str, tuple[str, str]] = {
    "bench": ("llmcache.cli.kv.bench:command", "How long a decode step takes by policy: measured, or modelled."),
    "plot": ("llmcache.cli.kv.plot:command", "Draw what bench has saved: timelines, latency against beta."),
    "profile": ("llmcache.cli.kv.profile:command", "Measure this machine for planning: scoring, storage, memory."),
    "plan": ("llmcache.cli.kv.plan:command", "What of a model and its KV cache fits where, and how fast it is."),
    "list": ("llmcache.cli.kv.list:command", "What prompts are stored in a directory, of which models."),
    "show": ("llmcache.cli.kv.show:command", "What is stored of one model, and what its blocks depend on."),
    "prune": ("llmcache.cli.kv.prune:command", "Remove stored prompts: by age, by size, of a model."),
}

EPILOG = """\b
Examples:
  llmcache kv plan --model llama.json --context 128k --gpu 12G --ssd /tmp
  llmcache kv bench --context 32k --json > run.json
  llmcache kv plot run.json -o steps.png
  llmcache kv list /mnt/nvme/kv"""


@click.command(
    "kv",
    cls=LazyGroup,
    table=COMMANDS,
    epilog=EPILOG,
    invoke_without_command=True,
    context_settings=HELP_OPTIONS,
)
@click.pass_context
def command(context: click.Context) -> None:
    """Keys and values that do not fit in memory, or outlive it: in tiers, chosen by importance; prompts on disk.

    'llmcache kv COMMAND --help' tells more of each command, with examples.
    """
    context.with_resource(orderly_end())
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
