"""The contract of all KV policies, the differences between them, and the switches of HillInfer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcache.errors import UsageError
from llmcache.kv.pipeline.timeline import CPU, DEVICE, EVALUATE, LINK, Timeline
from llmcache.kv.policies import POLICIES, policy_class
from llmcache.kv.policies.base import PolicySettings
from llmcache.kv.policies.baselines import OracleSettings
from llmcache.kv.policies.hillinfer import HillInferSettings
from llmcache.kv.policies.indexed import MassSettings
from llmcache.kv.tiers import KvStore, Selection, repeated
from tests.unit.forked_device import FORKED
from tests.unit.forked_device import forked as forked
from tests.unit.kv_policy_parts import KV_HEADS, LAYERS, PAGE, Array, Case, Run, running, variants

CASE = Case()
QUARTER = PolicySettings(alpha=0.5)
ALL = PolicySettings(alpha=1.0)
FORGETFUL = [name for name in POLICIES if not policy_class(name).needs_weights]
"""Policies without sums of attention, because cropped tokens have already contributed to those."""


def check_selection(run: Run, selection: Selection) -> None:
    """Check that a selection is ascending, unique, in the middle, and has the right size (heads may share it)."""
    found, middle = selection.positions, run.store.middle
    assert found.shape[:2] == (run.store.batch, KV_HEADS)
    again = repeated(found)
    assert ((np.diff(found, axis=2) > 0) | again[..., 1:]).all()
    assert (np.diff(again.astype(int), axis=2) >= 0).all()  # repeated positions come last
    assert ((~again).sum((1, 2)) == KV_HEADS * expected(run)).all()
    if getattr(run.policy.settings, "allocation", "head") == "head":
        assert not again.any()
    if found.size:
        assert found.min() >= middle.start * PAGE
        assert found.max() < middle.stop * PAGE


def expected(run: Run) -> int:
    """Return how many tokens of the middle the settings allow; whole pages if the policy needs them."""
    inside = len(run.store.middle) * PAGE
    if run.policy.name == "full":
        return inside
    expected_count = min(inside, max(0, run.policy.settings.attended(run.store.length) - (run.store.length - inside)))
    return expected_count // PAGE * PAGE if run.policy.whole_pages else expected_count


def selections(name: str, settings: PolicySettings, case: Case, path: Path, steps: int = 3) -> list[Array]:
    with running(name, settings, case, path) as run:
        return [selection.positions for _ in range(steps) for selection, _ in run.step()]


# The contract


@pytest.mark.parametrize("name", POLICIES)
def test_selections_are_ordered_in_the_middle_and_of_the_right_size(name: str, tmp_path: Path) -> None:
    """Selecting also changes nothing."""
    with running(name, QUARTER, replace(CASE, batch=2), tmp_path) as run:
        assert expected(run) > 0
        for _ in range(18):  # the window moves
            traffic, found = run.store.traffic, []
            before = traffic.pages_up, traffic.pages_down, run.store.in_cpu(0, 0).tolist()
            for layer in (0, *range(LAYERS)):
                found.append(run.policy.select(layer, run.queries(layer)))
                check_selection(run, found[-1])
            np.testing.assert_array_equal(found[0].positions, found[1].positions)
            assert before == (traffic.pages_up, traffic.pages_down, run.store.in_cpu(0, 0).tolist())
            run.step()


@pytest.mark.parametrize("name", POLICIES)
def test_a_budget_of_the_whole_context_is_full_attention_bit_for_bit(name: str, tmp_path: Path) -> None:
    for number, case in enumerate(variants(CASE)):
        with running(name, ALL, case, tmp_path / str(number)) as run:
            for _ in range(2):
                for layer, (_, out) in enumerate(run.step()):
                    assert np.array_equal(out, run.full(layer)), case


@pytest.mark.parametrize("name", POLICIES)
def test_after_a_crop_and_after_a_reorder(name: str, tmp_path: Path) -> None:
    """After a reorder, each sequence has the same selection as before at its old place."""
    with running(name, QUARTER, replace(CASE, batch=2), tmp_path) as run:
        run.step()
        run.crop(201)
        assert all(selection.count > 0 for selection, _ in run.step())
        queries = run.queries(0)
        before = run.policy.select(0, queries).positions
        run.reorder([1, 0])
        np.testing.assert_array_equal(run.policy.select(0, queries[[1, 0]]).positions, before[[1, 0]])
        run.reorder([1, 1, 0])
        for layer in range(LAYERS):
            check_selection(run, run.policy.select(layer, run.case.queries(layer, run.steps)[[0, 1, 0]]))


@pytest.mark.parametrize("name", FORGETFUL)
def test_after_a_crop_the_selection_is_that_of_a_shorter_context(name: str, tmp_path: Path) -> None:
    short = replace(CASE, context=240)
    with running(name, QUARTER, CASE, tmp_path) as long:
        long.crop(240)
        queries, keys = long.queries(0), long.keys[0][:, :, :1]
        found = long.policy.select(0, queries)
        unseen = long.policy.unseen(0, found, queries, keys)
    with running(name, QUARTER, short, tmp_path / "short") as run:
        reference = run.policy.select(0, run.queries(0))
        np.testing.assert_array_equal(found.positions, reference.positions)
        for one, other in zip(unseen or (), run.policy.unseen(0, reference, queries, keys) or (), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("name", ["window", "h2o", "prefetch", "leoam", "hillinfer"])
def test_padding_is_selected_last(name: str, tmp_path: Path) -> None:
    with running(name, PolicySettings(token_budget=128), CASE, tmp_path, first=100) as run:
        assert run.policy.select(0, run.queries(0)).positions.min() >= 100


@pytest.mark.parametrize("name", ["leoam", "quest", "icecache", "mass"])
def test_a_sequence_that_begins_within_the_window(name: str, tmp_path: Path) -> None:
    """All candidates are padding."""
    with running(name, PolicySettings(token_budget=128), CASE, tmp_path, first=270) as run:
        for _ in range(20):
            check_selection(run, run.policy.select(0, run.queries(0)))
            run.step()


@pytest.mark.parametrize("name", POLICIES)
def test_a_short_context_is_attended_whole(name: str, tmp_path: Path) -> None:
    with running(name, PolicySettings(token_budget=64), Case(context=5), tmp_path) as run:
        for _ in range(20):
            for layer, (selection, out) in enumerate(run.step()):
                assert np.array_equal(out, run.full(layer))
                assert selection.count <= PAGE


@pytest.mark.parametrize("name", POLICIES)
def test_selections_hardly_depend_on_the_type_of_the_keys(name: str, tmp_path: Path) -> None:
    exact = selections(name, QUARTER, CASE, tmp_path / "exact", 2)
    rounded = selections(name, QUARTER, replace(CASE, dtype="bfloat16"), tmp_path / "rounded", 2)
    for found, reference in zip(rounded, exact, strict=True):
        assert found.shape[:2] == reference.shape[:2]
        for head, other in zip(found[0], reference[0], strict=True):
            assert len(np.intersect1d(head, other)) > 0.9 * len(np.unique(head))


# Settings


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        *(("full", "alpha", value) for value in (0.0, 1.01, float("nan"))),
        ("full", "token_budget", 0),
        ("full", "score_block_tokens", 1 << 17),
        ("full", "combine", "mean"),
        ("full", "scale", 0.0),
        ("oracle", "by", "luck"),
        ("mass", "scorer", "dci"),
        ("icecache", "scorer", "hnsw"),
        ("icecache", "full_layers", -1),
        ("icecache", "anchor_every", 0),
        ("kelle", "evicted", "kept"),
    ],
)
def test_settings_out_of_range_are_named(name: str, field: str, value: object) -> None:
    with pytest.raises(UsageError, match=rf"^{field}: {value!r} is out of range") as error:
        policy_class(name).settings_class(**{field: value})  # type: ignore[arg-type]
    assert error.value.hint


def test_budgets(tmp_path: Path) -> None:
    assert PolicySettings(alpha=0.1).attended(30) == 3 and PolicySettings(alpha=0.1).attended(31) == 4
    assert PolicySettings().attended(1000) == 200  # the paper's alpha
    assert PolicySettings(token_budget=100).attended(60) == 60
    with pytest.raises(UsageError, match=r"^token_budget: cannot be combined with alpha"):
        PolicySettings(alpha=0.2, token_budget=100)
    with KvStore(replace(CASE, pool=None).config(tmp_path)) as store:
        with pytest.raises(UsageError, match=r"^token_budget: must be at least 48, which sink and window take, not 47"):
            policy_class("full")(store, PolicySettings(token_budget=47))
        policy_class("full")(store, PolicySettings(token_budget=48))


# Differences between policies


def best_tokens(scores: Array, run: Run, tokens: int) -> Array:
    """Return the tokens of the middle with the highest scores, by sorting; the first of equal ones."""
    start, stop = run.store.middle.start * PAGE, run.store.middle.stop * PAGE
    order = np.argsort(-scores[:, :, start:stop].astype(np.float32), axis=2, kind="stable")[:, :, :tokens]
    return np.sort(order + start, axis=2)


@pytest.mark.parametrize("pool", [None, 3])
@pytest.mark.parametrize("name", ["prefetch", "hillinfer"])
def test_the_best_tokens_are_selected_on_every_tier(name: str, pool: int | None, tmp_path: Path) -> None:
    with running(name, QUARTER, Case(batch=2, pool=pool), tmp_path) as run:
        found = run.policy.select(1, run.queries(1)).positions
        np.testing.assert_array_equal(found, best_tokens(run.scores(1), run, found.shape[2]))


def test_leoam_finds_most_of_the_best_tokens_and_reads_only_promising_keys(tmp_path: Path) -> None:
    with running("leoam", QUARTER, Case(context=1000, pool=9), tmp_path) as run:
        found = run.policy.select(1, run.queries(1)).positions
        reference = best_tokens(run.scores(1), run, found.shape[2])
        assert len(np.intersect1d(found[0, 0], reference[0, 0])) > 0.7 * found.shape[2]
    read = []
    for name in ("leoam", "prefetch"):
        with running(name, PolicySettings(token_budget=80), Case(context=2000, pool=9), tmp_path / name) as run:
            before = run.store.traffic.bytes_between("ssd", "cpu", "score")
            run.policy.select(1, run.queries(1))
            read.append(run.store.traffic.bytes_between("ssd", "cpu", "score") - before)
    assert read[0] < 0.25 * read[1]


def test_h2o_adds_the_attention_of_each_step(tmp_path: Path) -> None:
    """An attention of 1000 to one token of the middle makes it the heaviest hitter."""
    with running("h2o", PolicySettings(token_budget=64), CASE, tmp_path) as run:
        unlike = Selection(np.full((1, KV_HEADS, 1), 77, np.int64))
        positions = run.policy.store.attended_positions(0, unlike)
        run.policy.attended(0, unlike, np.where(positions == 77, 1000, 0).repeat(2, axis=1).astype(np.float32))
        assert (run.policy.select(0, run.queries(0)).positions == 77).any(axis=2).all()


def test_the_window_policy_ends_where_the_window_of_the_store_begins(tmp_path: Path) -> None:
    with running("window", PolicySettings(token_budget=100), CASE, tmp_path) as run:
        found = run.policy.select(0, run.queries(0)).positions
        stop = run.store.middle.stop * PAGE
        assert found[0, 0].tolist() == list(range(stop - found.shape[2], stop))


# The switches of HillInfer

SWITCHES = [(True, True), (False, True), (True, False), (False, False)]


@FORKED
def test_the_switches_do_not_change_the_selection(tmp_path: Path) -> None:
    found = []
    for hie, bkp in SWITCHES:
        settings = HillInferSettings(alpha=0.4, hie=hie, bkp=bkp)
        found.append(selections("hillinfer", settings, Case(batch=2), tmp_path / f"{hie}{bkp}", steps=6))
    found.append(selections("hillinfer", HillInferSettings(alpha=0.4), Case(batch=2, ssd="csd"), tmp_path / "csd", steps=6))
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(one, two)
    timeline = spans(HillInferSettings(alpha=0.5), Case(ssd="csd"), tmp_path / "timeline")
    assert {span.resource for span in timeline.spans} == {CPU, DEVICE}


def spans(settings: HillInferSettings, case: Case, path: Path) -> Timeline:
    timeline = Timeline()
    with running("hillinfer", settings, case, path, timeline=timeline) as run:
        run.policy.select(0, run.queries(0))
    return timeline


def test_host_and_ssd_score_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread waits at its first call for the other to start, which fails if they run in sequence."""
    both = threading.Barrier(2, timeout=60)

    def started_together(real: Callable[..., Any]) -> Callable[..., Any]:
        first = [True]

        def scored(*arguments: Any) -> Any:
            if first:
                first.clear()
                both.wait()
            return real(*arguments)

        return scored

    for name in ("score_cpu", "score_ssd"):
        monkeypatch.setattr(KvStore, name, started_together(getattr(KvStore, name)))
    timeline = spans(HillInferSettings(alpha=0.5), Case(context=3000, pool=80), tmp_path)
    assert {(span.resource, span.stage) for span in timeline.spans} == {(CPU, EVALUATE), (LINK, EVALUATE)}


@pytest.mark.parametrize(("case", "first"), [(CASE, 0), (replace(CASE, batch=2, heads=2), 0), (CASE, 2 * PAGE)])
@pytest.mark.parametrize(("allocation", "by"), [("layer", "layer"), ("head", "mass")])
def test_mass_is_the_weight_of_softmax_over_everything(
    case: Case, first: int, allocation: str, by: str, tmp_path: Path
) -> None:
    """Mass from an index and from the tokens attended anyway equals the oracle, which examines all keys."""
    exact = MassSettings(alpha=0.5, scorer="exact", allocation=allocation)
    settings_by_name = {
        "mass": exact,
        "oracle": OracleSettings(alpha=0.5, by=by),
        "rounded": replace(exact, scorer="rounded"),
    }
    found = {}
    for name, settings in settings_by_name.items():
        with running(name.replace("rounded", "mass"), settings, case, tmp_path / name, first) as run:
            found[name] = [selection.positions for _ in range(6) for selection, _ in run.step()]
    for mass, oracle, rounded in zip(found["mass"], found["oracle"], found["rounded"], strict=True):
        np.testing.assert_array_equal(mass, oracle)
        rows = zip(*(side.reshape(-1, side.shape[2]) for side in (mass, rounded)), strict=True)
        assert sum(len(np.intersect1d(*pair)) for pair in rows) > 0.95 * (~repeated(mass)).sum()


@FORKED
@pytest.mark.parametrize(("pool", "ssd", "rows"), [(None, "file", 0), (4, "file", 0), (4, "file", 300), (4, "csd", 0)])
def test_heads_share_the_budget_of_a_layer(pool: int | None, ssd: str, rows: int, tmp_path: Path) -> None:
    """A head that needs few tokens leaves its share to the other; the output attends to each selected token once."""
    case = Sharp(batch=2, context=1200, pool=pool, ssd=ssd, rows=rows)
    newest = 0.0
    with running("mass", MassSettings(alpha=0.1, scorer="exact"), case, tmp_path) as run:
        for _ in range(18):  # the window moves
            middle, traffic = run.store.middle, run.store.traffic
            before = traffic.hits_cpu, traffic.hits_cpu + traffic.hits_ssd
            found = run.step()
            chosen = sum(int((~repeated(selection.positions)).sum()) for selection, _ in found)
            assert traffic.hits_cpu >= before[0]  # repeated positions are not read again
            assert traffic.hits_cpu + traffic.hits_ssd == before[1] + chosen
            for layer, (selection, out) in enumerate(found):
                counts = (~repeated(selection.positions)).sum(2)
                assert (counts.sum(1) == counts.sum(1)[0]).all() and (counts[:, 0] < counts[:, 1]).all()
                attended = np.zeros((2, KV_HEADS, run.keys[layer].shape[2]), bool)
                np.put_along_axis(attended, selection.positions, True, 2)
                attended[..., : middle.start * PAGE] = attended[..., middle.stop * PAGE :] = True
                np.testing.assert_allclose(out, run.over(layer, attended), atol=2e-3 if ssd == "csd" else 1e-5)
                newest = max(newest, check_unseen(run, layer, selection, attended))
        assert newest > 0.01, "the newest token gets part of the attention left out"


def check_unseen(run: Run, layer: int, selection: Selection, attended: Array) -> float:
    """Check the unseen mass (half of the attention left out) and mean value; return the newest token's largest weight."""
    batch, middle, keys = run.store.batch, run.store.middle, run.keys[layer]
    queries = run.case.queries(layer, run.steps - 1)[:batch]
    unseen = run.policy.unseen(layer, selection, queries, keys[:, :, -1:])
    assert unseen is not None
    grouped = queries.reshape(batch, KV_HEADS, -1, run.store.shape.head_dim)
    weights = np.exp(np.einsum("bhgd,bhtd->bhgt", grouped, keys) / np.sqrt(queries.shape[2]))
    weights /= weights.sum(-1, keepdims=True)
    left_out = (weights * ~attended[:, :, None]).sum(-1).reshape(batch, -1)
    assert left_out.max() > 0.1
    np.testing.assert_allclose(unseen[0], left_out / 2, atol=1e-5)
    inside = run.values[layer][:, :, middle.start * PAGE : middle.stop * PAGE]
    np.testing.assert_allclose(unseen[1], inside.mean(2), atol=2e-3)
    return float(weights[..., -1].max())


@dataclass(frozen=True)
class Sharp(Case):
    """A case with long queries for the first key head."""

    def queries(self, layer: int, step: int) -> Array:
        found = super().queries(layer, step)
        found[:, : self.heads // KV_HEADS] *= 4
        return found


@pytest.mark.parametrize("by", ["mass", "product"])
def test_the_oracle_selects_like_a_sort(by: str, tmp_path: Path) -> None:
    with running("oracle", OracleSettings(alpha=0.5, by=by), CASE, tmp_path) as run:
        queries, middle = run.queries(0).reshape(1, KV_HEADS, -1, 16), run.store.middle
        found = run.policy.select(0, run.queries(0)).positions
        logits = np.einsum("bhgd,bhtd->bhgt", queries, run.keys[0]) / 4
        weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        scores = (weights.sum(2) if by == "mass" else logits.max(2))[..., middle.start * PAGE : middle.stop * PAGE]
        expected = np.sort(np.argsort(-scores, -1)[..., : found.shape[2]], -1) + middle.start * PAGE
        np.testing.assert_array_equal(found, expected)
