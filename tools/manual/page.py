"""One manual page of one command: NAME, SYNOPSIS, DESCRIPTION, OPTIONS and EXAMPLES from its help, the rest from the text
`NAME.txt` beside the command's file, and the exit codes from `llmcache.errors`."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field
from pathlib import Path

import click

from llmcache import __version__
from llmcache.cli.base import HELP_OPTIONS
from llmcache.errors import EXIT_CODES
from tools.manual import roff

DATE = "2026-11-21"  # of the last edition of the texts: mandoc wants one, and pages must not change by themselves
ORDER = (
    "NAME", "SYNOPSIS", "DESCRIPTION", "COMMANDS", "OPTIONS", "EXAMPLES", "FIELDS", "OVERHEAD", "EXIT STATUS", "ENVIRONMENT",
    "FILES", "NOTES", "SEE ALSO",
)  # fmt: skip


@dataclass
class Page:
    """A manual page. `sections`: marked text (see `roff`) by title; `raw`: what is man(7) already, put before it."""

    name: str
    number: int
    summary: str
    sections: dict[str, str] = field(default_factory=dict)
    raw: dict[str, str] = field(default_factory=dict)

    @property
    def file(self) -> str:
        """Name of its file."""
        return f"{self.name}.{self.number}"

    def text(self) -> str:
        """Returns the page as man(7) source."""
        made = [
            '.\\" made by tools/make_man.py from the help of the command and the text beside it: edit those',
            f'.TH {self.name.upper()} {self.number} {DATE} "llmcache {__version__}" "llmcache"',
            ".SH NAME",
            f"{roff.escaped(self.name)} \\-",
            roff.inline(self.summary),
        ]
        unknown = ({*self.sections, *self.raw}) - set(ORDER)
        if unknown:
            raise ValueError(f"{self.file}: sections {sorted(unknown)} are not known: {', '.join(ORDER)}")
        for title in ORDER:
            if title in self.sections or title in self.raw:
                head, *body = roff.section(title, self.sections.get(title, "")).split("\n")
                made += [head, *filter(None, [self.raw.get(title)]), *([".PP"] if title in self.raw and body else []), *body]
        return "\n".join(made) + "\n"


def read_sections(path: Path) -> dict[str, str]:
    """Returns the sections in a text (`# TITLE` begins one); empty if there is no such file."""
    if not path.exists():
        return {}
    parts = re.split(r"^# (.*)$", path.read_text(), flags=re.MULTILINE)
    if parts[0].strip():
        raise ValueError(f"{path}: begins before its first section")
    return {title.strip(): text.strip("\n") for title, text in zip(parts[1::2], parts[2::2], strict=True)}


def page_of(command: click.Command, words: str, summary: str, text: Path, parent: str | None) -> Page:
    """Returns the page of `command`, which users call as `words`; `text` is the file beside it."""
    context = click.Context(command, info_name=words, help_option_names=HELP_OPTIONS["help_option_names"])
    sections = read_sections(text)
    for title, block in _help_sections(command).items():
        own = sections.get(title)
        sections[title] = f"{block}\n\n{own}" if own else block
    page = Page(words.replace(" ", "-"), 1, _lowered(summary), sections)
    page.raw["SYNOPSIS"] = " ".join([roff.bold(words), *map(_piece, command.collect_usage_pieces(context))])
    page.raw["OPTIONS"] = "\n".join(_option(option, context) for option in command.get_params(context) if _is_told(option))
    page.raw["EXIT STATUS"] = _exit_codes()
    see = sections.get("SEE ALSO", "")
    sections["SEE ALSO"] = ", ".join(filter(None, (f"{parent}(1)" if parent else "", see)))
    if not sections["SEE ALSO"]:
        del sections["SEE ALSO"]
    return page


def _lowered(summary: str) -> str:
    """The line of a table of commands as NAME wants it."""
    text = summary.rstrip(".")
    return text if text[:2].isupper() else text[0].lower() + text[1:]


def _help_sections(command: click.Command) -> dict[str, str]:
    """What help and epilog say, as marked text: DESCRIPTION, and what blocks headed Examples:, Fields: or Overhead: say."""
    found: dict[str, list[str]] = {"DESCRIPTION": []}
    for text in (command.help, command.epilog):
        for block in roff.blocks(inspect.cleandoc(text or "")):
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
    """Lines that help keeps as they are, as marked text: two columns (name, two spaces, meaning) become definitions."""
    if lines[0].endswith(":") and len(lines) > 1 and all(line.startswith(" ") for line in lines[1:]):
        return f"{lines[0]}\n\n{_listed(lines[1:])}"
    least = min(len(line) - len(line.lstrip()) for line in lines)
    made: list[str] = []
    for line in (line[least:] for line in lines):
        name, gap, meaning = re.match(r"(\S+(?: \S+)*)(\s{2,}|$)(.*)|", line).groups(default="")  # type: ignore[union-attr]
        if line.startswith(" ") and made:
            made.append(roff.INDENT + line.strip())
        elif gap and meaning and not meaning.startswith("#"):
            made += [name, roff.INDENT + meaning]
        else:
            return "\n".join(roff.INDENT + line for line in lines)
    return "\n".join(made)


def _piece(piece: str) -> str:
    return f"\\fI{roff.escaped(piece)}\\fP"


def _is_told(parameter: click.Parameter) -> bool:
    return isinstance(parameter, click.Option) and not parameter.hidden


def _option(option: click.Parameter, context: click.Context) -> str:
    record = option.get_help_record(context)
    assert record is not None, option.name
    names, text = record
    return f".TP\n{re.sub(r'(--?[a-z][a-z-]*)', lambda name: roff.bold(name[1]), _metavars(names))}\n{roff.inline(text)}"


def _metavars(names: str) -> str:
    """The names of an option with what stands for values in italics."""
    return re.sub(r"(?<= )([A-Z\[][^ ]*)$", lambda value: _piece(value[1]), names)


def _exit_codes() -> str:
    return "\n".join(f".TP\n{roff.bold(str(code))}\n{roff.inline(long)}" for code, (_, long) in EXIT_CODES.items())
