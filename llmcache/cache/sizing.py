"""How large a cache must be, by formula (1): a loop of N bytes, a cache of S for it, storage of BW, a time T per pass.

A pass misses N - S bytes, which storage delivers in (N - S) / BW beside the computing that takes T: there is no stall
as long as that is at most T. All results are *modelled*. Base units: bytes, nanoseconds, bytes per second; exact integers.
Source: io_caching section 4.1, formula (1), and section 4.2 for the inverse.

Differs from the paper: formula (1) is printed as S >= max{0, floor(N BW x T)}, without the minus sign between N and BW
that the text and the example of section 4.2 ask for; and its floor would leave a part of a block missing (N = 10 and
BW*T = 2.5 blocks: with S = 7 three blocks are due where 2.5 come in time). Here S = max(0, ceil(N - BW*T)).

A mixture of experts (`mixture.py`) is no loop: S is what leaves a token BW*T missing bytes, expected, and N all its bytes.

The numbers of the paper are `PAPER` and `DEVICES`, each with its section; MB is 10**6 bytes, as in its example (4.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from llmcache.cache.mixture import MixtureBytes
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
DEVICES: dict[str, DeviceClass] = {device.name: device for device in (WATCH, PHONE)}  # device classes by name (section 4.2)


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


PAPER = PaperConstants()  # the paper's values, as used wherever nothing else is asked for


SECOND_NS = 10**9


@dataclass(frozen=True)
class SizingParameters:
    """What the formula needs beside the loop: bandwidth (bytes/s), T (ns) and the hot set (bytes), always kept whole."""

    bandwidth: int
    period_ns: int = PAPER.period_ns
    hot_bytes: int = PAPER.hot_bytes

    @property
    def staged_bytes(self) -> int:
        """BW * T: what storage delivers during a pass, whole bytes."""
        return self.bandwidth * self.period_ns // SECOND_NS

    def scaled(self, change: float) -> SizingParameters:
        """The same with T changed by the share `change` (-0.3: 30 % shorter)."""
        return SizingParameters(self.bandwidth, max(1, round(self.period_ns * (1 + change))), self.hot_bytes)


def blocks_needed(loop_blocks: int, staged_blocks: float | Fraction) -> int:
    """S of formula (1) in blocks: max(0, ceil(N - BW*T)) for a loop of N blocks of which BW*T come in time."""
    return max(0, math.ceil(loop_blocks - staged_blocks))


@dataclass(frozen=True)
class Need:
    """The smallest cache without stalls: `loop_cache_bytes` for the loop, `cache_bytes` with the hot set.

    `loop_cache_blocks` counts blocks of 4 KiB; a loop's last block may be filled in part.
    """

    loop_cache_bytes: int
    loop_cache_blocks: int
    cache_bytes: int


Weights = int | MixtureBytes  # what tokens read: bytes of a loop, or a mixture's


def size_of(loop: Weights) -> int:
    """All bytes of `loop`."""
    return loop if isinstance(loop, int) else loop.total_bytes


def need(loop: Weights, setting: SizingParameters) -> Need:
    """The smallest cache with which `loop` runs without stalls. Source: io_caching formula (1)."""
    if isinstance(loop, MixtureBytes):
        kept = loop.kept_bytes(setting.staged_bytes)
        return Need(kept, -(-kept // BLOCK_BYTES), kept + setting.hot_bytes)
    staged_blocks = Fraction(setting.bandwidth * setting.period_ns, SECOND_NS * BLOCK_BYTES)
    loop_cache_bytes = max(0, loop - setting.staged_bytes)
    blocks = blocks_needed(-(-loop // BLOCK_BYTES), staged_blocks)
    return Need(loop_cache_bytes, blocks, loop_cache_bytes + setting.hot_bytes)


def largest_loop(cache_bytes: int, setting: SizingParameters) -> int:
    """Bytes of the largest loop that `cache_bytes` in all serve without stalls: N = S + BW*T, S what the hot set leaves.

    Source: io_caching section 4.2.
    """
    return cache_bytes - setting.hot_bytes + setting.staged_bytes


@dataclass(frozen=True)
class Passes:
    """How passes over a loop go: what each misses, and the times (ns) of fetching that, of a pass, and of its stall.

    Of a mixture a pass is a token, `missing_bytes` are expected, and `expert_hit_ratio` is of the bytes of used experts.
    `even`: the same if all experts of a layer are used equally often, which no popularity makes worse.
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
        """Whether storage keeps up."""
        return self.stall_ns == 0

    @property
    def tokens_per_s(self) -> float:
        """Passes per second."""
        return SECOND_NS / self.pass_ns

    @property
    def tokens_per_s_lost(self) -> float:
        """Passes per second that the stalls cost: 1/T less what is left."""
        return 0.0 if self.stall_free else SECOND_NS / (self.pass_ns - self.stall_ns) - self.tokens_per_s


def passes(loop: Weights, cache_bytes: int, setting: SizingParameters) -> Passes:
    """How passes over `loop` go with `cache_bytes` in all, hot set included: each takes max(T, (N - S) / BW).

    Source: io_caching section 4.1, "delays proportional to the deficit in cache coverage".
    """
    return passes_keeping(min(cache_bytes - setting.hot_bytes, size_of(loop)), loop, setting)


def passes_keeping(kept: int, loop: Weights, setting: SizingParameters) -> Passes:
    """How passes over `loop` go of which `kept` bytes stay in memory."""
    if not isinstance(loop, MixtureBytes):
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
    """What a given cache can do: the largest loop without stalls, and how the loop asked for goes (None: none was)."""

    cache_bytes: int
    largest_loop_bytes: int
    passes: Passes | None


@dataclass(frozen=True)
class Ram:
    """What memory of `ram_bytes` (given, or this machine's: `source`) gives a loop, beside what it would need.

    `mount_cache_bytes` is what llmcachefs takes of it. The page cache reads a loop larger than it whole, in every pass, and
    a mixture if it has no room for what one token reads.
    `needed_ram_bytes` or `needed_bandwidth` (bytes/s, with this memory) would be without stalls. `fits_repacked`: whether
    the memory has room for what llama.cpp copies of the model; None where it copies nothing.
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
    """The answer with T changed by `change`: `need` where a loop is given, `capacity` of the largest cache given."""

    change: float
    period_ns: int
    need: Need | None
    capacity: Capacity | None


@dataclass(frozen=True)
class Storage:
    """Where a bandwidth (bytes/s) comes from: `source` is given, device or measured, `detail` says how."""

    bandwidth: int
    source: str
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelBytes:
    """What a model's files hold, in bytes, and how a decoder reads it.

    `loop_bytes` once per token (of them `sparse_bytes` belong to experts, of which a token reads a part only),
    `hot_bytes` often (headers, tokenizer and configuration), `row_bytes` by single rows (the token embedding).
    A token uses `used` of the `experts` of a layer; None: there are none, or nothing says how many. llama.cpp copies
    `repacked_bytes` of the loop into its own memory, unless a flag forbids that.
    """

    path: str
    kind: str
    files: int
    loop_bytes: int
    hot_bytes: int
    row_bytes: int
    sparse_bytes: int
    experts: int | None = None
    used: int | None = None
    repacked_bytes: int = 0

    @property
    def loop(self) -> Weights:
        """What tokens read; of a mixture whose used experts nobody tells all of them, an upper bound."""
        if self.experts is None or self.used is None:
            return self.loop_bytes
        return MixtureBytes(self.loop_bytes - self.sparse_bytes, self.sparse_bytes, self.experts, self.used)


@dataclass(frozen=True)
class ModeNeed:
    """What llmcachefs needs in `mode` to keep the loop's share: `--cache`, of which the rest streams through a window."""

    mode: str
    cache_bytes: int
    window_bytes: int


@dataclass(frozen=True)
class Answer:
    """All that `llmcache size` answers; parts that were not asked for are None or empty. *Modelled* by formula (1)."""

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
    period_source: str = "given"  # given, or assumed: nobody said what T is


def capacity(cache_bytes: int, loop: Weights | None, setting: SizingParameters) -> Capacity:
    """What `cache_bytes` can do, for `loop` where there is one."""
    went = None if loop is None else passes(loop, cache_bytes, setting)
    return Capacity(cache_bytes, largest_loop(cache_bytes, setting), went)


def answer(setting: SizingParameters, storage: Storage, loop: Weights | None, caches: tuple[int, ...]) -> Answer:
    """Everything the formula says of a loop, of caches (bytes), or of both; sensitivity goes by the largest cache."""

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
