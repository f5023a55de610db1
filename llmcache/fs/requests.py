"""What a daemon does when the control socket asks: the operations by name, with their arguments checked.

An operation gets `tell`, which sends the client progress, and may be called or not; it raises when the client has gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llmcache.errors import UsageError
from llmcache.fs.bringing import TELL_S, Tell
from llmcache.fs.budget import settle_mode
from llmcache.fs.policy import matches

if TYPE_CHECKING:
    from llmcache.fs.engine import Engine
    from llmcache.fs.group import Group
    from llmcache.fs.warming import Warmer

SHRINK_S = 30.0
RESIZE_SCHEMA = "llmcache.resize/1"
EVICT_SCHEMA = "llmcache.evict/1"


class Requests:
    """The operations on one mount's cache."""

    def __init__(self, engine: Engine, warmer: Warmer) -> None:
        self.engine = engine
        self.warmer = warmer
        self._known: dict[str, Callable[[dict[str, Any], Tell], dict[str, Any]]] = {
            "stats": lambda _request, _tell: engine.stats(),
            "resize": self._resize,
            "warmup": self._warm,
            "evict": self._evict,
        }

    def answer(self, request: dict[str, Any], tell: Tell) -> dict[str, Any]:
        """The reply to `request`. UsageError: an unknown operation, or a field that is missing or wrong."""
        operation = self._known.get(str(request.get("op")))
        if operation is None:
            raise UsageError(f"unknown request {request.get('op')!r}", f"known: {', '.join([*self._known, 'stop'])}")
        return operation(request, tell)

    def _resize(self, request: dict[str, Any], tell: Tell) -> dict[str, Any]:
        """{"cache_bytes": N}; with "wait", the reply comes when the cache has shrunk to that (or cannot for a while)."""
        state, before = self.engine.state, self.engine.budget_bytes
        size = request.get("cache_bytes")
        if not isinstance(size, int) or isinstance(size, bool):
            raise UsageError(f"cache_bytes: {size!r} is not a number of bytes")
        settle_mode(self.engine.mode, size)  # steer may not be allowed to lock so much
        self.engine.resize(size)
        start, end = state.used_bytes, time.monotonic() + SHRINK_S
        while request.get("wait") and state.running and state.used_bytes > state.limit_bytes and time.monotonic() < end:
            tell({"done_bytes": start - state.used_bytes, "total_bytes": start - state.limit_bytes})
            time.sleep(TELL_S / 4)
        used = state.used_bytes
        return {"schema": RESIZE_SCHEMA, "before_bytes": before, "budget_bytes": size, "resident_bytes": used}

    def _warm(self, request: dict[str, Any], tell: Tell) -> dict[str, Any]:
        """{"globs": […], "check": whether to look only}."""
        return self.warmer.warm(_globs(request), tell, fetch=not request.get("check"))

    def _evict(self, request: dict[str, Any], tell: Tell) -> dict[str, Any]:
        """{"globs": […]}: gives up what is kept of the files that match, all without globs, but for what --pin names."""
        globs, state = _globs(request), self.engine.state
        nodes: list[int] = []
        rows = []
        with state.lock:
            chosen = [group for group in state.groups.values() if not globs or _concerns(group, globs)]
            pinned = [member.path for group in chosen if group.first for member in group.members]
            for group in (group for group in chosen if not group.first):
                size = sum(group.charge) + (group.pinned_bytes if self.engine.mode == "arena" else 0)
                rows += [{"paths": [member.path for member in group.members], "evicted_bytes": size}]
                nodes += self.engine.forget(group)
        for number, node in enumerate(nodes):
            tell({"done_files": number, "total_files": len(nodes)})
            if state.notifier is not None:
                state.notifier.invalidate(node, 0, 0)  # waits for pages that are being read; this thread owes no reply
        evicted = sum(int(str(row["evicted_bytes"])) for row in rows)
        return {"schema": EVICT_SCHEMA, "evicted_bytes": evicted, "groups": rows, "pinned": pinned}


def _concerns(group: Group, globs: list[str]) -> bool:
    """True if a file of the group matches: shards of one model are kept, and given up, together."""
    return any(matches(member.path, globs) for member in group.members)


def _globs(request: dict[str, Any]) -> list[str]:
    found = request.get("globs", [])
    if not isinstance(found, list) or not all(isinstance(glob, str) and glob for glob in found):
        raise UsageError(f"globs: {found!r} is not a list of globs")
    return found
