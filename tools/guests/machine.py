"""Boots a guest in QEMU, runs commands in it over SSH, and ends QEMU.

The root image is opened as a snapshot, so a run does not change it. The guest has a second, empty disk (/data), and a third
one that is a tar file with this tree and the wheel of llmcache; the guest unpacks it to /srv/llmcache and installs the wheel
in /opt/llmcache. The only network connection is the one to the guest's SSH server, from this machine. All files of a run are
in a directory of the cache, which is removed at the end; only the console log is kept.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmcache.errors import LlmcacheError

from . import images
from .images import ROOT, Guest, say

BOOT_SECONDS = 600
STOP_SECONDS = 10
COMMAND_SECONDS = 3600
DATA_BYTES = 3 << 30  # sparse
TREE = "/srv/llmcache"
ENVIRONMENT = "PATH=/opt/llmcache/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8"
LOG_LINES = 30
MGLRU = "/sys/kernel/mm/lru_gen/enabled"


class GuestFailure(LlmcacheError):
    """A guest does not boot, or stops answering."""


@dataclass(frozen=True)
class Settings:
    """Properties of the virtual machine. `mglru`: whether the guest uses MGLRU; by default as its kernel decides.

    With more than one emulated processor, QEMU 7.2 sometimes runs code that the kernel has just replaced (Oops: int3).
    """

    memory: int = 2048
    cpus: int = 1
    mglru: bool | None = None


@dataclass
class Machine:
    """A booted guest: `run` executes commands in it."""

    guest: Guest
    process: subprocess.Popen[bytes]
    console: Path
    port: int
    accelerator: str

    def ssh(self, command: str, *options: str) -> list[str]:
        """Return the command line that runs a shell command in the guest."""
        settings = {
            "BatchMode": "yes",
            "ConnectTimeout": "10",
            "LogLevel": "ERROR",
            "ServerAliveCountMax": "10",
            "ServerAliveInterval": "15",
            "StrictHostKeyChecking": "no",
            "UserKnownHostsFile": "/dev/null",
        }
        words = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
        return [
            "ssh",
            "-F",
            "/dev/null",
            *words,
            "-i",
            str(images.key()),
            "-p",
            str(self.port),
            *options,
            "root@127.0.0.1",
            command,
        ]

    def command(self, words: Sequence[str], seconds: float, *options: str) -> list[str]:
        """Return the command line that runs `words` in the tree in the guest, for at most `seconds`."""
        limit = ["timeout", "--foreground", "-k", "20", f"{seconds:.0f}"]
        return self.ssh(f"cd {TREE} && exec env {ENVIRONMENT} {shlex.join([*limit, *words])}", *options)

    def run(self, words: Sequence[str], seconds: float = COMMAND_SECONDS) -> int:
        """Run a command in the tree in the guest, with this terminal; return its exit status, 124 after `seconds`."""
        terminal = ["-t"] if sys.stdin.isatty() and sys.stdout.isatty() else []
        return self._run(words, seconds, *terminal).returncode

    def output(self, words: Sequence[str], seconds: float = COMMAND_SECONDS) -> subprocess.CompletedProcess[str]:
        """Run a command as `run` does, and return its output, stdout and stderr apart."""
        return self._run(words, seconds, capture=True)

    def _run(
        self, words: Sequence[str], seconds: float, *options: str, capture: bool = False
    ) -> subprocess.CompletedProcess[str]:
        try:
            done = subprocess.run(
                self.command(words, seconds, *options),
                text=True,
                errors="replace",
                capture_output=capture,
                timeout=seconds + 120,
                check=False,
            )
        except subprocess.TimeoutExpired as expired:
            raise self.failure("does not answer") from expired
        if done.returncode == 255 and not self.answers():
            raise self.failure("does not answer")
        return done

    def answers(self) -> bool:
        """Return whether the guest accepts a connection now."""
        if self.process.poll() is not None:
            return False
        command = self.ssh("true")
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def failure(self, what: str) -> GuestFailure:
        """Return the error that the guest `what`, after printing the end of its console."""
        lines = self.console.read_text(errors="replace").splitlines() if self.console.exists() else []
        print(f"the last lines of {self.console}:", *(f"  {line}" for line in lines[-LOG_LINES:]), sep="\n", file=sys.stderr)
        details = [line.partition("] ")[2] for line in lines if "Kernel panic" in line or "Oops:" in line][:1]
        if self.process.poll() is not None:
            details.append(f"QEMU exited with status {self.process.returncode}")
        because = f" ({'; '.join(details)})" if details else ""
        return GuestFailure(f"guest {self.guest.name} {what}{because}", f"the console log is {self.console}")


@contextlib.contextmanager
def booted(guest: Guest, settings: Settings) -> Iterator[Machine]:
    """Boot a guest and install this tree in it. Afterwards, however the block ends, QEMU has ended."""
    images.require("ssh", "openssh-client")
    images.require("qemu-system-x86_64", "qemu-system-x86")
    directory = images.ensure(guest.image)
    logs = images.cache() / "log"
    logs.mkdir(exist_ok=True)
    remove_old_runs()
    scratch = Path(tempfile.mkdtemp(prefix=f"run-{os.getpid()}-", dir=images.cache()))
    try:
        make_payload(scratch)
        accelerator, reason = choose_accelerator(directory / f"vmlinuz.{guest.kernel}", scratch / "probe")
        if reason:
            say(f"emulating the processor (TCG), because KVM does not work: {reason}")
        port = free_port()
        console = logs / f"{guest.name}.console"
        command = qemu(guest, settings, directory, scratch, accelerator, port, console)
        with (scratch / "qemu").open("wb") as output, ended(command, output) as process:
            machine = Machine(guest, process, console, port, accelerator)
            started = time.monotonic()
            wait_for_boot(machine, scratch / "qemu")
            install(machine, settings)
            version = images.kernel_version(guest)
            say(f"{guest.name}: Linux {version}, {accelerator}, ready after {time.monotonic() - started:.0f} s")
            yield machine
    finally:
        shutil.rmtree(scratch)


def qemu(
    guest: Guest, settings: Settings, directory: Path, scratch: Path, accelerator: str, port: int, console: Path
) -> list[str]:
    """Return the command line of QEMU."""
    data = scratch / "data.raw"
    with data.open("wb") as file:
        file.truncate(DATA_BYTES)
    subprocess.run(["mke2fs", *images.EXT4, "-L", "DATA", str(data)], env={**os.environ, "PATH": images.PATH}, check=True)
    # TCG emulates five-level page tables slowly, as it does the kernel's mitigations (below).
    processor = {
        "kvm": ["-accel", "kvm", "-cpu", "host"],
        "tcg": ["-accel", "tcg,thread=multi", "-cpu", "max,la57=off,svm=off"],
    }
    return [
        # If this process is killed, QEMU must not remain.
        *("setpriv", "--pdeathsig", "KILL", "nice", "-n", "2", "qemu-system-x86_64", "-M", "q35", *processor[accelerator]),
        *("-smp", str(settings.cpus), "-m", str(settings.memory), "-nodefaults", "-display", "none", "-no-reboot"),
        *("-kernel", str(directory / f"vmlinuz.{guest.kernel}"), "-initrd", str(directory / f"initrd.{guest.kernel}")),
        *("-append", "root=/dev/vda rw console=ttyS0 net.ifnames=0 panic=1 mitigations=off"),
        *("-drive", f"file={directory / 'root.raw'},if=virtio,format=raw,snapshot=on,cache=unsafe"),
        *("-drive", f"file={data},if=virtio,format=raw,cache=unsafe"),
        *("-drive", f"file={scratch / 'payload.tar'},if=virtio,format=raw,readonly=on"),
        *("-nic", f"user,model=virtio-net-pci,restrict=on,hostfwd=tcp:127.0.0.1:{port}-10.0.2.15:22"),
        *("-device", "virtio-rng-pci", "-serial", f"file:{console}"),
    ]


@contextlib.contextmanager
def ended(command: Sequence[str], output: io.BufferedWriter) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program that ends with the block. Ctrl-C in the terminal does not reach it directly."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def choose_accelerator(kernel: Path, log: Path) -> tuple[str, str | None]:
    """Return `kvm` if a kernel starts under KVM; else `tcg`, and the reason.

    Some virtual machines have a /dev/kvm that cannot run ordinary kernels.
    """
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "tcg", "/dev/kvm is missing or not accessible"
    command = [
        *("setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64", "-M", "q35", "-accel", "kvm", "-cpu", "host", "-m", "512"),
        *("-nodefaults", "-display", "none", "-no-reboot", "-kernel", str(kernel), "-append", "console=ttyS0 panic=-1"),
        *("-serial", "stdio"),
    ]
    with log.open("wb") as output, ended(command, output) as process, contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(15)  # the kernel panics without a root file system, and QEMU exits
    text = log.read_text(errors="replace")
    if "Linux version" in text:
        return "kvm", None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "tcg", lines[0] if lines else "the kernel does not start"


def free_port() -> int:
    """Return a TCP port of this machine that no program uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_boot(machine: Machine, output: Path) -> None:
    """Return when the guest has booted; raise GuestFailure if it ends or takes too long."""
    deadline = time.monotonic() + BOOT_SECONDS
    while not machine.answers():
        if machine.process.poll() is not None:
            print(output.read_text(errors="replace"), file=sys.stderr)
            raise machine.failure("does not boot")
        if time.monotonic() > deadline:
            raise machine.failure(f"has not booted after {BOOT_SECONDS} s")
        time.sleep(1)


def install(machine: Machine, settings: Settings) -> None:
    """Wait until systemd has started everything, unpack the tree, and install llmcache as its users do."""
    pip = "/opt/llmcache/bin/pip install -q --no-index --no-deps --root-user-action ignore --disable-pip-version-check"
    steps = [
        "systemctl is-system-running --wait >/dev/null || true",
        "mountpoint -q /data || mount LABEL=DATA /data",  # systemd waits for the disk for only 90 s
        f"tar xf /dev/vdc -C {TREE}",
        f"{pip} {TREE}/wheel/*.whl",
        "ln -s /opt/llmcache/bin/llmcache /opt/llmcache/bin/llmcachefs /usr/local/bin/",
    ]
    if settings.mglru is not None:
        steps.append(f"echo {'y' if settings.mglru else 'n'} >{MGLRU}")
    done = machine.output(["sh", "-ec", "\n".join(steps)], BOOT_SECONDS)
    if done.returncode:
        raise machine.failure(f"cannot install llmcache: {done.stderr.strip()}")


def make_payload(scratch: Path) -> None:
    """Write `payload.tar`: the files of this tree that git tracks or would add, and the wheel built from them."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    source = scratch / "source"
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    with tempfile.TemporaryDirectory(dir=scratch) as wheels:
        images.run_logged([*pip, "-w", wheels, str(source)], scratch / "wheel.log", "cannot build the wheel of llmcache")
        shutil.rmtree(source / "build")
        shutil.copytree(wheels, source / "wheel")
    with tarfile.open(scratch / "payload.tar", "w") as tar:
        tar.add(source, ".", filter=owned_by_root)
    shutil.rmtree(source)


def owned_by_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Make a member of a tar file belong to root, and readable for all users."""
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    member.mode |= 0o555 if member.isdir() else 0o444
    return member


def remove_old_runs() -> None:
    """Remove the directories of runs that were killed."""
    for path in images.cache().glob("run-*-*"):
        with contextlib.suppress(OSError, ValueError):
            if not Path("/proc", path.name.split("-")[1]).exists():
                shutil.rmtree(path)
