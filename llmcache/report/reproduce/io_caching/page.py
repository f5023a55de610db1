"""io_caching recomputed, as a page: figures like the paper's, its words beside our numbers, and what they rest on."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence

from llmcache.cache.latency import FetchModel
from llmcache.cache.policies import policy_class
from llmcache.report.access import access_figure
from llmcache.report.claims import Judged, claims_table, rules_table, verdicts_table
from llmcache.report.classes import shades_of
from llmcache.report.html import Block, Cell, Facts, Fold, Section, Table, Text, html_page
from llmcache.report.lines import Panel, bandwidth_lines, latency_figure, policy_line, ratio_figure
from llmcache.report.picture import alt_text, caption, picture_of
from llmcache.report.reproduce.io_caching.document import PAPER
from llmcache.report.reproduce.io_caching.evidence import AWARE, BOUND, POLICIES, App, Evidence
from llmcache.report.reproduce.io_caching.hardware import MODEL
from llmcache.report.reproduce.io_caching.loops import LRU
from llmcache.report.reproduce.io_caching.overhead import REPEATS, Overhead
from llmcache.report.reproduce.io_caching.patterns import DETECTED, Patterns
from llmcache.report.theme import embedded, style
from llmcache.trace.record import Trace
from llmcache.units import format_size

VARIANTS = {"algorithm1": "Algorithm 1 as printed", "llmcache": "llmcache"}
MODELLED, MEASURED = "modelled here", "measured here"
LEAD = (
    "What the paper says of hit ratios, latencies and hardware, beside what its models and policies give here. “Paper” "
    "are its own words; “modelled here” comes from replaying synthetic traces or from its formulas; “measured here” was "
    "timed on this machine. The paper's traces are not public: these are synthetic, shaped after its sections 3.1 and 3.2, "
    "so a claim that is not confirmed is not confirmed for these shapes. Every verdict is computed from the numbers beside "
    "it."
)


def page(
    traces: Mapping[str, Trace],
    evidence: Evidence,
    patterns: Patterns,
    overhead: Overhead,
    claims: Mapping[str, Sequence[Judged]],
) -> str:
    """Returns the page."""
    on_device = [app for app in evidence.apps.values() if not app.remote]
    patterned = claims["figures 1 and 2"]
    remote = [app for app in evidence.apps.values() if app.remote]
    sections = [
        Section("Verdicts", [verdicts_table(claims, VARIANTS)]),
        Section("Hit ratio against cache size (the paper's figure 4)", _figure4(on_device, claims["figure 4"])),
        Section("Fetch latency against cache size (the paper's figure 5)", _figure5(evidence, claims)),
        Section("Loops larger than the cache", _loops(claims)),
        Section("Overhead of a policy", _overhead(overhead, claims["overhead"])),
        Section("Hardware (section 4.2) and formula (1)", _hardware(claims["hardware"])),
        Section("Remote inference: no figure of the paper's", _remote(remote)),
        Section("Accesses (like the paper's figures 1 and 2)", _accesses(traces, evidence, patterns, patterned)),
        Section("Conditions", [_conditions()]),
    ]
    return html_page(f"Recomputed: {PAPER['title']}", LEAD, sections)


def _figure4(apps: Sequence[App], judged: Sequence[Judged]) -> list[Block]:
    captioned = (
        "Hit ratio (reads and writes, blocks of 4 KiB; a missed block is always inserted) against cache size. Modelled: "
        "replay of synthetic traces shaped after figure 1. Belady sees the future and bounds every policy; Algorithm 1 is "
        "the paper's pseudocode taken literally."
    )
    return [
        _ratios(apps, captioned),
        _means(apps),
        claims_table("What section 4.1 says of figure 4", judged, VARIANTS, MODELLED),
        Fold("When a claim counts as confirmed", [rules_table(judged)]),
        _numbers(apps),
    ]


def _ratios(apps: Sequence[App], captioned: str) -> Block:
    panels = [
        Panel(
            app.title,
            [policy_line(policy, policy_class(policy).title, app.sizes_bytes, app.hit_ratio[policy]) for policy in POLICIES],
        )
        for app in apps
    ]
    with style():
        figure = ratio_figure(panels, "hit ratio")
    told = "; ".join(
        f"{app.title}: " + ", ".join(f"{policy} {app.hit_ratio[policy].mean():.2f}" for policy in POLICIES) for app in apps
    )
    alt = f"Hit ratio over cache size, one panel per application. Means over the sizes: {told}."
    return embedded(figure, alt, captioned)


def _means(apps: Sequence[App]) -> Block:
    rows: list[list[Cell]] = []
    for app in apps:
        means = {policy: float(app.hit_ratio[policy].mean()) for policy in POLICIES}
        shares = [f"{means[policy] / means[BOUND]:.0%}" for policy in AWARE]
        rows.append([app.title, format_size(app.footprint_bytes), *means.values(), *shares])
    titles = [policy_class(policy).title for policy in POLICIES]
    columns = ["application", "footprint", *titles, *(f"{policy_class(policy).title}, of Belady" for policy in AWARE)]
    many = len(apps[0].sizes_bytes)
    return Table(f"Mean hit ratio over {many} sizes, {1 / many:.1%} to 100 % of the footprint ({MODELLED})", columns, rows)


def _numbers(apps: Sequence[App]) -> Block:
    tables = []
    for app in apps:
        rows: list[list[Cell]] = [
            [f"{size / 1e6:.2f}", *(float(app.hit_ratio[policy][place]) for policy in POLICIES)]
            for place, size in enumerate(app.sizes_bytes)
        ]
        titles = [policy_class(policy).title for policy in POLICIES]
        tables.append(Table(f"{app.title}: hit ratio ({MODELLED})", ["cache (MB)", *titles], rows))
    return Fold("The numbers behind the figure", tables)


def _figure5(evidence: Evidence, claims: Mapping[str, Sequence[Judged]]) -> list[Block]:
    model = FetchModel()
    captioned = (
        "Time to fetch everything that the trace reads, against cache size, for storage of four bandwidths. Modelled as in "
        f"section 4.1: {model.setup_ns / 1000:g} µs and {model.block_bytes} bytes at the storage's bandwidth for each "
        f"missed block, {model.gpu_setup_ns / 1000:g} µs and {model.request_bytes} bytes at "
        f"{model.gpu_bandwidth / 1e9:g} GB/s for each request to the GPU. Writes fetch nothing. Synthetic traces."
    )
    blocks: list[Block] = []
    for policy in AWARE:
        apps = evidence.on_device()
        panels = [
            Panel(app.title, bandwidth_lines(evidence.bandwidths, app.sizes_bytes, list(app.latency_s[policy])))
            for app in apps
        ]
        with style():
            figure = latency_figure(panels)
        told = "; ".join(
            f"{app.title} {app.latency_s[policy][0, 0]:.2f} to {app.latency_s[policy][-1, -1]:.2f} s" for app in apps
        )
        alt = f"Latency over cache size, a line per bandwidth. Slowest, smallest to fastest, largest: {told}."
        blocks.append(embedded(figure, alt, f"{VARIANTS[policy]}. {captioned}"))
    return [
        *blocks,
        claims_table("What section 4.1 says of figure 5", claims["figure 5"], VARIANTS, MODELLED),
        claims_table(
            "The same claims, as if a write fetched what it replaces (the paper does not say which it counts)",
            claims["figure 5, writes fetch too"],
            VARIANTS,
            MODELLED,
        ),
        Fold("When a claim counts as confirmed", [rules_table(claims["figure 5"])]),
    ]


def _overhead(overhead: Overhead, judged: Sequence[Judged]) -> list[Block]:
    rows: list[list[Cell]] = [[policy_class(policy).title, took] for policy, took in overhead.ns_per_block.items()]
    head = f"Replay of {overhead.trace}, half its footprint cached, one thread, median of {REPEATS}"
    return [
        Table(f"{head} ({MEASURED})", ["policy", "ns per block"], rows, digits=1),
        claims_table("What section 4.1 says of overhead", judged, VARIANTS, MEASURED),
        Fold("When a claim counts as confirmed", [rules_table(judged)]),
    ]


def _loops(claims: Mapping[str, Sequence[Judged]]) -> list[Block]:
    ours, lru = claims["loops"], claims["loops under LRU"]
    return [
        claims_table("What section 4.1 says of a loop of N blocks and a cache of S", ours, VARIANTS, MODELLED),
        claims_table("What it says of LRU there", lru, {LRU: policy_class(LRU).title}, MODELLED),
        Fold("When a claim counts as confirmed", [rules_table([*ours, *lru])]),
    ]


def _hardware(judged: Sequence[Judged]) -> list[Block]:
    return [
        Text("Formula (1) with the paper's constants: llmcache size answers the same for any loop, cache and storage."),
        claims_table("What sections 4.1 and 4.2 say of hardware", judged, {MODEL: MODEL}, MODELLED),
        Fold("When a claim counts as confirmed", [rules_table(judged)]),
    ]


def _remote(apps: Sequence[App]) -> list[Block]:
    captioned = (
        "Hit ratio against cache size of the remote applications, which have no loops. Modelled: replay of synthetic traces "
        "shaped after figure 2. The paper replays none of them."
    )
    return [_ratios(apps, captioned), _means(apps), _numbers(apps)]


def _accesses(traces: Mapping[str, Trace], evidence: Evidence, patterns: Patterns, judged: Sequence[Judged]) -> list[Block]:
    blocks: list[Block] = [
        Text(
            "Drawn over accesses, not over time: the times of these traces are invented. Their block ranges follow the "
            "paper's text, so a likeness to its figures confirms nothing. The shades are what our detector finds: it sees "
            "the accesses only."
        ),
        claims_table("What sections 3 and 4.1 say of patterns", judged, {DETECTED: DETECTED}, MODELLED),
        Fold("When a claim counts as confirmed", [rules_table(judged)]),
    ]
    for name, trace in traces.items():
        shades = shades_of(patterns.classes[name].rows)
        with style():
            picture = picture_of(trace, f"{evidence.apps[name].title} (synthetic)", by_time=False, shades=shades)
            blocks.append(embedded(access_figure(picture, 9.5, 4.2), alt_text(picture), caption(picture, trace)))
    return blocks


def _conditions() -> Block:
    return Facts(
        [
            ("paper", f"{PAPER['authors']}: {PAPER['title']}. {PAPER['published']}, doi:{PAPER['doi']}"),
            ("traces", "synthetic, from llmcache.trace.shapes with its default seeds; times invented"),
            ("machine (for what is measured here)", f"{platform.machine()}, {platform.system()} {platform.release()}"),
            ("Python", platform.python_version()),
        ]
    )
