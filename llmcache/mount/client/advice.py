"""`llmcache size`: formula (1) for the bytes of a real model, measured storage, and the needs of a mount.

The formula's S is the size that a mount must pin. `--cache` also includes the window, hot pages and rows. For an MoE model,
a mount pins the dense tensors and caches experts in the remaining budget.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from llmcache.cache.arbitration import (
    INPLACE_ALLOWANCE_BYTES,
    MIN_WINDOW_BYTES,
    WINDOW_ALLOWANCE_BYTES,
    Loop,
    Share,
    cap_pins,
    least_window,
    reserve_bytes,
    share_budget,
)
from llmcache.cache.sizing import (
    PAPER,
    SECOND_NS,
    Answer,
    ModeNeed,
    Question,
    Ram,
    SizingParameters,
    answer,
    need,
    passes_keeping,
    size_of,
)
from llmcache.cache.space import EXTENTS_MAX, HUGE_BYTES, LARGE_EXTENT, SMALL_EXTENT, extent_bytes_for
from llmcache.errors import UsageError
from llmcache.memory import total_bytes
from llmcache.model.modelfile import model_bytes
from llmcache.model.moe import MoeBytes, Weights
from llmcache.mount.budget import DAEMON_BYTES, MIN_BUDGET_BYTES, budget_of, ram_for
from llmcache.mount.client.bandwidth import measured_storage
from llmcache.mount.state.experts import HEADROOM_BYTES
from llmcache.units import format_size

_STEP_BYTES = 10**6
_LEAST_STEPS = -(-MIN_BUDGET_BYTES // _STEP_BYTES)


@dataclass(frozen=True)
class Means:
    """Parameters of modes, in bytes."""

    modes: str
    least_window: int
    large_extent: int
    allowance: int


FUSE = Means("steer, arena", MIN_WINDOW_BYTES, LARGE_EXTENT, WINDOW_ALLOWANCE_BYTES)


def in_place(bandwidth: int) -> Means:
    """Return the parameters of mode inplace with storage of `bandwidth` (bytes/s)."""
    return Means("inplace", least_window(bandwidth), HUGE_BYTES, INPLACE_ALLOWANCE_BYTES)


def advise(question: Question) -> Answer:
    """Answer `question`.

    UsageError: a cache is smaller than the hot set; DataError: damaged model; MissingRequirement: the storage cannot be
    measured.
    """
    model = None if question.model is None else model_bytes(question.model)
    loop = question.loop_bytes if model is None else model.loop
    hot_bytes = question.hot_bytes
    if hot_bytes is None:
        hot_bytes = PAPER.hot_bytes if model is None else model.hot_bytes
    for cache_bytes in question.caches:
        if cache_bytes < hot_bytes:
            raise UsageError(
                f"--cache: {format_size(cache_bytes)} is less than the hot set of {format_size(hot_bytes)} (--hot)",
                "the whole hot set must fit: give a larger --cache or a smaller --hot",
            )
    storage = question.storage
    if storage is None:
        assert question.measure is not None
        storage = measured_storage(question.measure)
    setting = SizingParameters(storage.bandwidth, question.period_ns, hot_bytes)
    result = answer(setting, storage, loop, question.caches)
    result = replace(result, device=question.device, model=model, period_source=question.period_source)
    if loop is None:
        return result
    modes = _modes(loop, setting)
    is_asked = question.ram_bytes is not None or not question.caches
    ram = _ram(question.ram_bytes, loop, modes, setting) if is_asked else None
    if ram is not None and model is not None and model.repacked_bytes:
        ram = replace(ram, fits_repacked=model.repacked_bytes <= budget_of(ram.ram_bytes))
    return replace(result, modes=modes, ram=ram)


def _modes(loop: Weights, setting: SizingParameters) -> tuple[ModeNeed, ...]:
    needed = need(loop, setting).loop_cache_bytes

    def mode(means: Means) -> ModeNeed:
        cache_bytes = mount_cache_bytes(loop, needed, setting.hot_bytes, means)
        return ModeNeed(
            means.modes, cache_bytes, _share(_dense_bytes(loop), cache_bytes, setting.hot_bytes, means).window_bytes
        )

    return mode(in_place(setting.bandwidth)), mode(FUSE)


def _ram(ram_bytes: int | None, loop: Weights, modes: tuple[ModeNeed, ...], setting: SizingParameters) -> Ram:
    """`ram_bytes`: memory that nothing else uses (None: this machine's)."""
    ram, source = (total_bytes(), "machine") if ram_bytes is None else (ram_bytes, "given")
    cache_bytes = budget_of(ram)
    plain_bytes = cache_bytes + DAEMON_BYTES - setting.hot_bytes  # the page cache alone has no daemon
    if isinstance(loop, MoeBytes):
        kept = mount_keeps_bytes(loop, cache_bytes, setting.hot_bytes, in_place(setting.bandwidth))
        plain, needed_cache_bytes = loop.page_cache_kept_bytes(plain_bytes), modes[0].cache_bytes
    else:
        kept = mount_keeps_bytes(loop, cache_bytes, setting.hot_bytes)
        plain, needed_cache_bytes = loop if loop <= plain_bytes else 0, max(mode.cache_bytes for mode in modes)
    mount = passes_keeping(kept, loop, setting)
    return Ram(
        ram_bytes=ram,
        source=source,
        mount_cache_bytes=cache_bytes,
        mount=mount,
        page_cache=passes_keeping(plain, loop, setting),
        needed_ram_bytes=ram_for(needed_cache_bytes),
        needed_bandwidth=-(-mount.missing_bytes * SECOND_NS // setting.period_ns),
    )


def mount_cache_bytes(loop: Weights, kept_bytes: int, hot_bytes: int, means: Means = FUSE) -> int:
    """Return the smallest --cache (whole MB) that keeps `kept_bytes` of one active loop; *modelled* with the mount's
    arbitration.
    """
    steps = range(_LEAST_STEPS, _LEAST_STEPS + 2 * (size_of(loop) + hot_bytes) // _STEP_BYTES + 64)

    def kept(step: int) -> int:  # monotonic
        return mount_keeps_bytes(loop, step * _STEP_BYTES, hot_bytes, means)

    return (_LEAST_STEPS + bisect_left(steps, kept_bytes, key=kept)) * _STEP_BYTES


def mount_keeps_bytes(loop: Weights, cache_bytes: int, hot_bytes: int, means: Means = FUSE) -> int:
    """Return the bytes of one loop that llmcachefs keeps, with experts and full reserves."""
    dense_bytes = _dense_bytes(loop)
    pinned_bytes = _share(dense_bytes, cache_bytes, hot_bytes, means).pinned_bytes
    large = SMALL_EXTENT if isinstance(loop, MoeBytes) else means.large_extent
    if pinned_bytes < dense_bytes:
        extent_bytes = extent_bytes_for(dense_bytes, EXTENTS_MAX, large)
        return pinned_bytes // extent_bytes * extent_bytes
    left = _loops_bytes(cache_bytes, hot_bytes, means) - dense_bytes - HEADROOM_BYTES
    return min(size_of(loop), dense_bytes + max(0, left))


def _dense_bytes(loop: Weights) -> int:
    return loop.dense_bytes if isinstance(loop, MoeBytes) else loop


def _share(loop_bytes: int, cache_bytes: int, hot_bytes: int, means: Means) -> Share:
    loop = Loop("loop", loop_bytes, None, active=True, least_window=means.least_window)
    return cap_pins(share_budget(_loops_bytes(cache_bytes, hot_bytes, means), [loop]), cache_bytes)["loop"]


def _loops_bytes(cache_bytes: int, hot_bytes: int, means: Means) -> int:
    budget = cache_bytes + means.allowance
    return max(0, budget - reserve_bytes(budget, hot_bytes, has_rows=hot_bytes > 0))
