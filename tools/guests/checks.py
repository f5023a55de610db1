"""The nightly checks. They run as root in a guest: `python3 -m tools.guests.checks NAME` prints the result as JSON.

A check ends with an outcome. `fail`: the program breaks a promise of its documentation. `unavailable`: the program
says that this system cannot do it, in the documented way (exit code 3). Only `pass` means that it was tried and works.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MIB = 1 << 20
SIZE = 64 * MIB
BUDGET = 40_000_000
SOURCE, MOUNT = Path("/data/models"), Path("/mnt/models")
MODEL = "model.bin"
GGUF = Path("/data/small.gguf")
TRACE = "/data/known.parquet"
USER = "tester"
UNIT = "llmcachefs@check"
SHARE = Path("/opt/llmcache/share/llmcache")
PASSES = 3
SLACK = 2 * MIB
"""Memory that other processes may lock meanwhile."""

STREAMED = {"inplace": 32 * MIB, "steer": 12 * MIB, "arena": 12 * MIB}
"""Memory for streamed data beyond the budget: OVERHEAD in llmcachefs(1)."""
OVERHEAD = 25_000_000
"""Memory of the daemon and its helpers, which lock some of their own: OVERHEAD in llmcachefs(1)."""

Facts = dict[str, Any]


class Failed(Exception):
    """The program breaks a promise of its documentation."""


class Unavailable(Exception):
    """The program says that this system lacks something."""


def expect(condition: object, message: str) -> None:
    """Raise Failed with the message unless the condition holds."""
    if not condition:
        raise Failed(message)


def sh(*words: object, seconds: float = 240, user: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command, also as another user, and return its output. Failed: it does not end."""
    command = [*(["runuser", "-u", user, "--"] if user else []), *map(str, words)]
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False)
    except subprocess.TimeoutExpired as expired:
        raise Failed(f"`{' '.join(map(str, words))}` has not ended after {seconds:.0f} s") from expired


def ok(*words: object, seconds: float = 240, user: str | None = None) -> str:
    """Run a command that has to succeed, and return its stdout."""
    done = sh(*words, seconds=seconds, user=user)
    expect(done.returncode == 0, f"`{' '.join(map(str, words))}` exits with {done.returncode}: {last_line(done.stderr)}")
    return done.stdout


def last_line(text: str) -> str:
    """Return the error in the output of a command: the line with `error:`, else the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error:" in line), lines[-1] if lines else "(no output)")


def until(condition: Callable[[], object], seconds: float) -> bool:
    """Return whether a condition holds within some time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def meminfo(name: str) -> int:
    """Return a value of /proc/meminfo, in bytes."""
    return counter(Path("/proc/meminfo"), f"{name}:") * 1024


def counter(file: Path, name: str) -> int:
    """Return the number behind a name in a file of the kernel; 0 if the file does not have the name."""
    found = re.search(rf"^{name}\s+(\d+)", file.read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def drop_caches() -> None:
    """Empty the page cache."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def is_mounted(path: Path) -> bool:
    """Return whether something is mounted on a directory."""
    return any(line.split()[1] == str(path) for line in Path("/proc/self/mounts").read_text().splitlines())


def daemons() -> list[int]:
    """Return the processes of mounts: the daemons and their helpers."""
    return [
        int(pid)
        for pid in sh("pgrep", "-f", "^/opt/llmcache/bin/python.*(llmcachefs|llmcache)").stdout.split()
        if int(pid) != os.getpid()
    ]


def make_model() -> str:
    """Write the model file, unless it exists, and return its hash."""
    SOURCE.mkdir(parents=True, exist_ok=True)
    MOUNT.mkdir(parents=True, exist_ok=True)
    path, stored = SOURCE / MODEL, SOURCE.with_suffix(".sha256")
    if not stored.exists():
        content = os.urandom(SIZE)
        path.write_bytes(content)
        os.sync()
        stored.write_text(hashlib.sha256(content).hexdigest())
        time.sleep(3)  # a mount ignores files that were written in the last two seconds
    return stored.read_text()


def read_passes(path: str, passes: int, how: str) -> None:
    """Print the hash of a file once for each pass over it, by `mmap` or by `read`. This runs in a process of its own."""
    with open(path, "rb", buffering=0) as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if how == "mmap" else None
        size = os.fstat(file.fileno()).st_size
        for _ in range(passes):
            digest = hashlib.sha256()
            for at in range(0, size, MIB):
                digest.update(mapped[at : at + MIB] if mapped else os.pread(file.fileno(), MIB, at))
            print(digest.hexdigest(), flush=True)


def reader(path: Path, passes: int, how: str) -> list[str]:
    """Return the command of a process that reads a file."""
    return ["/usr/bin/python3", "-m", "tools.guests.checks", "read", str(path), str(passes), how]


def compare_bytes(
    path: Path, want: str, passes: int = PASSES, user: str | None = None, ways: tuple[str, ...] = ("mmap", "read")
) -> None:
    """Read a file in both ways and compare every pass with the hash that it must have."""
    for how in ways:
        hashes = ok(*reader(path, passes, how), seconds=400, user=user).split()
        expect(hashes == [want] * passes, f"{how}: {sum(one != want for one in hashes)} of {passes} passes read wrong bytes")


def stats(mount: Path = MOUNT, user: str | None = None) -> Facts:
    """Return the statistics of a mount."""
    found: Facts = json.loads(ok("llmcache", "stats", mount, "--json", user=user))
    return found


def mount(*options: object, target: Path = MOUNT, user: str | None = None) -> str:
    """Mount SOURCE and return the output of the program. Unavailable: this system lacks something that it needs."""
    done = sh("llmcachefs", SOURCE, target, "--cache", BUDGET, *options, user=user)
    if done.returncode == 3:
        raise Unavailable(last_line(done.stderr).removeprefix("llmcache: error: "))
    expect(done.returncode == 0, f"llmcachefs exits with {done.returncode}: {last_line(done.stderr)}")
    return done.stdout + done.stderr


@contextlib.contextmanager
def cleaned(target: Path = MOUNT) -> Iterator[None]:
    """Remove the mount after the block, whatever happens in it."""
    try:
        yield
    finally:
        subprocess.run(["systemctl", "stop", UNIT], capture_output=True, check=False)
        if is_mounted(target):
            subprocess.run(["timeout", "60", "llmcache", "umount", "--force", str(target)], capture_output=True, check=False)
        if is_mounted(target):
            subprocess.run(["umount", "-l", str(target)], capture_output=True, check=False)


def expect_nothing_left(target: Path, locked: int) -> None:
    """Compare with the state before the mount: nothing is mounted, no process remains, no memory is locked."""
    expect(not is_mounted(target), f"{target} is still mounted")
    expect(until(lambda: not daemons(), 10), f"processes remain: {daemons()}")
    expect(until(lambda: meminfo("Mlocked") <= locked + SLACK, 10), f"{meminfo('Mlocked') - locked} bytes remain locked")


def check_mode(facts: Facts, mode: str, user: str | None = None) -> None:
    """Compare bytes and the budget in a mode; kill the daemon; clean up; mount again."""
    want, locked = make_model(), meminfo("Mlocked")
    target = Path(f"/home/{USER}/mount") if user else MOUNT
    if user:
        ok("mkdir", "-p", target, user=user)
    drop_caches()
    with cleaned(target):
        try:
            mount("--mode", mode, target=target, user=user)
        except Unavailable as reason:
            expect_claim(mode, user, str(reason))
            raise
        expect_claim(mode, user, None)
        compare_bytes(target / MODEL, want, user=user)
        time.sleep(2)
        seen, now_locked = stats(target, user), meminfo("Mlocked") - locked
        names = ("pinned_bytes", "window_bytes", "resident_bytes", "beyond_bytes", "daemon_bytes")
        facts |= {name: seen[name] for name in names}
        facts["locked_bytes"] = now_locked
        facts["helper_locked_bytes"] = counter(Path(f"/proc/{seen['helper_pid']}/status"), "VmLck:") * 1024
        expect(seen["mode"] == mode, f"stats reports mode {seen['mode']}")
        expect(seen["pinned_bytes"] > 0, f"after {2 * PASSES} passes nothing is pinned")
        within = seen["resident_bytes"] - seen["beyond_bytes"]  # the kernel may cache more in memory that no program needs
        expect(within <= BUDGET + STREAMED[mode], f"{within} bytes are resident, with a budget of {BUDGET}")
        expect(now_locked <= BUDGET + OVERHEAD, f"{now_locked} bytes are locked, with a budget of {BUDGET}")
        facts["reader_after_kill"] = kill_daemon(target, want, mode, user)
        ok("llmcache", "umount", "--force", target, user=user)
        expect_nothing_left(target, locked)
        mount("--mode", mode, target=target, user=user)
        compare_bytes(target / MODEL, want, passes=1, user=user)
        ok("llmcache", "umount", target, user=user)
        expect_nothing_left(target, locked)


def kill_daemon(target: Path, want: str, mode: str, user: str | None) -> int:
    """Kill the daemon under a reader and return its exit status. In place it continues; over FUSE it must fail, not hang."""
    mounts = json.loads(ok("llmcache", "stats", "--json", user=user))["mounts"]
    pid = next(one["pid"] for one in mounts if one["mount"] == str(target))
    command = [*(["runuser", "-u", user, "--"] if user else []), *reader(target / MODEL, 6, "mmap")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout
        try:
            first = process.stdout.readline().strip()
            os.kill(pid, signal.SIGKILL)
            output, _ = process.communicate(timeout=200)
        except subprocess.TimeoutExpired as expired:
            raise Failed("a reader hangs after the daemon was killed") from expired
        finally:
            process.kill()
    hashes = [first, *output.split()]
    expect(set(hashes) <= {want}, "a reader reads wrong bytes after the daemon was killed")
    if mode == "inplace":
        expect(process.returncode == 0 and len(hashes) == 6, f"in place, a reader ends with status {process.returncode}")
    else:
        expect(process.returncode != 0, "over FUSE, a reader reads the whole file from a dead mount")
        done = sh("cat", target / MODEL, user=user)
        expect("not connected" in done.stderr, f"reading a dead mount: {last_line(done.stderr)}")
    return process.returncode


CLAIMS = {"inplace": "in place", "steer": "RLIMIT_MEMLOCK", "arena": "FUSE"}
"""The finding of doctor that says whether a mode is possible."""


def doctor(user: str | None = None) -> dict[str, Facts]:
    """Return the findings of doctor by name. They are kept, because doctor takes a minute on an emulated processor."""
    path = Path(f"/run/doctor-{user or 'root'}.json")
    if not path.exists():
        path.write_text(ok("llmcache", "doctor", SOURCE, "--json", user=user))
    return {one["name"]: one for one in json.loads(path.read_text())["findings"]}


def expect_claim(mode: str, user: str | None, reality: str | None) -> None:
    """Compare what doctor says about a mode with the reason why it does not work, or None if it works."""
    finding = doctor(user)[CLAIMS[mode]]
    if finding["status"] == "ok":
        expect(reality is None, f"doctor says about mode {mode} {finding['found']!r}, but: {reality}")
    else:
        expect(reality is not None, f"doctor says about mode {mode} {finding['found']!r}, but it works")


def check_doctor(facts: Facts) -> None:
    """Compare what doctor reports with what works: the mode of `auto`, the tier of the tracer, an ordinary user's modes.

    The checks of the modes compare its findings about them.
    """
    make_model()
    found = doctor()
    facts |= {"inplace": found["in place"]["found"], "tier": found["tier"]["facts"].get("tier")}
    first = next((mode for mode, name in CLAIMS.items() if found[name]["status"] == "ok"), None)
    with cleaned():
        mount()
        expect(stats()["mode"] == first, f"doctor promises {first}, and --mode auto takes {stats()['mode']}")
    expect(
        f"tier {facts['tier']};" in traced()[1], f"doctor promises tier {facts['tier']}, and llmcache trace takes another"
    )
    for tier in found["tier"]["facts"].get("passed_over", {}):
        expect(traced("--tier", tier)[0] == 3, f"doctor says that tier {tier} does not work, but it does")
    expect(found["cgroup"]["facts"]["version"] == 2, f"cgroup: {found['cgroup']['found']}")
    expect(os.uname().release in found["system"]["found"], f"system: {found['system']['found']}")
    own = doctor(USER)
    for mode in ("inplace", "steer"):
        finding = own[CLAIMS[mode]]
        expect(finding["status"] != "ok", f"doctor promises mode {mode} to an ordinary user: {finding['found']}")


READS, MAPPED = 200, 512
KNOWN_READER = f"""
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
for number in range({READS}):
    os.pread(fd, 4096, number * 16 * 4096)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_NORMAL)
mapped = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
for number in range({MAPPED}):
    mapped[(32 << 20) + number * 4096]
"""
"""Preads 200 single blocks, then touches 2 MiB through a mapping."""


def traced(*options: str) -> tuple[int, str, Facts]:
    """Trace the known reader with a cold cache; return the exit code, the messages, and the summary."""
    drop_caches()
    command = ["llmcache", "trace", "-o", TRACE, "--force", "--path", f"{SOURCE}/*", "--json", *options]
    done = sh(*command, "--", "/usr/bin/python3", "-c", KNOWN_READER, SOURCE / MODEL)
    expect(done.returncode in (0, 3), f"llmcache trace exits with {done.returncode}: {last_line(done.stderr)}")
    return done.returncode, done.stderr, json.loads(done.stdout) if done.returncode == 0 else {}


def check_trace(facts: Facts) -> None:
    """Compare the counts of each tier with those of a known reader.

    The kernel may map a page alone, and again with the pages around it at the next fault: this counts as another access to
    the page. Tier `faults` reports one page of those that are mapped together.
    """
    make_model()
    whole = (READS, READS + MAPPED, READS + MAPPED)
    # tier: blocks read by call, the fewest and the most different blocks accessed
    known = {
        "filemap": whole,
        "fexit": whole,
        "syscalls": (READS, READS, READS),
        "faults": (READS, READS + MAPPED // 512, READS + MAPPED),
    }
    wrong = []
    for tier, (reads, fewest, most) in known.items():
        for _ in range(3):  # a loss is reported, and possible on a busy machine
            code, messages, summary = traced("--tier", tier)
            if code == 3 or not summary["lost_events"]:
                break
        if code == 3:
            facts[tier] = last_line(messages).removeprefix("llmcache: error: ")
            continue
        found = json.loads(ok("llmcache", "info", TRACE, "--json"))
        ops, different, filled = found["ops"], found["touched_bytes"] // 4096, summary["filled_blocks"]
        facts[tier] = (
            f"{different} different blocks; {ops['read']} reads, {ops['map']} mapped, {filled} filled, "
            f"{summary['lost_events']} lost"
        )
        right = ops["read"] == reads and fewest <= different <= most and summary["lost_events"] == 0
        if tier in ("filemap", "fexit"):
            right = right and filled >= most and ops["map"] <= MAPPED * 1.05
        if not right:
            wrong.append(f"tier {tier}: {facts[tier]}; the program read {READS} blocks by pread and {MAPPED} by mmap")
    expect(not wrong, "; ".join(wrong))
    expect(any("blocks" in one for one in facts.values()), f"no tier works: {facts}")


def start_service(settings: str = "") -> None:
    """Start the unit of tools/systemd with a settings file."""
    Path("/etc/llmcache").mkdir(exist_ok=True)
    Path("/etc/llmcache/check.toml").write_text(
        f'[mount]\nsource = "{SOURCE}"\nmount = "{MOUNT}"\ncache = "{BUDGET}"\n{settings}'
    )
    Path("/etc/systemd/system/llmcachefs@.service").write_text((SHARE / "llmcachefs@.service").read_text())
    ok("systemctl", "daemon-reload")
    ok("systemctl", "reset-failed")
    ok("systemctl", "start", UNIT)


def main_pid() -> int:
    """Return the daemon of the unit, 0 if it is not running."""
    return int(ok("systemctl", "show", "-P", "MainPID", UNIT))


def check_systemd(facts: Facts) -> None:
    """Start, reload, restart, kill and stop the unit."""
    want, locked = make_model(), meminfo("Mlocked")
    with cleaned():
        warnings = sh("systemd-analyze", "verify", "/opt/llmcache/share/llmcache/llmcachefs@.service").stderr
        start_service()
        expect(is_mounted(MOUNT), "the unit is active, and nothing is mounted")
        compare_bytes(MOUNT / MODEL, want)
        facts |= {"mode": stats()["mode"], "verify": [line for line in warnings.splitlines() if "llmcachefs@" in line]}
        pid = main_pid()
        ok("systemctl", "reload", UNIT)
        expect(main_pid() == pid, "reload starts another daemon")
        ok("systemctl", "restart", UNIT)
        expect(is_mounted(MOUNT), "nothing is mounted after restart")
        pid = main_pid()
        os.kill(pid, signal.SIGKILL)
        expect(
            until(lambda: main_pid() not in (0, pid) and is_mounted(MOUNT), 60), "the unit is not restarted after SIGKILL"
        )
        expect(
            until(lambda: ok("systemctl", "show", "-P", "ActiveState", UNIT).strip() == "active", 30),
            "the unit is not active again",
        )
        compare_bytes(MOUNT / MODEL, want, passes=1)
        ok("systemctl", "stop", UNIT)
        expect(sh("systemctl", "is-failed", UNIT).returncode != 0, "the unit is failed after stop")
        expect_nothing_left(MOUNT, locked)


def check_fstab(facts: Facts) -> None:
    """Mount by mount(8) and by systemd, from a line of /etc/fstab."""
    want, locked = make_model(), meminfo("Mlocked")
    fstab = Path("/etc/fstab")
    before = fstab.read_text()
    helper = Path("/sbin/mount.llmcachefs")
    if not helper.exists():
        helper.symlink_to("/opt/llmcache/bin/mount.llmcachefs")
    with cleaned():
        ok("mount", "-t", "llmcachefs", SOURCE, MOUNT, "-o", f"cache={BUDGET}")
        facts["mode"] = stats()["mode"]
        compare_bytes(MOUNT / MODEL, want, passes=1)
        ok("umount", MOUNT)
        expect_nothing_left(MOUNT, locked)
        try:
            for mode in ("inplace", "steer"):
                options = f"cache={BUDGET},mode={mode},nofail,x-systemd.requires-mounts-for=/data"
                fstab.write_text(f"{before}{SOURCE} {MOUNT} llmcachefs {options} 0 0\n")
                ok("systemctl", "daemon-reload")
                done = sh("mount", MOUNT)
                if done.returncode == 32 and mode == "inplace":
                    facts["inplace"] = last_line(done.stderr)
                    continue
                expect(done.returncode == 0, f"mount {MOUNT}, mode {mode}: {last_line(done.stderr)}")
                ok("mount", "-a")
                expect(Path("/proc/mounts").read_text().count(f" {MOUNT} ") == 1, "`mount -a` mounts it a second time")
                compare_bytes(MOUNT / MODEL, want, passes=1)
                ok("umount", MOUNT)
                expect_nothing_left(MOUNT, locked)
                unit = ok("systemd-escape", "-p", "--suffix=mount", MOUNT).strip()
                ok("systemctl", "start", unit)
                compare_bytes(MOUNT / MODEL, want, passes=1, ways=("mmap",))
                ok("systemctl", "stop", unit)
                expect_nothing_left(MOUNT, locked)
        finally:
            fstab.write_text(before)
            ok("systemctl", "daemon-reload")


def group_of(pid: int) -> Path:
    """Return the directory of the cgroup (version 2) of a process."""
    return Path("/sys/fs/cgroup" + Path(f"/proc/{pid}/cgroup").read_text().strip().split(":")[-1])


def check_daemon_cgroup(facts: Facts) -> None:
    """Limit the daemon's cgroup below its budget: the pinned bytes shrink and grow again, and the daemon lives on."""
    make_model()
    failures = []
    for mode in ("inplace", "steer"):
        if mode == "inplace" and doctor()[CLAIMS[mode]]["status"] != "ok":
            facts[mode] = "unavailable"
            continue
        for name in ("MemoryHigh", "MemoryMax"):
            with cleaned():
                drop_caches()
                start_service(f'mode = "{mode}"\npin = ["{MODEL}"]\n')
                ok("llmcache", "warmup", MOUNT)
                try:
                    facts[f"{mode}, {name}"] = limit_daemon(name)
                except Failed as failure:
                    failures.append(f"{mode}, {failure}")
                finally:
                    ok("systemctl", "set-property", "--runtime", UNIT, f"{name}=infinity")
                ok("systemctl", "stop", UNIT)
    expect(not failures, "; ".join(failures))


def limit_daemon(name: str) -> str:
    """Set a memory limit of the unit to half of the pinned bytes more than the daemon itself needs, and remove it.

    The file is pinned by the settings, so it has to be pinned again without a reader.
    """
    pid = main_pid()
    group = group_of(pid)
    expect(until(lambda: pinned() > BUDGET // 2, 60), f"{name}: only {pinned()} bytes are pinned before the limit")
    before = pinned()
    stat = group / "memory.stat"
    charged = counter(stat, "unevictable")
    expect(charged > before // 2, f"{name}: only {charged} of {before} pinned bytes are charged to the daemon's cgroup")
    # The kernel can reclaim other pages: Linux 7.3 reads the extents between pinned ones as well.
    reclaimable = counter(stat, "inactive_file") + counter(stat, "active_file")
    limit = int((group / "memory.current").read_text()) - reclaimable - before // 2
    ok("systemctl", "set-property", "--runtime", UNIT, f"{name}={limit}")
    time.sleep(3)
    expect(main_pid() == pid, f"{name}: the daemon was killed, and not only its helper")
    compare_bytes(MOUNT / MODEL, make_model(), passes=1)
    expect(until(lambda: pinned() < before * 3 // 4, 60), f"{name}: {pinned()} of {before} bytes remain pinned")
    under = pinned()
    expect(main_pid() == pid, f"{name}: the daemon was killed, and not only its helper")
    ok("systemctl", "set-property", "--runtime", UNIT, f"{name}=infinity")
    grown = until(lambda: pinned() > before * 3 // 4, 240)  # the budget returns slowly
    expect(grown, f"{name}: without the limit only {pinned()} of {before} bytes are pinned again")
    return f"{before / 1e6:.1f} MB pinned, {under / 1e6:.1f} MB under the limit, then {pinned() / 1e6:.1f} MB"


def pinned() -> int:
    """Return the bytes that the mount has pinned."""
    return int(stats()["pinned_bytes"])


CLIENT_BYTES = 32 * MIB


def check_client_cgroup(facts: Facts) -> None:
    """Run a client in a cgroup that is smaller than the pinned bytes: it must end normally, as it does without a mount."""
    want = make_model()
    for mode in (None, "inplace", "steer"):
        for limits in ((f"MemoryMax={CLIENT_BYTES}",), (f"MemoryHigh={CLIENT_BYTES}", f"MemoryMax={CLIENT_BYTES * 3 // 2}")):
            name = f"{mode or 'no mount'}, {limits[0].split('=')[0]}"
            with cleaned():
                drop_caches()
                try:
                    if mode:
                        mount("--mode", mode)
                except Unavailable as reason:
                    facts[name] = str(reason)
                    continue
                options = [word for limit in (*limits, "MemorySwapMax=0") for word in ("-p", limit)]
                where = MOUNT if mode else SOURCE
                command = [
                    "systemd-run",
                    "--quiet",
                    "--wait",
                    "--pipe",
                    "--collect",
                    f"--working-directory={Path.cwd()}",
                    *options,
                ]
                started = time.monotonic()
                done = sh(*command, *reader(where / MODEL, 5, "mmap"), seconds=300)
                facts[name] = f"status {done.returncode}, {time.monotonic() - started:.0f} s"
                expect(
                    done.returncode == 0,
                    f"{name}: a client limited to {CLIENT_BYTES} bytes ends with status {done.returncode}",
                )
                expect(done.stdout.split() == [want] * 5, f"{name}: the client reads wrong bytes")


def check_restrictions(facts: Facts) -> None:
    """Restrict ptrace (Yama) and user namespaces as far as possible: everything works, or says that it cannot."""
    want = make_model()
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    namespaces = Path("/proc/sys/user/max_user_namespaces")
    before = namespaces.read_text()
    ok("python3", "-m", "tools.make_model", GGUF, "--size", "20M")
    GGUF.chmod(0o644)
    if not scope.exists():
        facts["yama"] = "not in this kernel"
    try:
        for level in ("1", "2", "3") if scope.exists() else ():
            scope.write_text(level)  # 3 stays until the next boot
            for user in (None, USER):
                facts[f"ptrace_scope {level}, {user or 'root'}"] = restricted(user)
            with cleaned():
                mount()
                compare_bytes(MOUNT / MODEL, want, passes=1)
                facts[f"ptrace_scope {level}, mount"] = f"{stats()['mode']} works"
                with subprocess.Popen(reader(MOUNT / MODEL, 1000, "mmap"), stdout=subprocess.DEVNULL) as process:
                    time.sleep(3)
                    done = sh("llmcache", "doctor", "--pid", process.pid)
                    process.kill()
                expect(done.returncode in (0, 3), f"doctor --pid exits with {done.returncode}: {last_line(done.stderr)}")
        for limit in (before, "0"):
            namespaces.write_text(limit)
            # It steers only model files, which it recognizes by their headers.
            done = sh("llmcache", "run", "--cache", BUDGET, "--", *reader(GGUF, 1, "mmap"), user=USER)
            name = f"llmcache run of a user, {'no' if limit == '0' else 'with'} user namespaces"
            facts[name] = outcome_of(done, hashlib.sha256(GGUF.read_bytes()).hexdigest())
    finally:
        namespaces.write_text(before)


def restricted(user: str | None) -> str:
    """Trace a command with tier `faults`, which uses strace; return what happens."""
    trace = f"/tmp/{user or 'root'}.parquet"
    command = ["llmcache", "trace", "--tier", "faults", "-o", trace, "--force", "--path", f"{SOURCE}/*", "--json"]
    done = sh(*command, "--", "/usr/bin/python3", "-c", KNOWN_READER, SOURCE / MODEL, user=user)
    expect(done.returncode in (0, 3), f"llmcache trace exits with {done.returncode}: {last_line(done.stderr)}")
    if done.returncode == 3:
        return last_line(done.stderr)
    return f"{json.loads(done.stdout)['blocks']} blocks traced"


def outcome_of(done: subprocess.CompletedProcess[str], want: str) -> str:
    """Describe a run of the reader; Failed if it neither works nor says why not."""
    if done.returncode == 0:
        expect(done.stdout.split() == [want], "the command reads wrong bytes")
        return "works"
    expect(done.returncode == 3, f"llmcache run exits with {done.returncode}: {last_line(done.stderr)}")
    return last_line(done.stderr)


CHECKS: dict[str, Callable[[Facts], None]] = {
    "doctor": check_doctor,
    "inplace": lambda facts: check_mode(facts, "inplace"),
    "steer": lambda facts: check_mode(facts, "steer"),
    "arena": lambda facts: check_mode(facts, "arena", USER),
    "trace": check_trace,
    "systemd": check_systemd,
    "fstab": check_fstab,
    "daemon cgroup": check_daemon_cgroup,
    "client cgroup": check_client_cgroup,
    "restrictions": check_restrictions,  # the last one, because ptrace_scope 3 stays until the next boot
}


def run(name: str) -> dict[str, Any]:
    """Run a check and return its result."""
    started = time.monotonic()
    facts: Facts = {}
    try:
        CHECKS[name](facts)
        outcome, reason = "pass", ""
    except Unavailable as missing:
        outcome, reason = "unavailable", str(missing)
    except Failed as failure:
        outcome, reason = "fail", str(failure)
    except Exception as error:  # noqa: BLE001 - an error of a check must not end the night
        outcome, reason = "fail", f"the check itself fails: {type(error).__name__}: {error}"
    return {
        "check": name,
        "outcome": outcome,
        "reason": reason,
        "facts": facts,
        "seconds": round(time.monotonic() - started, 1),
    }


if __name__ == "__main__":
    if sys.argv[1] == "read":
        read_passes(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        print(json.dumps(run(sys.argv[1])))
