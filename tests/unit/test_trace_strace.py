"""Logs of strace: offsets per open file description, descriptors across dup, fork, threads and exec, and line formats."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llmcache.cache.plan import why_not_exact
from llmcache.errors import DataError
from llmcache.trace.formats import open_trace
from llmcache.trace.formats.strace import LONGEST_LINE
from llmcache.trace.record import MAP, READ, WRITE, Trace

Rows = list[tuple[str, int, int, int]]


def read(text: str, directory: Path) -> Trace:
    path = directory / "t.strace"
    path.write_text(text)
    with open_trace(path) as reader:
        return reader.read()


def rows(loaded: Trace) -> Rows:
    """Return (path, first block, blocks, op) of every row."""
    paths = {file.id: file.path for file in loaded.files}
    columns = zip(loaded.file.tolist(), loaded.first.tolist(), loaded.count.tolist(), loaded.op.tolist(), strict=True)
    return [(paths[file], first, count, op) for file, first, count, op in columns]


# Each case is a log and its expected rows.
CASES: dict[str, tuple[str, Rows]] = {
    "reads continue where the last ended": (
        """openat(AT_FDCWD, "/m", O_RDONLY) = 3
read(3, "\\177ELF"..., 4096) = 4096
read(3, "x) = 9", 8192) = 5000
read(3, "", 8192) = 0
""",
        [("/m", 0, 1, READ), ("/m", 1, 2, READ)],
    ),
    "writes continue too, also short ones": (
        """creat("/o", 0600) = 4
write(4, "abc", 3) = 3
write(4, "d"..., 9000) = 4096
writev(4, [{iov_base="a", iov_len=1}], 1) = 1
""",
        [("/o", 0, 1, WRITE), ("/o", 0, 2, WRITE), ("/o", 1, 1, WRITE)],
    ),
    "pread leaves the offset alone": (
        """open("/m", O_RDWR) = 3
pread64(3, "a, 4096, 70000) = 1", 10, 70000) = 10
pwrite64(3, "b", 1, 0) = 1
preadv(3, [{iov_base="x", iov_len=10}, {iov_base="y", iov_len=10}], 2, 8192) = 20
pwritev2(3, [{iov_base="x", iov_len=4096}], 1, 4096, RWF_HIPRI) = 4096
preadv2(3, [{iov_base="x", iov_len=4097}], 1, -1, 0) = 4097
read(3, "z", 1) = 1
""",
        [
            ("/m", 17, 1, READ), ("/m", 0, 1, WRITE), ("/m", 2, 1, READ), ("/m", 1, 1, WRITE), ("/m", 0, 2, READ),
            ("/m", 1, 1, READ),
        ],
    ),
    "lseek": (
        """openat(AT_FDCWD, "/m", O_RDONLY) = 3
lseek(3, 4096, SEEK_SET) = 4096
read(3, "x", 1) = 1
lseek(3, -1, SEEK_END) = 40959
read(3, "x", 1) = 1
lseek(3, 1, 0x9) = -1 EINVAL (Invalid argument)
_llseek(3, 8192, [8192], SEEK_SET) = 0
read(3, "x", 1) = 1
""",
        [("/m", 1, 1, READ), ("/m", 9, 1, READ), ("/m", 2, 1, READ)],
    ),
    "dup shares the offset, another open does not": (
        """openat(AT_FDCWD, "/m", O_RDONLY) = 3
dup(3) = 4
fcntl(3, F_DUPFD_CLOEXEC, 10) = 10
dup2(3, 5) = 5
dup3(3, 6, O_CLOEXEC) = 6
openat(AT_FDCWD, "/m", O_RDONLY) = 7
read(3, "x"..., 4096) = 4096
read(4, "x"..., 4096) = 4096
read(10, "x"..., 4096) = 4096
close(3) = 0
read(5, "x"..., 4096) = 4096
read(6, "x"..., 4096) = 4096
read(7, "x"..., 4096) = 4096
read(3, "x"..., 4096) = -1 EBADF (Bad file descriptor)
""",
        [("/m", block, 1, READ) for block in (0, 1, 2, 3, 4, 0)],
    ),
    "a forked child has descriptors of its own and shares offsets": (
        """100 openat(AT_FDCWD, "/m", O_RDONLY) = 3
100 clone(child_stack=NULL, flags=CLONE_CHILD_SETTID|SIGCHLD, child_tidptr=0x7f) = 101
101 read(3, "x"..., 4096) = 4096
101 close(3) = 0
101 openat(AT_FDCWD, "/n", O_RDONLY) = 3
100 read(3, "x"..., 4096) = 4096
101 read(3, "x"..., 4096) = 4096
101 exit_group(0) = ?
101 +++ exited with 0 +++
100 --- SIGCHLD {si_signo=SIGCHLD, si_code=CLD_EXITED, si_pid=101} ---
100 vfork() = 101
101 read(3, "x"..., 4096) = 4096
""",
        [("/m", 0, 1, READ), ("/m", 1, 1, READ), ("/n", 0, 1, READ), ("/m", 2, 1, READ)],
    ),
    "threads share descriptors": (
        """100 openat(AT_FDCWD, "/m", O_RDONLY) = 3
100 clone3({flags=CLONE_VM|CLONE_FS|CLONE_FILES|CLONE_THREAD, parent_tid=0x7f}, 88) = 101
101 close(3) = 0
101 openat(AT_FDCWD, "/n", O_RDONLY) = 3
100 read(3, "x"..., 4096) = 4096
""",
        [("/n", 0, 1, READ)],
    ),
    "a child runs before the call of its parent returns": (
        """100 openat(AT_FDCWD, "/m", O_RDONLY) = 3
100 clone(child_stack=NULL, flags=CLONE_CHILD_SETTID|SIGCHLD <unfinished ...>
101 close(3) = 0
100 <... clone resumed>, child_tidptr=0x7f) = 101
100 read(3, "x"..., 4096) = 4096
""",
        [("/m", 0, 1, READ)],
    ),
    "calls are interrupted by others": (
        """100 openat(AT_FDCWD, "/m", O_RDONLY <unfinished ...>
101 openat(AT_FDCWD, "/n", O_RDONLY) = 4
100 <... openat resumed>) = 3
100 pread64(3,  <unfinished ...>
101 pread64(4, "y"..., 4096, 8192 <unfinished ...>
100 <... pread64 resumed>"x"..., 4096, 4096) = 4096
101 <... pread64 resumed> ) = 4096
""",
        [("/m", 1, 1, READ), ("/n", 2, 1, READ)],
    ),
    "appends write at the end, whatever the offset": (
        """openat(AT_FDCWD, "/log", O_WRONLY|O_CREAT|O_TRUNC|O_APPEND, 0600) = 3
write(3, "x"..., 5000) = 5000
lseek(3, 0, SEEK_SET) = 0
write(3, "x"..., 5000) = 5000
pwrite64(3, "x", 1, 0) = 1
openat(AT_FDCWD, "/old", O_WRONLY|O_APPEND) = 4
fstat(4, {st_mode=S_IFREG|0644, st_size=40960, ...}) = 0
write(4, "x", 1) = 1
""",
        [("/log", 0, 2, WRITE), ("/log", 1, 2, WRITE), ("/log", 2, 1, WRITE), ("/old", 10, 1, WRITE)],
    ),
    "truncation moves the end": (
        """openat(AT_FDCWD, "/log", O_RDWR|O_APPEND) = 3
ftruncate(3, 8192) = 0
write(3, "x", 1) = 1
truncate("/log", 0) = 0
write(3, "x", 1) = 1
""",
        [("/log", 2, 1, WRITE), ("/log", 0, 1, WRITE)],
    ),
    "copies read and write": (
        """openat(AT_FDCWD, "/m", O_RDONLY) = 3
openat(AT_FDCWD, "/o", O_WRONLY|O_CREAT|O_TRUNC, 0600) = 4
sendfile(4, 3, NULL, 4096) = 4096
sendfile(4, 3, [40960] => [45056], 4096) = 4096
copy_file_range(3, [8192], 4, [0], 8192, 0) = 8192
copy_file_range(3, NULL, 4, NULL, 1, 0) = 1
socket(AF_INET, SOCK_STREAM, 0) = 5
sendfile(5, 3, [0], 4096) = 4096
""",
        [
            ("/m", 0, 1, READ), ("/o", 0, 1, WRITE), ("/m", 10, 1, READ), ("/o", 1, 1, WRITE), ("/m", 2, 2, READ),
            ("/o", 0, 2, WRITE), ("/m", 1, 1, READ), ("/o", 2, 1, WRITE), ("/m", 0, 1, READ),
        ],
    ),
    "mappings": (
        """openat(AT_FDCWD, "/m", O_RDONLY) = 3
mmap(NULL, 8192, PROT_READ, MAP_PRIVATE|MAP_ANONYMOUS, -1, 0) = 0x7f00
mmap(NULL, 8192, PROT_READ, MAP_PRIVATE, 3, 0x26000) = 0x7f01
newfstatat(3, "", {st_mode=S_IFREG|0644, st_size=10000, ...}, AT_EMPTY_PATH) = 0
mmap(NULL, 1048576, PROT_READ, MAP_SHARED, 3, 4096) = 0x7f02
mmap(NULL, 4096, PROT_READ, MAP_SHARED, 3, 16384) = 0x7f03
mmap(NULL, 4096, PROT_READ, MAP_SHARED, 3, 0) = -1 ENOMEM (Cannot allocate memory)
""",
        [("/m", 38, 2, MAP), ("/m", 1, 2, MAP)],
    ),
    "paths next to descriptors replace unseen opens": (
        """read(3</m, with comma and \\76>, "x"..., 4096) = 4096
pread64(0</n>, "x"..., 4096, 4096) = 4096
read(5<pipe:[27]>, "x", 1) = 1
read(6<socket:[28]>, "x", 1) = 1
read(7</dev/null<char 1:3>>, "x", 1) = 1
read(3</other>, "x", 1) = 1
openat(AT_FDCWD</home/u>, "m.gguf", O_RDONLY) = 8</data/m.gguf>
read(8</data/m.gguf>, "x", 1) = 1
""",
        [("/m, with comma and >", 0, 1, READ), ("/n", 1, 1, READ), ("/other", 0, 1, READ), ("/data/m.gguf", 0, 1, READ)],
    ),
    "relative paths": (
        """chdir("/work") = 0
openat(AT_FDCWD, "./models/../m\\303\\251 \\"x\\"", O_RDONLY) = 3
read(3, "x", 1) = 1
openat(AT_FDCWD, "/data", O_RDONLY|O_DIRECTORY) = 4
openat(4, "n", O_RDONLY) = 5
read(5, "x", 1) = 1
fchdir(4) = 0
openat2(AT_FDCWD, "o", {flags=O_RDONLY|O_CLOEXEC, resolve=0}, 24) = 6
read(6, "x", 1) = 1
""",
        [('/work/mé "x"', 0, 1, READ), ("/data/n", 0, 1, READ), ("/data/o", 0, 1, READ)],
    ),
    "a name can be reused for another file": (
        """openat(AT_FDCWD, "/m", O_RDONLY) = 3
read(3, "x", 1) = 1
rename("/m", "/old") = 0
openat(AT_FDCWD, "/m", O_RDWR|O_CREAT, 0600) = 4
write(4, "x", 1) = 1
openat(AT_FDCWD, "/old", O_RDONLY) = 5
read(5, "x", 1) = 1
unlink("/m") = 0
openat(AT_FDCWD, "/m", O_RDWR|O_CREAT, 0600) = 6
write(6, "x", 1) = 1
""",
        [("/m", 0, 1, READ), ("/m", 0, 1, WRITE), ("/m", 0, 1, READ), ("/m", 0, 1, WRITE)],
    ),
    "other objects reuse descriptor numbers": (
        """openat(AT_FDCWD, "/m", O_RDONLY) = 3
openat(AT_FDCWD, "/n", O_RDONLY) = 4
openat(AT_FDCWD, "/o", O_RDONLY) = 5
pipe2([3, 4], 0) = 0
eventfd2(0, 0) = 5
read(3, "x", 1) = 1
write(4, "x", 1) = 1
read(5, "x", 8) = 8
openat(AT_FDCWD, "/q", O_RDONLY) = 3
read(3, "x", 1) = 1
""",
        [("/q", 0, 1, READ)],
    ),
    "devices are ignored": (
        """openat(AT_FDCWD, "/dev/urandom", O_RDONLY) = 3
read(3, "x", 8) = 8
openat(AT_FDCWD, "/proc/self/maps", O_RDONLY) = 4
read(4, "x", 8) = 8
openat(AT_FDCWD, "/dev/shm/m", O_RDONLY) = 5
read(5, "x", 8) = 8
""",
        [("/dev/shm/m", 0, 1, READ)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_log_has_the_expected_rows(case: str, tmp_path: Path) -> None:
    log, expected = CASES[case]
    assert rows(read(log, tmp_path)) == expected


def test_generations_mappings_and_pids_are_known_from_a_log(tmp_path: Path) -> None:
    loaded = read(CASES["a name can be reused for another file"][0], tmp_path)
    assert [(file.path, file.generation) for file in loaded.files] == [("/m", 0), ("/m", 1), ("/m", 2)]
    assert loaded.file.tolist() == [0, 1, 0, 2]
    provenance = read(CASES["mappings"][0], tmp_path).provenance
    assert provenance.extra["mapped_ranges"] == "2", "touches of mappings are not in the log: Belady would not be exact"
    assert "mapped_ranges" in (why_not_exact(provenance) or "")
    log = """100 openat(AT_FDCWD, "/m", O_RDONLY) = 3
100 clone(child_stack=0x7f, flags=CLONE_VM|CLONE_FILES|CLONE_THREAD) = 101
101 read(3, "x", 1) = 1
101 clone(child_stack=NULL, flags=SIGCHLD) = 102
102 read(3, "x", 1) = 1
"""
    assert read(log, tmp_path).pid.tolist() == [100, 102], "threads have the pid of their process"


LINES = ('openat(AT_FDCWD, "/m", O_RDONLY) = 3', 'read(3, "x", 1) = 1', 'read(3, "x", 1) = 1')


@pytest.mark.parametrize(
    ("prefixes", "times", "clock"),
    [
        (("", "", ""), (1000, 2000), "none"),
        (("1700000000.000001 ", "1700000000.500000 ", "1700000001.0 "), (1700000000500000000, 1700000001 * 10**9), "-ttt"),
        (("12:00:00 ", "12:00:01 ", "12:00:01 "), (43201 * 10**9, 43201 * 10**9), "-t"),
        (("23:59:59.9 ", "23:59:59.99 ", "00:00:00.1 "), (86399990000000, 86400100000000), "-t"),
        (("     0.000000 ", "     0.000100 ", "     1.000000 "), (100000, 1000100000), "-r"),
        (("12:00:00 (+     0.0) ", "12:00:01 (+  1.0) ", "12:00:02 (+  1.0) "), (43201 * 10**9, 43202 * 10**9), "-t"),
        (("2.000001 ", "1.999999 ", "0.0 "), (4000000000, 4000000000), "-r"),
        (("1700000000.9 ", "1700000000.8 ", "1700000001.0 "), (1700000000900000000, 1700000001000000000), "-ttt"),
    ],
)  # fmt: skip
def test_times_and_pids_in_every_format(
    prefixes: tuple[str, ...], times: tuple[int, int], clock: str, tmp_path: Path
) -> None:
    for pid in ("", "77 ", "[pid    77] "):
        loaded = read("".join(f"{pid}{prefix}{line}\n" for prefix, line in zip(prefixes, LINES, strict=True)), tmp_path)
        assert tuple(loaded.t_ns.tolist()) == times
        assert clock in loaded.provenance.clock
        assert set(loaded.pid.tolist()) == {77 if pid else 0}


def test_provenance_counts_uncertain_lines(tmp_path: Path) -> None:
    log = """execve("/usr/bin/app", ["app", "-m", "/m"], 0x7f /* 3 vars */) = 0
100 read(9, "x", 1) = 1
100 read(3</m>, "x", 1) = 1
100 lseek(3) = 0
strace: Process 101 attached
101 read(3</m>, "x", 1) = 1
101 read(3</m>, "x", 1
"""
    origin = read(log, tmp_path).provenance
    assert (origin.tier, origin.command) == ("strace", "/usr/bin/app -m /m")
    assert "not which pages were touched" in origin.note
    assert origin.extra == {
        "calls": "5",
        "calls_not_understood": "1",
        "other_lines": "2",
        "accesses_of_unknown_files": "1",
        "guessed_offsets": "2",
        "threads_of_unknown_origin": "2",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "rows: .*no system call"),
        ("hello\n\0\xff", "rows: .*no system call"),
        ("close(3) = 0\n", "rows: .*no accesses"),
        ("close(3) = 0\nread(3, 0, 4) = " + "9" * 5000, "rows: .*line 2 has a number"),
        ("close(3) = 0\n" + "9" * 5000 + " close(3) = 0", "rows: .*line 2 has a number"),
        ("close(3) = 0\n1 " + "9" * 5000 + ".5 close(3) = 0", "rows: .*line 2 has a number"),
        ("close(3) = 0\n" + "9" * (LONGEST_LINE + 2), "rows: .*line 2 has more"),
        ("1700000009.0 close(3) = 0\n1700000005.0 close(3) = 0", r"time: line 2 is 4\.000000 s before the one above"),
    ],
)
def test_files_that_are_not_strace_logs_are_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read(text, tmp_path)


PROGRAM = """
import os, sys
os.chdir(sys.argv[1])
fd = os.open("m", os.O_RDWR | os.O_CREAT)
os.write(fd, b"x" * 100_000)
os.lseek(fd, 0, 0)
os.read(fd, 5000)
os.pread(fd, 10, 70_000)
copy = os.dup(fd)
if os.fork() == 0:
    os.read(copy, 8192)
    os._exit(0)
os.wait()
os.read(fd, 1)
log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.write(log, b"y" * 5000)
os.lseek(log, 0, 0)
os.write(log, b"y" * 5000)
os.preadv(fd, [bytearray(10), bytearray(9000)], 8192)
os.sendfile(os.open("out", os.O_WRONLY | os.O_CREAT), fd, 4096, 8192)
"""
EXPECTED = [
    ("m", 0, 25, WRITE), ("m", 0, 2, READ), ("m", 17, 1, READ), ("m", 1, 3, READ), ("m", 3, 1, READ),
    ("log", 0, 2, WRITE), ("log", 1, 2, WRITE), ("m", 2, 3, READ), ("m", 1, 2, READ), ("out", 0, 2, WRITE),
]  # fmt: skip


def strace_problem() -> str | None:
    """Return why strace cannot be run here; None if it can."""
    if shutil.which("strace") is None:
        return "strace is not installed (apt-get install strace)"
    tried = subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, text=True, check=False)
    return tried.stderr.strip() or "strace cannot trace" if tried.returncode else None


@pytest.mark.parametrize("options", ["-f -tt -yy -T", "-f -r"])
def test_a_real_log_has_the_accesses_of_the_program(options: str, tmp_path: Path) -> None:
    if problem := strace_problem():
        pytest.skip(problem)
    log = tmp_path / "t.strace"
    tracer = ["strace", *options.split(), "-e", "trace=desc,process,file", "-o", str(log)]
    subprocess.run([*tracer, sys.executable, "-S", "-E", "-c", PROGRAM, str(tmp_path)], check=True, timeout=120)
    with open_trace(log) as reader:
        loaded = reader.read()
    ours = [(Path(path).name, *rest) for path, *rest in rows(loaded) if Path(path).parent == tmp_path]
    assert ours == EXPECTED
    # For the two appends: the log does not show that the file was empty.
    assert loaded.provenance.extra["guessed_offsets"] == "2"
