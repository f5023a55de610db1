"""The numbers of the buffer-cache paper (io_caching), each with the section it comes from.

Base units: bytes, nanoseconds, bytes per second. MB is 10**6 bytes, as in the paper's own example (section 4.2).
"""

from __future__ import annotations

from dataclasses import dataclass

from llmcache.units import BLOCK_BYTES

_MB = 10**6
_GB = 10**9
_US = 10**3
_MS = 10**6


@dataclass(frozen=True)
class DeviceClass:
    """A kind of device: how much of its memory may cache a model (bytes), and how fast its storage is (bytes/s).

    `cache_bytes` holds loop and hot set together, and is a range from `least_cache_bytes` where the paper gives one.
    Source: io_caching section 4.2.
    """

    name: str
    title: str
    least_cache_bytes: int
    cache_bytes: int
    bandwidth: int
    hot_bytes: int
    storage: str


WATCH = DeviceClass("watch", "smartwatch", 64 * _MB, 64 * _MB, 100 * _MB, 4 * _MB, "eMMC 5.x under thermal limits")
# Section 4.2 calls 256-512 MB the "loop-dedicated cache size S": the hot set stands beside it, hence 0 here.
PHONE = DeviceClass("phone", "smartphone", 256 * _MB, 512 * _MB, _GB, 0, "UFS 4.0")
DEVICES: dict[str, DeviceClass] = {device.name: device for device in (WATCH, PHONE)}
"""Device classes by name (section 4.2)."""


@dataclass(frozen=True)
class PaperConstants:
    """Defaults of the sizing and latency models. Source: io_caching, the section beside each."""

    block_bytes: int = BLOCK_BYTES  # 3, 4.1: "4 KB, consistent with the page size"
    period_ns: int = 100 * _MS  # 4.1: T = 0.1 s, the allowed fetch delay (8-12 tokens/s: 80-125 ms per token)
    period_changes: tuple[float, ...] = (-0.3, -0.2, 0.0, 0.2, 0.3)  # 4.1: "moderate variations (±20-30%)" of T
    hot_bytes: int = 4 * _MB  # 4.2: tokenizer and index files, "less than 4 MB"
    setup_ns: int = 50 * _US  # 4.1: set-up latency of a storage access
    storage_bandwidths: tuple[int, ...] = (100 * _MB, 200 * _MB, 500 * _MB, 1000 * _MB)  # 4.1: sequential reads
    gpu_bandwidth: int = 20 * _GB  # 4.1: host to GPU
    gpu_setup_ns: int = 2 * _US  # 4.1: base latency of a host-to-GPU transfer
    request_bytes: int = 1024  # 4.1: "request granularity is 1 KB"; accounting and storage go by blocks


PAPER = PaperConstants()
"""The paper's values, as used wherever nothing else is asked for."""
