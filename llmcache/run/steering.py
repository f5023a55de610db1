"""The mounts that `llmcache run` makes: one daemon for each directory with model files."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmcache.cgroup import Cgroup
from llmcache.errors import LlmcacheError, MountProblem
from llmcache.files import is_below
from llmcache.mount.client import control, mountpoint
from llmcache.procfs import is_running, mounts
from llmcache.run.namespaces import Namespaces

END_S = 30.0


@dataclass(frozen=True)
class Steered:
    """A steered directory. `document`: of `llmcache mount --json`; `own`: by our daemon."""

    source: str
    point: str
    uid: int
    document: Mapping[str, Any]
    own: bool = True

    @property
    def mode(self) -> str:
        return str(self.document["mode"])

    def stats(self) -> dict[str, Any] | None:
        try:
            return control.request(self.point, {"op": "stats"}, uid=self.uid, timeout_s=5.0)
        except LlmcacheError:
            return None

    def is_alive(self) -> bool:
        return control.is_locked(control.files(self.point, self.uid))

    def stop(self) -> None:
        """End the mount, if it is ours, even if the command has open files."""
        if not self.own:
            return
        with contextlib.suppress(MountProblem):
            control.request(self.point, {"op": "stop", "force": True}, uid=self.uid, timeout_s=END_S)
        control.wait_until_gone(control.files(self.point, self.uid), END_S)
        if mountpoint.is_made(self.point):  # a private mount ends with its namespace
            with contextlib.suppress(LlmcacheError):  # of a daemon that was killed
                mountpoint.detach(self.point, lazy=True)
        control.remove_left(control.files(self.point, self.uid))
        mountpoint.remove_made(self.point)


def start(
    source: str,
    point: str,
    mode: str,
    lifetime_pid: int,
    *,
    cache_bytes: int | None = None,
    group: Cgroup | None = None,
    namespaces: Namespaces | None = None,
) -> Steered:
    """Mount `source` by a daemon that ends with process `lifetime_pid` and this one, and return once it serves.

    Its reads are charged to `group`. It has a session of its own, which Ctrl-C does not reach. LlmcacheError: what `llmcache
    mount` reports.
    """

    words = [sys.executable, "-m", "llmcache", "mount", source, point, "--json", "--rw", "--mode", mode]
    for pid in (lifetime_pid, os.getpid()):
        words += ["--while", str(pid)]
    words += [] if cache_bytes is None else ["--cache", str(cache_bytes)]
    done = subprocess.run(
        words if group is None else group.wrap(words),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        start_new_session=True,
        cwd="/",  # `-m` imports from the working directory, in which other users may write
        preexec_fn=None if namespaces is None else namespaces.join,
    )
    if done.returncode != 0:
        raise _failure(done.returncode, done.stderr)
    for line in done.stderr.splitlines():
        if "reduced" in line:
            print(line, file=sys.stderr)
    return Steered(source, point, os.geteuid(), json.loads(done.stdout.splitlines()[-1]))


def remove_abandoned() -> None:
    """Unmount what killed runs have left behind. Changes control.SESSION."""
    directory = control.directory(os.geteuid())
    for name in os.listdir(directory) if os.path.isdir(directory) else ():
        found = re.fullmatch(r"(run-([0-9]+))-[0-9]+", name)
        if found is not None and (int(found[2]) == os.getpid() or not is_running(int(found[2]))):
            os.environ[control.SESSION] = found[1]
            left = Steered("", os.path.join(directory, name), os.geteuid(), {})
            if not left.is_alive():
                left.stop()


def _failure(code: int, text: str) -> LlmcacheError:
    if code < 0:
        hint = "the memory limit of the cgroup may be too small (dmesg shows OOM kills)" if code == -signal.SIGKILL else None
        return MountProblem(f"the daemon was killed by {signal.Signals(-code).name} while it started", hint)
    lines = text.strip().splitlines()
    said = next((line.partition("error: ")[2] for line in lines if "error: " in line), lines[-1] if lines else "no message")
    hint = next((line.partition("hint: ")[2] for line in lines if line.startswith("hint: ")), None)
    failure = LlmcacheError(said, hint)
    failure.exit_code = code if 0 < code < 6 else 4
    return failure


def served_already(source: str) -> Steered | None:
    """Return the living mount that steers a directory, or one above it."""
    for mount in mounts().values():
        is_over_it = mount.fstype == mountpoint.FSTYPE and is_below(source, mount.point)
        if is_over_it and control.is_locked(control.files(mount.point, mount.owner)):
            return _joined(source, mount.point, mount.owner)
    for point, facts in control.root_points().items():
        served = str(facts.get("source"))
        if facts.get("inplace") is None or not control.is_locked(control.files(point, 0)):
            continue
        if is_below(source, served) or is_below(source, point):
            return _joined(source, point, 0)
    return None


def _joined(source: str, point: str, uid: int) -> Steered | None:
    found = Steered(source, point, uid, {}, own=False)
    stats = found.stats()
    return None if stats is None else Steered(source, point, uid, stats, own=False)
