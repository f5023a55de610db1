"""The thread that observes the tokens of processes."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from llmcache.errors import LlmcacheError, MissingRequirement, MountProblem
from llmcache.mount.client import control, mountpoint
from llmcache.mount.copies import client_facts, find_copy
from llmcache.mount.stats import whole
from llmcache.procfs import RunningProcesses
from llmcache.tokens.causes import Attribution, Causes
from llmcache.tokens.clock import Clock, candidates
from llmcache.tokens.models import CountersOfAll, Find, Model, ModelFinder, ProcessTree, pressure
from llmcache.tokens.observer import Observer
from llmcache.tokens.passes import HIT, WAIT, Event, Kinds, Pass, Passes, Role
from llmcache.tokens.summary import Interval, Token, TokenSummary, Totals

# Periods of the thread.
POLL_S = 0.1  # reading the reports of the kernel
LOOK_S = 0.5  # requesting sums
SCAN_S, FIRST_SCAN_S = 1.0, 0.05  # scanning processes and their mappings; the second until a model is found
SCAN_REST = 50  # scans take at most one part in SCAN_REST of the time
SETTLING_S = 60.0  # FIRST_SCAN_S is used for at most this time
DAEMON_S, DAEMON_REST = 0.25, 50  # reading the counters of mounts; at most one part in DAEMON_REST of the time
INTERVAL_S = 1.0  # reports where tokens cannot be seen
TRIAL_NS = 2_000_000_000  # of a busy process, after which another clock is tried; twice as long in each round
MOST_TRIAL_NS = 64_000_000_000
SILENCE_NS = 20_000_000_000  # of a busy process, after which its clock is doubted
SILENT_PASSES = 10
NOTE_NS = 10_000_000_000  # of a busy process, after which a note says that its tokens cannot be seen


@dataclass
class _Process:
    pid: int
    passes: Passes = field(default_factory=Passes)
    kinds: Kinds = field(default_factory=Kinds)
    models: list[Model] = field(default_factory=list)
    clocks: list[tuple[Model, Clock]] = field(default_factory=list)
    at: int = -1
    trial_ns: int = field(default_factory=lambda: TRIAL_NS)
    busy_ns: int = 0  # as of the last sums
    busy_at_hit_ns: int = 0  # when the clock was set or read last
    tried: int = 0
    longest_ns: int = 0
    attributions: dict[str, Attribution] = field(default_factory=dict)

    @property
    def model(self) -> Model:
        return self.clocks[self.at][0]


class TokenWatch:
    """Observes the tokens of a process and its children, or of the processes that `find` returns, until `stop`.

    The thread of the watch calls `on_token` and `on_interval`. `is_lasting`: `wait` goes on without processes. Where tokens
    cannot be observed, the counters of /proc are read at intervals, and `why_not` says why.
    """

    def __init__(
        self,
        processes: int | Find,
        *,
        on_token: Callable[[Token], None] = lambda _token: None,
        on_interval: Callable[[Interval], None] = lambda _interval: None,
        on_note: Callable[[str], None] = lambda _note: None,
        is_lasting: bool = False,
    ) -> None:
        self._find = ProcessTree(processes) if isinstance(processes, int) else processes
        self._on_token, self._on_interval, self._on_note = on_token, on_interval, on_note
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tokens", daemon=True)
        self._observer: Observer | None = None
        self._processes: dict[int, _Process] = {}
        self._ended: dict[int, _Process] = {}
        self._finder = ModelFinder()
        self._totals = Totals()
        self._daemons = _Daemons()
        self._noted = False
        self._lost = 0
        self._cpu_s = 0.0
        self._began_ns = self._ended_ns = time.monotonic_ns()
        self._pressure = pressure()
        self._failure: BaseException | None = None
        self._is_lasting = is_lasting
        self._finished = threading.Event()
        self._running = RunningProcesses()
        self.why_not: str | None = None

    def start(self) -> None:
        try:
            self._observer = Observer()
            self._scan()
        except MissingRequirement as problem:
            self._give_up(problem)
        self._began_ns = time.monotonic_ns()
        self._thread.start()

    def wait(self, seconds: float | None) -> None:
        """Wait until all processes have ended (unless `is_lasting`), or the watch has failed, or was canceled."""
        self._finished.wait(seconds)

    def cancel(self) -> None:
        self._over.set()

    def stop(self) -> TokenSummary:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self.summary()

    def summary(self) -> TokenSummary:
        observed_ns = max(1, self._ended_ns - self._began_ns)
        now = pressure()
        shares = {name: min(1.0, (now[name] - us) * 1e3 / observed_ns) for name, us in self._pressure.items() if name in now}
        return self._totals.summary(
            observed_s=observed_ns / 1e9,
            why_not=self.why_not or self._unseen([*self._ended.values(), *self._processes.values()]),
            pressure=shares,
            lost_events=self._lost,
            overhead_s=self._cpu_s,
        )

    def _give_up(self, problem: LlmcacheError) -> None:
        if self._observer is not None:
            self._observer.close()
            self._observer = None
        self.why_not = problem.message
        self._on_note(f"cannot see tokens: {problem.message}")

    # The thread

    def _run(self) -> None:
        try:
            while self._observer is not None and not self._over.is_set():
                self._observe(self._observer)
            if self._observer is None:
                self._count()
        except BaseException as error:  # noqa: BLE001 - raised again by `stop`
            self._failure = error
        finally:
            self._ended_ns = time.monotonic_ns()
            self._cpu_s = time.thread_time()
            if self._observer is not None:
                self._observer.close()
            self._running.close()
            self._finished.set()

    def _observe(self, observer: Observer) -> None:
        looked_s = scan_s = 0.0
        try:
            while True:
                least_s = SCAN_S if self._is_settled() else FIRST_SCAN_S
                has_ended = self._running.wait(min(POLL_S, least_s))
                is_last = self._over.is_set()
                now_s = time.monotonic()
                if has_ended or now_s >= scan_s:
                    began_s = time.thread_time()
                    self._scan()
                    scan_s = now_s + max(least_s, SCAN_REST * (time.thread_time() - began_s))
                if is_last or now_s - looked_s >= LOOK_S:
                    looked_s = now_s
                    self._look(observer)
                self._take(observer.events())
                self._lost = observer.lost
                self._ended_ns, self._cpu_s = time.monotonic_ns(), time.thread_time()
                if is_last:
                    break
            for process in self._processes.values():
                self._report(process, process.passes.finish())
        except MissingRequirement as problem:
            self._give_up(problem)

    def _count(self) -> None:
        counters = CountersOfAll()
        counters.growth(self._find())
        last_ns = time.monotonic_ns()
        is_last = False
        while not is_last:
            is_last = self._over.wait(INTERVAL_S)
            pids = set(self._find())
            self._found(pids)
            grown, now_ns = counters.growth(pids), time.monotonic_ns()
            if not is_last or now_ns - last_ns >= INTERVAL_S * 5e8:
                self._on_interval(Interval(last_ns, now_ns - last_ns, grown.cpu_ns, grown.read_bytes, grown.major_faults))
            last_ns = now_ns
            self._ended_ns, self._cpu_s = now_ns, time.thread_time()

    # Processes and their clocks

    def _scan(self) -> None:
        observer = self._observer
        if observer is None:
            return
        pids = set(self._find())
        self._found(pids)
        for pid in pids:
            if pid not in self._processes and observer.look(pid):
                self._processes[pid] = _Process(pid)
                self._running.add(pid)
        for pid, process in list(self._processes.items()):
            if pid not in pids and pid not in self._running.pids:
                self._take(observer.events())
                self._report(process, process.passes.finish())
                observer.drop_clock(pid)
                self._ended[pid] = self._processes.pop(pid)
                continue
            self._find_models(observer, process)

    def _found(self, pids: set[int]) -> None:
        if not pids and not self._is_lasting:
            self._finished.set()

    def _is_settled(self) -> bool:
        has_clock = any(process.clocks for process in self._processes.values())
        return has_clock or time.monotonic_ns() - self._began_ns > SETTLING_S * 1e9

    def _find_models(self, observer: Observer, process: _Process) -> None:
        found = self._finder.models(process.pid)
        if [(model.path, model.mappings) for model in found] == [(model.path, model.mappings) for model in process.models]:
            return
        process.models = found
        clocks = [[(model, clock) for clock in candidates(model.layouts)] for model in found]
        in_turns = [each[0] for each in clocks if each] + [one for each in clocks for one in each[1:]]
        usable = [one for one in in_turns if Role.FIRST in _addresses(*one)]
        process.attributions |= {model.path: Attribution(model.layouts) for model in found}
        process.tried, process.trial_ns = 0, TRIAL_NS
        self._daemons.set_files(
            (key, model.path) for other in self._processes.values() for model in other.models for key in model.layouts
        )
        if process.at >= 0:
            # llama.cpp unmaps parts of the file after loading; a pass may be under way.
            before = process.clocks[process.at]
            same = (at for at, one in enumerate(usable) if one[1] == before[1] and _addresses(*one) == _addresses(*before))
            if (at := next(same, None)) is not None:
                process.clocks, process.at = usable, at
                return
        self._finish_pass(observer, process)
        process.passes.restart()
        observer.drop_clock(process.pid)
        process.clocks, process.at = usable, -1
        if usable:
            self._set_clock(observer, process, 0)

    def _set_clock(self, observer: Observer, process: _Process, at: int, *, is_lone: bool = False) -> None:
        self._finish_pass(observer, process)
        process.at = at
        process.passes.restart(shows_end=process.clocks[at][1].shows_end, is_lone=is_lone)
        process.busy_at_hit_ns = process.busy_ns
        observer.set_clock(process.pid, _addresses(*process.clocks[at]))

    def _finish_pass(self, observer: Observer, process: _Process) -> None:
        self._take(observer.events())
        self._report(process, process.passes.finish())

    def _look(self, observer: Observer) -> None:
        for pid, process in list(self._processes.items()):
            if observer.look(pid):
                self._review(observer, process)
        if not any(process.clocks for process in self._processes.values()):
            self._note()

    def _review(self, observer: Observer, process: _Process) -> None:
        if not process.clocks:
            return
        silent_ns = process.busy_ns - process.busy_at_hit_ns
        if process.passes.hits:
            if process.passes.seems_lone and not process.passes.is_lone:
                self._try_later(observer, process)
            elif silent_ns > max(SILENCE_NS, SILENT_PASSES * process.longest_ns):
                self._try_next(observer, process)
        elif silent_ns > process.trial_ns:
            self._try_next(observer, process)

    def _try_next(self, observer: Observer, process: _Process) -> None:
        process.tried += 1
        if process.tried >= len(process.clocks):
            process.tried = 0
            process.trial_ns = min(2 * process.trial_ns, MOST_TRIAL_NS)
            self._note()
        self._set_clock(observer, process, (process.at + 1) % len(process.clocks))

    def _try_later(self, observer: Observer, process: _Process) -> None:
        first = process.clocks[process.at][1].places[Role.FIRST]
        same = [at for at, (_, clock) in enumerate(process.clocks) if clock.places[Role.FIRST] == first]
        others = [at for at in same if at > process.at]
        self._set_clock(observer, process, others[0] if others else process.at, is_lone=not others)

    def _note(self) -> None:
        busy = [process for process in self._processes.values() if process.busy_ns > NOTE_NS]
        if not self._noted and (why := self._unseen(busy)):
            self._noted = True
            self._on_note(f"no tokens seen so far: {why}")

    def _unseen(self, processes: Sequence[_Process]) -> str | None:
        if self._totals.tokens or self._totals.prefill_passes or not processes:
            return None
        paths = sorted({os.path.basename(path) for process in processes for path in process.attributions})
        if not paths:
            return (
                "the process maps no model file: it has not loaded a model yet, or it has copied the weights "
                "(llama.cpp: start it with --load-mode mmap; older versions: without --no-mmap)"
            )
        for process in processes:
            for model in process.models:
                with contextlib.suppress(OSError):  # it has ended
                    facts = client_facts(process.pid, set(model.layouts))
                    if (copied := find_copy(facts, model.size_bytes, 0)) is not None and copied.cause != "mlock":
                        return str(copied)
        return (
            f"the process maps {', '.join(paths)}, but reads none of the observed tensors: "
            "it has copied the weights (to a GPU, or repacked), or has not computed anything yet"
        )

    # Events

    def _take(self, events: Iterable[Event]) -> None:
        for event in events:
            process = self._processes.get(event.pid)
            if process is None:
                continue
            if event.kind == WAIT:
                self._wait(process, event)
                continue
            process.busy_ns = event.compute_ns + event.storage_ns
            if event.kind == HIT and event.place == Role.FIRST:
                process.busy_at_hit_ns = process.busy_ns
            self._report(process, process.passes.take(event))

    @staticmethod
    def _wait(process: _Process, event: Event) -> None:
        if process.at >= 0:
            attribution = process.attributions[process.clocks[process.at][0].path]
            if (where := attribution.where(event.dev, event.inode, event.place)) is not None:
                process.passes.wait(where, event.wait_ns)

    def _report(self, process: _Process, passes: Iterable[Pass]) -> None:
        for found in passes if process.at >= 0 else ():
            process.longest_ns = max(process.longest_ns, found.time_ns)
            token = self._token(process, found)
            self._totals.add(token)
            self._on_token(token)

    def _token(self, process: _Process, found: Pass) -> Token:
        model, clock = process.clocks[process.at]
        kind = process.kinds.kind_of(found, are_rows_tokens=clock.are_rows_tokens)
        attribution = process.attributions[model.path]
        causes = Causes(None, None)
        if self._observer is not None and self._observer.sees_files:
            causes = attribution.causes(found.waits, found.storage_ns)
        layer, layer_ns = causes.slowest or (None, 0)
        return Token(
            pid=process.pid,
            model=model.path,
            number=self._totals.tokens + 1 if kind == "decode" else 0,
            kind=kind,
            start_ns=found.start_ns,
            compute_ns=found.compute_ns,
            storage_ns=found.storage_ns,
            other_ns=found.other_ns,
            wait_ns=found.wait_ns,
            read_bytes=found.read_bytes + self._daemons.read_bytes(found.time_ns),
            major_faults=found.major_faults,
            rows=found.rows if clock.are_rows_tokens else None,
            experts_missed=causes.experts_missed,
            experts_used=attribution.experts_used if causes.experts_missed is not None else None,
            slowest_layer=layer,
            slowest_layer_ns=layer_ns,
        )


def _addresses(model: Model, clock: Clock) -> dict[Role, int]:
    found = {role: model.address_of(place) for role, place in clock.places.items()}
    return {role: address for role, address in found.items() if address is not None}


class _Daemons:
    """Bytes that daemons of mounts have read for the observed files; the kernel does not count them for the clients."""

    def __init__(self) -> None:
        self._points: dict[str, int] = {}  # mount point -> its owner
        self._last: dict[str, int] = {}
        self._due_s = 0.0
        self._owed_bytes = 0  # that no token has been given yet

    def set_files(self, files: Iterable[tuple[tuple[int, int], str]]) -> None:
        found = {mount.point: mount.owner for (dev, _), path in files for mount, _ in mountpoint.steering(path, dev)}
        self._last = {point: bytes_read for point, bytes_read in self._last.items() if point in found}
        self._points = found
        self._poll()

    def read_bytes(self, time_ns: int) -> int:
        if not self._points:
            return 0
        if time.monotonic() >= self._due_s:
            self._owed_bytes += self._poll()
        given = int(self._owed_bytes * min(1.0, time_ns / (DAEMON_S * 1e9)))
        self._owed_bytes -= given
        return given

    def _poll(self) -> int:
        began_s, grown = time.monotonic(), 0
        for point, owner in self._points.items():
            try:
                stats = control.request(point, {"op": "stats"}, uid=owner, timeout_s=1.0)
                with control.reply_errors(point):
                    now = whole(stats["backing_read_bytes"]) - whole(stats["client_read_bytes"])
            except MountProblem:  # it has ended, or is busy
                continue
            grown += max(0, now - self._last.get(point, now))
            self._last[point] = now
        self._due_s = began_s + max(DAEMON_S, DAEMON_REST * (time.monotonic() - began_s))
        return grown
