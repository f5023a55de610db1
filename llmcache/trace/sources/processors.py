"""Which processors are on: an event that processes inherit has to be opened on each of them."""

from __future__ import annotations


def online() -> list[int]:
    """Numbers of the processors that are on."""
    found: list[int] = []
    with open("/sys/devices/system/cpu/online") as file:
        for part in file.read().strip().split(","):
            low, _, high = part.partition("-")
            found += range(int(low), int(high or low) + 1)
    return found
