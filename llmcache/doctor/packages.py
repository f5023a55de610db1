"""Versions of what llmcache depends on, against the bounds that its own package declares."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

from llmcache import __version__
from llmcache.doctor.report import FAILED, LIMITED, OK, Check

AREA = "packages"
DISTRIBUTION = "llmcache-toolkit"
_UNSHOWN = {"dev"}  # for those who change llmcache: tools/test installs it
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_LOWEST = re.compile(r">=\s*([0-9.]+)")
_BOUND = re.compile(r"<\s*([0-9.]+)")
_EXTRA = re.compile(r"""extra\s*==\s*["'](\w+)["']""")


@dataclass(frozen=True)
class Requirement:
    """A declared dependency: its least version, the first one too new, and its extra (None: always needed)."""

    name: str
    lowest: str
    extra: str | None = None
    bound: str | None = None

    @property
    def status_without(self) -> str:
        """How bad it is that it is not there."""
        return FAILED if self.extra is None else LIMITED


def examine() -> list[Check]:
    """Findings on Python, llmcache, and each dependency."""
    python = Check(AREA, "python", OK, platform.python_version(), facts={"version": platform.python_version()})
    own = Check(AREA, "llmcache", OK, __version__, facts={"version": __version__})
    try:
        declared = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        remedy = "pip install . in the source directory"
        return [python, Check(AREA, "llmcache", LIMITED, f"{__version__}, not installed: no bounds to check", remedy)]
    return [python, own, *map(_check, requirements(declared))]


def requirements(declared: Sequence[str]) -> list[Requirement]:
    """What the lines of a package's metadata ask for; without extras for development and without other Pythons' needs."""
    found = []
    for line in declared:
        asked, _, marker = line.partition(";")
        extra = _EXTRA.search(marker)
        if (extra and extra[1] in _UNSHOWN) or "python_version" in marker:
            continue
        name, lowest, bound = _NAME.match(asked.strip()), _LOWEST.search(asked), _BOUND.search(asked)
        if name and lowest:
            found.append(Requirement(name[0], lowest[1], extra[1] if extra else None, bound[1] if bound else None))
    return found


def _check(wanted: Requirement) -> Check:
    package = "." if wanted.extra is None else f"'.[{wanted.extra}]'"
    remedy = f"pip install {package} in the source directory"  # pip keeps to both bounds
    facts = {"lowest": wanted.lowest, "below": wanted.bound, "extra": wanted.extra}
    try:
        version = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        why = "missing" if wanted.extra is None else f"not installed (extra [{wanted.extra}])"
        return Check(AREA, wanted.name, wanted.status_without, why, remedy, facts | {"version": None})
    facts |= {"version": version}
    if numbers(version) < numbers(wanted.lowest):
        return Check(AREA, wanted.name, wanted.status_without, f"{version} is older than {wanted.lowest}", remedy, facts)
    if wanted.bound is not None and numbers(version) >= numbers(wanted.bound):
        return Check(AREA, wanted.name, LIMITED, f"{version} is newer than what is known to work", remedy, facts)
    return Check(AREA, wanted.name, OK, version, facts=facts)


def numbers(version: str) -> tuple[int, ...]:
    """The release of a version, for comparing: (2, 13, 0) for "2.13.0+cpu"."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()
