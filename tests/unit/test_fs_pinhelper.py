"""The pin helper: which files it opens, which ranges it locks and unlocks, and when it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from llmcache.memory import UNLIMITED, lockable_bytes
from llmcache.mount.backends import pinhelper, pins
from llmcache.mount.backends.pinhelper import Helper, HighLimits
from llmcache.mount.backends.pins import PinService
from tests.property.kernel import wait_until
from tests.unit.fs_parts import MIB


def test_only_regular_files_below_the_mount_are_opened(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_bytes(b"x" * 5000)
    mount = tmp_path / "mnt"
    (mount / "dir").mkdir(parents=True)
    (mount / "dir" / "file").write_bytes(b"x" * 4096)
    (mount / "way").symlink_to(tmp_path / "outside")
    (mount / "link").symlink_to("dir/file")
    os.mkfifo(mount / "pipe")
    helper = Helper(str(mount))
    assert helper.handle({"op": "attach", "path": "/dir/file"}) == {
        "node": (mount / "dir" / "file").stat().st_ino,
        "size": 4096,
    }
    for path in ("/way/file", "/link", "/pipe", "/dir", "/none"):
        reply = helper.handle({"op": "attach", "path": path})
        assert list(reply) == ["errno"], path
    helper.handle({"op": "detach", "path": "/dir/file"})


def test_a_closed_pipe_ends_the_helper_silently(tmp_path: Path) -> None:
    """The pipes of a killed daemon close just before its helper is killed."""
    command = [sys.executable, "-I", "-S", pinhelper.__file__, str(tmp_path), str(os.getpid())]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True) as helper:
        assert helper.stdin is not None and helper.stdout is not None and helper.stderr is not None
        helper.stdout.close()
        helper.stdin.write(json.dumps({"op": "attach", "path": "/none"}) + "\n")
        helper.stdin.flush()
        assert helper.wait(60) == -signal.SIGPIPE
        assert helper.stderr.read() == ""


@pytest.fixture
def helper(tmp_path: Path) -> Iterator[Helper]:
    """A helper with an attached file of 40 MiB."""
    if lockable_bytes() < UNLIMITED:
        pytest.skip("memory cannot be locked")
    (tmp_path / "file").write_bytes(bytes(40 * MIB))
    helper = Helper(str(tmp_path))
    helper.handle({"op": "attach", "path": "/file"})
    yield helper
    helper.handle({"op": "detach", "path": "/file"})


def change(helper: Helper, operation: str, offset_mib: int, length_mib: int) -> dict[str, Any]:
    """Lock or unlock a range of the file and return the reply."""
    return helper.handle(
        {"op": operation, "path": "/file", "offset": offset_mib * MIB, "length": length_mib * MIB, "free": []}
    )


def test_ranges_unlocked_without_a_request_are_reported(helper: Helper) -> None:
    """The helper unlocks when memory.high is exceeded and reports it with the next reply."""
    before = status_bytes(os.getpid(), "VmLck")
    for at in range(3):
        reply = change(helper, "lock", at * 2, 2)
        assert "errno" not in reply and "given" not in reply
    helper.give(3 * MIB)
    assert status_bytes(os.getpid(), "VmLck") - before == 3 * MIB
    assert helper.handle({"op": "check", "path": "", "look": 0}) == {"again": 0, "given": [("/file", 3 * MIB, 3 * MIB)]}
    assert helper.handle({"op": "detach", "path": "/file"}) == {}
    assert status_bytes(os.getpid(), "VmLck") == before


def test_memory_is_unlocked_in_one_call(helper: Helper, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above memory.high, the kernel may suspend the helper for seconds after each call."""
    before = status_bytes(os.getpid(), "VmLck")
    for at in range(19, -1, -1):  # out of order, and with gaps
        change(helper, "lock", 2 * at, 1)
    change(helper, "unlock", 36, 3)
    calls: list[tuple[int, int]] = []

    def unlock(address: int, length: int) -> int:
        calls.append((address, length))
        return actual(address, length)

    actual = pinhelper.unlock
    monkeypatch.setattr(pinhelper, "unlock", unlock)
    helper.give(5 * MIB + 1)
    assert len(calls) == 1
    assert status_bytes(os.getpid(), "VmLck") - before == 13 * MIB - 4096
    assert helper.given == [("/file", 25 * MIB - 4096, 10 * MIB + 4096)]
    helper.give(100 * MIB)
    assert len(calls) == 2
    assert status_bytes(os.getpid(), "VmLck") == before


def test_ranges_whose_unlock_was_refused_are_not_reported(helper: Helper, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses to split a range when the process has the maximum number of mappings."""
    change(helper, "lock", 0, 10)
    refused = [-1, 0]
    monkeypatch.setattr(pinhelper, "unlock", lambda *_: refused.pop(0))
    helper.give(MIB)
    assert helper.given == [("/file", 0, 10 * MIB)]
    change(helper, "lock", 0, 10)
    refused[:] = [-1, -1]
    helper.given.clear()
    helper.give(MIB)
    assert not helper.given and helper.files["/file"].locked == [(0, 10 * MIB)]


def test_the_excess_over_memory_high_excludes_reclaimable_memory(tmp_path: Path) -> None:
    limits = HighLimits()
    limits.spaces = []
    for name, high, used in (("a", "max", 900), ("b", "300", 500), ("c", "300", 450)):
        (tmp_path / name).mkdir()
        texts = (f"{high}\n", f"{used}\n", "anon 80\ninactive_file 20\nactive_file 40\nunevictable 300\n")
        for file, text in zip(HighLimits.FILES, texts, strict=True):
            (tmp_path / name / file).write_text(text)
        limits.spaces.append([os.open(tmp_path / name / file, os.O_RDONLY) for file in HighLimits.FILES])
    assert limits.excess() == 500 - 20 - 40 - 300
    (tmp_path / "b" / "memory.high").write_text("max\n")
    assert limits.excess() == 450 - 20 - 40 - 300
    (tmp_path / "c" / "memory.high").write_text("400\n")
    assert limits.excess() < 0
    for fds in limits.spaces:
        for fd in fds:
            os.close(fd)


MADV_DONTNEED_LOCKED = 24


def test_locked_pages_that_were_unmapped_are_locked_again(helper: Helper) -> None:
    for at in range(0, 40, 4):
        change(helper, "lock", at, 4)
    for at in (9, 37):
        assert pinhelper.libc.madvise(helper.files["/file"].address + at * MIB, MIB, MADV_DONTNEED_LOCKED) == 0
    assert helper.handle({"op": "check", "path": "", "look": 0}) == {"again": 0}
    found = [helper.handle({"op": "check", "path": "", "look": 1})["again"] for _ in range(10)]
    assert sum(found) == 24 * MIB and 0 in found  # in steps of 16 MiB
    assert status_bytes(os.getpid(), "VmLck") >= 40 * MIB
    assert helper.charges.all_mapped(helper.files["/file"].address, 40 * MIB)


def test_unlocked_ranges_are_not_locked_again(helper: Helper) -> None:
    """The unlocked ranges have other borders than the locked ones."""
    before = status_bytes(os.getpid(), "VmLck")
    change(helper, "lock", 0, 16)
    change(helper, "lock", 16, 8)
    change(helper, "unlock", 4, 2)
    change(helper, "unlock", 12, 6)
    change(helper, "unlock", 23, 1)
    for _ in range(10):
        assert helper.handle({"op": "check", "path": "", "look": 1}) == {"again": 0}
    assert status_bytes(os.getpid(), "VmLck") - before == 15 * MIB


FIRST_PROCESS = """
import os, sys
from llmcache.mount.backends.pins import PinService
assert os.getpid() == 1
service = PinService(lambda _path, _node: None, print, print)
service.start(sys.argv[1])
service.attach("/file")
service.lock("/file", 0, 1 << 20)
service.settle(60)
print(service.locked_bytes)
service.stop()
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="a pid namespace needs root and util-linux")
def test_a_daemon_can_be_the_first_process_of_its_container(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(MIB))
    inside = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", FIRST_PROCESS]
    done = subprocess.run([*inside, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == [str(MIB)], done


def test_a_helper_without_a_daemon_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", pinhelper.__file__, str(tmp_path), str(os.getppid())]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE) as helper:
        assert helper.wait(60) == 0


@pytest.fixture
def service(tmp_path: Path) -> Iterator[PinService]:
    """A service whose helper has attached two files of 64 MiB and locked one of them."""
    if lockable_bytes() < UNLIMITED:
        pytest.skip("memory cannot be locked")
    service = PinService(lambda _path, _node: None, lambda *_failed: None, lambda _for_good: None)
    service.start(str(tmp_path))
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(bytes(64 * MIB))
        service.attach(f"/{name}")
    service.lock("/a", 0, 64 * MIB)
    service.settle(60)
    yield service
    service.stop()


def status_bytes(pid: int, field: str) -> int:
    """Return a field of a process's memory status in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def locked(pid: int) -> int:
    """Return the bytes that a helper has locked in files of the tests; with cgroup v2 it also locks its own program."""
    total = size = 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        word, *rest = line.split()
        if not word.endswith(":"):
            ours = rest[0] == "r--s" and "/usr/" not in line
        elif word == "Size:":
            size = int(rest[0]) * 1024
        elif word == "VmFlags:" and "lo" in rest and ours:
            total += size
    return total


def unlock_every_second(service: PinService) -> None:
    """Unlock every second MiB, as for pins spread through a loop."""
    for at in range(0, 64, 2):
        service.unlock("/a", at * MIB, MIB)


CHANGES: dict[str, tuple[Callable[[PinService], None], int]] = {
    "parts": (unlock_every_second, 32),
    "a range across two locks": (lambda service: service.unlock("/a", 15 * MIB, 2 * MIB), 62),
    "detached": (lambda service: service.detach("/a"), 0),
    "replaced by another file": (lambda service: service.rename("/b", "/a"), 0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_locked_bytes_follow_each_change(service: PinService, change: str) -> None:
    act, left = CHANGES[change]
    act(service)
    service.settle(60)
    assert service.locked_bytes == locked(service.pid) == left * MIB


@pytest.mark.parametrize("left", [4 * MIB, 0])
def test_ranges_released_after_the_helper_died_are_not_locked_again(service: PinService, left: int) -> None:
    """The OOM killer may have killed it, and the same locks would trigger it again."""
    service.on_lost = lambda _for_good: service.unlock("/a", 0, 64 * MIB - left)
    before = service.pid
    os.kill(before, signal.SIGKILL)
    service.unlock("/b", 0, MIB)  # the request reveals the dead helper
    wait_until(lambda: service.pid != before and service.locked_bytes == left, "the rest is locked again")
    service.lock("/b", 0, MIB)
    service.settle(60)
    wait_until(lambda: service.locked_bytes == left + MIB, "the service works again")
    assert locked(service.pid) == left + MIB
    assert status_bytes(service.pid, "VmHWM") < 32 * MIB


PAGE = 4096


@pytest.fixture
def map_count() -> int:
    """Return the maximum number of mappings per process; skip the test if it cannot be reached."""
    count = int(pins.MAP_COUNT.read_text())
    if count > 1 << 17:
        pytest.skip(f"vm.max_map_count is {count}")
    return count


def all_locked(service: PinService) -> int:
    """Return the bytes that the helpers have locked according to the kernel."""
    return sum(map(locked, service.pids))


def test_more_ranges_are_locked_than_one_process_may_map(service: PinService, tmp_path: Path, map_count: int) -> None:
    """Every second page of a file is locked; each takes two mappings."""
    failed: list[tuple[object, ...]] = []
    service.on_failed = lambda *what: failed.append(what)
    runs = map_count // 2 + 1000
    with (tmp_path / "many").open("wb") as file:
        file.truncate(2 * PAGE * runs)
    service.attach("/many")
    before = service.locked_bytes
    for number in range(runs):
        service.lock("/many", 2 * PAGE * number, PAGE)
    service.settle(300)
    assert not failed
    assert service.locked_bytes == all_locked(service) == before + PAGE * runs
    assert len(service.pids) > 1
    service.lock("/many", PAGE, PAGE)  # between two ranges of the first helper
    service.rename("/many", "/much")
    service.unlock("/much", 0, 2 * PAGE * (runs // 2))
    service.settle(300)
    assert service.locked_bytes == all_locked(service) == before + PAGE * (runs - runs // 2)
    os.kill(service.pids[1], signal.SIGKILL)  # while no request is pending
    left = set(service.pids[:1])
    wait_until(lambda: left < set(service.pids), "a new helper takes over its ranges")
    wait_until(lambda: service.locked_bytes == before + PAGE * (runs - runs // 2), "all ranges are locked again")
    service.detach("/much")
    service.settle(60)
    assert service.locked_bytes == all_locked(service) == before


def test_a_refused_unlock_counts_as_locked_and_is_retried(
    service: PinService, tmp_path: Path, map_count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """An unlock inside a range needs two more mappings."""
    pages = map_count + 2000
    with (tmp_path / "many").open("wb") as file:
        file.truncate(PAGE * pages)
    service.attach("/many")
    service.lock("/many", 0, PAGE * pages)
    for number in range(1, pages, 2):
        service.unlock("/many", PAGE * number, PAGE)
    service.settle(300)
    assert service.locked_bytes == all_locked(service) > 64 * MIB + PAGE * (pages // 2 + 100)
    assert sum("cannot unlock" in record.message for record in caplog.records) == 1
    service.unlock("/many", 0, PAGE * (pages // 2))
    wait_until(lambda: service.locked_bytes == 64 * MIB + PAGE * (pages // 4), "the refused ranges are unlocked")
    assert all_locked(service) == service.locked_bytes


def test_a_full_helper_gets_no_more_ranges(service: PinService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adjacent ranges go to the same helper while it has mappings left for the holes that unlocks may make."""
    count = tmp_path / "max_map_count"
    count.write_text("8\n")
    monkeypatch.setattr(pins, "MAP_COUNT", count)
    service.stop()
    service.start(str(tmp_path))
    service.attach("/a")
    for at in (0, 1, 2, 3, 4, 20, 30, 40, 41):
        service.lock("/a", at * MIB, MIB)
    service.settle(60)
    assert [locked(pid) // MIB for pid in service.pids] == [4, 2, 3]
    assert service.locked_bytes == 9 * MIB
    service.lock("/a", 0, 64 * MIB)  # no byte is locked twice
    service.settle(60)
    assert service.locked_bytes == all_locked(service) == 64 * MIB
