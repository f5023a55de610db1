"""Sizes, rates and durations."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcache.errors import UsageError
from llmcache.units import (
    format_duration,
    format_size,
    parse_bandwidth,
    parse_duration,
    parse_rate,
    parse_size,
    parse_size_with_unit,
)

MB = 10**6


@pytest.mark.parametrize(
    ("parse", "texts"),
    [
        (
            parse_size,
            {"0": 0, "4096": 4096, "4096B": 4096, "70M": 70 * MB, "70MB": 70 * MB, "70m": 70 * MB, " 70 M ": 70 * MB},
        ),
        (parse_size, {"70Mi": 70 * 2**20, "70MiB": 70 * 2**20, "1.5G": 1500 * MB, "0.1K": 100, "1.5Gi": 3 * 2**29}),
        (parse_size, {"2T": 2 * 10**12, "7Ei": 7 * 2**60}),
        (parse_rate, {"500M": 500 * MB, "500MB/s": 500 * MB, "2Gi/s": 2**31, "100": 100, "1.5 GB / s": 1500 * MB}),
        (
            parse_duration,
            {"2": 2 * 10**9, "0.5": 5 * 10**8, "250ms": 250 * MB, "10us": 10_000, "7ns": 7, "1d": 86400 * 10**9},
        ),
        (parse_bandwidth, {" 100 ": 100 * MB, "0.5": MB // 2, "100MB/s": 100 * MB, "2Gi/s": 2**31, "1.5G": 1500 * MB}),
        (parse_size_with_unit, {"70M": 70 * MB, "70Mi": 70 << 20, "4096B": 4096, "0": 0}),
        (parse_duration, {"1m30s": 90 * 10**9, "1.5h": 5400 * 10**9, "2min": 120 * 10**9}),
    ],
)
def test_values_are_parsed(parse: Callable[[str], int], texts: dict[str, int]) -> None:
    assert {text: parse(text) for text in texts} == texts


NO_SIZES = ["", "M", "-1", "1.5", "1,5G", "70X", "70iM", "1e9", "0x10", "nan", "inf", "10E", "9" * 30, "1M M", "١٢", "5%"]
NO_DURATIONS = ["", "s", "-1s", "1m30", "1 fortnight", "1s!", "9999999999999d"]


@pytest.mark.parametrize(
    ("parse", "kind", "text"),
    [
        *((parse_size, "size|bytes", text) for text in NO_SIZES),
        (parse_rate, "rate", "fast/s"),
        *((parse_duration, "duration", text) for text in NO_DURATIONS),
    ],
)
def test_invalid_values_are_named_in_the_error(parse: Callable[[str], int], kind: str, text: str) -> None:
    with pytest.raises(UsageError, match=kind) as caught:
        parse(text)
    assert f"'{text}'" in caught.value.message and caught.value.hint and caught.value.exit_code == 2


SIZES = {0: "0 B", 999: "999 B", 1000: "1.00 KB", 999_499: "999 KB", 999_999: "1.00 MB", 701_776_640: "702 MB"}
SIZES |= {1_500_000_000: "1.50 GB", -2_000_000: "-2.00 MB", 10**21: "1000 EB"}
DURATIONS = {0: "0 ns", 470_000_000: "470 ms", 999_999_999: "1.00 s", 1_050_000_000: "1.05 s", 59_960_000_000: "1 min 0 s"}
DURATIONS |= {125 * 10**9: "2 min 5 s", 12_000 * 10**9: "3 h 20 min", -5_000: "-5.00 µs"}


def test_values_are_formatted_with_three_digits_and_a_unit() -> None:
    assert {value: format_size(value) for value in SIZES} == SIZES
    assert {value: format_duration(value) for value in DURATIONS} == DURATIONS


@given(st.text(max_size=30))
def test_any_text_gives_a_value_or_a_usage_error(text: str) -> None:
    for parse in (parse_size, parse_rate, parse_duration, parse_bandwidth, parse_size_with_unit):
        try:
            assert 0 <= parse(text) < 2**63
        except UsageError as error:
            assert text in error.message
