"""Whatever a log of strace or a CSV file turns into: it is read, or refused as bad data; never a crash."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcache.errors import DataError
from llmcache.trace.formats import open_trace
from tests.conftest import examples
from tests.unit.test_trace_strace import CASES

LOG = "".join(f"{at}.5 {line}\n" for at, line in enumerate("".join(log for log, _ in CASES.values()).splitlines(), 10**9))
CSV = "file,offset,length,op,time\n" + "".join(f"/m{at},{at * 4096},{at + 1},read,{at}.25\n" for at in range(40))
FORMATS = {".strace": LOG, ".csv": CSV}


def damaged(text: str, source: random.Random) -> str:
    """`text` with some characters, words or lines lost, repeated, exchanged or replaced."""
    for _ in range(source.randint(1, 12)):
        start = source.randrange(len(text))
        end = min(len(text), start + source.choice([1, 2, 5, 30, 200]))
        other = source.randrange(len(text))
        piece = source.choice(
            ["", text[start:end] * 2, text[other : other + end - start], '"', ", ", "[", "-1", "9" * 30, "\0"]
        )
        text = text[:start] + piece + text[end:] or " "
    return text


@pytest.mark.parametrize("ending", FORMATS)
@settings(max_examples=examples(150), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_damage_is_refused_or_read_around(ending: str, seed: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"t{ending}"
        path.write_text(damaged(FORMATS[ending], random.Random(seed)))
        try:
            with open_trace(path) as reader:
                assert reader.read().accesses > 0
        except DataError as refusal:
            assert refusal.hint and ":" in refusal.message
