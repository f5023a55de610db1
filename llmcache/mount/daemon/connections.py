"""The accept loop of the control socket and of the metrics endpoint. Clients are not trusted."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

RETRY_S = 0.1
_CHUNK = 1 << 16


class ConnectionServer:
    """Serves each connection of a listening socket in its own thread, from `start` until `close`."""

    def __init__(self, listening: socket.socket, name: str, most: int) -> None:
        """`name`: of the threads; `most`: connections at a time."""
        self._socket, self._name = listening, name
        self._free = threading.BoundedSemaphore(most)
        self._closed = False

    def start(self, serve: Callable[[socket.socket], None], refuse: Callable[[socket.socket], None] | None = None) -> None:
        """Call `serve` for each connection; OSErrors of it end the connection.

        Connections beyond the limit wait in the queue of the socket, or, with `refuse`, are passed to it.
        """
        threading.Thread(target=self._accept, args=(serve, refuse), name=self._name, daemon=True).start()

    def _accept(self, serve: Callable[[socket.socket], None], refuse: Callable[[socket.socket], None] | None) -> None:
        while not self._closed:
            is_free = refuse is None and self._free.acquire()
            connection = None
            try:
                connection, _ = self._socket.accept()
                is_free = is_free or self._free.acquire(blocking=False)
                if is_free:
                    thread = threading.Thread(target=self._serve, args=(connection, serve), name=f"{self._name}-request")
                    thread.daemon = True
                    thread.start()
                    continue
            except (OSError, RuntimeError):  # closed, the client has disconnected, or no descriptor or thread is available
                time.sleep(0 if self._closed else RETRY_S)
            if is_free:
                self._free.release()
            if connection is not None:
                with contextlib.suppress(OSError), connection:
                    if refuse is not None:
                        refuse(connection)

    def _serve(self, connection: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        try:
            with contextlib.suppress(OSError), connection:
                serve(connection)
        finally:
            self._free.release()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):  # it fails, because the socket is not connected, but wakes the accepting thread
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def receive(connection: socket.socket, end: bytes, most_bytes: int, deadline: float) -> bytes:
    """Return the data up to and including `end`; less if the client closes early, more than `most_bytes` if it is longer.

    TimeoutError: the request is not complete by `deadline` (time.monotonic).
    """
    received = bytearray()
    while (place := received.find(end)) < 0 and len(received) <= most_bytes:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        piece = connection.recv(_CHUNK)
        if not piece:
            break
        if time.monotonic() > deadline:
            raise TimeoutError
        received += piece
    return bytes(received if place < 0 else received[: place + len(end)])
