"""Checks of the requirements of a mount."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from llmcache.bpf.filemap import observable_by
from llmcache.doctor.check import FAILED, LIMITED, OK, Check
from llmcache.errors import MissingRequirement
from llmcache.mount.backends.touches import why_not
from llmcache.mount.client import mountpoint
from llmcache.mount.vfs import libfuse
from llmcache.storage import has_cachestat


def examine(directory: str | None = None, root: Path = Path("/")) -> list[Check]:
    """Check FUSE, fusermount3, libfuse, user_allow_other, root, and mode inplace for the files of `directory`."""
    return [_fuse(), _fusermount(root), _libfuse(), _allow_other(root), _root(), _in_place(directory, root)]


def _in_place(directory: str | None, root: Path) -> Check:
    reason = why_not(directory)
    if reason is not None:
        remedy = "mode inplace needs root, Linux 6.1 with BTF, libbpf 1, and ext4, xfs or f2fs; modes steer and arena do not"
        return Check("in place", LIMITED, reason, remedy)
    setting = root / "sys/kernel/mm/transparent_hugepage/enabled"
    pages = re.search(r"\[(\w+)\]", setting.read_text()) if setting.exists() else None
    if pages is None or pages[1] == "never":
        remedy = (
            "for streaming at a tenth of the CPU time: echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        )
        return Check("in place", LIMITED, "mode inplace is possible, but without huge pages", remedy)
    where = "" if directory is None else f" for {directory}"
    facts = {"huge": pages[1], "observed_by": observable_by(), "counted_by": "cachestat" if has_cachestat() else "mincore"}
    text = (
        f"mode inplace is possible{where}; huge pages: {facts['huge']}; accesses are observed by {facts['observed_by']}, "
        f"cached pages are counted by {facts['counted_by']}"
    )
    return Check("in place", OK, text, facts=facts)


def _fuse() -> Check:
    try:
        mountpoint.check_device()
    except MissingRequirement as problem:
        return Check("FUSE", FAILED, problem.message, problem.hint)
    return Check("FUSE", OK, "/dev/fuse is accessible")


def _fusermount(root: Path) -> Check:
    found = shutil.which("fusermount3")
    if found is not None and (hint := mountpoint.mtab_hint(str(root / "etc/mtab"))):
        return Check("fusermount3", LIMITED, f"{found}, but only root can unmount", hint, {"path": found})
    if found is not None:
        return Check("fusermount3", OK, found, facts={"path": found})
    status = LIMITED if os.geteuid() == 0 else FAILED
    return Check("fusermount3", status, "not installed: only root can mount over FUSE", libfuse.APT_HINT)


def _libfuse() -> Check:
    try:
        version = libfuse.version()
    except MissingRequirement as problem:
        return Check("libfuse", FAILED, problem.message, problem.hint)
    except ImportError as error:
        return Check("libfuse", FAILED, f"its Python binding cannot be loaded: {error}", "pip install -U mfusepy")
    return Check("libfuse", OK, version, facts={"version": version})


def _allow_other(root: Path) -> Check:
    try:
        lines = (root / "etc/fuse.conf").read_text().splitlines()
    except OSError:
        lines = []
    if "user_allow_other" in (line.strip() for line in lines):
        return Check("user_allow_other", OK, "users may mount with -o allow_other")
    if os.geteuid() == 0:
        return Check("user_allow_other", OK, "not set in /etc/fuse.conf; all users can use mounts of root")
    remedy = "to share your mounts: echo user_allow_other | sudo tee -a /etc/fuse.conf"
    return Check("user_allow_other", LIMITED, "not set: only you can use your mounts", remedy)


def _root() -> Check:
    user = os.geteuid()
    if user == 0:
        return Check("root", OK, "yes", facts={"uid": user})
    remedy = "sudo allows mode inplace, mode steer without a limit, the best tier of llmcache trace, and a high priority"
    return Check("root", LIMITED, f"no (user id {user}): mounts work, with limits", remedy, {"uid": user})
