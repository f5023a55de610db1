"""The mount of mode inplace: a bind mount of SOURCE on MOUNT, or none if both are the same directory."""

from __future__ import annotations

import errno
import os
import select
import time
from collections.abc import Callable
from typing import Protocol

from llmcache.errors import MountProblem
from llmcache.mount import syscalls
from llmcache.procfs import MountWatch, mounts

LOOK_S = 2.0  # between checks of MOUNT if there is no bind mount
RETRY_S = 1.0  # before the mount table is opened again


class SteeredFiles(Protocol):
    """The files below SOURCE."""

    def begin(self) -> None:
        """Prepare the storage before MOUNT is visible."""

    def end(self) -> None:
        """Restore the storage."""


class BindMount:
    """A bind mount, from `run` until `stop` or until a user unmounts it."""

    def __init__(
        self,
        source: str,
        point: str,
        flags: int,
        files: SteeredFiles,
        on_init: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        """`flags`: MOUNT_ATTR_RDONLY and similar. `on_init` and `on_end` are called on the thread of `run`."""
        self._source, self._point, self._flags, self._files = source, point, flags, files
        self._on_init, self._on_end = on_init, on_end
        self.mount_id: int | None = None
        self._table = MountWatch(self._is_in_table)
        self._stopped = False
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def run(self) -> None:
        """Return when the mount has ended. MountProblem: the kernel refuses; MissingRequirement."""
        try:
            self._files.begin()
            self._serve()
        finally:
            self._files.end()

    def _serve(self) -> None:
        if self._source != self._point:
            try:
                self.mount_id = syscalls.bind(self._source, self._point, self._flags)
            except OSError as error:
                hint = "mode inplace needs root; --mode steer does not, if fusermount3 is installed"
                if error.errno == errno.ENOSYS:
                    hint = (
                        "it needs Linux 5.12, and in a container a seccomp filter that allows this call; or use --mode steer"
                    )
                raise MountProblem(f"cannot mount {self._source} on {self._point}: {error.strerror}", hint) from error
        try:
            self._on_init()
            while not self._stopped and self._is_mounted():
                self._wait()
        finally:
            if self._is_mounted() and self.mount_id is not None:
                syscalls.umount2(self._point, syscalls.UMOUNT_NOFOLLOW | syscalls.MNT_DETACH)
            self._table.close()
            self._on_end()

    def _wait(self) -> None:
        if self.mount_id is None:
            stop = select.poll()
            stop.register(self._stop_fd, select.POLLIN)
            stop.poll(LOOK_S * 1e3)
            return
        try:
            self._table.wait(self._stop_fd)
        except OSError:  # no free descriptor for now
            time.sleep(RETRY_S)

    def _is_mounted(self) -> bool:
        if self.mount_id is None:
            return os.path.isdir(self._point)
        try:
            return self._table.current()
        except OSError:  # no free descriptor for now
            return True

    def _is_in_table(self) -> bool:
        return any(mount.id == self.mount_id and mount.point == self._point for mount in mounts().values())

    def stop(self) -> None:
        self._stopped = True
        os.eventfd_write(self._stop_fd, 1)
