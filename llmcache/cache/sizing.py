"""`llmcache size` and the fetch model: how long storage takes for the bytes that a cache misses. *Modelled*.

Formula (1): of a loop of N bytes with S cached, storage of bandwidth BW delivers the rest in (N - S) / BW. There is no stall
if that is at most the time T of a pass. For an MoE model (`model/moe.py`), S is the cache with which a token is expected to
miss BW*T bytes.

Source: io_caching sections 4.1 and 4.2. Differs from the paper: formula (1) is printed as S >= max{0, floor(N BW x T)},
without the minus sign that the text and the example require, and its floor would leave a part of a block missing. Here S =
max(0, ceil(N - BW*T)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from llmcache.errors import UsageError
from llmcache.model.moe import ModelBytes, MoeBytes, Weights
from llmcache.units import BLOCK_BYTES, format_size

_MB = 10**6
_GB = 10**9
SECOND_NS = 10**9


@dataclass(frozen=True)
class DeviceClass:
    """A kind of device: the memory that may cache a model (bytes), loop and hot set together, and the speed of its
    storage.
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
DEVICES: dict[str, DeviceClass] = {device.name: device for device in (WATCH, PHONE)}


@dataclass(frozen=True)
class PaperConstants:
    """Defaults of sizing. Source: io_caching."""

    period_ns: int = 10**8  # 4.1: T = 0.1 s, the allowed fetch delay (8-12 tokens/s: 80-125 ms per token)
    period_changes: tuple[float, ...] = (-0.3, -0.2, 0.0, 0.2, 0.3)  # 4.1: "moderate variations (±20-30%)" of T
    hot_bytes: int = 4 * _MB  # 4.2: tokenizer and index files, "less than 4 MB"


PAPER = PaperConstants()


@dataclass(frozen=True)
class FetchModel:
    """Time to fetch blocks from storage and memory to the GPU. Defaults and source: io_caching section 4.1.

    Each missed block is one I/O, even if misses are adjacent: with a setup of 50 us, a block costs 91, 70, 58 and 54 us at
    100, 200, 500 and 1000 MB/s, as in figure 5. Only reads fetch. Writeback is not counted.
    """

    storage_bandwidths: tuple[int, ...] = (100 * _MB, 200 * _MB, 500 * _MB, 1000 * _MB)  # one latency for each
    setup_ns: int = 50_000  # of a storage access
    gpu_bandwidth: int = 20 * _GB  # host to GPU
    gpu_setup_ns: int = 2_000  # base latency of a request to the GPU
    request_bytes: int = 1024  # of a request to the GPU
    block_bytes: int = BLOCK_BYTES

    def gpu_s(self, blocks: int) -> float:
        requests = blocks * -(-self.block_bytes // self.request_bytes)
        return requests * self.gpu_setup_ns / SECOND_NS + blocks * self.block_bytes / self.gpu_bandwidth

    def storage_s(self, blocks: int, bandwidth: int) -> float:
        return blocks * (self.setup_ns / SECOND_NS + self.block_bytes / bandwidth)

    def latency_s(self, read_blocks: int, missed_blocks: int, bandwidth: int) -> float:
        return self.gpu_s(read_blocks) + self.storage_s(missed_blocks, bandwidth)


# Formula (1)


@dataclass(frozen=True)
class SizingParameters:
    """Parameters of the formula besides the loop: bandwidth (bytes/s), T (ns), and the hot set (bytes), cached whole."""

    bandwidth: int
    period_ns: int = PAPER.period_ns
    hot_bytes: int = PAPER.hot_bytes

    @property
    def staged_bytes(self) -> int:
        """Return BW * T: the bytes that storage delivers during a pass, rounded down."""
        return self.bandwidth * self.period_ns // SECOND_NS

    def scaled(self, change: float) -> SizingParameters:
        return replace(self, period_ns=max(1, round(self.period_ns * (1 + change))))


def blocks_needed(loop_blocks: int, staged_blocks: float | Fraction) -> int:
    """Return S of formula (1) in blocks."""
    return max(0, math.ceil(loop_blocks - staged_blocks))


@dataclass(frozen=True)
class Need:
    """The smallest cache without stalls: `loop_cache_bytes` for the loop, `cache_bytes` with the hot set."""

    loop_cache_bytes: int
    loop_cache_blocks: int
    cache_bytes: int


def size_of(loop: Weights) -> int:
    """Return all bytes of `loop`."""
    return loop if isinstance(loop, int) else loop.total_bytes


def need(loop: Weights, setting: SizingParameters) -> Need:
    """Return the smallest cache with which `loop` runs without stalls (formula (1))."""
    if isinstance(loop, MoeBytes):
        kept = loop.kept_bytes(setting.staged_bytes)
        return Need(kept, -(-kept // BLOCK_BYTES), kept + setting.hot_bytes)
    staged_blocks = Fraction(setting.bandwidth * setting.period_ns, SECOND_NS * BLOCK_BYTES)
    loop_cache_bytes = max(0, loop - setting.staged_bytes)
    blocks = blocks_needed(-(-loop // BLOCK_BYTES), staged_blocks)
    return Need(loop_cache_bytes, blocks, loop_cache_bytes + setting.hot_bytes)


def largest_loop(cache_bytes: int, setting: SizingParameters) -> int:
    """Return the largest loop (bytes) that runs without stalls with `cache_bytes`, hot set included."""
    return cache_bytes - setting.hot_bytes + setting.staged_bytes


@dataclass(frozen=True)
class Passes:
    """Passes over a loop: the bytes that each misses, and the times (ns) to fetch them, of the pass, and of its stall.

    For an MoE model a pass is a token, and `missing_bytes` are expected. `even`: if all experts are used equally often.
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
        return self.stall_ns == 0

    @property
    def tokens_per_s(self) -> float:
        return SECOND_NS / self.pass_ns

    @property
    def tokens_per_s_lost(self) -> float:
        return 0.0 if self.stall_free else SECOND_NS / (self.pass_ns - self.stall_ns) - self.tokens_per_s


def passes(loop: Weights, cache_bytes: int, setting: SizingParameters) -> Passes:
    """Return the cost of passes over `loop` with `cache_bytes`, hot set included: each takes max(T, (N - S) / BW).

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


# The answer of `llmcache size`


@dataclass(frozen=True)
class Capacity:
    """The limits of a cache: the largest loop without stalls, and the cost of passes over the given loop, if any."""

    cache_bytes: int
    largest_loop_bytes: int
    passes: Passes | None


@dataclass(frozen=True)
class Ram:
    """Memory of `ram_bytes` for a loop, and the memory or bandwidth that the loop needs to run without stalls.

    `mount_cache_bytes` is the part that llmcachefs uses. `needed_ram_bytes`, or `needed_bandwidth` (bytes/s), avoids stalls.
    `fits_repacked`: the memory has room for llama.cpp's copies too; None without copies.
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
    """The answer with T changed by `change`: `need` for a loop, `capacity` of the largest cache."""

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
    """The output of `llmcache size`; parts that were not requested are None or empty."""

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


def answer(setting: SizingParameters, storage: Storage, loop: Weights | None, caches: tuple[int, ...]) -> Answer:
    """Return the results of the formula for a loop, for caches (bytes), or for both."""

    def needed(setting: SizingParameters) -> Need | None:
        return None if loop is None else need(loop, setting)

    def capacity(cache_bytes: int, setting: SizingParameters) -> Capacity:
        loop_passes = None if loop is None else passes(loop, cache_bytes, setting)
        return Capacity(cache_bytes, largest_loop(cache_bytes, setting), loop_passes)

    def sensitivity(change: float) -> Sensitivity:
        changed = setting.scaled(change)
        best = capacity(max(caches), changed) if caches else None
        return Sensitivity(change, changed.period_ns, needed(changed), best)

    return Answer(
        setting,
        storage,
        loop,
        needed(setting),
        tuple(capacity(cache_bytes, setting) for cache_bytes in caches),
        tuple(sensitivity(change) for change in PAPER.period_changes),
    )


# Its input


@dataclass(frozen=True)
class Question:
    """The input of `llmcache size`: exactly one of `storage` and `measure`, at most one of loop and model."""

    storage: Storage | None
    measure: str | None
    loop_bytes: int | None
    model: str | None
    caches: tuple[int, ...]
    hot_bytes: int | None
    period_ns: int
    device: DeviceClass | None
    period_source: str
    ram_bytes: int | None


def ask(
    *,
    bw: int | None = None,
    loop: int | None = None,
    cache: int | None = None,
    t: int | None = None,
    hot: int | None = None,
    device: str | None = None,
    model: str | None = None,
    measure: str | None = None,
    tokens_per_second: float | None = None,
    ram: int | None = None,
) -> Question:
    """Return the input for these options, in base units, `t` in ns; UsageError names missing or contradictory options."""
    for first, one, second, other, why in (
        ("--loop", loop, "--model", model, "the model determines the size of the loop"),
        ("--bw", bw, "--measure", measure, "the measurement determines the bandwidth"),
        ("--t", t, "--tokens-per-second", tokens_per_second, "T is 1 / tokens per second"),
    ):
        if one is not None and other is not None:
            raise UsageError(f"{first} and {second} contradict each other: {why}", f"omit {first} or {second}")
    for option, size_bytes in (("--cache", cache), ("--ram", ram)):
        if size_bytes is not None and size_bytes < BLOCK_BYTES:
            least = format_size(BLOCK_BYTES)
            raise UsageError(f"{option}: {size_bytes} bytes is less than one block ({least})", "write a size: 64M, 512Mi")
    device_class = None if device is None else DEVICES[device]
    if cache is not None:
        caches: tuple[int, ...] = (cache,)
    else:
        caches = () if device_class is None else tuple(sorted({device_class.least_cache_bytes, device_class.cache_bytes}))
    if loop is None and model is None and not caches:
        raise UsageError(
            "--loop, --model and --cache are all missing, so there is nothing to compute",
            "specify the loop (--loop 70M or --model FILE), the cache (--cache 64M), or both",
        )
    if ram is not None and loop is None and model is None:
        raise UsageError("--ram needs a loop or a model that runs in that memory", "add --loop 70M, or --model FILE")
    storage = None if bw is None else Storage(bw, "given")
    if storage is None and measure is None:
        if device_class is None:
            raise UsageError(
                "--bw is missing, so the bandwidth of the storage is unknown",
                "add --bw 100 (MB/s), --bw 1GB/s, --measure DIR, or --device " + "|".join(DEVICES),
            )
        storage = Storage(device_class.bandwidth, "device", {"class": device_class.name, "storage": device_class.storage})
    if tokens_per_second is not None:
        t = max(1, int(SECOND_NS / tokens_per_second))
    return Question(
        storage=storage,
        measure=measure,
        loop_bytes=loop,
        model=model,
        caches=caches,
        hot_bytes=device_class.hot_bytes if hot is None and device_class is not None and model is None else hot,
        period_ns=PAPER.period_ns if t is None else t,
        device=device_class,
        period_source="assumed" if t is None else "given",
        ram_bytes=ram,
    )
