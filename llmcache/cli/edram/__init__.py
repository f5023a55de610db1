"""`llmcache edram`: the commands for the modelled eDRAM accelerator; a table, each command imported when it is called."""

from __future__ import annotations

import click

from llmcache.cli.base import HELP_OPTIONS, LazyGroup

# name: (module:attribute, the line `llmcache edram --help` shows)
COMMANDS: dict[str, tuple[str, str]] = {
    "model": ("llmcache.cli.edram.model:command", "Latency and energy of a model on each system, by component."),
    "sweep": ("llmcache.cli.edram.sweep:command", "The same for every combination of what is varied."),
    "report": ("llmcache.cli.edram.report:command", "What refreshing a recorded run would cost, by group."),
    "plot": ("llmcache.cli.edram.plot:command", "Draw a saved model or sweep: HTML, PNG or SVG."),
    "accuracy": ("llmcache.cli.edram.accuracy:command", "What eviction and lost bits do to a model's answers."),
}


EPILOG = """\b
Examples:
  llmcache edram model llama2-7b --workload PG19
  llmcache edram sweep --budget 512,1024 --model all --json > sweep.json
  llmcache edram plot sweep.json -o sweep.png"""


@click.command(
    "edram",
    cls=LazyGroup,
    table=COMMANDS,
    epilog=EPILOG,
    invoke_without_command=True,
    context_settings=HELP_OPTIONS,
)
@click.pass_context
def command(context: click.Context) -> None:
    """What KV caching would cost on an edge accelerator with eDRAM, after the Kelle paper. Everything here is modelled.

    'llmcache edram COMMAND --help' tells more of each command, with examples.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
