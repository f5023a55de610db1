"""What commands for the modelled accelerator take, and click callbacks that read it; every error names its option."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from llmcache.cli import kinds, names
from llmcache.errors import UsageError

Value = TypeVar("Value")
Callback = Callable[[click.Context, click.Parameter, "str | None"], Any]


def profile_option(
    default: str = "paper,silicon", about: str = "Energies; also: public."
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option `--profile`: names of profiles, commas between them."""
    return click.option("--profile", type=kinds.Names(names.edram_profiles), default=default, show_default=True, help=about)


def one(parse: Callable[[str], Value]) -> Callback:
    """Returns a callback that hands on what `parse` makes of the text, None where there is none."""

    def callback(_: click.Context, param: click.Parameter, text: str | None) -> Value | None:
        if text is None:
            return None
        try:
            return parse(text)
        except UsageError as error:
            raise UsageError(f"{max(param.opts, key=len)}: {error.message}", error.hint) from error

    return callback


def several(parse: Callable[[str], Value]) -> Callback:
    """Returns a callback for a list with commas, each value once; () where there is none."""
    read = one(lambda text: list(dict.fromkeys(parse(part.strip()) for part in text.split(","))))
    return lambda context, param, text: read(context, param, text) or ()


def whole(least: int) -> Callable[[str], int]:
    """Returns what reads a whole number of at least `least`."""

    def parse(text: str) -> int:
        digits = text.strip().replace("_", "")
        if not digits.isascii() or not digits.isdigit() or len(digits) > 12:
            raise UsageError(f"'{text}' is not a whole number", "write tokens or sequences: 2048")
        if int(digits) < least:
            raise UsageError(f"{digits} is too small: at least {least}")
        return int(digits)

    return parse


def factor(text: str) -> float:
    """Returns the number above 0 that `text` is."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise UsageError(f"'{text}' is not a factor", "write numbers above 0: 0.5,1,2")
    return number


def positive(parse: Callable[[str], int]) -> Callable[[str], float]:
    """Returns what reads a size or a time of more than nothing."""

    def more(text: str) -> float:
        if value := parse(text):
            return float(value)
        raise UsageError(f"'{text}', more than 0 is needed")

    return more


def bandwidth(text: str) -> int:
    """Returns bytes per second; a number without a unit counts MB/s."""
    from llmcache.cache.question import parse_bandwidth

    try:
        return parse_bandwidth("", text)
    except UsageError as error:
        raise UsageError(error.message.removeprefix(": "), error.hint) from error
