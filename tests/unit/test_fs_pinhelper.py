"""Which files the pin helper opens, when it ends, and which ranges it has locked."""

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

from llmcache.fs.backends import holders, pinhelper
from llmcache.fs.backends.holders import PinService
from llmcache.fs.backends.pinhelper import Helper, HighLimits
from llmcache.memory import UNLIMITED, lockable_bytes
from tests.property.kernel import wait_until
from tests.unit.fs_parts import MIB


def test_only_regular_files_below_the_mount_are_opened_and_no_link_is_followed(tmp_path: Path) -> None:
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


def test_a_reply_that_nobody_waits_for_any_more_ends_it_without_a_word(tmp_path: Path) -> None:
    """A daemon that is killed closes its pipes a moment before the helper is killed for it."""
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
    """Lock or unlock a part of the file; returns the reply."""
    return helper.handle(
        {"op": operation, "path": "/file", "offset": offset_mib * MIB, "length": length_mib * MIB, "free": []}
    )


def test_what_is_unlocked_without_a_request_is_reported(helper: Helper) -> None:
    """As memory.high is exceeded: with the next reply."""
    before = told(os.getpid(), "VmLck")
    for at in range(3):
        reply = change(helper, "lock", at * 2, 2)
        assert "errno" not in reply and "given" not in reply
    helper.give(3 * MIB)
    assert told(os.getpid(), "VmLck") - before == 3 * MIB
    assert helper.handle({"op": "check", "path": "", "look": 0}) == {"again": 0, "given": [("/file", 3 * MIB, 3 * MIB)]}
    assert helper.handle({"op": "detach", "path": "/file"}) == {}
    assert told(os.getpid(), "VmLck") == before


def test_memory_is_unlocked_in_one_call(helper: Helper, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above memory.high the kernel may suspend the helper for seconds after each call."""
    before = told(os.getpid(), "VmLck")
    for at in range(19, -1, -1):  # not in order, and with gaps
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
    assert told(os.getpid(), "VmLck") - before == 13 * MIB - 4096
    assert helper.given == [("/file", 25 * MIB - 4096, 10 * MIB + 4096)]
    helper.give(100 * MIB)
    assert len(calls) == 2
    assert told(os.getpid(), "VmLck") == before


def test_what_is_given_is_not_what_was_refused(helper: Helper, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses to split a range where a process has as many of them as it may have."""
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


def test_what_exceeds_memory_high_is_what_cannot_be_reclaimed(tmp_path: Path) -> None:
    limits = HighLimits()
    limits.groups = []
    for name, high, used in (("a", "max", 900), ("b", "300", 500), ("c", "300", 450)):
        (tmp_path / name).mkdir()
        texts = (f"{high}\n", f"{used}\n", "anon 80\ninactive_file 20\nactive_file 40\nunevictable 300\n")
        for file, text in zip(HighLimits.FILES, texts, strict=True):
            (tmp_path / name / file).write_text(text)
        limits.groups.append([os.open(tmp_path / name / file, os.O_RDONLY) for file in HighLimits.FILES])
    assert limits.excess() == 500 - 20 - 40 - 300
    (tmp_path / "b" / "memory.high").write_text("max\n")
    assert limits.excess() == 450 - 20 - 40 - 300
    (tmp_path / "c" / "memory.high").write_text("400\n")
    assert limits.excess() < 0
    for fds in limits.groups:
        for fd in fds:
            os.close(fd)


MADV_DONTNEED_LOCKED = 24


def test_what_is_not_mapped_any_more_is_locked_again(helper: Helper) -> None:
    for at in range(0, 40, 4):
        change(helper, "lock", at, 4)
    for at in (9, 37):
        assert pinhelper.libc.madvise(helper.files["/file"].address + at * MIB, MIB, MADV_DONTNEED_LOCKED) == 0
    assert helper.handle({"op": "check", "path": "", "look": 0}) == {"again": 0}
    found = [helper.handle({"op": "check", "path": "", "look": 1})["again"] for _ in range(10)]
    assert sum(found) == 24 * MIB and 0 in found  # in pieces of 16 MiB
    assert told(os.getpid(), "VmLck") >= 40 * MIB
    assert helper.charges.all_mapped(helper.files["/file"].address, 40 * MIB)


def test_what_was_unlocked_is_not_locked_again(helper: Helper) -> None:
    """Unlocks begin and end elsewhere than the locks did."""
    before = told(os.getpid(), "VmLck")
    change(helper, "lock", 0, 16)
    change(helper, "lock", 16, 8)
    change(helper, "unlock", 4, 2)
    change(helper, "unlock", 12, 6)
    change(helper, "unlock", 23, 1)
    for _ in range(10):
        assert helper.handle({"op": "check", "path": "", "look": 1}) == {"again": 0}
    assert told(os.getpid(), "VmLck") - before == 15 * MIB


FIRST_PROCESS = """
import os, sys
from llmcache.fs.backends.holders import PinService
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
def test_a_daemon_may_be_the_first_process_of_its_container(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(MIB))
    inside = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", FIRST_PROCESS]
    done = subprocess.run([*inside, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == [str(MIB)], done


def test_a_helper_whose_daemon_is_gone_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", pinhelper.__file__, str(tmp_path), str(os.getppid())]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE) as helper:
        assert helper.wait(60) == 0


@pytest.fixture
def service(tmp_path: Path) -> Iterator[PinService]:
    """A service whose helper has two files of 64 MiB, one of them locked."""
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


def told(pid: int, field: str) -> int:
    """What the kernel says of a helper's memory."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def locked(pid: int) -> int:
    """What a helper has locked of the tests' files: with cgroup v2 it locks its own program too."""
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
    """As pins that are spread through a loop are given up."""
    for at in range(0, 64, 2):
        service.unlock("/a", at * MIB, MIB)


CHANGES: dict[str, tuple[Callable[[PinService], None], int]] = {
    "parts": (unlock_every_second, 32),
    "part of what was locked in two": (lambda service: service.unlock("/a", 15 * MIB, 2 * MIB), 62),
    "detached": (lambda service: service.detach("/a"), 0),
    "another in its place": (lambda service: service.rename("/b", "/a"), 0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_locked_is_known(service: PinService, change: str) -> None:
    act, left = CHANGES[change]
    act(service)
    service.settle(60)
    assert service.locked_bytes == locked(service.pid) == left * MIB


@pytest.mark.parametrize("left", [4 * MIB, 0])
def test_what_is_given_up_when_the_helper_has_died_is_not_locked_once_more(service: PinService, left: int) -> None:
    """The OOM killer may have taken it: the same again would bring it back."""
    service.on_lost = lambda _for_good: service.unlock("/a", 0, 64 * MIB - left)
    before = service.pid
    os.kill(before, signal.SIGKILL)
    service.unlock("/b", 0, MIB)  # who asks finds out
    wait_until(lambda: service.pid != before and service.locked_bytes == left, "what is left is locked")
    service.lock("/b", 0, MIB)
    service.settle(60)
    wait_until(lambda: service.locked_bytes == left + MIB, "it goes on")
    assert locked(service.pid) == left + MIB
    assert told(service.pid, "VmHWM") < 32 * MIB


PAGE = 4096


@pytest.fixture
def map_count() -> int:
    """How many parts the kernel lets one process have its memory in; no more than a test can fill."""
    count = int(holders.MAP_COUNT.read_text())
    if count > 1 << 17:
        pytest.skip(f"vm.max_map_count is {count}")
    return count


def all_locked(service: PinService) -> int:
    """Bytes that the kernel says the helpers have locked."""
    return sum(map(locked, service.pids))


def test_more_runs_are_locked_than_one_process_may_have(service: PinService, tmp_path: Path, map_count: int) -> None:
    """Every second page of a file: each of them takes two parts of a process' memory."""
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
    service.lock("/many", PAGE, PAGE)  # between two of the first helper
    service.rename("/many", "/much")
    service.unlock("/much", 0, 2 * PAGE * (runs // 2))
    service.settle(300)
    assert service.locked_bytes == all_locked(service) == before + PAGE * (runs - runs // 2)
    os.kill(service.pids[1], signal.SIGKILL)  # while it is asked nothing
    left = set(service.pids[:1])
    wait_until(lambda: left < set(service.pids), "another one has what it had")
    wait_until(lambda: service.locked_bytes == before + PAGE * (runs - runs // 2), "all is locked again")
    service.detach("/much")
    service.settle(60)
    assert service.locked_bytes == all_locked(service) == before


def test_what_cannot_be_unlocked_counts_as_locked_and_is_tried_again(
    service: PinService, tmp_path: Path, map_count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """An unlock within a run needs two more parts of the process' memory."""
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
    wait_until(lambda: service.locked_bytes == 64 * MIB + PAGE * (pages // 4), "what was refused is unlocked")
    assert all_locked(service) == service.locked_bytes


def test_a_helper_that_is_full_is_spared(service: PinService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours of a run go to its helper as long as that has room for the holes that unlocks may make."""
    count = tmp_path / "max_map_count"
    count.write_text("8\n")
    monkeypatch.setattr(holders, "MAP_COUNT", count)
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
