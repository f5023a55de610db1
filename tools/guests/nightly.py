"""The nightly set: runs every check of checks.py in one boot of each guest, and reports the results."""

from __future__ import annotations

import contextlib
import datetime
import json
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any

from tools.bench.results import markdown, read, write

from .checks import CHECKS
from .images import GUESTS, ROOT, Guest, kernel_version, say
from .machine import MGLRU, GuestFailure, Machine, Settings, booted

CHECK_SECONDS = 1500
"""An emulated processor takes up to ten minutes for a check."""

Result = dict[str, Any]


def nightly(guests: list[Guest], settings: Settings, names: list[str], file: Path | None) -> int:
    """Run the checks and print a line for each, then the table; return 1 if one fails.

    Results that `file` has from earlier runs are kept, unless the same guest has run the same check again.
    """
    document: Result = read(file) if file and file.exists() else {"schema": "llmcache.nightly/1", "guests": []}
    known = {one["name"]: one for one in document["guests"]}
    failed = False
    for guest in guests:
        one = known.setdefault(guest.name, {"name": guest.name, "system": guest.system, "checks": []})
        one.pop("failure", None)
        with contextlib.closing(results(guest, settings, names, one)) as each:
            try:
                for result in each:
                    print(f"{guest.name:<10} {result['outcome']:<12}{result['check']:<15}{result['reason']}", flush=True)
                    failed |= result["outcome"] == "fail"
                    add(one["checks"], {**result, "commit": commit(), "date": datetime.date.today().isoformat()})
                    save(file, document, known)
            except GuestFailure as failure:
                print(f"{guest.name:<10} fail        {failure.message}", flush=True)
                failed, one["failure"] = True, failure.message
        save(file, document, known)
    print(table(document))
    return 1 if failed else 0


def results(guest: Guest, settings: Settings, names: list[str], about: Result) -> Generator[Result, None, None]:
    """Yield the result of each check, and put properties of the guest into `about`.

    A guest that crashes in a check is booted again for the remaining ones.
    """
    remaining = list(names)
    while remaining:
        with booted(guest, settings) as machine:
            about |= {"kernel": kernel_version(guest), "accelerator": machine.accelerator}
            about["mglru"] = machine.output(["cat", MGLRU]).stdout.strip() not in ("", "0x0000")
            while remaining:
                name = remaining.pop(0)
                try:
                    yield run_check(machine, name)
                except GuestFailure as failure:
                    yield {"check": name, "outcome": "fail", "reason": failure.message, "facts": {}}
                    break


def add(checks: list[Result], result: Result) -> None:
    """Add a result in place of an older one of the same check; `checks` stay in the order of `CHECKS`."""
    names = list(CHECKS)
    checks[:] = [one for one in checks if one["check"] != result["check"]] + [result]
    checks.sort(key=lambda one: names.index(one["check"]))


def save(file: Path | None, document: Result, known: dict[str, Result]) -> None:
    """Write the results of all guests to `file`, if there is one."""
    document["guests"] = [known[name] for name in GUESTS if name in known]
    if file:
        write(file, document)


def run_check(machine: Machine, name: str) -> Result:
    """Run a check in a guest and return its result."""
    say(f"{machine.guest.name}: {name}")
    done = machine.output(["python3", "-m", "tools.guests.checks", name], CHECK_SECONDS)
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        result: Result = json.loads(lines[-1])
        return result
    reason = f"not finished after {CHECK_SECONDS} s" if done.returncode == 124 else done.stderr.strip()[-300:]
    return {"check": name, "outcome": "fail", "reason": reason, "facts": {}}


def table(document: dict[str, Any]) -> str:
    """Return the results in Markdown: a row for each check, a column for each guest, and the reasons below."""
    guests = [one for one in document["guests"] if one["checks"]]
    heads = [f"{one['system'].split(' with')[0]}, Linux {one['kernel'].split('-')[0].split('+')[0]}" for one in guests]
    outcomes = [{each["check"]: each["outcome"] for each in one["checks"]} for one in guests]
    rows = [[name, *(each.get(name, "") for each in outcomes)] for name in CHECKS if any(name in each for each in outcomes)]
    rows.append(["date", *(max(each["date"] for each in one["checks"]) for one in guests)])
    reasons = [
        f"- {head}, {each['check']}: {each['outcome']}: {each['reason']}"
        for one, head in zip(guests, heads, strict=True)
        for each in one["checks"]
        if each["reason"]
    ]
    reasons += [f"- {one['name']}: fail: {one['failure']}" for one in document["guests"] if "failure" in one]
    return "\n".join([markdown(["check", *heads], rows, range(len(heads) + 1)), "", *reasons])


def commit() -> str:
    """Return the commit of this tree."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
