"""Assigns open files to spaces, by the kind of file, and chooses the extent size.

A header is only the first guess of which parts are hot, rows or loop. A file that is not a model counts as looping once a
second pass has been seen.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from llmcache.cache.space import EXTENTS_MAX, LARGEST_EXTENT, LEAST_LOOP_BYTES, SMALL_EXTENT, extent_bytes_for
from llmcache.errors import DataError
from llmcache.model import read_layout
from llmcache.model.tensors import MOST_SLICES, Experts, LayerMap, ModelLayout, Region, first_guess
from llmcache.mount.source.backing import Backing, Identity
from llmcache.mount.source.tree import SourceTree
from llmcache.mount.state.buffers import MemoryRegion
from llmcache.mount.state.interfaces import Backend
from llmcache.mount.state.space import WRITTEN_EXTENTS_MAX, LoopSpace, SpaceFile
from llmcache.mount.state.state import CacheState, ranges
from llmcache.units import BLOCK_BYTES

log = logging.getLogger(__name__)

HEADER_READ_BYTES = 256 << 10
EXTENTS_ROOM = 1 << 19  # extents of all known spaces: about 40 bytes of memory each, 60 in arena
PAGED_EXTENTS = 256  # extents of a space that does not find room for its full number
UNUSABLE_MAX = 4096


class Header(NamedTuple):
    """Parsed header of a model file. `experts`: to be cached whole. `repacked_bytes`: copied by llama.cpp into its own
    memory.
    """

    size_bytes: int
    regions: tuple[Region, ...]
    anatomy: LayerMap
    experts: Experts | None
    repacked_bytes: int


class Grouping:
    """Makes, finds and ends spaces."""

    def __init__(
        self,
        state: CacheState,
        tree: SourceTree,
        backend: Backend,
        end: Callable[[LoopSpace], None],
        pinned: tuple[str, ...] = (),
    ) -> None:
        """`end(space)` ends a space whose file has changed, with the lock held. `pinned`: globs of --pin."""
        self.pinned = pinned
        self.backend = backend
        self.state = state
        self.end = end
        self.tree = tree
        self._keys = map(str, itertools.count())
        # Headers are parsed one at a time, because each may use the resources that the limits in `layout` allow, and
        # unusable ones only once. This lock is taken before the engine's, and guards `_unusable`.
        self._parsing = threading.Lock()
        self._unusable: OrderedDict[Identity, None] = OrderedDict()

    def adopt(self, backing: Backing) -> tuple[LoopSpace, SpaceFile]:
        """Return or make the space of an open file. Takes the lock; may read the header."""
        large = backing.size > LEAST_LOOP_BYTES
        if not backing.writable and (large or self.pinned):
            self.tree.names.refresh()
            self._end_renamed(backing)
        known = self._adopted_before(backing)
        if known is not None:
            return known
        if backing.writable or not large:
            return self._adopted(backing, None)
        with self._parsing:
            return self._adopted_before(backing) or self._adopted(backing, self._header_of(backing))

    def _end_renamed(self, backing: Backing) -> None:
        """End the space of a renamed file that is pinned now, or is now a shard of another model.

        A program that downloads a model reads it for its checksum before it renames it.
        """
        version = self.tree.names.version
        with self.state.lock:
            places = self.state.places.get(backing.path, ())
            spaces = [space for space, _ in places if space.names_version != version and not space.written]
        for space in spaces:
            is_model = any(member.anatomy is not None for member in space.members)
            files = self._files(backing, is_model)
            is_pinned = not space.paged and self._is_pinned(files)
            with self.state.lock:
                has_moved = [name for name, _ in files] != [member.path for member in space.members]
                is_used = any(member.backing for member in space.members)
                if not has_moved or not is_used:
                    space.names_version = version
                if space.alive and (is_pinned != space.user_pinned or (has_moved and not is_used)):
                    self.end(space)

    def _is_pinned(self, files: list[tuple[str, int]]) -> bool:
        return any(self.tree.matches(name, self.pinned) for name, _ in files)

    def _adopted_before(self, backing: Backing) -> tuple[LoopSpace, SpaceFile] | None:
        with self.state.lock:
            known = self._known(backing)
            return self._joined(*known, backing, None) if known is not None and known[1].identity is not None else None

    def _adopted(self, backing: Backing, header: Header | None) -> tuple[LoopSpace, SpaceFile]:
        files = self._files(backing, header is not None)
        with self.state.lock:
            known = self._known(backing)  # it was closed before, is a shard, or was opened by another thread in between
            space, member = self._joined(*(known or self._begin(backing, files, header)), backing, header)
            if header is not None:
                member.anatomy, member.repacked_bytes = member.anatomy or header.anatomy, header.repacked_bytes
            return space, member

    def _begin(self, backing: Backing, files: list[tuple[str, int]], header: Header | None) -> tuple[LoopSpace, SpaceFile]:
        space = self._make(files, backing.writable, header)
        self.state.add(space)
        if not (space.written or space.paged) and self._is_pinned(files):
            self.state.steering.first(space.key)
        return space, next(member for member in space.members if member.path == backing.path)

    def _known(self, backing: Backing) -> tuple[LoopSpace, SpaceFile] | None:
        owner = self.state.owners.get(backing)
        if owner is not None:
            return owner
        for space, member in list(self.state.places.get(backing.path, ())):
            same = member.size_bytes == backing.size and member.identity in (None, backing.identity)
            if same and not (space.written or backing.writable or member.backing):
                return space, member
            if not member.backing:
                self.end(space)  # another file had this path
        return None

    def _joined(
        self, space: LoopSpace, member: SpaceFile, backing: Backing, header: Header | None
    ) -> tuple[LoopSpace, SpaceFile]:
        if backing in self.state.owners:
            return space, member
        if member.identity is None and header is not None and not space.paged:
            self._guess(space, member, header)
        elif space.user_pinned:
            self.suppose(space)
        member.backing, member.identity = backing, backing.identity
        self.state.references.joined(space, member, backing)
        self.state.owners[backing] = (space, member)
        return space, member

    def _files(self, backing: Backing, is_model: bool) -> list[tuple[str, int]]:
        for paths in self.tree.names.shards(backing.path) if is_model else ():
            if backing.path in paths and len(set(paths)) == len(paths) and (files := self._stat_shards(paths)):
                return files
        return [(backing.path, backing.size)]

    def _make(self, files: list[tuple[str, int]], written: bool, header: Header | None) -> LoopSpace:
        total = sum(length for _, length in files)
        # Few dense tensors lie between the experts of two layers: large extents would mostly contain experts.
        mixed = header is not None and header.experts is not None
        large = SMALL_EXTENT if mixed else self.backend.large_extent
        extent_bytes = extent_bytes_for(total, WRITTEN_EXTENTS_MAX if written else EXTENTS_MAX, large)
        full_count = sum(max(1, -(-length // extent_bytes)) for _, length in files)
        has_room = self._make_room(full_count)
        paged = not written and (extent_bytes > LARGEST_EXTENT or not has_room)
        if not has_room:
            extent_bytes = extent_bytes_for(total, PAGED_EXTENTS, self.backend.large_extent)
        members, base = [], 0
        for name, length in files:
            count = max(1, -(-length // extent_bytes))
            members.append(SpaceFile(name, length, base, count))
            base += count
        kind = "written" if written else "paged" if paged else "loop"
        if kind == "loop" and header is None and total <= LEAST_LOOP_BYTES and not self._is_pinned(files):
            kind = "hot"
        is_arena = self.state.references.core is not None
        space = LoopSpace(next(self._keys), members, extent_bytes, kind, self.state.index, is_arena=is_arena)
        space.names_version = self.tree.names.version
        if paged and extent_bytes_for(total, EXTENTS_MAX, large) <= LARGEST_EXTENT:
            space.lacks_extents = full_count
            self.state.index.lacking[space] = None
            log.warning(
                "a file is not steered for now: no room for its %d extents next to those of files in use", full_count
            )
        return space

    def _make_room(self, count: int) -> bool:
        """Forget the least recently used spaces until `count` more extents fit. The caller holds the lock."""
        free = EXTENTS_ROOM - self.state.extents
        if count <= free:
            return True
        for space in sorted(self._unused(), key=lambda space: space.last_ns):
            if count <= free:
                break
            free += space.count
            self.end(space)
        return count <= free

    def _unused(self) -> list[LoopSpace]:
        used = {owner[0].key for backing, owner in self.state.owners.items() if self.state.opens.get(backing)}
        return [space for space in self.state.spaces.values() if not (space.user_pinned or space.warm or space.key in used)]

    def find_room(self) -> None:
        """End spaces that found no room before, so that the next read makes new ones. The caller holds the lock."""
        lacking = [space for space in self.state.index.lacking if space.lacks_extents]
        if not lacking:
            return
        unused = set(self._unused())
        free = EXTENTS_ROOM - self.state.extents + sum(space.count for space in unused)
        for space in lacking:
            if space not in unused and space.lacks_extents <= free + space.count:
                free -= space.lacks_extents - space.count
                self.end(space)

    def _header_of(self, backing: Backing) -> Header | None:
        key = backing.identity
        if key in self._unusable:
            self._unusable.move_to_end(key)
            return None
        try:
            layout = _layout_of(backing)
        except OSError as error:
            log.warning("inode %d is cached without a layout: cannot read its header: %s", backing.ino, error.strerror)
            return None
        experts = None if layout is None else Experts(layout)
        if experts is not None and experts.too_many:  # otherwise it would loop, and be read whole in every pass
            log.warning("inode %d is cached without a layout: it has more than %d expert slices", backing.ino, MOST_SLICES)
        elif layout is not None and experts is not None:
            mixed = experts if experts.count else None
            return Header(layout.header_bytes, layout.regions(), LayerMap(layout), mixed, layout.repacked_bytes)
        if key.settled():
            self._unusable[key] = None
            if len(self._unusable) > UNUSABLE_MAX:
                self._unusable.popitem(last=False)
        return None

    def _stat_shards(self, paths: Iterable[str]) -> list[tuple[str, int]]:
        """Return nothing if a shard is missing, so that each shard is a space of its own."""
        files = []
        for path in paths:
            try:
                status = self.tree.stat(path)
            except OSError:
                return []
            if not stat.S_ISREG(status.st_mode):
                return []
            files.append((path, status.st_size))
        return files

    def suppose(self, space: LoopSpace) -> None:
        if not space.looping:
            self.state.steering.guess(space.key, [], [], [(0, space.count)])

    def _guess(self, space: LoopSpace, member: SpaceFile, header: Header) -> None:
        guess = first_guess(header.regions, header.size_bytes, space.extent_bytes, member.count, header.experts is not None)
        single, hot, order = ([member.base + extent for extent in part] for part in guess)
        if space.user_pinned:
            single, hot = [], []
        self.state.steering.guess(space.key, ranges(single), ranges(hot), ranges(order))
        self.state.memory.count_hot(space)
        for region in sorted(header.regions, key=lambda region: region.first_byte):
            if region.size_bytes:
                member.tensors.extend((region.first_byte, region.end))
        if header.experts is not None and not space.user_pinned:
            self.state.expert_cache.begin(space, member, header.experts)

    def dissolve(self, space: LoopSpace) -> None:
        """The caller holds the engine's lock."""
        memory = self.state.memory
        self.state.remove(space)
        experts = self.state.expert_cache.end(space)
        if self.backend.in_place:  # the pages are valid, and stay until they are reclaimed
            memory.invalidated(experts)
        else:
            memory.pending += experts
        space.alive = False
        for member in space.members:
            if member.backing is not None:
                self.state.owners.pop(member.backing, None)
                member.backing = None
        memory.end(space, invalidate=not self.backend.in_place)
        self.state.room.notify()


def _layout_of(backing: Backing) -> ModelLayout | None:
    region = MemoryRegion(HEADER_READ_BYTES + BLOCK_BYTES)

    def read(offset: int, size: int) -> bytes:
        parts = []
        while size > 0:
            first = offset // BLOCK_BYTES * BLOCK_BYTES
            skip = offset - first
            length = min(HEADER_READ_BYTES, -(-(skip + size) // BLOCK_BYTES) * BLOCK_BYTES)
            count = backing.read_into(region.address, length, first)
            part = ctypes.string_at(region.address + skip, max(0, min(count - skip, size)))
            if not part:
                break
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return b"".join(parts)

    try:
        return read_layout(read, backing.size, os.path.basename(backing.path))
    except DataError:  # its message is not logged, because it quotes the file
        log.warning("inode %d is cached without a layout: its header is damaged", backing.ino)
        return None
