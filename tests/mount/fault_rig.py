"""The stack under a fault plan: a small disk, a faulty file system on it, a mount over that, and clients.

    disk.img --loop--> disk/ (ext4) --faulty--> source/ --llmcachefs--> under/mnt

`under` is a read-only tmpfs, so that clients cannot change anything while no mount is there.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from llmcache.cgroup import Cgroup
from llmcache.errors import MissingRequirement
from llmcache.mount.client import control, mountpoint
from tests.mount.fault_client import READS, Client, locked
from tests.mount.fault_model import Bytes, Model, overwritten, random_bytes, resized
from tests.mount.faulty import Rule, write_rules
from tests.mount.live import MIB, llmcache, wait_for
from tests.unit.kv_parts import unmount
from tools.bench.sides import end_mount, environment, is_mounted, wait_mounted

SECONDS = float(os.environ.get("LLMCACHE_FAULT_SECONDS", "0"))
SEED = os.environ.get("LLMCACHE_FAULT_SEED")
NEEDS = [
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mkfs.ext4"), reason="loop devices need root, e2fsprogs"),
    pytest.mark.timeout(SECONDS + 600),
]
"""Marks of every test that runs a plan."""
DISK_MIB = 224
SIZES = {"loop.bin": 36 * MIB + 321, "second.bin": 9 * MIB + 77, "small.bin": 300_001}
CACHE_MIB = 24
READERS = 3


def seeds(first: int) -> Iterator[int]:
    """Yield seeds of plans: LLMCACHE_FAULT_SEED if set, else fresh ones for LLMCACHE_FAULT_SECONDS, else `first`."""
    end = time.monotonic() + SECONDS
    for seed in itertools.count(int(SEED) if SEED else time.time_ns() % 1_000_000 if SECONDS else first):
        yield seed
        if SEED or time.monotonic() > end:
            return


def run(*words: str | Path) -> None:
    subprocess.run(list(map(str, words)), check=True, capture_output=True)


@contextlib.contextmanager
def small_disk(directory: Path, mib: int, *options: str, kind: str = "ext4") -> Iterator[Path]:
    """Yield a directory on a new file system of `mib` MiB, on a loop device over disk.img; `options` are those of mkfs."""
    image, point = directory / "disk.img", directory / "disk"
    point.mkdir()
    with image.open("wb") as file:
        file.truncate(mib * MIB)
    run(f"mkfs.{kind}", "-q", *(("-m", "0") if kind == "ext4" else ()), *options, image)
    made = subprocess.run(["mount", "-o", "loop", str(image), str(point)], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no loop devices here: {made.stderr.strip()}")
    try:
        (point / "files").mkdir()
        yield point / "files"
    finally:
        unmount(point)


@contextlib.contextmanager
def faulty(directory: Path, point: Path, rules: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Serve `directory` on `point`, with the faults that the file `rules` describes."""
    point.mkdir()
    write_rules(rules, [])
    command = [sys.executable, "-m", "tests.mount.faulty", str(directory), str(point), str(rules)]
    process = subprocess.Popen(command, env=environment())
    try:
        wait_for(lambda: is_mounted(point) or process.poll() is not None, "the faulty file system serves")
        os.stat(point)
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        try:
            if is_mounted(point):
                unmount(point)
            process.wait(120)
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def full(directory: Path) -> Iterator[None]:
    """Fill the file system of `directory` to the last block."""
    ballast = directory.parent / "ballast"
    fd = os.open(ballast, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        end, step = 0, 64 * MIB
        while step >= 4096:
            try:
                os.posix_fallocate(fd, end, step)
                end += step
            except OSError:
                step //= 2
        yield
    finally:
        os.close(fd)
        ballast.unlink()


def wall_clock(directory: Path) -> tuple[Path, Path] | None:
    """Return the library that shifts a process's wall clock and the file with the offset; None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library, offset = directory / "wallclock.so", directory / "wallclock"
    run(compiler, "-shared", "-fPIC", "-O1", "-o", library, Path(__file__).with_name("wallclock.c"))
    offset.write_bytes(bytes(8))
    return library, offset


class Rig:
    """One stack and its clients. A context manager that always ends everything it started."""

    def __init__(self, directory: Path, mode: str | None, seed: int, sizes: Mapping[str, int] = SIZES) -> None:
        """Prepare a stack; `mode` of the mount (None: no mount, only `source`), `sizes` of the files on it."""
        self.directory, self.mode, self.seed, self._sizes = directory, mode, seed, sizes
        self.failures: list[str] = []
        self.rules: list[Rule] = []
        self.numbers = iter(range(seed << 20, (seed + 1) << 20))
        self.daemon: subprocess.Popen[bytes] | None = None
        self.group: Cgroup | None = None
        self._stack = contextlib.ExitStack()
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self.opening = str(directory / "opening")

    def __enter__(self) -> Rig:
        with contextlib.ExitStack() as stack:
            self.files = stack.enter_context(small_disk(self.directory, DISK_MIB))
            self.model = Model(self.files)
            self.source, self._rules = self.directory / "source", self.directory / "rules.json"
            self.storage = stack.enter_context(faulty(self.files, self.source, self._rules))
            under = self.directory / "under"
            self.point = under / "mnt"
            under.mkdir()
            run("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", under)
            stack.callback(unmount, under)
            self.point.mkdir()
            run("mount", "-o", "remount,ro", under)
            self.clock = wall_clock(self.directory)
            with contextlib.suppress(MissingRequirement):
                self.group = stack.enter_context(Cgroup("faults", directory=self.directory))
            self.log = self.directory / "daemon.log"
            stack.callback(self._end_daemon)
            for path, size in self._sizes.items():
                self.put(path, random_bytes(size, next(self.numbers)))
            self.start_daemon()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_clients()
        self._stack.close()

    # The files behind the mount

    def put(self, path: str, content: Bytes | None, how: str = "rename") -> bool:
        """Change a file behind the mount by "rename", "write" (in place) or its size; return False if the disk is full."""
        changed = self.model.begin(**{path: content})
        target = self.files / path
        try:
            if content is None:
                with locked(self.opening, fcntl.LOCK_EX):
                    target.unlink()
            elif how == "rename":
                content.tofile(target.with_name("fresh"))
                with locked(self.opening, fcntl.LOCK_EX):
                    target.with_name("fresh").rename(target)
            else:
                with target.open("r+b") as file:
                    if how == "write":
                        content.tofile(file)
                    file.truncate(len(content))
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                target.with_name("fresh").unlink()
            self.model.failed(changed)
            return False
        self.model.done(changed)
        return True

    def set_rules(self, rules: list[Rule]) -> None:
        self.rules = rules
        write_rules(self._rules, rules)

    def set_clock(self, offset_s: float) -> None:
        """Shift the daemon's wall clock by `offset_s`."""
        if self.clock is not None:
            with self.clock[1].open("r+b") as file:
                file.write(struct.pack("=q", int(offset_s * 1e9)))

    # The daemon

    def start_daemon(self) -> None:
        if self.mode is None:
            return
        environ = environment()
        if self.clock is not None:
            environ |= {"LD_PRELOAD": str(self.clock[0]), "WALLCLOCK": str(self.clock[1])}
        words = ["mount", str(self.source), str(self.point), "--cache", f"{CACHE_MIB}Mi", "-f", "--mode", self.mode]
        command = [sys.executable, "-m", "llmcache", *words]
        with self.log.open("ab") as sink:
            self.daemon = subprocess.Popen(
                self.group.wrap(command) if self.group else command,
                stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=environ, start_new_session=True,
            )  # fmt: skip
        wait_mounted(self.point, self.daemon, self.log)

    def children(self) -> dict[str, psutil.Process]:
        """Return the daemon's running helper and sentinel, by name."""
        assert self.daemon is not None
        found = {}
        for child in psutil.Process(self.daemon.pid).children():
            with contextlib.suppress(psutil.Error):
                words = " ".join(child.cmdline())
                found.update({name: child for name in ("pinhelper", "sentinel") if f"{name}.py" in words})
        return found

    def control(self, **message: Any) -> dict[str, Any]:
        return control.request(str(self.point), message, timeout_s=90)

    def _end_daemon(self) -> None:
        if self.daemon is None:
            return
        self.daemon.send_signal(signal.SIGCONT)
        end_mount(self.point, self.daemon)
        control.files(str(self.point)).remove()

    # Clients

    def start_clients(self) -> None:
        """Start processes that read and write until `stop_clients`."""
        self._stop.clear()
        jobs: list[Callable[[Client, random.Random], None]] = [*[self._read_one] * READERS, self._write_one]
        for number, job in enumerate(jobs):
            chance = random.Random(self.seed * 100 + number)
            thread = threading.Thread(target=self._work, args=(job, f"client {number}", chance))
            thread.start()
            self._threads.append(thread)

    def stop_clients(self) -> None:
        """Wait for the clients' last requests, and end the clients."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _work(self, job: Callable[[Client, random.Random], None], name: str, chance: random.Random) -> None:
        client = Client(name, self.opening)
        try:
            while not self._stop.is_set() and not self.failures:
                job(client, chance)
        except BaseException as error:
            self.failures.append(f"{name}: {type(error).__name__}: {error}")
        finally:
            client.end()

    def _read_one(self, client: Client, chance: random.Random) -> None:
        path = chance.choice([*SIZES, "loop.bin", *[path for path in self.model.paths() if path.endswith(".kv")]])
        if chance.random() < 0.25:
            self.read(client, "whole", path, 0, 1 << 40)
            return
        # A file that stays open keeps its inode, so renamed files would be misread. Clients rename only the *.kv files.
        how = chance.choice(["pread", "direct", "mapped", "sent", *["held", "held"] * (path in SIZES)])
        content = self.model.now(path)
        offset = chance.randrange(0, (0 if content is None else len(content)) + 5000)
        size = chance.choice([4096, 65536, MIB])
        unit = 4096 if how == "direct" else 1
        self.read(client, how, path, offset // unit * unit, size)

    def read(self, client: Client, how: str, path: str, offset: int, size: int) -> None:
        reply = client.ask(op=how, path=str(self.point / path), offset=offset, size=size)
        if reply.dead and how != "mapped":
            raise AssertionError(f"SIGBUS in {how}")
        problem = self.model.check(path, offset, size, reply)
        if problem is not None:
            raise AssertionError(f"{how} {path} at {offset}, {size} bytes: {problem}")

    def _write_one(self, client: Client, chance: random.Random) -> None:
        self._change(client, chance)
        self._stop.wait(chance.random() * 0.05)

    def _change(self, client: Client, chance: random.Random) -> None:
        path = chance.choice(["a.kv", "b.kv", "c.kv"])
        content = self.model.now(path)
        request: dict[str, Any] = {"op": "write", "path": str(self.point / path), "sync": chance.random() < 0.2}
        data = np.empty(0, np.uint8)
        changed: dict[str, Bytes | None]
        kind = chance.choices(["write", "truncate", "rename", "unlink"], [12, 3, 1, 1])[0]
        if content is None or kind == "write":
            old = np.empty(0, np.uint8) if content is None else content
            offset = chance.randrange(0, min(len(old), 3 * MIB) + 1)
            data = random_bytes(chance.choice([100, 4096, 50_000, 400_000]), chance.randrange(1 << 60))
            request |= {"offset": offset, "size": len(data)}
            changed = {path: overwritten(old, offset, data)}
            if content is None:
                changed[path] = data
                request["offset"] = 0
        elif kind == "truncate":
            offset = chance.randrange(0, len(content) + 20_000)
            request |= {"op": kind, "offset": offset}
            changed = {path: resized(content, offset)}
        elif kind == "unlink":
            request |= {"op": kind}
            changed = {path: None}
        else:
            other = chance.choice([name for name in ("a.kv", "b.kv", "c.kv") if name != path])
            request |= {"op": kind, "new": str(self.point / other)}
            changed = {path: None, other: content}
        self._do(client, request, changed, data)

    def _do(self, client: Client, request: dict[str, Any], changed: dict[str, Bytes | None], data: Bytes) -> None:
        if "new" in request and self.model.now(Path(request["new"]).name) is not None:
            # libfuse deletes an open file before another takes its name, so for a moment the name does not exist.
            self.model.begin(**{Path(request["new"]).name: None})
        self.model.begin(**changed)
        reply = client.ask(data=data.tobytes(), **request)
        if reply.errno == 0 and reply.size == len(data):
            self.model.done(changed)
            return
        excused = self.model.excused("write", next(iter(changed)), (0, 1 << 62), reply)
        if reply.errno not in excused and not (reply.errno == 0 and excused):
            raise AssertionError(f"{request}: {os.strerror(reply.errno)}, {reply.size} of {len(data)} bytes")
        self.model.failed(changed)

    def check_everything(self) -> None:
        """Check every byte of every file, in every way of reading."""
        client = Client("the last check", self.opening)
        try:
            for path in self.model.paths():
                for how in READS:
                    self.read(client, how, path, 0, 1 << 40 if how == "whole" else 64 * MIB)
        finally:
            client.end()

    # The end

    def force_unmount(self) -> None:
        """Unmount a mount whose daemon is dead."""
        result = llmcache("umount", "--force", str(self.point))
        assert result.returncode == 0, result.stderr
        assert mountpoint.find(str(self.point)) is None

    def end(self) -> None:
        """Unmount as a user does, and check that nothing of the mount is left."""
        assert self.daemon is not None
        children = self.children()
        found = control.files(str(self.point))
        result = llmcache("umount", str(self.point))
        assert result.returncode == 0, result.stderr
        assert self.daemon.wait(120) == 0
        assert mountpoint.find(str(self.point)) is None
        wait_for(lambda: not any(child.is_running() for child in children.values()), "helpers end with their daemon")
        left = [name for name in (found.socket, found.info, found.lock) if os.path.exists(name)]
        assert not left
        if self.group is not None:
            wait_for(lambda: self.group is not None and not self.group.processes(), "the cgroup is empty")
        assert not [line for line in self.log.read_text().splitlines() if "Traceback" in line], self.log.read_text()
