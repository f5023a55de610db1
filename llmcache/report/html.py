"""HTML pages of one file, without external resources or scripts.

Every block escapes its text. Images are embedded in base64 on a light background, also in dark mode. A content security
policy in the head blocks any other resource.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Protocol
from urllib.parse import quote

from llmcache import __version__
from llmcache.errors import printable

LONG = 24  # letters from which a cell may be broken anywhere: paths and names, which have no spaces
_MIME = {"svg": "image/svg+xml", "png": "image/png"}


def _text(text: str) -> str:
    return escape(printable(text))


class HtmlBlock(Protocol):
    """A block of a section."""

    def html(self) -> str:
        """Return the block as HTML."""


@dataclass(frozen=True)
class Text:
    """A paragraph. `note`: small and muted."""

    text: str
    note: bool = False

    def html(self) -> str:
        return f'<p class="note">{_text(self.text)}</p>' if self.note else f"<p>{_text(self.text)}</p>"


@dataclass(frozen=True)
class Facts:
    """Names with values: the conditions of a measurement or a model."""

    facts: Sequence[tuple[str, str]]

    def html(self) -> str:
        rows = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in self.facts)
        return f"<dl>{rows}</dl>"


@dataclass(frozen=True)
class Badge:
    """A table cell with a verdict: a mark and a word. `kind`: good, fair or bad."""

    text: str
    kind: str

    def html(self) -> str:
        mark = {"good": "✓", "fair": "◐", "bad": "✗"}[self.kind]
        return f'<span class="badge {self.kind}"><span aria-hidden="true">{mark}</span> {_text(self.text)}</span>'


@dataclass(frozen=True)
class Link:
    """A table cell that links to another page in the same directory."""

    text: str
    file: str

    def html(self) -> str:
        return f'<a href="{quote(self.file)}">{_text(self.text)}</a>'


Cell = str | int | float | Badge | Link


@dataclass(frozen=True)
class Table:
    """A table; numbers are aligned right, with `digits` decimals."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    digits: int = 3

    def html(self) -> str:
        head = "".join(f'<th scope="col">{_text(column)}</th>' for column in self.columns)
        body = "".join(f"<tr>{self._row(row)}</tr>" for row in self.rows)
        caption = _text(self.caption)
        return (
            f'<div class="wide" role="region" tabindex="0" aria-label="{caption}"><table><caption>{caption}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )

    def _row(self, cells: Sequence[Cell]) -> str:
        if len(cells) != len(self.columns):
            raise ValueError(f"rows: a row has {len(cells)} cells, but the table has {len(self.columns)} columns")
        return "".join(self._cell(cell, place) for place, cell in enumerate(cells))

    def _cell(self, cell: Cell, place: int) -> str:
        if isinstance(cell, Badge | Link):
            return f"<td>{cell.html()}</td>"
        if isinstance(cell, str):
            long = ' class="long"' if len(cell) > LONG else ""
            return f'<th scope="row"{long}>{_text(cell)}</th>' if place == 0 else f"<td{long}>{_text(cell)}</td>"
        text = f"{cell:,}" if isinstance(cell, int) else f"{cell:,.{self.digits}f}"
        return f'<td class="number">{text}</td>'


@dataclass(frozen=True)
class Picture:
    """An embedded image. `alt` describes its data."""

    data: bytes
    form: str
    alt: str
    caption: str

    def html(self) -> str:
        source = f"data:{_MIME[self.form]};base64,{base64.b64encode(self.data).decode()}"
        image = f'<img class="{self.form}" src="{source}" alt="{_text(self.alt)}">'
        return f"<figure>{image}<figcaption>{_text(self.caption)}</figcaption></figure>"


@dataclass(frozen=True)
class Fold:
    """Blocks that are collapsed at first."""

    summary: str
    blocks: Sequence[HtmlBlock]

    def html(self) -> str:
        inner = "".join(block.html() for block in self.blocks)
        return f"<details><summary>{_text(self.summary)}</summary>{inner}</details>"


@dataclass(frozen=True)
class Section:
    """A heading with its blocks."""

    title: str
    blocks: Sequence[HtmlBlock]

    def html(self, anchor: str) -> str:
        inner = "\n".join(block.html() for block in self.blocks)
        return f'<section id="{anchor}"><h2>{_text(self.title)}</h2>\n{inner}\n</section>'


def html_page(title: str, lead: str, sections: Sequence[Section]) -> str:
    anchors = [f"section-{number}" for number in range(1, len(sections) + 1)]
    links = "".join(
        f'<li><a href="#{anchor}">{_text(section.title)}</a></li>' for anchor, section in zip(anchors, sections, strict=True)
    )
    contents = f'<nav aria-label="Contents"><ul>{links}</ul></nav>' if len(sections) > 1 else ""
    body = "\n".join(section.html(anchor) for anchor, section in zip(anchors, sections, strict=True))
    return _PAGE.format(
        title=_text(title), lead=_text(lead), contents=contents, body=body, style=_STYLE, version=_text(__version__)
    )


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="llmcache {version}">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p class="lead">{lead}</p>
{contents}
{body}
</main>
</body>
</html>
"""

_STYLE = """
:root{--ink:#1b1d21;--muted:#5c636d;--paper:#fff;--faint:#d9dce1;--soft:#f4f5f7;--link:#0b5cad;
--good:#0b6b4f;--fair:#8a5a00;--bad:#a4262c}
@media (prefers-color-scheme:dark){:root{--ink:#e8eaee;--muted:#a3abb6;--paper:#15171a;--faint:#3b4048;--soft:#1f2226;
--link:#7db7f5;--good:#5fd0a8;--fair:#f0b54a;--bad:#ff8a80}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1180px;margin:0 auto;padding:2rem 1.2rem 4rem}
h1{font-size:1.75rem;line-height:1.25;margin:0 0 .6rem}
h1,h2{overflow-wrap:anywhere}
h2{font-size:1.3rem;margin:2.6rem 0 .7rem;padding-top:.9rem;border-top:1px solid var(--faint)}
p{max-width:75ch}.lead{font-size:1.08rem}.note,figcaption{color:var(--muted);font-size:.88rem}
a{color:var(--link)}nav ul{padding-left:1.2rem;columns:2 20rem}
figure{margin:1.2rem 0}figure img{display:block;max-width:100%;height:auto}
figure img{background:#fff;border-radius:6px}
figcaption{max-width:95ch;margin-top:.4rem}
.wide{overflow-x:auto;margin:1rem 0}
table{border-collapse:collapse;font-size:.9rem;min-width:40%}
caption{text-align:left;color:var(--muted);font-size:.88rem;padding:.2rem 0 .5rem}
th,td{padding:.38rem .7rem;border-bottom:1px solid var(--faint);text-align:left;vertical-align:top}
thead th{background:var(--soft);vertical-align:bottom}tbody th{font-weight:600}
.long{overflow-wrap:anywhere;min-width:12rem}
.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.badge{white-space:nowrap;font-weight:600}
.badge.good{color:var(--good)}.badge.fair{color:var(--fair)}.badge.bad{color:var(--bad)}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(17rem,1fr));gap:.5rem 1.4rem;margin:1rem 0}
dt{color:var(--muted);font-size:.82rem}dd{margin:0;overflow-wrap:anywhere}
details{margin:.6rem 0}summary{cursor:pointer;color:var(--link)}
@media print{details>*{display:block}}
"""
