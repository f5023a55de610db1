"""The process that serves a mount: from checked arguments to a clean end.

The main thread starts and stops all parts and runs Python's signal handlers, so libfuse's loop has its own thread. The
thread `signals` wakes the main thread for each signal, because the kernel may deliver it to any thread. FUSE_INIT is passed
to the main thread, because a child with PR_SET_PDEATHSIG dies with the *thread* that created it.

In the background, the child sends JSON lines to the waiting command: notes (logged warnings), an error, or ready. Its stdout
and stderr are the log from the start, so its helpers do not keep the caller's pipes open.

Order at the end: the engine unpins, notifications to the kernel complete, requests in progress are answered, the mount is
detached, the sentinel ends, and the files of the control socket are removed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import queue
import resource
import select
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import IO, TYPE_CHECKING, Any

from llmcache.errors import EXIT_BUG, LlmcacheError, MountProblem, UsageError, say
from llmcache.memory import OOM_NEVER, set_oom_score
from llmcache.mount import syscalls
from llmcache.mount.backends.fuse import FuseBackend, Reader
from llmcache.mount.backends.inplace import InPlaceBackend
from llmcache.mount.budget import settle_budget, settle_mode
from llmcache.mount.client import control, mountpoint
from llmcache.mount.daemon import controlserver, logs, openmetrics
from llmcache.mount.daemon.accesslog import AccessLog
from llmcache.mount.daemon.bindmount import BindMount
from llmcache.mount.daemon.controlserver import ControlServer, Requests, switch
from llmcache.mount.daemon.openmetrics import MetricsEndpoint
from llmcache.mount.daemon.parts import new_engine
from llmcache.mount.engine.warmup import Tell, Warmup
from llmcache.mount.readahead import ReadAhead, restore_left
from llmcache.mount.source.tree import DEFAULT_SPILL, SourceTree, WritePolicy
from llmcache.mount.vfs import libfuse
from llmcache.mount.vfs.callbacks import Callbacks
from llmcache.mount.vfs.libfuse import Session
from llmcache.mount.vfs.operations import LlmcacheOperations
from llmcache.procfs import status_of

if TYPE_CHECKING:
    from llmcache.mount.state.interfaces import KernelNotifier

log = logging.getLogger("llmcache.daemon")
THREADS = 64
PRIORITY = -10
START_S = 120.0  # the longest time until a new daemon serves
PIN_REST_S = 1.0  # between loads of pinned files: the limit of pins grows in steps
_LOG_BYTES = 1 << 20


@dataclass(frozen=True)
class MountRequest:
    """Arguments of `llmcache mount`."""

    source: str
    mount: str
    cache_bytes: int | None
    mode: str = "auto"
    writable: bool = False
    spill: tuple[str, ...] = DEFAULT_SPILL
    options: tuple[str, ...] = ()
    access_log: str | None = None
    pinned: tuple[str, ...] = ()
    log: str | None = None
    metrics: str | None = None  # ADDRESS:PORT of the metrics endpoint
    metrics_files: bool = False  # include the names of files
    cache_origin: str = "default"  # the source of cache_bytes: --cache, a variable or a settings file
    not_in_place: str | None = None  # why `auto` did not choose mode inplace
    read_ahead_bytes: int | None = None  # for the storage of `source`, in mode inplace
    lifetime_pids: tuple[int, ...] = ()  # the mount ends when all of these processes have ended


class Daemon:
    """One mount and its engine."""

    def __init__(self, request: MountRequest, source: str, point: str, rotate: Callable[[], None] | None = None) -> None:
        """`rotate`: the action of SIGHUP; without it, SIGHUP ends the mount."""
        self._request = request
        self._rotate = rotate
        self._point = point
        self._source = source
        self._files = control.files(point)
        self._lock_fd = controlserver.take_lock(self._files, point)
        self._source_locks: list[int] = []
        try:
            if request.mode == "inplace":
                self._source_locks = controlserver.lock_source(source)
            restore_left()
            mountpoint.remove_dead()
            self._make(request)
        except BaseException:
            controlserver.unlock_source(self._source_locks)
            self._files.remove()
            os.close(self._lock_fd)
            raise

    def _make(self, request: MountRequest) -> None:
        self._metrics = None if request.metrics is None else MetricsEndpoint(request.metrics)
        self._tree = SourceTree(self._source)
        if request.not_in_place:
            log.info("not in place: %s", request.not_in_place)
        budget_bytes = settle_budget(request.cache_bytes)
        if request.mode == "inplace":
            log.info("mode inplace: steering the page cache of the files themselves")
        self._engine = new_engine(budget_bytes, settle_mode(request.mode, budget_bytes), self._tree, request.pinned)
        self._session: Session | BindMount
        backend = self._engine.backend
        if isinstance(backend, InPlaceBackend):
            flags = syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV
            flags |= 0 if request.writable else syscalls.MOUNT_ATTR_RDONLY
            if request.read_ahead_bytes is not None:
                backend.files.read_ahead = ReadAhead(self._source, request.read_ahead_bytes)
            begin, end = self._start_and_wait, self._engine.stop
            self._session = BindMount(self._source, self._point, flags, backend.files, begin, end)
            self._warmer = Warmup(self._engine, backend.files)
        else:
            assert isinstance(backend, FuseBackend)
            policy = WritePolicy(request.writable, request.spill)
            operations = LlmcacheOperations(self._tree, self._engine, Reader(self._engine, backend), policy)
            callbacks = Callbacks(operations, self._start_and_wait)
            self._session = Session(callbacks, self._point, max_threads=THREADS, options=request.options)
            self._warmer = Warmup(self._engine, operations)
        self._requests = Requests(self._engine, self._warmer, self._metrics.address if self._metrics else None)
        self._notifier: KernelNotifier | None = None
        # Events for the main thread: "init", "resume", "rotate", "stop", "over", and "signal", which lets a handler run.
        self._events: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._started = threading.Event()
        self._pin_due = threading.Event()
        self._pinning = threading.Thread(target=self._load_pinned, name="pin-files", daemon=True)
        self._failure: BaseException | None = None
        self._stop_lock = threading.Lock()
        self._served = False
        self._log: AccessLog | None = None
        if request.access_log is not None:
            self._log = AccessLog(request.access_log, {"command": shlex.join(sys.argv), **self._engine.about()})
            self._engine.state.references.log = self._log

    def run(self, ready: Callable[[], None]) -> None:
        """Serve until the end; call `ready` as soon as requests are served."""
        libfuse.prepare_process()
        self._hear_signals()
        loop = threading.Thread(target=self._loop, name="fuse")
        loop.start()
        threading.Thread(target=self._end_with, args=(self._request.lifetime_pids,), name="lifetime", daemon=True).start()
        server: ControlServer | None = None
        try:
            while (event := self._events.get()) != "over":
                if event == "init":
                    server = self._start()
                    if server is not None:
                        self._served = True
                        self._pin()
                        gc.freeze()  # present objects are permanent: exclude them from garbage collection
                        ready()
                elif event == "resume":
                    self._engine.start(self._notifier, self._point)
                    self._pin()
                elif event == "rotate":
                    assert self._rotate is not None
                    self._rotate()
                elif event == "stop":
                    notify("STOPPING=1")
                    self._end()
        except BaseException:  # no thread would process events, such as signals and `llmcache umount`
            self._end()
            raise
        finally:
            self._started.set()
            loop.join()
            self._engine.stop()
            self._engine.backend.close()
            if self._log is not None:
                self._log.close(keep=self._served)
            if server is not None:
                server.close()
            if self._metrics is not None:
                self._metrics.close()
            controlserver.unlock_source(self._source_locks)
            self._files.remove()
            os.close(self._lock_fd)
            mountpoint.remove_made(self._point)
        if self._failure is not None:
            raise self._failure

    def _end(self) -> None:
        self._started.set()  # releases FUSE_INIT if it is waiting
        self._engine.stop()
        self._session.stop()

    def _hear_signals(self) -> None:
        reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(reading, True)
        threading.Thread(target=self._wake, args=(reading,), name="signals", daemon=True).start()
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or self._rotate is not None or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._signalled)

    def _wake(self, reading: int) -> None:
        while os.read(reading, 64):
            self._events.put("signal")

    def _end_with(self, pids: Sequence[int]) -> None:
        if not pids:
            return
        fds = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                fds.append(os.pidfd_open(pid))
        for fd in fds:
            end = select.poll()
            end.register(fd, select.POLLIN)
            end.poll()
            os.close(fd)
        log.info("the processes that this mount serves have ended")
        self._events.put("stop")

    def _signalled(self, number: int, _frame: FrameType | None) -> None:
        self._events.put("rotate" if number == signal.SIGHUP and self._rotate is not None else "stop")

    def _loop(self) -> None:
        try:
            self._session.run()
        except BaseException as error:  # noqa: BLE001 - raised again by run(), in the main thread
            self._failure = self._failure or error
        self._events.put("over")

    def _start_and_wait(self, notifier: KernelNotifier | None = None) -> None:
        """Wait until the main thread has started the engine. Over FUSE, the kernel sends no other request before this
        returns.
        """
        self._notifier = notifier
        self._events.put("init")
        self._started.wait()
        if self._failure is not None:
            raise self._failure

    def _start(self) -> ControlServer | None:
        if self._engine.mode != "arena":  # there, the pins are memory of this process
            # When `memory.max` falls below the pins, the kernel kills processes until none is left: the death of the pin
            # helper makes pages reclaimable, but that write to `memory.max` no longer reclaims.
            set_oom_score(OOM_NEVER)
        try:
            self._engine.start(self._notifier, self._point)
            server = ControlServer(self._files, self._answer)
            facts: dict[str, Any] = {"pid": os.getpid(), "source": self._source, "mount": self._point}
            facts["started"] = time.time()
            if isinstance(self._session, BindMount):
                facts["inplace"] = self._session.mount_id or 0
            with control.file_errors(self._files.info):
                self._files.write_info(facts)
            if self._metrics is not None:
                names = self._request.metrics_files
                self._metrics.start(lambda: openmetrics.exposition(self._engine.stats(), self._point, paths=names))
            return server
        except BaseException as error:  # noqa: BLE001 - ends the mount, and is raised by run()
            self._failure = error
            return None
        finally:
            self._started.set()

    def _pin(self) -> None:
        """Load the files of --pin now, and what the mount had to unpin as soon as it may pin more again."""
        self._pin_due.set()
        if self._request.pinned and not self._pinning.is_alive():
            self._engine.on_room = self._pin_due.set
            self._pinning.start()

    def _load_pinned(self) -> None:
        before = None
        while self._pin_due.wait():
            self._pin_due.clear()
            try:
                done = self._warmer.warm(list(self._request.pinned), lambda _progress: None)
            except LlmcacheError as error:  # no file matches yet, or the mount ends
                log.warning("--pin: %s", "no file matches yet" if isinstance(error, UsageError) else error.message)
                continue
            if before is None or done["warm_bytes"] == done["wanted_bytes"] != before:
                before = done["warm_bytes"]
                size_bytes = sum(row["size_bytes"] for row in done["files"])
                log.info("--pin: %d of %d bytes are cached", before, size_bytes)
            time.sleep(PIN_REST_S)

    def _answer(self, request: dict[str, Any], on_progress: Tell) -> dict[str, Any]:
        if request.get("op") == "stop":
            return self._stop(switch(request, "force"))
        return self._requests.answer(request, on_progress)

    def _stop(self, force: bool) -> dict[str, Any]:
        with self._stop_lock:
            if not force:
                mount = mountpoint.find(self._point)
                if mount is not None and mount.id and any(mountpoint.users(mount, _is_own)):
                    raise mountpoint.busy(mount, _is_own)
                self._engine.stop()
                try:
                    mountpoint.detach(self._point, lazy=False)
                except LlmcacheError:
                    self._events.put("resume")  # a process has opened a file since the check: serve again
                    raise
            if force or isinstance(self._session, BindMount):  # a BindMount may have nothing to unmount
                self._events.put("stop")
            return {"stopped": True, "pid": os.getpid()}


def _is_own(pid: int) -> bool:
    if pid == os.getpid():
        return True
    return int(status_of(pid)["PPid"]) == os.getpid()


def tune_process() -> None:
    """Set heap, GIL switch interval, descriptor limit, root directory and (for root) priority.

    The umask is 0, because each application's umask is applied to its files.
    """
    os.umask(0)
    syscalls.keep_heap_small()
    sys.setswitchinterval(0.0005)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.chdir("/")
    with contextlib.suppress(PermissionError):  # all readers wait for this process, which computes little
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)


def serve_foreground(request: MountRequest, source: str, point: str, served: Callable[[], None]) -> None:
    """Serve in this process, with the log on stderr by default; call `served` as soon as the mount serves."""
    handler = logs.handler(request.log)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logs.catch_all()
    control.make_directory()
    tune_process()

    def ready() -> None:
        log.info("serving a directory on %s", point)
        notify(f"READY=1\nSTATUS=serving a directory on {point}")  # all users can read it, so it does not name SOURCE
        served()

    Daemon(request, source, point, _rotation(handler)).run(ready)


def serve_background(request: MountRequest, source: str, point: str, served: Callable[[], None]) -> None:
    """Start a daemon; call `served` as soon as its mount serves, or raise its error."""
    control.make_directory()
    reading, writing = os.pipe()
    log_path = control.files(point).log if request.log in (None, logs.JOURNAL) else str(request.log)
    child = os.fork()
    if child == 0:
        os.close(reading)
        os._exit(_child(request, source, point, _Reporter(writing), log_path))
    os.close(writing)
    with os.fdopen(reading) as events:
        try:
            _wait_ready(events, child, log_path)
        except KeyboardInterrupt:  # the daemon has its own session, so Ctrl-C does not reach it
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)
            os.waitpid(child, 0)
            raise
    mount = mountpoint.find(point)
    state = None if mount is None else mountpoint.answers(point, 30.0)
    if state != 0:
        reason = "it is missing" if mount is None else "it hangs" if state is None else os.strerror(state)
        raise MountProblem(f"the new mount on {point} does not work: {reason}", f"see its log: {log_path}")
    served()


def _wait_ready(events: IO[str], child: int, log_path: str) -> None:
    end = time.monotonic() + START_S
    while True:
        ready, _, _ = select.select([events], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            os.kill(child, signal.SIGTERM)  # the mount must not appear after this error
            raise MountProblem(f"the daemon (pid {child}) does not serve after {START_S:.0f} s", f"see its log: {log_path}")
        line = events.readline()
        if not line:
            _, status = os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(status)
            raise MountProblem(f"the daemon ended with status {code} before it served", f"see its log: {log_path}")
        event = json.loads(line)
        if "note" in event:
            say(event["note"])
        elif "error" in event:
            os.waitpid(child, 0)
            reported = LlmcacheError(event["error"], event["hint"])
            reported.exit_code = event["exit_code"]
            raise reported
        else:
            return


class _Reporter(logging.Handler):
    """Sends the child's events and early warnings to the waiting parent."""

    def __init__(self, fd: int) -> None:
        super().__init__(logging.WARNING)
        self._pipe = os.fdopen(fd, "w")

    def emit(self, record: logging.LogRecord) -> None:
        self.send(note=record.getMessage())

    def send(self, **event: Any) -> None:
        self.acquire()  # other threads may log
        try:
            self._pipe.write(json.dumps(event) + "\n")
            self._pipe.flush()
        except (OSError, ValueError):  # the parent has ended, or the pipe is closed
            pass
        finally:
            self.release()

    def finish(self) -> None:
        """Later warnings go only to the log."""
        self.send(ready=True)
        logging.getLogger().removeHandler(self)
        with contextlib.suppress(OSError):
            self._pipe.close()


def _child(request: MountRequest, source: str, point: str, reporter: _Reporter, log_path: str) -> int:
    root = logging.getLogger()
    try:
        os.setsid()
        begin = _redirect(log_path, shorten=request.log is None)
        handler: logging.Handler = (
            logs.Journal()
            if request.log == logs.JOURNAL
            else logs.LogFile(log_path, _LOG_BYTES if request.log is None else 0, streams=True)
        )
        root.setLevel(logging.INFO)
        root.addHandler(handler)
        root.addHandler(reporter)
        logs.catch_all()
        tune_process()
        Daemon(request, source, point, _rotation(handler)).run(reporter.finish)
    except LlmcacheError as error:
        root.removeHandler(reporter)  # the parent receives the error itself, not a note
        # Without the reason, which may name files: the parent shows it.
        logging.getLogger("llmcache").error("the daemon ends with exit code %d", error.exit_code)
        details = _libfuse_errors(log_path, begin) if isinstance(error, MountProblem) else ""
        reporter.send(error=f"{error.message}{details}", hint=error.hint, exit_code=error.exit_code)
        return error.exit_code
    except BaseException as error:  # noqa: BLE001 - the outermost frame of the daemon: log the traceback
        print(logs.without_text(error), file=sys.stderr, flush=True)
        reporter.send(
            error=f"{type(error).__name__}: {error}",
            hint=f"this is a bug in llmcache; see the log: {log_path}",
            exit_code=EXIT_BUG,
        )
        return EXIT_BUG
    return 0


def _redirect(log_path: str, *, shorten: bool) -> int:
    """Return the present size of the log."""
    try:
        fd = logs.open_own(log_path)
    except OSError as error:
        raise logs.problem(log_path, error) from error
    if shorten and os.fstat(fd).st_size > _LOG_BYTES:
        os.ftruncate(fd, 0)
    null = os.open(os.devnull, os.O_RDONLY)
    sys.stdout.flush()
    sys.stderr.flush()
    for source, target in ((null, 0), (fd, 1), (fd, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(fd)
    return os.fstat(1).st_size


def _libfuse_errors(log_path: str, begin: int) -> str:
    with open(log_path, encoding="utf-8", errors="replace") as file:
        file.seek(begin)
        lines = [line.strip() for line in file if line.startswith(("fuse", "mount"))]
    return ": " + "; ".join(lines) if lines else ""


def _rotation(handler: logging.Handler) -> Callable[[], None] | None:
    """Return the action of SIGHUP; None for stderr, because a terminal sends SIGHUP to end its processes."""
    if isinstance(handler, logs.LogFile):
        return handler.renew
    return (lambda: None) if isinstance(handler, logs.Journal) else None


def notify(state: str) -> bool:
    r"""Send `state` ("READY=1\nSTATUS=…") to $NOTIFY_SOCKET; return False if nothing listens there."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return False
    if address.startswith("@"):  # an abstract socket
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
        try:
            connection.sendto(state.encode(), address)
        except OSError:
            return False
    return True
