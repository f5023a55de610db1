"""Output of `llmcache size`, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from llmcache.cache.sizing import SECOND_NS, Answer, Capacity, Passes, Ram, Sensitivity, size_of
from llmcache.model.moe import STAY, ZIPF, MoeBytes
from llmcache.report import output
from llmcache.report.output import plain_table, trimmed
from llmcache.units import format_duration, format_rate, format_size

SCHEMA = "llmcache.size/1"
_EVEN_KEYS = ("missing_bytes", "tokens_per_s", "expert_hit_ratio")
_FORMULA = "S = max(0, N - BW*T)"


def show(answer: Answer, as_json: bool) -> None:
    output.show(as_json, lambda: document(answer), (*lines(answer), "", sensitivity_table(answer)))


def size_text(size_bytes: float) -> str:
    return trimmed(format_size(size_bytes))


def _duration_text(duration_ns: float) -> str:
    return trimmed(format_duration(duration_ns))


def lines(answer: Answer) -> Iterator[str]:
    mixture = _mixture(answer)
    yield from _inputs(answer)
    yield ""
    if answer.need is not None:
        staged = size_text(answer.setting.staged_bytes)
        rule = _FORMULA if mixture is None else "dense tensors first, then experts, until a token misses BW*T"
        yield f"Smallest cache without stalls (modelled: {rule}, BW*T = {staged}):"
        yield f"  loop cache  {size_text(answer.need.loop_cache_bytes)} ({answer.need.loop_cache_blocks} blocks of 4 KiB)"
        yield f"  total       {size_text(answer.need.cache_bytes)} (with the hot set)"
        for place, mode in enumerate(answer.modes):
            window = f"a window of {size_text(mode.window_bytes)}" if mode.window_bytes else "no window"
            yield f"  {'' if place else 'llmcachefs':10}  --cache {mode.cache_bytes // 10**6}M ({mode.mode}: {window})"
    for item in answer.capacities:
        yield from _capacity(item, mixture)
    if answer.ram is not None:
        yield from _ram(answer.ram, mixture)
        if answer.ram.fits_repacked is False and answer.model is not None:
            copies = f"llama.cpp copies {size_text(answer.model.repacked_bytes)} of the model"
            yield f"  by default  {copies}, which does not fit: the kernel kills it (--no-repack avoids the copy)"


def _mixture(answer: Answer) -> MoeBytes | None:
    return answer.loop if isinstance(answer.loop, MoeBytes) else None


def _ram(ram: Ram, mixture: MoeBytes | None) -> Iterator[str]:
    where = "" if ram.source == "given" else " on this machine"
    yield f"With {size_text(ram.ram_bytes)} of memory{where}, if nothing else uses it (modelled):"
    mode = "" if mixture is None else "--mode inplace "
    yield f"  llmcachefs  {_speed(ram.mount)}, {mode}--cache {ram.mount_cache_bytes // 10**6}M"
    if mixture is not None:
        yield f"              {_kept(ram.mount, mixture)}"
    whole = "" if ram.page_cache.loop_cache_bytes else " (nothing stays cached)"
    yield f"  page cache  {'' if mixture is None or whole else 'at best '}{_speed(ram.page_cache)}{whole}"
    if mixture is not None and not whole:
        yield f"              {_kept(ram.page_cache, mixture)}"
    if not ram.mount.stall_free:
        needed = f"{size_text(ram.needed_ram_bytes)} of memory, or storage at {format_rate(ram.needed_bandwidth)}"
        yield f"  no stalls   with {needed}"


def _speed(passes: Passes) -> str:
    read = f"{size_text(passes.missing_bytes)} per token in {_duration_text(passes.fetch_ns)}"
    return f"{passes.tokens_per_s:.3g} tokens/s, reading {read if passes.missing_bytes else 'nothing'}"


def _kept(passes: Passes, mixture: MoeBytes) -> str:
    room_bytes = passes.loop_cache_bytes - mixture.dense_bytes
    if room_bytes < 0:
        return f"{passes.loop_cache_bytes / mixture.dense_bytes:.0%} of the dense tensors fit, and no experts"
    hits = f"{passes.expert_hit_ratio:.0%} of their reads hit"
    if passes.even is not None and passes.even.missing_bytes > passes.missing_bytes:
        hits += (
            f" ({passes.even.expert_hit_ratio:.0%}, {passes.even.tokens_per_s:.3g} tokens/s, if all are used equally often)"
        )
    return f"all dense tensors and {room_bytes / mixture.expert_bytes:.0%} of the experts fit: {hits}"


def _inputs(answer: Answer) -> Iterator[str]:
    setting, storage = answer.setting, answer.storage
    if answer.device is not None:
        yield f"device      {answer.device.title} ({answer.device.storage})"
    if answer.model is not None:
        model = answer.model
        count = "1 file" if model.files == 1 else f"{model.files} files"
        yield f"model       {model.path} ({model.kind}, {count})"
    if answer.loop is not None:
        mixture = _mixture(answer)
        size_bytes = size_of(answer.loop) if mixture is None else mixture.dense_bytes
        yield f"loop        {size_text(size_bytes)} read once per token{_model_note(answer)}"
        if answer.model is not None and answer.model.repacked_bytes:
            copied = size_text(answer.model.repacked_bytes)
            note = f"by default, llama.cpp copies {copied} of it into its own memory (repacking)"
            yield f"            {note}; this is for --no-repack, or a build with GGML_CPU_REPACK=OFF"
        if mixture is not None:
            yield (
                f"experts     {size_text(mixture.used_bytes)} of {size_text(mixture.expert_bytes)} read per token: "
                f"{mixture.used} of {mixture.experts} in each layer"
            )
            zipf, stay = f"Zipf's law with exponent {ZIPF:g}", f"{STAY:.0%} are used again by the next token"
            yield f"            popularity assumed: {zipf}, {stay}; the cache keeps the most recently used"
    yield f"storage     {format_rate(storage.bandwidth)} ({storage.source}{_measured_note(answer)})"
    assumed = "; assumed, set it with --t" if answer.period_source == "assumed" else ""
    rate = f"{SECOND_NS / setting.period_ns:.3g} tokens/s"
    yield f"T           {_duration_text(setting.period_ns)} per token ({rate}{assumed})"
    yield f"hot set     {size_text(setting.hot_bytes)}"


def _model_note(answer: Answer) -> str:
    if answer.model is None:
        return ""
    note = f"; plus {size_text(answer.model.row_bytes)} of embeddings, read by row" if answer.model.row_bytes else ""
    if answer.model.sparse_bytes and _mixture(answer) is None:
        note += f"; an upper bound: {size_text(answer.model.sparse_bytes)} of it are experts, and neither the header nor a "
        note += "config.json beside the file says how many of them a token uses"
    return note


def _measured_note(answer: Answer) -> str:
    detail = answer.storage.detail
    if answer.storage.source != "measured":
        return ""
    return (
        f" in {detail['directory']}: {size_text(detail['bytes_read'])} of a {_file_text(detail['file'])} "
        f"in {detail['seconds']:.2f} s, O_DIRECT"
    )


def _file_text(file: str) -> str:
    return "temporary file" if file == "temporary" else f"existing file, {file}"


def _capacity(item: Capacity, mixture: MoeBytes | None) -> Iterator[str]:
    yield f"With a cache of {size_text(item.cache_bytes)} (modelled):"
    yield f"  largest loop without stalls  {size_text(item.largest_loop_bytes)}"
    if item.passes is not None and mixture is not None:
        yield f"  this model                   {_verdict(item.passes)}"
        yield f"                               {_kept(item.passes, mixture)}"
    elif item.passes is not None:
        yield f"  this loop                    {_verdict(item.passes)}"


def _verdict(passes: Passes) -> str:
    if passes.stall_free:
        return f"stall-free: reads {size_text(passes.missing_bytes)} per token in {_duration_text(passes.fetch_ns)}"
    return (
        f"stalls {_duration_text(passes.stall_ns)} per token: reads {size_text(passes.missing_bytes)} in "
        f"{_duration_text(passes.fetch_ns)}; {passes.tokens_per_s:.3g} tokens/s, {passes.tokens_per_s_lost:.3g} lost"
    )


def sensitivity_table(answer: Answer) -> Table:
    largest = max((item.cache_bytes for item in answer.capacities), default=None)
    headings = ["T"]
    headings += ["loop cache", "total"] if answer.need is not None else []
    if largest is not None:
        headings.append(f"largest loop in {size_text(largest)}")
    if largest is not None and answer.loop is not None:
        headings += ["stall per token", "tokens/s"]
    rows = map(_cells, answer.sensitivity)
    return plain_table("change of T", *headings, rows=rows, title="Sensitivity to T (modelled)")


def _cells(row: Sensitivity) -> Iterator[str]:
    yield f"{row.change:+.0%}" if row.change else "none"
    yield _duration_text(row.period_ns)
    if row.need is not None:
        yield size_text(row.need.loop_cache_bytes)
        yield size_text(row.need.cache_bytes)
    if row.capacity is not None:
        yield size_text(row.capacity.largest_loop_bytes)
        if row.capacity.passes is not None:
            yield _duration_text(row.capacity.passes.stall_ns) if row.capacity.passes.stall_ns else "none"
            yield f"{row.capacity.passes.tokens_per_s:.3g}"


def document(answer: Answer) -> dict[str, Any]:
    """Return `answer` as JSON-ready values; null if not requested."""
    need, setting, mixture = answer.need, answer.setting, _mixture(answer)
    return {
        "schema": SCHEMA,
        "kind": "modelled",
        "formula": "S = max(0, ceil(N - BW*T))" if mixture is None else "least S with which a token misses BW*T, expected",
        "bandwidth_bytes_per_s": setting.bandwidth,
        "bandwidth_source": answer.storage.source,
        "bandwidth_detail": answer.storage.detail,
        "period_s": setting.period_ns / SECOND_NS,
        "period_source": answer.period_source,
        "hot_bytes": setting.hot_bytes,
        "staged_bytes": setting.staged_bytes,
        "device": answer.device.name if answer.device else None,
        "model": vars(answer.model) if answer.model else None,
        "loop_bytes": None if answer.loop is None else size_of(answer.loop),
        "mixture": mixture and _mixture_values(mixture),
        "loop_cache_bytes": need.loop_cache_bytes if need else None,
        "loop_cache_blocks": need.loop_cache_blocks if need else None,
        "cache_bytes": need.cache_bytes if need else None,
        "llmcachefs_cache_bytes": max((mode.cache_bytes for mode in answer.modes), default=None),
        "llmcachefs_modes": [vars(mode) for mode in answer.modes],
        "ram": answer.ram and _ram_values(answer.ram),
        "caches": [_capacity_values(item) for item in answer.capacities],
        "sensitivity": [_sensitivity_values(row) for row in answer.sensitivity],
    }


def _mixture_values(mixture: MoeBytes) -> dict[str, Any]:
    return vars(mixture) | {
        "used_bytes": mixture.used_bytes,
        "token_bytes": mixture.token_bytes,
        "popularity": {"source": "assumed", "zipf": ZIPF, "stay": STAY},
    }


def _ram_values(ram: Ram) -> dict[str, Any]:
    return {
        "ram_bytes": ram.ram_bytes,
        "source": ram.source,
        "llmcachefs_cache_bytes": ram.mount_cache_bytes,
        "llmcachefs": _passes_values(ram.mount),
        "page_cache": _passes_values(ram.page_cache),
        "needed_ram_bytes": ram.needed_ram_bytes,
        "needed_bandwidth_bytes_per_s": ram.needed_bandwidth,
        "fits_repacked": ram.fits_repacked,
    }


def _capacity_values(item: Capacity) -> dict[str, Any]:
    values: dict[str, Any] = {"cache_bytes": item.cache_bytes, "largest_loop_bytes": item.largest_loop_bytes}
    return values | {"passes": item.passes and _passes_values(item.passes)}


def _passes_values(passes: Passes) -> dict[str, Any]:
    return {
        "stall_free": passes.stall_free,
        "loop_cache_bytes": passes.loop_cache_bytes,
        "missing_bytes": passes.missing_bytes,
        "fetch_s": passes.fetch_ns / SECOND_NS,
        "pass_s": passes.pass_ns / SECOND_NS,
        "stall_s": passes.stall_ns / SECOND_NS,
        "tokens_per_s": passes.tokens_per_s,
        "tokens_per_s_lost": passes.tokens_per_s_lost,
        "expert_hit_ratio": passes.expert_hit_ratio,
        "even": None if passes.even is None else {name: getattr(passes.even, name) for name in _EVEN_KEYS},
    }


def _sensitivity_values(row: Sensitivity) -> dict[str, Any]:
    return {
        "change": row.change,
        "period_s": row.period_ns / SECOND_NS,
        "loop_cache_bytes": row.need.loop_cache_bytes if row.need else None,
        "cache_bytes": row.need.cache_bytes if row.need else None,
        "with_cache": _capacity_values(row.capacity) if row.capacity else None,
    }
