"""Speeds of an *emulated* device, its modelled clock, and its reports."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class CsdProfile:
    """Modelled speeds (bytes/s, ns, bytes). `throttle`: wait for the modelled time.

    `fdm_bytes` limits how many buffers of `buffer_bytes` are between flash and engine.
    """

    name: str
    internal_bytes_per_s: float
    compute_bytes_per_s: float
    link_bytes_per_s: float
    latency_ns: int
    fdm_bytes: int = 1 << 24
    buffer_bytes: int = 1 << 20
    throttle: bool = False

    def __post_init__(self) -> None:
        for name in ("internal_bytes_per_s", "compute_bytes_per_s", "link_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: must be more than 0, not {getattr(self, name)}")
        if self.latency_ns < 0:
            raise ValueError(f"latency_ns: must be at least 0, not {self.latency_ns}")
        if not 0 < self.buffer_bytes <= self.fdm_bytes // 2:
            raise ValueError(
                f"buffer_bytes: must be above 0 and at most half of fdm_bytes ({self.fdm_bytes}), not {self.buffer_bytes}"
            )


PROFILES: dict[str, CsdProfile] = {
    # hillinfer.txt, section 4.2: "4 GB DDR4, and 4 TB NAND Flash, providing a peak bandwidth of approximately 4 GB/s".
    # Not in the paper: PCIe 3.0 x4 carries 3.5 GB/s of data; an engine as fast as its flash; 60 us a command.
    "smartssd": CsdProfile("smartssd", 4e9, 4e9, 3.5e9, 60_000, fdm_bytes=4_000_000_000),
    # No model: the speed of this machine.
    "none": CsdProfile("none", math.inf, math.inf, math.inf, 0),
}


@dataclass
class Report:
    """Totals of commands: counted bytes, `modelled_ns`, and measured `wall_ns`.

    `link_*`: between host and device, with headers; `internal_*`: between flash and the device's memory.
    """

    commands: int = 0
    scored_keys: int = 0
    link_to_host_bytes: int = 0
    link_to_device_bytes: int = 0
    internal_read_bytes: int = 0
    internal_written_bytes: int = 0
    modelled_ns: int = 0
    wall_ns: int = 0

    def add(self, other: Report) -> None:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


class ModelledClock:
    """Modelled time (ns) of one command: its latency, then a pipeline that reads, computes and sends buffers."""

    def __init__(self, profile: CsdProfile) -> None:
        self.profile = profile
        self._read = self._computed = self._sent = float(profile.latency_ns)
        self._in_memory: deque[float] = deque(maxlen=profile.fdm_bytes // profile.buffer_bytes)

    @property
    def now_ns(self) -> int:
        return round(max(self._read, self._computed, self._sent))

    def read(self, size_bytes: int) -> None:
        if len(self._in_memory) == self._in_memory.maxlen:
            self._read = max(self._read, self._in_memory[0])
        self._read += 1e9 * size_bytes / self.profile.internal_bytes_per_s

    def compute(self, size_bytes: int) -> None:
        begin = max(self._computed, self._read)
        self._computed = begin + 1e9 * size_bytes / self.profile.compute_bytes_per_s
        self._in_memory.append(self._computed)

    def send(self, size_bytes: int, computed: bool = True) -> None:
        begin = max(self._sent, self._computed if computed else self._read)
        self._sent = begin + 1e9 * size_bytes / self.profile.link_bytes_per_s

    def receive(self, size_bytes: int) -> None:
        self._sent += 1e9 * size_bytes / self.profile.link_bytes_per_s
        self._read = max(self._read, self._sent)
