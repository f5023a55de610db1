"""Versions of what llmcache depends on, against the bounds that its own package declares."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import Version

from llmcache import __version__
from llmcache.doctor import FAILED, LIMITED, OK, Check

DISTRIBUTION = "llmcache-toolkit"
_UNSHOWN = "dev"  # the extra for those who change llmcache: tools/test installs it


def examine() -> list[Check]:
    """Checks of Python, llmcache, and each dependency."""
    python = Check("python", OK, platform.python_version(), facts={"version": platform.python_version()})
    own = Check("llmcache", OK, __version__, facts={"version": __version__})
    try:
        declared = metadata.requires(DISTRIBUTION) or []
        extras = metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        remedy = "pip install . in the source directory"
        return [python, Check("llmcache", LIMITED, f"{__version__}, not installed: no bounds to check", remedy)]
    return [python, own, *(check for line in declared for check in _checks(Requirement(line), extras))]


def _checks(wanted: Requirement, extras: Iterable[str]) -> list[Check]:
    """The check of a dependency; none if it is for another Python, or of an extra that is not shown."""
    if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
        return [_check(wanted, None)]
    shown = (extra for extra in extras if extra != _UNSHOWN)
    return [_check(wanted, extra) for extra in shown if wanted.marker.evaluate({"extra": extra})]


def _check(wanted: Requirement, extra: str | None) -> Check:
    """`extra`: None for what is always needed."""
    bounds = {each.operator: each.version for each in wanted.specifier}
    status = FAILED if extra is None else LIMITED
    package = "." if extra is None else f"'.[{extra}]'"
    remedy = f"pip install {package} in the source directory"  # pip keeps to both bounds
    facts = {"lowest": bounds[">="], "below": bounds.get("<"), "extra": extra}
    try:
        version = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        why = "missing" if extra is None else f"not installed (extra [{extra}])"
        return Check(wanted.name, status, why, remedy, facts | {"version": None})
    facts |= {"version": version}
    if Version(version) < Version(bounds[">="]):
        return Check(wanted.name, status, f"{version} is older than {bounds['>=']}", remedy, facts)
    if not wanted.specifier.contains(version, prereleases=True):
        return Check(wanted.name, LIMITED, f"{version} is newer than what is known to work", remedy, facts)
    return Check(wanted.name, OK, version, facts=facts)
