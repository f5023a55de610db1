"""Checks of the Python packages that llmcache requires."""

from __future__ import annotations

import functools
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from llmcache import __version__
from llmcache.doctor.check import FAILED, LIMITED, OK, Check

DISTRIBUTION = "llmcache-toolkit"
_IMPORT_S = 120.0
_modules = functools.cache(metadata.packages_distributions)
_UNSHOWN = "dev"  # the extra for developers of llmcache, which tools/test installs


def examine() -> list[Check]:
    """Check Python, llmcache and each dependency."""
    python = Check("python", OK, platform.python_version(), facts={"version": platform.python_version()})
    own = Check("llmcache", OK, __version__, facts={"version": __version__})
    try:
        declared = metadata.requires(DISTRIBUTION) or []
        extras = metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        remedy = "pip install . in the source directory"
        return [
            python,
            Check("llmcache", LIMITED, f"{__version__}, not installed: versions of packages are not checked", remedy),
        ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # each check starts a process
        found = list(pool.map(lambda line: list(_checks(Requirement(line), extras)), declared))
    return [python, own, *(check for checks in found for check in checks)]


def _checks(wanted: Requirement, extras: Iterable[str]) -> list[Check]:
    if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
        return [_check(wanted, None)]
    shown = (extra for extra in extras if extra != _UNSHOWN)
    return [_check(wanted, extra) for extra in shown if wanted.marker.evaluate({"extra": extra})]


def _check(wanted: Requirement, extra: str | None) -> Check:
    bounds = {each.operator: each.version for each in wanted.specifier}
    status = FAILED if extra is None else LIMITED
    package = "." if extra is None else f"'.[{extra}]'"
    remedy = f"pip install {package} in the source directory"  # without a version: pip respects both bounds
    facts = {"lowest": bounds[">="], "below": bounds.get("<"), "extra": extra}
    try:
        version = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        why = "not installed" if extra is None else f"not installed (extra [{extra}])"
        return Check(wanted.name, status, why, remedy, facts | {"version": None})
    facts |= {"version": version}
    if Version(version) < Version(bounds[">="]):
        return Check(wanted.name, status, f"{version} is older than {bounds['>=']}", remedy, facts)
    if not wanted.specifier.contains(version, prereleases=True):
        return Check(wanted.name, LIMITED, f"{version} is newer than the tested versions", remedy, facts)
    if (problem := _import_problem(wanted.name)) is not None:
        why = f"{version} is installed, but cannot be imported: {problem}"
        return Check(wanted.name, status, why, f"pip install --force-reinstall {wanted.name}", facts)
    return Check(wanted.name, OK, version, facts=facts)


def _import_problem(distribution: str) -> str | None:
    name = canonicalize_name(distribution)
    modules = [module for module, names in _modules().items() if name in map(canonicalize_name, names)]
    named = [module for module in modules if canonicalize_name(module) == name]
    public = named or [module for module in modules if module.isidentifier() and not module.startswith("_")]
    if not public:
        return None
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {public[0]}"], capture_output=True, text=True, timeout=_IMPORT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"the import takes more than {_IMPORT_S:.0f} s"
    if done.returncode < 0:
        return f"Python is killed by {signal.Signals(-done.returncode).name}"
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no error message"])[-1]
