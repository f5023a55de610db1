"""Server of the control socket, and the locks of the daemon. Each request, of its user or of root, has its own thread.

Clients are not trusted: the length of lines, the time to send one and the number of connections are limited.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import reprlib
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcache.errors import LlmcacheError, MountProblem, UsageError
from llmcache.files import is_below
from llmcache.mount.budget import settle_mode
from llmcache.mount.client import control, mountpoint
from llmcache.mount.client.control import ControlFiles
from llmcache.mount.daemon.connections import ConnectionServer, receive
from llmcache.mount.engine.report import heat_map
from llmcache.mount.engine.warmup import NAMES_S, TELL_S, Tell
from llmcache.mount.stats import to_json

if TYPE_CHECKING:
    from llmcache.mount.engine.engine import Engine
    from llmcache.mount.engine.warmup import Warmup


log = logging.getLogger("llmcache.control")
_LONGEST_REQUEST = 1 << 20
_MOST_CONNECTIONS = 32
REQUEST_S = 10.0  # time for a client to send its line
_REPLY_S = 10.0  # time for a client to receive the reply
RETRY_S = 0.1
ENDING_S = 30.0
SOURCE_ENDING_S = 2.0


def take_lock(found: ControlFiles, point: str) -> int:
    """Lock the lock file for the life of this process, and remove the info file of a previous daemon.

    If the other daemon has no mount any more, wait for its end. MountProblem: another daemon has the lock.
    MissingRequirement: the file cannot be created.
    """
    end = time.monotonic() + ENDING_S
    while (fd := _lock(found.lock, lambda: _open_lock(found), fcntl.LOCK_EX)) is None:
        if mountpoint.find(point) is not None or time.monotonic() > end:
            pid = found.describe().get("pid")
            by = f" by pid {pid}" if pid else ""
            raise MountProblem(f"{point} is already served{by}", f"unmount it first: llmcache umount {point}") from None
        time.sleep(0.05)
    with control.file_errors(found.info), contextlib.suppress(FileNotFoundError):
        os.unlink(found.info)
    return fd


def _open_lock(found: ControlFiles) -> int:
    while True:
        with contextlib.suppress(FileNotFoundError):
            return found.open(found.lock, os.O_RDWR)
        with contextlib.suppress(FileExistsError):
            os.close(os.open(found.lock, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def _lock(path: str, opened: Callable[[], int], how: int) -> int | None:
    """Return None if another daemon has locked the file."""
    while True:
        with control.file_errors(path):
            fd = opened()
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                return fd
        os.close(fd)  # the previous owner removed the file between open and lock


def lock_source(source: str) -> list[int]:
    """Lock SOURCE against other daemons that steer in place. MountProblem: another daemon has it locked.

    Two such daemons would mistake each other's reads for a client's, in an endless loop. The lock is exclusive for SOURCE
    and shared for the directories above it.
    """
    locks: list[int] = []
    end = time.monotonic() + SOURCE_ENDING_S
    for directory in (Path(source), *Path(source).parents):
        while (fd := _lock_directory(directory, fcntl.LOCK_SH if locks else fcntl.LOCK_EX)) is None:
            if time.monotonic() > end:
                unlock_source(locks)
                raise _overlap(source)
            time.sleep(RETRY_S)
        locks.append(fd)
    return locks


def unlock_source(locks: list[int]) -> None:
    """Release the locks, and remove the files that no other daemon has locked."""
    for fd in locks:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(os.readlink(f"/proc/self/fd/{fd}"))
        os.close(fd)
    locks.clear()


def _lock_directory(directory: Path, how: int) -> int | None:
    status = directory.stat()
    path = os.path.join(control.directory(os.geteuid()), f"source-{status.st_dev:x}-{status.st_ino:x}.lock")
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return _lock(path, lambda: os.open(path, flags, 0o600), how)


def _overlap(source: str) -> MountProblem:
    others = [
        point
        for point, facts in control.root_points().items()
        if "inplace" in facts and (is_below(other := str(facts.get("source")), source) or is_below(source, other))
    ]
    by = f" by the mount on {others[0]}" if others else ""
    hint = "one mount in place serves all programs that read these files, whatever path they use"
    if others:
        hint += f"; to end it: llmcache umount {others[0]}"
    return MountProblem(f"files of {source} are already steered in place{by}", hint)


class ClientGone(Exception):
    """The client has disconnected (Ctrl-C); raised when an operation sends progress."""


class ControlServer:
    """Serves each request in a thread of its own until closed.

    `answer(request, on_progress)` returns the reply, or raises the error to send.
    """

    def __init__(self, found: ControlFiles, answer: Callable[[dict[str, Any], Tell], dict[str, Any]]) -> None:
        self._answer = answer
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        old = os.umask(0o177)
        try:
            with control.file_errors(found.socket):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(found.socket)
                listening.bind(found.socket)
        finally:
            os.umask(old)
        listening.listen(16)
        self._server = ConnectionServer(listening, "control", _MOST_CONNECTIONS)
        self._server.start(self._serve)

    def _serve(self, connection: socket.socket) -> None:
        def on_progress(progress: dict[str, Any]) -> None:
            try:
                connection.sendall(json.dumps({"progress": progress}).encode() + b"\n")
            except OSError as error:
                raise ClientGone from error

        if control.peer(connection) not in (0, os.geteuid()):
            return
        line = receive(connection, b"\n", _LONGEST_REQUEST, time.monotonic() + REQUEST_S)
        connection.settimeout(_REPLY_S)
        if line:
            with contextlib.suppress(ClientGone):
                connection.sendall(json.dumps(self._reply(line, on_progress)).encode() + b"\n")

    def _reply(self, line: bytes, on_progress: Tell) -> dict[str, Any]:
        try:
            return self._answer(_request(line), on_progress)
        except ClientGone:
            raise
        except LlmcacheError as error:
            return {"error": error.message, "hint": error.hint, "exit_code": error.exit_code}
        except Exception as error:  # reported to the client and logged
            log.exception("control request failed")
            return {"error": f"{type(error).__name__}: {error}", "hint": None}

    def close(self) -> None:
        self._server.close()


def _request(line: bytes) -> dict[str, Any]:
    hint = 'a request is one line of JSON: {"op": "stats"}'
    if len(line) > _LONGEST_REQUEST:
        raise UsageError(f"request: longer than {_LONGEST_REQUEST} bytes", hint)
    if not line.endswith(b"\n"):
        raise UsageError("request: the line does not end", hint)
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise UsageError("request: not JSON", hint) from None
    if not isinstance(found, dict):
        raise UsageError("request: not a JSON object", hint)
    return found


SHRINK_S = 30.0
UNLOCK_S = 10.0
DROP_BYTES = 256 << 20  # at a time
RESIZE_SCHEMA = "llmcache.resize/1"
EVICT_SCHEMA = "llmcache.evict/1"
_MOST_BYTES = 1 << 63
_LONGEST_GLOB = 4096  # no path is longer


class Requests:
    """The operations on one mount's cache."""

    def __init__(self, engine: Engine, warmer: Warmup, metrics: str | None = None) -> None:
        """`metrics`: ADDRESS:PORT of the metrics endpoint."""
        self.engine = engine
        self.warmer = warmer
        self._known: dict[str, Callable[[dict[str, Any], Tell], dict[str, Any]]] = {
            "stats": lambda _request, _on_progress: to_json(replace(engine.stats(), metrics=metrics)),
            "heat": lambda _request, _on_progress: to_json(heat_map(engine.state, engine.mode, engine.tree.names.shown)),
            "resize": self._resize,
            "warmup": self._warm,
            "evict": self._evict,
        }

    def answer(self, request: dict[str, Any], on_progress: Tell) -> dict[str, Any]:
        """Raise UsageError for an unknown operation, or a missing or invalid field."""
        name = request.get("op")
        if not isinstance(name, str) or name not in self._known:
            raise UsageError(
                f"op: unknown operation {reprlib.repr(name)}", f"use one of: {', '.join([*self._known, 'stop'])}"
            )
        return self._known[name](request, on_progress)

    def _resize(self, request: dict[str, Any], on_progress: Tell) -> dict[str, Any]:
        """{"cache_bytes": N}; with "wait", return when the cache has shrunk, or after SHRINK_S."""
        state, memory = self.engine.state, self.engine.state.memory
        before = memory.budget_bytes
        size = request.get("cache_bytes")
        if type(size) is not int or not 0 <= size < _MOST_BYTES:
            raise UsageError(f"cache_bytes: {reprlib.repr(size)} is not a number of bytes")
        wait = switch(request, "wait")
        settle_mode(self.engine.mode, size)  # the user may not be allowed to lock that much memory in mode steer
        self.engine.resize(size)
        start, end = memory.used_bytes, time.monotonic() + SHRINK_S
        while wait and state.running and memory.used_bytes > memory.room_bytes and time.monotonic() < end:
            on_progress({"done_bytes": start - memory.used_bytes, "total_bytes": start - memory.room_bytes})
            time.sleep(TELL_S / 4)
        used = memory.used_bytes
        return {"schema": RESIZE_SCHEMA, "before_bytes": before, "budget_bytes": size, "resident_bytes": used}

    def _warm(self, request: dict[str, Any], on_progress: Tell) -> dict[str, Any]:
        """{"globs": […], "check": true to report only}."""
        return self.warmer.warm(_globs(request), on_progress, fetch=not switch(request, "check"))

    def _evict(self, request: dict[str, Any], on_progress: Tell) -> dict[str, Any]:
        """{"globs": […]}: evict matching files (without globs, all), except those of --pin."""
        globs, state, names = _globs(request), self.engine.state, self.engine.tree.names
        names.refresh(NAMES_S, at_once=True)
        files: list[tuple[int, int]] = []  # node and size
        rows = []
        with state.lock:
            # Shards of one model are evicted together.
            chosen = [
                space
                for space in state.spaces.values()
                if not globs or any(self.engine.tree.matches(member.path, globs) for member in space.members)
            ]
            pinned = [member.path for space in chosen if space.user_pinned for member in space.members]
            for space in (space for space in chosen if not space.user_pinned):
                size = sum(space.accounted_bytes) + (space.pinned_bytes if self.engine.mode == "arena" else 0)
                paths = [member.path for member in space.members]
                rows += [{"paths": paths, "names": [*map(names.shown, paths)], "evicted_bytes": size}]
                files += self.engine.forget(space)
        if globs and not chosen:
            self.warmer.named(globs, on_progress)  # raises UsageError unless the globs match files (that are not cached)
        self.engine.pins.settle(UNLOCK_S)
        self._drop(files, on_progress)
        evicted = sum(int(str(row["evicted_bytes"])) for row in rows)
        return {
            "schema": EVICT_SCHEMA,
            "evicted_bytes": evicted,
            "groups": rows,
            "pinned": pinned,
            "pinned_names": [*map(names.shown, pinned)],
        }

    def _drop(self, files: list[tuple[int, int]], on_progress: Tell) -> None:
        """May wait for pages being read, because this thread has no pending READ."""
        done, total = 0, sum(size for _, size in files)
        for node, size in files:
            for offset in range(0, max(size, 1), DROP_BYTES):
                last = offset + DROP_BYTES >= size
                on_progress({"done_bytes": done, "total_bytes": total})
                self.engine.backend.drop(node, [(offset, 0 if last else DROP_BYTES)], written=True)
                done += min(DROP_BYTES, size - offset)


def _globs(request: dict[str, Any]) -> list[str]:
    found = request.get("globs", [])
    with contextlib.suppress(TypeError, UnicodeEncodeError):  # a glob must be encodable as a file name
        if isinstance(found, list) and all(len(os.fsencode(glob)) > 0 and len(glob) <= _LONGEST_GLOB for glob in found):
            return found
    raise UsageError(f"globs: {reprlib.repr(found)} is not a list of globs")


def switch(request: dict[str, Any], name: str) -> bool:
    """Return the boolean field `name`, by default False. UsageError: it is not a boolean."""
    found = request.get(name, False)
    if not isinstance(found, bool):
        raise UsageError(f"{name}: {reprlib.repr(found)} is neither true nor false")
    return found
