"""One look at a mount: its counters, what they have moved since an earlier look, and the strips that picture them.

Base units. Replies are checked: root also watches mounts of others, whose daemons may tell anything. What makes parts of a
sample of them raises KeyError, TypeError, ValueError, OverflowError or AttributeError for a reply that is not what this
version of a daemon would send. Strips tell by the shape of their characters and, where there is colour, by it too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.text import Text

SCHEMA = "llmcache.top/1"


@dataclass(frozen=True)
class Budget:
    """Who has the memory. `limit_bytes` is what pressure leaves of the budget; the daemon's own memory is beside it.

    `window_bytes`: streamed extents, and what has not been dropped yet; `other_bytes`: single pages (headers, embedding
    rows, small and written files). `free_bytes`: of the limit.
    """

    mode: str
    budget_bytes: int
    limit_bytes: int
    pinned_bytes: int
    window_bytes: int
    other_bytes: int
    free_bytes: int
    daemon_bytes: int


@dataclass(frozen=True)
class Flow:
    """Bytes that moved in `seconds`, and the waits of readers in them."""

    seconds: float
    read_bytes: int
    hit_bytes: int
    storage_read_bytes: int
    storage_written_bytes: int
    fetched_bytes: int
    useful_bytes: int
    late_bytes: int
    wasted_bytes: int
    refault_bytes: int
    late_waits: dict[str, Any]
    demand_waits: dict[str, Any]

    @property
    def hit_ratio(self) -> float | None:
        """Byte hit ratio (0..1); None if nothing was read. In steer, what is pinned counts at the end of each pass."""
        return self.hit_bytes / self.read_bytes if self.read_bytes else None

    @property
    def late_ratio(self) -> float | None:
        """Share (0..1) of the prefetched bytes that a reader had to wait for; None if none came to their end."""
        return self._of_prefetched(self.late_bytes)

    @property
    def wasted_ratio(self) -> float | None:
        """Share (0..1) of the prefetched bytes that were dropped unread; None if none came to their end."""
        return self._of_prefetched(self.wasted_bytes)

    def _of_prefetched(self, part_bytes: int) -> float | None:
        total = self.useful_bytes + self.late_bytes + self.wasted_bytes
        return part_bytes / total if total else None

    def per_s(self, size_bytes: int) -> float:
        """Bytes per second."""
        return size_bytes / self.seconds if self.seconds > 0 else 0.0

    def row(self) -> dict[str, Any]:
        """Returns it as JSON has it, with rates and ratios."""
        found = asdict(self) | {"hit_ratio": self.hit_ratio}
        found |= {"late_ratio": self.late_ratio, "wasted_ratio": self.wasted_ratio}
        for name in ("read", "storage_read", "storage_written", "fetched"):
            found[f"{name}_bytes_per_s"] = self.per_s(found[f"{name}_bytes"])
        for name in ("late", "demand"):
            for key, share in (("median_s", 0.5), ("p99_s", 0.99)):
                upper = quantile_s(found[f"{name}_waits"], share)
                found[f"{name}_waits"][key] = None if upper == float("inf") else upper
        return found


@dataclass(frozen=True)
class Loop:
    """One loop; `readers` are places in it (0..1)."""

    path: str
    size_bytes: int
    period_s: float | None
    pinned_bytes: int
    window_bytes: int
    passes: int
    guessed: bool
    readers: tuple[float, ...]


@dataclass(frozen=True)
class Layer:
    """One layer, or several in a row: bytes by where they are, seconds since one was asked for, and strips.

    `streamed_bytes` are on storage and were read lately, `cold_bytes` were not. A strip has a digit for each part of the
    layer: ninths of it that are pinned, in the window, single pages, cold. `experts`: 0 where it has none.
    """

    name: str
    tensors: int
    size_bytes: int
    pinned_bytes: int
    window_bytes: int
    pages_bytes: int
    streamed_bytes: int
    cold_bytes: int
    age_s: float | None
    cells: dict[str, str]
    experts: int = 0
    experts_kept: int = 0


@dataclass(frozen=True)
class HeatFile:
    """The layers of one file, in the order in which they are computed; of a file of no known format just one."""

    path: str
    size_bytes: int
    layers: tuple[Layer, ...]
    left_out_layers: int


@dataclass(frozen=True)
class Sample:
    """One look. `interval` is what moved since an earlier one: at least as long ago as the longest period of a loop
    that is being read, so that a part of a pass is not taken for the whole; None in the first look.
    """

    mount: str
    unix_s: float
    uptime_s: float
    budget: Budget
    total: Flow
    interval: Flow | None
    loops: tuple[Loop, ...]
    heat: tuple[HeatFile, ...]
    left_out_files: int

    def document(self) -> dict[str, Any]:
        """Returns it as JSON has it."""
        found: dict[str, Any] = {"schema": SCHEMA, **asdict(self)}
        found["total"] = self.total.row()
        found["interval"] = None if self.interval is None else self.interval.row()
        return found


_MOST = 1e12  # seconds: what is shown in nanoseconds stays a number
STRIPS = {"pinned", "window", "pages", "cold"}
_DIGITS = set("0123456789")


def budget_of(stats: dict[str, Any]) -> Budget:
    """Who has the memory, by the counters of a mount."""
    amounts = {name: _whole(stats[f"{name}_bytes"]) for name in ("budget", "limit", "pinned", "window", "daemon")}
    pages = min(_whole(stats["pages_bytes"]), amounts["window"])
    return Budget(
        mode=_text(stats["mode"]),
        budget_bytes=amounts["budget"],
        limit_bytes=amounts["limit"],
        pinned_bytes=amounts["pinned"],
        window_bytes=amounts["window"] - pages,
        other_bytes=pages,
        free_bytes=max(0, amounts["limit"] - _whole(stats["resident_bytes"])),
        daemon_bytes=amounts["daemon"],
    )


def flow_between(before: dict[str, Any] | None, now: dict[str, Any]) -> Flow:
    """What moved between two readings of the counters; since the mount began without `before`."""

    def moved(key: str, within: str | None = None) -> int:
        new, old = (now, before) if within is None else (now[within], before and before[within])
        return _whole(new[key]) - (_whole(old[key]) if old else 0)

    def waited(reason: str) -> dict[str, Any]:
        return waits_between(_waits(before["waits"][reason]) if before else None, _waits(now["waits"][reason]))

    return Flow(
        seconds=_real(now["uptime_s"]) - (_real(before["uptime_s"]) if before else 0.0),
        read_bytes=moved("read_bytes"),
        hit_bytes=moved("hit_bytes"),
        storage_read_bytes=moved("backing_read_bytes"),
        storage_written_bytes=moved("backing_write_bytes"),
        fetched_bytes=moved("stored_bytes"),
        useful_bytes=moved("useful_bytes", "prefetch"),
        late_bytes=moved("late_bytes", "prefetch"),
        wasted_bytes=moved("wasted_bytes", "prefetch"),
        refault_bytes=moved("refault_bytes"),
        late_waits=waited("late"),
        demand_waits=waited("demand"),
    )


def loops_of(stats: dict[str, Any]) -> tuple[Loop, ...]:
    """All loops: those that are read first, then the largest."""
    found = [
        Loop(
            path=_text(file["path"]),
            size_bytes=_whole(loop["bytes"]),
            period_s=None if loop["period_s"] is None else _real(loop["period_s"]),
            pinned_bytes=_whole(loop["pinned_bytes"]),
            window_bytes=_whole(loop["window_bytes"]),
            passes=_whole(loop["passes"]),
            guessed=bool(loop["guessed"]),
            readers=tuple(map(_real, loop["readers"])),
        )
        for file in stats["files"]
        for loop in file["loops"]
    ]
    return tuple(sorted(found, key=lambda loop: (not loop.readers, -loop.size_bytes, loop.path)))


def heat_of(heat: dict[str, Any]) -> tuple[HeatFile, ...]:
    """The reply to {"op": "heat"}; the file that was read last comes first."""
    found = [
        HeatFile(
            path=_text(file["path"]),
            size_bytes=_whole(file["size_bytes"]),
            layers=tuple(map(_layer, file["layers"])),
            left_out_layers=_whole(file["left_out_layers"]),
        )
        for file in heat["files"]
        if file["layers"]
    ]
    return tuple(sorted(found, key=lambda file: (_age(file), file.path)))


def waits_between(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """Returns the waits of `now` that `before` (of the same mount, earlier; None: nothing) does not have."""
    if before is None:
        return now
    counts = [count - old for count, old in zip(now["counts"], before["counts"], strict=True)]
    return {**now, "counts": counts, "sum_s": now["sum_s"] - before["sum_s"]}


def quantile_s(waits: dict[str, Any], share: float) -> float | None:
    """Returns seconds that at least `share` (0..1) of the waits did not exceed; None without any, infinity beyond 3 s.

    The upper bound of a class, not an estimate within it.
    """
    counts: Sequence[int] = waits["counts"]
    total, passed = sum(counts), 0
    for bound, count in zip([*waits["bounds_s"], float("inf")], counts, strict=True):
        passed += count
        if count and passed >= share * total:
            return float(bound)
    return None


def _age(file: HeatFile) -> float:
    """Seconds since the file was asked for, coarse, so that files that are read now keep their places."""
    ages = [layer.age_s for layer in file.layers if layer.age_s is not None]
    return min(ages) // 10 if ages else float("inf")


def _layer(facts: dict[str, Any]) -> Layer:
    cells = {kind: _text(strip) for kind, strip in facts["cells"].items()}
    if set(cells) != STRIPS or not all(strip and set(strip) <= _DIGITS for strip in cells.values()):
        raise ValueError("cells")
    amounts = {f"{name}_bytes": _whole(facts[f"{name}_bytes"]) for name in ("pinned", "window", "pages", "streamed", "cold")}
    return Layer(
        name=_text(facts["name"]),
        tensors=_whole(facts["tensors"]),
        size_bytes=_whole(facts["bytes"]),
        age_s=None if facts["age_s"] is None else _real(facts["age_s"]),
        cells=cells,
        experts=_whole((facts["experts"] or {}).get("count", 0)),
        experts_kept=_whole((facts["experts"] or {}).get("kept", 0)),
        **amounts,
    )


def _waits(facts: dict[str, Any]) -> dict[str, Any]:
    bounds, counts = list(map(_real, facts["bounds_s"])), list(map(_whole, facts["counts"]))
    if len(counts) != len(bounds) + 1 or bounds != sorted(bounds):
        raise ValueError("waits")
    return {"bounds_s": bounds, "counts": counts, "sum_s": _real(facts["sum_s"])}


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ValueError(f"{type(value).__name__} for a number of bytes")
    return value


def _real(value: object) -> float:
    if type(value) not in (int, float) or not 0 <= value <= _MOST:  # type: ignore[operator]
        raise ValueError(f"{type(value).__name__} for seconds")
    return float(value)  # type: ignore[arg-type]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} for a text")
    return value


PINNED, PARTLY, LITTLE, WINDOW, PAGES, STREAMED, COLD, FREE = "█", "▓", "▒", "▸", "▪", "░", "·", "·"
STYLES = {PINNED: "green", PARTLY: "green", LITTLE: "green", WINDOW: "yellow", PAGES: "cyan", STREAMED: "", COLD: "dim"}
_NINTHS = 9
_PINNED_FROM, _PARTLY_FROM = 7, 4


def strip_bar(parts: Iterable[tuple[int, str]], total: int, width: int) -> Text:
    """A bar of `width` cells for amounts of `total`, each in its character; the rest is free."""
    text = Text()
    done, cells = 0, 0
    for amount, character in parts:
        done += amount
        end = min(width, round(width * done / total)) if total else 0
        text.append(character * (end - cells), STYLES[character])
        cells = max(cells, end)
    return text.append(FREE * (width - cells), STYLES[COLD])


def readers_strip(places: Iterable[float], width: int) -> Text:
    """A line with a mark where each reader is (0..1)."""
    cells = ["─"] * width
    for place in places:
        cells[max(0, min(width - 1, int(place * width)))] = "●"
    text = Text("".join(cells), "dim")
    for at, cell in enumerate(cells):
        if cell == "●":
            text.stylize("not dim yellow", at, at + 1)
    return text


def heat_strip(layer: Layer, width: int) -> Text:
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
        experts=sum(layer.experts for layer in layers),
        experts_kept=sum(layer.experts_kept for layer in layers),
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
