"""New files that hold what is private: traces name files, saved keys and values tell a conversation."""

from __future__ import annotations

import contextlib
import os

PRIVATE = 0o600


def create(path: str | os.PathLike[str], mode: int = PRIVATE) -> int:
    """Descriptor of a new, empty file at `path`, for reading and writing; `mode` less the umask. OSError.

    What was at `path` is removed, not followed or written to: another user may have put a link, or a file, there.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
