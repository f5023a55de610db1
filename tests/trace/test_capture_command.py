"""The command `llmcache trace`: how it ends, file names, errors, and the files that a killed recorder leaves."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from llmcache.errors import DataError
from llmcache.trace.formats import open_trace
from llmcache.trace.record import MISS, Trace
from tests.mount.live import wait_for
from tests.trace.conftest import BLOCKS, PATIENCE_S, drop, warm

pytestmark = pytest.mark.filemap
LLMCACHE = [sys.executable, "-m", "llmcache", "trace"]
SLOW_READER = """
import os, sys, time
fd = os.open(sys.argv[1], os.O_RDONLY)
print("ready", flush=True)
while True:
    for block in range(64):
        os.pread(fd, 4096, block * 4096)
    time.sleep(0.01)
"""
# Reads blocks given on stdin: one line per thread, all threads concurrently.
READ_BLOCKS = """
import os, sys, threading
fd = os.open(sys.argv[1], os.O_RDONLY)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
def work(blocks):
    for block in blocks:
        assert len(os.pread(fd, 4096, 4096 * block)) == 4096
threads = [threading.Thread(target=work, args=([int(word) for word in line.split()],)) for line in sys.stdin]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
ORDERS = {
    "random": [random.Random(11).choices(range(BLOCKS), k=5000)],
    "backwards": [list(range(BLOCKS - 1, 0, -3))],
    "threads, interleaved": [list(range(part, BLOCKS, 4)) for part in range(4)],
}
# Keeps a file open until the recorder, which looks names up once a second, has written its name.
KEEP_OPEN = """
import os, sys, time
path, name, recording = sys.argv[1:4]
fd = os.open(path, os.O_RDONLY)
exec(sys.argv[4])
for block in range(int(sys.argv[5])):
    os.pread(fd, 4096, block * 4096)
deadline = time.monotonic() + 60
while f'"path": "{name}"'.encode() not in open(recording, "rb").read():
    assert time.monotonic() < deadline
    time.sleep(0.05)
"""


def run(*arguments: str | int | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [*LLMCACHE, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, **more)


def recorded(path: Path, trace: Path) -> list[int]:
    """Return the blocks of the file `path` in the trace, in order."""
    found = Trace.load(trace)
    ids = {file.id for file in found.files if file.path == str(path)}
    assert ids, [file.path for file in found.files]
    rows = zip(found.file.tolist(), found.first.tolist(), found.count.tolist(), strict=True)
    return [block for file, first, count in rows if file in ids for block in range(first, first + count)]


@pytest.fixture
def reader(file: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that reads the first 64 blocks of the file repeatedly."""
    command = [sys.executable, "-c", SLOW_READER, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def started(*arguments: str | int | Path, under: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Start a recorder, and return it once it reports that it is recording."""
    command = [*under, *LLMCACHE, *map(str, arguments)]
    recorder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert recorder.stderr is not None
    assert "recording" in recorder.stderr.readline()
    return recorder


def reads(process: subprocess.Popen[str]) -> int:
    return int(Path(f"/proc/{process.pid}/io").read_text().split()[1])


def kept_open(out: Path, path: Path, name: Path, change: str, blocks: int) -> subprocess.CompletedProcess[str]:
    """Record a process that opens `path` and applies `change`.

    The process then reads, and keeps the file open until the recorder has its `name`.
    """
    words: list[str | int | Path] = [path, name, f"{out}.recording", change, blocks]
    return run("-o", out, "--force", "--", sys.executable, "-c", KEEP_OPEN, *words)


def test_a_command_is_recorded_from_its_first_access_to_its_last(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.parquet"
    done = run("-o", out, "--json", "--", "sh", "-c", f"cat {file} > /dev/null; exit 3")
    assert done.returncode == 0, done.stderr
    assert recorded(file, out) == list(range(BLOCKS))
    summary = json.loads(done.stdout)
    assert summary["schema"] == "llmcache.capture/1"
    assert summary["ending"] == "exit status 3" and summary["lost_events"] == 0
    assert {"path": str(file), "blocks": BLOCKS} in summary["files"]
    found = Trace.load(out)
    mine = next(entry for entry in found.files if entry.path == str(file))
    assert mine.size_bytes == BLOCKS * 4096
    assert (found.miss[found.file == mine.id] == MISS).all()
    assert found.provenance.tier == "filemap" and "Cannot see" in found.provenance.note
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.parquet"]


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_the_trace_has_exactly_the_blocks_that_were_read(order: str, cached: bool, file: Path, tmp_path: Path) -> None:
    out, blocks = tmp_path / "run.parquet", ORDERS[order]
    (warm if cached else drop)(file)
    program = (sys.executable, "-c", READ_BLOCKS, file)
    lines = "\n".join(" ".join(map(str, of_thread)) for of_thread in blocks)
    assert run("-o", out, "--path", file.name, "--no-writes", "--", *program, input=lines).returncode == 0
    expected = [block for of_thread in blocks for block in of_thread]
    assert sorted(recorded(file, out)) == sorted(expected)
    assert len(blocks) > 1 or recorded(file, out) == expected, "the trace keeps the order of a single thread"
    trace = Trace.load(out)
    missed, evicted = int(trace.count[trace.miss == MISS].sum()), int(trace.provenance.extra.get("evicted_blocks", 0))
    assert missed == 0 if cached else len(set(expected)) <= missed <= len(set(expected)) + evicted
    assert trace.provenance.lost_events == 0


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_recording_normally_and_leaves_the_process(
    how: signal.Signals, reader: subprocess.Popen[str], file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run.parquet"
    recorder = started(str(reader.pid), "-o", out, under=["nohup"])
    recorder.send_signal(signal.SIGHUP)
    rounds = reads(reader) + 3 * 64 * 4096
    wait_for(lambda: reads(reader) > rounds, "all blocks are read")
    recorder.send_signal(how)
    _, message = recorder.communicate(timeout=PATIENCE_S)
    assert recorder.returncode == 0, message
    assert f"stopped by {how.name}" in message
    assert set(recorded(file, out)) == set(range(64))
    assert reader.poll() is None


def test_a_duration_ends_the_recording_and_each_second_has_a_line(reader: subprocess.Popen[str], tmp_path: Path) -> None:
    began = time.monotonic()
    done = run(reader.pid, "-o", tmp_path / "run.parquet", "-d", "2.3")
    assert done.returncode == 0 and 2.3 < time.monotonic() - began < 100
    lines = done.stderr.splitlines()
    heading = next(number for number, line in enumerate(lines) if "blocks/s" in line)
    times_s = [float(found[1]) for line in lines[heading + 1 :] if (found := re.match(r" +(\d+\.\d) s +\d", line))]
    # one line per full second, in tenths; on a machine that stalls, one may be missing
    assert times_s[0] >= 1 and 1 <= len(times_s) <= 2 and times_s[-1] >= len(times_s)
    assert "the time is over" in done.stderr


def test_the_recording_of_a_killed_recorder_is_readable(reader: subprocess.Popen[str], file: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.parquet"
    recorder = started(str(reader.pid), "-o", out)
    recording = tmp_path / "run.parquet.recording"

    def has_flushed() -> bool:
        with suppress(DataError), open_trace(recording) as found:
            rows = found.read()
            return bool(rows.t_ns[-1] - rows.t_ns[0] > 0.7e9)
        return False

    wait_for(has_flushed, "the rows of a second are written")
    recorder.kill()
    recorder.communicate(timeout=PATIENCE_S)
    assert not out.exists()
    with open_trace(recording) as found:
        assert "cut short" in found.provenance.note
        rows = found.read()
        assert {entry.path for entry in found.files} >= {str(file)}
    assert rows.t_ns[-1] - rows.t_ns[0] > 0.7e9
    again = run(reader.pid, "-o", out, "-d", "0.2")
    assert again.returncode == 2 and "run.parquet.recording" in again.stderr and "convert" in again.stderr
    assert run(reader.pid, "-o", out, "-d", "0.2", "--force").returncode == 0
    assert not recording.exists()


def test_a_recording_on_a_full_disk_stays_readable(reader: subprocess.Popen[str], file: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", small], check=True)
    try:
        done = run(reader.pid, "-o", small / "run.parquet", "--no-coalesce", "-d", "200")
        assert done.returncode == 3
        assert "No space left" in done.stderr and "run.parquet.recording" in done.stderr
        with open_trace(small / "run.parquet.recording") as found:
            assert found.rows > 0
            assert str(file) in {entry.path for entry in found.files}
    finally:
        subprocess.run(["umount", small], check=True)
    assert reader.poll() is None


def test_only_files_that_match_are_recorded(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.parquet"
    for glob in ("dat?", f"{file.parent}/*"):
        done = run("-o", out, "--force", "--path", glob, "--json", "--", "sha256sum", file)
        summary = json.loads(done.stdout[done.stdout.index("{\n") :])
        assert [entry["path"] for entry in summary["files"]] == [str(file)]
        assert summary["left_out_rows"] > 0
        assert set(recorded(file, out)) == set(range(BLOCKS))


def test_deleted_and_renamed_files_have_their_names(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.parquet"
    renamed = file.with_name("data2")
    for path, change in ((file, "os.rename(path, path + '2')"), (renamed, "os.unlink(path)")):
        done = kept_open(out, path, renamed, change, 23)
        assert done.returncode == 0, done.stderr
        assert recorded(renamed, out) == list(range(23))


def test_a_file_closed_at_once_has_its_name(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.parquet"
    assert run("-o", out, "--", "sh", "-c", f"head -c 4096 {file} > /dev/null").returncode == 0
    assert 0 in recorded(file, out)


def test_files_on_an_overlay_have_their_names(file: Path, tmp_path: Path) -> None:
    base = file.parent
    for name in ("upper", "work", "merged"):
        (base / name).mkdir()
    options = f"lowerdir={base / 'lower'},upperdir={base / 'upper'},workdir={base / 'work'}"
    (base / "lower").mkdir()
    file.rename(base / "lower" / "data")
    mounted = subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", base / "merged"], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"overlay: {mounted.stderr.decode()}")
    try:
        out, path = tmp_path / "run.parquet", base / "merged" / "data"
        assert kept_open(out, path, path, "", BLOCKS).returncode == 0
        assert recorded(path, out) == list(range(BLOCKS))
    finally:
        subprocess.run(["umount", base / "merged"], check=True)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["4194303"], 3, "does not exist"),
        (["2"], 3, "kernel thread"),
        ([], 2, "no process or command is given"),
        (["--"], 2, "no process or command is given"),
        (["no-such-process"], 3, "no process is called"),
        (["9" * 5000], 3, "no process is called"),
        (["12", "13"], 2, "one process"),
        (["--", "no-such-program"], 2, "no such program"),
        (["--tier", "magic", "--", "true"], 2, "--tier"),
        (["--tier", "syscalls", "--mmap-rerefs", "1", "--", "true"], 3, "--mmap-rerefs"),
        (["--tier", "faults", "--block", "--", "true"], 3, "--block"),
        (["-d", "0", "--", "true"], 2, "-d"),
        (["-o", "run.csv", "--", "true"], 2, ".parquet"),
        (["-o", "/nowhere/run.parquet", "--", "true"], 2, "/nowhere"),
        (["-o", "/proc/run.parquet", "--", "true"], 3, "/proc/run.parquet"),
    ],
)
def test_bad_arguments_are_refused(words: list[str], code: int, message: str, tmp_path: Path) -> None:
    done = run(*words, cwd=tmp_path, env=os.environ | {"PYTHONPATH": os.getcwd()})
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr
    assert "hint:" in done.stderr
    assert not list(tmp_path.iterdir())


def test_an_ended_process_is_refused() -> None:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        done = run(process.pid)
    assert done.returncode == 3 and "has ended" in done.stderr


def test_without_privileges_errors_suggest_a_working_tier(tmp_path: Path) -> None:
    out = tmp_path / "run.parquet"
    bare = ["setpriv", "--inh-caps=-all", "--bounding-set=-all", *LLMCACHE, "-o", str(out)]
    for options, message in (
        (["--block"], "can record this on this machine: filemap: "),
        (["--tier", "fexit"], "--tier faults works here"),
        (["--tier", "fexit", "--block"], "no other tier works here either"),
    ):
        done = subprocess.run([*bare, *options, "--", "true"], capture_output=True, text=True)
        assert done.returncode == 3 and message in done.stderr and "hint:" in done.stderr
    assert not list(tmp_path.iterdir())
    done = subprocess.run([*bare, "--", "true"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Trace.load(out).provenance.tier == "faults"
    assert "better tiers are not available" in done.stderr


def test_the_command_waits_for_the_recorder_and_ends_with_it(file: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    code = "import sys, time; from llmcache.trace.processes import target_of\n"
    code += "print(target_of(['--', 'touch', sys.argv[1]]).pid, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code, str(marker)], stdout=subprocess.PIPE, text=True) as recorder:
        assert recorder.stdout is not None
        target = Path(f"/proc/{int(recorder.stdout.readline())}")
        time.sleep(0.1)
        assert not marker.exists() and target.exists()
        recorder.kill()
    wait_for(lambda: not target.exists(), "the waiting command has ended")
    assert not marker.exists()


def test_a_report_is_written_with_the_trace(file: Path, tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    drop(file)
    done = run("-o", tmp_path / "run.parquet", "--path", "data", "--report", page, "--", "sha256sum", file)
    assert done.returncode == 0, done.stderr
    assert page.read_text().startswith("<!DOCTYPE html>") and "<img" in page.read_text()


def test_block_requests_are_written_next_to_the_trace(file: Path, tmp_path: Path) -> None:
    out, message = tmp_path / "run.parquet", ""
    # a completion during the completion of another disk's request is not observed: retry
    while "events lost: 0" not in message:
        drop(file)
        done = run("-o", out, "--force", "--block", "--path", "data", "--", "sha256sum", file)
        assert done.returncode == 0, done.stderr
        message = " ".join(done.stderr.split())  # the path may break a line
    found = pq.read_table(tmp_path / "run.block.parquet")
    assert found.schema.metadata[b"llmcache.block"] == b"llmcache.block/1"
    entry = next(entry for entry in Trace.load(out).files if entry.path == str(file))
    rows = [row for row in found.to_pylist() if row["file"] == entry.id]
    blocks = sorted(block for row in rows for block in range(row["first"], row["first"] + row["count"]))
    assert blocks == list(range(BLOCKS)), message
    assert all(0 < row["latency_us"] < 60e6 for row in rows)
    assert "block requests" in message and "mean latency" in message


def test_the_command_is_ended_after_the_duration(tmp_path: Path) -> None:
    began = time.monotonic()
    done = run("-o", tmp_path / "run.parquet", "-d", "0.3", "--", "sleep", "600")
    assert done.returncode == 0 and "the time is over" in done.stderr
    assert time.monotonic() - began < 200
