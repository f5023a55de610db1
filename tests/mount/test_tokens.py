"""`llmcache tokens` on a mount observes all its clients, and includes the reads of its daemon."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mount.conftest import Mounter
from tests.mount.live import llmcache
from tools.bench.runner import client
from tools.bench.sides import environment
from tools.make_model import main as make_model

pytestmark = pytest.mark.bpf
PASSES = 10


@pytest.mark.parametrize("mode", ["steer", "arena", "inplace"])
def test_clients_of_a_mount_are_observed(mode: str, mount: Mounter, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    make_model([str(source / "model.gguf"), "--size", "40M"])
    mounted = mount("--mode", mode, "--cache", "16Mi", source=source)
    path = mounted.point / "model.gguf" if mode != "inplace" else source / "model.gguf"
    lines = tmp_path / "lines"
    observing = [sys.executable, "-m", "llmcache", "tokens", "--json", "-o", str(lines), str(mounted.point)]
    with subprocess.Popen(observing, env=environment(), stderr=subprocess.PIPE, text=True) as tokens:
        command = client("tensor_reader", path, PASSES, "--pause", 0.3, "--settle", 4)
        try:
            subprocess.run(command, env=environment(), stdout=subprocess.DEVNULL, check=True, timeout=120)
        finally:
            tokens.terminate()
            errors = tokens.communicate(timeout=60)[1]
    assert tokens.returncode == 143, errors
    passes = [json.loads(line) for line in lines.read_text().splitlines()]
    summary = passes.pop()
    assert len(passes) == PASSES
    assert {one["model"] for one in passes} == {str(path)}
    assert summary["tokens"] + summary["prefill_passes"] == PASSES
    if mode == "steer":  # the daemon reads for the clients
        assert sum(one["read_bytes"] for one in passes) > 0


def test_a_mount_that_has_ended_is_refused(mount: Mounter, tmp_path: Path) -> None:
    mounted = mount()
    assert llmcache("umount", mounted.point).returncode == 0
    done = llmcache("tokens", mounted.point)
    assert done.returncode == 4
    assert "no llmcachefs is mounted" in done.stderr
