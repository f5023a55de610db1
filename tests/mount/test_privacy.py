"""What other users can see of a daemon: they cannot read its files, and its log names no model."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmcache.mount.client import control
from tests.mount.conftest import Mounter
from tests.mount.live import MIB, llmcache, random_file, wait_for

SECRET = "secret-model"


@pytest.fixture
def open_umask() -> Iterator[None]:
    """Set the umask of this process and its children to 0."""
    before = os.umask(0)
    yield
    os.umask(before)


def test_files_of_a_mount_are_closed_to_others(mount: Mounter, open_umask: None, tmp_path: Path) -> None:
    mounted = mount("--access-log", str(tmp_path / "log.parquet"))
    paths = [mounted.files.socket, mounted.files.info, mounted.files.lock, mounted.files.log]
    paths += map(str, tmp_path.glob("new-*-log.parquet*"))
    assert len(paths) == 5
    for path in paths:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600, path
    assert stat.S_IMODE(os.stat(os.path.dirname(mounted.files.socket)).st_mode) == 0o700
    (mounted.point / "spill.kv").write_bytes(b"x")
    assert stat.S_IMODE((mounted.source / "spill.kv").stat().st_mode) == 0o666  # with the mode that its creator chose
    assert llmcache("umount", mounted.point).returncode == 0
    assert stat.S_IMODE((tmp_path / "log.parquet").stat().st_mode) == 0o600


def test_files_of_clients_ignore_the_umask_of_the_daemon(mount: Mounter) -> None:
    before = os.umask(0o077)
    try:
        mounted = mount()
        os.umask(0o002)
        (mounted.point / "spill.kv").write_bytes(b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((mounted.source / "spill.kv").stat().st_mode) == 0o664


def reply_to(files: control.ControlFiles, line: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(files.socket)
        client.sendall(line)
        return client.makefile("rb").readline()


def test_a_log_names_no_model(mount: Mounter, mode: str, tmp_path: Path) -> None:
    source, log = tmp_path / SECRET, tmp_path / "daemon.log"
    source.mkdir()
    header = json.dumps({f"{SECRET}.weight": {"dtype": SECRET, "shape": [1], "data_offsets": [0, 1]}}).encode()
    damaged = struct.pack("<Q", len(header)) + header + bytes(5 * MIB)
    (source / f"{SECRET}-damaged.safetensors").write_bytes(damaged)
    (source / f"{SECRET}-cut.gguf").write_bytes(f"GGUF{SECRET}".encode() + bytes(5 * MIB))
    random_file(source / f"{SECRET}.bin", 8 * MIB)
    (source / f"{SECRET}-link").symlink_to(f"/nowhere/{SECRET}")
    mounted = mount("--mode", mode, "--pin", f"{SECRET}-none*", "--pin", f"{SECRET}.bin", "--log", str(log), source=source)
    with (mounted.point / f"{SECRET}.bin").open("rb") as reader:
        assert reader.read(MIB)
        os.truncate(source / f"{SECRET}.bin", 3 * MIB)
        for _replaced in range(2):
            random_file(source / "new", 8 * MIB)
            (source / "new").rename(source / f"{SECRET}.bin")
            assert len((mounted.point / f"{SECRET}.bin").read_bytes()) == 8 * MIB
        assert reader.read(MIB)
    for path in mounted.point.iterdir():
        if not path.is_symlink():
            path.read_bytes()
    for words in (("warmup", mounted.point, f"{SECRET}*"), ("warmup", mounted.point, f"{SECRET}-not-there")):
        llmcache(*words)
    llmcache("evict", mounted.point, f"{SECRET}*")
    for line in (f'{{"op": "{SECRET}"}}', f'{{"op": "warmup", "globs": "{SECRET}"}}', SECRET, f'["{SECRET}"]'):
        assert b"error" in reply_to(mounted.files, line.encode() + b"\n")
    os.kill(mounted.pid, signal.SIGHUP)
    wait_for(lambda: Path(f"{log}.1").exists(), "the log is rotated")
    assert llmcache("umount", mounted.point).returncode == 0
    text = log.read_text() + Path(f"{log}.1").read_text()
    assert f"inode {(source / f'{SECRET}.bin').stat().st_ino} was changed behind the mount" in text
    assert "its header is damaged" in text
    assert SECRET not in text


def test_exceptions_are_logged_without_their_messages(tmp_path: Path) -> None:
    code = f"""
import ctypes, logging, os, threading
from llmcache.mount.daemon import logs
logging.getLogger().addHandler(logs.LogFile({str(tmp_path / "log")!r}, 0, streams=True))
logs.catch_all()
def fail():
    try:
        open("/nowhere/{SECRET}")
    except OSError as error:
        raise KeyError("/{SECRET}") from error
thread = threading.Thread(target=fail)
thread.start()
thread.join()
ctypes.CFUNCTYPE(None)(fail)()
try:
    fail()
except KeyError:
    logging.getLogger().exception("in an operation")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    text = (tmp_path / "log").read_text()
    assert text.count("FileNotFoundError: No such file") == text.count("KeyError\n") == 3
    assert text.count("in fail") == 6 and SECRET not in text.replace(f'open("/nowhere/{SECRET}")', "")
