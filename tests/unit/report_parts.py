"""Helpers of the report tests: an HTML parser, and a trace of a model, a tokenizer and a write loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
from matplotlib.figure import Figure

from llmcache.trace.record import MAP, READ, WRITE, Provenance, Trace, TraceFile

VOID = {"meta", "img", "br"}
MODEL, TOKENIZER, COPY = "/models/m.gguf", "/models/tok <1> & $x^{$.json", "/cache/copy.bin"


@pytest.fixture(scope="module")
def unlaid() -> Iterator[None]:
    """Draw figures without the slow layout step, which tests/e2e/test_wheel.py runs."""
    save = Figure.savefig

    def as_it_is(figure: Figure, *args: Any, **options: Any) -> None:
        figure.set_layout_engine("none")
        save(figure, *args, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Figure, "savefig", as_it_is)
        yield


class Page(HTMLParser):
    """Parses a page; raises AssertionError if tags are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.images: list[dict[str, str | None]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag == "img":
            self.images.append(dict(attrs))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self._open[-1:] != ["style"]:
            self.text += data

    def resources(self) -> list[str]:
        """Return every URL that a browser would load or link to."""
        names = {"src", "href", "srcset", "data", "action", "poster"}
        return [value for _, name, value in self.attributes if name in names]


def check_alone(page: Page, source: str) -> None:
    """Assert that the page loads no external resource and runs no script."""
    assert all(found.startswith(("data:image/", "#")) for found in page.resources())
    assert not page.tags["script"] and not page.tags["link"] and not page.tags["iframe"]
    assert not any(name.startswith("on") for _, name, _ in page.attributes)
    assert "@import" not in source and "url(" not in source
    assert all(image.get("alt") for image in page.images)


def recorded(lost: int = 0) -> Trace:
    """Return a trace: a model of 1000 blocks mapped five times, a tokenizer read often, a copy written three times."""
    rows: list[tuple[int, int, int, int]] = []
    for token in range(5):
        rows += [(0, first, 50, MAP) for first in range(0, 1000, 50)]
        rows += [(1, (7 * touch) % 20, 1, READ) for touch in range(40)]
        if token % 2 == 0:
            rows += [(2, first, 50, WRITE) for first in range(0, 400, 50)]
    file, first, count, op = zip(*rows, strict=True)
    files = [TraceFile(0, MODEL, 1, 10, 0, 4096000), TraceFile(1, TOKENIZER, 1, 11, 0, 0), TraceFile(2, COPY, 1, 12, 0, 0)]
    known = Provenance("synthetic", clock="invented", lost_events=lost, command="run <it>")
    t_ns = [10**9 + number * 10**7 for number in range(len(rows))]
    return Trace.build(t_ns, file, first, count, op, files=files, provenance=known)
