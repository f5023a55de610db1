"""Mount options: what `-o` may say, and what libfuse is given."""

from __future__ import annotations

import re
from collections.abc import Iterable

# What fstab entries carry for mount(8), systemd and others; it means nothing to a file system.
_NOISE = {
    *("defaults", "rw", "auto", "noauto", "nofail", "_netdev", "user", "nouser", "users", "owner", "group"),
    *("async", "relatime", "noatime", "nodiratime", "strictatime", "lazytime", "nolazytime", "norelatime", "nostrictatime"),
    *("noowner", "nogroup", "silent", "loud", "nomand", "noiversion"),
}
_NOISE_PREFIXES = ("x-", "comment=", "X-", "user=", "uhelper=", "helper=")
# libfuse takes commas inside a value with a backslash before them: fsname=a\,b.
_WORD = re.compile(r"(?:[^,\\]|\\.?)+", re.DOTALL)
_OWN = ("fsname=llmcachefs", "subtype=llmcachefs", "default_permissions", "nodev", "nosuid")


def words(values: Iterable[str]) -> list[str]:
    """Single options out of `-o a,b -o c`; what is escaped stays so."""
    return [word.strip() for value in values for word in _WORD.findall(value) if word.strip()]


def parse(values: Iterable[str]) -> tuple[str, ...]:
    """Single options out of `-o a,b -o c`, without those that are not meant for a file system."""
    return tuple(word for word in words(values) if word not in _NOISE and not word.startswith(_NOISE_PREFIXES))


def opens_to_others(values: Iterable[str]) -> bool:
    """True if options of a mount let other users in, within the rights of the files."""
    return "allow_other" in words(values)


def for_libfuse(extra: Iterable[str], *, read_only: bool) -> tuple[str, ...]:
    """Options of the mount; what the user gave comes last and wins."""
    given = tuple(extra)
    wanted = ("ro",) if read_only and "ro" not in given else ()
    return (",".join((*_OWN, *wanted, *given)),)
