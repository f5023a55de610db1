"""`llmcache config --show`: every setting with its origin, as a table or JSON."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from llmcache.fs.client.settings import DEFAULT, NAMES, Setting

SCHEMA = "llmcache.config/1"


def show(settings: dict[str, Setting], as_json: bool) -> None:
    """Prints `settings` on stdout."""
    if as_json:
        print(json.dumps(document(settings), indent=1))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("setting", "value", "origin"):
        table.add_column(name, overflow="fold")
    for name, setting in settings.items():
        origin = f"{setting.origin} ({setting.where})" if setting.where else setting.origin
        table.add_row(name, _text(setting.value), origin, style="dim" if setting.origin == DEFAULT else None)
    Console(highlight=False, markup=False).print(table)


def document(settings: dict[str, Setting]) -> dict[str, Any]:
    """The settings as JSON-ready values."""
    entries = [
        {"name": name, "value": setting.value, "origin": setting.origin, "where": setting.where or None}
        | {"variable": NAMES[name].variable}
        for name, setting in settings.items()
    ]
    return {"schema": SCHEMA, "settings": entries}


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) if value else "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)
