"""`llmcache mount`: check the settings, then serve with a daemon in the background or in this process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmcache.errors import MissingRequirement, UsageError, printable, say, wrapped
from llmcache.files import is_below
from llmcache.mount.backends.touches import why_not
from llmcache.mount.client import control, mountpoint
from llmcache.mount.client.mountpoint import ask
from llmcache.mount.client.settings import DEFAULT, FLAG, Setting, mount_options, option_words
from llmcache.mount.daemon import logs
from llmcache.mount.daemon.accesslog import check_path
from llmcache.mount.daemon.daemon import MountRequest, serve_background, serve_foreground
from llmcache.mount.daemon.openmetrics import parse_address
from llmcache.mount.source.tree import links_outside
from llmcache.mount.vfs import libfuse
from llmcache.units import format_size, parse_size

SCHEMA = "llmcache.mount/1"
_OWN_OPTIONS = ("fsname=llmcachefs", "subtype=llmcachefs", "default_permissions", "nodev", "nosuid")
_IN_PLACE_OPTIONS = {"ro", "nodev", "nosuid", "allow_other", "default_permissions"}
ALLOW_OTHER, NO_OTHER = "allow_other", "noallow_other"  # the second is our own: FUSE has no option for its default
MODES = ("auto", "inplace", "steer", "arena")
LEAST_READ_AHEAD = 4096
LINKS_NAMED, USERS_NAMED = 3, 5


def request_of(settings: Mapping[str, Setting]) -> MountRequest:
    """Check `settings` (from `settings.resolve`) and return them as a request. UsageError names the setting."""
    values = {name: setting.value for name, setting in settings.items()}
    for name, value in values.items():
        if isinstance(value, str) and "\0" in value:
            raise UsageError(f"{name}: {value!r} contains a NUL character", "paths cannot contain it")
    for name in ("source", "mount"):
        if values[name] is None:
            hint = f"'llmcache mount --help' shows the usage; or set {name} = … in --config FILE"
            raise UsageError(f"Missing argument '{name.upper()}'", hint)
    if values["mode"] not in MODES:
        raise UsageError(f"mode: '{values['mode']}' is unknown", f"use one of: {', '.join(MODES)}")
    given = mount_options(values["options"])
    if values["rw"] and "ro" in given:
        raise UsageError("--rw and -o ro contradict each other")
    if values["metrics"] is not None:
        parse_address(values["metrics"])
    elif values["metrics_files"]:
        raise UsageError("metrics_files: metrics are not served", "add --metrics 127.0.0.1:PORT")
    spill = tuple(glob for glob in values["spill"] if glob)
    only_fuse = _only_fuse(settings, given)
    read_ahead_bytes = _size("read_ahead", settings["read_ahead"])
    if read_ahead_bytes is not None and (read_ahead_bytes < LEAST_READ_AHEAD or values["mode"] in ("steer", "arena")):
        raise UsageError(f"read_ahead: {values['read_ahead']} is not possible", "give 4Ki or more, and --mode inplace")
    if values["mode"] == "inplace":
        if only_fuse:
            raise UsageError(only_fuse, "use --mode auto, steer or arena")
        spill = ()
    read_only = not values["rw"] and not spill and "ro" not in given
    cache = settings["cache"]
    return MountRequest(
        source=values["source"],
        mount=values["mount"],
        cache_bytes=_size("cache", cache),
        mode=values["mode"],
        writable=values["rw"],
        spill=spill,
        options=(",".join((*_OWN_OPTIONS, *(("ro",) if read_only else ()), *given)),),  # the last option wins
        access_log=values["access_log"],
        pinned=tuple(glob for glob in values["pin"] if glob),
        log=values["log"],
        metrics=values["metrics"],
        metrics_files=values["metrics_files"],
        cache_origin=cache.where or ("--cache" if cache.origin == FLAG else cache.origin),
        not_in_place=only_fuse if values["mode"] == "auto" else None,
        read_ahead_bytes=read_ahead_bytes,
    )


def _only_fuse(settings: Mapping[str, Setting], given: tuple[str, ...]) -> str | None:
    if any(settings["spill"].value) and settings["spill"].origin != DEFAULT:
        return "spill: in mode inplace either all files are writable or none"
    # fsname= is the name in df and findmnt, which in mode inplace show the storage and SOURCE anyway.
    if foreign := [word for word in given if word not in _IN_PLACE_OPTIONS and not word.startswith("fsname=")]:
        return f"-o {foreign[0]}: is an option of FUSE, which mode inplace does not use"
    return None


def _size(name: str, setting: Setting) -> int | None:
    if setting.value is None:
        return None
    try:
        return parse_size(setting.value)
    except UsageError as error:
        where = f" ({setting.where})" if setting.where else ""
        raise UsageError(f"{name}: {error.message}{where}", error.hint) from error


def mount(request: MountRequest, *, foreground: bool, as_json: bool = False, unless_served: bool = False) -> None:
    """Serve `request`; return at the end of the mount (`foreground`), or as soon as its daemon serves.

    `unless_served`: do nothing if SOURCE is already served in place on the mount point.
    """
    if unless_served and mountpoint.is_in_place(request.source, request.mount):
        return
    source, point = mountpoint.check(request.source, request.mount)
    request = replace(request, log=logs.check(request.log, point))
    if request.access_log is not None:
        request = replace(request, access_log=check_path(request.access_log, point))
    if request.mode in ("auto", "inplace"):
        request = _in_place(request, source, point)
    if request.mode != "inplace":
        libfuse.binding()
        mountpoint.check_machine()
        request = _with_allow_other(request, source, point)
        if users := list(mountpoint.users_of(source)):
            say(f"note: {_about_users(users, point)}")

    links = links_outside(source, point, in_place=request.mode == "inplace")
    if links:
        say(f"warning: {_about_links(links, request.mode)}")
    own = None if foreground else control.files(point).log
    log = request.log or own

    def served() -> None:
        facts = document(point, request, log) | {"links_outside": len(links)}
        print(json.dumps(facts) if as_json else wrapped(line(facts), sys.stdout), flush=True)

    serve = serve_foreground if foreground else serve_background
    serve(request, source, point, served)


def _with_allow_other(request: MountRequest, source: str, point: str) -> MountRequest:
    words = option_words(request.options)
    closed = mountpoint.is_more_open(point, source)
    note = None
    if os.geteuid() == 0 and not {ALLOW_OTHER, "allow_root", NO_OTHER}.intersection(words):
        if closed:
            note = (
                "only root can use the mount, because SOURCE lies below a directory that other users cannot enter; "
                "-o allow_other opens the mount to all users"
            )
        else:
            words.append(ALLOW_OTHER)
    elif ALLOW_OTHER in words and closed:
        note = "other users, who cannot enter a directory above SOURCE, can use the mount (allow_other)"
    if note is not None:
        say(f"note: {note}")
    return replace(request, options=(",".join(word for word in words if word != NO_OTHER),))


def _about_users(users: list[tuple[int, str]], point: str) -> str:
    named = ", ".join(f"{name} ({pid})" for pid, name in users[:USERS_NAMED]) + (", ..." if len(users) > USERS_NAMED else "")
    text = f"programs with open files of SOURCE gain nothing until they open them again in {point}: {named}"
    return f"{text}; mode inplace steers open files, too"


def _about_links(links: list[str], mode: str) -> str:
    named = ", ".join(links[:LINKS_NAMED]) + (", ..." if len(links) > LINKS_NAMED else "")
    if mode == "inplace":
        return (
            f"the mount does not follow links to other file systems, or to directories outside SOURCE: {named}; "
            "mount their targets as well"
        )
    remedy = "mount the directory that contains both (for Hugging Face the hub directory), or use --mode inplace"
    return f"links that lead outside SOURCE are broken or are read without the cache: {named}; {remedy}"


def _in_place(request: MountRequest, source: str, point: str) -> MountRequest:
    """Raise MissingRequirement if mode inplace is required but impossible."""
    is_hidden = source != point and is_below(source, point)
    reason = request.not_in_place or (
        "SOURCE lies inside MOUNT, and the mount would hide it" if is_hidden else why_not(source, keep=True)
    )
    if reason is None:  # without a bind mount, the files stay writable
        return replace(request, mode="inplace", spill=(), writable=request.writable or source == point)
    if request.mode == "inplace" or request.read_ahead_bytes is not None:
        hint = "use --mode auto, steer or arena" + (", without --read-ahead" if request.read_ahead_bytes else "")
        raise MissingRequirement(f"mode inplace is not possible: {reason}", hint)
    return replace(request, not_in_place=reason)


def document(point: str, request: MountRequest, log: str | None) -> dict[str, Any]:
    """Return the document of `llmcache mount --json`; `log`: None for a terminal."""
    stats = ask(point, {"op": "stats"})
    info = control.files(point).describe()
    entry = mountpoint.find(point)  # not statvfs: in the foreground, the daemon would wait for its own mount
    read_only = entry is not None and "ro" in entry.options.split(",")
    return {
        "schema": SCHEMA,
        "pid": info.get("pid"),
        "source": info.get("source"),
        "mount": point,
        **{key: stats[key] for key in ("mode", "budget_bytes", "helper_pid")},
        "not_in_place": request.not_in_place,
        "budget_origin": request.cache_origin,
        "allow_other": None if stats["mode"] == "inplace" or entry is None else ALLOW_OTHER in entry.options.split(","),
        "writable": [] if read_only else ["*"] if request.writable else list(request.spill),
        "log": log,
    }


def line(facts: dict[str, Any]) -> str:
    """Return the document as one line."""
    origin, globs, point = facts["budget_origin"], facts["writable"], facts["mount"]
    why = "what memory can spare" if origin == DEFAULT else origin
    budget = f"budget {format_size(facts['budget_bytes'])} ({why})"
    writes = "writable" if globs == ["*"] else f"read-only except {', '.join(globs)}" if globs else "read-only"
    mode = facts["mode"] + (f" ({facts['not_in_place']})" if facts["not_in_place"] else "")
    writes += {None: "", True: ", for all users", False: ", for this user only"}[facts["allow_other"]]
    links = f", links that lead outside: {facts['links_outside']}" if facts.get("links_outside") else ""
    return printable(f"llmcachefs: {point}: {mode}, {budget}, {writes}{links}")
