"""Stored prompts (`llmcache kv list`, `show`, `prune`), as text for people and as JSON; both from the same dataclasses."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console

from llmcache.errors import printable
from llmcache.kv.prefix.store import Pruned, StoredModel
from llmcache.report.output import plain_table
from llmcache.units import format_duration, format_size

LIST, SHOW, PRUNE = "llmcache.kv-list/1", "llmcache.kv-show/1", "llmcache.kv-prune/1"


_UNITS = [10**9 * seconds for seconds in (1, 60, 3600, 86400)]


def show_list(directory: str, models: Sequence[StoredModel], as_json: bool) -> None:
    """Prints what is stored, a line for each model."""
    if as_json:
        rows = [{key: value for key, value in asdict(model).items() if key != "described"} for model in models]
        _print({"schema": LIST, "directory": directory, "models": rows})
        return
    total = sum(model.size_bytes for model in models)
    lines = plain_table("model", "fingerprint", "blocks", "size", "longest", "used", "restores", "tokens")
    for model in models:
        lines.add_row(
            printable(model.file) or "?",
            model.fingerprint[:8],
            f"{sum(model.blocks.values()):,}",
            format_size(model.size_bytes),
            f"{model.longest_tokens:,}",
            _ago(model.used_ns_ago),
            f"{model.restores:,}",
            f"{model.restored_tokens:,}",
        )
    console = _console()
    console.print(f"{printable(directory)}: {format_size(total)}")
    if models:
        console.print(lines)


def show_model(model: StoredModel, as_json: bool) -> None:
    """Prints what is stored of one model, and what its fingerprint stands for."""
    if as_json:
        _print({"schema": SHOW, **asdict(model)})
        return
    console = _console()
    kinds = {"kv": "whole", "part": "begun", "state": "whole states"}
    blocks = ", ".join(f"{count:,} {kinds[kind]}" for kind, count in model.blocks.items())
    console.print(f"fingerprint  {model.fingerprint}")
    console.print(f"stored       {format_size(model.size_bytes)}, blocks: {blocks or 'none'}")
    console.print(f"longest      {model.longest_tokens:,} tokens in whole blocks")
    console.print(f"used         {_ago(model.used_ns_ago)}, the oldest block {_ago(model.unused_ns)}")
    size = format_size(model.restored_bytes)
    console.print(f"restored     {model.restores:,} times, {model.restored_tokens:,} tokens, {size}")
    for key, value in model.described.items():
        console.print(f"{printable(key):12} {printable(value if isinstance(value, str) else json.dumps(value))}")


def show_pruned(found: Pruned, as_json: bool) -> None:
    """Prints what was removed."""
    if as_json:
        _print({"schema": PRUNE, **asdict(found)})
        return
    removed = f"{found.removed_blocks:,} blocks removed, {format_size(found.removed_bytes)}"
    _console().print(f"{removed}; {found.left_blocks:,} left, {format_size(found.left_bytes)}")


def _ago(age_ns: int) -> str:
    unit = max((unit for unit in _UNITS if unit <= age_ns), default=_UNITS[0])
    return f"{format_duration(age_ns // unit * unit)} ago"


def _print(document: dict[str, object]) -> None:
    print(json.dumps(document, indent=1))


def _console() -> Console:
    return Console(highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
