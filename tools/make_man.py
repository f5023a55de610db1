#!/usr/bin/env python3
"""Writes the manual pages below tools/man from the commands; --check says what differs instead (exit code 1).

They are installed with the package; `man -M tools/man llmcache-trace` shows them as they lie here.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.pop("COLUMNS", None)

from tools.manual.pages import all_pages  # noqa: E402 - found through the line above

TARGET = ROOT / "tools" / "man"


def made() -> dict[str, str]:
    """Returns every page's source by its path below tools/man."""
    return {f"man{page.number}/{page.file}": page.text() for page in all_pages()}


def main() -> int:
    """Write or compare; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, say what differs")
    check = parser.parse_args().check
    pages = made()
    there = {path.relative_to(TARGET).as_posix(): path.read_text() for path in TARGET.glob("man?/*")}
    differing = sorted(file for file in {*pages, *there} if pages.get(file) != there.get(file))
    for file in differing:
        print(file)
        if check:
            continue
        if file in pages:
            (TARGET / file).parent.mkdir(parents=True, exist_ok=True)
            (TARGET / file).write_text(pages[file])
        else:
            (TARGET / file).unlink()
    return 1 if check and differing else 0


if __name__ == "__main__":
    sys.exit(main())
