"""Adjacent blocks become runs with exactly the blocks read; losses are counted; child processes are followed."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llmcache.errors import MissingRequirement
from llmcache.trace.kernel import FilemapSource
from llmcache.trace.record import HIT, MISS
from llmcache.trace.records import EVICT, FILL, Scope
from tests.trace.conftest import BLOCKS, PATIENCE_S, TOUCHED, Recording, drop, lock, recorded, warm, warm_but

pytestmark = pytest.mark.filemap
Record = Callable[..., Recording]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("cached", [True, False])
def test_large_requests_are_counted_once(cached: bool, record: Record, file: Path) -> None:
    if cached:
        warm(file)
    found = record("sequential")
    assert found.blocks() == list(range(BLOCKS)), found
    assert found.requests == 16
    assert set(found.accesses["miss"]) == {HIT if cached else MISS}, found
    assert not cached or len(found.accesses) < 16, "fills end runs, and their number depends on storage"
    fills = found.blocks(FILL)
    assert list(dict.fromkeys(fills)) == ([] if cached else list(range(BLOCKS)))
    assert len(fills) == len(set(fills)) or found.blocks(EVICT), "no block is filled twice, unless the kernel evicted it"


@pytest.mark.parametrize("folios", ["small", "large"])
def test_every_page_of_a_mapping_counts_once_per_pass(folios: str, record: Record, file: Path) -> None:
    if folios == "small":
        warm(file)
    else:
        file.read_bytes()
        lock(file)
    found = record("scan")
    assert found.blocks() == 3 * list(range(BLOCKS)), found
    assert set(found.accesses["miss"]) == {HIT}
    assert found.lost == 0


def test_an_unmapped_page_does_not_count_its_neighbors_twice(record: Record, file: Path) -> None:
    warm_but(file, 675)
    found = record("scan")
    assert found.blocks() == 3 * list(range(BLOCKS)), found
    assert found.blocks(FILL) == found.blocks(miss=MISS) == [675], found


def test_nothing_is_merged_without_coalescing(record: Record, file: Path) -> None:
    warm(file)
    # Drained at the end, because a drain in the middle of a request makes two records of it.
    found = record("sequential", coalesce=False, lazy=True)
    assert found.blocks() == list(range(BLOCKS)), found
    assert found.requests == len(found.accesses) == 16


def test_a_block_shared_by_successive_requests_counts_once(record: Record, file: Path) -> None:
    warm(file)
    found = record("unaligned")
    assert found.blocks() == list(range(-(-400_000 // 4096))), found
    assert found.requests == 40


@pytest.mark.parametrize(
    ("way", "passes", "blocks"), [("unaligned passes", 50, 1023), ("scan", 3, BLOCKS), ("slowly", 1, 64)]
)
def test_continuous_draining_changes_nothing(way: str, passes: int, blocks: int, record: Record, file: Path) -> None:
    """The flush may run at any moment and is often interrupted by other load on the machine."""
    warm(file)
    found = record(way, pause=0)
    assert found.blocks() == passes * list(range(blocks)), found
    assert found.lost == 0


@pytest.mark.parametrize("missing", [0, 26, 27, 28, 29, 30, 97])
def test_a_block_read_from_storage_does_not_count_its_request_twice(missing: int, record: Record, file: Path) -> None:
    warm_but(file, missing)
    found = record("unaligned")
    assert found.blocks() == list(range(-(-400_000 // 4096))), found
    assert found.requests == 40
    assert found.blocks(FILL) == found.blocks(miss=MISS) == [missing], found


def test_a_file_read_to_its_end_gives_exactly_its_blocks(file: Path) -> None:
    size = (64 << 20) + 1234
    content = os.urandom(size)
    file.write_bytes(content)
    os.sync()
    drop(file)
    script = "import hashlib,sys; sys.stdin.read(1); print(hashlib.sha256(open(sys.argv[1],'rb').read()).hexdigest())"
    found = recorded([sys.executable, "-c", script, file], file)
    assert found.output.strip() == hashlib.sha256(content).hexdigest()
    assert found.blocks() == list(range(-(-size // 4096))), found
    assert sorted(found.blocks(miss=MISS)) == found.blocks(), found
    assert found.lost == 0


def test_records_that_do_not_fit_the_ring_are_counted_as_lost(record: Record, file: Path) -> None:
    warm(file)
    found = record("often", lazy=True, coalesce=False)
    assert found.lost > 0
    # The lost requests may include other files of the program.
    assert 400_000 <= found.requests + found.lost < 400_100


def test_children_are_followed_or_not(record: Record, file: Path) -> None:
    warm(file)
    followed = record("fork")
    assert sorted(followed.blocks()) == TOUCHED
    assert followed.pid not in followed.accesses["pid"]
    assert record("fork", follow=False).blocks() == []


def test_a_missing_process_is_an_error() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    with pytest.raises(MissingRequirement, match=rf"process {process.pid} does not exist"):
        FilemapSource().start(Scope([process.pid]))


def test_processes_have_the_recorders_numbers_in_a_pid_namespace(paths: Path, file: Path) -> None:
    script = (
        "import json,subprocess,sys\n"
        "from tests.trace.conftest import drained\n"
        "from llmcache.trace.kernel import FilemapSource\n"
        "from llmcache.trace.records import Scope\n"
        "p=subprocess.Popen(sys.argv[1:],stdin=subprocess.PIPE,text=True,stdout=subprocess.DEVNULL)\n"
        "s=FilemapSource(); s.start(Scope([p.pid])); p.stdin.write('x\\n'); p.stdin.close()\n"
        "r=drained(s,p); r=r[r['kind']==0]\n"
        "print(json.dumps([p.pid,sorted(set(r['pid'].tolist())),int(r['aux'].sum())]))\n"
    )
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", script, str(paths), str(file), "pread"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S)
    if "unshare" in ended.stderr:
        pytest.skip(ended.stderr.strip())
    assert ended.returncode == 0, ended.stderr
    pid, pids, requests = json.loads(ended.stdout)
    assert pid < 1000, "the namespace has its own process numbers"
    assert pids == [pid]
    assert requests >= 23


def test_short_processes_are_recorded_completely(file: Path) -> None:
    warm(file)
    script = f"read line; for i in $(seq 100); do dd if={file} of=/dev/null bs=4096 count=1 skip=$i status=none; done"
    # Drained continuously: then a thread often ends while its run is being sent.
    found = recorded(["sh", "-c", script], file, pause=0)
    assert found.blocks() == list(range(1, 101)), found
    assert len(set(found.accesses["pid"])) == 100
    assert found.lost == 0
