"""Output of `llmcache kv list`, `show` and `prune`, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.table import Table

from llmcache.errors import printable
from llmcache.kv.prefix.store import Pruned, StoredModel
from llmcache.report import output
from llmcache.report.output import plain_table
from llmcache.units import format_size, shortened

LIST, SHOW, PRUNE = "llmcache.kv-list/1", "llmcache.kv-show/1", "llmcache.kv-prune/1"


_UNITS = {"d": 86400, "h": 3600, "min": 60, "s": 1}
LEAST_MODEL = 18  # least width of the model column; other columns are dropped for it


def show_list(directory: str, models: Sequence[StoredModel], as_json: bool) -> None:
    rows = [{key: value for key, value in asdict(model).items() if key != "described"} for model in models]
    output.show(as_json, lambda: {"schema": LIST, "directory": directory, "models": rows}, _list(directory, models))


def _list(directory: str, models: Sequence[StoredModel]) -> Iterator[str | Table]:
    yield f"{printable(directory)}: {format_size(sum(model.size_bytes for model in models))}"
    columns = {
        "fingerprint": [model.fingerprint[:8] for model in models],
        "blocks": [f"{sum(model.blocks.values()):,}" for model in models],
        "size": [format_size(model.size_bytes) for model in models],
        "longest": [f"{model.longest_tokens:,}" for model in models],
        "used": [_ago(model.used_ns_ago) for model in models],
        "restores": [f"{model.restores:,}" for model in models],
        "tokens": [f"{model.restored_tokens:,}" for model in models],
    }
    room = max(LEAST_MODEL, output.fit(columns, output.output_width(), LEAST_MODEL, ()))
    names = [shortened(printable(model.file) or "?", room) for model in models]
    if models:
        yield plain_table("model", *columns, rows=zip(names, *columns.values(), strict=True))


def show_model(model: StoredModel, as_json: bool) -> None:
    output.show(as_json, lambda: {"schema": SHOW, **asdict(model)}, _model(model))


def _model(model: StoredModel) -> Iterator[str]:
    kinds = {"kv": "whole", "part": "partial", "state": "whole states"}
    blocks = ", ".join(f"{count:,} {kinds[kind]}" for kind, count in model.blocks.items())
    yield f"fingerprint  {model.fingerprint}"
    yield f"stored       {format_size(model.size_bytes)}, blocks: {blocks or 'none'}"
    yield f"longest      prompt of {model.longest_tokens:,} tokens in whole blocks"
    yield f"used         {_ago(model.used_ns_ago)}, its least recently used block {_ago(model.unused_ns)}"
    size = format_size(model.restored_bytes)
    yield f"restored     {model.restores:,} times, {model.restored_tokens:,} tokens, {size}"
    for key, value in model.described.items():
        yield f"{printable(key):12} {printable(value if isinstance(value, str) else json.dumps(value))}"


def show_pruned(found: Pruned, as_json: bool) -> None:
    removed = f"removed {found.removed_blocks:,} blocks, {format_size(found.removed_bytes)}"
    left = f"{found.left_blocks:,} blocks left, {format_size(found.left_bytes)}"
    output.show(as_json, lambda: {"schema": PRUNE, **asdict(found)}, [f"{removed}; {left}"])


def _ago(age_ns: int) -> str:
    name = next((name for name, seconds in _UNITS.items() if seconds * 10**9 <= age_ns), "s")
    return f"{age_ns // (_UNITS[name] * 10**9)} {name} ago"
