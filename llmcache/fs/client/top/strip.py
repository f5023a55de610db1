"""Strips and bars: characters that tell by their shape and, where there is colour, by it too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.text import Text

from llmcache.fs.client.top.sample import Layer

PINNED, PARTLY, LITTLE, WINDOW, PAGES, STREAMED, COLD, FREE = "█", "▓", "▒", "▸", "▪", "░", "·", "·"
STYLES = {PINNED: "green", PARTLY: "green", LITTLE: "green", WINDOW: "yellow", PAGES: "cyan", STREAMED: "", COLD: "dim"}
_NINTHS = 9
_PINNED_FROM, _PARTLY_FROM = 7, 4


def bar(parts: Iterable[tuple[int, str]], total: int, width: int) -> Text:
    """A bar of `width` cells for amounts of `total`, each in its character; the rest is free."""
    text = Text()
    done, cells = 0, 0
    for amount, character in parts:
        done += amount
        end = min(width, round(width * done / total)) if total else 0
        text.append(character * (end - cells), STYLES[character])
        cells = max(cells, end)
    return text.append(FREE * (width - cells), STYLES[COLD])


def readers(places: Iterable[float], width: int) -> Text:
    """A line with a mark where each reader is (0..1)."""
    cells = ["─"] * width
    for place in places:
        cells[max(0, min(width - 1, int(place * width)))] = "●"
    text = Text("".join(cells), "dim")
    for at, cell in enumerate(cells):
        if cell == "●":
            text.stylize("not dim yellow", at, at + 1)
    return text


def heat(layer: Layer, width: int) -> Text:
    """The strip of a layer, `width` cells wide."""
    cells = {kind: stretch(digits, width) for kind, digits in layer.cells.items()}
    text = Text()
    for at in range(width):
        character = _character({kind: digits[at] for kind, digits in cells.items()})
        text.append(character, STYLES[character])
    return text


def _character(ninths: dict[str, int]) -> str:
    """What a cell shows: the window, where there is some, then what most of the rest is."""
    if ninths["window"]:
        return WINDOW
    if ninths["pinned"]:
        of = ninths["pinned"]
        return PINNED if of >= _PINNED_FROM else PARTLY if of >= _PARTLY_FROM else LITTLE
    if ninths["pages"]:
        return PAGES
    return COLD if ninths["cold"] > _NINTHS // 2 else STREAMED


def stretch(digits: str, width: int) -> list[int]:
    """The digits of a strip, as `width` of them: each the largest of those that it covers."""
    found = []
    for cell in range(width):
        low, high = cell * len(digits) // width, -(-(cell + 1) * len(digits) // width)
        found.append(max(map(int, digits[low : max(high, low + 1)])))
    return found


def merge(layers: Sequence[Layer]) -> Layer:
    """Neighbouring layers as one, named after the first and the last; a cell is the largest share that it covers."""
    if len(layers) == 1:
        return layers[0]
    ages = [layer.age_s for layer in layers if layer.age_s is not None]
    return Layer(
        name=f"{layers[0].name} – {layers[-1].name}",
        tensors=sum(layer.tensors for layer in layers),
        size_bytes=sum(layer.size_bytes for layer in layers),
        pinned_bytes=sum(layer.pinned_bytes for layer in layers),
        window_bytes=sum(layer.window_bytes for layer in layers),
        pages_bytes=sum(layer.pages_bytes for layer in layers),
        streamed_bytes=sum(layer.streamed_bytes for layer in layers),
        cold_bytes=sum(layer.cold_bytes for layer in layers),
        age_s=min(ages, default=None),
        cells={kind: _joined(layers, kind) for kind in layers[0].cells},
    )


def _joined(layers: Sequence[Layer], kind: str) -> str:
    """The strips one after the other, each as long as its layer: as many cells as one has, each the mean of its part."""
    count = len(layers[0].cells[kind])
    total = sum(layer.size_bytes for layer in layers) or 1
    sums = [0.0] * count
    begin = 0.0
    for layer in layers:
        step = layer.size_bytes / total  # in cells of the joined strip, for one cell of the layer's
        for digit in map(int, layer.cells[kind]):
            _spread(sums, begin, begin + step, digit)
            begin += step
    return "".join(str(min(_NINTHS, -(-round(1e6 * value) // 1_000_000))) for value in sums)


def _spread(sums: list[float], begin: float, end: float, digit: int) -> None:
    """Adds `digit` to the cells between `begin` and `end`, each by the part of it that they cover."""
    for cell in range(int(begin), min(len(sums), int(end) + 1)):
        sums[cell] += digit * max(0.0, min(end, cell + 1) - max(begin, cell))


def fold(layers: Sequence[Layer], rows: int) -> list[Layer]:
    """At most `rows` rows for all layers: neighbours are merged to rows of about the same size."""
    if len(layers) <= rows:
        return list(layers)
    total = sum(layer.size_bytes for layer in layers) or 1
    found: list[list[Layer]] = [[] for _ in range(rows)]
    done = 0
    for layer in layers:
        middle = done + layer.size_bytes / 2
        found[min(rows - 1, int(rows * middle / total))].append(layer)
        done += layer.size_bytes
    return [merge(part) for part in found if part]
