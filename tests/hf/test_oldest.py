"""Run the tests of exactness with the oldest supported transformers, which tools/_setup.sh installs separately."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OLDEST = Path(sys.prefix) / "transformers-oldest"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_oldest_transformers_passes() -> None:
    if not OLDEST.is_dir():
        pytest.skip(f"{OLDEST} does not exist: tools/test sets it up")
    pinned = (ROOT / "requirements" / "transformers-oldest.txt").read_text()
    version = re.search(r"^transformers==(\S+)$", pinned, re.MULTILINE)
    assert version
    tests = [f"tests/hf/test_{name}.py" for name in ("supported", "exact", "refused", "restore", "users")]
    # Run one family without sliding layers and one with them; the others differ only where the cache is not involved.
    # Skip tests that do not depend on transformers: policies, trees, the device, disks, settings, and handed-over
    # contexts.
    others = "qwen2 or qwen3 or mistral or gemma- or gemma2 or mha or short or mass or h2o or icecache or csd"
    independent = "disk or trees or handed or half_precision or break_even or padding_never or disturb or padded_one"
    unaffected = "settings or interrupted_save or killed or unreferenced or two_caches or spill_file or layers_without"
    expression = f"not ({others} or {independent} or {unaffected})"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests, "-k", expression]
    environment = {**os.environ, "PYTHONPATH": str(OLDEST), "LLMCACHE_REQUIRE_TIERS": "transformers"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1740)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert f"transformers {version[1]}" in done.stdout
