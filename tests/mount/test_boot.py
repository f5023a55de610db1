"""Mounts made by the system: by the helper of mount(8) from a line of /etc/fstab, and by systemd with a settings file."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from llmcache.mount.backends.touches import why_not
from llmcache.mount.client import control, mountpoint
from tests.mount.live import llmcache, run_json, wait_for
from tools.bench.sides import environment

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(sys.executable).with_name("llmcachefs")
FSTAB = "defaults,rw,nofail,_netdev,x-systemd.automount,noatime,user=root,cache=32Mi,mode=arena,writable,pin=*.json"


def helper(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [ROOT / "tools/mount.llmcachefs", *words]
    settings = {**environment(), "LLMCACHEFS": str(PROGRAM)}
    return subprocess.run(command, capture_output=True, text=True, env=settings, timeout=150, check=False)


def test_the_helper_mounts_a_line_of_fstab(places: tuple[Path, Path]) -> None:
    source, point = places
    done = helper(source, point, "-n", "-v", "-o", FSTAB)
    assert done.returncode == 0, done.stderr
    stats = run_json("stats", point)
    assert (stats["mode"], stats["budget_bytes"]) == ("arena", 32 << 20)
    (point / "new.bin").write_bytes(b"x")  # writable
    assert (source / "new.bin").read_bytes() == b"x"
    subprocess.run(["umount", str(point)], check=True, timeout=150)
    again = helper(source, point, "-o", FSTAB)  # at once, while the first daemon is still exiting
    assert again.returncode == 0, again.stderr


def test_the_helper_returns_the_exit_codes_of_mount(places: tuple[Path, Path]) -> None:
    assert helper(*places, "-f", "-N", "4711", "-t", "llmcachefs", "-o", FSTAB).returncode == 0  # dry run
    assert mountpoint.find(str(places[1])) is None
    assert helper(places[0]).returncode == 1
    assert helper(*places, "-o", "cache=lots").returncode == 1
    assert helper(*places, "-o", "cache=32Mi,nonsense=1").returncode == 32


def unit_words(name: str, config: Path) -> list[str]:
    """Return the command of a line of the unit, for the settings in `config`."""
    lines = (ROOT / "tools/systemd/llmcachefs@.service").read_text().splitlines()
    (line,) = (line.partition("=")[2] for line in lines if line.startswith(f"{name}="))
    text = line.replace("/etc/llmcache/%i.toml", str(config)).replace("/usr/local/bin", str(PROGRAM.parent))
    return shlex.split(text)


def test_the_unit_serves_rotates_its_log_and_ends(places: tuple[Path, Path], tmp_path: Path) -> None:
    config, log = tmp_path / "models.toml", tmp_path / "log"
    config.write_text(f'[mount]\nsource = "{places[0]}"\nmount = "{places[1]}"\ncache = "32Mi"\nlog = "{log}"\n')
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(120)
        settings = {**environment(), "NOTIFY_SOCKET": str(tmp_path / "notify")}
        daemon = subprocess.Popen(unit_words("ExecStart", config), env=settings)
        try:
            assert systemd.recv(1000).startswith(b"READY=1\nSTATUS=")
            assert mountpoint.find(str(places[1])) is not None
            subprocess.run(
                [word.replace("$MAINPID", str(daemon.pid)) for word in unit_words("ExecReload", config)], check=True
            )
            wait_for(lambda: (tmp_path / "log.1").exists(), "the log is rotated")
            assert os.listdir(places[1]) == [] and daemon.poll() is None
            daemon.send_signal(signal.SIGTERM)
            assert systemd.recv(1000) == b"STOPPING=1"
            assert daemon.wait(120) == 0
        finally:
            if daemon.poll() is None:
                daemon.kill()
                daemon.wait()
    assert mountpoint.find(str(places[1])) is None
    assert "serving a directory on" in (tmp_path / "log.1").read_text()


def test_the_unit_cleans_up_after_a_crash(places: tuple[Path, Path], tmp_path: Path) -> None:
    config = tmp_path / "models.toml"
    config.write_text(f'[mount]\nsource = "{places[0]}"\nmount = "{places[1]}"\ncache = "32Mi"\n')
    made = llmcache("mount", "--config", config)
    assert made.returncode == 0, made.stderr
    pid = control.daemon_pid(str(places[1]))
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: control.daemon_pid(str(places[1])) is None, "the daemon is dead")
    for result, is_mounted in (("success", True), ("signal", False)):
        after = {**environment(), "SERVICE_RESULT": result}
        subprocess.run(unit_words("ExecStopPost", config), env=after, timeout=150, check=True)
        assert (mountpoint.find(str(places[1])) is not None) == is_mounted


def test_a_daemon_in_the_background_rotates_its_log(places: tuple[Path, Path], tmp_path: Path) -> None:
    done = llmcache("mount", *places, "--cache", "32Mi", "--log", tmp_path / "log")
    assert done.returncode == 0, done.stderr
    pid = control.daemon_pid(str(places[1]))
    assert pid is not None
    (tmp_path / "log").rename(tmp_path / "moved")  # as logrotate does
    os.kill(pid, signal.SIGHUP)
    wait_for(lambda: (tmp_path / "log").exists(), "a new log is begun")
    wait_for(lambda: os.path.samefile(f"/proc/{pid}/fd/2", tmp_path / "log"), "the output of libfuse goes there too")
    assert os.listdir(places[1]) == [] and "mode" in (tmp_path / "moved").read_text()
    assert llmcache("umount", places[1]).returncode == 0


# Runs in its own mount namespace, where an overlay adds the helper to mount(8)'s directory and disappears afterwards.
BY_MOUNT = """
mount -t overlay -o lowerdir="$1:$(readlink -f /sbin)" overlay "$(readlink -f /sbin)" || exit 99
shift
trap 'umount "$2" 2>/dev/null' EXIT
mount -t llmcachefs "$@" && cat "$2/file" || exit 1
mount --all -t llmcachefs --fstab "$FSTAB" || exit 2  # mount(8) recognizes a mounted line by its SOURCE
mount -t llmcachefs "$@" 2>/dev/null
[ $? = 32 ] && umount "$2"
"""


# The same for an in-place mount, which mount(8) sees as a bind mount; findmnt prints its source in brackets.
IN_PLACE = """
mount -t overlay -o lowerdir="$1:$(readlink -f /sbin)" overlay "$(readlink -f /sbin)" || exit 99
shift
trap 'umount "$2" 2>/dev/null' EXIT
for again in 1 2; do
    mount --all -t llmcachefs --fstab "$FSTAB" || exit 2
    findmnt --noheadings --raw --first-only --output FSROOT,OPTIONS "$2"
done
findmnt --noheadings --list --output TARGET | grep --count --fixed-strings --line-regexp "$2"
umount "$2" && mount --fstab "$FSTAB" "$2" && umount "$2" && ! mountpoint --quiet "$2"
"""


@pytest.mark.parametrize(("script", "more"), [(BY_MOUNT, "noexec"), (IN_PLACE, "mode=inplace")], ids=["fuse", "in place"])
def test_mount_8_calls_the_helper(tmp_path: Path, script: str, more: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can have a mount namespace")
    if script == IN_PLACE and (reason := why_not(str(tmp_path))):
        pytest.skip(reason)
    source, point, helpers = (tmp_path / name for name in ("models, all", "mount point", "sbin"))
    for place in (source, point, helpers):
        place.mkdir()
    (source / "file").write_text("x")
    (helpers / "mount.llmcachefs").symlink_to(ROOT / "tools/mount.llmcachefs")
    options = f"cache=32Mi,nofail,_netdev,x-foo,ro,{more}"
    escaped = (str(place).replace(" ", "\\040") for place in (source, point))
    (tmp_path / "fstab").write_text(f"{' '.join(escaped)} llmcachefs {options} 0 0\n")
    words = ["unshare", "-m", "sh", "-c", script, "sh", str(helpers), str(source), str(point), "-o", options]
    settings = {**os.environ, "LLMCACHEFS": str(PROGRAM), "FSTAB": str(tmp_path / "fstab")}
    done = subprocess.run(words, env=settings, capture_output=True, text=True, timeout=150, check=False)
    if done.returncode == 99:
        pytest.skip("no overlay file system")
    assert done.returncode == 0, done
    if script == BY_MOUNT:
        assert done.stdout == "x"
    else:
        *shown, count = done.stdout.splitlines()
        assert [line.split()[0] for line in shown] == [str(source).replace(" ", "\\x20")] * 2, done
        assert all({"ro", "nosuid", "nodev"} <= set(line.split()[1].split(",")) for line in shown)
        assert count == "1", "it is mounted once"
