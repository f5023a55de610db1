"""The metrics endpoint of a daemon: GET /metrics over HTTP, for this machine only.

One thread accepts; each connection has a thread of its own, at most CONNECTIONS at a time, DEADLINE_S long: more are
answered 503 at once. The text is made before anything is sent, and no lock is held while a scraper is waited for, so
one that hangs costs a thread that sleeps. A text is given to all who ask within FRESH_S: whatever asks, and however
often, the engine is asked that seldom.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

from llmcache.errors import MountProblem, UsageError
from llmcache.fs.daemon.openmetrics import CONTENT_TYPE

log = logging.getLogger("llmcache.metrics")
CONNECTIONS = 4
DEADLINE_S = 5.0
FRESH_S = 0.2
REQUEST_BYTES = 8192
RETRY_S = 0.1
REFUSE_S = 0.05
_END = b"\r\n\r\n"  # of a request's head, and an answer's
_HINT = "write 127.0.0.1:9464, [::1]:9464, or port 0 for any that is free"


def parse_address(text: str) -> tuple[str, int]:
    """(address, port) meant by "127.0.0.1:9464" or "[::1]:0". UsageError, naming the setting, for all but loopback."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"metrics: '{text}' is not ADDRESS:PORT", _HINT)
    if host == "[::1]":
        return "::1", int(port)
    name = "127.0.0.1" if host == "localhost" else host
    try:
        packed = socket.inet_pton(socket.AF_INET, name)
    except OSError:
        raise UsageError(f"metrics: '{host}' is not a loopback address", _HINT) from None
    if packed[0] != 127:
        hint = "who can reach it can read it: let a proxy with a password, or ssh -L, reach 127.0.0.1"
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
            hint = "name another port, or 0 for any that is free"
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
            if not self._begin(connection, text):
                _refuse(connection)

    def _begin(self, connection: socket.socket, text: Callable[[], str]) -> bool:
        """Serves it in a thread of its own; False if there is no place, or no thread, for it."""
        if not self._free.acquire(blocking=False):
            return False
        try:
            threading.Thread(target=self._serve, args=(connection, text), name="metrics-scrape", daemon=True).start()
        except RuntimeError:  # the process, or the machine, is out of threads
            self._free.release()
            return False
        return True

    def _serve(self, connection: socket.socket, text: Callable[[], str]) -> None:
        end = time.monotonic() + DEADLINE_S
        try:
            with contextlib.suppress(OSError), connection:
                request = _read_head(connection, end)
                if request is not None:
                    _send(connection, self._answer(request, text), end)
        finally:
            self._free.release()

    def _answer(self, request: bytes, text: Callable[[], str]) -> bytes:
        """The whole answer; to HEAD its head."""
        whole = self._whole_answer(request, text)
        return whole.partition(_END)[0] + _END if request.startswith(b"HEAD ") else whole

    def _whole_answer(self, request: bytes, text: Callable[[], str]) -> bytes:
        words = request.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _response("400 Bad Request", b"this speaks HTTP/1.1\n")
        method, target = words[0], words[1].partition(b"?")[0]
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", b"only GET\n", "Allow: GET, HEAD\r\n")
        if target != b"/metrics":
            return _response("404 Not Found", b"see /metrics\n")
        try:
            body = self._fresh(text)
        except Exception:  # a bug, told to the log and to the scraper; the mount goes on
            log.exception("metrics cannot be made")
            return _response("500 Internal Server Error", b"see the log of the mount\n")
        return _response("200 OK", body, content_type=CONTENT_TYPE)

    def _fresh(self, text: Callable[[], str]) -> bytes:
        with self._lock:
            if not self._text or time.monotonic() - self._made_s > FRESH_S:
                self._text, self._made_s = text().encode(), time.monotonic()
            return self._text


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


def _send(connection: socket.socket, data: bytes, end: float) -> None:
    """Sends it all, or as much as goes until `end`."""
    connection.settimeout(max(0.001, end - time.monotonic()))
    connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)


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
