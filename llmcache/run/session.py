"""One `llmcache run`, from the words of the command line to the command's end.

The ways to steer files, best first: in place (root; also later files, and running processes), over FUSE in a mount namespace
of the command's own, and over a FUSE mount elsewhere, with changed paths in the command's words.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from glob import glob
from typing import Any

from llmcache.cgroup import Cgroup
from llmcache.errors import EXIT_OK, LlmcacheError, MissingRequirement, UsageError, droppable, say
from llmcache.memory import oom_kills, tightest
from llmcache.mount.backends.touches import why_not
from llmcache.mount.client import control
from llmcache.mount.client.mountpoint import check_machine, made_point
from llmcache.procfs import IN_MEMORY, RunningProcesses, fstype_at
from llmcache.run import models, steering
from llmcache.run.child import Child, User, resolve, user_of
from llmcache.run.namespaces import Namespaces
from llmcache.run.steering import Steered
from llmcache.tokens.render import summary_lines
from llmcache.tokens.summary import TokenSummary
from llmcache.tokens.watch import TokenWatch
from llmcache.units import format_size

SCHEMA = "llmcache.run/1"
FIRST_LOOK_S, LOOK_S, LATE_LOOK_S, LATE_S = 0.25, 1.0, 5.0, 120.0
"""The opened files of the command are listed so often; after LATE_S less often."""
COPIES_S = 10.0
"""From one look at what the command has copied to the next."""
NO_REPACK = "LLAMA_ARG_NO_REPACK"
_REPACK_WORDS = frozenset(("--repack", "--no-repack", "-nr"))
_REPACK_VARIABLES = (NO_REPACK, "LLAMA_ARG_REPACK")
COPY_SHARE = 0.75
"""Of the memory that can be had: a larger copy of the weights leaves too little for the rest of the model and the engine."""


@dataclass(frozen=True)
class RunSettings:
    """Options of `llmcache run`."""

    cache_bytes: int | None = None
    memory_bytes: int | None = None
    user: str | None = None
    directories: tuple[str, ...] = ()
    globs: tuple[str, ...] = ()
    set_environment: bool = True
    as_json: bool = False

    def named(self) -> list[str]:
        return [path for glob_of in self.globs for path in sorted(glob(os.path.expanduser(glob_of)))]

    def wants(self, path: str) -> bool:
        names = (path, os.path.basename(path))
        globs = [os.path.abspath(os.path.expanduser(one)) if "/" in one else one for one in self.globs]
        return not globs or any(fnmatch.fnmatch(name, one) for one in globs for name in names)


@dataclass
class Session:
    """The files that were found, and the mounts that steer their directories."""

    settings: RunSettings
    files: list[str] = field(default_factory=list)
    steered: dict[str, Steered] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    namespaces: Namespaces | None = None
    group: Cgroup | None = None

    def add(self, paths: Sequence[str]) -> list[str]:
        new = [path for path in paths if path not in self.files and self.settings.wants(path)]
        self.files += new
        return [source for source in models.sources_of(new) if source not in self.steered and source not in self.refused]

    def without_memory(self, sources: Sequence[str]) -> list[str]:
        """Return the directories that are on storage, and report the others."""
        for source in sources:
            if (kind := fstype_at(source)) in IN_MEMORY:
                self.refused[source] = kind
                say(f"not steering {self._models_in(source)}: {source} is on {kind}, so its files are already in memory")
        return [source for source in sources if source not in self.refused]

    def steer(self, source: str, point: str, mode: str, lifetime_pid: int, *, is_starting: bool = False) -> None:
        """Steer a directory, unless a mount does that already. A refusal is reported, and not tried again.

        Raise LlmcacheError if a given budget is refused before the command has started.
        """
        mounted = steering.served_already(source)
        if mounted is not None:
            say(f"{self._models_in(source)}: already steered by the mount on {mounted.point} ({mounted.mode})")
        else:
            try:
                mounted = steering.start(
                    source,
                    point,
                    mode,
                    lifetime_pid,
                    cache_bytes=self.settings.cache_bytes,
                    group=self.group,
                    namespaces=self.namespaces,
                )
            except LlmcacheError as error:
                if is_starting and self.settings.cache_bytes is not None:
                    raise
                self.refused[source] = error.message
                say(f"not steering {source}: {error.message}" + (f" ({error.hint})" if error.hint else ""))
                return
            budget = format_size(int(mounted.document["budget_bytes"]))
            say(f"steering {self._models_in(source)} {_WAYS[mounted.mode]}, budget {budget}")
        self.steered[source] = mounted

    def _models_in(self, source: str) -> str:
        described = [_described(path) for path in self.files if models.source_of(path) == source]
        return ", ".join(dict.fromkeys(filter(None, described))) or source

    def renew(self, owner_pid: int | None) -> None:
        """Report the mounts that have ended. In place (`owner_pid`), directories of mounts of others are steered again."""
        for source, mounted in list(self.steered.items()):
            if source in self.ended or mounted.is_alive():
                continue
            self.ended.add(source)
            if mounted.own:
                log = control.files(mounted.point, mounted.uid).log
                say(f"{source} is no longer steered: its daemon has ended (log: {log})")
            else:
                say(f"the mount on {mounted.point} has ended")
                if owner_pid is not None:
                    del self.steered[source]
                    self.ended.discard(source)
                    self.steer(source, source, "inplace", owner_pid)

    def close(self) -> None:
        for mounted in self.steered.values():
            mounted.stop()
        if self.namespaces is not None:
            self.namespaces.close()


_WAYS = {"inplace": "in place", "steer": "over FUSE (steer)", "arena": "over FUSE (arena)"}


def _described(path: str) -> str:
    if path != models.shards_of(path)[0]:
        return ""
    try:
        facts, name = [format_size(models.size_of(path))], models.shown_name(path)
    except OSError:  # it was removed
        return os.path.basename(path)
    if (model := models.bytes_of(path)) is not None and model.experts is not None:
        experts = f"{model.experts} experts" if model.used is None else f"{model.used} of {model.experts} experts a token"
        facts.append(f"MoE, {experts}")
    return f"{name} ({', '.join(facts)})"


def engine_variables(
    files: Sequence[str], words: Sequence[str], environment: dict[str, str], room_bytes: int
) -> dict[str, str]:
    """Return the variables for an engine whose defaults would copy more of the model than memory can hold.

    llama.cpp copies ("repacks") tensors of some types into private memory. Nothing is set where the copy fits in
    `room_bytes`, because it makes the engine faster, or where the user says whether to repack.
    """
    if _REPACK_WORDS.intersection(words) or any(name in environment for name in _REPACK_VARIABLES):
        return {}
    for path in files:
        model = models.bytes_of(path)
        if model is not None and model.repacked_bytes > COPY_SHARE * room_bytes:
            return {NO_REPACK: "1"}
    return {}


@dataclass
class _Command:
    words: Sequence[str]
    program: str
    environment: dict[str, str]
    user: User | None

    def start(self, session: Session, stack: contextlib.ExitStack, *, private: bool = False) -> Child:
        child = Child(self.words, self.program, self.environment, user=self.user, group=session.group, private=private)
        stack.callback(child.cancel)
        return child

    def move(self, points: Mapping[str, str]) -> None:
        own = self.environment
        own |= {name: _moved(own[name], points) for name in models.VARIABLES if name in own}
        self.words = [self.words[0], *(_moved(word, points) for word in self.words[1:])]


def run(words: Sequence[str], settings: RunSettings) -> int:
    """Run a command with its model files steered; return its exit code. LlmcacheError: it was not started."""
    environment = dict(os.environ)
    user = user_of(settings.user, environment)
    program = resolve(words[0], environment.get("PATH"))
    session = Session(settings)
    given = [*settings.directories, *settings.named()] or words[1:]
    if user is not None:
        environment = user.environment(environment)
    command = _Command(words, program, environment, user)
    depth = models.DEPTH if settings.directories else 1
    sources = session.without_memory(session.add(models.in_words(given, environment, _directory(), depth)))
    is_root = os.geteuid() == 0
    reason = next(filter(None, map(why_not, sources)), None) if sources else why_not()
    has_ended = False
    try:
        with contextlib.ExitStack() as stack:
            if settings.memory_bytes is not None:
                session.group = stack.enter_context(Cgroup("run", directory=None, memory_bytes=settings.memory_bytes))
            stack.callback(session.close)
            if reason is not None and not session.files:
                hint = (
                    f"name a model with --dir or --files; files that the command opens are found in place only, but {reason}"
                )
                raise UsageError(_not_found(given), hint)
            if settings.set_environment and sources:
                room_bytes = min(settings.memory_bytes or sys.maxsize, tightest().available_bytes)
                for name, value in engine_variables(session.files, words, environment, room_bytes).items():
                    environment[name] = value
                    say(f"setting {name}={value}, else llama.cpp copies more weights than fit in memory (see --no-env)")
            killed = oom_kills()
            if reason is None or all(map(steering.served_already, sources)):
                child = command.start(session, stack)
                for source in sources:
                    session.steer(source, source, "inplace", os.getpid(), is_starting=True)
            else:
                child = _over_fuse(session, command, stack, sources, reason)
            tokens = stack.enter_context(_tokens_of(child.pid))
            began = time.monotonic()
            with child.forwarding():
                child.release()
                _watch(session, child.pid, os.getpid() if is_root and reason is None else None)
                child.wait()
            has_ended = True
            session.renew(None)
            if child.status == signal.SIGKILL and oom_kills() > killed:
                limit = "" if settings.memory_bytes is None else f" (--memory {format_size(settings.memory_bytes)})"
                say(f"the kernel's OOM killer ended the command: it needs more memory than is available{limit}")
            _summarize(session, time.monotonic() - began, tokens.stop())
    except Exception as error:
        if not has_ended:
            raise
        say(f"error after the end of the command: {error}")
    return child.end_alike()


def _directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"


def _not_found(given: Sequence[str]) -> str:
    looked = f"'{' '.join(given)}'" if given else "the command, which has no arguments,"
    return f"no model file is named in {looked} or in {models.VARIABLES[0]}"


def _over_fuse(
    session: Session, command: _Command, stack: contextlib.ExitStack, sources: Sequence[str], reason: str
) -> Child:
    check_machine()
    steering.remove_abandoned()
    name = f"run-{os.getpid()}"
    command.environment[control.SESSION] = os.environ[control.SESSION] = name
    try:
        child = command.start(session, stack, private=True)
        points = {source: source for source in sources}
        try:
            session.namespaces = Namespaces(child.pid)
        except OSError:
            child.cancel()
            raise
        way = "in a private mount namespace"
    except OSError as error:
        points = {source: made_point(f"{name}-{number}") for number, source in enumerate(sources)}
        command.move(points)
        child = command.start(session, stack)
        way = f"by a separate mount, with the model paths in the arguments changed (no private namespace: {error.strerror})"
    say(f"steering over FUSE {way}; not in place: {reason}")
    for source in sources:
        session.steer(source, points[source], "auto", child.pid, is_starting=True)
    if not session.steered:
        raise MissingRequirement(
            "no model file can be steered on this machine",
            "llmcache doctor shows what is missing; the command itself also runs without llmcache",
        )
    return child


def _moved(word: str, points: Mapping[str, str]) -> str:
    option, equals, value = word.rpartition("=")
    path = os.path.normpath(os.path.join(_directory(), os.path.expanduser(value)))
    for real in (os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)), os.path.realpath(path)):
        for source, point in points.items():
            if real == source or real.startswith(source + "/"):
                return f"{option}{equals}{os.path.normpath(os.path.join(point, os.path.relpath(real, source)))}"
    return word


def attach(pid: int, settings: RunSettings) -> int:
    """Steer the model files of a running process until it ends, or until Ctrl-C. LlmcacheError."""
    models.check_process("--pid", pid)
    if reason := why_not():
        raise MissingRequirement(
            f"cannot steer a running process: {reason}",
            "files that are already open can only be steered in place: use sudo, or start the command with llmcache run",
        )
    session = Session(settings)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        stack.callback(session.close)
        tokens = stack.enter_context(_tokens_of(pid))
        try:
            if not models.opened_by(pid):
                say(f"process {pid} has no model file open: waiting until it opens one or ends")
            _watch(session, pid, os.getpid())
        except KeyboardInterrupt:
            _summarize(session, time.monotonic() - began, tokens.stop())
            raise
        _summarize(session, time.monotonic() - began, tokens.stop())
    return EXIT_OK


@contextlib.contextmanager
def _tokens_of(pid: int) -> Iterator[TokenWatch]:
    tokens = TokenWatch(pid)
    tokens.start()
    try:
        yield tokens
    finally:
        with contextlib.suppress(Exception):  # reported by the first call
            tokens.stop()


def _watch(session: Session, pid: int, owner_pid: int | None) -> None:
    """Wait for the end of a process. In place (`owner_pid`), steer the files that it opens."""
    began = time.monotonic()
    pause_s, due, said = FIRST_LOOK_S, began + COPIES_S, set[object]()
    running = RunningProcesses([pid])
    while running.pids and not running.wait(pause_s):
        pause_s = LOOK_S if time.monotonic() - began < LATE_S else LATE_LOOK_S
        try:
            if owner_pid is not None:
                for source in session.without_memory(session.add(models.opened_by(pid))):
                    session.steer(source, source, "inplace", owner_pid)
            session.renew(owner_pid)
            if time.monotonic() >= due:
                due = time.monotonic() + COPIES_S
                for copied in models.copies_of(pid, session.files):
                    if (copied.pid, copied.cause) not in said:
                        say(str(copied))
                    said.add((copied.pid, copied.cause))
        except OSError:
            pass  # files and directories may be removed at any time
        except Exception as error:  # noqa: BLE001 - the command continues, whatever its observer meets
            if repr(error) not in said:
                said.add(repr(error))
                say(f"cannot examine the files of the command: {error!r}")
    running.close()


def _summarize(session: Session, seconds: float, tokens: TokenSummary) -> None:
    found = [(mounted, mounted.stats()) for mounted in session.steered.values()]
    if session.settings.as_json:
        steered = [
            {
                "source": mounted.source,
                "mount": mounted.point,
                "mode": mounted.mode,
                **{key: None if stats is None else stats[key] for key in ("budget_bytes", "backing_read_bytes")},
            }
            for mounted, stats in found
        ]
        document = {"schema": SCHEMA, "seconds": seconds, "files": session.files, "steered": steered}
        document |= {"not_steered": session.refused, "tokens": tokens.document()}
        with droppable(sys.stderr):
            print(json.dumps(document), file=sys.stderr, flush=True)
        return
    if not session.files:
        say("the command opened no model file: nothing was steered")
        return
    for line in summary_lines(tokens):
        say(line)
    loops = [loop for _, stats in found if stats is not None for file in stats["files"] for loop in file["loops"]]
    if (ratio := page_cache_ratio(tokens, loops)) is not None:
        say(f"with the page cache alone, a token would take about {ratio:.1f} times as long (modelled)")
    for mounted, stats in found:
        if stats is not None:
            read, budget = (format_size(int(stats[key])) for key in ("backing_read_bytes", "budget_bytes"))
            say(f"{mounted.source}: {read} read from storage in {seconds:.0f} s ({mounted.mode}, budget {budget})")


def page_cache_ratio(tokens: TokenSummary, loops: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the modelled time of a token with an LRU page cache, as a multiple of the measured one; None if unknown.

    The time waiting for storage grows with the bytes of a pass, which are measured for the mount and computed for LRU from
    the observed touches; all other time stays.
    """
    known = [loop for loop in loops if not loop["left"] and loop["steered_pass_bytes"] and loop["lru_pass_bytes"]]
    steered, lru = (sum(int(loop[key]) for loop in known) for key in ("steered_pass_bytes", "lru_pass_bytes"))
    if not tokens.tokens or not steered:
        return None
    return 1 + tokens.storage_share * (lru / steered - 1)
