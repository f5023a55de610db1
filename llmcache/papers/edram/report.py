"""Output of `llmcache edram report`, as tables and as JSON; all modelled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from llmcache import __version__
from llmcache.errors import UsageError
from llmcache.papers.edram import retention
from llmcache.papers.edram.catalogue import listed, read_constants
from llmcache.papers.edram.constants import GROUPS, KELLE_INTERVALS, ORG_INTERVALS, UNI_INTERVALS, Profile, RefreshIntervals
from llmcache.papers.edram.refresh import RULES, EdramRun, RefreshAccount, account, read_run
from llmcache.papers.edram.tables import MODELLED, joules, watts
from llmcache.report import output
from llmcache.report.output import plain_table
from llmcache.units import format_duration, format_size

SCHEMA = "llmcache.edram-report/1"
STRATEGIES: dict[str, RefreshIntervals] = {"kelle": KELLE_INTERVALS, "uni": UNI_INTERVALS, "org": ORG_INTERVALS}
"""Intervals by name: 2DRP of section 7.1, 0.36 ms and 45 us of section 8.3.3."""
_ROW_RULES = ("floor", "ceil")


@dataclass(frozen=True)
class RefreshReport:
    """Accounts by profile and, for the first profile, by rule and strategy."""

    run: EdramRun
    intervals: RefreshIntervals
    capacity_bytes: float | None
    by_profile: Mapping[str, RefreshAccount]
    by_rule: Mapping[str, RefreshAccount]
    by_strategy: Mapping[str, Mapping[str, RefreshAccount]]


def accounted(
    source: str,
    intervals: RefreshIntervals,
    profile: str,
    rule: str,
    step_ns: float | None,
    capacity_bytes: float | None,
    constants: str | None,
) -> RefreshReport:
    """Return the accounts of the run in the file `source`; UsageError and DataError name an invalid option or field."""
    profiles = listed("profile", read_constants(constants).profiles, profile)
    if rule not in RULES:
        raise UsageError(f"--rule: there is no rule '{rule}'", f"one of: {', '.join(RULES)}")
    run = read_run(source)
    if step_ns is not None:
        run = run.with_step(step_ns, f"modelled: every step takes {format_duration(step_ns)}")

    def made(energies: Profile, at: RefreshIntervals, how: str = rule) -> RefreshAccount:
        return account(run, at, energies.refresh_j_per_byte, rule=how, capacity_bytes=capacity_bytes)

    rules = [how for how in RULES if how not in _ROW_RULES or (run.lives is not None and capacity_bytes is None)]
    return RefreshReport(
        run,
        intervals,
        capacity_bytes,
        {energies.name: made(energies, intervals) for energies in profiles},
        {how: made(profiles[0], intervals, how) for how in rules},
        {name: {energies.name: made(energies, at) for energies in profiles} for name, at in STRATEGIES.items()},
    )


def parse_intervals(text: str) -> RefreshIntervals:
    """Parse a name of `STRATEGIES`, one duration, or four in the order of `GROUPS`."""
    if text.strip().lower() in STRATEGIES:
        return STRATEGIES[text.strip().lower()]
    try:
        return retention.parse_intervals(text)
    except UsageError as error:
        hint = f"write a name ({', '.join(STRATEGIES)}), one duration (1ms), or four: {', '.join(GROUPS)}"
        raise UsageError(error.message, hint) from error


def show(found: RefreshReport, as_json: bool) -> None:
    output.show(as_json, lambda: document(found), _parts(found))


def _parts(found: RefreshReport) -> Iterator[str | Table]:
    run, first = found.run, next(iter(found.by_profile.values()))
    yield f"{run.title or 'run'}: {run.steps:,} steps, {format_duration(1e9 * first.seconds)} ({run.clock})"
    pinned = "all rows pinned" if found.capacity_bytes is None else f"{format_size(found.capacity_bytes)} pinned"
    share = "" if found.capacity_bytes is None else f", {first.pinned_share:.1%} of the live bytes"
    yield f"eDRAM: {pinned}{share}; rule: {first.rule}"
    rules = {rule: {"": one} for rule, one in found.by_rule.items()}
    for table in (
        *(_groups(name, one) for name, one in found.by_profile.items()),
        _totals("By refresh strategy", "intervals", found.by_strategy),
        _totals(f"By counting rule, profile {next(iter(found.by_profile))}", "rule", rules),
    ):
        yield ""
        yield table


def _groups(profile: str, found: RefreshAccount) -> Table:
    figures = ("interval", "mean rows", "row refreshes", "promotions", "bytes", "energy")
    cells = [
        (
            group.group.replace("_", " ").upper(),
            format_duration(group.interval_ns),
            f"{group.mean_rows:,.1f}",
            f"{group.refreshes:,.0f}",
            f"{group.promotions:,.0f}",
            format_size(group.refreshed_bytes),
            joules(group.joules),
        )
        for group in found.groups
    ]
    table = plain_table("group", *figures, rows=cells, title=f"Refresh by group, profile {profile} ({MODELLED})")
    rows = sum(group.mean_rows for group in found.groups)
    refreshes, bytes_ = (sum(getattr(group, name) for group in found.groups) for name in ("refreshes", "refreshed_bytes"))
    promotions = sum(group.promotions for group in found.groups)
    counted = (f"{rows:,.1f}", f"{refreshes:,.0f}", f"{promotions:,.0f}", format_size(bytes_))
    table.add_row("all", _interval(found), *counted, f"{joules(found.joules)}, {watts(found.watts)}", style="bold")
    return table


def _interval(found: RefreshAccount) -> str:
    return format_duration(found.mean_interval_ns) if found.mean_interval_ns < float("inf") else "never"


def _totals(title: str, first: str, rows: Mapping[str, Mapping[str, RefreshAccount]]) -> Table:
    energies = (f"energy, power{f' ({profile})' if profile else ''}" for profile in next(iter(rows.values())))
    cells = (
        [name, _interval(next(iter(each.values()))), *(f"{joules(one.joules)}, {watts(one.watts)}" for one in each.values())]
        for name, each in rows.items()
    )
    return plain_table(first, "mean interval", *energies, rows=cells, title=f"{title} ({MODELLED})")


def document(found: RefreshReport) -> dict[str, Any]:
    run = found.run
    return {
        "schema": SCHEMA,
        "kind": MODELLED,
        "llmcache_version": __version__,
        "run": {"title": run.title, "clock": run.clock, "steps": run.steps, "settings": run.settings},
        "intervals_ns": dict(zip(GROUPS, found.intervals.in_order(), strict=True)),
        "capacity_bytes": found.capacity_bytes,
        "profiles": {name: _values(one) for name, one in found.by_profile.items()},
        "rules": {name: _values(one) for name, one in found.by_rule.items()},
        "strategies": {
            name: {profile: _values(one) for profile, one in accounts.items()}
            for name, accounts in found.by_strategy.items()
        },
    }


def _values(found: RefreshAccount) -> dict[str, Any]:
    interval_ns = found.mean_interval_ns if found.mean_interval_ns < float("inf") else None
    return {**asdict(found), "watts": found.watts, "mean_interval_ns": interval_ns}
