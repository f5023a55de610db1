"""What a mount tells in OpenMetrics (text, version 1.0), and the endpoint that serves it on this machine: GET /metrics.

Names end in their unit, counters in `_total`; units are base units (bytes, seconds, ratio). Names of files are told only
where they are asked for: whoever can reach the endpoint can read it.

One thread accepts; each connection has a thread of its own, at most CONNECTIONS at a time, DEADLINE_S long: more are
answered 503 at once. The text is made before anything is sent, and no lock is held while a scraper is waited for, so
one that hangs costs a thread that sleeps. A text is given to all who ask within FRESH_S: whatever asks, and however
often, the engine is asked that seldom.
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
from typing import TYPE_CHECKING, Any

from llmcache.errors import MountProblem, UsageError

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

log = logging.getLogger("llmcache.metrics")

CONNECTIONS = 4
DEADLINE_S = 5.0
FRESH_S = 0.2
REQUEST_BYTES = 8192
RETRY_S = 0.1
REFUSE_S = 0.05
_END = b"\r\n\r\n"  # of a request's head, and an answer's
_HINT = "for example 127.0.0.1:9464 or [::1]:9464; port 0 takes any free port"


def labels_of(paths: Sequence[str]) -> list[str]:
    """A label for each of `paths`, distinct ones for distinct paths.

    A label has to be UTF-8, a path need not be: what is none is written as \\xNN.
    """
    found: dict[str, None] = {}
    for path in paths:
        text = path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        names = chain([text], (f"{text} ({place})" for place in count(2)))
        found[next(name for name in names if name not in found)] = None
    return list(found)


_CLASSES = ("loop", "hot", "sequential", "paged")

# (name without llmcache_ and unit, key of the counters, what it is)
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


def exposition(stats: dict[str, Any], mount: str, *, paths: bool) -> str:
    """Returns the text for the counters of the mount on a path; `paths`: with the loops by name of their file."""
    # Loads a whole HTTP server: only where it is asked for.
    from prometheus_client.openmetrics.exposition import generate_latest

    (label,) = labels_of([mount])
    found = [*_mount_metrics(stats, label), *(_loop_metrics(stats, label) if paths else ())]
    registry = SimpleNamespace(collect=lambda: (metric for metric in found if metric.samples))
    return bytes(generate_latest(registry)).decode()  # type: ignore[no-untyped-call]


def _mount_metrics(stats: dict[str, Any], mount: str) -> Iterator[Metric]:
    from prometheus_client import metrics_core as metrics

    info = metrics.InfoMetricFamily("llmcache_mount", "The mode of the mount.", labels=["mount"])
    info.add_metric([mount], {"mode": stats["mode"]})
    yield info
    levels = [("uptime", "seconds", stats["uptime_s"], "Time since the mount began.")]
    levels += [(name, "bytes", stats[key], text) for name, key, text in _LEVELS]
    if stats["hit_bytes"] or (stats["read_bytes"] and stats["mode"] == "arena"):  # elsewhere hits may not be observed
        ratio = stats["hit_bytes"] / stats["read_bytes"]
        levels.append(("byte_hit", "ratio", ratio, "Share of the bytes read by clients that came from memory."))
    for name, unit, value, text in levels:
        gauge = metrics.GaugeMetricFamily(f"llmcache_{name}", text, labels=["mount"], unit=unit)
        gauge.add_metric([mount], value)
        yield gauge
    counters = [("cpu", "seconds", stats["cpu_s"], "Processor time of the daemon and its helpers.")]
    counters += [(name, "bytes", stats[key], text) for name, key, text in _COUNTERS]
    for name, unit, value, text in counters:
        counter = metrics.CounterMetricFamily(f"llmcache_{name}", text, labels=["mount"], unit=unit)
        counter.add_metric([mount], value)
        yield counter
    text = "Errors of service threads; in mode inplace also lost touches, and refused advice on the memory of clients."
    faults = metrics.CounterMetricFamily("llmcache_faults", text, labels=["mount", "kind"])
    for kind in ("failures", "lost_touches", "refused_advice"):
        if kind in (told := stats.get("services", {})):
            faults.add_metric([mount, kind], told[kind])
    yield faults
    text = "Read by clients. In steer and inplace the resident part of a loop counts once in each observed pass."
    read = metrics.CounterMetricFamily("llmcache_read", text, labels=["mount", "source"], unit="bytes")
    read.add_metric([mount, "memory"], stats["hit_bytes"])
    read.add_metric([mount, "storage"], stats["miss_bytes"])
    text = "Prefetched: read in time (useful), awaited by a client (late), or dropped unread (wasted)."
    ahead = metrics.CounterMetricFamily("llmcache_prefetch", text, labels=["mount", "outcome"], unit="bytes")
    for outcome in ("useful", "late", "wasted"):
        ahead.add_metric([mount, outcome], stats["prefetch"][f"{outcome}_bytes"])
    text = "Waits of client requests for extents that the daemon fetched; page faults served by the kernel are not included."
    waits = metrics.HistogramMetricFamily("llmcache_wait", text, labels=["mount", "reason"], unit="seconds")
    for reason in ("late", "demand"):
        told = stats["waits"][reason]
        bounds = [*map(str, told["bounds_s"]), "+Inf"]
        waits.add_metric([mount, reason], list(zip(bounds, accumulate(told["counts"]), strict=True)), told["sum_s"])
    files = metrics.GaugeMetricFamily("llmcache_files", "Known files by class.", labels=["mount", "class"])
    classes = Counter(file["class"] for file in stats["files"])
    for name in _CLASSES:
        files.add_metric([mount, name], classes[name])
    yield from (read, ahead, waits, files)


# (name without llmcache_loop_ and unit, unit, key of a loop, what it is)
_LOOP_LEVELS = (
    ("", "bytes", "bytes", "Bytes of the loop that clients use."),
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


def _loop_metrics(stats: dict[str, Any], mount: str) -> list[Metric]:
    """Return one value of each metric for each file that loops; the shards of a model count for its first file.

    A value that is not known yet is left out.
    """
    from prometheus_client import metrics_core as metrics

    looping = [file for file in stats["files"] if file["loops"]]
    labels = labels_of([_label(file["path"], file.get("name")) for file in looping])
    loops = [(label, loop) for file, label in zip(looping, labels, strict=True) for loop in file["loops"]]
    passes = metrics.CounterMetricFamily("llmcache_loop_passes", "Observed passes.", labels=["mount", "file"])
    for label, loop in loops:
        passes.add_metric([mount, label], loop["passes"])
    found: list[Metric] = [passes]
    for name, unit, key, text in _LOOP_LEVELS:
        full_name = f"llmcache_loop_{name}".rstrip("_")
        gauge = metrics.GaugeMetricFamily(full_name, text, labels=["mount", "file"], unit=unit)
        for label, loop in loops:
            if loop.get(key) is not None:  # a daemon of version 1.0 does not send all keys
                gauge.add_metric([mount, label], loop[key])
        found.append(gauge)
    return found


def _label(path: str, name: str | None) -> str:
    return path if name is None or name == path.lstrip("/") else name


def parse_address(text: str) -> tuple[str, int]:
    """(address, port) meant by "127.0.0.1:9464" or "[::1]:0". UsageError, naming the setting, for all but loopback."""
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
    """Listens from the beginning, so that a port in use is told before there is a mount; serves from `start` on."""

    def __init__(self, where: str) -> None:
        """UsageError: no loopback address; MountProblem: the port cannot be had."""
        host, port = parse_address(where)
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a mount follows the last one at once
        try:
            self._socket.bind((host, port))
            self._socket.listen(16)
        except OSError as error:
            self._socket.close()
            hint = "choose another port, or 0 for any free port"
            raise MountProblem(f"metrics: cannot listen on {where}: {error.strerror}", hint) from error
        bound = self._socket.getsockname()
        self.address = f"[{bound[0]}]:{bound[1]}" if ":" in host else f"{bound[0]}:{bound[1]}"
        self._free = threading.BoundedSemaphore(CONNECTIONS)
        self._lock = threading.Lock()
        self._closing = False
        self._made_s = 0.0
        self._text = b""

    def start(self, text: Callable[[], str]) -> None:
        """Begins to answer with what `text` returns."""
        log.info("metrics on http://%s/metrics", self.address)
        threading.Thread(target=self._accept, args=(text,), name="metrics", daemon=True).start()

    def close(self) -> None:
        """Stops listening; connections end by themselves."""
        self._closing = True
        with contextlib.suppress(OSError):  # not connected; but it wakes the thread in accept
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self, text: Callable[[], str]) -> None:
        while not self._closing:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if not self._closing:
                    time.sleep(RETRY_S)  # the client has gone, or the process is out of descriptors
                continue
            if not self._free.acquire(blocking=False):
                _refuse(connection)
                continue
            try:
                threading.Thread(target=self._serve, args=(connection, text), name="metrics-scrape", daemon=True).start()
            except RuntimeError:  # the process, or the machine, is out of threads
                self._free.release()
                _refuse(connection)

    def _serve(self, connection: socket.socket, text: Callable[[], str]) -> None:
        end = time.monotonic() + DEADLINE_S
        try:
            with contextlib.suppress(OSError), connection:
                request = _read_head(connection, end)
                if request is not None:
                    answer = self._answer(request, text)
                    if request.startswith(b"HEAD "):
                        answer = answer.partition(_END)[0] + _END
                    connection.settimeout(max(0.001, end - time.monotonic()))
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)
        finally:
            self._free.release()

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
        except Exception:  # a bug, told to the log and to the scraper; the mount goes on
            log.exception("cannot collect the metrics")
            return _response("500 Internal Server Error", b"see the log of the mount\n")


def _read_head(connection: socket.socket, end: float) -> bytes | None:
    """The request up to its empty line; None if it does not come in time, or is too long."""
    head = b""
    while _END not in head:
        connection.settimeout(max(0.001, end - time.monotonic()))
        part = connection.recv(REQUEST_BYTES)
        head += part
        if not part or len(head) > REQUEST_BYTES or time.monotonic() > end:
            return None
    return head


def _refuse(connection: socket.socket) -> None:
    """Says that there is no place, once the request is there: closed with it unread, a connection loses the answer."""
    with contextlib.suppress(OSError), connection:
        connection.settimeout(REFUSE_S)
        with contextlib.suppress(TimeoutError):
            connection.recv(REQUEST_BYTES)
        connection.send(_response("503 Service Unavailable", b"too many connections\n"))


def _response(status: str, body: bytes, more: str = "", content_type: str = "text/plain") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n{more}"
    return f"{head}Connection: close\r\n\r\n".encode() + body
