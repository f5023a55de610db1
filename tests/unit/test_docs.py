"""Documentation: links, commands, settings, Python code and paths exist; tables and figures are the recorded ones."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner

from llmcache.cache.policies import POLICIES
from llmcache.cli import app
from llmcache.cli.types import NameType
from llmcache.mount.client.settings import NAMES
from tests.property.contract import clauses, long_case
from tests.unit.command_parts import parsed
from tools.bench import readme
from tools.bench.all import NAMES as BENCHMARKS

tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")), *DOCS]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUICK = re.compile(r"llmcache (size(?!.*(--model|--measure))|(classify|info) traces/read-loop|completion|edram model)")
"""Commands that take at most 1 s and leave no files."""


def text_of(page: Path) -> str:
    return page.read_text()


def blocks(page: Path, language: str) -> list[str]:
    return [code for found, code in FENCE.findall(text_of(page)) if found == language]


def names(pages: list[Path]) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in pages]


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings on GitHub."""
    found = re.findall(r"^#+ (.*)$", FENCE.sub("", text_of(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_links_have_targets(page: Path) -> None:
    text = FENCE.sub("", text_of(page))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.is_file(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(path), f"{page.name}: {target}"


# Commands


def commands(page: Path) -> Iterator[str]:
    """Yield the commands that a page shows, without comments and prompts."""
    for language in ("sh", "console"):
        for code in blocks(page, language):
            lines = code.replace("\\\n", " ").splitlines()
            typed = [line[2:] for line in lines if line.startswith("$ ")] if language == "console" else lines
            for line in typed:
                yield from _single(line)


def _single(line: str) -> Iterator[str]:
    line = re.sub(r"\$\(which (\w+)\)", r"\1", line)  # used for programs outside the PATH of sudo
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split, lexer.commenters = True, "#"
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word in (";", "&&", "|", "&"):
            if words:
                yield shlex.join(words)
            words = []
        else:
            words.append(word)


SHOWN = sorted({(page.relative_to(ROOT).as_posix(), command) for page in PAGES for command in commands(page)})


def words_of(command: str) -> list[str]:
    """Split a command into words, without sudo, environment variables and redirections."""
    words = shlex.split(command)
    while words and (words[0] == "sudo" or re.fullmatch(r"[A-Z_]+=.*", words[0])):
        words.pop(0)
    return words[: words.index(">")] if ">" in words else words


@pytest.mark.parametrize(("page", "command"), SHOWN, ids=lambda value: str(value)[:60])
def test_commands_exist(page: str, command: str) -> None:
    words = words_of(command)
    if words[0] in ("llmcache", "llmcachefs"):
        context = parsed(*words)
        for parameter in context.command.params:
            value = context.params.get(parameter.name or "")
            if isinstance(parameter.type, NameType) and isinstance(value, str):
                assert set(value.split(",")) <= set(parameter.type.known())
    elif words[0].endswith("python") and words[1] == "-m":
        assert words[2] == "venv" or importlib.util.find_spec(words[2]) is not None
    elif words[0].endswith("python") and words[1] == "tools/bench":
        assert words[2] in (*BENCHMARKS, "all")
    elif words[0].startswith("tools/"):
        assert (ROOT / words[0]).stat().st_mode & 0o111


@pytest.mark.parametrize("command", sorted({command for _, command in SHOWN if QUICK.match(command)}))
def test_quick_commands_run(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(app, words_of(command)[1:])
    assert done.exit_code == 0, done.output


# Settings, Python, paths


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_settings_are_known(page: Path) -> None:
    for code in blocks(page, "toml"):
        assert set(tomllib.loads(code)["mount"]) <= set(NAMES)


PYTHON = [(page.name, code) for page in PAGES for code in blocks(page, "python")]


@pytest.mark.parametrize(("page", "code"), PYTHON, ids=[page for page, _ in PYTHON])
def test_python_examples_import_existing_names(page: str, code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("llmcache"):
            module = importlib.import_module(node.module or "")
            known = getattr(module, "__all__", dir(module))  # names that need an extra are in __all__ but not loaded
            assert all(alias.name in known for alias in node.names)


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_paths_exist(page: Path) -> None:
    for path in re.findall(r"`((?:llmcache|tools|tests|bpf|traces|requirements|docs)/[\w./-]+)`", text_of(page)):
        if "NAME" not in path and not path.endswith("/fifo.py"):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


def test_the_example_policy_meets_the_policy_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = (code for code in blocks(ROOT / "docs" / "contributing.md", "python") if "class FIFO(Policy)" in code)
    (tmp_path / "fifo.py").write_text(code)
    name = "llmcache.cache.policies.fifo"
    spec = importlib.util.spec_from_file_location(name, tmp_path / "fifo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(POLICIES, "fifo", f"{name}:FIFO")
    spec.loader.exec_module(module)
    for clause in clauses("fifo"):
        clause("fifo", long_case(20, seed=20))


# Tables and figures: those of the JSON in the tree


def test_tables_and_figures_match_the_recorded_results() -> None:
    assert readme.main([]) == 0, "python -m tools.bench.readme --write"


def test_pictures_are_compared_up_to_rounding_of_coordinates() -> None:
    line = '<path d="M 163.788365 16.598677" clip-path="url(#p0123456789)"/>'
    assert readme.same_picture(line, line.replace("598677", "598678").replace("p0123456789", "p9876543210"))
    for other in (line.replace("163", "164"), line.replace("M", "L"), line.replace(' 16.598677"', '"')):
        assert not readme.same_picture(line, other)
