"""Cache size by formula (1), for a loop of N bytes, a cache of S for it, storage of bandwidth BW, and a time T per pass.

A pass misses N - S bytes, which storage delivers in (N - S) / BW while the computation takes T: there is no stall if
that is at most T. All results are *modelled*. Base units: bytes, nanoseconds, bytes per second; exact integers. Source:
io_caching section 4.1, formula (1), and section 4.2 for the inverse.

Differs from the paper: formula (1) is printed as S >= max{0, floor(N BW x T)}, without the minus sign between N and BW
that the text and the example of section 4.2 require. Its floor would leave a part of a block missing (N = 10 and BW*T =
2.5 blocks: with S = 7 three blocks are missed, but only 2.5 are delivered in time). Here S = max(0, ceil(N - BW*T)).

An MoE model (`mixture.py`) is no loop: S is the cache with which a token is expected to miss BW*T bytes, and N is all
bytes.

The numbers of the paper are in `PAPER` and `DEVICES`, each with its section; MB is 10**6 bytes, as in its example
(4.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from llmcache.model.moe import ModelBytes, MoeBytes, Weights
from llmcache.units import BLOCK_BYTES

_MB = 10**6
_GB = 10**9
_US = 10**3
_MS = 10**6


@dataclass(frozen=True)
class DeviceClass:
    """A kind of device: the part of its memory that may cache a model (bytes), and the speed of its storage (bytes/s).

    `cache_bytes` is for loop and hot set together, and is a range from `least_cache_bytes` if the paper gives one.
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
# Section 4.2 calls 256-512 MB the "loop-dedicated cache size S", without the hot set, hence 0 here.
PHONE = DeviceClass("phone", "smartphone", 256 * _MB, 512 * _MB, _GB, 0, "UFS 4.0")
DEVICES: dict[str, DeviceClass] = {device.name: device for device in (WATCH, PHONE)}  # device classes by name (section 4.2)


@dataclass(frozen=True)
class PaperConstants:
    """Defaults of the sizing and latency models. Source: io_caching, with the section at each value."""

    block_bytes: int = BLOCK_BYTES  # 3, 4.1: "4 KB, consistent with the page size"
    period_ns: int = 100 * _MS  # 4.1: T = 0.1 s, the allowed fetch delay (8-12 tokens/s: 80-125 ms per token)
    period_changes: tuple[float, ...] = (-0.3, -0.2, 0.0, 0.2, 0.3)  # 4.1: "moderate variations (±20-30%)" of T
    hot_bytes: int = 4 * _MB  # 4.2: tokenizer and index files, "less than 4 MB"
    setup_ns: int = 50 * _US  # 4.1: setup latency of a storage access
    storage_bandwidths: tuple[int, ...] = (100 * _MB, 200 * _MB, 500 * _MB, 1000 * _MB)  # 4.1: sequential reads
    gpu_bandwidth: int = 20 * _GB  # 4.1: host to GPU
    gpu_setup_ns: int = 2 * _US  # 4.1: base latency of a host-to-GPU transfer
    request_bytes: int = 1024  # 4.1: "request granularity is 1 KB"; accounting and storage use blocks


PAPER = PaperConstants()  # the paper's values, used as defaults everywhere


SECOND_NS = 10**9


@dataclass(frozen=True)
class SizingParameters:
    """Parameters of the formula besides the loop: bandwidth (bytes/s), T (ns), and the hot set (bytes), cached whole."""

    bandwidth: int
    period_ns: int = PAPER.period_ns
    hot_bytes: int = PAPER.hot_bytes

    @property
    def staged_bytes(self) -> int:
        """BW * T: the bytes that storage delivers during a pass, rounded down."""
        return self.bandwidth * self.period_ns // SECOND_NS

    def scaled(self, change: float) -> SizingParameters:
        """Return the parameters with T changed by the share `change` (-0.3: 30 % shorter)."""
        return SizingParameters(self.bandwidth, max(1, round(self.period_ns * (1 + change))), self.hot_bytes)


def blocks_needed(loop_blocks: int, staged_blocks: float | Fraction) -> int:
    """Return S of formula (1) in blocks: max(0, ceil(N - BW*T)) for a loop of N blocks, BW*T of which arrive in time."""
    return max(0, math.ceil(loop_blocks - staged_blocks))


@dataclass(frozen=True)
class Need:
    """The smallest cache without stalls: `loop_cache_bytes` for the loop, `cache_bytes` with the hot set.

    `loop_cache_blocks` counts blocks of 4 KiB; a loop's last block may be partly filled.
    """

    loop_cache_bytes: int
    loop_cache_blocks: int
    cache_bytes: int


def size_of(loop: Weights) -> int:
    """Return all bytes of `loop`."""
    return loop if isinstance(loop, int) else loop.total_bytes


def need(loop: Weights, setting: SizingParameters) -> Need:
    """Return the smallest cache with which `loop` runs without stalls. Source: io_caching formula (1)."""
    if isinstance(loop, MoeBytes):
        kept = loop.kept_bytes(setting.staged_bytes)
        return Need(kept, -(-kept // BLOCK_BYTES), kept + setting.hot_bytes)
    staged_blocks = Fraction(setting.bandwidth * setting.period_ns, SECOND_NS * BLOCK_BYTES)
    loop_cache_bytes = max(0, loop - setting.staged_bytes)
    blocks = blocks_needed(-(-loop // BLOCK_BYTES), staged_blocks)
    return Need(loop_cache_bytes, blocks, loop_cache_bytes + setting.hot_bytes)


def largest_loop(cache_bytes: int, setting: SizingParameters) -> int:
    """Return the largest loop (bytes) without stalls: N = S + BW*T, where S is `cache_bytes` without the hot set.

    Source: io_caching section 4.2.
    """
    return cache_bytes - setting.hot_bytes + setting.staged_bytes


@dataclass(frozen=True)
class Passes:
    """Passes over a loop: the bytes that each misses, and the times (ns) to fetch them, of the pass, and of its stall.

    For an MoE model a pass is a token, `missing_bytes` are expected, and `expert_hit_ratio` is the share of the bytes
    of used experts. `even`: the same if all experts of a layer are used equally often, which is the worst case.
    """

    loop_cache_bytes: int
    missing_bytes: int
    fetch_ns: int
    pass_ns: int
    stall_ns: int
    expert_hit_ratio: float | None = None
    even: Passes | None = None

    @property
    def stall_free(self) -> bool:
        """True if storage keeps up."""
        return self.stall_ns == 0

    @property
    def tokens_per_s(self) -> float:
        """Passes per second."""
        return SECOND_NS / self.pass_ns

    @property
    def tokens_per_s_lost(self) -> float:
        """Passes per second lost to stalls: 1/T minus the remaining rate."""
        return 0.0 if self.stall_free else SECOND_NS / (self.pass_ns - self.stall_ns) - self.tokens_per_s


def passes(loop: Weights, cache_bytes: int, setting: SizingParameters) -> Passes:
    """Return the cost of passes over `loop` with `cache_bytes` in all, hot set included: each takes max(T, (N - S) / BW).

    Source: io_caching section 4.1, "delays proportional to the deficit in cache coverage".
    """
    return passes_keeping(min(cache_bytes - setting.hot_bytes, size_of(loop)), loop, setting)


def passes_keeping(kept: int, loop: Weights, setting: SizingParameters) -> Passes:
    """Return the cost of passes over `loop` if `kept` bytes of it stay in memory."""
    if not isinstance(loop, MoeBytes):
        return _passes_missing(kept, loop - kept, setting)
    hit_ratio, even_ratio = loop.expert_hit_ratio(kept), loop.even_hit_ratio(kept)
    even = replace(_passes_missing(kept, loop.even_missing_bytes(kept), setting), expert_hit_ratio=even_ratio)
    return replace(_passes_missing(kept, loop.missing_bytes(kept), setting), expert_hit_ratio=hit_ratio, even=even)


def _passes_missing(kept: int, missing: int, setting: SizingParameters) -> Passes:
    fetch_ns = -(-missing * SECOND_NS // setting.bandwidth)
    stall_ns = max(0, fetch_ns - setting.period_ns)
    return Passes(kept, missing, fetch_ns, setting.period_ns + stall_ns, stall_ns)


@dataclass(frozen=True)
class Capacity:
    """The limits of a given cache: the largest loop without stalls, and the cost of passes over the given loop, if any."""

    cache_bytes: int
    largest_loop_bytes: int
    passes: Passes | None


@dataclass(frozen=True)
class Ram:
    """Memory of `ram_bytes` (`source`: given, or this machine's) for a loop, and the requirements without stalls.

    `mount_cache_bytes` is the part that llmcachefs uses. With the page cache alone, a larger loop is read whole in
    every pass, and so is an MoE model if one token's bytes do not fit. `needed_ram_bytes`, or `needed_bandwidth`
    (bytes/s, with this memory), avoids stalls. `fits_repacked`: the memory also has room for the bytes that llama.cpp
    copies from the model; None if it copies none.
    """

    ram_bytes: int
    source: str
    mount_cache_bytes: int
    mount: Passes
    page_cache: Passes
    needed_ram_bytes: int
    needed_bandwidth: int
    fits_repacked: bool | None = None


@dataclass(frozen=True)
class Sensitivity:
    """The answer with T changed by `change`: `need` if a loop is given, `capacity` of the largest cache given."""

    change: float
    period_ns: int
    need: Need | None
    capacity: Capacity | None


@dataclass(frozen=True)
class Storage:
    """A bandwidth (bytes/s) and its origin: `source` is given, device or measured, with details in `detail`."""

    bandwidth: int
    source: str
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModeNeed:
    """The `--cache` that llmcachefs needs in `mode`, including the window for the part that is streamed."""

    mode: str
    cache_bytes: int
    window_bytes: int


@dataclass(frozen=True)
class Answer:
    """The output of `llmcache size`; parts that were not requested are None or empty. *Modelled* by formula (1)."""

    setting: SizingParameters
    storage: Storage
    loop: Weights | None
    need: Need | None
    capacities: tuple[Capacity, ...]
    sensitivity: tuple[Sensitivity, ...]
    device: DeviceClass | None = None
    model: ModelBytes | None = None
    modes: tuple[ModeNeed, ...] = ()  # empty without a loop
    ram: Ram | None = None
    period_source: str = "given"  # given, or assumed: no option sets T


def capacity(cache_bytes: int, loop: Weights | None, setting: SizingParameters) -> Capacity:
    """Return the limits of `cache_bytes`, for `loop` if there is one."""
    loop_passes = None if loop is None else passes(loop, cache_bytes, setting)
    return Capacity(cache_bytes, largest_loop(cache_bytes, setting), loop_passes)


def answer(setting: SizingParameters, storage: Storage, loop: Weights | None, caches: tuple[int, ...]) -> Answer:
    """Return the results of the formula for a loop, for caches (bytes), or for both.

    The sensitivity to T is computed for the largest cache.
    """

    def sensitivity(change: float) -> Sensitivity:
        changed = setting.scaled(change)
        wanted = None if loop is None else need(loop, changed)
        best = capacity(max(caches), loop, changed) if caches else None
        return Sensitivity(change, changed.period_ns, wanted, best)

    return Answer(
        setting,
        storage,
        loop,
        None if loop is None else need(loop, setting),
        tuple(capacity(cache_bytes, loop, setting) for cache_bytes in caches),
        tuple(sensitivity(change) for change in PAPER.period_changes),
    )
