"""What a daemon does when the control socket asks: the operations by name, with their arguments checked.

An operation gets `tell`, which sends the client progress, and may be called or not; it raises when the client has gone.
"""

from __future__ import annotations

import os
import reprlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llmcache.errors import UsageError
from llmcache.fs.engine.budget import settle_mode
from llmcache.fs.engine.heat import heat
from llmcache.fs.engine.warmup import TELL_S, Tell
from llmcache.fs.vfs.policy import matches

if TYPE_CHECKING:
    from llmcache.fs.engine.engine import Engine
    from llmcache.fs.engine.group import Group
    from llmcache.fs.engine.warmup import Warmer

SHRINK_S = 30.0
UNLOCK_S = 10.0
DROP_BYTES = 256 << 20  # at a time
RESIZE_SCHEMA = "llmcache.resize/1"
EVICT_SCHEMA = "llmcache.evict/1"
_MOST_BYTES = 1 << 63
_LONGEST_GLOB = 4096  # no path is longer


class Requests:
    """The operations on one mount's cache."""

    def __init__(self, engine: Engine, warmer: Warmer, metrics: str | None = None) -> None:
        """`metrics`: ADDRESS:PORT of the metrics endpoint, if there is one."""
        self.engine = engine
        self.warmer = warmer
        self._known: dict[str, Callable[[dict[str, Any], Tell], dict[str, Any]]] = {
            "stats": lambda _request, _tell: engine.stats() | {"metrics": metrics},
            "heat": lambda _request, _tell: heat(engine.state, engine.mode),
            "resize": self._resize,
            "warmup": self._warm,
            "evict": self._evict,
        }

    def answer(self, request: dict[str, Any], tell: Tell) -> dict[str, Any]:
        """The reply to `request`. UsageError: an unknown operation, or a field that is missing or wrong."""
        name = request.get("op")
        if not isinstance(name, str) or name not in self._known:
            raise UsageError(f"op: unknown request {reprlib.repr(name)}", f"known: {', '.join([*self._known, 'stop'])}")
        return self._known[name](request, tell)

    def _resize(self, request: dict[str, Any], tell: Tell) -> dict[str, Any]:
        """{"cache_bytes": N}; with "wait", the reply comes when the cache has shrunk to that (or cannot for a while)."""
        state, before = self.engine.state, self.engine.budget_bytes
        size = request.get("cache_bytes")
        if type(size) is not int or not 0 <= size < _MOST_BYTES:
            raise UsageError(f"cache_bytes: {reprlib.repr(size)} is not a number of bytes")
        wait = switch(request, "wait")
        settle_mode(self.engine.mode, size)  # steer may not be allowed to lock so much
        self.engine.resize(size)
        start, end = state.used_bytes, time.monotonic() + SHRINK_S
        while wait and state.running and state.used_bytes > state.room_bytes and time.monotonic() < end:
            tell({"done_bytes": start - state.used_bytes, "total_bytes": start - state.room_bytes})
            time.sleep(TELL_S / 4)
        used = state.used_bytes
        return {"schema": RESIZE_SCHEMA, "before_bytes": before, "budget_bytes": size, "resident_bytes": used}

    def _warm(self, request: dict[str, Any], tell: Tell) -> dict[str, Any]:
        """{"globs": […], "check": whether to look only}."""
        return self.warmer.warm(_globs(request), tell, fetch=not switch(request, "check"))

    def _evict(self, request: dict[str, Any], tell: Tell) -> dict[str, Any]:
        """{"globs": […]}: gives up what is kept of the files that match, all without globs, but for what --pin names."""
        globs, state = _globs(request), self.engine.state
        files: list[tuple[int, int]] = []  # node and size
        rows = []
        with state.lock:
            chosen = [group for group in state.groups.values() if not globs or _concerns(group, globs)]
            pinned = [member.path for group in chosen if group.first for member in group.members]
            for group in (group for group in chosen if not group.first):
                size = sum(group.charge) + (group.pinned_bytes if self.engine.mode == "arena" else 0)
                rows += [{"paths": [member.path for member in group.members], "evicted_bytes": size}]
                files += self.engine.forget(group)
        if globs and not chosen:
            self.warmer.named(globs, tell)  # files of which nothing is kept, or a slip
        self.engine.pins.settle(UNLOCK_S)
        self._drop(files, tell)
        evicted = sum(int(str(row["evicted_bytes"])) for row in rows)
        return {"schema": EVICT_SCHEMA, "evicted_bytes": evicted, "groups": rows, "pinned": pinned}

    def _drop(self, files: list[tuple[int, int]], tell: Tell) -> None:
        """Drops the pages of whole files. Waits for those that are being read; this thread owes no reply to a READ."""
        done, total = 0, sum(size for _, size in files)
        for node, size in files:
            for offset in range(0, max(size, 1), DROP_BYTES):
                last = offset + DROP_BYTES >= size
                tell({"done_bytes": done, "total_bytes": total})
                self.engine.backend.drop(node, offset, 0 if last else DROP_BYTES, written=True)
                done += min(DROP_BYTES, size - offset)


def _concerns(group: Group, globs: list[str]) -> bool:
    """True if a file of the group matches: shards of one model are kept, and given up, together."""
    return any(matches(member.path, globs) for member in group.members)


def _globs(request: dict[str, Any]) -> list[str]:
    found = request.get("globs", [])
    if not isinstance(found, list) or not all(map(_is_glob, found)):
        raise UsageError(f"globs: {reprlib.repr(found)} is not a list of globs")
    return found


def _is_glob(glob: object) -> bool:
    """True for what may match the name of a file, which may be any bytes."""
    if not isinstance(glob, str) or not 0 < len(glob) <= _LONGEST_GLOB:
        return False
    try:
        return bool(os.fsencode(glob))
    except UnicodeEncodeError:
        return False


def switch(request: dict[str, Any], name: str) -> bool:
    """What the field `name` says, which may be missing: False. UsageError if it is not true or false."""
    found = request.get(name, False)
    if not isinstance(found, bool):
        raise UsageError(f"{name}: {reprlib.repr(found)} is neither true nor false")
    return found
