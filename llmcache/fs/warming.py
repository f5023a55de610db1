"""Brings files in before anybody reads them: what the plan wants kept of them, and their hot pages.

`Warmer.warm` opens the files as a reader would (so that they are grouped, attached to the pin helper and planned), has
`Bringer` fetch what is wanted and absent, and closes them. It fetches nothing that would only stream through.
"""

from __future__ import annotations

import contextlib
import os
import resource
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

from llmcache.cache.arbitration import HOT_SHARE
from llmcache.errors import EnvironmentProblem, UsageError
from llmcache.fs.bringing import TELL_S, Bringer, Piece, Tell, ended, has
from llmcache.fs.caller import Caller
from llmcache.fs.group import SINGLE, Group, Member
from llmcache.fs.policy import matches

if TYPE_CHECKING:
    from llmcache.fs.engine import Engine
    from llmcache.fs.source import SourceTree

SCHEMA = "llmcache.warmup/1"
ATTACH_S = 10.0
DESCRIPTORS = 2  # of an open file: with and without O_DIRECT
_LONGEST_SHOWN = 500
_ROUNDS = 8  # of bringing in what a changed plan wants: others may change it for ever


class Opener(Protocol):
    """What opens files as a reader of the mount would."""

    def open(self, path: str, flags: int, caller: Caller) -> tuple[int, bool]:
        """(handle, …) of a regular file. OSError."""

    def release(self, number: int) -> None:
        """Ends an open."""


class Warmer:
    """Warm-ups of one mount; several may be asked for at a time, and bring in one after the other."""

    def __init__(self, engine: Engine, operations: Opener, tree: SourceTree) -> None:
        self.engine = engine
        self.state = engine.state
        self.operations = operations
        self.tree = tree
        self._turn = threading.Lock()

    def warm(self, globs: list[str], tell: Tell, *, fetch: bool = True) -> dict[str, Any]:
        """Warms the files that match `globs` (none: all models and small files); returns what is kept of them now.

        `tell` is given progress several times a second, and ends the warm-up by raising. Not `fetch`: only looks.
        UsageError: no file matches; MountProblem: the mount ended meanwhile.
        """
        began = time.monotonic()
        paths = self.named(globs, tell)
        _refuse_too_many(paths)
        before = self.state.counters.backing_read_bytes
        with ExitStack() as stack:
            unreadable = [path for path in _while_telling(paths, tell) if not self._open(path, stack)]
            groups = self._groups(set(paths))
            self._open_shards(groups, stack)
            self._ready(groups, suppose=bool(globs))
            if fetch:
                self._bring(groups, tell)
            rows = self._rows(groups, warm=fetch)
        read = self.state.counters.backing_read_bytes - before if fetch else 0
        return {
            "schema": SCHEMA,
            "mode": self.engine.mode,
            "wanted_bytes": sum(row["wanted_bytes"] for row in rows),
            "warm_bytes": sum(row["warm_bytes"] for row in rows),
            "read_bytes": read,
            "seconds": time.monotonic() - began,
            "files": rows,
            "unreadable": unreadable,
        }

    def _bring(self, groups: list[Group], tell: Tell) -> None:
        """Brings in what is absent when its turn has come: two warm-ups at once would read the same twice.

        What comes in changes the plan (hot pages take room from loops), and so do others meanwhile: it goes on until
        nothing that is wanted is absent, or no more comes.
        """
        while not self._turn.acquire(timeout=TELL_S):
            tell({})
            if not self.state.running:
                raise ended()
        try:
            for _ in range(_ROUNDS):
                bringer = Bringer(self.state, self.engine.fetcher, self.engine.holder, self._pieces(groups))
                bringer.run(tell)
                if not bringer.done_bytes:
                    return
        finally:
            self._turn.release()

    # Which files

    def named(self, globs: list[str], tell: Tell) -> list[str]:
        """Paths of the regular files that match `globs`, all without globs. UsageError: there are globs and no file."""
        paths = [path for path in _while_telling(self._paths(), tell) if not globs or matches(path, globs)]
        if globs and not paths:
            shown, hint = " ".join(globs)[:_LONGEST_SHOWN], "write globs in quotes: '*.gguf', 'directory/*'"
            raise UsageError(f"GLOB: no file of the mount matches {shown}", hint)
        return paths

    def _paths(self) -> Iterator[str]:
        """Paths of all regular files, in the order of their names."""
        for directory, names, files, fd in os.fwalk(".", dir_fd=self.tree.fd, follow_symlinks=False):
            names.sort()
            for name in sorted(files):
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    if stat.S_ISREG(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                        yield os.path.normpath(f"/{directory}/{name}")

    def _open(self, path: str, stack: ExitStack) -> bool:
        """Opens as a reader does, until `stack` ends; False where SOURCE refuses."""
        try:
            number, _ = self.operations.open(path, os.O_RDONLY, Caller(os.geteuid(), os.getegid(), os.getpid()))
        except OSError:
            return False
        stack.callback(self.operations.release, number)
        return True

    def _open_shards(self, groups: list[Group], stack: ExitStack) -> None:
        """Shards of one model are kept together, whichever of them was named."""
        with self.state.lock:
            closed = [member.path for group in groups for member in group.members if member.backing is None]
        for path in closed:
            self._open(path, stack)

    def _groups(self, paths: set[str]) -> list[Group]:
        with self.state.lock:
            groups = list(self.state.groups.values())
        return [group for group in groups if not group.written and any(m.path in paths for m in group.members)]

    def _ready(self, groups: list[Group], suppose: bool) -> None:
        """Waits until the kernel's nodes are known and old pages are dropped."""
        state, end = self.state, time.monotonic() + ATTACH_S
        with state.lock:
            while any(_waits(member) for group in groups for member in group.members):
                if not state.running:
                    raise ended()
                if time.monotonic() > end:
                    break
                state.work.wait(0.05)
            for group in groups:
                if suppose and group.alive and group.status.count(SINGLE) == 0:
                    self.engine.grouping.suppose(group)

    # What is to be kept of them

    def _pieces(self, groups: list[Group]) -> list[Piece]:
        """What should be there, in the order in which it will be read: hot pages as far as their share goes, then loops."""
        with self.state.lock:
            return self._planned(groups)

    def _planned(self, groups: list[Group]) -> list[Piece]:
        """The same, by a plan of this moment. Lock held."""
        self.state.references.planned()
        self.engine.planner.plan()
        found: list[Piece] = []
        share = self.state.limit_bytes // HOT_SHARE
        for group in groups:
            for extent in sorted(group.hot):
                member = group.member_of(extent)
                share -= group.length_of(member, extent)
                if share >= 0 and group.length_of(member, extent) > 0:
                    found.append((group, member, extent))
        for group in groups:
            wanted = (extent for extent in group.order.extent_at if self._wants(group, extent))
            found += [(group, group.member_of(extent), extent) for extent in wanted]
        return found

    def _wants(self, group: Group, extent: int) -> bool:
        core = self.state.references.core
        if group.state(extent) == SINGLE or not group.alive:
            return False
        return bool(group.wanted[extent]) if core is None else core.wants(group.key, extent)

    def _rows(self, groups: list[Group], warm: bool) -> list[dict[str, Any]]:
        """What is wanted and kept of each file, at one moment; and (`warm`) keeps it until it has been used."""
        sums = {(group.key, member.path): [0, 0] for group in groups for member in group.members if member.backing}
        with self.state.lock:
            for group in groups:
                group.warm = group.warm or (warm and group.alive)
            for piece in self._planned(groups):
                group, member, extent = piece
                both = sums.get((group.key, member.path))
                if both is not None:
                    length = group.length_of(member, extent)
                    both[0] += length
                    both[1] += length if has(self.state, piece) else 0
            return [
                {
                    "path": member.path,
                    "size_bytes": member.size_bytes,
                    "wanted_bytes": sums[group.key, member.path][0],
                    "warm_bytes": sums[group.key, member.path][1],
                    "pinned": group.first,
                }
                for group in groups
                for member in group.members
                if (group.key, member.path) in sums
            ]


def _while_telling(paths: Iterable[str], tell: Tell) -> Iterator[str]:
    """Passes `paths` on; now and then tells the client, whose patience ends, that something goes on."""
    told = time.monotonic()
    for path in paths:
        if time.monotonic() - told > TELL_S:
            told = time.monotonic()
            tell({})
        yield path


def _refuse_too_many(paths: list[str]) -> None:
    """EnvironmentProblem if opening all of `paths` could leave no descriptors for those who read meanwhile."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // (2 * DESCRIPTORS)
    if len(paths) > most:
        hint = "name those that matter with globs; a daemon that may open more files (ulimit -n) takes more"
        raise EnvironmentProblem(f"GLOB: {len(paths)} files are more than can be warmed at once, {most}", hint)


def _waits(member: Member) -> bool:
    """True for an open file that the pin helper, or the dropping of old pages, is still busy with. Lock held."""
    return member.backing is not None and (member.attaching or member.backing.unsettled)
