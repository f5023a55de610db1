"""Tasks of `llmcache kv bench --task`: questions, scores, tables and plots, without torch."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mode
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from llmcache import cli
from llmcache.errors import DataError, LlmcacheError, MissingRequirement, UsageError
from llmcache.kv.bench.options import BenchOptions, task_of
from llmcache.kv.bench.results import STOCK, Answers, read_task
from llmcache.kv.bench.task import Candidate, candidates
from llmcache.kv.tasks import RECALL_MODEL, Questions, chain, passkey, recall
from llmcache.kv.tasks.english import ASSIGNED, RECALLED, documents, texts
from llmcache.kv.tasks.recall import BEGINNING, FIRST_KEY, FIRST_NOISE, FIRST_VALUE, VOCABULARY, symbols
from llmcache.report import kv_task
from tests.unit.report_parts import unlaid as unlaid
from tests.unit.task_parts import answers, of_policies

pytestmark = pytest.mark.usefixtures("unlaid")

PLAIN: dict[str, Any] = {
    "policy": None, "profile": "measured", "context": None, "batch": 1, "steps": 4, "block": 256, "device": "csd",
    "csd": "smartssd", "path": "/var/tmp", "compute": "paper", "seed": 0,
}  # fmt: skip


def random() -> np.random.Generator:
    return np.random.default_rng(3)


# The language of the recall model: each answer is in its context once, after its key


def check_answers(found: Questions, tokens: int, pairs: int) -> None:
    assert found.ids.shape[1] == tokens
    assert (found.ids[:, 0] == BEGINNING).all()
    assert found.ids.max() < VOCABULARY
    for ids, asked, right in zip(found.ids, found.asked, found.answers, strict=True):
        is_key = (ids >= FIRST_KEY) & (ids < FIRST_VALUE)
        assert is_key.sum() == pairs
        assert ((ids >= FIRST_VALUE) & (ids < FIRST_NOISE)).sum() == pairs
        for key, answer in zip(asked, right, strict=True):
            (place,) = np.flatnonzero(ids == key)
            assert ids[place + 1] == answer


def test_recall_asks_once_for_each_of_the_pairs() -> None:
    for tokens, pairs, questions in ((129, 64, 8), (100, 16, 16)):
        found = recall(random(), 3, tokens, pairs=pairs, questions=questions)
        check_answers(found, tokens, pairs)
        assert all(len(set(asked)) == questions for asked in found.asked.tolist())


def test_a_passkey_is_at_its_depth() -> None:
    for depth, place in ((0, 1), (0.5, 49), (1, 98)):
        found = passkey(random(), 2, 100, depth=depth)
        check_answers(found, 100, 1)
        assert (found.ids[:, place] == found.asked[:, 0]).all()


def test_a_chain_visits_all_pairs_and_returns() -> None:
    found = chain(random(), 3, 300, steps=66)
    keys, asked = found.first, []
    for step in range(66):
        asked.append(keys)
        keys = found.next_keys(found.answers[:, step])
    questions = Questions(found.ids, np.stack(asked[:64], 1), found.answers[:, :64])
    check_answers(questions, 300, 64)
    assert all(len(set(row)) == 64 for row in questions.asked.tolist())
    assert (asked[64] == found.first).all()
    right = found.next_keys(found.answers[:, 0])
    assert (found.next_keys(found.answers[:, 1]) != right).all(), "a wrong answer leads to another key"
    assert (found.next_keys(np.full(3, BEGINNING)) == found.first).all()


def test_the_weights_match_their_provenance() -> None:
    written = re.search(r"SHA-256 of model.safetensors: ([0-9a-f]{64})", (RECALL_MODEL / "PROVENANCE.md").read_text())
    assert written
    assert hashlib.sha256((RECALL_MODEL / "model.safetensors").read_bytes()).hexdigest() == written[1]


# Questions


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@pytest.mark.parametrize("task", ["passkey", "recall", "needle"])
def test_texts_have_their_length_and_contain_the_answers(task: str) -> None:
    probes = list(texts(task, random(), 3000, 1, letters, [0]))
    assert len(probes) == (20 if task == "passkey" else 1)
    for probe in probes:
        assert probe.ids.shape == (1, 3000) and probe.ids[0, 0] == 0
        for question, answer in zip(probe.asked, probe.answers, strict=True):
            right = said(answer).strip()
            assert right.isdecimal() and right in said(probe.ids) and right not in said(question)
    assert len(probes[0].asked) == (RECALLED if task == "recall" else 1)
    assert (probes[0].depths is None) == (task == "recall")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: recall(random(), 1, 128), "tokens: must be at least 129 .*, not 128"),
        (lambda: passkey(random(), 1, 2, depth=0.5), "tokens: must be at least 3 .*, not 2"),
        (lambda: symbols("sorting", random(), 100, 1), "the recall model has no 'sorting'"),
        (lambda: [*texts("recall", random(), 100, 1, letters, [])], "--context: must be at least .*, not 100"),
    ],
)
def test_invalid_sizes_are_refused(made: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        made()


def said(tokens: Any) -> str:
    return "".join(map(chr, tokens[0]))


def test_variables_are_requested_along_their_chain() -> None:
    (probe,) = texts("variables", random(), 3000, 1, letters, [])
    text, lead, *commas = map(said, (probe.ids, *probe.asked))
    names = [said(answer).strip() for answer in probe.answers]
    assert len(names) == ASSIGNED and commas == [","] * (ASSIGNED - 1) and probe.ids.shape == (1, 3000)
    of = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\. ", text)
    assert len(of) == 2 * ASSIGNED
    chain = [next(found for found in lead.split() if found.strip(".").isdecimal()).strip("."), *names]
    assert all((name, before) in of for before, name in itertools.pairwise(chain))


@pytest.mark.parametrize("task", ["common", "frequent"])
def test_the_requested_word_is_the_most_frequent(task: str) -> None:
    for probe in texts(task, random(), 4000, 3, letters, [0]):
        words = said(probe.ids).split("\n")[1].split()[:-1]  # the last word may be incomplete
        assert probe.ids.shape == (1, 4000) and said(probe.answers[0]).strip() == mode(words)


def test_texts_of_the_machine_are_from_different_packages_and_name_them(tmp_path: Path) -> None:
    body = "".join(f"{number:07} " for number in range(400))
    for number in range(3):
        package = tmp_path / "doc" / f"package{number}"
        package.mkdir(parents=True)
        (package / "README").write_text(body)
        (package / "NEWS.gz").write_bytes(gzip.compress(body.encode()))
    (tmp_path / "man" / "man1").mkdir(parents=True)
    (tmp_path / "man" / "man1" / "short.1.gz").write_bytes(gzip.compress(b"short"))
    (tmp_path / "doc" / "README").write_bytes(b"\xff" * 4000)
    found = list(documents(random(), 100, 3, letters, [0], tmp_path))
    assert len({one.source.split("/")[-2] for one in found}) == 3
    for one in found:
        path, _, letter = one.source.partition(" from letter ")
        read = gzip.decompress(Path(path).read_bytes()).decode() if path.endswith(".gz") else Path(path).read_text()
        content = "".join(map(chr, [*one.ids[0, 1:], *one.following[0]]))
        assert one.ids.shape == (1, 100) and one.following.shape == (1, 65) and one.ids[0, 0] == 0
        assert read[int(letter) :].startswith(content)
    again = list(documents(random(), 100, 3, letters, [0], tmp_path))
    assert [one.source for one in again] == [one.source for one in found]
    with pytest.raises(MissingRequirement, match="only 3 of the 4 texts of 165 tokens"):
        list(documents(random(), 100, 4, letters, [], tmp_path))


# Options


def test_the_default_is_the_recall_model() -> None:
    setup = task_of("passkey", 2, BenchOptions(**PLAIN))
    assert setup.model.name == "recall" and list(setup.contexts) == [4096] and list(setup.budgets) == [64, 128, 256]
    assert [(one.policy, one.budget) for one in candidates(replace(setup, policies=["full", "quest"], budgets=[64]))] == [
        (STOCK, None), ("full", None), ("quest", 64),
    ]  # fmt: skip
    assert [Candidate("icecache-reuse", 64).title, Candidate(STOCK, None).title] == ["IceCache (reuse)", "DynamicCache"]
    with pytest.raises(UsageError, match="no policy 'icecache-magic'") as error:
        replace(setup, policies=["icecache-magic"])
    assert "icecache-reuse" in (error.value.hint or "")


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ("--task sorting", "--task"),
        ("--policy magic", "--policy: there is no policy 'magic'"),
        ("--budget 64,0", "--budget: 0"),
        ("--alpha 0.2", "--alpha"),
        ("--context 1k,much", "--context: 'much'"),
        ("--plot run.gif", ".png, .svg or .html"),
    ],
)
def test_invalid_options_are_named_before_a_run(words: str, field: str) -> None:
    with pytest.raises(LlmcacheError, match=field):
        invoke("bench", "--task", "passkey", *words.split())


def invoke(*words: str) -> None:
    """Run the command, and raise its errors."""
    result = CliRunner().invoke(cli.app, ["kv", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output


# Scores


def test_shares_and_their_errors() -> None:
    assert answers([10, 10]).share == 1 and answers([10, 10]).error == 0
    assert Answers((3,), (4,)).error == pytest.approx(math.sqrt(0.75 * 0.25 / 4))
    found = answers([0, 10, 10, 0])
    assert found.share == 0.5 and found.error == pytest.approx(0.5 / math.sqrt(3)), "answers in a context are correlated"
    assert answers([0, 10, 5], depths=[0.5, 0.0, 0.5]).by_depth() == {0.0: 1.0, 0.5: 0.25}


# Saving, printing and plotting


def test_a_saved_task_is_read_back_unchanged() -> None:
    found = of_policies()
    data = json.loads(json.dumps(found.document()))
    assert read_task(data, "run.json").document() == found.document()


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (["rows"], [], "rows: the document has none"),
        (["rows", 0, "policy"], "quest", "'stock' has none"),
        (["rows", 1, "answers", "right"], [1], "different lengths"),
        (["rows", 1, "memory"], {}, "kv_bytes"),
    ],
)
def test_errors_name_the_damaged_field(path: list[Any], value: Any, field: str) -> None:
    data = json.loads(json.dumps(of_policies().document()))
    place: Any = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(DataError, match=field):
        read_task(data, "run.json")


def test_a_saved_task_is_printed_and_plotted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kv_task.show(of_policies(own=9), False)
    assert "90.0% ± 0.0%" in capsys.readouterr().out
    run = tmp_path / "run.json"
    run.write_text(json.dumps(of_policies().document()))
    invoke("plot", str(run), "-o", str(tmp_path / "run.html"))
    assert 'src="data:image/png' in (tmp_path / "run.html").read_text()
    run.write_text(json.dumps({"schema": "llmcache.kv-task/1"}))
    with pytest.raises(DataError, match="task: missing"):
        invoke("plot", str(run), "-o", str(tmp_path / "other.png"))
    with pytest.raises(UsageError, match="--plot"):
        invoke("bench", "--task", "passkey", "--plot", str(tmp_path / "run.html"))
