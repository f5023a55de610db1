"""The options of `llmcache size`: what they mean, and that every wrong one is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcache.cache.question import ask, parse_bandwidth, parse_size_with_unit
from llmcache.errors import UsageError

MB = 10**6


@pytest.mark.parametrize(
    ("text", "bandwidth"),
    [
        ("100", 100 * MB), (" 100 ", 100 * MB), ("0.5", MB // 2), ("100MB/s", 100 * MB), ("1GB/s", 1000 * MB),
        ("500M", 500 * MB), ("2Gi/s", 2 << 30), ("200 MB/s", 200 * MB), ("1.5G", 1500 * MB),
    ],
)  # fmt: skip
def test_a_bandwidth_without_a_unit_counts_megabytes(text: str, bandwidth: int) -> None:
    assert parse_bandwidth("--bw", text) == bandwidth


@pytest.mark.parametrize(
    ("text", "size"), [("70M", 70 * MB), ("70Mi", 70 << 20), ("4096B", 4096), ("0", 0), ("1.5G", 1500 * MB)]
)
def test_a_size_has_its_unit(text: str, size: int) -> None:
    assert parse_size_with_unit("--loop", text) == size


def test_defaults_are_the_papers() -> None:
    question = ask(bw="100", loop="70M")
    assert (question.bandwidth, question.loop_bytes, question.caches) == (100 * MB, 70 * MB, ())
    assert (question.period_ns, question.hot_bytes, question.device) == (10**8, None, None)


def test_a_device_class_gives_what_is_not_given() -> None:
    watch = ask(device="watch")
    assert (watch.bandwidth, watch.caches, watch.hot_bytes, watch.from_device) == (100 * MB, (64 * MB,), 4 * MB, True)
    phone = ask(device="phone")
    assert (phone.bandwidth, phone.caches, phone.hot_bytes) == (1000 * MB, (256 * MB, 512 * MB), 0)
    changed = ask(device="phone", bw="2GB/s", cache="1G", hot="8M")
    assert (changed.bandwidth, changed.caches, changed.hot_bytes, changed.from_device) == (
        2000 * MB,
        (1000 * MB,),
        8 * MB,
        False,
    )


def test_a_models_own_hot_set_comes_before_the_classs() -> None:
    assert ask(device="watch", model="m.gguf").hot_bytes is None


def test_a_measurement_takes_the_place_of_a_bandwidth() -> None:
    question = ask(measure="/data", loop="70M", device="watch")
    assert (question.bandwidth, question.measure, question.from_device) == (None, "/data", False)


@pytest.mark.parametrize(
    ("options", "period_ns"), [({"t": "50ms"}, 50 * MB), ({"t": "0.1"}, 10**8), ({"tokens_per_second": "4"}, 250 * MB)]
)
def test_times(options: dict[str, str], period_ns: int) -> None:
    assert ask(bw="100", loop="70M", **options).period_ns == period_ns


GOOD = {"bw": "100", "loop": "70M"}
WRONG: list[tuple[dict[str, str | None], str]] = [
    ({"bw": "0"}, "--bw"),
    ({"bw": "-100"}, "--bw"),
    ({"bw": "0MB/s"}, "--bw"),
    ({"bw": "-1GB/s"}, "--bw"),
    ({"bw": "fast"}, "--bw"),
    ({"bw": ""}, "--bw"),
    ({"bw": "nan"}, "--bw"),
    ({"bw": "1e400"}, "--bw"),
    ({"bw": "99999999999999"}, "--bw"),
    ({"bw": None}, "--bw"),
    ({"loop": "70"}, "--loop"),
    ({"loop": "-70M"}, "--loop"),
    ({"loop": "0M"}, "--loop"),
    ({"loop": "0"}, "--loop"),
    ({"loop": "70X"}, "--loop"),
    ({"loop": "1e99"}, "--loop"),
    ({"cache": "64"}, "--cache"),
    ({"cache": "-64M"}, "--cache"),
    ({"cache": "100B"}, "--cache"),
    ({"hot": "4"}, "--hot"),
    ({"hot": "-4M"}, "--hot"),
    ({"t": "0"}, "--t"),
    ({"t": "-1"}, "--t"),
    ({"t": "soon"}, "--t"),
    ({"tokens_per_second": "0"}, "--tokens-per-second"),
    ({"tokens_per_second": "-3"}, "--tokens-per-second"),
    ({"tokens_per_second": "many"}, "--tokens-per-second"),
    ({"tokens_per_second": "inf"}, "--tokens-per-second"),
    ({"loop": None}, "--loop, --model and --cache"),
    ({"device": "fridge"}, "--device"),
    ({"model": "m.gguf"}, "--loop and --model"),
    ({"measure": "/data"}, "--bw and --measure"),
    ({"t": "1", "tokens_per_second": "1"}, "--t and --tokens-per-second"),
]


@pytest.mark.parametrize(("options", "named"), WRONG, ids=lambda value: str(value))
def test_what_is_wrong_is_named(options: dict[str, str | None], named: str) -> None:
    with pytest.raises(UsageError) as caught:
        ask(**{**GOOD, **options})
    assert caught.value.message.startswith(named)
    assert caught.value.hint


@given(st.dictionaries(st.sampled_from(list(ask.__kwdefaults__)), st.text(max_size=12)))
def test_any_text_is_a_question_or_a_usage_error(options: dict[str, str]) -> None:
    try:
        question = ask(**options)
    except UsageError as error:
        assert error.message.startswith("--")
        return
    assert question.period_ns > 0 and (question.bandwidth or 1) > 0
