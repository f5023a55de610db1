"""Notices changes below SOURCE by inotify, so that the tree needs to be walked only after a change.

`is_complete` is false where inotify may miss changes (other machines, too few watches); the caller then walks at intervals.
"""

from __future__ import annotations

import os
import struct

from llmcache.mount import syscalls
from llmcache.procfs import fstype_at

WATCHES_MAX = 8192  # directories; a watch takes about 1 KB of kernel memory
LOCAL = frozenset(("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "bcachefs", "zfs", "jfs", "overlay", "vfat", "exfat"))
"""File systems whose changes all come from this machine."""
_MODIFY, _ATTRIB, _CLOSE_WRITE, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 2, 4, 8, 0x40, 0x80, 0x100, 0x200
_MASK = _MODIFY | _ATTRIB | _CLOSE_WRITE | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE
_ONLY_DIRECTORIES, _IGNORED = 0x01000000, 0x8000
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name that follows


class SourceChanges:
    """Changes below a directory. A walk calls `begin`, `visit` for each directory, and `end`."""

    def __init__(self, source_fd: int) -> None:
        self.fd: int | None = None  # readable once something has changed; None without inotify
        self.is_complete = False
        self._is_local = False
        self._device = os.fstat(source_fd).st_dev
        self._has_changed = True
        self._watches: set[int] = set()
        self._visited: set[int] = set()
        self._missed = False
        try:
            self._is_local = fstype_at(f"/proc/self/fd/{source_fd}/.") in LOCAL
            if self._is_local:
                self.fd = syscalls.inotify_init(os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # the user has too many instances, or no descriptor is free
            self._is_local = False

    def begin(self) -> None:
        self._visited, self._missed = set(), not self._is_local

    def visit(self, directory_fd: int) -> None:
        """Watch a directory, unless it is on another file system."""
        if self.fd is None or os.fstat(directory_fd).st_dev != self._device:
            return
        try:
            if len(self._visited) >= WATCHES_MAX:
                raise OSError
            watch = syscalls.inotify_add_watch(self.fd, f"/proc/self/fd/{directory_fd}/.", _MASK | _ONLY_DIRECTORIES)
        except OSError:  # the limit of the user (fs.inotify.max_user_watches)
            self._missed = True
            return
        self._visited.add(watch)
        if watch not in self._watches:  # it may have changed since the walk has listed it
            self._watches.add(watch)
            self._has_changed = True

    def end(self, is_whole: bool) -> None:
        """End a walk; stop watching directories that have left the tree."""
        if self.fd is not None and is_whole:
            for watch in self._watches - self._visited:
                syscalls.inotify_rm_watch(self.fd, watch)
            self._watches &= self._visited
        self.is_complete = is_whole and not self._missed

    def take(self) -> bool:
        has_changed, self._has_changed = self._has_changed, False
        while self.fd is not None:
            try:
                events = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                break
            at = 0
            while at < len(events):
                watch, mask, _, length = _EVENT.unpack_from(events, at)
                at += _EVENT.size + length
                if mask & _IGNORED:  # the directory was deleted, or its watch removed
                    self._watches.discard(watch)
                else:
                    has_changed = True
        return has_changed

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd, self._is_local, self.is_complete = None, False, False
