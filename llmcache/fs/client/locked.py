"""What a mount keeps of a traced file where no trace can see it read: locked pages, which stay mapped (mode steer)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from llmcache.fs.client import control, mountpoint

if TYPE_CHECKING:
    from llmcache.trace.record import TraceFile

# The recorder waits for the answer while its buffers fill: a daemon that takes longer is as good as gone.
_PATIENCE_S = 2.0


def locked_bytes(file: TraceFile) -> int:
    """Bytes of the loops of `file` that the mount it lies on keeps locked in the page cache: 0 in mode arena, or elsewhere.

    Files of a model in several are one loop, which counts for the first of them. MountProblem if the daemon does not answer.
    """
    device = f"{os.major(file.dev)}:{os.minor(file.dev)}"
    for entry in mountpoint.entries():
        if entry.fstype == mountpoint.FSTYPE and entry.device == device:
            stats = control.request(entry.point, {"op": "stats"}, uid=entry.owner, timeout_s=_PATIENCE_S)
            return _pinned(stats, file, entry.point) if stats["mode"] == "steer" else 0
    return 0


def _pinned(stats: dict[str, object], file: TraceFile, point: str) -> int:
    files = stats["files"]
    assert isinstance(files, list)
    own = [each for each in files if point + each["path"] == file.path]
    return sum(int(loop["pinned_bytes"]) for each in own for loop in each["loops"])
