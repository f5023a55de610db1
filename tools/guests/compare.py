"""The comparison with MGLRU: runs cells.py in a guest, and reports the bytes from storage per pass of each side."""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmcache.units import format_size
from tools.bench.results import markdown, write

from .images import Guest, kernel_version
from .machine import Machine, Settings, booted
from .nightly import commit

CELLS_SECONDS = 6 * 3600


def compare(guest: Guest, settings: Settings, words: list[str], file: Path | None) -> int:
    """Measure all cells, print a table, and return 1 if a client failed; `words` are arguments of cells.py."""
    with booted(guest, settings) as machine:
        document: dict[str, Any] = {
            "schema": "llmcache.mglru/1",
            "commit": commit(),
            "guest": guest.name,
            "system": guest.system,
            "kernel": kernel_version(guest),
            "date": datetime.date.today().isoformat(),
            "accelerator": machine.accelerator,
            "memory_bytes": settings.memory << 20,
            "cells": [],
        }
        for cell in measured(machine, words):
            document["cells"].append(cell)
            print(table(document), flush=True)
            if file:
                write(file, document)
    return 1 if any(cell["problems"] for cell in document["cells"]) else 0


def measured(machine: Machine, words: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the results of cells.py as it prints them."""
    command = machine.command(["python3", "-m", "tools.guests.cells", *words], CELLS_SECONDS)
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        raise machine.failure(f"ends the comparison with status {process.returncode}")


def table(document: dict[str, Any]) -> str:
    """Return the results in Markdown: bytes from storage per pass or token, and each mode relative to the page cache."""
    rows = []
    for cell in document["cells"]:
        read = cell["storage_bytes"]
        plain = min(size for side, size in read.items() if side.startswith("kernel"))
        sizes = [read[side] for side in ("inplace", "steer")]
        modes = [f"{format_size(size)} ({size / plain:.2f})" if plain else format_size(size) for size in sizes]
        mglru = {True: "on", False: "off", None: "none"}[cell["mglru"]]
        rows.append([cell["cell"], mglru, format_size(plain), *modes])
    head = ["cell", "MGLRU", "page cache", "inplace", "steer"]
    return markdown(head, rows, (0, 1))
