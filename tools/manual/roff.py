"""Marked text to man(7) macros. The text: blocks with empty lines between them, each by its shape one of

    ## heading            a subsection
    term                  a definition: a line, then its meaning indented by four columns; several may follow each other
        meaning
        indented lines    kept as they are (examples, tables)
    anything else         a paragraph

`words` between backquotes are bold, names of pages as `llmcache(1)` are bold up to the bracket.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

INDENT = "    "
_WIDTH = 78  # of the lines of the source
_PAGE = re.compile(r"\b([a-z][a-z0-9.-]*)\((\d)\)")
_CODE = re.compile(r"`([^`]+)`")
_CHARACTERS = {"…": "...", "“": '"', "”": '"', "’": "'", "–": "-", "−": "-", "×": "x", "≥": ">=", "µ": "u"}


def escaped(text: str) -> str:
    """Returns `text` so that man(7) shows it as it is, in ASCII: backslashes, dashes, and a point or quote at the start."""
    for letter, plain in _CHARACTERS.items():
        text = text.replace(letter, plain)
    if not text.isascii():
        raise ValueError(f"not ASCII: {''.join(letter for letter in text if not letter.isascii())!r} in {text[:60]!r}")
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("`", "\\`").replace("^", "\\(ha").replace("~", "\\(ti")
    return "\\&" + text if text.startswith((".", "'")) else text


def bold(text: str) -> str:
    """Returns `text`, escaped, in bold."""
    return f"\\fB{escaped(text).removeprefix(chr(92) + '&')}\\fP"


def inline(text: str) -> str:
    """Returns a paragraph's text with its marks as fonts."""
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
    """The lines of each block of `text`."""
    for block in filter(str.strip, re.split(r"\n\s*\n", text.strip("\n"))):
        yield [line.rstrip() for line in block.split("\n")]


def section(title: str, text: str) -> str:
    """Returns a whole section."""
    lines = [f'.SH "{title}"' if " " in title else f".SH {title}"]
    first = True
    for block in blocks(text):
        lines += _block(block, first)
        first = block[0].startswith("## ")
    return "\n".join(lines)


def _block(lines: list[str], first: bool) -> list[str]:
    if lines[0].startswith("## "):
        return [f'.SS "{lines[0][3:]}"', *([] if len(lines) == 1 else _block(lines[1:], True))]
    if lines[0].startswith(INDENT):
        return verbatim(lines, first)
    if len(lines) > 1 and lines[1].startswith(INDENT):
        return list(_definitions(lines))
    return [*([] if first else [".PP"]), inline(" ".join(line.strip() for line in lines))]


def _definitions(lines: list[str]) -> Iterator[str]:
    """Terms with their meanings; lines of a meaning are filled."""
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


def verbatim(lines: list[str], first: bool) -> list[str]:
    """Returns lines that are shown as they are; `first`: of their section."""
    least = min(len(line) - len(line.lstrip()) for line in lines)
    return [*([] if first else [".PP"]), ".nf", *(escaped(line[least:]) for line in lines), ".fi"]
