"""The --json documents of mount commands, whose keys the manual must explain, and the messages of `mount`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmcache.mount.client import control, mountpoint
from tests.mount.conftest import Mounted, Mounter
from tests.mount.live import llmcache, run_json, wait_for
from tests.unit.command_parts import keys

ROOT = Path(__file__).parents[2]


def documented(page: str, *words: str | Path, schema: str = "") -> dict[str, Any]:
    """Return the document that `llmcache WORDS --json` prints; the text of `page` must explain all its keys."""
    document = run_json(*words)
    assert document["schema"] == f"llmcache.{schema or page}/1"
    words_of_page = set(re.findall(r"[a-z0-9_]+", (ROOT / f"llmcache/cli/{page}.txt").read_text()))
    assert sorted({*keys(document)} - words_of_page) == []
    return document


@pytest.mark.mount
def test_the_manual_explains_every_json_key(mount: Mounter, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "hot.bin").write_bytes(os.urandom(1 << 20))
    mounted = mount("--mode", "arena", "--access-log", str(tmp_path / "log.parquet"), "--metrics", "127.0.0.1:0")
    (mounted.point / "hot.bin").read_bytes()
    assert documented("stats", "stats", mounted.point)["mode"] == "arena"
    documented("top", "top", mounted.point, "--once")
    assert row_of(mounted, documented("stats", "stats", schema="mounts"))["budget_bytes"] == 32 << 20
    assert documented("resize", "resize", mounted.point, "48Mi")["budget_bytes"] == 48 << 20
    assert documented("warmup", "warmup", mounted.point, "hot.bin")["files"]
    assert documented("evict", "evict", mounted.point)["groups"]
    pid = mounted.pid
    document = documented("umount", "umount", mounted.point)
    facts = {"mount": str(mounted.point), "mounted": True, "pid": pid, "killed": False}
    assert document == {"schema": document["schema"], **facts}


def row_of(mounted: Mounted, document: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a mount in a list of mounts."""
    (row,) = (row for row in document["mounts"] if row["mount"] == str(mounted.point))
    return dict(row)


@pytest.mark.mount
def test_stats_without_a_mount_lists_all_mounts(mount: Mounter, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted = mount("--mode", "arena")
    row = row_of(mounted, run_json("stats"))
    assert (row["source"], row["pid"], row["mode"], row["problem"]) == (str(mounted.source), mounted.pid, "arena", None)
    os.kill(mounted.pid, signal.SIGKILL)
    wait_for(lambda: control.daemon_pid(str(mounted.point)) is None, "the daemon is dead")
    dead = row_of(mounted, run_json("stats"))
    assert "dead mount" in dead["problem"] and dead["budget_bytes"] is None
    shown = llmcache("stats")
    # other tests' mounts may be listed, too
    (line,) = (line for line in shown.stdout.splitlines() if line.endswith(f"  {mounted.point}"))
    assert shown.returncode == 0 and "no answer" in line and f"{mounted.point} is a dead mount" in shown.stderr
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    assert str(mounted.point) not in {entry.point for entry in mountpoint.of_user()}, "a mount of another user"


@pytest.mark.mount
def test_the_document_of_mount_names_the_daemon(mount: Mounter) -> None:
    own = mount.place()
    document = documented("mount", "mount", own.source, own.point, "--cache", "32Mi", "--mode", "arena")
    assert isinstance(document.pop("helper_pid"), int)
    assert document == {
        "schema": "llmcache.mount/1", "pid": own.pid, "source": str(own.source), "mount": str(own.point),
        "mode": "arena", "not_in_place": None, "budget_bytes": 32 << 20, "budget_origin": "--cache", "log": own.files.log,
        "writable": ["*.kv"], "links_outside": 0, "allow_other": os.geteuid() == 0,
    }  # fmt: skip


@pytest.mark.mount
def test_mount_warns_of_programs_that_have_the_files_open(mount: Mounter) -> None:
    own = mount.place()
    path = own.source / "model.bin"
    path.write_bytes(bytes(4096))
    opens = "import ctypes, os, sys; file = os.open(sys.argv[1], os.O_RDONLY)\n"
    maps = "map = ctypes.CDLL(None).mmap; map(None, ctypes.c_size_t(4096), 1, 1, file, ctypes.c_long(0)); os.close(file)\n"
    waits = "print(flush=True); sys.stdin.read()"
    for code in (opens, opens + maps):
        command = [sys.executable, "-c", code + waits, str(path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
            assert client.stdin is not None and client.stdout is not None
            client.stdout.readline()
            done = llmcache("mount", own.source, own.point, "--cache", "32Mi", "--mode", "arena")
            assert done.returncode == 0 and f"({client.pid}); mode inplace steers open files" in done.stderr, done.stderr
            assert llmcache("umount", own.point).returncode == 0
            client.stdin.close()
    done = llmcache("mount", own.source, own.point, "--cache", "32Mi", "--mode", "arena")
    assert done.returncode == 0 and not done.stderr
