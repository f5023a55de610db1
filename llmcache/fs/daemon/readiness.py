"""Tells systemd (Type=notify) what a daemon does; nothing where nobody asked to be told."""

from __future__ import annotations

import os
import socket


def notify(state: str) -> bool:
    """Sends `state` ("READY=1\\nSTATUS=…") to the socket in $NOTIFY_SOCKET; False if there is none, or nobody listens."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return False
    if address.startswith("@"):  # a name without a file
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
        try:
            connection.sendto(state.encode(), address)
        except OSError:
            return False
    return True
