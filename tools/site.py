"""Hooks of mkdocs for the site of docs/: they add the manual pages and adapt links to them.

Pages of docs/ link to the manual pages in the source tree (`../tools/man/man1/llmcache-size.1`), so that the links also work
there. On the site the links lead to pages made from them. This file imports nothing of llmcache.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = ("CHANGELOG.md", "SECURITY.md")
"""Pages in the root of the source tree that the site includes."""
_LINK = re.compile(r"\]\(\.\./(?:tools/man/man\d/)?([\w.-]+)")
_TOKEN = re.compile(r"(?:\\%)?\\fB([a-z.\\-]+)\\fP\((\d)\)|(\\f[BIP])|\\(\((?:ha|ti)|[-%e`])")
_LETTERS = {"-": "-", "%": "", "e": "\\", "`": "`", "(ha": "^", "(ti": "~"}


def manual() -> dict[str, str]:
    """Return the manual pages in Markdown, by file name ("llmcache-size.1")."""
    sources = {path.name: path.read_text() for path in sorted(ROOT.glob("tools/man/man?/*"))}
    return {name: markdown(name, text, set(sources)) for name, text in sources.items()}


def markdown(name: str, text: str, known: set[str]) -> str:
    """Convert a page of man(7), as tools/make_man.py writes it; `known`: the names of all pages."""
    title, _, number = name.rpartition(".")
    return "\n\n".join((f"# {title}({number})", *_blocks(text.splitlines(), known))) + "\n"


def _blocks(lines: list[str], known: set[str]) -> Iterator[str]:
    """Yield headings in Markdown and everything else as blocks of HTML."""
    words: list[str] = []  # words of the current paragraph or meaning
    term, kept = "", False

    def ended() -> Iterator[str]:
        nonlocal term
        text = "\n".join(words) if kept else " ".join(words)
        if term:
            yield f"<dl><dt>{term}</dt><dd>{text}</dd></dl>"
        elif words:
            yield f"<pre>{text}</pre>" if kept else f"<p>{text}</p>"
        words.clear()
        term = ""

    heads = {".SH": "##", ".SS": "###"}
    rest = iter(lines)
    for line in rest:
        macro, _, argument = line.partition(" ")
        if line.startswith('.\\"') or macro == ".TH":
            continue
        if macro in (*heads, ".PP", ".TP", ".nf", ".fi"):
            yield from ended()
            kept = macro == ".nf"
        if macro in heads:
            heading = argument.strip('"')
            yield f"{heads[macro]} {heading.capitalize() if macro == '.SH' else heading}"
        elif macro == ".TP":
            term = _inline(next(rest), known)
        elif macro not in (".PP", ".nf", ".fi"):
            words.append(_inline(line, known))
    yield from ended()


def _inline(line: str, known: set[str]) -> str:
    """Convert fonts and escaped characters to HTML, and names of pages in `known` to links."""
    closing = ""

    def token(found: re.Match[str]) -> str:
        nonlocal closing
        page, number, font, letter = found.groups()
        if page:
            name = page.replace("\\", "")
            link = f"{name}.{number}"
            return f'<a href="{link}.html">{name}({number})</a>' if link in known else f"<b>{name}</b>({number})"
        if font:
            opening = {"B": "<b>", "I": "<i>"}.get(font[-1], closing)
            closing = opening.replace("<", "</")
            return opening
        return _LETTERS[letter]

    return _TOKEN.sub(token, html.escape(line.replace("\\&", ""), quote=False))


def linked(text: str) -> str:
    """Replace links to manual pages and to pages of the root by links of the site."""
    return _LINK.sub(lambda found: f"]({found[1]}" if found[1] in ROOT_PAGES else f"](man/{found[1]}.md", text)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside docs/."""
    from mkdocs.structure.files import File  # only mkdocs calls this

    root_pages = {name: (ROOT / name).read_text().replace("](docs/", "](") for name in ROOT_PAGES}
    for name, text in {**{f"man/{name}.md": text for name, text in manual().items()}, **root_pages}.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(text: str, **_: Any) -> str:
    return linked(text)
