"""Which of the recorded processes still run, for sources that the kernel does not tell."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

_LOOK_S = 0.1


class Family:
    """Some processes and, with `follow`, what they start, as far as /proc shows it in time."""

    def __init__(self, pids: Iterable[int], follow: bool) -> None:
        self._follow = follow
        self._known = {pid: started for pid in pids if (started := _started(pid))}
        self._looked_s = 0.0

    def note(self, pids: Iterable[int]) -> None:
        """Processes that were seen to belong to it."""
        if self._follow:
            for pid in pids:
                if pid not in self._known and (started := _started(pid)):
                    self._known[pid] = started

    def alive(self) -> bool:
        """Whether any of them runs; looked at ten times in a second at most."""
        now_s = time.monotonic()
        if self._known and now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            if self._follow:
                for pid in list(self._known):
                    self.note(_children(pid))
            # A number may have been given to another process since.
            self._known = {pid: started for pid, started in self._known.items() if _started(pid) == started}
        return bool(self._known)


def threads(pid: int) -> list[int]:
    """The threads of process `pid`; none if it is gone."""
    try:
        return [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []


def _children(pid: int) -> list[int]:
    found = []
    for tid in threads(pid):
        try:
            found += [int(word) for word in Path(f"/proc/{pid}/task/{tid}/children").read_text().split()]
        except OSError:
            continue  # the thread is gone, or the kernel has no such list
    return found


def _started(pid: int) -> str | None:
    """When process `pid` began, in ticks; None if it is gone or only waits to be buried."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
