"""The input of `llmcache size`, built from its options; missing or contradictory options are errors."""

from __future__ import annotations

from dataclasses import dataclass

from llmcache.cache.sizing import DEVICES, PAPER, SECOND_NS, DeviceClass, Storage
from llmcache.errors import UsageError
from llmcache.units import BLOCK_BYTES, format_size


@dataclass(frozen=True)
class Question:
    """The input in base units. Exactly one of `storage` and `measure` is set, at most one of loop and model.

    `period_source`: T is "given", or "assumed". `ram_bytes` is None to use this machine's memory, if any. `hot_bytes`
    is None to use the model's, or else the paper's default.
    """

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
