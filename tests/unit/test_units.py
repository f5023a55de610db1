"""Sizes, rates and durations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcache.errors import UsageError, printable
from llmcache.units import (
    format_duration,
    format_rate,
    format_size,
    parse_duration,
    parse_rate,
    parse_size,
    shortened,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("70M", 70_000_000),
        ("70MB", 70_000_000),
        ("70m", 70_000_000),
        (" 70 M ", 70_000_000),
        ("70Mi", 70 * 2**20),
        ("70MiB", 70 * 2**20),
        ("1.5G", 1_500_000_000),
        ("0.1K", 100),
        ("1.5Gi", 3 * 2**29),
        ("2T", 2 * 10**12),
        ("7Ei", 7 * 2**60),
    ],
)
def test_sizes_are_understood(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    ["", "M", "-1", "1.5", "1,5G", "70X", "70iM", "1e9", "0x10", "nan", "inf", "10E", "9" * 30, "1M M", "١٢", "5%"],
)
def test_what_is_no_size_is_named_in_the_error(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text)
    assert f"'{text}'" in caught.value.message
    assert caught.value.hint
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("500M", 500_000_000), ("500MB/s", 500_000_000), ("2Gi/s", 2**31), ("100", 100), ("1.5 GB / s", 1_500_000_000)],
)
def test_rates_are_understood(text: str, bytes_per_s: int) -> None:
    assert parse_rate(text) == bytes_per_s


def test_a_bad_rate_is_shown_as_it_was_written() -> None:
    with pytest.raises(UsageError, match="'fast/s' is not a rate"):
        parse_rate("fast/s")


@pytest.mark.parametrize(
    ("text", "duration_ns"),
    [
        ("2", 2 * 10**9),
        ("0.5", 5 * 10**8),
        ("250ms", 250 * 10**6),
        ("10us", 10_000),
        ("7ns", 7),
        ("1m30s", 90 * 10**9),
        ("1.5h", 5400 * 10**9),
        ("2min", 120 * 10**9),
        ("1d", 86400 * 10**9),
    ],
)
def test_durations_are_understood(text: str, duration_ns: int) -> None:
    assert parse_duration(text) == duration_ns


@pytest.mark.parametrize("text", ["", "s", "-1s", "1m30", "1 fortnight", "1s!", "9999999999999d"])
def test_what_is_no_duration_is_named_in_the_error(text: str) -> None:
    with pytest.raises(UsageError, match="duration") as caught:
        parse_duration(text)
    assert f"'{text}'" in caught.value.message


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 KB"),
        (999_499, "999 KB"),
        (999_999, "1.00 MB"),
        (701_776_640, "702 MB"),
        (1_500_000_000, "1.50 GB"),
        (-2_000_000, "-2.00 MB"),
        (10**21, "1000 EB"),
    ],
)
def test_sizes_are_written_with_three_digits(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@pytest.mark.parametrize(
    ("duration_ns", "text"),
    [
        (0, "0 ns"),
        (470_000_000, "470 ms"),
        (999_999_999, "1.00 s"),
        (1_050_000_000, "1.05 s"),
        (59_960_000_000, "1 min 0 s"),
        (125 * 10**9, "2 min 5 s"),
        (12_000 * 10**9, "3 h 20 min"),
        (-5_000, "-5.00 µs"),
    ],
)
def test_durations_are_written_in_the_unit_that_suits(duration_ns: int, text: str) -> None:
    assert format_duration(duration_ns) == text


def test_rates_are_sizes_per_second() -> None:
    assert format_rate(500e6) == "500 MB/s"


@given(st.integers(0, 2**62))
def test_a_formatted_size_parses_to_the_same_three_digits(size_bytes: int) -> None:
    assert abs(parse_size(format_size(size_bytes)) - size_bytes) <= max(1, size_bytes * 0.0051)


@given(st.text(max_size=30))
def test_any_text_is_a_value_or_a_usage_error(text: str) -> None:
    for parse in (parse_size, parse_rate, parse_duration):
        try:
            assert 0 <= parse(text) < 2**63
        except UsageError as error:
            assert text in error.message


def test_what_could_steer_a_terminal_is_shown_escaped() -> None:
    assert printable("a\x1b[31mb\n\udcffc") == "a\\x1b[31mb\\n\\xffc"
    assert printable("modèle 日本.gguf [bold]") == "modèle 日本.gguf [bold]"


@pytest.mark.parametrize(
    ("letters", "told"),
    [(19, "/lib/x86_64/libc.so"), (13, "/lib…/libc.so"), (4, "/…so"), (1, "…")],
)
def test_a_path_that_is_too_long_loses_its_middle(letters: int, told: str) -> None:
    assert shortened("/lib/x86_64/libc.so", letters) == told
