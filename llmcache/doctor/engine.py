"""Checks of a running engine: its model files, mounts, and copies of the weights in its memory."""

from __future__ import annotations

from dataclasses import asdict

from llmcache.doctor.check import LIMITED, OK, Check
from llmcache.errors import MissingRequirement
from llmcache.run import models
from llmcache.run.steering import served_already
from llmcache.units import format_size


def examine(pid: int) -> list[Check]:
    """Check process `pid`. MissingRequirement if it does not exist or belongs to another user."""
    models.check_process("--pid", pid)
    files = models.of_process(pid)
    if not files:
        found = "none found in the arguments, open files and mappings of the process and its children"
        return [Check("model files", LIMITED, found, "wait until the process has loaded a model, or use sudo")]
    checks = []
    for path in models.first_shards(files):
        size = format_size(models.size_of(path))
        try:
            mount = served_already(models.source_of(path))
        except MissingRequirement:
            mount = None
        found = f"{path} ({size}): " + (f"steered by the mount on {mount.point} ({mount.mode})" if mount else "not steered")
        remedy = None if mount else f"sudo llmcache run --pid {pid}"
        checks.append(Check("model file", OK if mount else LIMITED, found, remedy, {"path": path}))
    copies = models.copies_of(pid, files)
    for copied in copies:
        checks.append(Check("weights", LIMITED, copied.said(), copied.remedy, asdict(copied)))
    if not copies:
        checks.append(Check("weights", OK, "read from the files; no copy in private memory was found"))
    return checks
