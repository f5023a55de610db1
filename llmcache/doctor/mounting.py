"""What a mount needs of the system: FUSE, libfuse 3, and the rights of this user."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from llmcache.doctor.finding import FAILED, LIMITED, OK, Finding
from llmcache.errors import EnvironmentProblem
from llmcache.fs import libfuse, mountpoint

AREA = "mount"


def examine(root: Path = Path("/")) -> list[Finding]:
    """Findings on FUSE, fusermount3, libfuse, user_allow_other and root. `root` is there for tests on made-up trees."""
    return [_fuse(), _fusermount(root), _libfuse(), _allow_other(root), _root()]


def _fuse() -> Finding:
    try:
        mountpoint.check_device()
    except EnvironmentProblem as problem:
        return Finding(AREA, "FUSE", FAILED, problem.message, problem.hint)
    return Finding(AREA, "FUSE", OK, "/dev/fuse may be opened")


def _fusermount(root: Path) -> Finding:
    found = shutil.which("fusermount3")
    if found is not None and (hint := mountpoint.mtab_hint(str(root / "etc/mtab"))):
        return Finding(AREA, "fusermount3", LIMITED, f"{found}, but only root can unmount", hint, {"path": found})
    if found is not None:
        return Finding(AREA, "fusermount3", OK, found, facts={"path": found})
    status = LIMITED if os.geteuid() == 0 else FAILED
    return Finding(AREA, "fusermount3", status, "missing: only root can mount", libfuse.APT_HINT)


def _libfuse() -> Finding:
    try:
        version = libfuse.version()
    except EnvironmentProblem as problem:
        return Finding(AREA, "libfuse", FAILED, problem.message, problem.hint)
    except ImportError as error:
        return Finding(AREA, "libfuse", FAILED, f"its binding cannot be loaded: {error}", "pip install -U mfusepy")
    return Finding(AREA, "libfuse", OK, version, facts={"version": version})


def _allow_other(root: Path) -> Finding:
    try:
        lines = (root / "etc/fuse.conf").read_text().splitlines()
    except OSError:
        lines = []
    if "user_allow_other" in (line.strip() for line in lines):
        return Finding(AREA, "user_allow_other", OK, "users may mount with -o allow_other")
    if os.geteuid() == 0:
        return Finding(AREA, "user_allow_other", OK, "not set in /etc/fuse.conf; root may mount with -o allow_other anyway")
    remedy = "to share your mounts: echo user_allow_other | sudo tee -a /etc/fuse.conf"
    return Finding(AREA, "user_allow_other", LIMITED, "not set: only you can see your mounts", remedy)


def _root() -> Finding:
    user = os.geteuid()
    if user == 0:
        return Finding(AREA, "root", OK, "yes", facts={"uid": user})
    remedy = "sudo: best tier of llmcache trace, mode steer without a limit, priority for the daemon"
    return Finding(AREA, "root", LIMITED, f"no (user id {user}): mounts work, with less", remedy, {"uid": user})
