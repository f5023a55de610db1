"""Parts that all commands share: groups that import nothing, exit codes in every help, common options."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn, TypeVar

import click
from click.shell_completion import CompletionItem

from llmcache.cli import types
from llmcache.errors import EXIT_INTERRUPTED, EXIT_OK, exit_codes, is_interrupt

Function = TypeVar("Function", bound=Callable[..., Any])
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
HELP_OPTIONS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "show_default": True}
"""Context settings of every command."""


class Command(click.Command):
    """A command whose help ends with the exit codes.

    `interrupted`: the exit code after Ctrl-C. Commands of version 1.0 keep the 0 that its documentation promised.
    """

    def __init__(self, *args: Any, interrupted: int = EXIT_OK, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.interrupted = interrupted

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BaseException as error:
            if not is_interrupt(error):
                raise
            return self.interrupted

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        codes = ", ".join(f"{code} {short}" for code, (short, _) in exit_codes(self.interrupted).items())
        formatter.write_paragraph()
        formatter.write_text(f"Exit codes: {codes}.")


class CommandAfterDashes(Command):
    """A command that keeps `--` in its arguments, because it distinguishes a command from a process."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        return super().parse_args(ctx, [*args[:at], *args[at : at + 1], *args[at:]])


class LazyGroup(Command, click.Group):
    """A group whose commands are imported when they are used.

    `table`: by name, module:attribute and the line that help and completion show.
    """

    def __init__(self, *args: Any, table: dict[str, tuple[str, str]], **kwargs: Any) -> None:
        # Set it here, because versions of click differ in its brackets.
        super().__init__(*args, **{"subcommand_metavar": "[COMMAND] [ARGS]...", "interrupted": EXIT_INTERRUPTED, **kwargs})
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.table:
            return None
        module, _, attribute = self.table[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{module}:{attribute} is not a click command")
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Return name, command and the words after it. UsageError, with similar names, if there is no such command."""
        if args[0] not in self.table and not args[0].startswith("-") and not ctx.resilient_parsing:
            near = " or ".join(f"'{name}'" for name in difflib.get_close_matches(args[0], self.table))
            ctx.fail(f"No such command '{args[0]}'.{f' Did you mean {near}?' if near else ''}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in self.table.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands, then the options, that begin with `incomplete`, without importing them."""
        own = [
            CompletionItem(name, help=summary)
            for name, (_, summary) in self.table.items()
            if name.startswith(incomplete) and not incomplete.startswith("-")
        ]
        return [*own, *click.Command.shell_complete(self, ctx, incomplete)]


def group(name: str, table: dict[str, tuple[str, str]], about: str, epilog: str) -> LazyGroup:
    """Return the group of the commands in `table`. Without a command it shows its help; signals run the cleanup."""

    @click.pass_context
    def shown(context: click.Context) -> None:
        context.with_resource(orderly_end())
        if context.invoked_subcommand is None:
            click.echo(context.get_help())

    return LazyGroup(
        name,
        table=table,
        callback=shown,
        help=inspect.cleandoc(about),
        epilog=epilog,
        invoke_without_command=True,
        context_settings=HELP_OPTIONS,
    )


def command(name: str, **settings: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a click command of a function, with the parts that all commands share."""
    return click.command(name, **{"cls": Command, "context_settings": HELP_OPTIONS, **settings})


def completion_variable(program: str) -> str:
    """Return the name of the environment variable with which a shell makes `program` print completions."""
    return f"_{program.upper()}_COMPLETE"


def json_option(schema: str, more: str = "") -> Callable[[Function], Function]:
    """Return the option `--json` (parameter `as_json`) for documents of `schema`; `more` follows in its help."""
    return click.option("--json", "as_json", is_flag=True, help=f"Print JSON in base units (schema {schema}){more}.")


def output_option(
    what: str, kind: click.ParamType[Any] = types.FILE, required: bool = False
) -> Callable[[Function], Function]:
    """Return the option `-o`, `--output` (parameter `output`)."""
    return click.option("-o", "--output", type=kind, required=required, help=what)


def force_option(what: str = "Overwrite existing files.") -> Callable[[Function], Function]:
    """Return the option `--force`."""
    return click.option("--force", is_flag=True, help=what)


@contextlib.contextmanager
def orderly_end() -> Iterator[None]:
    """Within this context, a signal that would kill the process raises SystemExit(128 + its number) instead.

    Temporary data, such as spill files of gigabytes, is then removed as on Ctrl-C. Signals that are ignored (`nohup`) or
    handled already do not change. For the main thread only.
    """
    changed = [number for number in ENDING_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in changed:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
