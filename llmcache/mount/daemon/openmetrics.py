"""Metrics of a mount in OpenMetrics (text, version 1.0), and the local HTTP endpoint that serves them: GET /metrics.

Names end in their unit, counters in `_total`; units are base units. Names of files are included only on request, because any
local process can read the endpoint. At most CONNECTIONS are served at a time, for at most DEADLINE_S each; further ones
receive 503. A text is reused for FRESH_S.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, count
from types import SimpleNamespace
from typing import TYPE_CHECKING

from llmcache.errors import MountProblem, UsageError
from llmcache.mount.daemon.connections import ConnectionServer, receive

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from llmcache.mount.stats import FileStats, MountStats, Waits

log = logging.getLogger("llmcache.metrics")

CONNECTIONS = 4
DEADLINE_S = 5.0
FRESH_S = 0.2
REQUEST_BYTES = 8192
REFUSE_S = 0.05
_END = b"\r\n\r\n"  # end of the head of a request or a response
_HINT = "for example 127.0.0.1:9464 or [::1]:9464; port 0 takes any free port"


def labels_of(paths: Sequence[str]) -> list[str]:
    r"""Return a distinct label for each path. Bytes that are not UTF-8 become \xNN."""
    found: dict[str, None] = {}
    for path in paths:
        text = path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        names = chain([text], (f"{text} ({place})" for place in count(2)))
        found[next(name for name in names if name not in found)] = None
    return list(found)


_CLASSES = ("loop", "hot", "sequential", "paged")

# (name without llmcache_ and unit, field of MountStats, help text)
_LEVELS = (
    ("budget", "budget_bytes", "Budget of the mount."),
    ("limit", "limit_bytes", "The limit in force: the budget, or less under memory pressure."),
    ("pinned", "pinned_bytes", "Pinned: locked in the page cache, in mode arena in the memory of the daemon."),
    ("window", "window_bytes", "Resident but not pinned: streamed data, single pages, and data not dropped yet."),
    ("resident", "resident_bytes", "All bytes that count against the budget."),
    ("daemon", "daemon_bytes", "Memory of the daemon and its helpers, without pinned data."),
)
_COUNTERS = (
    ("requested", "requested_bytes", "Bytes of the requests that reached the daemon."),
    ("storage_read", "backing_read_bytes", "Read from storage, in mode inplace also by the kernel for clients."),
    (
        "client_read",
        "client_read_bytes",
        "In mode inplace: read from storage by the kernel for clients, without the daemon.",
    ),
    ("storage_written", "backing_write_bytes", "Written to storage."),
    ("fetched", "stored_bytes", "Fetched and put into the page cache."),
    ("dropped", "invalidated_bytes", "Dropped from the page cache."),
    ("refault", "refault_bytes", "Requested again because the kernel had reclaimed the pages."),
)


def exposition(stats: MountStats, mount: str, *, paths: bool) -> str:
    """Return the OpenMetrics text of a mount's counters; `paths`: with the loops, by file name."""
    # Imported here, because it loads a whole HTTP server.
    from prometheus_client.openmetrics.exposition import generate_latest

    (label,) = labels_of([mount])
    found = [*_mount_metrics(stats, label), *(_loop_metrics(stats, label) if paths else ())]
    registry = SimpleNamespace(collect=lambda: (metric for metric in found if metric.samples))
    return bytes(generate_latest(registry)).decode()  # type: ignore[no-untyped-call]


def _mount_metrics(stats: MountStats, mount: str) -> Iterator[Metric]:
    from prometheus_client import metrics_core as metrics

    info = metrics.InfoMetricFamily("llmcache_mount", "The mode of the mount.", labels=["mount"])
    info.add_metric([mount], {"mode": stats.mode})
    yield info
    levels = [("uptime", "seconds", stats.uptime_s, "Time since the mount began.")]
    levels += [(name, "bytes", getattr(stats, key), text) for name, key, text in _LEVELS]
    if (ratio := stats.hit_ratio) is not None:
        levels.append(("byte_hit", "ratio", ratio, "Share of the bytes read by clients that came from memory."))
    for name, unit, value, text in levels:
        gauge = metrics.GaugeMetricFamily(f"llmcache_{name}", text, labels=["mount"], unit=unit)
        gauge.add_metric([mount], value)
        yield gauge
    counters = [("cpu", "seconds", stats.cpu_s, "Processor time of the daemon and its helpers.")]
    counters += [(name, "bytes", getattr(stats, key), text) for name, key, text in _COUNTERS]
    for name, unit, value, text in counters:
        counter = metrics.CounterMetricFamily(f"llmcache_{name}", text, labels=["mount"], unit=unit)
        counter.add_metric([mount], value)
        yield counter
    text = "Errors of service threads; in mode inplace also lost touches, and refused advice on the memory of clients."
    faults = metrics.CounterMetricFamily("llmcache_faults", text, labels=["mount", "kind"])
    for kind in ("failures", "lost_touches", "refused_advice"):
        if (count := getattr(stats.services, kind)) is not None:
            faults.add_metric([mount, kind], count)
    yield faults
    text = "Read by clients. In steer and inplace the resident part of a loop counts once in each observed pass."
    read = metrics.CounterMetricFamily("llmcache_read", text, labels=["mount", "source"], unit="bytes")
    read.add_metric([mount, "memory"], stats.hit_bytes)
    read.add_metric([mount, "storage"], stats.miss_bytes)
    text = "Prefetched: read in time (useful), awaited by a client (late), or dropped unread (wasted)."
    ahead = metrics.CounterMetricFamily("llmcache_prefetch", text, labels=["mount", "outcome"], unit="bytes")
    for outcome in ("useful", "late", "wasted"):
        ahead.add_metric([mount, outcome], getattr(stats.prefetch, f"{outcome}_bytes"))
    text = "Waits of client requests for extents that the daemon fetched; page faults served by the kernel are not included."
    waits = metrics.HistogramMetricFamily("llmcache_wait", text, labels=["mount", "reason"], unit="seconds")
    for reason in ("late", "demand"):
        counted: Waits = getattr(stats.waits, reason)
        bounds = [*map(str, counted.bounds_s), "+Inf"]
        waits.add_metric([mount, reason], list(zip(bounds, accumulate(counted.counts), strict=True)), counted.sum_s)
    files = metrics.GaugeMetricFamily("llmcache_files", "Known files by class.", labels=["mount", "class"])
    classes = Counter(file.kind for file in stats.files)
    for name in _CLASSES:
        files.add_metric([mount, name], classes[name])
    yield from (read, ahead, waits, files)


# (name without llmcache_loop_ and unit, unit, field of LoopStats, help text)
_LOOP_LEVELS = (
    ("", "bytes", "size_bytes", "Bytes of the loop that clients use."),
    ("pinned", "bytes", "pinned_bytes", "Pinned bytes of the loop."),
    ("unused", "bytes", "unused_bytes", "Bytes that no client has used for some passes: neither pinned nor prefetched."),
    ("left", "", "left", "1 if the loop is left to the kernel, 0 if it is steered."),
    (
        "steered_pass",
        "bytes",
        "steered_pass_bytes",
        "Bytes that steering reads, or would read, in a pass; mean of recent passes.",
    ),
    (
        "lru_pass",
        "bytes",
        "lru_pass_bytes",
        "Bytes that the page cache (LRU) reads, or would read, in a pass; mean of recent passes.",
    ),
    ("period", "seconds", "period_s", "Usual duration of a pass."),
)


def _loop_metrics(stats: MountStats, mount: str) -> list[Metric]:
    """The shards of a model are one loop, listed with the first file."""
    from prometheus_client import metrics_core as metrics

    looping = [file for file in stats.files if file.loops]
    labels = labels_of([_label(file) for file in looping])
    loops = [(label, loop) for file, label in zip(looping, labels, strict=True) for loop in file.loops]
    passes = metrics.CounterMetricFamily("llmcache_loop_passes", "Observed passes.", labels=["mount", "file"])
    for label, loop in loops:
        passes.add_metric([mount, label], loop.passes)
    found: list[Metric] = [passes]
    for name, unit, key, text in _LOOP_LEVELS:
        full_name = f"llmcache_loop_{name}".rstrip("_")
        gauge = metrics.GaugeMetricFamily(full_name, text, labels=["mount", "file"], unit=unit)
        for label, loop in loops:
            if (level := getattr(loop, key)) is not None:
                gauge.add_metric([mount, label], level)
        found.append(gauge)
    return found


def _label(file: FileStats) -> str:
    return file.path if file.name is None or file.name == file.path.lstrip("/") else file.name


def parse_address(text: str) -> tuple[str, int]:
    """Parse "127.0.0.1:9464" or "[::1]:0" to (address, port). UsageError: not a loopback address."""
    host, colon, port = text.rpartition(":")
    if not colon or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise UsageError(f"metrics: '{text}' is not ADDRESS:PORT", _HINT)
    if host == "[::1]":
        return "::1", int(port)
    name = "127.0.0.1" if host == "localhost" else host
    try:
        packed = socket.inet_pton(socket.AF_INET, name)
    except OSError:
        raise UsageError(f"metrics: '{host}' is not a loopback address", _HINT) from None
    if packed[0] != 127:
        hint = "the endpoint has no password: for access from elsewhere, use a proxy with a password or ssh -L"
        raise UsageError(f"metrics: '{host}' is not a loopback address", hint)
    return name, int(port)


class MetricsEndpoint:
    """HTTP endpoint. It listens at once, so that a port in use is an error before the mount."""

    def __init__(self, where: str) -> None:
        """`where`: ADDRESS:PORT. UsageError: not a loopback address; MountProblem: the port is not available."""
        host, port = parse_address(where)
        listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # for a mount right after the last one
        try:
            listening.bind((host, port))
            listening.listen(16)
        except OSError as error:
            listening.close()
            hint = "choose another port, or 0 for any free port"
            raise MountProblem(f"metrics: cannot listen on {where}: {error.strerror}", hint) from error
        bound = listening.getsockname()
        self.address = f"[{bound[0]}]:{bound[1]}" if ":" in host else f"{bound[0]}:{bound[1]}"
        self._server = ConnectionServer(listening, "metrics", CONNECTIONS)
        self._lock = threading.Lock()
        self._made_s = 0.0
        self._text = b""

    def start(self, text: Callable[[], str]) -> None:
        log.info("metrics on http://%s/metrics", self.address)
        self._server.start(lambda connection: self._serve(connection, text), _refuse)

    def close(self) -> None:
        self._server.close()

    def _serve(self, connection: socket.socket, text: Callable[[], str]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        request = receive(connection, _END, REQUEST_BYTES, deadline)
        if not request.endswith(_END):  # the client has closed early, or the request is too long
            return
        answer = self._answer(request, text)
        if request.startswith(b"HEAD "):
            answer = answer.partition(_END)[0] + _END
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        connection.sendall(answer)
        connection.shutdown(socket.SHUT_WR)

    def _answer(self, request: bytes, text: Callable[[], str]) -> bytes:
        words = request.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _response("400 Bad Request", b"this server speaks HTTP/1.1\n")
        if words[0] not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", b"use GET\n", "Allow: GET, HEAD\r\n")
        if words[1].partition(b"?")[0] != b"/metrics":
            return _response("404 Not Found", b"see /metrics\n")
        try:
            from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST

            with self._lock:
                if not self._text or time.monotonic() - self._made_s > FRESH_S:
                    self._text, self._made_s = text().encode(), time.monotonic()
                return _response("200 OK", self._text, content_type=CONTENT_TYPE_LATEST)
        except Exception:  # a bug must not end the mount: report it to the log and to the scraper
            log.exception("cannot collect the metrics")
            return _response("500 Internal Server Error", b"see the log of the mount\n")


def _refuse(connection: socket.socket) -> None:
    """Read the request first, because unread data would discard the response."""
    connection.settimeout(REFUSE_S)
    with contextlib.suppress(TimeoutError):
        connection.recv(REQUEST_BYTES)
    connection.send(_response("503 Service Unavailable", b"too many connections\n"))


def _response(status: str, body: bytes, more: str = "", content_type: str = "text/plain") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n{more}"
    return f"{head}Connection: close\r\n\r\n".encode() + body
