"""The profile of a machine (`llmcache kv profile`), as text for people and as JSON; both from the same dataclass."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from llmcache.kv.planning.profile import SCHEMA, KnownProfile
from llmcache.units import format_duration, format_rate, format_size


def show(found: KnownProfile, as_json: bool) -> None:
    """Prints `found` on stdout."""
    if as_json:
        print(json.dumps(document(found), indent=1))
        return
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for line in lines(found):
        console.print(line)
    console.print(table(found))


def lines(found: KnownProfile) -> Iterator[str]:
    """What was measured, when, and where the profile is kept."""
    profile = found.profile
    yield f"machine     {profile.key.processor}, {profile.key.processors} processors, Linux {profile.key.kernel}"
    yield f"storage     {profile.directory} (device {profile.key.device}, {profile.key.filesystem})"
    yield f"measured    {age_text(found)}, in {profile.seconds:.1f} s"
    yield f"kept in     {found.file}" if found.file else "kept in     nowhere: the cache directory cannot be written to"
    if profile.key.in_memory:
        yield f"note        {profile.key.filesystem} is memory: these are no speeds of storage"
    if not profile.storage.direct:
        yield "note        no O_DIRECT here: the page cache may have answered in place of the disk"


def age_text(found: KnownProfile) -> str:
    """Returns how old the measurement is, in words."""
    if not found.cached:
        return "now"
    return f"{format_duration(round(found.age_s) * 10**9)} ago (cached; --force measures again)"


def table(found: KnownProfile) -> Table:
    """The speeds, one row each, with how each came about."""
    host, storage = found.profile.host, found.profile.storage
    page = format_size(storage.page_bytes)
    rows = (
        ("f_c", "keys scored by the processors", format_rate(host.score_bytes_per_s), "measured"),
        ("f_s", "keys scored by the device", format_rate(storage.device_bytes_per_s), "emulated"),
        ("f_c / f_s", "beta by the rule", f"{beta(found):.3g}", "follows"),
        ("link", "pages from device to host", format_rate(storage.link_bytes_per_s), "emulated"),
        ("command", "fetching one page", format_duration(storage.command_ns), "emulated"),
        ("disk, in sequence", "reads of 1 MiB", format_rate(storage.sequential_bytes_per_s), "measured"),
        ("disk, pages", f"scattered reads of {page}", format_rate(storage.random_bytes_per_s), "measured"),
        ("memory", "reading, all processors", format_rate(host.memory_bytes_per_s), "measured"),
        ("computing", "products of float32", f"{host.flops / 1e9:.0f} GFLOP/s", "measured"),
    )
    made = Table()
    for heading in ("", "what", "speed", "kind"):
        made.add_column(heading, justify="right" if heading == "speed" else "left")
    for row in rows:
        made.add_row(*row)
    return made


def beta(found: KnownProfile) -> float:
    """Returns f_c / f_s. Source: hillinfer.txt, section 3.3, equation (1)."""
    return found.profile.host.score_bytes_per_s / found.profile.storage.device_bytes_per_s


def document(found: KnownProfile) -> dict[str, Any]:
    """`found` as JSON-ready values: bytes, seconds, bytes per second; ns where the name says so."""
    told = found.profile.to_json()
    emulated = ["device_bytes_per_s", "link_bytes_per_s", "command_ns"]
    return {
        "schema": SCHEMA,
        "kind": "measured",
        "emulated": emulated,
        "cached": found.cached,
        "age_s": found.age_s,
        "file": str(found.file) if found.file else None,
        "beta": beta(found),
        **{name: value for name, value in told.items() if name != "schema"},
    }
