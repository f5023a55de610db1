#!/usr/bin/env python3
"""Writes the manual pages below tools/man from the commands. A test reports pages that are out of date.

A page has NAME, SYNOPSIS, DESCRIPTION, OPTIONS and EXAMPLES from the help of its command, exit codes from `llmcache.errors`,
and other sections from `NAME.txt` in the directory of the command's file. The package installs the pages; in the source
tree, `man -M tools/man llmcache-trace` shows them.

Texts are blocks separated by empty lines. The form of a block decides its kind:

    ## heading            a subsection
    term                  a definition: a line, then its meaning indented by four columns; several may follow each other
        meaning
        indented lines    shown unchanged (examples, tables)
    anything else         a paragraph

`words` in backquotes are bold; names of pages such as `llmcache(1)` are bold up to the bracket.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from llmcache import __version__  # noqa: E402 - found through the line above
from llmcache.cli import app  # noqa: E402
from llmcache.cli.base import HELP_OPTIONS, Command, LazyGroup  # noqa: E402
from llmcache.cli.mount import command as mount_command  # noqa: E402
from llmcache.errors import EXIT_OK, exit_codes  # noqa: E402

TARGET = ROOT / "tools" / "man"
TEXTS = ROOT / "llmcache" / "cli"
HELPER = ROOT / "tools" / "mount.llmcachefs.txt"
DATE = "2026-11-21"  # date of the last edition of the texts; mandoc requires one, and pages must not change with the day
ORDER = (
    "NAME", "SYNOPSIS", "DESCRIPTION", "COMMANDS", "OPTIONS", "EXAMPLES", "FIELDS", "OVERHEAD", "EXIT STATUS", "ENVIRONMENT",
    "FILES", "NOTES", "SEE ALSO",
)  # fmt: skip
INDENT = "    "
_WIDTH = 78  # line width of the source
_PAGE = re.compile(r"\b([a-z][a-z0-9.-]*)\((\d)\)")
_CODE = re.compile(r"`([^`]+)`")
_CHARACTERS = {"…": "...", "“": '"', "”": '"', "’": "'", "–": "-", "−": "-", "×": "x", "≥": ">=", "µ": "u"}


# All pages


def all_pages() -> list[Page]:
    made = [
        page_of(app, "llmcache", app.help or "", TEXTS / "llmcache.txt", None),
        page_of(mount_command, "llmcachefs", app.table["mount"][1], TEXTS / "mount.txt", "llmcache"),
    ]
    groups = {"llmcache": app}
    for words, command in walk(app, "llmcache"):
        parent, _, name = words.rpartition(" ")
        if isinstance(command, LazyGroup):
            groups[words] = command
        text = TEXTS / f"{words.removeprefix('llmcache ').replace(' ', '-')}.txt"
        made.append(page_of(command, words, groups[parent].table[name][1], text, parent.replace(" ", "-")))
    return [*made, Page("mount.llmcachefs", 8, "mount a model directory from /etc/fstab", read_sections(HELPER))]


def walk(group: LazyGroup, words: str) -> Iterator[tuple[str, click.Command]]:
    """Yield every command and group below `group`, with its full name."""
    for name in group.table:
        command = group.get_command(click.Context(group), name)
        assert command is not None
        yield f"{words} {name}", command
        if isinstance(command, LazyGroup):
            yield from walk(command, f"{words} {name}")


# One page


@dataclass
class Page:
    """A manual page. `sections`: marked text by title; `raw`: text that is already in man(7), placed before it."""

    name: str
    number: int
    summary: str
    sections: dict[str, str] = field(default_factory=dict)
    raw: dict[str, str] = field(default_factory=dict)

    @property
    def file(self) -> str:
        return f"{self.name}.{self.number}"

    def text(self) -> str:
        made = [
            '.\\" made by tools/make_man.py from the help of the command and the text beside it: edit those',
            f'.TH {self.name.upper()} {self.number} {DATE} "llmcache {__version__}" "llmcache"',
            ".SH NAME",
            f"{escaped(self.name)} \\-",
            inline(self.summary),
        ]
        unknown = ({*self.sections, *self.raw}) - set(ORDER)
        if unknown:
            raise ValueError(f"{self.file}: sections must be of {', '.join(ORDER)}, not {sorted(unknown)}")
        for title in ORDER:
            if title in self.sections or title in self.raw:
                head, *body = section(title, self.sections.get(title, "")).split("\n")
                made += [head, *filter(None, [self.raw.get(title)]), *([".PP"] if title in self.raw and body else []), *body]
        return "\n".join(made) + "\n"


def read_sections(path: Path) -> dict[str, str]:
    """Return the sections of a text, each begun by `# TITLE`; empty if the file does not exist."""
    if not path.exists():
        return {}
    parts = re.split(r"^# (.*)$", path.read_text(), flags=re.MULTILINE)
    if parts[0].strip():
        raise ValueError(f"{path}: text before the first section")
    return {title.strip(): text.strip("\n") for title, text in zip(parts[1::2], parts[2::2], strict=True)}


def page_of(command: click.Command, words: str, summary: str, text: Path, parent: str | None) -> Page:
    """Return the page of `command`, which users call as `words`; `text`: the file with its other sections."""
    context = click.Context(command, info_name=words, **HELP_OPTIONS)
    sections = read_sections(text)
    for title, block in _help_sections(command).items():
        own = sections.get(title)
        sections[title] = f"{block}\n\n{own}" if own else block
    summary = summary.rstrip(".")
    summary = summary if summary[:2].isupper() else summary[0].lower() + summary[1:]
    page = Page(words.replace(" ", "-"), 1, summary, sections)
    if isinstance(command, LazyGroup):
        below = (f"{name}\n    {about} {page.name}-{name}(1)" for name, (_, about) in command.table.items())
        sections["COMMANDS"] = "\n".join(below)
    page.raw["SYNOPSIS"] = " ".join([bold(words), *map(_piece, command.collect_usage_pieces(context))])
    options = (one for one in command.get_params(context) if isinstance(one, click.Option) and not one.hidden)
    page.raw["OPTIONS"] = "\n".join(_option(option, context) for option in options)
    codes = exit_codes(command.interrupted if isinstance(command, Command) else EXIT_OK)
    page.raw["EXIT STATUS"] = "\n".join(f".TP\n{bold(str(code))}\n{inline(long)}" for code, (_, long) in codes.items())
    if parent:
        sections["SEE ALSO"] = ", ".join(filter(None, (f"{parent}(1)", sections.get("SEE ALSO"))))
    return page


def _help_sections(command: click.Command) -> dict[str, str]:
    """Return help and epilog as marked text: blocks headed Examples:, Fields: or Overhead:, and the rest as DESCRIPTION."""
    found: dict[str, list[str]] = {"DESCRIPTION": []}
    for text in (command.help, command.epilog):
        for block in blocks(inspect.cleandoc(text or "")):
            kept = block[0] == "\b"
            lines = block[1:] if kept else block
            title = {"Examples:": "EXAMPLES", "Fields:": "FIELDS", "Overhead:": "OVERHEAD"}.get(lines[0] if lines else "")
            if title is None:
                found["DESCRIPTION"].append(_listed(lines) if kept else "\n".join(lines))
            elif title == "OVERHEAD":
                found[title] = ["\n".join(line.strip() for line in lines[1:])]
            else:
                found[title] = [_listed(lines[1:])]
    return {title: "\n\n".join(texts) for title, texts in found.items() if texts}


def _listed(lines: list[str]) -> str:
    """Convert preformatted lines of a help text to marked text; two columns (name, two spaces, meaning) become
    definitions.
    """
    if lines[0].endswith(":") and len(lines) > 1 and all(line.startswith(" ") for line in lines[1:]):
        return f"{lines[0]}\n\n{_listed(lines[1:])}"
    least = min(len(line) - len(line.lstrip()) for line in lines)
    made: list[str] = []
    for line in (line[least:] for line in lines):
        name, gap, meaning = re.match(r"(\S+(?: \S+)*)(\s{2,}|$)(.*)|", line).groups(default="")  # type: ignore[union-attr]
        if line.startswith(" ") and made:
            made.append(INDENT + line.strip())
        elif gap and meaning and not meaning.startswith("#"):
            made += [name, INDENT + meaning]
        else:
            return "\n".join(INDENT + line for line in lines)
    return "\n".join(made)


def _piece(piece: str) -> str:
    return f"\\fI{escaped(piece)}\\fP"


def _option(option: click.Option, context: click.Context) -> str:
    record = option.get_help_record(context)
    assert record is not None, option.name
    names = re.sub(r"(?<= )([A-Z\[][^ ]*)$", lambda value: _piece(value[1]), record[0])
    return f".TP\n{re.sub(r'(--?[a-z][a-z-]*)', lambda name: bold(name[1]), names)}\n{inline(record[1])}"


# Marked text to man(7) macros


def escaped(text: str) -> str:
    """Return `text` in ASCII, escaped so that man(7) shows it unchanged."""
    for letter, plain in _CHARACTERS.items():
        text = text.replace(letter, plain)
    if not text.isascii():
        raise ValueError(f"not ASCII: {''.join(letter for letter in text if not letter.isascii())!r} in {text[:60]!r}")
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("`", "\\`").replace("^", "\\(ha").replace("~", "\\(ti")
    return "\\&" + text if text.startswith((".", "'")) else text


def bold(text: str) -> str:
    return f"\\fB{escaped(text).removeprefix(chr(92) + '&')}\\fP"


def inline(text: str) -> str:
    """Return a paragraph with its marks as fonts."""
    made = "".join(bold(part) if place % 2 else _with_pages(part) for place, part in enumerate(_CODE.split(text)))
    lines = textwrap.wrap(made, _WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join("\\&" + line if line.startswith((".", "'")) else line for line in lines)


def _with_pages(text: str) -> str:
    parts = _PAGE.split(text)
    made = [escaped(parts[0]).removeprefix("\\&") if parts[0] else ""]
    for name, number, rest in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        made += ["\\%" + bold(name), f"({number})", escaped(rest).removeprefix("\\&") if rest else ""]
    return "".join(made)


def blocks(text: str) -> Iterator[list[str]]:
    for block in filter(str.strip, re.split(r"\n\s*\n", text.strip("\n"))):
        yield [line.rstrip() for line in block.split("\n")]


def section(title: str, text: str) -> str:
    lines = [f'.SH "{title}"' if " " in title else f".SH {title}"]
    first = True
    for block in blocks(text):
        lines += _block(block, first)
        first = len(block) == 1 and block[0].startswith("## ")
    return "\n".join(lines)


def _block(lines: list[str], first: bool) -> list[str]:
    if lines[0].startswith("## "):
        return [f'.SS "{lines[0][3:]}"', *([] if len(lines) == 1 else _block(lines[1:], True))]
    if lines[0].startswith(INDENT):  # shown unchanged
        least = min(len(line) - len(line.lstrip()) for line in lines)
        return [*([] if first else [".PP"]), ".nf", *(escaped(line[least:]) for line in lines), ".fi"]
    if len(lines) > 1 and lines[1].startswith(INDENT):
        return list(_definitions(lines))
    return [*([] if first else [".PP"]), inline(" ".join(line.strip() for line in lines))]


def _definitions(lines: list[str]) -> Iterator[str]:
    meaning: list[str] = []
    for line in lines:
        if line.startswith(INDENT):
            meaning.append(line.strip())
            continue
        if meaning:
            yield inline(" ".join(meaning))
            meaning = []
        yield ".TP"
        yield ", ".join(bold(word.strip("` ")) for word in line.split(", "))
    yield inline(" ".join(meaning))


def made() -> dict[str, str]:
    """Return every page's source by its path below tools/man."""
    os.environ.pop("COLUMNS", None)
    return {f"man{page.number}/{page.file}": page.text() for page in all_pages()}


def main() -> int:
    """Write the pages that differ and delete obsolete ones; print their paths."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    pages = made()
    existing = {path.relative_to(TARGET).as_posix(): path.read_text() for path in TARGET.glob("man?/*")}
    for file in sorted(file for file in {*pages, *existing} if pages.get(file) != existing.get(file)):
        print(file)
        if file in pages:
            (TARGET / file).parent.mkdir(parents=True, exist_ok=True)
            (TARGET / file).write_text(pages[file])
        else:
            (TARGET / file).unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
