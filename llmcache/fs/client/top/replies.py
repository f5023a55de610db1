"""A daemon's replies as the parts of a sample, checked: root also watches mounts of others, whose daemons may tell anything.

Every function raises KeyError, TypeError, ValueError, OverflowError or AttributeError for a reply that is not what this
version of a daemon would send.
"""

from __future__ import annotations

from typing import Any

from llmcache.fs.client.top.sample import Budget, Flow, HeatFile, Layer, Loop
from llmcache.fs.engine import waits

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
        return waits.between(_waits(before["waits"][reason]) if before else None, _waits(now["waits"][reason]))

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
