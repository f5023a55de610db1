"""The daemon's end of the control socket: requests of its user and of root, each in a thread of its own.

No client is trusted: lines, the time to send one and the number of connections are limited, and whatever is no request
is refused as such.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from llmcache.errors import LlmcacheError, UsageError
from llmcache.fs.client.control import Files, Progress, making, peer

log = logging.getLogger("llmcache.control")
_LONGEST_REQUEST = 1 << 20
_MOST_CONNECTIONS = 32
_REQUEST_S = 10.0  # for a client to send its line
_REPLY_S = 10.0  # for a client to take what it is told
_RETRY_S = 0.1
_CHUNK = 1 << 16


class ClientGone(Exception):
    """Raised in an operation that tells progress: nobody waits for it any more (Ctrl-C)."""


class ControlServer:
    """Answers requests in threads of their own until closed.

    `answer(request, tell)` may raise; its message is the reply then. `tell` sends progress, or raises ClientGone.
    """

    def __init__(self, found: Files, answer: Callable[[dict[str, Any], Callable[[Progress], None]], Progress]) -> None:
        self._answer = answer
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        old = os.umask(0o177)
        try:
            with making(found.socket):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(found.socket)
                self._socket.bind(found.socket)
        finally:
            os.umask(old)
        self._socket.listen(16)
        self._closed = False
        self._places = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        threading.Thread(target=self._accept, name="control", daemon=True).start()

    def _accept(self) -> None:
        while not self._closed:
            # The others wait in the queue of the socket: their clients' patience is their limit.
            self._places.acquire()
            connection = None
            try:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(connection,), name="control-request", daemon=True).start()
            except (OSError, RuntimeError):  # closed, or no descriptor or thread is left for now
                if connection is not None:
                    connection.close()
                self._places.release()
                time.sleep(0 if self._closed else _RETRY_S)

    def _serve(self, connection: socket.socket) -> None:
        def tell(progress: Progress) -> None:
            try:
                connection.sendall(json.dumps({"progress": progress}).encode() + b"\n")
            except OSError as error:
                raise ClientGone from error

        try:
            with contextlib.suppress(OSError, ClientGone), connection:
                if peer(connection) not in (0, os.geteuid()):
                    return
                line = _request_line(connection)
                connection.settimeout(_REPLY_S)
                if line:
                    connection.sendall(json.dumps(self._reply(line, tell)).encode() + b"\n")
        finally:
            self._places.release()

    def _reply(self, line: bytes, tell: Callable[[Progress], None]) -> dict[str, Any]:
        try:
            return self._answer(_request(line), tell)
        except ClientGone:
            raise
        except LlmcacheError as error:
            return {"error": error.message, "hint": error.hint, "exit_code": error.exit_code}
        except Exception as error:  # reported to the client and logged
            log.exception("control request failed")
            return {"error": f"{type(error).__name__}: {error}", "hint": None}

    def close(self) -> None:
        """Stop listening; requests in progress are finished by their threads."""
        self._closed = True
        self._socket.close()


def _request_line(connection: socket.socket) -> bytes:
    """The line that a client sends, with its end; without it if the client ends it there, or it is too long.

    TimeoutError for a client that takes too long over it, however many bytes it sends meanwhile.
    """
    line, end = bytearray(), time.monotonic() + _REQUEST_S
    while b"\n" not in line[-_CHUNK:] and len(line) <= _LONGEST_REQUEST:
        connection.settimeout(max(end - time.monotonic(), 1e-3))
        piece = connection.recv(_CHUNK)
        if not piece:
            break
        line += piece
    return bytes(line.partition(b"\n")[0] + b"\n" if b"\n" in line else line)


def _request(line: bytes) -> dict[str, Any]:
    """What a client asks for. UsageError if it is no request."""
    hint = 'a request is one line of JSON: {"op": "stats"}'
    if len(line) > _LONGEST_REQUEST:
        raise UsageError(f"request: longer than {_LONGEST_REQUEST} bytes", hint)
    if not line.endswith(b"\n"):
        raise UsageError("request: its line does not end", hint)
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise UsageError("request: not JSON", hint) from None
    if not isinstance(found, dict):
        raise UsageError("request: not a JSON object", hint)
    return found
