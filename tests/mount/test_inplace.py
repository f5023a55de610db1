"""In place: the files' own page cache is steered; programs depend on nothing but the file system."""

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from llmcache.cache.steering import HUGE_BYTES, LEAST_LOOP_BYTES
from llmcache.cgroup import Cgroup
from llmcache.errors import EnvironmentProblem
from llmcache.fs import syscalls
from llmcache.fs.backends import files as backend_files
from llmcache.fs.backends.files import MappedFile
from llmcache.fs.backends.inplace import InPlaceBackend
from llmcache.fs.backends.touches import FILES, why_not
from llmcache.fs.client import control, mountpoint
from llmcache.fs.engine.engine import Engine
from llmcache.fs.engine.warmup import Warmer
from llmcache.fs.readahead import read_ahead_file
from llmcache.fs.vfs.source import Caller, SourceTree
from llmcache.kv.spill import KvShape, SpillFile
from llmcache.procfs import mounts
from tests.mount.fault_rig import run, small_disk
from tests.mount.live import LOOP_READER, MIB, OVERHEAD_BYTES, Live, live, llmcache, random_file, resident_bytes, wait_for
from tests.mount.test_faults import places_on_disk
from tools.bench.runner import crc_file, forget
from tools.bench.sides import read_ahead
from tools.make_model import BYTES_PER_VALUE, choose_shape, make_model

pytestmark = [pytest.mark.mount, pytest.mark.bpf]

SIZE = 128 * MIB
CACHE = 64 * MIB
CHECK = "loop.bin.crc.json"
CAP = SIZE
"""The cap of memory: less than the file, the daemon and what a reader takes, more than CACHE with them."""


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
    """A SOURCE of one test's own."""
    directory = tmp_path / "source"
    directory.mkdir()
    if reason := why_not(str(directory)):
        pytest.skip(reason)
    return directory


@pytest.fixture
def mount(source: Path, tmp_path: Path) -> Iterator[Live]:
    with live(source, tmp_path / "mnt", str(CACHE), "--mode", "inplace") as mount:
        yield mount


class Passes:
    """A process that reads a file again and again, and says so."""

    def __init__(self, command: list[str], name: str) -> None:
        self.process, self.name = subprocess.Popen(command, stdout=subprocess.PIPE, text=True), name

    def next(self) -> dict[str, Any]:
        """The next pass: its seconds, and how many MiB of it were wrong."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            if event["event"] == "step":
                return dict(event)
        raise AssertionError("the reader has ended")

    def until_kept(self, mount: Live, least_bytes: int) -> None:
        """Passes, all right, until `least_bytes` are pinned, or the file is left to the kernel and nothing is read."""
        deadline = time.monotonic() + 120
        while mount.pinned_bytes(self.name) < least_bytes:
            before = mount.stats()
            assert self.next()["wrong"] == 0 and time.monotonic() < deadline, before
            if is_left(before) and mount.stats()["backing_read_bytes"] == before["backing_read_bytes"]:
                return

    def __enter__(self) -> Passes:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def reader(path: Path, check: Path, how: str, wrap: Callable[[list[str]], list[str]] = list) -> Passes:
    words = [sys.executable, str(LOOP_READER), str(path), "--passes", "1000", "--how", how, "--check", str(check)]
    return Passes(wrap(words), path.name)


def is_left(stats: dict[str, Any]) -> bool:
    """Whether the loop is left to the kernel, which would read less."""
    return any(loop["left"] for file in stats["files"] for loop in file["loops"])


def passes_of(stats: dict[str, Any]) -> int:
    """How often the one loop was gone through."""
    return max(int(loop["passes"]) for file in stats["files"] for loop in file["loops"])


@pytest.mark.cgroup
@pytest.mark.parametrize("how", ["mmap", "read"])
def test_a_loop_that_does_not_fit_is_kept_as_far_as_it_goes(source: Path, tmp_path: Path, how: str) -> None:
    """And every byte of it is right, whatever becomes of the daemon."""
    forget(source / "loop.bin")
    with (
        Cgroup("inplace", directory=source, memory_bytes=CAP) as group,
        live(source, tmp_path / "mnt", str(CACHE), "--mode", "inplace", wrap=group.wrap) as mount,
        reader(mount.mountpoint / "loop.bin", source / CHECK, how, group.wrap) as passes,
    ):
        wrong = [passes.next()["wrong"] for _ in range(8)]
        # The window is as wide as storage is fast, up to half of the budget.
        wait_for(lambda: CACHE // 4 < mount.pinned_bytes("loop.bin") <= CACHE, "what fits is kept, less a window")
        before = after = mount.stats()
        assert before["mode"] == "inplace" and before["cpu_s"] > 0
        while (count := passes_of(after) - passes_of(before)) < 5:
            wrong.append(passes.next()["wrong"])
            after = mount.stats()
        dropped = (after["invalidated_bytes"] - before["invalidated_bytes"]) / count
        assert dropped < 0.9 * SIZE, "what is kept is not dropped and read again"

        mount.daemon.send_signal(signal.SIGSTOP)
        wrong += [passes.next()["wrong"] for _ in range(3)]
        mount.daemon.send_signal(signal.SIGCONT)
        wrong += [passes.next()["wrong"] for _ in range(3)]
        mount.daemon.kill()
        mount.daemon.wait()
        wrong += [passes.next()["wrong"] for _ in range(3)]
        with live(source, tmp_path / "again", str(CACHE), "--mode", "inplace", wrap=group.wrap) as another:
            passes.until_kept(another, CACHE // 4)  # it has taken over
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
@pytest.mark.parametrize("around", [[], CONTAINED], ids=["here", "in containers"])
def test_eight_readers_of_every_kind_read_what_is_there(source: Path, tmp_path: Path, around: list[str]) -> None:
    if around and subprocess.run([*around, "true"], check=False).returncode:
        pytest.skip("no namespaces for mounts and processes here")
    forget(source / "loop.bin")
    crc = zlib.crc32((source / "loop.bin").read_bytes())
    with (
        Cgroup("inplace-kinds", directory=source, memory_bytes=CAP + 64 * MIB) as group,
        live(source, tmp_path / "mnt", str(CACHE), "--mode", "inplace", wrap=group.wrap) as mount,
    ):
        commands = [[*around, sys.executable, "-c", READER, str(mount.mountpoint / "loop.bin"), how, "3"] for how in KINDS]
        readers = [subprocess.Popen(group.wrap(command), stdout=subprocess.PIPE, text=True) for command in commands]
        try:
            said = [reader.communicate(timeout=300)[0].split() for reader in readers]
        finally:
            for each in readers:
                each.kill()
                each.wait()
        assert said == [[str(crc)] * 3] * len(KINDS)
        wait_for(lambda: not any(file["open"] for file in mount.stats()["files"]), "all have ended")


@pytest.mark.cgroup
@pytest.mark.parametrize(("daemons", "programs"), [(None, CAP), (CACHE + 48 * MIB, 48 * MIB)])
def test_limits_of_daemon_and_program_apart(source: Path, tmp_path: Path, daemons: int | None, programs: int) -> None:
    """Who first brings a page in pays for it: the daemon for what it brings, a program for what it faults in itself."""
    forget(source / "loop.bin")
    with (
        Cgroup("inplace-daemon", directory=source, memory_bytes=daemons) as other,
        Cgroup("inplace-program", directory=source, memory_bytes=programs) as group,
        live(source, tmp_path / "mnt", str(CACHE), "--mode", "inplace", wrap=other.wrap) as mount,
        reader(mount.mountpoint / "loop.bin", source / CHECK, "mmap", group.wrap) as passes,
    ):
        assert not any(passes.next()["wrong"] for _ in range(10))
        # Where only the program has a limit, what the daemon brings stays beside it, and there is nothing to keep.
        # Where the kernel would read less, the loop is left to it.
        least, deadline = 0 if daemons is None else CACHE // 3, time.monotonic() + 120
        while mount.pinned_bytes("loop.bin") < least and not is_left(mount.stats()):
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
    """Its charged pages stay evictable while it needs more and more memory, and the loop is pinned nevertheless."""
    shape = choose_shape(160 * MIB, BYTES_PER_VALUE["gguf"], None, False)
    (model,) = make_model(empty / "model.gguf", shape, "gguf", 1, 0)
    forget(model)
    with (
        Cgroup("limited-client", directory=empty, memory_bytes=96 * MIB) as group,
        live(empty, tmp_path / "mnt", str(250 * MIB), "--mode", mode) as mount,
    ):
        command = group.wrap([sys.executable, "-c", GROWING, str(mount.mountpoint / "model.gguf")])
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            said = [line.strip() for line in client.stdout or ()]
            pinned = mount.pinned_bytes("model.gguf")
        assert client.returncode == 0 and said == ["done"] and group.usage().oom_kills == 0
        assert pinned >= 40 * MIB, mount.stats()


@contextmanager
def xfs(parent: Path) -> Iterator[tuple[Path, Path, Path]]:
    """A loop of SIZE on a file system of its own, the image that this is on, and the checksums of the loop."""
    if shutil.which("mkfs.xfs") is None:
        pytest.skip("no mkfs.xfs (package xfsprogs)")
    with small_disk(parent, 512, kind="xfs") as files:
        path = random_file(files / "loop.bin", SIZE)
        check = crc_file(path, parent)
        os.utime(path, (0, 0))
        forget(path)
        yield path, parent / "disk.img", check


@pytest.mark.cgroup
def test_xfs(tmp_path: Path) -> None:
    """The other file system with large folios; and how far its storage reads ahead, which is nobody else's."""
    with xfs(tmp_path) as (path, _, check), Cgroup("inplace-xfs", directory=tmp_path, memory_bytes=CAP) as group:
        setting = read_ahead_file(str(path.parent))
        assert setting is not None
        before = setting.read_text()
        words = ("--mode", "inplace", "--read-ahead", "64Ki")
        with live(path.parent, tmp_path / "mnt", str(CACHE), *words, wrap=group.wrap) as mount:
            assert setting.read_text() == "64\n"
            with reader(mount.mountpoint / "loop.bin", check, "mmap", group.wrap) as passes:
                passes.until_kept(mount, CACHE // 4)
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
def test_a_disk_that_fails_is_no_worse_for_being_steered(tmp_path: Path) -> None:
    """What cannot be read is asked for in vain, what is kept is there, and so is the rest of what was in one huge page."""
    with xfs(tmp_path) as (path, image, check), Cgroup("inplace-eio", directory=tmp_path, memory_bytes=CAP) as group:
        places = places_on_disk(path)
        run("mount", "-o", "remount,ro", path.parents[1])
        cut = sorted(places)[len(places) * 3 // 4 + 37]
        bad = {4096 * number // PIECE * PIECE for number, place in enumerate(places) if place >= cut}
        command = [sys.executable, "-c", STUBBORN]
        with (
            live(path.parent, tmp_path / "mnt", str(CACHE), "--mode", "inplace", wrap=group.wrap) as mount,
            Passes(group.wrap([*command, str(mount.mountpoint / "loop.bin")]), "loop.bin") as passes,
        ):
            deadline = time.monotonic() + 120
            while mount.pinned_bytes("loop.bin") < CACHE // 2:
                assert passes.next()["failed"] == [] and time.monotonic() < deadline, mount.stats()
            with image.open("r+b") as file:
                file.seek(cut)
                rest = file.read()
                file.truncate(cut)
                wait_for(lambda: passes.next()["failed"] != [], "what is broken is asked for")
                wait_for(lambda: set() < set(passes.next()["failed"]) < bad, "what is pinned is there")
                file.seek(cut)
                file.write(rest)
            wait_for(lambda: passes.next()["failed"] == [], "all is read again")
            with reader(mount.mountpoint / "loop.bin", check, "mmap", group.wrap) as others:
                assert [others.next()["wrong"] for _ in range(3)] == [0] * 3


@pytest.mark.cgroup
def test_two_models_in_turns(empty: Path, tmp_path: Path) -> None:
    """What is kept of one makes room for the other when that is used."""
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
                passes.until_kept(mount, CACHE // 3)


def test_as_many_files_as_can_be_are_watched_and_few_are_opened(empty: Path, tmp_path: Path) -> None:
    """Of more than that, the large ones."""
    source, point = empty, tmp_path / "mnt"
    for number in range(FILES + 100):
        path = source / f"{number}.bin"
        path.touch()
        os.truncate(path, 8 * MIB if number in (3, FILES + 97) else LEAST_LOOP_BYTES)
        os.utime(path, (0, 0))
    with live(source, point, str(CACHE), "--mode", "inplace") as mount:

        def known() -> bool:
            for number in (3, FILES + 97):
                (point / f"{number}.bin").read_bytes()
            return len(mount.stats()["files"]) == 2

        wait_for(known, "two files are steered")
        assert len(os.listdir(f"/proc/{mount.daemon.pid}/fd")) < 100
        assert mount.memory_bytes() < OVERHEAD_BYTES


def test_where_there_is_room_everything_stays(source: Path, mount: Live) -> None:
    data = (source / "loop.bin").read_bytes()

    def more_is_kept() -> bool:
        with open(mount.mountpoint / "loop.bin", "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
            assert zlib.crc32(view) == zlib.crc32(data)
        return int(mount.stats()["beyond_bytes"]) > 0

    wait_for(more_is_kept, "more than the budget is kept")
    assert mount.stats()["invalidated_bytes"] == 0


def test_what_is_pinned_in_small_pages_is_read_again_in_huge_ones(source: Path, tmp_path: Path) -> None:
    path = source / "loop.bin"
    forget(path)
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)  # in single pages
    while syscalls.cached_blocks(fd, 0, SIZE) < SIZE // 4096:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        for offset in range(0, SIZE, 4096):
            os.pread(fd, 1, offset)
    address = syscalls.mmap(fd, SIZE)

    def huge() -> int:
        for offset in range(0, SIZE, HUGE_BYTES):
            syscalls.madvise(address + offset, 4096, syscalls.MADV_POPULATE_READ)
        found = syscalls.huge_bytes(address, SIZE)
        syscalls.madvise(address, SIZE, syscalls.MADV_DONTNEED)
        return found

    assert huge() == 0
    with (
        live(source, tmp_path / "mnt", str(2 * SIZE), "--mode", "inplace") as mount,
        reader(mount.mountpoint / "loop.bin", source / CHECK, "read") as program,
    ):
        # the mount stops after the first 32 MiB where storage takes longer than 10 ms for 1 MB, as on a busy machine
        wait_for(lambda: program.next()["wrong"] == 0 and huge() >= 16 * MIB, "16 MiB are in huge pages")
        assert [program.next()["wrong"] for _ in range(20)] == [0] * 20
        assert mount.stats()["backing_read_bytes"] <= SIZE + SIZE // 4  # once is enough
    syscalls.munmap(address, SIZE)
    os.close(fd)


POPULATED = f"""
import os, sys
from llmcache.fs import syscalls
fd = os.open(sys.argv[1], os.O_RDONLY)
size = os.fstat(fd).st_size // {HUGE_BYTES} * {HUGE_BYTES}
address = syscalls.mmap(fd, size)
syscalls.madvise(address, size, syscalls.MADV_POPULATE_READ)
print(syscalls.huge_bytes(address, size), flush=True)
sys.stdin.read()
"""


def test_the_first_pass_over_what_fits_is_left_to_a_kernel_that_reads_huge_pages(empty: Path, tmp_path: Path) -> None:
    """What a program has mapped in small ones at first, it has so as long as it lives."""
    shape = choose_shape(200 * 10**6, BYTES_PER_VALUE["gguf"], None, False)
    (path,) = make_model(empty / "model.gguf", shape, "gguf", 1, 0)
    os.utime(path, (time.time() - 60,) * 2)

    @contextmanager
    def populated(of: Path) -> Iterator[int]:
        """Bytes in huge pages of a program that has mapped it all, and lives on."""
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
            with populated(mount.mountpoint / path.name) as huge:
                wait_for(lambda: mount.pinned_bytes(path.name) > 0.9 * path.stat().st_size, "it is kept nevertheless")
            assert huge > 0.9 * plain
            stats = mount.stats()
            assert stats["backing_read_bytes"] - stats["client_read_bytes"] < SIZE // 4


NEIGHBOUR = f"""
import sys, time
taken = []
while len(taken) < {3 * SIZE // 2 // MIB}:
    taken.append(b"x" * {MIB})
    time.sleep(0.02)
sys.stdin.read()
"""


@pytest.mark.cgroup
def test_memory_gets_short_while_it_is_read_again(source: Path, tmp_path: Path) -> None:
    """What was let go to be read again is not taken back beyond the limit; every byte is right meanwhile."""
    path = source / "loop.bin"
    forget(path)
    with (
        Cgroup("inplace-renewal", directory=source, memory_bytes=2 * SIZE + OVERHEAD_BYTES) as group,
        live(source, tmp_path / "mnt", str(SIZE), "--mode", "inplace", wrap=group.wrap) as mount,
        reader(mount.mountpoint / "loop.bin", source / CHECK, "read", group.wrap) as program,
    ):
        wait_for(lambda: program.next()["wrong"] == 0 and mount.stats()["backing_read_bytes"] > 0, "it is read again")
        with subprocess.Popen(group.wrap([sys.executable, "-c", NEIGHBOUR]), stdin=subprocess.PIPE) as neighbour:
            wait_for(lambda: program.next()["wrong"] == 0 and mount.stats()["limit_bytes"] < SIZE, "memory is short")
            for _ in range(20):
                assert program.next()["wrong"] == 0
            wait_for(lambda: (now := mount.stats())["pinned_bytes"] <= now["limit_bytes"], "what is pinned is what may be")
            assert neighbour.poll() is None
            neighbour.communicate()
        program.until_kept(mount, SIZE - HUGE_BYTES)
        assert group.usage().oom_kills == 0


def test_a_bind_mount_is_all_there_is(source: Path, tmp_path: Path) -> None:
    point = tmp_path / "mnt"
    with live(source, point, str(CACHE), "--mode", "inplace") as mount:
        assert os.path.samefile(point / "loop.bin", source / "loop.bin")
        entry = mountpoint.find(str(point))
        assert entry is not None and entry.fstype == mountpoint.IN_PLACE
        assert str(point) in mountpoint.ours()
        with pytest.raises(OSError, match="Read-only"):
            (point / "new.txt").write_text("x")
        with pytest.raises(EnvironmentProblem, match="Read-only") as caught:
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


def test_after_a_refused_umount_it_steers_on(empty: Path, tmp_path: Path) -> None:
    """What is mounted below MOUNT holds it, which is only seen when everything has been given back."""
    source, point = empty, tmp_path / "mnt"
    (source / "below").mkdir()
    path = random_file(source / "loop.bin", 40 * MIB)
    os.utime(path, (0, 0))
    with live(source, point, str(CACHE), "--mode", "inplace") as mount:

        def keeps() -> bool:
            (point / "loop.bin").read_bytes()
            return int(mount.stats()["pinned_bytes"]) > 30 * MIB

        wait_for(keeps, "the file is kept")
        syscalls.bind(str(tmp_path), str(point / "below"), 0)
        try:
            for _ in range(2):
                refused = llmcache("umount", point)
                assert refused.returncode == 4 and "busy" in refused.stderr
                wait_for(keeps, "the file is kept again")
        finally:
            syscalls.umount2(str(point / "below"), syscalls.UMOUNT_NOFOLLOW)
        assert llmcache("umount", point).returncode == 0
        assert mount.daemon.wait(60) == 0


def test_a_file_is_closed_after_the_last_read_of_it(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it was found changed meanwhile, and nothing is known of it any more."""
    begun, go_on = threading.Event(), threading.Event()

    def bring(mapping: MappedFile, _offset: int, _length: int) -> int:
        begun.set()
        assert go_on.wait(60)
        return os.fstat(mapping.backing.fd).st_size

    monkeypatch.setattr(MappedFile, "bring", bring)
    engine = Engine(CACHE, "inplace", SourceTree(str(source)))
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
        go_on.set()
        release.join(60)
        assert not release.is_alive()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(mapping.backing.fd)
        assert engine.stats()["read_bytes"] == 0
    finally:
        go_on.set()
        engine.stop()
        backend.close()


def test_a_file_that_was_cut_to_nothing_is_not_left_open(empty: Path) -> None:
    random_file(empty / "loop.bin", 8 * MIB)
    engine = Engine(CACHE, "inplace", SourceTree(str(empty)))
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
    """An engine in place in this process, whose own reads are those of a warm-up."""
    engine = Engine(CACHE, "inplace", SourceTree(str(source)))
    backend = engine.backend
    assert isinstance(backend, InPlaceBackend)
    engine.start(None, str(source))
    try:
        yield engine, backend
    finally:
        engine.stop()
        backend.close()


def test_a_file_that_finds_no_places_is_steered_once_there_are_some(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a closed file at once; `stats` says what is lacking until then."""
    names = ("one.bin", "two.bin", "three.bin")
    for name in names:
        os.utime(random_file(empty / name, 40 * MIB), (0, 0))
    monkeypatch.setattr(backend_files, "PLACES", 2 * 40 * MIB // HUGE_BYTES)  # two files, but each other one takes a place

    def lacking(engine: Engine) -> dict[str, int]:
        return {file["path"]: file["lacks_extents"] for file in engine.stats()["files"] if file["lacks_extents"]}

    with steering(empty) as (engine, backend):
        wait_for(lambda: len(backend.files.by_number) == len(names), "all are watched")
        one, two = (backend.files.open(f"/{name}", os.O_RDONLY, Caller(0, 0, os.getpid()))[0] for name in names[:2])
        assert lacking(engine) == {"/two.bin": 40 * MIB // HUGE_BYTES}
        backend.files.release(one)
        wait_for(lambda: not lacking(engine), "it is steered")
        assert backend.files.by_number[two].group is not None and backend.files.by_number[one].group is None
        backend.files.release(two)
        three, _ = backend.files.open("/three.bin", os.O_RDONLY, Caller(0, 0, os.getpid()))
        assert not lacking(engine), "the places of closed files are taken at once"
        backend.files.release(three)


def test_a_second_mount_in_place_over_the_same_files_is_refused(empty: Path, tmp_path: Path) -> None:
    """Each would take the reads of the other's daemon for a client's."""
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


def test_files_of_a_directory_that_cannot_be_opened_for_a_moment_are_not_forgotten(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (empty / "below").mkdir()
    os.utime(random_file(empty / "below" / "loop.bin", 8 * MIB), (0, 0))
    opened, refused = os.open, list[str]()

    def full(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if path == "below":
            refused.append(path)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(path, flags, mode, dir_fd=dir_fd)

    with steering(empty) as (_, backend):
        wait_for(lambda: len(backend.files.by_number) == 1, "it is watched")
        before = list(backend.files.by_number)
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", full)
            wait_for(lambda: len(refused) > 2, "walks cannot open it")
        wait_for(lambda: not backend.files.turn.locked(), "the walk has ended")
        assert list(backend.files.by_number) == before


def test_a_file_that_grows_is_watched_as_far_as_it_has_come(empty: Path) -> None:
    path = random_file(empty / "loop.bin", 8 * MIB)
    code = f"import os; os.pread(os.open('{path}', os.O_RDONLY), 4096, {30 * MIB})"
    command = f'{sys.executable} -c "{code}"; true'  # no child of the daemon
    with steering(empty) as (engine, backend):
        wait_for(lambda: len(backend.files.by_number) == 1, "it is watched")
        with path.open("ab") as file:
            file.write(os.urandom(32 * MIB))
        os.utime(path, (0, 0))

        def is_noticed() -> bool:
            subprocess.run(["sh", "-c", command], check=True)
            return any(file["size_bytes"] == 40 * MIB for file in engine.stats()["files"])

        wait_for(is_noticed, "a read of its new part is noticed", 20)


def test_a_link_is_followed_to_a_file_outside_source(empty: Path, tmp_path: Path) -> None:
    """It is what programs read that is steered, under the link's name; a link to what its owner may not read is not."""
    target, secret = (random_file(tmp_path / name, 40 * MIB) for name in ("blob", "secret"))
    os.utime(target, (0, 0))
    secret.chmod(0o600)
    (empty / "snapshots").mkdir()
    (empty / "snapshots" / "model.bin").symlink_to("../../blob")
    (empty / "stolen.bin").symlink_to(secret)
    os.lchown(empty / "stolen.bin", 65534, 65534)
    command = f"{sys.executable} -c \"open('{empty}/snapshots/model.bin', 'rb').read()\"; true"  # no child of the daemon
    with steering(empty) as (engine, backend):

        def is_read() -> bool:
            subprocess.run(["sh", "-c", command], check=True)
            return any(file["path"] == "/snapshots/model.bin" for file in engine.stats()["files"])

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


def test_a_warm_up_beside_another_of_the_same_file_keeps_it_open(empty: Path) -> None:
    """The first one to end does not close it under the other, which then says what is kept."""
    os.utime(random_file(empty / "loop.bin", 40 * MIB), (0, 0))
    forget(empty / "loop.bin")
    said: list[dict[str, Any]] = []
    waits = threading.Event()
    with steering(empty) as (engine, backend):
        warmer = Warmer(engine, backend.files)
        second = threading.Thread(target=lambda: said.append(warmer.warm(["*.bin"], lambda _: waits.set())))

        def on_progress(_progress: dict[str, Any]) -> None:
            if second.ident is None:
                second.start()
                assert waits.wait(60), "the second waits for its turn"

        said.append(warmer.warm(["*.bin"], on_progress))
        second.join(60)
        assert not any(file.programs for file in backend.files.by_number.values())
    assert [told["warm_bytes"] for told in said] == [told["wanted_bytes"] for told in said] == [40 * MIB] * 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "inplace, budget 33.6 MB (--cache), read-only"),
        (("--rw",), "inplace, budget 33.6 MB (--cache), writable"),
        (("--spill", ""), "inplace, budget 33.6 MB (--cache), read-only"),
        (("--spill", "*.tmp"), "steer (spill: in mode inplace either all files are writable or none), budget 33.6 MB"),
        (("-o", "fsname=models"), "inplace, budget 33.6 MB (--cache), read-only"),
        (("-o", "max_read=131072"), "steer (-o max_read=131072: is an option of FUSE"),
    ],
)
def test_auto_is_in_place_unless_it_cannot_be(source: Path, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    with live(source, tmp_path / "mnt", "32Mi", "--mode", "auto", *words) as mount:
        wait_for(lambda: f"llmcachefs: {mount.mountpoint}: {said}" in mount.log.read_text(), "it says what it does")
        assert (mount.mountpoint / CHECK).read_bytes() == (source / CHECK).read_bytes()


def test_a_source_that_the_mount_hides_cannot_be_steered_in_place(empty: Path) -> None:
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
    told = json.loads(done.stdout)
    assert told["warm_bytes"] > 0.8 * CACHE
    assert mount.stats()["pinned_bytes"] > 0.8 * CACHE
    mount.resize(32 * MIB)
    wait_for(lambda: mount.stats()["pinned_bytes"] <= 32 * MIB, "less is pinned")
    evicted = llmcache("evict", mount.mountpoint, "*.bin", "--json")
    assert evicted.returncode == 0, evicted.stderr
    wait_for(lambda: mount.stats()["pinned_bytes"] == 0, "nothing is pinned")
    assert resident_bytes(source / "loop.bin") < 8 * MIB, "though nobody has it open"


def test_pinned_files_are_brought_in_at_once(source: Path, tmp_path: Path) -> None:
    forget(source / "loop.bin")
    options = ("--mode", "inplace", "--pin", "*.bin", "--metrics", "127.0.0.1:0")
    with live(source, tmp_path / "mnt", str(CACHE), *options) as mount:
        wait_for(lambda: mount.pinned_bytes("loop.bin") > 0.8 * CACHE, "what fits is kept")
        heat = control.request(str(mount.mountpoint), {"op": "heat"})
        assert heat["mode"] == "inplace"
        assert sum(layer["pinned_bytes"] for file in heat["files"] for layer in file["layers"]) > 0.8 * CACHE
        told = llmcache("stats", mount.mountpoint, "--openmetrics").stdout
        assert 'mode="inplace"' in told and "llmcache_cpu_seconds_total" in told


def test_files_change_beneath_it(empty: Path, tmp_path: Path) -> None:
    """Rewritten, truncated, replaced and deleted while they are steered: readers see what the file system has."""
    source, point = empty, tmp_path / "mnt"
    past = time.time() - 60

    def made(name: str, byte: bytes, size: int = 40 * MIB) -> Path:
        path = source / name
        path.write_bytes(byte * size)
        os.utime(path, (past, past))
        return path

    made("one.bin", b"a")
    with live(source, point, str(CACHE), "--mode", "inplace") as mount:

        def known() -> bool:
            (point / "one.bin").read_bytes()
            return any(file["path"] == "/one.bin" for file in mount.stats()["files"])

        wait_for(known, "the file is steered")
        (source / "one.bin").write_bytes(b"b" * 40 * MIB)
        assert (point / "one.bin").read_bytes() == b"b" * 40 * MIB
        os.truncate(source / "one.bin", 33 * MIB)
        assert (point / "one.bin").read_bytes() == b"b" * 33 * MIB
        made("new.bin", b"c").rename(source / "one.bin")
        assert (point / "one.bin").read_bytes() == b"c" * 40 * MIB
        wait_for(known, "the file is steered")
        with open(point / "one.bin", "rb") as file:
            (source / "one.bin").unlink()
            time.sleep(1.5)
            assert file.read() == b"c" * 40 * MIB
        wait_for(lambda: not mount.stats()["files"] or not any(f["open"] for f in mount.stats()["files"]), "it is closed")


def test_who_closes_a_file_and_lives_on_gives_it_back(source: Path, tmp_path: Path) -> None:
    with live(source, tmp_path / "mnt", str(CACHE), "--mode", "inplace") as mount:
        code = "import sys, time; open(sys.argv[1], 'rb').read(); print(1, flush=True); time.sleep(1000)"
        command = [sys.executable, "-c", code, str(mount.mountpoint / "loop.bin")]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline()
            wait_for(lambda: any(file["open"] for file in mount.stats()["files"]), "it is seen")
            wait_for(lambda: not any(file["open"] for file in mount.stats()["files"]), "it is given back")
            process.kill()
