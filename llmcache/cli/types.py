"""Types of arguments: parsers and shell completions. This module imports no large modules."""

from __future__ import annotations

import importlib
import math
import shlex
from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem

from llmcache.errors import UsageError
from llmcache.units import parse_bandwidth, parse_duration, parse_size, parse_size_with_unit, parse_tokens


class TextType(click.ParamType):  # type: ignore[type-arg]  # is generic from click 8.2 on
    """Text that `parse` converts; errors name the argument or option. Help shows `name`."""

    def __init__(self, name: str, parse: Callable[[str], Any] = str) -> None:
        self.name = name
        self.parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self.parse(value)
        except UsageError as error:
            raise UsageError(f"{_named(param)}: {error.message}", error.hint) from error


class _PathType(TextType):
    """A path, for which shells complete files or directories."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return a marker that makes the shell complete files or directories itself."""
        return [CompletionItem(incomplete, type="dir" if self.name == "dir" else "file")]


class _MountType(TextType):
    """A mount point, for which shells complete running mounts, or directories if there are none."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the mount points that begin with `incomplete`.

        Shells insert them without quotes, so those that need quotes are left out.
        """
        from llmcache.mount.client.mountpoint import ours

        points = [point for point in ours() if point.startswith(incomplete) and shlex.quote(point) == point]
        found = [CompletionItem(point) for point in points]
        return found or [CompletionItem(incomplete, type="dir")]


class NameType(TextType):
    """One or several names of `known` and of the keys of `table` (module:attribute). They are not checked here.

    The table is imported only for completions.
    """

    def __init__(self, *known: str, table: str = "", several: bool = True) -> None:
        super().__init__("name,…" if several else "name")
        self._known = known
        self._table = table
        self._several = several

    def known(self) -> tuple[str, ...]:
        module, _, attribute = self._table.partition(":")
        return (*self._known, *(getattr(importlib.import_module(module), attribute) if module else ()))

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the names that begin with `incomplete`, or with the last word of a list with commas."""
        before, comma, word = incomplete.rpartition(",") if self._several else ("", "", incomplete)
        taken = set(before.split(","))
        return [
            CompletionItem(before + comma + name) for name in self.known() if name.startswith(word) and name not in taken
        ]


def _named(param: click.Parameter | None) -> str:
    if param is None:
        return "value"
    if isinstance(param, click.Option):
        return max(param.opts, key=len)
    return (param.metavar or str(param.name)).upper()


FILE = _PathType("file")
DIRECTORY = _PathType("dir")
MOUNT = _MountType("mount")
SIZE = TextType("size", parse_size)
TIME = TextType("time", lambda text: parse_duration(text) / 1e9)
"""In seconds."""
SIZE_WITH_UNIT = TextType("size", parse_size_with_unit)
BANDWIDTH = TextType("rate", parse_bandwidth)
TOKENS = TextType("tokens", parse_tokens)


class Range(click.IntRange):
    """A whole number in a range; help shows N."""

    def get_metavar(self, *args: Any, **named: Any) -> str:
        return "N"


COUNT = Range(min=1)


def above(name: str, parse: Callable[[str], float], example: str, most: float = math.inf) -> TextType:
    """Return a type for values of `parse` above 0 and up to `most`, such as `example`. Help shows `name`."""

    def checked(text: str) -> float:
        value = parse(text)
        if not 0 < value <= most or not math.isfinite(value):
            bound = "" if most == math.inf else f" and at most {most:g}"
            raise UsageError(f"'{text}' must be more than 0{bound}", f"for example: {example}")
        return value

    return TextType(name, checked)


def number(text: str) -> float:
    """Return the number, of any sign. UsageError."""
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"'{text}' is not a number", "give a number, for example 0.5") from None


def whole(least: int) -> TextType:
    """Return a type for whole numbers of at least `least`; underscores are allowed."""

    def parse(text: str) -> int:
        digits = text.strip().replace("_", "")
        if not digits.isascii() or not digits.isdigit() or len(digits) > 12:
            raise UsageError(f"'{text}' is not a whole number", "give a whole number, for example 2048")
        if int(digits) < least:
            raise UsageError(f"{digits} is too small: at least {least}")
        return int(digits)

    return TextType("n", parse)


def several(one: TextType) -> TextType:
    """Return a type for lists of `one`, separated by commas, without duplicates."""
    return TextType(f"{one.name},…", lambda text: list(dict.fromkeys(one.parse(part.strip()) for part in text.split(","))))
