"""The process that serves a mount: from checked arguments to a clean end.

Threads: the main thread starts and stops things and runs Python's signal handlers; libfuse's loop has a thread of its
own (in the main thread it would keep handlers from running). The kernel may give a signal to any thread, where it is only
noted: a thread that is told of each wakes the main one. FUSE_INIT is handed over to the main thread, so that what
the engine starts belongs to a thread that lives as long as the daemon: a child with PR_SET_PDEATHSIG dies with the
*thread* that made it, and libfuse's threads come and go.

Order at the end: the engine lets go (unpinned, its helper gone), what is being told to the kernel comes to its end,
requests in progress are answered, the mount is detached, the sentinel ends, files beside the control socket are removed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import resource
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from llmcache.errors import LlmcacheError, MountProblem, UsageError
from llmcache.fs import syscalls
from llmcache.fs.backends.files import ReadAhead
from llmcache.fs.backends.fuse import FuseBackend, Reader
from llmcache.fs.backends.inplace import BindMount, InPlaceBackend
from llmcache.fs.client import control, mountpoint
from llmcache.fs.daemon import logs, openmetrics
from llmcache.fs.daemon.controlserver import ControlServer, Requests, switch
from llmcache.fs.daemon.openmetrics import MetricsEndpoint
from llmcache.fs.engine.warmup import Tell, Warmer
from llmcache.fs.vfs import libfuse
from llmcache.fs.vfs.libfuse import Session
from llmcache.fs.vfs.operations import LlmcacheOperations
from llmcache.fs.vfs.source import DEFAULT_SPILL, SourceTree, WritePolicy

if TYPE_CHECKING:
    from llmcache.fs.backends.base import KernelNotifier
    from llmcache.fs.daemon.accesslog import AccessLog

log = logging.getLogger("llmcache.daemon")
THREADS = 64
PRIORITY = -10


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
    metrics_files: bool = False  # with the names of files
    cache_origin: str = "default"  # --cache, a variable, a settings file: where cache_bytes comes from
    not_in_place: str | None = None  # why `auto` has not come to that
    read_ahead_bytes: int | None = None  # on the storage of `source`, in place


class Daemon:
    """One mount and its engine. `run` serves until the end; `ready` is called once requests are served."""

    def __init__(self, request: MountRequest, source: str, point: str, rotate: Callable[[], None] | None = None) -> None:
        """`rotate` is what SIGHUP does; without it, it ends the mount like other signals."""
        self._request = request
        self._rotate = rotate
        self._point = point
        self._source = source
        self._files = control.files(point)
        self._lock_fd = control.take_lock(self._files, point)
        try:
            self._make(request)
        except BaseException:
            self._files.remove()
            os.close(self._lock_fd)
            raise

    def _make(self, request: MountRequest) -> None:
        from llmcache.fs.engine.engine import make_engine

        self._metrics = None if request.metrics is None else MetricsEndpoint(request.metrics)
        self._tree = SourceTree(self._source)
        if request.not_in_place:
            log.info("not in place: %s", request.not_in_place)
        self._engine = make_engine(request.cache_bytes, request.mode, self._tree, request.pinned)
        self._session: Session | BindMount
        backend = self._engine.backend
        if isinstance(backend, InPlaceBackend):
            flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | (0 if request.writable else syscalls.MS_RDONLY)
            begin = functools.partial(self._hand_over, None)
            size = request.read_ahead_bytes
            ahead = None if size is None else ReadAhead(self._source, size)
            self._session = BindMount(self._source, self._point, flags, begin, self._engine.stop, ahead)
            self._warmer = Warmer(self._engine, backend.files, self._tree)
        else:
            assert isinstance(backend, FuseBackend)
            policy = WritePolicy(request.writable, request.spill)
            operations = LlmcacheOperations(self._tree, self._engine, Reader(self._engine, backend), policy)
            operations.on_init = self._hand_over
            self._session = Session(operations, self._point, max_threads=THREADS, options=request.options)
            self._warmer = Warmer(self._engine, operations, self._tree)
        self._requests = Requests(self._engine, self._warmer, self._metrics.address if self._metrics else None)
        self._notifier: KernelNotifier | None = None
        # What the main thread waits for: "init", "resume", "rotate", "stop", "over"; "signal": that a handler can run.
        self._events: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._ending = threading.Lock()
        self._served = False
        self._log = self._make_log() if request.access_log else None

    def run(self, ready: Callable[[], None]) -> None:
        """Serve until unmounted, told to stop, or signalled. Raises what kept the mount from being made."""
        libfuse.prepare_process()
        self._hear_signals()
        loop = threading.Thread(target=self._loop, name="fuse")
        loop.start()
        server: ControlServer | None = None
        try:
            while (event := self._events.get()) != "over":
                if event == "init":
                    server = self._start()
                    if server is not None:
                        self._served = True
                        self._bring_pinned()
                        ready()
                elif event == "resume":
                    self._begin()
                    self._bring_pinned()
                elif event == "rotate":
                    assert self._rotate is not None
                    self._rotate()
                elif event == "stop":
                    notify("STOPPING=1")
                    self._started.set()  # FUSE_INIT may be waiting
                    self._engine.stop()
                    self._session.stop()
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
            self._files.remove()
            os.close(self._lock_fd)
        if self._failure is not None:
            raise self._failure

    def _hear_signals(self) -> None:
        told, tell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(told, True)
        threading.Thread(target=self._wake, args=(told,), name="signals", daemon=True).start()
        signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._signalled)

    def _wake(self, told: int) -> None:
        while os.read(told, 64):
            self._events.put("signal")

    def _signalled(self, number: int, _frame: FrameType | None) -> None:
        self._events.put("rotate" if number == signal.SIGHUP and self._rotate is not None else "stop")

    def _make_log(self) -> AccessLog:
        from llmcache.fs.daemon.accesslog import AccessLog

        path = self._request.access_log
        assert path is not None
        log = AccessLog(path, {"command": shlex.join(sys.argv), **self._engine.about()})
        self._engine.record(log)
        return log

    def _loop(self) -> None:
        try:
            self._session.run()
        except BaseException as error:  # noqa: BLE001 - raised again by run(), in the main thread
            self._failure = self._failure or error
        self._events.put("over")

    def _hand_over(self, notifier: KernelNotifier | None) -> None:
        """Has the main thread start what serves; returns when it does.

        FUSE_INIT, on one of libfuse's threads: the kernel sends nothing else before this returns.
        """
        self._notifier = notifier
        self._events.put("init")
        self._started.wait()
        if self._failure is not None:
            raise self._failure

    def _start(self) -> ControlServer | None:
        try:
            self._begin()
            server = ControlServer(self._files, self._answer)
            self._describe()
            if self._metrics is not None:
                self._metrics.start(self._exposition)
            return server
        except BaseException as error:  # noqa: BLE001 - ends the mount, and is raised by run()
            self._failure = error
            return None
        finally:
            self._started.set()

    def _begin(self) -> None:
        self._engine.start(self._notifier, self._point)

    def _describe(self) -> None:
        facts: dict[str, Any] = {"pid": os.getpid(), "source": self._source, "mount": self._point, "started": time.time()}
        if isinstance(self._session, BindMount):
            facts["inplace"] = self._session.mount_id or 0
        with control.making(self._files.info):
            self._files.tell(facts)

    def _bring_pinned(self) -> None:
        """Brings in what --pin names, while the mount serves already."""
        if self._request.pinned:
            threading.Thread(target=self._pin, name="pin-files", daemon=True).start()

    def _pin(self) -> None:
        try:
            done = self._warmer.warm(list(self._request.pinned), lambda _progress: None)
        except LlmcacheError as error:  # nothing matches yet, or the mount ends
            log.warning("--pin: %s", "no file matches yet" if isinstance(error, UsageError) else error.message)
            return
        log.info("--pin: %d of %d bytes are kept", done["warm_bytes"], sum(row["size_bytes"] for row in done["files"]))

    def _exposition(self) -> str:
        return openmetrics.exposition(self._engine.stats(), self._point, paths=self._request.metrics_files)

    # Control requests

    def _answer(self, request: dict[str, Any], tell: Tell) -> dict[str, Any]:
        if request.get("op") == "stop":
            return self._stop(switch(request, "force"))
        return self._requests.answer(request, tell)

    def _stop(self, force: bool) -> dict[str, Any]:
        """`llmcache umount`: refused while others use the mount, unless forced."""
        with self._ending:
            if force:
                self._events.put("stop")
                return {"stopped": True, "pid": os.getpid()}
            self._refuse_if_busy()
            self._engine.stop()
            try:
                mountpoint.detach(self._point, lazy=False)
            except LlmcacheError:
                self._events.put("resume")  # someone came in between: go on serving
                raise
            if isinstance(self._session, BindMount):  # it may have nothing to unmount
                self._events.put("stop")
            return {"stopped": True, "pid": os.getpid()}

    def _refuse_if_busy(self) -> None:
        entry = mountpoint.find(self._point)
        if entry is not None and entry.mount_id and any(mountpoint.holders(entry, _is_own)):
            raise mountpoint.busy(entry, _is_own)


def _is_own(pid: int) -> bool:
    """True for this process and its children (the engine's helper keeps files of the mount open)."""
    if pid == os.getpid():
        return True
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return int(file.read().rpartition(")")[2].split()[1]) == os.getpid()


def tune_process() -> None:
    """Small heap, quick hand-over of the GIL, many descriptors, no directory kept busy, and (root) a high priority.

    No umask: what applications make has their own taken off by the kernel; the daemon's own files say 0600 themselves.
    """
    os.umask(0)
    syscalls.keep_heap_small()
    sys.setswitchinterval(0.0005)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.chdir("/")
    with contextlib.suppress(PermissionError):  # every reader waits for this process, and it computes little
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)


def serve_foreground(request: MountRequest, source: str, point: str, served: Callable[[], None]) -> None:
    """Serve in this process, with the log on stderr unless the request names another; tells systemd, and `served`, when
    it serves.
    """
    handler = logs.handler(request.log)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logs.catch_all()
    control.make_directory()
    tune_process()

    def ready() -> None:
        log.info("a directory is served on %s", point)
        notify(f"READY=1\nSTATUS=a directory is served on {point}")  # every user may ask systemd for it
        served()

    Daemon(request, source, point, rotation_of(handler)).run(ready)


def rotation_of(handler: logging.Handler) -> Callable[[], None] | None:
    """What SIGHUP does to a log; None where it is a terminal's, which sends it to end what it had started."""
    if isinstance(handler, logs.LogFile):
        return handler.renew
    return (lambda: None) if isinstance(handler, logs.Journal) else None


def check_serves(point: str) -> None:
    """MountProblem unless our mount on `point` answers."""
    entry = mountpoint.find(point)
    state = mountpoint.answers(point, 30.0) if entry is not None else None
    if entry is None or state != 0:
        reason = "hangs" if entry is not None and state is None else os.strerror(state) if state else "is not there"
        raise MountProblem(f"the mount on {point} {reason} after it was made", "see its log: llmcache mount -f shows it")


def notify(state: str) -> bool:
    """Sends `state` ("READY=1\\nSTATUS=…") to the socket in $NOTIFY_SOCKET; False if there is none, or nobody listens."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return False
    if address.startswith("@"):  # a name without a file
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
        try:
            connection.sendto(state.encode(), address)
        except OSError:
            return False
    return True
