"""Service threads: they run as long as the mount.

An unexpected exception is logged and counted, and the service is restarted, but not after FAILURES_MAX failures within
WITHIN_S; then `on_broken` decides about the mount.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from llmcache.mount.stats import ServiceStats

log = logging.getLogger(__name__)

FAILURES_MAX, WITHIN_S, PAUSE_S = 5, 60.0, 0.2


class Services:
    """The service threads of one mount. A service that ends calls `on_broken(name)` on its thread."""

    def __init__(self) -> None:
        self.on_broken: Callable[[str], None] = lambda _name: None
        self.failures = 0
        self.ended: list[str] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def thread(self, name: str, work: Callable[..., None], *arguments: object) -> threading.Thread:
        """Return a thread to start; it ends when `work` returns."""
        thread = threading.Thread(target=self._run, args=(name, work, arguments), name=name, daemon=True)
        with self._lock:
            self._threads = [each for each in self._threads if each.is_alive() or each.ident is None] + [thread]
        return thread

    def _run(self, name: str, work: Callable[..., None], arguments: tuple[object, ...]) -> None:
        failed: list[float] = []
        while True:
            try:
                work(*arguments)
                return
            except Exception:
                now = time.monotonic()
                failed = [when for when in failed if now - when < WITHIN_S] + [now]
                with self._lock:
                    self.failures += 1
                log.exception("service %s: unexpected error (number %d within a minute)", name, len(failed))
            if len(failed) >= FAILURES_MAX:
                with self._lock:
                    self.ended.append(name)
                self.on_broken(name)
                return
            time.sleep(PAUSE_S)

    def stats(self) -> ServiceStats:
        with self._lock:
            running = sum(thread.is_alive() for thread in self._threads)
            return ServiceStats(running, self.failures, tuple(self.ended))
