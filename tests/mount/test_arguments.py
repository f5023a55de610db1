"""Bad arguments or a machine without a requirement give the documented exit code, message and hint, and no mount."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llmcache.mount.client import control, mountpoint
from tests.mount.conftest import Mounter
from tests.mount.fault_rig import small_disk
from tests.mount.live import llmcache
from tests.unit.kv_parts import small_disk as small_tmpfs
from tools.bench.sides import environment


def refused(code: int, message: str, hint: str | None, *words: str | Path, env: dict[str, str] | None = None) -> None:
    """Check that `llmcache WORDS` fails with this code, message and hint, in at most two lines on stderr."""
    result = llmcache(*words, env=env or environment())
    assert result.returncode == code, result.stderr
    lines = result.stderr.splitlines()
    assert lines[0].startswith("llmcache: error: ")
    assert message in lines[0], result.stderr
    if hint is not None:
        assert lines[1].startswith("hint: ")
        assert hint in lines[1], result.stderr
    assert len(lines) <= 2
    assert result.stdout == ""


@pytest.mark.parametrize("mode", ["auto", "inplace", "steer", "arena"])
def test_a_source_on_tmpfs_is_refused(tmp_path: Path, mode: str) -> None:
    with small_tmpfs(tmp_path, "1m") as source:
        point = tmp_path / "mnt"
        point.mkdir()
        refused(3, f"SOURCE {source} is on tmpfs", "where they are", "mount", source, point, "--mode", mode)
        refused(3, f"SOURCE {source} is on tmpfs", "where they are", "mount", source, source, "--mode", mode)
        assert mountpoint.find(str(point)) is None


@pytest.mark.bpf
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mkfs.btrfs"), reason="needs root and btrfs-progs")
def test_btrfs_is_recognized_despite_its_device_numbers(tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    with small_disk(tmp_path, 128, kind="btrfs") as source:
        refused(3, f"{source} is on btrfs;", "--mode auto", "mount", source, tmp_path / "mnt", "--mode", "inplace")


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ("", "Missing argument 'SOURCE'", "--help"),
        ("SOURCE", "Missing argument 'MOUNT'", "--help"),
        ("SOURCE/none MNT", "none does not exist", None),
        ("SOURCE MNT/none", "none does not exist", "mkdir -p"),
        ("SOURCE/file MNT", "file is not a directory", None),
        ("SOURCE SOURCE/file", "file is not a directory", None),
        ("SOURCE SOURCE/deep/mnt", "lies inside SOURCE", "on SOURCE itself"),
        *((f"SOURCE MNT --cache={size}", f"'{size}'", None) for size in ("lots", "-5M", "10Q", "1.2.3G", "")),
        ("SOURCE MNT --mode fast", "'fast'", None),
        ("SOURCE MNT --rw -o ro", "contradict", None),
    ],
)
def test_bad_arguments_of_mount(places: tuple[Path, Path], words: str, message: str, hint: str | None) -> None:
    (places[0] / "deep" / "mnt").mkdir(parents=True)
    (places[0] / "file").touch()
    given = [word.replace("SOURCE", str(places[0])).replace("MNT", str(places[1])) for word in words.split()]
    refused(2, message, hint, "mount", *given)


def test_an_unknown_mount_option_leaves_no_mount_and_no_access_log(places: tuple[Path, Path], tmp_path: Path) -> None:
    options = ("--mode", "arena", "--cache", "32Mi", "--access-log", tmp_path / "log.parquet", "-o", "nonsense=1")
    refused(4, "nonsense=1", "man mount.fuse3", "mount", *places, *options)
    assert mountpoint.find(str(places[1])) is None
    assert {path for path in tmp_path.iterdir()} == set(places)


def test_missing_libfuse(places: tuple[Path, Path]) -> None:
    environ = {**environment(), "FUSE_LIBRARY_PATH": "/nowhere/libfuse3.so"}
    words = ("mount", *places, "--mode", "steer")
    refused(3, "FUSE_LIBRARY_PATH=/nowhere/libfuse3.so", "sudo apt install fuse3", *words, env=environ)


def test_commands_where_nothing_is_mounted(places: tuple[Path, Path]) -> None:
    for command, *words in (("stats",), ("top",), ("resize", "1G"), ("warmup",), ("evict",)):
        refused(4, f"no llmcachefs is mounted on {places[1]}", None, command, places[1], *words)
    refused(4, f"no llmcachefs is mounted on {places[1]}", "mount", "umount", places[1])
    refused(4, "no llmcachefs is mounted on /proc", None, "umount", "/proc")
    assert os.path.ismount("/proc")
    refused(2, "COUNT", None, "stats", places[1], "1", "0")
    for interval in ("0", "1ms", "soon"):
        refused(2, "INTERVAL", None, "top", places[1], interval)


def test_a_refused_mount_leaves_only_its_log(places: tuple[Path, Path]) -> None:
    done = llmcache("mount", *places, "--cache", "900P")
    assert done.returncode == 3
    base = Path(control.files(str(places[1])).base)
    assert [path.suffix for path in base.parent.glob(f"{base.name}*")] == [".log"]
    Path(control.files(str(places[1])).log).unlink()


def test_impossible_paths_are_refused(places: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(f'[mount]\nsource = "a\\u0000b"\nmount = "{places[1]}"\n')
    done = llmcache("mount", "--config", tmp_path / "settings.toml")
    assert done.returncode == 2 and "source: 'a\\x00b' contains a NUL" in done.stderr
    code = (
        "import os, sys, subprocess; os.mkdir('x'); os.chdir('x'); os.rmdir('../x'); sys.exit(subprocess.call(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, sys.executable, "-m", "llmcache", "stats", "mnt"]
    gone = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=tmp_path, check=False)
    assert gone.returncode == 2 and "the working directory no longer exists" in gone.stderr


def test_a_mount_with_a_missing_socket_is_not_reported_dead(mount: Mounter) -> None:
    mounted = mount()
    os.unlink(mounted.files.socket)
    done = llmcache("stats", mounted.point)
    assert done.returncode == 4 and "is served, but no daemon listens at" in done.stderr
    assert llmcache("umount", mounted.point).returncode == 0


@pytest.mark.bpf
@pytest.mark.parametrize(
    ("words", "message", "code"),
    [
        (("--spill", "*.txt"), "spill: in mode inplace", 2),
        (("-o", "max_read=4096"), "-o max_read=4096", 2),
        (("--read-ahead", "1Ki"), "read_ahead: 1Ki is not possible", 2),
    ],
)
def test_options_of_fuse_are_refused_in_place(tmp_path: Path, words: tuple[str, ...], message: str, code: int) -> None:
    (tmp_path / "mnt").mkdir()
    done = llmcache("mount", tmp_path, tmp_path / "mnt", "--mode", "inplace", *words)
    assert done.returncode == code and message in done.stderr
