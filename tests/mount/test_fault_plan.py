"""Random plans of faults under load: reads return the right bytes or a documented error, nothing hangs or is left.

LLMCACHE_FAULT_SECONDS=600 runs that long in each mode, with a fresh seed per plan. A failure prints its seed and plan,
and LLMCACHE_FAULT_SEED=SEED repeats it. A step is one or two simultaneous faults, the requests to the daemon during them,
and the repair. Faults are drawn like cards from a deck: each one once before any repeats.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from llmcache.errors import MountProblem
from tests.mount.fault_model import Window, overwritten, random_bytes, resized
from tests.mount.fault_rig import CACHE_MIB, NEEDS, SECONDS, SIZES, Rig, full, seeds
from tests.mount.faulty import Rule
from tests.mount.live import MIB, OVERHEAD_BYTES, private_bytes, resident_bytes, wait_for

Fault = Callable[[Rig, random.Random], "contextlib.AbstractContextManager[None]"]

DEAD = frozenset({errno.ENOTCONN, errno.ECONNABORTED})
NO_MOUNT = DEAD | {errno.ENOENT, errno.EROFS}  # also if nothing is mounted
FILES = tuple(SIZES)


@dataclass(frozen=True)
class Step:
    """Faults by name, their duration, and the requests to the daemon during them; `seed` determines details."""

    faults: tuple[str, ...]
    seconds: float
    controls: tuple[str, ...]
    seed: int


def make_plan(seed: int, steps: int) -> list[Step]:
    chance, plan = random.Random(seed), []
    deck: list[str] = []
    for _ in range(steps):
        names: list[str] = []
        while len(names) < (2 if chance.random() < 0.35 else 1):
            deck = deck or chance.sample(sorted(FAULTS), len(FAULTS))
            names.append(deck.pop())
        if any(name in ENDING for name in names):
            names = names[:1]
        controls = tuple(chance.choices(sorted(CONTROLS), k=chance.choice([0, 1, 1, 2])))
        plan.append(Step(tuple(names), chance.choice([0.2, 0.5, 1.0]), controls, chance.randrange(1 << 30)))
    return plan


def carry_out(rig: Rig, step: Step) -> None:
    """Carry out one step, and repair the faults."""
    chance = random.Random(step.seed)
    with contextlib.ExitStack() as stack:
        for name in step.faults:
            stack.enter_context(FAULTS[name](rig, chance))
        stop = time.monotonic() + step.seconds
        for name in step.controls:
            if not any(fault in ENDING for fault in step.faults):
                CONTROLS[name](rig, chance)
        time.sleep(max(0.0, stop - time.monotonic()))
    assert rig.daemon is not None and rig.daemon.poll() is None, f"the daemon ended with {rig.daemon}"


# Storage


@contextlib.contextmanager
def _rule(rig: Rig, rule: Rule) -> Iterator[None]:
    rig.set_rules([*rig.rules, rule])
    try:
        yield
    finally:
        rig.set_rules([other for other in rig.rules if other is not rule])


def _range(chance: random.Random, path: str) -> tuple[int, int]:
    first = chance.randrange(0, SIZES[path])
    return first, first + chance.choice([1, 4096, 300_000, 3 * MIB])


@contextlib.contextmanager
def unreadable(rig: Rig, chance: random.Random) -> Iterator[None]:
    """Reads of one range of a file return EIO."""
    path = chance.choice(FILES)
    first, end = _range(chance, path)
    window = rig.model.excuse(Window(frozenset({errno.EIO}), frozenset({"read"}), path, first, end))
    with _rule(rig, Rule("eio", "read", path, first, end)):
        yield
    window.until = time.monotonic()


@contextlib.contextmanager
def unwritable(rig: Rig, chance: random.Random) -> Iterator[None]:
    """All writes, or all fsyncs, of spill files return EIO."""
    call = chance.choice(["write", "fsync"])
    window = rig.model.excuse(Window(frozenset({errno.EIO}), frozenset({"write"}), "*.kv"))
    with _rule(rig, Rule("eio", call, "*.kv")):
        yield
    window.until = time.monotonic()


@contextlib.contextmanager
def short(rig: Rig, chance: random.Random) -> Iterator[None]:
    """Reads and writes transfer only a part of the requested bytes."""
    with _rule(rig, Rule("short", "read")), _rule(rig, Rule("short", "write")):
        yield


@contextlib.contextmanager
def slow(rig: Rig, chance: random.Random) -> Iterator[None]:
    path = chance.choice(FILES)
    first, _ = _range(chance, path)
    with _rule(rig, Rule("slow", "read", path, first, first + 200_000, chance.choice([0.3, 1.0, 2.0]))):
        yield


@contextlib.contextmanager
def throttled(rig: Rig, chance: random.Random) -> Iterator[None]:
    """The storage completes every request, slowly."""
    with _rule(rig, Rule("slow", "read", seconds=chance.choice([0.005, 0.02]))):
        yield


@contextlib.contextmanager
def full_disk(rig: Rig, chance: random.Random) -> Iterator[None]:
    window = rig.model.excuse(Window(frozenset({errno.ENOSPC}), frozenset({"write"})))
    with full(rig.files):
        yield
    window.until = time.monotonic()


def stop_for(process: subprocess.Popen[bytes], seconds: float) -> None:
    process.send_signal(signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def storage_stops(rig: Rig, chance: random.Random) -> Iterator[None]:
    """The storage does not answer for a while."""
    stop_for(rig.storage, chance.choice([0.5, 2.0]))
    yield


# Files that change behind the mount


@contextlib.contextmanager
def replaced(rig: Rig, chance: random.Random) -> Iterator[None]:
    """Another file takes over the name, with the same size or not."""
    path = chance.choice(FILES)
    rig.put(path, random_bytes(max(1, SIZES[path] + chance.choice([0, 0, -5000, 70_000])), next(rig.numbers)))
    yield


@contextlib.contextmanager
def rewritten(rig: Rig, chance: random.Random) -> Iterator[None]:
    """Some bytes of a file change in place."""
    path = chance.choice(FILES)
    content = rig.model.now(path)
    if content is not None and len(content):
        offset = chance.randrange(0, len(content))
        data = random_bytes(min(len(content) - offset, 777_777), next(rig.numbers))
        rig.put(path, overwritten(content, offset, data), "write")
    yield


@contextlib.contextmanager
def resized_behind(rig: Rig, chance: random.Random) -> Iterator[None]:
    """A file is truncated or extended by zeros, and written again at the end."""
    path = chance.choice(FILES)
    content = rig.model.now(path)
    if content is not None:
        rig.put(path, resized(content, chance.choice([0, len(content) // 2, len(content) + 300_000])), "size")
    yield
    rig.put(path, random_bytes(SIZES[path], next(rig.numbers)))


@contextlib.contextmanager
def deleted(rig: Rig, chance: random.Random) -> Iterator[None]:
    path = chance.choice(FILES)
    if rig.model.now(path) is not None:
        rig.put(path, None)
    yield
    rig.put(path, random_bytes(SIZES[path], next(rig.numbers)))


# Clocks


@contextlib.contextmanager
def wall_clock_jumps(rig: Rig, chance: random.Random) -> Iterator[None]:
    """The daemon's wall clock is wrong by seconds or years, while one file changes and another gets a strange time."""
    rig.set_clock(chance.choice([-1e9, -30.0, 30.0, 1e9]))
    path = chance.choice(FILES)
    when = int(chance.choice([1.0, time.time() + 1e8, time.time() - 1e5]) * 1e9)
    with contextlib.suppress(FileNotFoundError), replaced(rig, chance):
        os.utime(rig.files / path, ns=(when, when))
    yield
    rig.set_clock(0.0)


@contextlib.contextmanager
def daemon_stops(rig: Rig, chance: random.Random) -> Iterator[None]:
    """The daemon is suspended for seconds, so all its clocks jump."""
    assert rig.daemon is not None
    stop_for(rig.daemon, chance.choice([0.5, 3.0]))
    yield


# Processes


@contextlib.contextmanager
def helper_killed(rig: Rig, chance: random.Random) -> Iterator[None]:
    """kill -9 of the pin helper, which no client notices."""
    yield from _killed(rig, "pinhelper")


@contextlib.contextmanager
def sentinel_killed(rig: Rig, chance: random.Random) -> Iterator[None]:
    """kill -9 of the sentinel; the daemon soon starts another."""
    yield from _killed(rig, "sentinel")


def _killed(rig: Rig, name: str) -> Iterator[None]:
    found: list[psutil.Process] = []

    def runs() -> bool:
        found[:] = [child for other, child in rig.children().items() if other == name]
        return bool(found)

    wait_for(runs, f"the {name} runs")
    victim = found[0]
    with contextlib.suppress(psutil.NoSuchProcess):  # the OOM killer was faster
        victim.kill()
    yield
    wait_for(lambda: rig.children().get(name, victim) != victim, f"the {name} runs again")


@contextlib.contextmanager
def _daemon_replaced(rig: Rig) -> Iterator[subprocess.Popen[bytes]]:
    """Yield the current daemon, and start another one on exit. Errors of a missing mount are allowed in between."""
    window = rig.model.excuse(Window(NO_MOUNT))
    assert rig.daemon is not None
    yield rig.daemon
    rig.start_daemon()
    window.until = time.monotonic()


@contextlib.contextmanager
def daemon_killed(rig: Rig, chance: random.Random) -> Iterator[None]:
    """kill -9 of the daemon: no client hangs, and `umount --force` cleans up."""
    with _daemon_replaced(rig) as daemon:
        daemon.kill()
        yield
        daemon.wait(120)
        rig.force_unmount()


@contextlib.contextmanager
def all_killed(rig: Rig, chance: random.Random) -> Iterator[None]:
    """kill -9 of the daemon and its sentinel: readers may hang until `umount --force`."""
    with _daemon_replaced(rig) as daemon:
        stopped = psutil.Process(daemon.pid)
        stopped.suspend()
        for child in stopped.children():
            child.kill()
        stopped.kill()
        yield
        rig.force_unmount()
        daemon.wait(120)


@contextlib.contextmanager
def remounted(rig: Rig, chance: random.Random) -> Iterator[None]:
    """SIGTERM under load, then a new mount."""
    with _daemon_replaced(rig) as daemon:
        daemon.terminate()
        assert daemon.wait(120) == 0
        yield


# Memory


@contextlib.contextmanager
def memory_shrinks(rig: Rig, chance: random.Random) -> Iterator[None]:
    """The daemon's cgroup gets a limit slightly above its usage; later, the limit is removed."""
    if rig.group is None:
        yield
        return
    least, spare = chance.choice([96, 128]) * MIB, chance.choice([12, 40]) * MIB
    try:
        with contextlib.suppress(OSError):  # EBUSY: the limit is too low
            rig.group.set_memory(max(least, rig.group.usage().current_bytes + spare))
        yield
    finally:
        rig.group.set_memory(None)


NEIGHBOR = "import sys, time; data = bytearray(int(sys.argv[1])); data[::4096] = b'x' * len(data[::4096]); time.sleep(60)"


@contextlib.contextmanager
def memory_taken(rig: Rig, chance: random.Random) -> Iterator[None]:
    """A neighbor in the daemon's cgroup takes most of the remaining memory."""
    if rig.group is None:
        yield
        return
    rig.group.set_memory(rig.group.usage().current_bytes + 120 * MIB)
    taken = chance.choice([60, 95]) * MIB
    neighbor = subprocess.Popen(rig.group.wrap([sys.executable, "-c", NEIGHBOR, str(taken)]))
    try:
        yield
    finally:
        neighbor.kill()
        neighbor.wait()
        rig.group.set_memory(None)


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        unreadable, unwritable, short, slow, throttled, full_disk, storage_stops, replaced, rewritten,
        resized_behind, deleted,
        wall_clock_jumps, daemon_stops, helper_killed, sentinel_killed, daemon_killed, all_killed, remounted,
        memory_shrinks, memory_taken,
    )
}  # fmt: skip
ENDING = {"daemon_killed", "all_killed", "remounted"}  # no daemon answers requests during these


# Requests to the daemon


def resize(rig: Rig, chance: random.Random) -> None:
    """Change the budget; the daemon may refuse under pressure."""
    with contextlib.suppress(MountProblem):
        rig.control(op="resize", cache_bytes=chance.choice([16, 24, 40, 64]) * MIB)


def warm(rig: Rig, chance: random.Random) -> None:
    rig.control(op="warmup", globs=["*"])


def evict(rig: Rig, chance: random.Random) -> None:
    rig.control(op="evict", globs=[])


def look(rig: Rig, chance: random.Random) -> None:
    check_counters(rig.control(op="stats"))


CONTROLS: dict[str, Callable[[Rig, random.Random], None]] = {
    function.__name__: function for function in (resize, warm, evict, look)
}


def check_counters(stats: dict[str, object]) -> None:
    numbers = {key: value for key, value in stats.items() if isinstance(value, int)}
    assert min(numbers.values()) >= 0, numbers
    assert numbers["read_bytes"] == numbers["hit_bytes"] + numbers["miss_bytes"]
    assert numbers["limit_bytes"] <= numbers["budget_bytes"]
    assert numbers["pinned_bytes"] <= numbers["resident_bytes"] + numbers["window_bytes"] + CACHE_MIB * MIB


SHORT_STEPS = 9
SHORT_SEEDS = {"steer": 272, "arena": 2118}  # together they have every fault, and each has both ways of ending the daemon
LONG_STEPS = 40

pytestmark = NEEDS


def test_the_short_plans_have_every_fault() -> None:
    plans = [{fault for step in make_plan(seed, SHORT_STEPS) for fault in step.faults} for seed in SHORT_SEEDS.values()]
    assert set.union(*plans) == set(FAULTS) and {"daemon_killed", "remounted"} <= set.intersection(*plans)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["steer", "arena"])
def test_a_plan_of_faults(tmp_path: Path, mode: str) -> None:
    for seed in seeds(SHORT_SEEDS[mode]):
        directory = tmp_path / str(seed)
        directory.mkdir()
        one_plan(directory, mode, seed, LONG_STEPS if SECONDS else SHORT_STEPS)
        shutil.rmtree(directory)


def one_plan(directory: Path, mode: str, seed: int, steps: int) -> None:
    """Carry out one plan; a failure reports the plan and its seed."""
    plan, at = make_plan(seed, steps), 0
    with Rig(directory, mode, seed) as rig:
        try:
            rig.start_clients()
            for at, step in enumerate(plan):
                print(f"seed {seed} {mode}: {at} {step}", flush=True)
                carry_out(rig, step)
                assert not rig.failures
            rig.stop_clients()
            assert not rig.failures
            check_end(rig)
        except BaseException as error:
            steps_before = "\n".join(map(str, plan[max(0, at - 2) : at + 1]))
            log = "\n".join(rig.log.read_text().splitlines()[-30:])
            hint = f"LLMCACHE_FAULT_SEED={seed} repeats it; step {at} of mode {mode}"
            raise AssertionError(f"{rig.failures}\n{error}\n{steps_before}\n{hint}\n{log}") from error


def check_end(rig: Rig) -> None:
    """After all repairs, every byte is right, the budget holds, and the counters match the kernel's."""
    rig.control(op="resize", cache_bytes=24 * MIB)
    rig.check_everything()

    def used_bytes() -> int:
        pids = [rig.daemon.pid, *(child.pid for child in rig.children().values())] if rig.daemon else []
        resident = resident_bytes(*(rig.point / name for name in SIZES))
        return resident + sum(private_bytes(pid) for pid in pids)

    wait_for(lambda: used_bytes() <= 24 * MIB + OVERHEAD_BYTES, "the budget is kept")
    check_counters(rig.control(op="stats"))
    rig.control(op="evict", globs=[])
    wait_for(lambda: resident_bytes(*(rig.point / name for name in SIZES)) == 0, "evicted pages have left the page cache")
    wait_for(lambda: rig.control(op="stats")["resident_bytes"] == 0, f"resident_bytes is 0: {rig.control(op='stats')}")
    rig.end()
