"""`llmcache reproduce io-caching --quick`, end to end: page and JSON, nothing loaded from elsewhere, nothing overwritten."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from llmcache import cli
from llmcache.report.reproduce import REPRODUCTIONS

VERDICTS = {"confirmed", "partly", "not confirmed"}
KINDS = ("modelled", "measured", "computed")


class Resources(HTMLParser):
    """Collects everything that a page loads or links to."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.targets += [value or "" for name, value in attrs if name in {"src", "href", "srcset", "data", "action"}]


def run(args: Sequence[str]) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.run(cli.app, "llmcache", ["reproduce", *args])
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("results") / "new"
    assert run(["io-caching", "--quick", "-o", str(directory)]) == 0
    return directory


@pytest.fixture(scope="module")
def document(written: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((written / "io-caching.json").read_text())
    return found


def test_two_files_are_written(written: Path) -> None:
    assert sorted(path.name for path in written.iterdir()) == ["io-caching.html", "io-caching.json"]


def test_the_document_has_every_app_policy_size_and_bandwidth(document: dict[str, Any]) -> None:
    assert document["schema"] == "llmcache.reproduce.io-caching/1"
    assert set(document["cache_sizes_per_trace"].values()) == {10}
    rows = document["results"]
    cells = {(row["trace"], row["policy"], row["cache_bytes"]) for row in rows}
    assert len(rows) == len(cells) == 8 * 5 * 10
    assert {row["policy"] for row in rows} == {"lru", "lecar", "algorithm1", "llmcache", "belady"}
    assert {row["trace"] for row in rows if row["inference"] == "remote"} == {"copilot", "perplexity", "claude", "gemini"}
    best = {(row["trace"], row["cache_bytes"]): row["hit_ratio"] for row in rows if row["policy"] == "belady"}
    for row in rows:
        whole_extents = 0.01 if row["policy"] == "llmcache" else 0  # come in, where Belady inserts a block
        assert 0 <= row["hit_ratio"] <= best[row["trace"], row["cache_bytes"]] + whole_extents
        assert [latency["bw"] for latency in row["latencies"]] == [10**8, 2 * 10**8, 5 * 10**8, 10**9]
        assert row["cache_bytes"] <= row["footprint_bytes"]
    assert "synthetic" in document["traces"]
    assert document["latency_model"]["kind"] == "modelled" and document["overhead"]["kind"].startswith("measured")


def test_every_claim_has_quote_rule_kind_and_verdicts_with_numbers(document: dict[str, Any]) -> None:
    claims = document["claims"]
    assert len({(claim["about"], claim["name"]) for claim in claims}) == len(claims) >= 25
    for claim in claims:
        assert claim["paper"]["quote"] and re.match(r"[34]\.[123]", claim["paper"]["section"])
        assert claim["rule"] and claim["kind"].startswith(KINDS)
        assert claim["findings"]
        for finding in claim["findings"].values():
            assert finding["verdict"] in VERDICTS
            assert re.search(r"[0-9]|SEQ", finding["ours"])
            assert finding["values"] and all(isinstance(value, int | float) for value in finding["values"].values())
    hardware = {claim["name"]: claim["findings"]["formula (1)"] for claim in claims if claim["about"] == "hardware"}
    assert hardware["watch-loop"]["values"] == {"loop_bytes": 70_000_000}
    assert hardware["phone-loops"]["values"] == {"least_bytes": 356_000_000, "most_bytes": 612_000_000}


def test_the_page_loads_nothing_and_runs_nothing(written: Path) -> None:
    page = (written / "io-caching.html").read_text()
    found = Resources()
    found.feed(page)
    assert not found.tags & {"script", "link", "iframe", "object", "embed"}
    assert all(target.startswith(("data:image/", "#")) for target in found.targets)
    assert sum(target.startswith("data:image/") for target in found.targets) == 12  # figures 4 and 5, remote, 8 of accesses
    assert "url(http" not in page and "@import" not in page


def test_the_page_says_what_is_whose(written: Path, document: dict[str, Any]) -> None:
    page = (written / "io-caching.html").read_text()
    for words in ("(modelled here)", "(measured here)", "synthetic", '<th scope="col">paper</th>', "not public"):
        assert words in page
    for claim in document["claims"]:
        for finding in claim["findings"].values():
            assert finding["ours"].split(",")[0].split("'")[0] in page


def test_files_are_replaced_only_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, document = ["kelle", "--quick", "-o", str(tmp_path / "new")], tmp_path / "new" / "kelle.json"
    assert run(words) == 0
    capsys.readouterr()
    before = document.stat().st_mtime_ns
    assert run(words) == 2
    told = capsys.readouterr()
    assert told.out == "" and "-o: " in told.err and "--force" in told.err
    assert document.stat().st_mtime_ns == before
    assert run([*words, "--force"]) == 0
    assert document.stat().st_mtime_ns > before
    told = capsys.readouterr()
    assert told.err == "" and "confirmed" in told.out and "written: " in told.out


def test_json_goes_to_stdout_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["kelle", "--quick", "--json"]) == 0
    told = capsys.readouterr()
    assert told.err == "" and json.loads(told.out)["schema"] == "llmcache.reproduce.kelle/1"
    assert not list(tmp_path.iterdir())


def test_bad_input_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for args, named in (
        (["io-cashing"], "NAME: there is no reproduction called 'io-cashing'"),
        ([], "NAME"),
        (["io-caching", "-o", str(file)], "-o: "),
        (["io-caching", "-o", str(file / "below")], "-o: "),
    ):
        assert run(args) == 2
        told = capsys.readouterr()
        assert told.out == "" and named in told.err and "Traceback" not in told.err
    assert not (tmp_path / "below").exists()


def test_help_names_every_reproduction(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in REPRODUCTIONS)
