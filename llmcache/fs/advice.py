"""What `llmcache size` answers: formula (1) with a model's real bytes, real storage, and this mount's own needs.

The formula's S is what a mount must pin. `--cache` of llmcachefs also pays for the window that the rest streams through,
for hot pages and for rows; `mount_cache_bytes` asks the mount's own arbitration how much that is.
"""

from __future__ import annotations

from dataclasses import replace

from llmcache.cache.arbitration import WINDOW_ALLOWANCE_BYTES, Loop, cap_pins, reserve_bytes, share_budget
from llmcache.cache.constants import PAPER
from llmcache.cache.extents import extent_bytes_for
from llmcache.cache.question import Question
from llmcache.cache.sizing import Answer, ModelBytes, Setting, Storage, answer
from llmcache.errors import UsageError
from llmcache.fs.bandwidth import measured_storage
from llmcache.fs.budget import MIN_BUDGET_BYTES
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
    mount_cache = None
    if loop_bytes is not None and result.need is not None:
        mount_cache = mount_cache_bytes(loop_bytes, result.need.loop_cache_bytes, hot_bytes)
    return replace(result, device=question.device, model=model, mount_cache_bytes=mount_cache)


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


def mount_cache_bytes(loop_bytes: int, pinned_bytes: int, hot_bytes: int) -> int:
    """The smallest --cache (whole MB) with which llmcachefs pins `pinned_bytes` of a lone loop that is being read.

    *Modelled* by the mount's own arbitration; never less than the least budget that a mount accepts.
    """
    low, high = _LEAST_STEPS, _LEAST_STEPS + 2 * (loop_bytes + hot_bytes) // _STEP_BYTES + 64
    while low < high:  # a larger budget never pins less
        middle = (low + high) // 2
        if mount_pins_bytes(loop_bytes, middle * _STEP_BYTES, hot_bytes) >= pinned_bytes:
            high = middle
        else:
            low = middle + 1
    return low * _STEP_BYTES


def mount_pins_bytes(loop_bytes: int, cache_bytes: int, hot_bytes: int) -> int:
    """What llmcachefs pins of a lone loop of `loop_bytes` with `--cache` `cache_bytes`, in whole extents.

    Hot pages and rows are taken at the most that their reserves allow.
    """
    budget = cache_bytes + WINDOW_ALLOWANCE_BYTES
    left = max(0, budget - reserve_bytes(budget, hot_bytes, has_rows=hot_bytes > 0))
    share = cap_pins(share_budget(left, [Loop("loop", loop_bytes, None, active=True)]), cache_bytes)["loop"]
    extent_bytes = extent_bytes_for(loop_bytes)
    return loop_bytes if share.pinned_bytes >= loop_bytes else share.pinned_bytes // extent_bytes * extent_bytes
