"""The lines of a strace log: processes, times, calls that were interrupted by those of others, arguments and results."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from llmcache.errors import DataError

LONGEST_LINE = 1 << 24  # -s shows data, by default 32 bytes of it
CALL_NS = 1_000  # between two calls of a log without times
_SECOND_NS = 10**9
_DAY_NS = 86_400 * _SECOND_NS
_EPOCH_NS = 10**8 * _SECOND_NS  # numbers below (the year 1973) are differences: -r and not -ttt
_STEP_NS = _SECOND_NS  # how far a clock that is being adjusted may go back

# "1234 " (-f -o FILE) or "[pid 1234] " (-f on the terminal), then "12:34:56.789012 ", "1700000000.123456 " or none;
# with both -r and -t, the difference follows in brackets.
_PREFIX = re.compile(
    r"\s*(?:\[pid\s+(\d+)\]\s*|(\d+)\s+)?(?:(\d\d):(\d\d):(\d\d)(?:\.(\d+))?\s+|(\d+)\.(\d+)\s+)?(?:\(\+\s*[\d.]+\)\s*)?"
)
_CALL = re.compile(r"(\w+)\((.*)\)\s+= (-?\d+|0x[\da-f]+)(?:<((?:[^<>\\]|\\.)*)>)?")
_UNKNOWN_RESULT = re.compile(r"\w+\(.*\)\s+= \?")
_UNFINISHED = re.compile(r"(\w+\(.*) <unfinished \.\.\.>$")
_RESUMED = re.compile(r"<\.\.\. (\w+) resumed>\s?")
_ENDED = re.compile(r"\+\+\+ (?:exited with|killed by) ")
_SEPARATOR = re.compile(r'"(?:[^"\\]|\\.)*"|(?<=\w)<(?:[^<>\\]|\\.)*>|[\[{(]|[\]})]|, ')
_ESCAPE = re.compile(rb"\\([0-7]{1,3}|x[\da-fA-F]{2}|.)")
_ESCAPED = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"v": b"\v", b"f": b"\f", b"a": b"\a", b"b": b"\b"}


@dataclass(frozen=True)
class SystemCall:
    """A call that returned. `result_path` is what -y tells about a descriptor that was returned."""

    tid: int
    t_ns: int
    name: str
    args: str
    result: int
    result_path: str | None


@dataclass(frozen=True)
class UnfinishedCall:
    """A call that has not returned yet, while others went on: a child may run before the clone of its parent returns."""

    tid: int
    name: str
    args: str


@dataclass(frozen=True)
class TaskExit:
    """The end of a process or thread."""

    tid: int


class StraceLog:
    """Takes lines and yields what happened in them."""

    def __init__(self) -> None:
        self.calls = 0
        self.other_lines = 0
        self.clock = LogClock()
        self._begun: dict[int, str] = {}

    def events(self, lines: Iterable[str]) -> Iterator[SystemCall | UnfinishedCall | TaskExit]:
        """Yields calls, and the ends of processes, in the order of the log; DataError if its times go back."""
        for number, line in enumerate(lines, 1):
            if len(line) > LONGEST_LINE:
                raise DataError(
                    f"rows: line {number} has more than {LONGEST_LINE} characters", "not a log of strace, or damaged"
                )
            try:
                event = self._event(line.rstrip("\n"), number)
            except ValueError as error:  # Python makes no number of thousands of digits
                raise DataError(f"rows: line {number} has a number of too many digits", "the log is damaged") from error
            if isinstance(event, SystemCall):
                self.calls += 1
            if event is not None:
                yield event

    def _event(self, line: str, number: int) -> SystemCall | UnfinishedCall | TaskExit | None:
        prefix = _PREFIX.match(line)
        assert prefix is not None  # every part of it is optional
        tid, text = int(prefix[1] or prefix[2] or 0), line[prefix.end() :]
        if text.endswith("<unfinished ...>") and (begun := _UNFINISHED.match(text)):
            self._begun[tid] = begun[1]
            self.clock.at(prefix, number)
            name, _, args = begun[1].partition("(")
            return UnfinishedCall(tid, name, args)
        if resumed := _RESUMED.match(text):
            text = self._begun.pop(tid, "") + text[resumed.end() :]
        if call := _CALL.match(text):
            result = int(call[3], 16 if "x" in call[3] else 10)  # a damaged line may begin it with zeros
            return SystemCall(tid, self.clock.at(prefix, number), call[1], call[2], result, call[4])
        if _ENDED.match(text):
            return TaskExit(tid)
        if not text.startswith(("---", "+++")) and not _UNKNOWN_RESULT.match(text):
            self.other_lines += 1
        return None


class LogClock:
    """Times of lines, whichever option of strace wrote them, as nanoseconds that do not go back."""

    def __init__(self) -> None:
        self.kind = "none: calls are 1 us apart"
        self.steps_back = 0
        self._now_ns = 0
        self._days = 0
        self._has_begun = False

    def at(self, prefix: re.Match[str], number: int) -> int:
        """Returns the time of line `number`; DataError if it is before that of the line above by more than a second."""
        t_ns = self._told(prefix)
        if self._has_begun and t_ns < self._now_ns:
            if self._now_ns - t_ns > _STEP_NS:
                hint = "a log of one run of strace is needed, not several put together"
                raise DataError(f"time: line {number} is {(self._now_ns - t_ns) / 1e9:.6f} s before the one above", hint)
            self.steps_back += 1
            t_ns = self._now_ns
        self._has_begun, self._now_ns = True, t_ns
        return t_ns

    def _told(self, prefix: re.Match[str]) -> int:
        if prefix[7]:
            t_ns = int(prefix[7]) * _SECOND_NS + _fraction_ns(prefix[8])
            self.kind = "seconds since 1970 (-ttt)" if t_ns >= _EPOCH_NS else "seconds from the first call (-r)"
            return t_ns if t_ns >= _EPOCH_NS else self._now_ns + t_ns
        if prefix[3]:
            self.kind = "time of day (-t)"
            hours, minutes, seconds = int(prefix[3]), int(prefix[4]), int(prefix[5])
            t_ns = (hours * 3600 + minutes * 60 + seconds) * _SECOND_NS + _fraction_ns(prefix[6]) + self._days * _DAY_NS
            if self._has_begun and self._now_ns - t_ns > _DAY_NS // 2:
                self._days += 1
                t_ns += _DAY_NS
            return t_ns
        return self._now_ns + CALL_NS if self._has_begun else 0


def _fraction_ns(digits: str | None) -> int:
    return int((digits or "0").ljust(9, "0")[:9])


def split(args: str) -> list[str]:
    """Returns the arguments of a call, each as it stands in the log."""
    parts, start, depth = [], 0, 0
    for found in _SEPARATOR.finditer(args):
        token = found[0]
        if token in "[{(":
            depth += 1
        elif token in "]})":
            depth -= 1
        elif token == ", " and depth == 0:
            parts.append(args[start : found.start()])
            start = found.end()
    parts.append(args[start:])
    return parts


def unquoted(text: str) -> str:
    """Returns the string that strace shows as `text`, with or without quotes; bytes that are not UTF-8 are kept."""
    quoted = os.fsencode(text.removesuffix("...").removeprefix('"').removesuffix('"'))
    return os.fsdecode(_ESCAPE.sub(_unescaped, quoted))


def _unescaped(found: re.Match[bytes]) -> bytes:
    code = found[1]
    if code[:1] in b"01234567":
        return bytes([int(code, 8) & 255])
    if code[:1] == b"x" and len(code) == 3:
        return bytes([int(code[1:], 16)])
    return _ESCAPED.get(code, code)
