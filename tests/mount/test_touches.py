"""Which accesses to files the kernel reports to an in-place mount; tests `mount.backends.touches` alone."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmcache.bpf.filemap import BY_FUNCTION, BY_TRACEPOINT, observable_by
from llmcache.bpf.libbpf import has_tracepoint
from llmcache.cache.space import HUGE_BYTES
from llmcache.mount.backends import touches as touches_module
from llmcache.mount.backends.touches import FAULT, MISS, QUIET_NS, Touches, why_not
from tests.mount.live import MIB, random_file

pytestmark = [pytest.mark.mount, pytest.mark.bpf]


@pytest.fixture(params=[BY_TRACEPOINT, pytest.param(BY_FUNCTION, marks=pytest.mark.fexit)], autouse=True)
def way(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Observe the page cache by tracepoints, as on Linux 6.12, and by functions, as on older kernels."""
    if request.param == BY_TRACEPOINT and observable_by() != BY_TRACEPOINT:
        pytest.skip("the kernel has no tracepoints for page cache accesses")
    monkeypatch.setattr(touches_module, "observable_by", lambda: request.param)
    if reason := why_not(str(tmp_path)):
        pytest.skip(reason)
    return str(request.param)


@pytest.mark.parametrize("faults", ["tracepoint", pytest.param("function", marks=pytest.mark.fexit), "nothing"])
def test_mapping_huge_pages_is_reported(
    way: str, faults: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the tracepoint for page faults (arm64), a probe at a kernel function is used; without both, none are seen."""
    if way == BY_FUNCTION and faults != "tracepoint":
        pytest.skip("the function that maps huge pages is observed")
    if faults != "tracepoint":
        monkeypatch.setattr(
            touches_module, "has_tracepoint", lambda name: name != "page_fault_user" and has_tracepoint(name)
        )
    if faults == "nothing":
        monkeypatch.setattr(touches_module, "_FAULTS", ((), ()))
    path = random_file(tmp_path / "file", 16 * MIB)
    begin = (
        "import mmap, re, sys\n"
        "file = open(sys.argv[1], 'rb'); data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n"
        "data.madvise(mmap.MADV_HUGEPAGE)\n"
    )
    touch = "for at in range(0, len(data), 4096): data[at]\n"
    Path("/proc/sys/vm/compact_memory").write_text("1")  # huge pages may be rare while other tests use memory
    subprocess.run([sys.executable, "-c", begin + touch, path], check=True)  # reads it in huge pages
    # Faults are reported only for processes that have read the file before.
    become_known = "file.read(4096); print(flush=True); sys.stdin.readline()\n"
    report = "print(sum(map(int, re.findall(r'FilePmdMapped: *(\\d+)', open('/proc/self/smaps').read()))), flush=True)\n"
    code = begin + become_known + touch + report
    # Reads of this process's children are ignored, so the client is a grandchild.
    command = ["sh", "-c", '"$0" -c "$1" "$2"; true', sys.executable, code, str(path)]
    caplog.set_level(logging.WARNING)
    touches = Touches()
    try:
        touches.watch(7, path.stat(), 0, 8, HUGE_BYTES)
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as client:
            assert client.stdin is not None and client.stdout is not None
            client.stdout.readline()
            assert {touch.extent for touch in touches.wait(1)} == {0}
            client.stdin.write("\n")
            huge_kib = int(client.stdout.readline())
        if huge_kib << 10 < 16 * MIB:
            pytest.skip("this file system has no folios as large as a huge page")
        found = {touch.extent for touch in touches.wait(0)}
        assert found >= set(range(1, 8)) if faults != "nothing" else "not observed" in caplog.text
    finally:
        touches.close()


def test_touches_are_reported_once_per_quiet_time(tmp_path: Path) -> None:
    """A program that reads cached data at full speed causes a touch per extent and quiet time, not per read."""
    path = random_file(tmp_path / "file", 64 * MIB)
    touches = Touches()
    try:
        touches.watch(7, path.stat(), 0, 32, HUGE_BYTES)
        began = time.monotonic_ns()
        code = f"for _ in range(30):\n f = open({str(path)!r}, 'rb', buffering=0)\n while f.read(65536): pass"
        subprocess.run(["sh", "-c", 'python3 -c "$0"; true', code], check=True)
        quiet_times = (time.monotonic_ns() - began) // QUIET_NS + 1
        found = touches.wait(0)
        assert {touch.extent for touch in found} == set(range(32))
        assert {touch.file for touch in found} == {7}
        assert 32 <= len(found) <= 32 * quiet_times
        assert touches.lost == 0
    finally:
        touches.close()


CLIENT = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
mapped = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
mapped.madvise(mmap.MADV_RANDOM)
sys.stdin.readline()
for word in sys.argv[2:]:
    how, at, size = word.split(",")
    if how == "read":
        os.pread(fd, int(size), int(at))
    else:
        mapped[int(at)]
print(os.getpid())
"""


def test_reads_and_faults_of_absent_and_cached_pages_differ(tmp_path: Path) -> None:
    """A read within one system call touches all its extents; a fault on an absent page is a miss, also right after a hit."""
    path = random_file(tmp_path / "file", 64 * MIB)
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    for at in (20 * MIB, 30 * MIB):
        os.pread(fd, 1 << 16, at)
    os.close(fd)
    words = [
        f"read,0,{10 * MIB}",  # extents 0 to 4
        f"fault,{20 * MIB},1",  # extent 10, cached
        f"fault,{22 * MIB - 4096},1",  # extent 10, absent
        f"fault,{24 * MIB},1",  # extent 12, absent
        f"read,{30 * MIB},4096",  # extent 15, cached
        f"fault,{30 * MIB},1",
    ]
    command = ["sh", "-c", '"$0" -c "$@"; true', sys.executable, CLIENT, str(path), *words]
    touches = Touches()
    try:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
            touches.watch(7, path.stat(), 0, 32, HUGE_BYTES)
            pid = int(client.communicate("\n")[0])
        found = touches.wait(0)
        assert {touch.pid for touch in found} == {pid}
        assert [touch.t_ns for touch in found] == sorted(touch.t_ns for touch in found)
        reads = touches.reads(7)
        assert 10 * MIB <= reads.client_bytes <= 16 * MIB and not reads.own_bytes
    finally:
        touches.close()
    by_extent: dict[int, list[int]] = {}
    for touch in found:
        by_extent.setdefault(touch.extent, []).append(touch.flags)
    assert by_extent.keys() == {0, 1, 2, 3, 4, 10, 12, 15}
    assert {flags for extent in range(5) for flags in by_extent[extent]} == {0}
    assert by_extent[10] == [FAULT, MISS | FAULT]
    assert by_extent[12][-1] == MISS | FAULT
    assert by_extent[15][0] == 0
