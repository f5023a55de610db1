"""libfuse 3 through mfusepy's ctypes declarations: loading it, mounting, the serving loop and kernel notifications.

mfusepy's FUSE class is not used: fuse_main_real of libfuse 3.14 ignores `max_threads` and handles signals itself.

ABI: of fuse_config's fields after `auto_cache`, which moved between versions, only `nullpath_ok` is set; mfusepy has its
offset in every release. flags, direct_io, keep_cache and fh of fuse_file_info never moved. A path's nodeid is its st_ino,
because use_ino is unset. Since 2.6, a pointer to the request follows a thread's fuse_context, and the request begins with
the session and its number (undocumented).
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, TypeVar

from llmcache.errors import MissingRequirement, MountProblem

if TYPE_CHECKING:
    from ctypes import _NamedFuncPointer as CFuncPtr

APT_HINT = "install FUSE 3: sudo apt install fuse3"
WAKE_SIGNAL = signal.SIGUSR2
_ASYNC_READ = 1 << 0
_DONT_MASK = 1 << 6  # the umask applies only in directories without a default access list: see Caller.new_mode
_POSIX_ACL = 1 << 19  # the mode alone can allow more than a file's access lists: the kernel must check both
_UNWANTED = (
    (1 << 7 | 1 << 8 | 1 << 9)  # splice: replies are in memory, so a pipe would only add system calls
    | 1 << 12  # AUTO_INVAL_DATA: the daemon detects changed files at open and drops their pages
    | 1 << 13
    | 1 << 14  # READDIRPLUS (and 1 << 13): it would create an inode for every name in a large directory
    | 1 << 20  # HANDLE_KILLPRIV: a daemon that is root does not clear set-id bits with its writes; the kernel does
)


Pointed = TypeVar("Pointed", covariant=True)


class Pointer(Protocol[Pointed]):
    """A ctypes pointer; false for NULL."""

    @property
    def contents(self) -> Pointed:
        """The target."""

    def __bool__(self) -> bool: ...


class RequestContext(Protocol):
    """struct fuse_context."""

    uid: int
    gid: int
    pid: int
    umask: int


class Callbacks(Protocol):
    """Functions for a session."""

    def function(self, name: str) -> Callable[..., int] | None:
        """Return None if there is no such function."""

    def init(self, notifier: Notifier) -> None:
        """FUSE_INIT: start to serve."""

    def destroy(self) -> None:
        """Called when no request is in progress."""


@functools.cache
def binding() -> ModuleType:
    """Load mfusepy with libfuse 3. MissingRequirement: not installed."""
    chosen = os.environ.get("FUSE_LIBRARY_PATH")
    names = [chosen] if chosen else ["libfuse3.so.4", "libfuse3.so.3"]
    failure = ""
    for name in names:
        try:
            ctypes.CDLL(name)
        except OSError as error:
            failure = str(error)
            continue
        os.environ["FUSE_LIBRARY_PATH"] = name
        import mfusepy  # loads the library named in FUSE_LIBRARY_PATH

        if mfusepy.fuse_version_major != 3:
            raise MissingRequirement(f"{name} is libfuse {mfusepy.fuse_version_major}, not 3", APT_HINT)
        found: ModuleType = mfusepy
        return found
    if chosen:
        raise MissingRequirement(
            f"FUSE_LIBRARY_PATH={chosen} cannot be loaded: {failure}",
            f"unset FUSE_LIBRARY_PATH, or {APT_HINT}",
        )
    raise MissingRequirement("libfuse 3 is not installed", APT_HINT)


@functools.cache
def library() -> ctypes.CDLL:
    """Return libfuse; every call releases the GIL."""
    lib: ctypes.CDLL = binding()._libfuse
    pointer, number, offset = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int64
    new = _new(lib)
    new.restype, new.argtypes = pointer, [pointer, pointer, ctypes.c_size_t, pointer]
    lib.fuse_opt_free_args.restype, lib.fuse_opt_free_args.argtypes = None, [pointer]
    lib.fuse_mount.argtypes = [pointer, ctypes.c_char_p]
    lib.fuse_loop_mt.argtypes = [pointer, pointer]
    for name in ("fuse_exit", "fuse_unmount", "fuse_destroy"):
        getattr(lib, name).restype, getattr(lib, name).argtypes = None, [pointer]
    lib.fuse_get_session.restype, lib.fuse_get_session.argtypes = pointer, [pointer]
    lib.fuse_lowlevel_notify_inval_inode.argtypes = [pointer, number, offset, offset]
    lib.fuse_lowlevel_notify_store.argtypes = [pointer, number, offset, pointer, ctypes.c_int]
    lib.fuse_invalidate_path.argtypes = [pointer, ctypes.c_char_p]
    lib.fuse_get_context.restype = ctypes.POINTER(binding().fuse_context)
    return lib


def request_context() -> RequestContext:
    """Return the context of this thread's request."""
    context: RequestContext = library().fuse_get_context().contents
    return context


def request_number() -> int:
    """Return the unique number of this thread's request; 0 if unknown."""
    context = library().fuse_get_context().contents
    request = ctypes.c_void_p.from_address(ctypes.addressof(context) + ctypes.sizeof(context)).value
    if not request:
        return 0
    session, number = (ctypes.c_uint64 * 2).from_address(request)
    return int(number) if session == library().fuse_get_session(context.fuse) else 0


def _new(lib: ctypes.CDLL) -> CFuncPtr:
    found: CFuncPtr = getattr(lib, "fuse_new_31", None) or lib.fuse_new
    return found


def version() -> str:
    """Return libfuse's version, such as "3.14.0". MissingRequirement: not installed."""
    lib = library()
    lib.fuse_pkgversion.restype = ctypes.c_char_p
    return str(lib.fuse_pkgversion().decode())


class _Buffer(ctypes.Structure):
    """fuse_bufvec with a fuse_buf (mfusepy declares a pointer)."""

    _fields_ = [
        ("count", ctypes.c_size_t),
        ("index", ctypes.c_size_t),
        ("start", ctypes.c_size_t),
        ("size", ctypes.c_size_t),
        ("flags", ctypes.c_int),
        ("memory", ctypes.c_void_p),
        ("fd", ctypes.c_int),
        ("position", ctypes.c_int64),
    ]


class _Arguments(ctypes.Structure):
    _fields_ = [("count", ctypes.c_int), ("values", ctypes.c_void_p), ("allocated", ctypes.c_int)]


class _OldLoopConfig(ctypes.Structure):
    """fuse_loop_config before libfuse 3.12."""

    _fields_ = [("clone_fd", ctypes.c_int), ("max_idle_threads", ctypes.c_uint)]


class Notifier:
    """Notifications to the kernel. They return 0 or a negative errno.

    -ENOENT: the kernel has no such inode. -ENOTCONN: the notifier is closed.

    Calls wait for locked pages, and a page is locked once its READ is queued. So a thread with a pending request must not
    make them, nor wait without a limit for a thread that does (`state.py`), and `close` waits for all calls before the loop
    ends.
    """

    def __init__(self, fuse: int) -> None:
        self._lib = library()
        self._fuse = fuse
        self._session = self._lib.fuse_get_session(fuse)
        self._changed = threading.Condition()
        self._under_way = 0
        self._closed = False

    def store(self, nodeid: int, offset: int, address: int, length: int) -> int:
        vector = _Buffer(1, 0, 0, length, 0, address, -1, 0)
        return self._tell(self._lib.fuse_lowlevel_notify_store, self._session, nodeid, offset, ctypes.byref(vector), 0)

    def invalidate(self, nodeid: int, offset: int, length: int) -> int:
        """Length 0: to the end of the file; offset -1: only the attributes."""
        return self._tell(self._lib.fuse_lowlevel_notify_inval_inode, self._session, nodeid, offset, length)

    def invalidate_path(self, path: str) -> int:
        """`path`: in the mount (`/a/b`)."""
        return self._tell(self._lib.fuse_invalidate_path, self._fuse, os.fsencode(path))

    def _tell(self, call: Callable[..., int], *arguments: object) -> int:
        with self._changed:
            if self._closed:
                return -errno.ENOTCONN
            self._under_way += 1
        try:
            return int(call(*arguments))
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Wait for the calls in progress; requests must still be served."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._under_way)


class Session:
    """One mount, from fuse_new to fuse_destroy. `run` blocks; any thread may `stop` it."""

    def __init__(self, callbacks: Callbacks, mountpoint: str, *, max_threads: int, options: Sequence[str]) -> None:
        self._lib = library()
        self._callbacks = callbacks
        self._mountpoint = mountpoint
        self._max_threads = max_threads
        self._failure: BaseException | None = None
        self._notifier: Notifier | None = None
        self._thread = 0
        self._over = threading.Event()
        self._alive, self._turn = True, threading.Lock()  # `_turn` prevents the use of `_fuse` after fuse_destroy
        self._table = self._functions()
        given = [word.partition("=")[2] for option in options for word in option.split(",") if word.startswith("max_read=")]
        self._max_read = int(given[-1]) if given and given[-1].isdecimal() else 0
        self._fuse = self._create(options)

    def _functions(self) -> ctypes.Structure:
        table: ctypes.Structure = binding().fuse_operations()
        own: dict[str, Callable[..., int | None]] = {"init": self._initialise, "destroy": self._destroy}
        for name, prototype in ((field[0], field[1]) for field in table._fields_):
            function = own.get(name) or self._callbacks.function(name)
            if function is not None:
                setattr(table, name, prototype(function))
        return table

    def _create(self, options: Sequence[str]) -> int:
        words = [b"llmcachefs"] + [word for option in options for word in (b"-o", os.fsencode(option))]
        values = (ctypes.c_char_p * (len(words) + 1))(*words, None)
        arguments = _Arguments(len(words), ctypes.cast(values, ctypes.c_void_p).value, 0)
        table = self._table
        fuse = _new(self._lib)(ctypes.byref(arguments), ctypes.byref(table), ctypes.sizeof(table), None)
        self._lib.fuse_opt_free_args(ctypes.byref(arguments))
        if not fuse:
            raise MountProblem(f"libfuse does not accept the mount options {','.join(options)}", "see `man mount.fuse3`")
        return int(fuse)

    def _initialise(self, conn: Pointer[ctypes.Structure], config: Pointer[ctypes.Structure]) -> None:
        """`run` raises a failure."""
        try:
            self._configure(conn.contents, config.contents)
            self._notifier = Notifier(self._fuse)
            self._callbacks.init(self._notifier)
        except BaseException as error:  # noqa: BLE001 - run() raises it; libfuse has no way to report it
            self._failure = error
            self._lib.fuse_exit(self._fuse)

    def _configure(self, conn: ctypes.Structure, config: ctypes.Structure) -> None:
        conn.want = (conn.want | (conn.capable & _ASYNC_READ)) & ~_UNWANTED
        conn.want |= conn.capable & (_POSIX_ACL | _DONT_MASK)
        conn.max_background, conn.congestion_threshold = 64, 48
        conn.max_read = self._max_read  # libfuse ends the session unless it is set both here and as an option
        config.entry_timeout = 1.0
        # The kernel requests size and times at every open and stat (default_permissions checks refresh them), so a file
        # that was changed behind the mount is never opened with the old size. Reads and page faults do not request them.
        config.attr_timeout = 0.0
        config.negative_timeout = 0.0
        config.readdir_ino = 1
        config.nullpath_ok = 1

    def _destroy(self, _private: int | None) -> None:
        self._callbacks.destroy()

    def run(self) -> None:
        """Serve until unmounted or stopped. MountProblem if the mount fails."""
        try:
            if self._lib.fuse_mount(self._fuse, os.fsencode(self._mountpoint)) != 0:
                hint = "MOUNT must be a directory of your own, and /dev/fuse must be open to you"
                raise MountProblem(f"cannot mount on {self._mountpoint}", None if os.geteuid() == 0 else hint)
            self._thread = threading.get_ident()
            try:
                code = self._loop()
            finally:
                self._over.set()
                self._lib.fuse_unmount(self._fuse)
        finally:
            self._over.set()
            with self._turn:
                self._alive = False
            self._lib.fuse_destroy(self._fuse)
        if self._failure is not None:
            raise self._failure
        if code < 0:
            raise MountProblem(f"serving {self._mountpoint} failed: {os.strerror(-code)}")

    def _loop(self) -> int:
        lib = self._lib
        create = getattr(lib, "fuse_loop_cfg_create", None)
        if create is None:
            old = _OldLoopConfig(0, self._max_threads)
            return int(lib.fuse_loop_mt(self._fuse, ctypes.byref(old)))
        create.restype = ctypes.c_void_p
        loop = ctypes.c_void_p(create())
        lib.fuse_loop_cfg_set_max_threads(loop, ctypes.c_uint(self._max_threads))
        lib.fuse_loop_cfg_set_idle_threads(loop, ctypes.c_uint(self._max_threads))
        try:
            return int(lib.fuse_loop_mt(self._fuse, loop))
        finally:
            lib.fuse_loop_cfg_destroy(loop)

    def stop(self) -> None:
        """End `run` after the requests in progress. Returns when the loop has ended.

        The loop waits on a semaphore; a signal that is sent before the wait is lost.
        """
        if self._notifier is not None:
            self._notifier.close()
        with self._turn:
            if self._alive:
                self._lib.fuse_exit(self._fuse)
        while not self._over.is_set():
            if self._thread:
                signal.pthread_kill(self._thread, WAKE_SIGNAL)
            self._over.wait(0.05)


def prepare_process() -> None:
    """Install the signal handler for `Session.stop`. Call it in the main thread, before `run`."""
    signal.signal(WAKE_SIGNAL, lambda _number, _frame: None)  # without SA_RESTART: interrupts the semaphore
