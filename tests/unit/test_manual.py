"""The manual pages are those of the commands, whole, and troff has nothing to say about them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import click
import pytest

from llmcache.cli import app
from llmcache.errors import EXIT_CODES
from tools import make_man
from tools.make_man import TARGET, made, walk

PAGES = made()
COMMANDS = {words: command for words, command in walk(app, "llmcache") if not isinstance(command, click.Group)}
WITHOUT_FIELDS = {"llmcache completion", "llmcache help"}


def page(words: str) -> str:
    return PAGES[f"man1/{words.replace(' ', '-')}.1"]


def test_the_pages_in_the_tree_are_those_of_the_commands() -> None:
    there = {path.relative_to(TARGET).as_posix(): path.read_text() for path in TARGET.glob("man?/*")}
    assert sorted(there) == sorted(PAGES), "run tools/make_man.py"
    assert [name for name in PAGES if there[name] != PAGES[name]] == [], "run tools/make_man.py"


@pytest.mark.parametrize("words", [*COMMANDS, "llmcachefs"])
def test_a_page_says_all_of_its_command(words: str) -> None:
    text = page(words)
    titles = re.findall(r"^\.SH \"?([A-Z ]+)", text, re.MULTILINE)
    wanted = ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXAMPLES", "FIELDS", "EXIT STATUS", "SEE ALSO"]
    assert [title for title in wanted if title not in titles] == (["FIELDS"] if words in WITHOUT_FIELDS else [])
    command = COMMANDS.get(words, COMMANDS["llmcache mount"])
    options = [name for parameter in command.params if isinstance(parameter, click.Option) for name in parameter.opts]
    assert [name for name in options if make_man.bold(name) not in text] == []
    assert all(f".TP\n\\fB{code}\\fP\n" in text for code in EXIT_CODES)


def test_pages_that_are_named_are_there() -> None:
    ours = {Path(name).stem for name in PAGES}
    for name, text in PAGES.items():
        named = re.findall(r"\\%\\fB((?:mount\\\.)?llmcache[a-z\\-]*)\\fP\(\d\)", text)
        assert {word.replace("\\", "") for word in named} <= ours, name


@pytest.mark.mandoc
@pytest.mark.parametrize("name", PAGES)
def test_mandoc_finds_nothing(name: str, tmp_path: Path) -> None:
    path = tmp_path / Path(name).name
    path.write_text(PAGES[name])
    result = subprocess.run(["mandoc", "-T", "lint", str(path)], capture_output=True, text=True, check=False)
    assert result.stdout + result.stderr == ""


@pytest.mark.groff
def test_groff_warns_of_nothing_and_keeps_to_the_width() -> None:
    for name, text in PAGES.items():
        command = ["groff", "-man", "-Tascii", "-ww", "-rLL=80n"]
        result = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
        assert result.stderr == "", name
        shown = re.sub(r"\x1b\[[0-9;]*m|.\x08", "", result.stdout)
        assert [line for line in shown.splitlines() if len(line) > 80] == [], name
