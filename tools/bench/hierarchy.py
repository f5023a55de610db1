"""Which cgroup hierarchy has a controller: v1, v2, or both side by side (hybrid)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .errors import BenchError

# the same controller is called differently: v2 "io" is v1 "blkio"
V1_NAMES = {"memory": "memory", "io": "blkio"}


@dataclass(frozen=True)
class Hierarchy:
    """A mounted hierarchy that has the wanted controller, and where this process stands in it."""

    version: int
    root: Path
    own: Path

    def parents(self) -> list[Path]:
        """Return the groups below which a new one may be made, best first, without repeats."""
        return [self.root] if self.own == self.root else [self.root, self.own]


@dataclass(frozen=True)
class System:
    """Where the kernel's files are: replaced by tests with a directory of their own."""

    proc: Path = Path("/proc")
    sysfs: Path = Path("/sys")

    @property
    def mountinfo(self) -> Path:
        """Return the mount table of this process."""
        return self.proc / "self" / "mountinfo"


def find(controller: str, system: System | None = None) -> Hierarchy:
    """Return the hierarchy that has `controller` ("memory" or "io"); raises BenchError with a hint if none has."""
    system = system or System()
    mounts = _mounts(system.mountinfo)
    where = _positions(system.proc / "self" / "cgroup")
    v1 = V1_NAMES[controller]
    for kind, root, options in mounts:
        if kind == "cgroup" and v1 in options.split(","):
            return Hierarchy(1, root, _own(root, where.get(v1, "/")))
    for kind, root, _ in mounts:
        if kind == "cgroup2" and controller in _words(root / "cgroup.controllers"):
            return Hierarchy(2, root, _own(root, where.get("", "/")))
    raise BenchError(
        f"no cgroup hierarchy here has the {controller} controller",
        "a container needs --privileged (or a delegated cgroup); a kernel may need cgroup_enable=memory at boot",
    )


def _mounts(mountinfo: Path) -> list[tuple[str, Path, str]]:
    found = []
    for line in mountinfo.read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = ([*after.split(), "", "", ""])[:3]
        if kind in ("cgroup", "cgroup2"):
            found.append((kind, Path(_unescape(before.split()[4])), options))
    return found


def _unescape(text: str) -> str:
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, char)
    return text


def _positions(cgroup_file: Path) -> dict[str, str]:
    """Return the path of this process per controller; the key of v2 is the empty string."""
    where = {}
    for line in cgroup_file.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(","):
            where[name] = path
    return where


def _own(root: Path, path: str) -> Path:
    own = root / path.lstrip("/")
    # a path from outside of a cgroup namespace does not exist below the mount
    return own if own.is_dir() else root


def _words(file: Path) -> list[str]:
    return file.read_text().split() if file.exists() else []
