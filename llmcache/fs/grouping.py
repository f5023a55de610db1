"""From open files to groups: what a file is (model, shard, small file, file being written) and how it is cut up.

A header is only the first guess: it says which parts are hot, rows or loop. The order starts as file order and is
learned; a file that is no model loops once a second pass has been seen.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from llmcache.cache.extents import LARGE_FILE_BYTES, LEAST_MODEL_BYTES, extent_bytes_for
from llmcache.errors import DataError
from llmcache.fs.buffers import Region
from llmcache.fs.group import PAGE, SINGLE, Group, Member
from llmcache.fs.layout import ModelLayout, read_layout, shard_name
from llmcache.fs.layout.anatomy import Anatomy
from llmcache.fs.policy import matches

if TYPE_CHECKING:
    from llmcache.fs.backing import Backing
    from llmcache.fs.source import SourceTree
    from llmcache.fs.state import CacheState

log = logging.getLogger(__name__)

HEADER_READ_BYTES = 256 << 10


class Grouping:
    """Makes, finds and ends groups."""

    def __init__(
        self, state: CacheState, tree: SourceTree, end: Callable[[Group], None], pinned: tuple[str, ...] = ()
    ) -> None:
        """`end(group)`, with the lock held, ends a group whose file is no more what it was. `pinned`: globs of --pin."""
        self.pinned = pinned
        self.state = state
        self.end = end
        self.tree = tree
        self._keys = map(str, itertools.count())

    def adopt(self, backing: Backing) -> tuple[Group, Member]:
        """Returns the group and member of an open file, made if need be. Takes the lock itself; reads the header."""
        path, size = backing.path, backing.size
        with self.state.lock:
            owner = self.state.owners.get(backing)
        if owner is not None:
            return owner
        written = backing.writable
        layout = None if written or size <= LEAST_MODEL_BYTES else _layout_of(backing)
        anatomy = None if layout is None else Anatomy(layout)
        group = self._make(path, size, backing, written, layout)
        with self.state.lock:
            known = self._known(backing, layout)  # closed before, a shard, or another open was faster
            group, member = known or self._begin(group, backing, layout)
            member.anatomy = member.anatomy or anatomy
            return group, member

    def _begin(self, group: Group, backing: Backing, layout: ModelLayout | None) -> tuple[Group, Member]:
        self.state.groups[group.key] = group
        self.state.references.began(group, "written" if group.written else "hot" if group.hot else "loop")
        if group.first:
            self.state.references.first(group)
        member = next(member for member in group.members if member.path == backing.path)
        self._join(group, member, backing, layout)
        return group, member

    def _known(self, backing: Backing, layout: ModelLayout | None) -> tuple[Group, Member] | None:
        owner = self.state.owners.get(backing)
        if owner is not None:
            return owner
        for group in list(self.state.groups.values()):
            member = next((member for member in group.members if member.path == backing.path), None)
            if member is None:
                continue
            same = member.size_bytes == backing.size and member.identity in (None, backing.identity)
            if same and not (group.written or backing.writable or member.backing):
                self._join(group, member, backing, layout)
                return group, member
            if not member.backing:
                self.end(group)  # what was at this path before
        return None

    def _join(self, group: Group, member: Member, backing: Backing, layout: ModelLayout | None) -> None:
        if member.identity is None and layout is not None:
            self._guess(group, member, layout)
        elif group.first:
            self.suppose(group)
        member.backing, member.identity = backing, backing.identity
        self.state.references.joined(group, member, backing)
        self.state.owners[backing] = (group, member)

    def _make(self, path: str, size: int, backing: Backing, written: bool, layout: ModelLayout | None) -> Group:
        files = [(path, size)]
        if layout is not None and (shard := shard_name(path)) is not None:
            files = self._siblings(path, shard.number, shard.count) or files
        total = sum(length for _, length in files)
        extent_bytes = extent_bytes_for(total)
        members, base = [], 0
        for name, length in files:
            count = max(1, -(-length // extent_bytes))
            members.append(Member(name, length, base, count))
            base += count
        group = Group(next(self._keys), members, extent_bytes, None)
        group.written = written
        group.first = not written and any(matches(name, self.pinned) for name, _ in files)
        if written or (layout is None and total < LARGE_FILE_BYTES and not group.first):
            group.status = bytearray([SINGLE]) * group.count
            if not written:
                group.hot = set(range(group.count))
        return group

    def _siblings(self, path: str, number: int, count: int) -> list[tuple[str, int]]:
        """Returns (path, size) of all shards, or nothing when one is missing: then each shard is on its own."""
        mine = f"{number + 1:05d}-of-"
        at = path.rindex(mine)
        files = []
        for index in range(count):
            name = f"{path[:at]}{index + 1:05d}{path[at + 5 :]}"
            try:
                files.append((name, self.tree.stat(name).st_size))
            except OSError:
                return []
        return files

    def suppose(self, group: Group) -> None:
        """Takes a file that no header tells about for a loop from front to back: the user says that it will be read."""
        if not group.looping:
            order = list(range(group.count))
            group.believe(order)
            self.state.references.guessed(group, [], [], order)

    def _guess(self, group: Group, member: Member, layout: ModelLayout) -> None:
        """Takes over what the header says: hot and row extents are single, the rest loops; all of it if it is pinned."""
        single = bytearray(member.count)
        for region in layout.regions():
            if region.role == "loop" or group.first:
                continue
            first = -(-region.first_byte // group.extent_bytes)
            for extent in range(first, region.end // group.extent_bytes):
                single[extent] = 1
        header_end = 0 if group.first else -(-layout.header_bytes // group.extent_bytes)
        singles = [member.base + index for index in range(member.count) if single[index]]
        hot = [extent for extent in singles if extent < member.base + header_end]
        for extent in singles:
            group.set_state(extent, SINGLE)
        group.hot.update(hot)
        size = group.extent_bytes
        computed = [range(part.first_byte // size, -(-part.end // size)) for part in layout.regions()]
        order = list(dict.fromkeys(member.base + index for extents in computed for index in extents))
        group.believe(order)
        self.state.references.guessed(group, singles, hot, order)

    def dissolve(self, group: Group) -> None:
        """Forgets a group and leaves what the kernel may hold of it to the evictor. Lock held."""
        self.state.groups.pop(group.key, None)
        group.alive = False
        for backing, (owner, _) in list(self.state.owners.items()):
            if owner is group:
                del self.state.owners[backing]
        for extent in group.charged_extents():
            member = group.member_of(extent)
            charged = group.charge[extent]
            if member.node is None:
                self.state.resident_bytes -= charged
                continue
            offset, length = group.offset_of(member, extent), group.length_of(member, extent)
            self.state.debts.append((member.node, offset, length, charged))
        group.charge[:] = type(group.charge)(group.charge.typecode, bytes(group.charge.itemsize * group.count))
        group.pinned_bytes = 0
        self.state.room.notify()


def _layout_of(backing: Backing) -> ModelLayout | None:
    """The layout that the file's header shows; None for no model, or for a header that cannot be used."""
    region = Region(HEADER_READ_BYTES + PAGE)

    def read(offset: int, size: int) -> bytes:
        parts = []
        while size > 0:
            first = offset // PAGE * PAGE
            skip = offset - first
            length = min(HEADER_READ_BYTES, -(-(skip + size) // PAGE) * PAGE)
            count = backing.read_into(region.address, length, first)
            part = ctypes.string_at(region.address + skip, max(0, min(count - skip, size)))
            if not part:
                break
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return b"".join(parts)

    try:
        return read_layout(read, backing.size, os.path.basename(backing.path))
    except DataError:  # its text quotes the file
        log.warning("inode %d is cached without a layout: its header is damaged", backing.ino)
    except OSError as error:
        log.warning("inode %d is cached without a layout: cannot read its header: %s", backing.ino, error.strerror)
    return None
