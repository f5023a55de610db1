"""Emulated devices that are forks of the test's process, because a new process would first import numba."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from llmcache.papers.csd import device
from llmcache.papers.csd import host as hosts


class Fork:
    """The part of subprocess.Popen that a host uses for its device."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], **_options: Any) -> None:
        self.args = command
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                for number in (signal.SIGTERM, signal.SIGHUP):
                    signal.signal(number, signal.SIG_DFL)
                last = 2
                for descriptor in sorted(pass_fds):  # close the rest: an open copy of the host's end would hide its death
                    os.closerange(last + 1, descriptor)
                    last = descriptor
                os.closerange(last + 1, os.sysconf("SC_OPEN_MAX"))
                code = device.main(list(command[3:]))
            os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (timeout or 600)
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout or 600)
            time.sleep(0.001)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the devices of a test forks; other tests check how the device program starts and ends."""
    monkeypatch.setattr(hosts, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": Fork}))
    yield


FORKED = pytest.mark.usefixtures("forked")
