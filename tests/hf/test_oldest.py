"""The tests of exactness with the oldest transformers that is supported: tools/_setup.sh puts it beside the environment."""

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
def test_the_oldest_transformers_does_the_same() -> None:
    if not OLDEST.is_dir():
        pytest.skip(f"{OLDEST} is not there: tools/test sets it up")
    pinned = (ROOT / "requirements" / "transformers-oldest.txt").read_text()
    version = re.search(r"^transformers==(\S+)$", pinned, re.MULTILINE)
    assert version
    tests = [f"tests/hf/test_{name}.py" for name in ("supported", "exact", "refused", "restore", "users")]
    # One family without sliding layers and one with them: the others differ in what the cache does not see. Left out is
    # what transformers has no part in: policies, trees, the device, disks, settings, and contexts that are handed over.
    others = "qwen2 or qwen3 or mistral or gemma- or gemma2 or mha or short or mass or h2o or icecache or csd or emulated"
    alone = "disk or trees or handed or half_precision or break_even or padding_never or chosen_as or disturb or padded_one"
    same = "settings or broken_off_leaves or killed or nobody or two_caches or spill_file or looking_ahead or layers_without"
    wanted = f"not ({others} or {alone} or {same})"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests, "-k", wanted]
    environment = {**os.environ, "PYTHONPATH": str(OLDEST), "LLMCACHE_REQUIRE_TIERS": "transformers"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1740)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert f"transformers {version[1]}" in done.stdout
