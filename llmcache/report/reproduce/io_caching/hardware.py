"""The claims about hardware: section 4.2 of io_caching, and formula (1) of section 4.1. All modelled, by that formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from llmcache.cache.constants import BLOCK_BYTES, PAPER, PHONE, WATCH, DeviceClass
from llmcache.cache.sizing import SECOND_NS, Setting, blocks_needed, largest_loop, need
from llmcache.report.claims import Claim, Finding, Verdict, graded

MB = 10**6
MODEL = "formula (1)"
NEGLIGIBLE = 0.05  # of the loop that can be served
# What the paper says, in bytes: the right-hand side of every comparison here. Section 4.2 unless noted.
WATCH_LOOP = 70 * MB
PHONE_LOOPS = (356 * MB, 612 * MB)
NOTES_LOOP, TRANSLATE_LOOP, LARGE_WEIGHTS = 60 * MB, 2 * MB, 500 * MB
NOTES_BLOCKS, NOTES_READS = (10_000, 25_000), 15_000  # 3.1: write loop 10,000-15,000, read loop 15,000-25,000
PARAMETERS = (10**9, 3 * 10**9)
FEWEST_BITS = 2  # per weight: below it no quantisation in use leaves a model of such a size usable


@dataclass(frozen=True)
class Hardware:
    """What the claims speak of: device classes, first and last block of AI Notes' loops, a loop and BW × T in blocks."""

    watch: DeviceClass = WATCH
    phone: DeviceClass = PHONE
    notes_blocks: tuple[int, int] = NOTES_BLOCKS
    example: tuple[int, Fraction] = (10, Fraction(5, 2))


def setting_of(device: DeviceClass) -> Setting:
    """Returns the setting of formula (1) for a device of the paper, with the paper's T."""
    return Setting(device.bandwidth, PAPER.period_ns, device.hot_bytes)


def watch_loop(data: Hardware, _variant: str) -> Finding:
    """The largest loop that a watch serves without stalls."""
    loop = largest_loop(data.watch.cache_bytes, setting_of(data.watch))
    return Finding(_same(loop, WATCH_LOOP), f"{loop / MB:g} MB", {"loop_bytes": loop})


def phone_loops(data: Hardware, _variant: str) -> Finding:
    """The largest loops that phones serve without stalls."""
    setting = setting_of(data.phone)
    loops = [largest_loop(size, setting) for size in (data.phone.least_cache_bytes, data.phone.cache_bytes)]
    same = [_same(loop, said) is Verdict.CONFIRMED for loop, said in zip(loops, PHONE_LOOPS, strict=True)]
    ours = " to ".join(f"{loop / MB:g} MB" for loop in loops)
    return Finding(graded(all(same), any(same)), ours, {"least_bytes": loops[0], "most_bytes": loops[1]})


def _same(ours: float, said: float) -> Verdict:
    """Whether two sizes agree as far as the paper prints digits: to half a MB."""
    return graded(abs(ours - said) <= MB / 2, abs(ours - said) <= 0.05 * said)


def apps_fit(data: Hardware, _variant: str) -> Finding:
    """Whether the loops of AI Notes and AI Translate fit a watch."""
    setting = setting_of(data.watch)
    needs = [need(loop, setting).cache_bytes for loop in (NOTES_LOOP, TRANSLATE_LOOP)]
    fit = [size <= data.watch.cache_bytes for size in needs]
    ours = f"they need {needs[0] / MB:g} MB and {needs[1] / MB:g} MB of cache, {data.watch.cache_bytes / MB:g} MB are there"
    return Finding(graded(all(fit), any(fit)), ours, {"notes_bytes": needs[0], "translate_bytes": needs[1]})


def notes_loop_size(data: Hardware, _variant: str) -> Finding:
    """Whether "about 60 MB" agrees with the block numbers of section 3.1."""
    first, last = data.notes_blocks
    size, reads = (last - first) * BLOCK_BYTES, (last - NOTES_READS) * BLOCK_BYTES
    ours = f"blocks {first:,} to {last:,} (section 3.1) are {size / MB:.1f} MB; without the write loop {reads / MB:.1f} MB"
    near = [abs(found - NOTES_LOOP) <= 0.05 * NOTES_LOOP for found in (size, reads)]
    return Finding(graded(near[0], near[1]), ours, {"loop_bytes": size, "read_loop_bytes": reads})


def large_does_not_fit(data: Hardware, _variant: str) -> Finding:
    """Whether 500 MB of weights exceed what a watch serves."""
    wanted = need(LARGE_WEIGHTS, setting_of(data.watch)).cache_bytes
    ours = f"500 MB need {wanted / MB:g} MB of cache, {wanted / data.watch.cache_bytes:.1f} times the {data.watch.title}'s"
    return Finding(graded(wanted > data.watch.cache_bytes, False), ours, {"cache_bytes": wanted})


def parameters(data: Hardware, _variant: str) -> Finding:
    """Whether models of 1 and of 3 billion parameters fit what a phone serves: bits left for each weight."""
    loop = largest_loop(data.phone.cache_bytes, setting_of(data.phone))
    bits = [8 * loop / count for count in PARAMETERS]
    ours = f"{loop / MB:g} MB leave {bits[0]:.1f} bits per weight at 1 billion, {bits[1]:.1f} at 3 billion"
    fits = [each >= FEWEST_BITS for each in bits]
    return Finding(graded(all(fits), any(fits)), ours, {"bits_1e9": bits[0], "bits_3e9": bits[1]})


def insensitive_to_t(data: Hardware, _variant: str) -> Finding:
    """How far the largest loop changes as T does: on a watch, on phones with the least and the most cache."""
    cases = (
        ("watch", data.watch, data.watch.cache_bytes),
        ("phone, 256 MB", data.phone, data.phone.least_cache_bytes),
        ("phone, 512 MB", data.phone, data.phone.cache_bytes),
    )
    changes = {name: change_of_loop(size, setting_of(device)) for name, device, size in cases}
    small = [change <= NEGLIGIBLE for change in changes.values()]
    ours = f"largest loop at T {PAPER.period_changes[0]:+.0%} to {PAPER.period_changes[-1]:+.0%}: " + ", ".join(
        f"{name} ±{change:.1%}" for name, change in changes.items()
    )
    return Finding(graded(all(small), any(small)), ours, changes)


def change_of_loop(cache_bytes: int, setting: Setting) -> float:
    """Returns the largest relative change of the loop that `cache_bytes` serve, for the paper's variations of T."""
    loop = largest_loop(cache_bytes, setting)
    return max(abs(largest_loop(cache_bytes, setting.scaled(change)) / loop - 1) for change in PAPER.period_changes)


def sign_of_formula(data: Hardware, _variant: str) -> Finding:
    """Whether formula (1), read as it is printed (N x BW x T), gives the cache of the paper's own example in 4.2."""
    setting = setting_of(data.watch)
    loop, bandwidth = (Fraction(value, BLOCK_BYTES) for value in (WATCH_LOOP, setting.bandwidth))
    printed = float(loop * bandwidth * Fraction(setting.period_ns, SECOND_NS) * BLOCK_BYTES)
    read, said = WATCH_LOOP - setting.staged_bytes, data.watch.cache_bytes - data.watch.hot_bytes
    ours = (
        f"the example's N = 70 MB: N × BW × T is {printed / 10**9:,.0f} GB, N − BW × T is {read / MB:g} MB; "
        f"the example itself has S = {said / MB:g} MB"
    )
    return Finding(_same(printed, said), ours, {"product_bytes": printed, "difference_bytes": float(read)})


def floor_of_formula(data: Hardware, _variant: str) -> Finding:
    """Whether the floor of formula (1), read with the minus sign that the text asks for, leaves nothing late."""
    loop, staged = data.example
    floor, enough = int(loop - staged), blocks_needed(loop, staged)
    late = loop - floor - staged
    ours = (
        f"N = {loop}, BW × T = {float(staged):g} blocks: the floor gives S = {floor}, {float(late):g} blocks late; "
        f"S = {enough} has none late"
    )
    return Finding(graded(late <= 0, False), ours, {"floor": floor, "needed": enough})


def _claim(name: str, section: str, quote: str, rule: str, check: Callable[[Hardware, str], Finding]) -> Claim[Hardware]:
    return Claim(name, section, quote, rule, check, (MODEL,))


CLAIMS: tuple[Claim[Hardware], ...] = (
    _claim("watch-loop", "4.2", "(64 − 4) + (100 × 0.1) = 70 MB", "70 MB, to the digits printed", watch_loop),
    _claim("phone-loops", "4.2", "sustainable loop sizes of ≈356–612 MB", "both, to the digits printed", phone_loops),
    _claim(
        "apps-fit",
        "4.2",
        "AI Notes (≈60 MB loop) and AI Translate (≈2 MB loop) fit within this bound",
        "the cache each needs is at most the watch's; partly: one of them",
        apps_fit,
    ),
    _claim(
        "notes-loop-size",
        "3.1, 4.2",
        "AI Notes (≈60 MB loop)",
        "the blocks of both loops are within 5 % of 60 MB; partly: those of the read loop alone",
        notes_loop_size,
    ),
    _claim(
        "large-does-not-fit",
        "4.2",
        "state-of-the-art LLMs require over 500 MB of weight data, making direct on-device inference infeasible on watches",
        "the cache needed is more than the watch has",
        large_does_not_fit,
    ),
    _claim(
        "parameters",
        "4.2",
        "This capacity corresponds to 1–3 billion-parameter models",
        "2 bits or more per weight at both ends, the fewest in use; partly: at one",
        parameters,
    ),
    _claim(
        "insensitive-to-t",
        "4.1",
        "moderate variations (±20–30%) cause negligible changes in predicted performance",
        "the largest loop changes by 5 % or less on all three devices; partly: on one",
        insensitive_to_t,
    ),
    _claim(
        "sign-of-formula",
        "4.1",
        "S ≥ max{ 0, ⌊NBW × T⌋}",
        "read as printed, without a minus sign, it gives the S of the example in section 4.2, to the digits printed",
        sign_of_formula,
    ),
    _claim(
        "floor-of-formula",
        "4.1",
        "S ≥ max{ 0, ⌊NBW × T⌋}",
        "with S so chosen, what is missed comes in time (the printed formula has lost its minus sign: N − BW × T)",
        floor_of_formula,
    ),
)
