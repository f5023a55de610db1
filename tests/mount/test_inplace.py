"""Mode inplace: the daemon steers the files' own page cache, and clients depend only on the file system."""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from llmcache.cache.space import HUGE_BYTES, LEAST_LOOP_BYTES
from llmcache.cgroup import Cgroup
from llmcache.errors import MissingRequirement
from llmcache.kv.spill import KvShape, SpillFile
from llmcache.mount import changes, syscalls
from llmcache.mount.backends import files as backend_files
from llmcache.mount.backends.files import MappedFile
from llmcache.mount.backends.inplace import InPlaceBackend
from llmcache.mount.backends.touches import FILES, why_not
from llmcache.mount.client import control, mountpoint
from llmcache.mount.daemon.parts import new_engine
from llmcache.mount.engine.engine import Engine
from llmcache.mount.engine.warmup import Warmup
from llmcache.mount.readahead import read_ahead_file
from llmcache.mount.source.tree import Caller, SourceTree
from llmcache.procfs import fstype_at, mounts
from llmcache.storage import cached_blocks, map_file, unmap
from tests.mount.fault_rig import run, small_disk
from tests.mount.live import LOOP_READER, MIB, OVERHEAD_BYTES, Live, live, llmcache, random_file, resident_bytes, wait_for
from tests.mount.test_faults import places_on_disk
from tests.seccomp import without
from tools.bench.runner import crc_file, forget
from tools.bench.sides import read_ahead
from tools.make_model import BYTES_PER_VALUE, choose_shape, make_model

pytestmark = [pytest.mark.mount, pytest.mark.bpf]

SIZE = 128 * MIB
CACHE = 64 * MIB
CHECK = "loop.bin.crc.json"
CACHESTAT = 451
CAP = SIZE
"""The memory limit: less than file, daemon and reader together; more than CACHE, daemon and reader."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source")
    if reason := why_not(str(directory)):
        pytest.skip(reason)
    random_file(directory / "loop.bin", SIZE)
    crc_file(directory / "loop.bin", directory)
    past = time.time() - 60
    os.utime(directory / "loop.bin", (past, past))
    return directory


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    directory.mkdir()
    if reason := why_not(str(directory)):
        pytest.skip(reason)
    return directory


@pytest.fixture
def mount(source: Path, tmp_path: Path) -> Iterator[Live]:
    with live(source, tmp_path / "mnt", str(CACHE), "--mode", "inplace") as mount:
        yield mount


class PassReader:
    """A process that reads a file repeatedly and reports each pass."""

    def __init__(self, command: list[str], name: str) -> None:
        self.process, self.name = subprocess.Popen(command, stdout=subprocess.PIPE, text=True), name

    def next(self) -> dict[str, Any]:
        """Return the event of the next pass: its seconds, and how many MiB of it were wrong."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            if event["event"] == "step":
                return dict(event)
        raise AssertionError("the reader has ended")

    def read_until_pinned(self, mount: Live, least_bytes: int) -> None:
        """Read passes without a wrong MiB until `least_bytes` are pinned, or until the kernel caches the loop by itself."""
        deadline = time.monotonic() + 120
        while mount.pinned_bytes(self.name) < least_bytes:
            before = mount.stats()
            assert self.next()["wrong"] == 0 and time.monotonic() < deadline, before
            if is_left_to_the_kernel(before) and mount.stats()["backing_read_bytes"] == before["backing_read_bytes"]:
                return

    def __enter__(self) -> PassReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def reader(path: Path, check: Path, how: str, wrap: Callable[[list[str]], list[str]] = list) -> PassReader:
    words = [sys.executable, str(LOOP_READER), str(path), "--passes", "1000", "--how", how, "--check", str(check)]
    return PassReader(wrap(words), path.name)


def is_left_to_the_kernel(stats: dict[str, Any]) -> bool:
    """Return whether the mount leaves a loop to the kernel, because the kernel would read less."""
    return any(loop["left"] for file in stats["files"] for loop in file["loops"])


def passes_of(stats: dict[str, Any]) -> int:
    return max(int(loop["passes"]) for file in stats["files"] for loop in file["loops"])


@pytest.mark.cgroup
@pytest.mark.parametrize(("how", "has_cachestat"), [("mmap", True), ("read", True), ("mmap", False)])
def test_part_of_a_loop_larger_than_the_budget_is_pinned(
    source: Path, tmp_path: Path, how: str, has_cachestat: bool
) -> None:
    """Every byte is right, even if the daemon is suspended or killed, and without cachestat, as before Linux 6.5."""
    forget(source / "loop.bin")

    def wrap(command: Sequence[str]) -> list[str]:
        return group.wrap(command if has_cachestat else without(CACHESTAT, errno.ENOSYS, command))

    with (
        Cgroup("inplace", directory=source, memory_bytes=CAP) as group,
        live(source, tmp_path / "mnt", str(CACHE), "--mode", "inplace", wrap=wrap) as mount,
        reader(mount.mountpoint / "loop.bin", source / CHECK, how, group.wrap) as passes,
    ):
        wrong = [passes.next()["wrong"] for _ in range(8)]
        # The window grows with the speed of the storage, up to half of the budget.
        wait_for(lambda: CACHE // 4 < mount.pinned_bytes("loop.bin") <= CACHE, "what fits is pinned, except a window")
        before = after = mount.stats()
        assert before["mode"] == "inplace" and before["cpu_s"] > 0
        while (count := passes_of(after) - passes_of(before)) < 5:
            wrong.append(passes.next()["wrong"])
            after = mount.stats()
        dropped = (after["invalidated_bytes"] - before["invalidated_bytes"]) / count
        assert dropped < 0.9 * SIZE, "pinned pages are not dropped and read again"

        mount.daemon.send_signal(signal.SIGSTOP)
        wrong += [passes.next()["wrong"] for _ in range(3)]
        mount.daemon.send_signal(signal.SIGCONT)
        wrong += [passes.next()["wrong"] for _ in range(3)]
        mount.daemon.kill()
        mount.daemon.wait()
        wrong += [passes.next()["wrong"] for _ in range(3)]
        with live(source, tmp_path / "again", str(CACHE), "--mode", "inplace", wrap=wrap) as another:
            passes.read_until_pinned(another, CACHE // 4)  # the second mount has taken over
    assert wrong == [0] * len(wrong)


READER = """
import ctypes, mmap, os, struct, sys, zlib
path, how, passes = sys.argv[1], sys.argv[2], int(sys.argv[3])
size = os.path.getsize(path)

def mapped(flags=mmap.MAP_SHARED):
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ)

def direct():
    fd, buffer, crc = os.open(path, os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, 4 << 20), 0
    for offset in range(0, size, 4 << 20):
        crc = zlib.crc32(memoryview(buffer)[: os.preadv(fd, [buffer], offset)], crc)
    os.close(fd)
    return crc

def sent():
    source, (end, start), crc, done = os.open(path, os.O_RDONLY), os.pipe(), 0, 0
    while done < size:
        count = os.sendfile(start, source, done, 65536)
        crc, done = zlib.crc32(os.read(end, count), crc), done + count
    for fd in (source, end, start):
        os.close(fd)
    return crc

def forked():
    view = mapped()
    child = os.fork()
    crc = zlib.crc32(view)
    if child == 0:
        os._exit(crc != zlib.crc32(view))
    return crc if os.waitpid(child, 0)[1] == 0 else None

def in_pieces():
    crc = 0
    with open(path, "rb") as file:
        for offset in range(0, size, 3 << 20):
            with mmap.mmap(file.fileno(), min(3 << 20, size - offset), prot=mmap.PROT_READ, offset=offset) as view:
                crc = zlib.crc32(view, crc)
    return crc

def populated():
    return zlib.crc32(mapped(mmap.MAP_SHARED | mmap.MAP_POPULATE))

def private():
    return zlib.crc32(mapped(mmap.MAP_PRIVATE))

def at_random():
    view = mapped()
    view.madvise(mmap.MADV_RANDOM)
    return zlib.crc32(view)

def by_ring():  # io_uring, one IORING_OP_READ at a time; the offsets are those of struct io_uring_params
    libc, params, piece = ctypes.CDLL(None), ctypes.create_string_buffer(120), 1 << 20
    ring = libc.syscall(425, 1, params)
    assert ring >= 0
    count, tail, head, results = (struct.unpack_from("<I", params, at)[0] for at in (4, 44, 80, 100))
    rings, request = mmap.mmap(ring, results + 16 * count), mmap.mmap(ring, 4096, offset=0x10000000)
    buffer, fd, crc = mmap.mmap(-1, piece), os.open(path, os.O_RDONLY), 0
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    for number, offset in enumerate(range(0, size, piece)):
        request[:64] = struct.pack("<BBHiQQIIQQQQ", 22, 0, 0, fd, offset, address, piece, 0, 0, 0, 0, 0)
        struct.pack_into("<I", rings, tail, number + 1)
        assert libc.syscall(426, ring, 1, 1, 1, None, 0) == 1
        done, = struct.unpack_from("<i", rings, results + 16 * (number % count) + 8)
        struct.pack_into("<I", rings, head, number + 1)
        assert done == min(piece, size - offset), done
        crc = zlib.crc32(memoryview(buffer)[:done], crc)
    os.close(fd)
    return crc

for _ in range(passes):
    print(globals()[how](), flush=True)
"""
KINDS = ("direct", "sent", "forked", "in_pieces", "populated", "private", "at_random", "by_ring")
CONTAINED = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--"]


@pytest.mark.cgroup
@pytest.mark.parametrize("prefix", [[], CONTAINED], ids=["here", "in containers"])
def test_readers_of_every_kind_read_the_right_bytes(source: Path, tmp_path: Path, prefix: list[str]) -> None:
    if prefix and subprocess.run([*prefix, "true"], check=False).returncode:
        pytest.skip("no namespaces for mounts and processes here")
    forget(source / "loop.bin")
    crc = zlib.crc32((source / "loop.bin").read_bytes())
    with (
        Cgroup("inplace-kinds", directory=source, memory_bytes=CAP + 64 * MIB) as group,
        live(source, tmp_path / "mnt", str(CACHE), "--mode", "inplace", wrap=group.wrap) as mount,
    ):
        commands = [[*prefix, sys.executable, "-c", READER, str(mount.mountpoint / "loop.bin"), how, "3"] for how in KINDS]
        readers = [subprocess.Popen(group.wrap(command), stdout=subprocess.PIPE, text=True) for command in commands]
        try:
            output = [reader.communicate(timeout=300)[0].split() for reader in readers]
        finally:
            for each in readers:
                each.kill()
                each.wait()
        assert output == [[str(crc)] * 3] * len(KINDS)
        wait_for(lambda: not any(file["open"] for file in mount.stats()["files"]), "all have ended")


@pytest.mark.cgroup
@pytest.mark.parametrize(("daemon_limit", "client_limit"), [(None, CAP), (CACHE + 48 * MIB, 48 * MIB)])
def test_separate_memory_limits_of_daemon_and_client(
    source: Path, tmp_path: Path, daemon_limit: int | None, client_limit: int
) -> None:
    """A page is charged to the process that first reads it: to the daemon for prefetches, to a client for its own faults."""
    forget(source / "loop.bin")
    with (
        Cgroup("inplace-daemon", directory=source, memory_bytes=daemon_limit) as other,
        Cgroup("inplace-program", directory=source, memory_bytes=client_limit) as group,
        live(source, tmp_path / "mnt", str(CACHE), "--mode", "inplace", wrap=other.wrap) as mount,
        reader(mount.mountpoint / "loop.bin", source / CHECK, "mmap", group.wrap) as passes,
    ):
        assert not any(passes.next()["wrong"] for _ in range(10))
        # If only the client has a limit, or the loop stays with the kernel, nothing needs to be pinned.
        least, deadline = 0 if daemon_limit is None else CACHE // 3, time.monotonic() + 120
        while mount.pinned_bytes("loop.bin") < least and not is_left_to_the_kernel(mount.stats()):
            assert time.monotonic() < deadline and not passes.next()["wrong"]
        assert group.usage().oom_kills == other.usage().oom_kills == 0


GROWING = """
import mmap, sys, time
with open(sys.argv[1], "rb") as file:
    view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
own = []
for number in range(5):
    for offset in range(0, len(view), 4096):
        view[offset]
        if offset % (4 << 20) == 0 and number == 0:
            time.sleep(0.1)  # until what has been read is locked
            own.append(b"x" * (5 << 18))
print("done", flush=True)
"""


@pytest.mark.cgroup
@pytest.mark.parametrize("mode", ["inplace", "steer"])
def test_a_client_whose_cgroup_has_a_limit_of_its_own_is_not_killed(empty: Path, tmp_path: Path, mode: str) -> None:
    """Pages charged to the client stay evictable while it needs more memory, and the loop is pinned nevertheless."""
    shape = choose_shape(160 * MIB, BYTES_PER_VALUE["gguf"], None, False)
    (model,) = make_model(empty / "model.gguf", shape, "gguf", 1, 0)
    forget(model)
    with (
        Cgroup("limited-client", directory=empty, memory_bytes=96 * MIB) as group,
        live(empty, tmp_path / "mnt", str(250 * MIB), "--mode", mode) as mount,
    ):
        command = group.wrap([sys.executable, "-c", GROWING, str(mount.mountpoint / "model.gguf")])
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            output = [line.strip() for line in client.stdout or ()]
            pinned = mount.pinned_bytes("model.gguf")
        assert client.returncode == 0 and output == ["done"] and group.usage().oom_kills == 0
        assert pinned >= 40 * MIB, mount.stats()


@contextmanager
def xfs(parent: Path) -> Iterator[tuple[Path, Path, Path]]:
    """Yield a file of SIZE on its own file system, the disk image, and the checksums of the file."""
    if shutil.which("mkfs.xfs") is None:
        pytest.skip("no mkfs.xfs (package xfsprogs)")
    with small_disk(parent, 512, kind="xfs") as files:
        path = random_file(files / "loop.bin", SIZE)
        check = crc_file(path, parent)
        os.utime(path, (0, 0))
        forget(path)
        yield path, parent / "disk.img", check


@pytest.mark.cgroup
def test_a_loop_on_xfs(tmp_path: Path) -> None:
    """XFS is the other file system with large folios. The mount sets its read-ahead and restores it."""
    with xfs(tmp_path) as (path, _, check), Cgroup("inplace-xfs", directory=tmp_path, memory_bytes=CAP) as group:
        setting = read_ahead_file(str(path.parent))
        assert setting is not None
        before = setting.read_text()
        words = ("--mode", "inplace", "--read-ahead", "64Ki")
        with live(path.parent, tmp_path / "mnt", str(CACHE), *words, wrap=group.wrap) as mount:
            assert setting.read_text() == "64\n"
            with reader(mount.mountpoint / "loop.bin", check, "mmap", group.wrap) as passes:
                passes.read_until_pinned(mount, CACHE // 4)
        assert setting.read_text() == before != "64\n"


PIECE = 1 << 14
STUBBORN = f"""
import json, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
while True:
    failed = []
    for offset in range(0, {SIZE}, {PIECE}):
        try:
            os.pread(fd, {PIECE}, offset)
        except OSError:
            failed.append(offset)
    print(json.dumps({{"event": "step", "failed": failed}}), flush=True)
"""


@pytest.mark.cgroup
def test_steering_does_not_worsen_a_failing_disk(tmp_path: Path) -> None:
    """Unreadable ranges fail, pinned ranges stay readable, and so does the rest of a broken huge page."""
    with xfs(tmp_path) as (path, image, check), Cgroup("inplace-eio", directory=tmp_path, memory_bytes=CAP) as group:
        places = places_on_disk(path)
        run("mount", "-o", "remount,ro", path.parents[1])
        cut = sorted(places)[len(places) * 3 // 4 + 37]
        bad = {4096 * number // PIECE * PIECE for number, place in enumerate(places) if place >= cut}
        command = [sys.executable, "-c", STUBBORN]
        with (
            live(path.parent, tmp_path / "mnt", str(CACHE), "--mode", "inplace", wrap=group.wrap) as mount,
            PassReader(group.wrap([*command, str(mount.mountpoint / "loop.bin")]), "loop.bin") as passes,
        ):
            deadline = time.monotonic() + 120
            while mount.pinned_bytes("loop.bin") < CACHE // 2:
                assert passes.next()["failed"] == [] and time.monotonic() < deadline, mount.stats()
            with image.open("r+b") as file:
                file.seek(cut)
                rest = file.read()
                file.truncate(cut)
                wait_for(lambda: passes.next()["failed"] != [], "broken blocks are read")
                wait_for(lambda: set() < set(passes.next()["failed"]) < bad, "pinned blocks stay readable")
                file.seek(cut)
                file.write(rest)
            wait_for(lambda: passes.next()["failed"] == [], "all is read again")
            with reader(mount.mountpoint / "loop.bin", check, "mmap", group.wrap) as others:
                assert [others.next()["wrong"] for _ in range(3)] == [0] * 3


@pytest.mark.cgroup
def test_two_models_used_alternately(empty: Path, tmp_path: Path) -> None:
    """Pins of one model make room for the other when that is used."""
    source = empty
    for name in ("one", "two"):
        path = random_file(source / f"{name}.bin", SIZE)
        crc_file(path, source)
        os.utime(path, (0, 0))
        forget(path)
    with (
        Cgroup("inplace-turns", directory=source, memory_bytes=CAP) as group,
        live(source, tmp_path / "mnt", str(CACHE), "--mode", "inplace", wrap=group.wrap) as mount,
    ):
        for name in ("one", "two", "one"):
            with reader(mount.mountpoint / f"{name}.bin", source / f"{name}.bin.crc.json", "mmap", group.wrap) as passes:
                passes.read_until_pinned(mount, CACHE // 3)


def test_many_files_are_watched_but_few_are_open(empty: Path, tmp_path: Path) -> None:
    """If there are more files than the daemon can watch, it watches the large ones."""
    source, point = empty, tmp_path / "mnt"
    for number in range(FILES + 100):
        path = source / f"{number}.bin"
        path.touch()
        os.truncate(path, 8 * MIB if number in (3, FILES + 97) else LEAST_LOOP_BYTES)
        os.utime(path, (0, 0))
    with live(source, point, str(CACHE), "--mode", "inplace") as mount:

        def is_steered() -> bool:
            for number in (3, FILES + 97):
                (point / f"{number}.bin").read_bytes()
            return len(mount.stats()["files"]) == 2

        wait_for(is_steered, "two files are steered")
        assert len(os.listdir(f"/proc/{mount.daemon.pid}/fd")) < 100
        assert mount.memory_bytes() < OVERHEAD_BYTES


def test_everything_stays_cached_while_memory_is_free(source: Path, mount: Live) -> None:
    data = (source / "loop.bin").read_bytes()

    def more_is_cached() -> bool:
        with open(mount.mountpoint / "loop.bin", "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
            assert zlib.crc32(view) == zlib.crc32(data)
        return int(mount.stats()["beyond_bytes"]) > 0

    wait_for(more_is_cached, "more than the budget is cached")
    assert mount.stats()["invalidated_bytes"] == 0


def test_pinned_small_pages_are_read_again_as_huge_pages(source: Path, tmp_path: Path) -> None:
    path = source / "loop.bin"
    forget(path)
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)  # into single pages
    while cached_blocks(fd, 0, SIZE) < SIZE // 4096:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        for offset in range(0, SIZE, 4096):
            os.pread(fd, 1, offset)
    address = map_file(fd, SIZE)

    def huge_bytes() -> int:
        for offset in range(0, SIZE, HUGE_BYTES):
            syscalls.madvise(address + offset, 4096, syscalls.MADV_POPULATE_READ)
        found = syscalls.huge_bytes(address, SIZE)
        syscalls.madvise(address, SIZE, syscalls.MADV_DONTNEED)
        return found

    assert huge_bytes() == 0
    with (
        live(source, tmp_path / "mnt", str(2 * SIZE), "--mode", "inplace") as mount,
        reader(mount.mountpoint / "loop.bin", source / CHECK, "read") as program,
    ):
        # if storage takes over 10 ms for 1 MB, as on a busy machine, the mount stops after the first 32 MiB
        wait_for(lambda: program.next()["wrong"] == 0 and huge_bytes() >= 16 * MIB, "16 MiB are in huge pages")
        assert [program.next()["wrong"] for _ in range(20)] == [0] * 20
        assert mount.stats()["backing_read_bytes"] <= SIZE + SIZE // 4  # each block is read again once
    unmap(address, SIZE)
    os.close(fd)


POPULATED = f"""
import os, sys
from llmcache.mount import syscalls
from llmcache.storage import map_file
fd = os.open(sys.argv[1], os.O_RDONLY)
size = os.fstat(fd).st_size // {HUGE_BYTES} * {HUGE_BYTES}
address = map_file(fd, size)
syscalls.madvise(address, size, syscalls.MADV_POPULATE_READ)
print(syscalls.huge_bytes(address, size), flush=True)
sys.stdin.read()
"""


def test_the_first_pass_over_a_fitting_loop_is_left_to_the_kernel(empty: Path, tmp_path: Path) -> None:
    """Pages that a client maps small at first stay small in its mapping."""
    shape = choose_shape(200 * 10**6, BYTES_PER_VALUE["gguf"], None, False)
    (path,) = make_model(empty / "model.gguf", shape, "gguf", 1, 0)
    os.utime(path, (time.time() - 60,) * 2)

    @contextmanager
    def populated(of: Path) -> Iterator[int]:
        """Yield how many bytes a client has mapped in huge pages; it has mapped the whole file, and keeps running."""
        forget(path)
        command = [sys.executable, "-c", POPULATED, str(of)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
            assert program.stdin is not None and program.stdout is not None
            with program.stdin:
                yield int(program.stdout.readline())

    with read_ahead(empty, 8192):
        with populated(path) as plain:
            if plain < SIZE // 2:
                pytest.skip("this file system makes no huge pages")
        with live(empty, tmp_path / "mnt", "300M", "--mode", "inplace") as mount:
            with populated(mount.mountpoint / path.name) as huge_bytes:
                wait_for(lambda: mount.pinned_bytes(path.name) > 0.9 * path.stat().st_size, "it is pinned nevertheless")
            assert huge_bytes > 0.9 * plain
            stats = mount.stats()
            assert stats["backing_read_bytes"] - stats["client_read_bytes"] < SIZE // 4


NEIGHBOR = f"""
import sys, time
taken = []
while len(taken) < {3 * SIZE // 2 // MIB}:
    taken.append(b"x" * {MIB})
    time.sleep(0.02)
sys.stdin.read()
"""


@pytest.mark.cgroup
def test_memory_pressure_during_a_renewal_in_huge_pages(source: Path, tmp_path: Path) -> None:
    """Pages evicted to be read again in huge pages are not pinned beyond the limit, and every byte stays right."""
    path = source / "loop.bin"
    forget(path)
    with (
        Cgroup("inplace-renewal", directory=source, memory_bytes=2 * SIZE + OVERHEAD_BYTES) as group,
        live(source, tmp_path / "mnt", str(SIZE), "--mode", "inplace", wrap=group.wrap) as mount,
        reader(mount.mountpoint / "loop.bin", source / CHECK, "read", group.wrap) as program,
    ):
        wait_for(lambda: program.next()["wrong"] == 0 and mount.stats()["backing_read_bytes"] > 0, "it is read again")
        with subprocess.Popen(group.wrap([sys.executable, "-c", NEIGHBOR]), stdin=subprocess.PIPE) as neighbor:
            wait_for(lambda: program.next()["wrong"] == 0 and mount.stats()["limit_bytes"] < SIZE, "memory is short")
            for _ in range(20):
                assert program.next()["wrong"] == 0
            wait_for(lambda: (now := mount.stats())["pinned_bytes"] <= now["limit_bytes"], "the pins fit the limit")
            assert neighbor.poll() is None
            neighbor.communicate()
        program.read_until_pinned(mount, SIZE - HUGE_BYTES)
        assert group.usage().oom_kills == 0


def test_the_mount_is_only_a_bind_mount(source: Path, tmp_path: Path) -> None:
    point = tmp_path / "mnt"
    with live(source, point, str(CACHE), "--mode", "inplace") as mount:
        assert os.path.samefile(point / "loop.bin", source / "loop.bin")
        entry = mountpoint.find(str(point))
        assert entry is not None and entry.fstype == mountpoint.IN_PLACE
        assert str(point) in mountpoint.ours()
        with pytest.raises(OSError, match="Read-only"):
            (point / "new.txt").write_text("x")
        with pytest.raises(MissingRequirement, match="Read-only") as caught:
            SpillFile.create(point / "new.kv", KvShape("tiny", layers=2, kv_heads=2, head_dim=4, page_tokens=4))
        assert caught.value.hint and "--spill '*.kv'" in caught.value.hint
        refused = llmcache("mount", source, point, "--mode", "inplace", "--cache", "32Mi")
        assert refused.returncode == 4 and "already served" in refused.stderr
        with open(point / "loop.bin", "rb"):
            busy = llmcache("umount", point)
            assert busy.returncode == 4 and "busy" in busy.stderr

        mount.daemon.kill()
        mount.daemon.wait()
        assert (point / "loop.bin").stat().st_size == SIZE
        dead = llmcache("stats", point)
        assert dead.returncode == 4 and "has ended" in dead.stderr
        again = llmcache("mount", source, point, "--mode", "inplace", "--cache", "32Mi")
        assert again.returncode == 0, again.stderr
        wait_for(lambda: sum(found.point == str(point) for found in mounts().values()) == 1, "the dead mount has gone")
        assert llmcache("umount", point).returncode == 0
    assert mountpoint.find(str(point)) is None


def test_steering_continues_after_a_refused_umount(empty: Path, tmp_path: Path) -> None:
    """A mount below MOUNT makes it busy, which the daemon notices only after it has unpinned everything."""
    source, point = empty, tmp_path / "mnt"
    (source / "below").mkdir()
    path = random_file(source / "loop.bin", 40 * MIB)
    os.utime(path, (0, 0))
    with live(source, point, str(CACHE), "--mode", "inplace") as mount:

        def is_pinned() -> bool:
            (point / "loop.bin").read_bytes()
            return int(mount.stats()["pinned_bytes"]) > 30 * MIB

        wait_for(is_pinned, "the file is pinned")
        syscalls.bind(str(tmp_path), str(point / "below"), 0)
        try:
            for _ in range(2):
                refused = llmcache("umount", point)
                assert refused.returncode == 4 and "busy" in refused.stderr
                wait_for(is_pinned, "the file is pinned again")
        finally:
            syscalls.umount2(str(point / "below"), syscalls.UMOUNT_NOFOLLOW)
        assert llmcache("umount", point).returncode == 0
        assert mount.daemon.wait(60) == 0


def test_a_file_is_closed_after_the_last_read_of_it(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is closed even though it changed during the read and its state was dropped."""
    begun, resume = threading.Event(), threading.Event()

    def populate_slowly(mapping: MappedFile, _offset: int, _length: int) -> int:
        begun.set()
        assert resume.wait(60)
        return os.fstat(mapping.backing.fd).st_size

    monkeypatch.setattr(MappedFile, "populate", populate_slowly)
    engine = new_engine(CACHE, "inplace", SourceTree(str(source)))
    backend = engine.backend
    assert isinstance(backend, InPlaceBackend)
    engine.start(None, str(source))
    try:
        number, _ = backend.files.open("/loop.bin", os.O_RDONLY, Caller(0, 0, os.getpid()))
        mapping = backend.files.by_number[number].mapping
        assert mapping is not None
        group, member = engine.state.owners[mapping.backing]
        wait_for(lambda: member.reachable, "the helper has opened it")
        with engine.state.lock:
            job = backend.ahead(group, member, 0)
            assert job is not None
            engine.state.jobs.append(job)
            engine.state.work.notify()
        assert begun.wait(60)
        engine.changed(mapping.backing, 0, -1)
        release = threading.Thread(target=backend.files.release, args=(number,))
        release.start()
        release.join(0.3)
        assert release.is_alive()
        os.fstat(mapping.backing.fd)
        resume.set()
        release.join(60)
        assert not release.is_alive()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(mapping.backing.fd)
        assert engine.stats().read_bytes == 0
    finally:
        resume.set()
        engine.stop()
        backend.close()


def test_a_file_truncated_to_zero_is_closed(empty: Path) -> None:
    random_file(empty / "loop.bin", 8 * MIB)
    engine = new_engine(CACHE, "inplace", SourceTree(str(empty)))
    backend = engine.backend
    assert isinstance(backend, InPlaceBackend)
    try:
        backend.files.release(backend.files.open("/loop.bin", os.O_RDONLY, Caller(0, 0, os.getpid()))[0])
        os.truncate(empty / "loop.bin", 0)
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(OSError, match="Invalid argument"):
            backend.files.open("/loop.bin", os.O_RDONLY, Caller(0, 0, os.getpid()))
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        backend.close()


@contextmanager
def steering(source: Path) -> Iterator[tuple[Engine, InPlaceBackend]]:
    """Yield an engine in place in this process; its own reads are those of a warm-up."""
    engine = new_engine(CACHE, "inplace", SourceTree(str(source)))
    backend = engine.backend
    assert isinstance(backend, InPlaceBackend)
    engine.start(None, str(source))
    try:
        yield engine, backend
    finally:
        engine.stop()
        backend.close()


def test_a_file_without_slots_is_steered_once_slots_are_free(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the slots of a closed file at once; until then `stats` reports how many extents lack one."""
    names = ("one.bin", "two.bin", "three.bin")
    for name in names:
        os.utime(random_file(empty / name, 40 * MIB), (0, 0))
    # slots for two files, but each new file takes one more
    monkeypatch.setattr(backend_files, "PLACES", 2 * 40 * MIB // HUGE_BYTES)

    def lacking(engine: Engine) -> dict[str, int]:
        return {file.path: file.lacks_extents for file in engine.stats().files if file.lacks_extents}

    with steering(empty) as (engine, backend):
        wait_for(lambda: len(backend.files.by_number) == len(names), "all are watched")
        one, two = (backend.files.open(f"/{name}", os.O_RDONLY, Caller(0, 0, os.getpid()))[0] for name in names[:2])
        assert lacking(engine) == {"/two.bin": 40 * MIB // HUGE_BYTES}
        backend.files.release(one)
        wait_for(lambda: not lacking(engine), "it is steered")
        assert backend.files.by_number[two].space is not None and backend.files.by_number[one].space is None
        backend.files.release(two)
        three, _ = backend.files.open("/three.bin", os.O_RDONLY, Caller(0, 0, os.getpid()))
        assert not lacking(engine), "the slots of closed files are taken at once"
        backend.files.release(three)


def test_a_second_mount_in_place_over_the_same_files_is_refused(empty: Path, tmp_path: Path) -> None:
    """Each daemon would take the reads of the other for reads of clients."""
    (empty / "below").mkdir()
    points = [tmp_path / name for name in ("one", "two")]
    points[1].mkdir()
    with live(empty, points[0], "32Mi", "--mode", "inplace"):
        for source in (empty, empty / "below"):
            done = llmcache("mount", source, points[1], "--mode", "inplace", "--cache", "32Mi")
            assert done.returncode == 4 and f"already steered in place by the mount on {points[0]}" in done.stderr, (
                done.stderr
            )
    done = llmcache("mount", empty / "below", points[1], "--mode", "inplace", "--cache", "32Mi")
    assert done.returncode == 0, done.stderr
    assert llmcache("umount", points[1]).returncode == 0


def test_files_of_a_temporarily_unreadable_directory_stay_watched(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (empty / "below").mkdir()
    os.utime(random_file(empty / "below" / "loop.bin", 8 * MIB), (0, 0))
    opened, refused = os.open, list[str]()

    def open_fails(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if path == "below":
            refused.append(path)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(path, flags, mode, dir_fd=dir_fd)

    with steering(empty) as (_, backend):
        wait_for(lambda: len(backend.files.by_number) == 1, "it is watched")
        before = list(backend.files.by_number)
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", open_fails)
            wait_for(lambda: len(refused) > 2, "walks cannot open it")
        wait_for(lambda: not backend.files.turn.locked(), "the walk has ended")
        assert list(backend.files.by_number) == before


def test_the_new_part_of_a_growing_file_is_watched(empty: Path) -> None:
    path = random_file(empty / "loop.bin", 8 * MIB)
    code = f"import os; os.pread(os.open('{path}', os.O_RDONLY), 4096, {30 * MIB})"
    command = f'{sys.executable} -c "{code}"; true'  # not a child of the daemon: reads of its children are ignored
    with steering(empty) as (engine, backend):
        wait_for(lambda: len(backend.files.by_number) == 1, "it is watched")
        with path.open("ab") as file:
            file.write(os.urandom(32 * MIB))
        os.utime(path, (0, 0))

        def is_noticed() -> bool:
            subprocess.run(["sh", "-c", command], check=True)
            return any(file.size_bytes == 40 * MIB for file in engine.stats().files)

        wait_for(is_noticed, "a read of its new part is noticed", 20)


def test_changes_are_noticed_without_regular_walks(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports new, renamed and deleted files, also in new directories, and the ends of clients."""
    if fstype_at(empty) not in changes.LOCAL:
        pytest.skip("changes on this file system are found by walks")
    monkeypatch.setattr(backend_files, "QUIET_SCAN_S", 1e6)
    with steering(empty) as (_, backend):

        def paths() -> set[str]:
            return {file.path for file in list(backend.files.by_number.values())}

        (empty / "models" / "new").mkdir(parents=True)
        path = random_file(empty / "models" / "new" / "loop.bin", 8 * MIB)
        os.utime(path, (0, 0))
        wait_for(lambda: paths() == {"/models/new/loop.bin"}, "it is found")
        path = path.rename(empty / "loop.bin")
        wait_for(lambda: paths() == {"/loop.bin"}, "its new name is found")
        code = f"import sys; file = open('{path}', 'rb'); file.read(); sys.stdin.read()"
        client = subprocess.Popen(["sh", "-c", f'{sys.executable} -c "{code}"; true'], stdin=subprocess.PIPE)
        (file,) = backend.files.by_number.values()
        wait_for(lambda: file.mapping is not None, "the client is seen")
        assert client.stdin is not None
        client.stdin.close()
        client.wait(60)
        wait_for(lambda: file.mapping is None and not backend.files.in_use, "the end of the client is seen")
        path.unlink()
        wait_for(lambda: not paths(), "it is forgotten")


def test_a_link_is_followed_to_a_file_outside_source(empty: Path, tmp_path: Path) -> None:
    """The target is steered under the link's name, unless the owner of the link may not read it."""
    target, secret = (random_file(tmp_path / name, 40 * MIB) for name in ("blob", "secret"))
    os.utime(target, (0, 0))
    secret.chmod(0o600)
    (empty / "snapshots").mkdir()
    (empty / "snapshots" / "model.bin").symlink_to("../../blob")
    (empty / "stolen.bin").symlink_to(secret)
    os.lchown(empty / "stolen.bin", 65534, 65534)
    # not a child of the daemon: reads of its children are ignored
    command = f"{sys.executable} -c \"open('{empty}/snapshots/model.bin', 'rb').read()\"; true"
    with steering(empty) as (engine, backend):

        def is_read() -> bool:
            subprocess.run(["sh", "-c", command], check=True)
            return any(file.path == "/snapshots/model.bin" for file in engine.stats().files)

        wait_for(is_read, "its reads are seen")
        number, _ = backend.files.open("/snapshots/model.bin", os.O_RDONLY, Caller(0, 0, os.getpid()))
        file = backend.files.by_number[number]
        assert file.key == (target.stat().st_dev, target.stat().st_ino) and file.mapping is not None
        _, member = engine.state.owners[file.mapping.backing]
        wait_for(lambda: member.reachable, "the helper has opened the target")
        assert member.node == target.stat().st_ino
        assert [each.path for each in backend.files.by_number.values()] == ["/snapshots/model.bin"]
        backend.files.release(number)
        (empty / "snapshots" / "model.bin").unlink()
        wait_for(lambda: not backend.files.by_number, "it is forgotten with its link")


def test_simultaneous_warmups_of_a_file_keep_it_open(empty: Path) -> None:
    """The first warm-up to end does not close the file under the second, which still reports the pinned bytes."""
    os.utime(random_file(empty / "loop.bin", 40 * MIB), (0, 0))
    forget(empty / "loop.bin")
    output: list[dict[str, Any]] = []
    waits = threading.Event()
    with steering(empty) as (engine, backend):
        warmer = Warmup(engine, backend.files)
        second = threading.Thread(target=lambda: output.append(warmer.warm(["*.bin"], lambda _: waits.set())))

        def on_progress(_progress: dict[str, Any]) -> None:
            if second.ident is None:
                second.start()
                assert waits.wait(60), "the second waits for its turn"

        output.append(warmer.warm(["*.bin"], on_progress))
        second.join(60)
        assert not any(file.programs for file in backend.files.by_number.values())
    assert [reply["warm_bytes"] for reply in output] == [reply["wanted_bytes"] for reply in output] == [40 * MIB] * 2


@pytest.mark.parametrize(
    ("words", "output"),
    [
        ((), "inplace, budget 33.6 MB (--cache), read-only"),
        (("--rw",), "inplace, budget 33.6 MB (--cache), writable"),
        (("--spill", ""), "inplace, budget 33.6 MB (--cache), read-only"),
        (("--spill", "*.tmp"), "steer (spill: in mode inplace either all files are writable or none), budget 33.6 MB"),
        (("-o", "fsname=models"), "inplace, budget 33.6 MB (--cache), read-only"),
        (("-o", "max_read=131072"), "steer (-o max_read=131072: is an option of FUSE"),
    ],
)
def test_auto_is_in_place_if_possible(source: Path, tmp_path: Path, words: tuple[str, ...], output: str) -> None:
    with live(source, tmp_path / "mnt", "32Mi", "--mode", "auto", *words) as mount:
        wait_for(lambda: f"llmcachefs: {mount.mountpoint}: {output}" in mount.log.read_text(), "the log names the mode")
        assert (mount.mountpoint / CHECK).read_bytes() == (source / CHECK).read_bytes()


def test_a_source_hidden_by_its_mount_cannot_be_steered_in_place(empty: Path) -> None:
    done = llmcache("mount", empty, empty.parent, "--mode", "inplace")
    assert done.returncode == 3 and "SOURCE lies inside MOUNT" in done.stderr
    random_file(empty / "f", MIB)
    try:
        done = llmcache("mount", empty, empty.parent, "--cache", "32Mi")
        assert (
            done.returncode == 0 and "(SOURCE lies inside MOUNT, and the mount would hide it), budget 33.6 MB" in done.stdout
        )
        assert os.listdir(empty.parent) == ["f"]
    finally:
        assert llmcache("umount", empty.parent).returncode == 0


def test_warmup_and_evict(source: Path, mount: Live) -> None:
    forget(source / "loop.bin")
    done = llmcache("warmup", mount.mountpoint, "*.bin", "--json")
    assert done.returncode in (0, 4), done.stderr
    reply = json.loads(done.stdout)
    assert reply["warm_bytes"] > 0.8 * CACHE
    assert mount.stats()["pinned_bytes"] > 0.8 * CACHE
    mount.resize(32 * MIB)
    wait_for(lambda: mount.stats()["pinned_bytes"] <= 32 * MIB, "less is pinned")
    evicted = llmcache("evict", mount.mountpoint, "*.bin", "--json")
    assert evicted.returncode == 0, evicted.stderr
    wait_for(lambda: mount.stats()["pinned_bytes"] == 0, "nothing is pinned")
    assert resident_bytes(source / "loop.bin") < 8 * MIB, "although no process has it open"


def test_files_of_pin_are_warmed_up_at_once(source: Path, tmp_path: Path) -> None:
    forget(source / "loop.bin")
    options = ("--mode", "inplace", "--pin", "*.bin", "--metrics", "127.0.0.1:0")
    with live(source, tmp_path / "mnt", str(CACHE), *options) as mount:
        wait_for(lambda: mount.pinned_bytes("loop.bin") > 0.8 * CACHE, "what fits is pinned")
        heat = control.request(str(mount.mountpoint), {"op": "heat"})
        assert heat["mode"] == "inplace"
        assert sum(layer["pinned_bytes"] for file in heat["files"] for layer in file["layers"]) > 0.8 * CACHE
        text = llmcache("stats", mount.mountpoint, "--openmetrics").stdout
        assert 'mode="inplace"' in text and "llmcache_cpu_seconds_total" in text


def test_files_change_while_they_are_steered(empty: Path, tmp_path: Path) -> None:
    """While files are rewritten, truncated, replaced and deleted, readers see the contents of the file system."""
    source, point = empty, tmp_path / "mnt"
    past = time.time() - 60

    def make_file(name: str, byte: bytes, size: int = 40 * MIB) -> Path:
        path = source / name
        path.write_bytes(byte * size)
        os.utime(path, (past, past))
        return path

    make_file("one.bin", b"a")
    with live(source, point, str(CACHE), "--mode", "inplace") as mount:

        def is_steered() -> bool:
            (point / "one.bin").read_bytes()
            return any(file["path"] == "/one.bin" for file in mount.stats()["files"])

        wait_for(is_steered, "the file is steered")
        (source / "one.bin").write_bytes(b"b" * 40 * MIB)
        assert (point / "one.bin").read_bytes() == b"b" * 40 * MIB
        os.truncate(source / "one.bin", 33 * MIB)
        assert (point / "one.bin").read_bytes() == b"b" * 33 * MIB
        make_file("new.bin", b"c").rename(source / "one.bin")
        assert (point / "one.bin").read_bytes() == b"c" * 40 * MIB
        wait_for(is_steered, "the file is steered")
        with open(point / "one.bin", "rb") as file:
            (source / "one.bin").unlink()
            time.sleep(1.5)
            assert file.read() == b"c" * 40 * MIB
        wait_for(lambda: not mount.stats()["files"] or not any(f["open"] for f in mount.stats()["files"]), "it is closed")


def test_a_file_counts_as_closed_although_its_client_continues(source: Path, tmp_path: Path) -> None:
    with live(source, tmp_path / "mnt", str(CACHE), "--mode", "inplace") as mount:
        code = "import sys, time; open(sys.argv[1], 'rb').read(); print(1, flush=True); time.sleep(1000)"
        command = [sys.executable, "-c", code, str(mount.mountpoint / "loop.bin")]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline()
            wait_for(lambda: any(file["open"] for file in mount.stats()["files"]), "it is seen")
            wait_for(lambda: not any(file["open"] for file in mount.stats()["files"]), "it counts as closed")
            process.kill()
