"""A mount in place as the kernel sees it: MOUNT is a bind mount of SOURCE, or nothing where both are one directory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from llmcache.errors import MountProblem
from llmcache.fs import syscalls
from llmcache.fs.client.mountpoint import entries

_LOOK_S = 0.5


class BindMount:
    """One mount from `run` to its end, which `stop` brings about, or others by unmounting it."""

    def __init__(self, source: str, point: str, flags: int, on_init: Callable[[], None], on_end: Callable[[], None]) -> None:
        """`flags`: MS_RDONLY and its like; `on_init` and `on_end` are called on the thread of `run`."""
        self._source, self._point, self._flags = source, point, flags
        self._on_init, self._on_end = on_init, on_end
        self.mount_id: int | None = None
        self._over = threading.Event()

    def run(self) -> None:
        """Mounts, and returns when the mount is gone. MountProblem where the kernel refuses."""
        if self._source != self._point:
            try:
                syscalls.bind(self._source, self._point, self._flags)
            except OSError as error:
                hint = "mounting in place needs root; --mode steer does without where fusermount3 is installed"
                raise MountProblem(f"{self._source} cannot be mounted on {self._point}: {error.strerror}", hint) from error
            self.mount_id = max(entry.mount_id for entry in entries() if entry.point == self._point)
        try:
            self._on_init()
            while not self._over.wait(_LOOK_S) and self._is_mounted():
                pass
        finally:
            if self._is_mounted() and self.mount_id is not None:
                syscalls.umount2(self._point, syscalls.UMOUNT_NOFOLLOW | syscalls.MNT_DETACH)
            self._on_end()

    def _is_mounted(self) -> bool:
        """True while our mount is where it was made, or where there is none to be made."""
        if self.mount_id is None:
            return os.path.isdir(self._point)
        return any(entry.mount_id == self.mount_id and entry.point == self._point for entry in entries())

    def stop(self) -> None:
        """Ends `run` soon."""
        self._over.set()
