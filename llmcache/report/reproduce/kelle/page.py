"""Kelle recomputed, as a page: every printed number beside ours, why they differ, and what is not recomputed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from matplotlib.figure import Figure

from llmcache.edram.constants import PROFILES
from llmcache.edram.systems import MODELS, SYSTEMS
from llmcache.report.claims import Verdict
from llmcache.report.edram_model import compare, joules
from llmcache.report.edram_model import document as model_document
from llmcache.report.edram_plot import energy_figure, refresh_figure, roofline_figure, saved
from llmcache.report.html import Badge, Block, Cell, Facts, Fold, Section, Table, Text, html_page
from llmcache.report.reproduce.kelle.ablations import strategy_j
from llmcache.report.reproduce.kelle.document import KINDS, TITLES
from llmcache.report.reproduce.kelle.evidence import Evidence
from llmcache.report.reproduce.kelle.figures import averages_figure, curve_figure
from llmcache.report.reproduce.kelle.paper import AVERAGED, NOT_RECOMPUTED, PAPER, TABLE7, TABLE8, TABLE9, TASKS
from llmcache.report.reproduce.kelle.rows import Row, number
from llmcache.report.theme import embedded, style

LEAD = (
    "Every number that the paper prints, beside what follows from the constants that it prints. Everything here is modelled "
    "or computed; nothing is measured, and no factor is fitted to the paper's results. Energies come in three profiles: "
    "“paper” as printed, “public” with access energies of public tools, “silicon” with refresh as measured on the chip that "
    "the paper cites. Every verdict is computed from the numbers beside it, by the rule beside it."
)


def page(rows: Mapping[str, Sequence[Row]], evidence: Evidence) -> str:
    """Returns the page."""
    pictures = _pictures(rows)
    sections = [Section("Verdicts", [_verdicts(rows), _summary(rows)])]
    sections += [Section(TITLES[about], [*pictures.get(about, []), *_tables(about, of)]) for about, of in rows.items()]
    sections += [
        Section("LLaMA2-7B on PG19, by component (like figures 13, 15b and 16a)", _example(evidence)),
        Section("Not recomputed", [Table("What else the paper prints", ["where", "what", "why not"], NOT_RECOMPUTED)]),
        Section("Conditions", [_conditions(), *_constants()]),
    ]
    return html_page(f"Recomputed: {PAPER['title']}", LEAD, sections)


def _summary(rows: Mapping[str, Sequence[Row]]) -> Block:
    """Returns the averages of section 8.1 in words, with what they turn on."""
    named = {row.name: row for row in rows["averages"]}

    def told(name: str, variant: str) -> str:
        row = named[name]
        return f"{number(row.ours[variant])}{row.unit} ({number(row.paper)}{row.unit} is printed)"

    ratio = PROFILES["paper"].refresh_pass_j / PROFILES["silicon"].refresh_pass_j
    equal = named["edram-speedup-equal-arrays"].ours["24 x 24 PEs in all"]
    return Text(
        f"On average Kelle+eDRAM is modelled as {told('kelle-speedup', 'first principles')} as fast as Original+SRAM, and "
        f"{told('kelle-efficiency', 'paper')} as efficient with energies as printed, "
        f"{told('kelle-efficiency', 'silicon')} with silicon's refresh. Eviction alone gives {told('aep-speedup', 'ours')}, "
        f"eDRAM alone {told('edram-speedup', 'ours')}, of which {number(equal)}× remains with arrays of one size. "
        f"Refreshing takes {ratio:,.0f} times the energy by table 1 that it takes on the chip that the paper cites."
    )


def _verdicts(rows: Mapping[str, Sequence[Row]]) -> Block:
    """Returns how many findings have which verdict; a row has one for each of its variants."""
    cells: list[list[Cell]] = []
    for about, of in rows.items():
        counts = Counter(row.verdict(variant) for row in of for variant in row.ours)
        cells.append([TITLES[about], len(of), *(counts[verdict] for verdict in Verdict)])
    return Table("Numbers, and findings by verdict", ["about", "numbers", *(verdict.value for verdict in Verdict)], cells)


def _tables(about: str, rows: Sequence[Row]) -> list[Block]:
    cells: list[list[Cell]] = []
    for row in rows:
        for place, variant in enumerate(row.ours):
            verdict = row.verdict(variant)
            first = place == 0
            cells.append(
                [
                    f"“{row.quote}”" if first else "",
                    row.section if first else "",
                    f"{number(row.paper)}{row.unit}" if first else "",
                    "" if variant == "ours" else variant,
                    f"{number(row.ours[variant])}{row.unit}",
                    f"{row.delta(variant):+.1%}",
                    row.rule.label if first else "",
                    Badge(verdict.value, verdict.kind),
                    row.why if first else "",
                ]
            )
    columns = ["paper", "where", "printed", "with", f"ours ({KINDS[about]})", "delta", "rule", "verdict", "why"]
    rules = list(dict.fromkeys((row.rule.label, row.rule.words) for row in rows))
    return [
        Table(TITLES[about], columns, cells),
        Fold("When a number counts as confirmed", [Table("Rules", ["rule", "in words"], rules)]),
    ]


def _drawn(draw: Callable[[], Figure], alt: str, caption: str) -> Block:
    with style():
        return embedded(draw(), alt, caption)


def _pictures(rows: Mapping[str, Sequence[Row]]) -> dict[str, list[Block]]:
    named = {row.name: row for of in rows.values() for row in of}
    sevenths = {model: [named[f"t7-{model}-{budget}"] for budget in printed] for model, printed in TABLE7.items()}
    eighths = {task: [named[f"t8-{task}-{us}"] for us in printed] for task, printed in TABLE8.items()}
    ninths = {
        system: [named[f"t9-{batch}-{system}"] for batch in TABLE9] for system in ("AEP+SRAM", "AERP+SRAM", "Kelle+eDRAM")
    }
    over7 = {model: list(map(float, printed)) for model, printed in TABLE7.items()}
    over8 = {task: list(map(float, printed)) for task, printed in TABLE8.items()}
    over9 = {system: list(map(float, TABLE9)) for system in ninths}
    averaged = f"{', '.join(AVERAGED)} x {', '.join(TASKS)}"
    return {
        "averages": [
            _drawn(
                lambda: averages_figure(rows["averages"]),
                _alt(rows["averages"]),
                f"Modelled, mean over {averaged}, batch 16; the paper's models are in figure 13 only.",
            )
        ],
        "table 7": [
            _drawn(
                lambda: curve_figure(sevenths, over7, "N' (tokens)"),
                _alt([row for of in sevenths.values() for row in of]),
                "Modelled: PG19, batch 16, Kelle+eDRAM.",
            )
        ],
        "table 8": [
            _drawn(
                lambda: curve_figure(eighths, over8, "mean refresh interval (µs)"),
                _alt([row for of in eighths.values() for row in of]),
                "Modelled: llama3.2-3b, batch 16, Kelle+eDRAM, all four intervals scaled.",
            )
        ],
        "table 9": [
            _drawn(
                lambda: curve_figure(ninths, over9, "batch (sequences)"),
                _alt([row for of in ninths.values() for row in of]),
                "Modelled: llama2-7b, PG19.",
            )
        ],
    }


def _alt(rows: Sequence[Row]) -> str:
    parts = (
        f"{row.name} printed {number(row.paper)}, "
        + ", ".join(f"{name} {number(value)}" for name, value in row.ours.items())
        for row in rows
    )
    return "; ".join(parts) + "."


def _example(evidence: Evidence) -> list[Block]:
    document = model_document(compare())
    found = saved(json.loads(json.dumps(document)))
    caption = "Modelled: llama2-7b, PG19 (context 512, decode 8192), batch 16, N' = 2048."
    told = "; ".join(f"{row.system}, {row.profile}: {joules(row['energy_j'])}" for row in found.rows)
    shares = "; ".join(f"{row.system}, {row.profile}: {row['refresh_share']:.1%}" for row in found.rows)
    attained = [(roof.system, name, rate / 1e9) for roof in found.roofs for name, _, rate in roof.points]
    points = "; ".join(f"{system}: {name} {rate:.0f} G/s" for system, name, rate in attained)
    cells: list[list[Cell]] = [
        [name, *(joules(value) for value in strategy_j(evidence, profile).values())] for name, profile in PROFILES.items()
    ]
    return [
        _drawn(lambda: energy_figure(found.rows), told, caption),
        _drawn(lambda: refresh_figure(found.rows), shares, caption),
        Table("Energy by refresh strategy (section 8.3.3), modelled", ["profile", "Org", "Uni", "2D", "2K"], cells),
        _drawn(
            lambda: roofline_figure(found.roofs),
            points,
            f"{caption} The last step. Section 8.3.2 has recomputation raise the throughput until the array is the bound: "
            "from first principles there is next to nothing to gain before it is.",
        ),
    ]


def _conditions() -> Block:
    return Facts(
        [
            ("paper", f"{PAPER['authors']}: {PAPER['title']}. {PAPER['published']}, doi:{PAPER['doi']}"),
            ("kind", "modelled: a roofline of bytes and cycles; nothing is measured"),
            ("assumed", "DRAM gives its whole bandwidth; loads overlap with computing"),
            ("SRAM baseline", "2 MB for weights and 2 MB for KV: the paper does not say how its 4 MB are divided"),
            ("refresh energy", "1.14 mJ is read as the energy of one pass over 4 MB"),
            ("retention curve", "log-normal through 2e-3 (section 7.1) and 1e-6 at 45 µs, which the paper does not print"),
        ]
    )


def _constants() -> list[Block]:
    profiles: list[list[Cell]] = [
        [
            name,
            profile.title,
            1e12 * profile.dram_j_per_byte,
            1e12 * profile.sram_j_per_byte,
            1e12 * profile.edram_j_per_byte,
            1e6 * profile.refresh_pass_j,
            1e12 * profile.pe_cycle_j,
        ]
        for name, profile in PROFILES.items()
    ]
    columns = ["profile", "from", "DRAM pJ/B", "SRAM pJ/B", "eDRAM pJ/B", "refresh of 4 MB µJ", "PE pJ/cycle"]
    systems: list[list[Cell]] = [
        [
            name,
            f"{system.hardware.array_rows} x {system.hardware.array_rows}",
            "eDRAM" if system.hardware.edram else "SRAM",
            system.hardware.kv_capacity_bytes / 2**20,
            system.hardware.kv_bytes_per_s / 1e9,
            "yes" if system.policy.evict else "no",
            system.policy.recompute,
            system.policy.intervals.mean_ns / 1e3 if system.hardware.edram else "no refresh",
        ]
        for name, system in SYSTEMS.items()
    ]
    heads = ["system", "PEs", "KV memory", "MiB", "GB/s", "evicts", "recomputes", "mean interval µs"]
    shapes: list[list[Cell]] = [
        [name, shape.layers, shape.channels, shape.heads, shape.kv_heads, shape.read_weights / 1e9, shape.kv_bytes / 1024]
        for name, shape in MODELS.items()
    ]
    widths = ["model", "layers", "channels", "heads", "KV heads", "weights read (10⁹)", "KV KiB a token"]
    return [
        Table("Profiles of energies", columns, profiles, digits=1),
        Table("Systems", heads, systems, digits=1),
        Table("Models", widths, shapes, digits=2),
    ]
