"""What `llmcache size` answers: formula (1) with a model's real bytes, real storage, and this mount's own needs.

The formula's S is what a mount must pin. `--cache` of llmcachefs also pays for the window that the rest streams through,
for hot pages and for rows; `mount_cache_bytes` asks the mount's own arbitration how much that is.
"""

from __future__ import annotations

from dataclasses import replace

from llmcache.cache.arbitration import (
    MIN_WINDOW_BYTES,
    WINDOW_ALLOWANCE_BYTES,
    Loop,
    Share,
    cap_pins,
    least_window,
    reserve_bytes,
    share_budget,
)
from llmcache.cache.constants import PAPER
from llmcache.cache.extents import EXTENTS_MAX, HUGE_BYTES, LARGE_EXTENT, extent_bytes_for
from llmcache.cache.question import Question
from llmcache.cache.sizing import SECOND_NS, Answer, ModelBytes, ModeNeed, Ram, Setting, Storage, answer, passes_keeping
from llmcache.errors import UsageError
from llmcache.fs.client.bandwidth import measured_storage
from llmcache.fs.engine.budget import DAEMON_BYTES, MIN_BUDGET_BYTES, budget_of, ram_for, total_bytes
from llmcache.fs.layout.modelfile import model_bytes
from llmcache.units import format_size

_STEP_BYTES = 10**6
_LEAST_STEPS = -(-MIN_BUDGET_BYTES // _STEP_BYTES)


def advise(question: Question) -> Answer:
    """The answer to `question`. UsageError: a cache smaller than the hot set; DataError: a damaged model;

    EnvironmentProblem: storage that cannot be measured.
    """
    model = None if question.model is None else model_bytes(question.model)
    loop_bytes = question.loop_bytes if model is None else model.loop_bytes
    hot_bytes = _hot_bytes(question, model)
    for cache_bytes in question.caches:
        if cache_bytes < hot_bytes:
            raise UsageError(
                f"--cache: {format_size(cache_bytes)} do not even hold the hot set of {format_size(hot_bytes)} (--hot)",
                "the hot set must be kept whole: give a larger --cache or a smaller --hot",
            )
    storage = _storage(question)
    setting = Setting(storage.bandwidth, question.period_ns, hot_bytes)
    result = answer(setting, storage, loop_bytes, question.caches)
    result = replace(result, device=question.device, model=model, period_source=question.period_source)
    if loop_bytes is None or result.need is None:
        return result
    modes = _modes(loop_bytes, result.need.loop_cache_bytes, setting)
    is_asked = question.ram_bytes is not None or not question.caches
    ram = _ram(question.ram_bytes, loop_bytes, max(mode.cache_bytes for mode in modes), setting) if is_asked else None
    return replace(result, modes=modes, ram=ram)


def _modes(loop_bytes: int, pinned_bytes: int, setting: Setting) -> tuple[ModeNeed, ...]:
    """What each mode needs to pin so much of a loop. In place, what keeps storage at work is streamed through."""
    found = []
    for names, least, large in (
        ("inplace", least_window(setting.bandwidth), HUGE_BYTES),
        ("steer, arena", MIN_WINDOW_BYTES, LARGE_EXTENT),
    ):
        cache_bytes = mount_cache_bytes(loop_bytes, pinned_bytes, setting.hot_bytes, least, large)
        share = _share(loop_bytes, cache_bytes, setting.hot_bytes, least)
        found.append(ModeNeed(names, cache_bytes, share.window_bytes))
    return tuple(found)


def _ram(ram_bytes: int | None, loop_bytes: int, needed_cache_bytes: int, setting: Setting) -> Ram:
    """What that much memory (None: this machine's), with nothing else in it, gives a loop."""
    ram, source = (total_bytes(), "machine") if ram_bytes is None else (ram_bytes, "given")
    cache_bytes = budget_of(ram)
    mount = passes_keeping(mount_pins_bytes(loop_bytes, cache_bytes, setting.hot_bytes), loop_bytes, setting)
    fits = loop_bytes + setting.hot_bytes <= cache_bytes + DAEMON_BYTES  # the same memory, without a daemon
    return Ram(
        ram_bytes=ram,
        source=source,
        mount_cache_bytes=cache_bytes,
        mount=mount,
        page_cache=passes_keeping(loop_bytes if fits else 0, loop_bytes, setting),
        needed_ram_bytes=ram_for(needed_cache_bytes),
        needed_bandwidth=-(-mount.missing_bytes * SECOND_NS // setting.period_ns),
    )


def _hot_bytes(question: Question, model: ModelBytes | None) -> int:
    if question.hot_bytes is not None:
        return question.hot_bytes
    return PAPER.hot_bytes if model is None else model.hot_bytes


def _storage(question: Question) -> Storage:
    if question.measure is not None:
        return measured_storage(question.measure)
    assert question.bandwidth is not None
    if not question.from_device or question.device is None:
        return Storage(question.bandwidth, "given")
    return Storage(question.bandwidth, "device", {"class": question.device.name, "storage": question.device.storage})


def mount_cache_bytes(
    loop_bytes: int, pinned_bytes: int, hot_bytes: int, least: int = MIN_WINDOW_BYTES, large: int = LARGE_EXTENT
) -> int:
    """The smallest --cache (whole MB) with which llmcachefs pins `pinned_bytes` of a lone loop that is being read.

    `least`: bytes of its window at least; `large`: of an extent of a large file.
    *Modelled* by the mount's own arbitration; never less than the least budget that a mount accepts.
    """
    low, high = _LEAST_STEPS, _LEAST_STEPS + 2 * (loop_bytes + hot_bytes) // _STEP_BYTES + 64
    while low < high:  # a larger budget never pins less
        middle = (low + high) // 2
        if mount_pins_bytes(loop_bytes, middle * _STEP_BYTES, hot_bytes, least, large) >= pinned_bytes:
            high = middle
        else:
            low = middle + 1
    return low * _STEP_BYTES


def mount_pins_bytes(
    loop_bytes: int, cache_bytes: int, hot_bytes: int, least: int = MIN_WINDOW_BYTES, large: int = LARGE_EXTENT
) -> int:
    """What llmcachefs pins of a lone loop of `loop_bytes` with `--cache` `cache_bytes`, in whole extents.

    Hot pages and rows are taken at the most that their reserves allow.
    """
    pinned_bytes = _share(loop_bytes, cache_bytes, hot_bytes, least).pinned_bytes
    extent_bytes = extent_bytes_for(loop_bytes, EXTENTS_MAX, large)
    return loop_bytes if pinned_bytes >= loop_bytes else pinned_bytes // extent_bytes * extent_bytes


def _share(loop_bytes: int, cache_bytes: int, hot_bytes: int, least: int) -> Share:
    budget = cache_bytes + WINDOW_ALLOWANCE_BYTES
    left = max(0, budget - reserve_bytes(budget, hot_bytes, has_rows=hot_bytes > 0))
    loop = Loop("loop", loop_bytes, None, active=True, least_window=least)
    return cap_pins(share_budget(left, [loop]), cache_bytes)["loop"]
