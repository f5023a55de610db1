"""Rules that hold for every command: help, valid examples, --json, exit codes, a complete manual page."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from llmcache import cli
from llmcache.cli.base import HELP_OPTIONS, Command, LazyGroup
from llmcache.errors import MissingRequirement, exit_codes
from tests.unit.command_parts import HEAVY, called, keys, loaded, parsed
from tools.make_man import TARGET, made, walk

ROOT = Path(__file__).parents[2]
TRACE = ROOT / "traces/ai_notes.parquet"
ALL = {"llmcache": cli.app, **dict(walk(cli.app, "llmcache"))}
COMMANDS = {words: command for words, command in ALL.items() if not isinstance(command, LazyGroup)}
# These print a script, help, or the log of a server.
NO_DOCUMENT = {"llmcache completion", "llmcache help", "llmcache kv proxy", "llmcache serve-llama"}


def shown(command: click.Command, words: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    return command.get_help(click.Context(command, info_name=words, **HELP_OPTIONS))


@pytest.mark.parametrize("words", ALL)
def test_help_has_examples_and_exit_codes_within_79_columns(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(ALL[words], words, monkeypatch)
    assert "\n  Examples:\n" in text
    flat = " ".join(text.split())
    assert all(f"{code} {short}" in flat for code, (short, _) in exit_codes(interrupted_of(ALL[words])).items())
    assert [line for line in text.splitlines() if len(line) > 79] == []
    assert [option.opts for option in options(ALL[words]) if not option.help] == []


def interrupted_of(command: click.Command) -> int:
    assert isinstance(command, Command)
    return command.interrupted


def options(command: click.Command) -> list[click.Option]:
    return [parameter for parameter in command.params if isinstance(parameter, click.Option) and not parameter.hidden]


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_prints_json_and_names_the_schema(words: str) -> None:
    found = [option for option in options(COMMANDS[words]) if "--json" in option.opts]
    if words in NO_DOCUMENT:
        assert not found
        return
    (option,) = found
    assert option.name == "as_json" and option.is_flag
    assert re.search(r"in base units \(schema llmcache\.[a-zA-Z.-]+/\d+\)", option.help or "")


def calls(line: str) -> Iterator[list[str]]:
    """Yield the llmcache calls in a shell line, without redirections and other programs."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    found: list[str] = []
    for word in (*lexer, "|"):
        if word.startswith("$("):
            yield from calls(word[2:-1])
        if not set(word) <= set("|&>"):
            found.append(word)
            continue
        found = found[1:] if found[:1] == ["sudo"] else found
        if found[:1] in (["llmcache"], ["llmcachefs"]):
            yield found
        found = []


def examples(command: click.Command) -> Iterator[list[str]]:
    """Yield the calls in a command's examples."""
    for text in (command.help, command.epilog):
        for block in re.findall(r"Examples:\n((?:[ \t]+.*\n?)+)", text or ""):
            for line in block.splitlines():
                yield from calls(line)


@pytest.mark.parametrize("words", ALL)
def test_examples_can_be_parsed(words: str) -> None:
    found = list(examples(ALL[words]))
    assert found
    for program, *args in found:
        parsed(program, *args)


def test_heavy_packages_are_imported_only_when_used() -> None:
    run = "from llmcache import cli; cli.main()"
    commands = {place.partition(":")[0] for place, _ in cli.COMMANDS.values()}
    assert not {*HEAVY, *commands} & loaded(run, "--help")
    shown = "import click; from tools.make_man import walk; from llmcache.cli import app"
    shown += "; [command.get_help(click.Context(command, info_name=words)) for words, command in walk(app, 'llmcache')]"
    assert not HEAVY & loaded(shown), "help of all commands"
    assert not (HEAVY - {"rich"}) & loaded(run, "size", "--bw", "100", "--loop", "70M")


# Calls, and the keys whose values contain free names (profiles, hardware, findings), which are not checked.
DOCUMENTS: list[tuple[str, set[str]]] = [
    ("size --bw 100 --loop 70M --cache 64M", set()),
    ("size --device watch", {"bandwidth_detail"}),
    ("size --bw 100 --loop 70M --ram 1G", set()),
    (f"info {TRACE}", {"extra"}),
    (f"classify {TRACE}", set()),
    (f"simulate {TRACE} --policy lru --cache 50% --t 0.1 --mrc", set()),
    ("config --show", set()),
    ("doctor", {"facts"}),
    ("edram sweep", set()),
    ("edram model", {"model", "workload", "profiles", "systems", "energy_kinds", "rooflines", "lifetimes", "evictors"}),
]


def codes(call: str) -> set[int]:
    """Return the exit codes of a successful call; doctor may find that this machine lacks something."""
    return {0, MissingRequirement.exit_code} if call == "doctor" else {0}


@pytest.mark.parametrize(("call", "named"), DOCUMENTS)
def test_help_explains_every_key_of_a_document(call: str, named: set[str]) -> None:
    result = CliRunner().invoke(cli.app, [*call.split(), "--json"])
    assert result.exit_code in codes(call), result.output
    document = json.loads(result.stdout)
    path = "-".join(call.split()[: 2 if call.startswith("edram") else 1])
    text = (ROOT / f"llmcache/cli/{path}.txt").read_text()
    assert document["schema"] in text
    for row in document.get("results", []):
        for part in ("latencies_s", "energies_j"):
            row.pop(part, None)
    for name in named:
        for holder in (document, document.get("provenance", {}), *document.get("findings", [])):
            if name in holder:
                holder[name] = None
    assert sorted(set(keys(document)) - set(re.findall(r"[A-Za-z0-9_]+", text))) == []


@pytest.mark.parametrize(
    ("args", "named"),
    [(("stats", "/nowhere", "soon"), "INTERVAL: 'soon'"), (("trace", "1", "-d", "soon"), "--duration: 'soon'")],
)
def test_errors_name_the_field_and_have_a_hint(args: tuple[str, ...], named: str) -> None:
    result = called(*args)
    first, second = result.stderr.splitlines()
    assert result.returncode == 2 and first.startswith(f"llmcache: error: {named}") and second.startswith("hint: ")


@pytest.mark.parametrize("call", ["size --bw 100 --loop 70M", "config --show"])
def test_no_color_is_honored_by_tables(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich treat the output as a terminal
    monkeypatch.setenv("NO_COLOR", "1")
    result = CliRunner().invoke(cli.app, call.split(), color=True)
    assert result.exit_code == 0
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", result.output)


PAGES = made()


def test_manual_pages_in_the_tree_are_up_to_date() -> None:
    committed = {path.relative_to(TARGET).as_posix(): path.read_text() for path in TARGET.glob("man?/*")}
    assert sorted(committed) == sorted(PAGES), "run tools/make_man.py"
    assert [name for name in PAGES if committed[name] != PAGES[name]] == [], "run tools/make_man.py"


def test_manual_pages_refer_to_existing_pages() -> None:
    ours = {Path(name).stem for name in PAGES}
    for name, text in PAGES.items():
        named = re.findall(r"\\%\\fB((?:mount\\\.)?llmcache[a-z\\-]*)\\fP\(\d\)", text)
        assert {word.replace("\\", "") for word in named} <= ours, name


@pytest.mark.mandoc
@pytest.mark.parametrize("name", PAGES)
def test_mandoc_has_no_complaints(name: str, tmp_path: Path) -> None:
    path = tmp_path / Path(name).name
    path.write_text(PAGES[name])
    result = subprocess.run(["mandoc", "-T", "lint", str(path)], capture_output=True, text=True, check=False)
    assert result.stdout + result.stderr == ""
