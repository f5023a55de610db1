"""All manual pages: one for each command and sub command, one for `llmcachefs`, one for the helper of mount(8)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from llmcache.cli import app
from llmcache.cli.base import LazyGroup
from llmcache.cli.mount import command as mount_command
from tools.manual.page import Page, page_of, read_sections

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ROOT / "llmcache" / "cli"
HELPER = ROOT / "tools" / "mount.llmcachefs.txt"


def all_pages() -> list[Page]:
    """Returns all pages."""
    first = page_of(app, "llmcache", app.help or "", TEXTS / "llmcache.txt", None)
    first.sections["COMMANDS"] = _commands(app, "llmcache")
    second = page_of(mount_command, "llmcachefs", app.table["mount"][1], TEXTS / "mount.txt", "llmcache")
    return [first, second, *_below(app, "llmcache"), _helper()]


def walk(group: LazyGroup, words: str) -> Iterator[tuple[str, click.Command]]:
    """Every command and group below `group`, with the words that call it."""
    for name in group.table:
        command = group.get_command(click.Context(group), name)
        assert command is not None
        yield f"{words} {name}", command
        if isinstance(command, LazyGroup):
            yield from walk(command, f"{words} {name}")


def _below(group: LazyGroup, words: str) -> Iterator[Page]:
    for name, (_, summary) in group.table.items():
        command = group.get_command(click.Context(group), name)
        assert command is not None
        called = f"{words} {name}"
        text = TEXTS / f"{called.removeprefix('llmcache ').replace(' ', '-')}.txt"
        if isinstance(command, LazyGroup):
            page = page_of(command, called, summary, text, words)
            page.sections["COMMANDS"] = _commands(command, called)
            yield page
            yield from _below(command, called)
        else:
            yield page_of(command, called, summary, text, words.replace(" ", "-"))


def _commands(group: LazyGroup, words: str) -> str:
    dashed = words.replace(" ", "-")
    return "\n".join(f"{name}\n    {summary} {dashed}-{name}(1)" for name, (_, summary) in group.table.items())


def _helper() -> Page:
    sections = read_sections(HELPER)
    return Page("mount.llmcachefs", 8, "mount a model directory from /etc/fstab", sections)
