"""Quantities with units: bits and bytes, powers of 1000 and 1024, and refused text."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.errors import ClusterError
from dapple_tf.profiler.units import (
    BYTES,
    BYTES_A_SECOND,
    SECONDS,
    format_bytes,
    format_difference,
    format_quantity,
    format_samples,
    format_seconds,
    format_seconds_fixed,
    format_slower,
    parse_quantity,
    scale_bytes,
    scale_time,
)
from tests.quick import at_most


@pytest.mark.parametrize(
    ("text", "units", "value"),
    [
        ("130GB/s", BYTES_A_SECOND, 130_000_000_000),
        ("25Gbps", BYTES_A_SECOND, 3_125_000_000),
        ("10 Mbps", BYTES_A_SECOND, 1_250_000),
        ("8Gbit/s", BYTES_A_SECOND, 1_000_000_000),
        ("1.5 GiB/s", BYTES_A_SECOND, 1_610_612_736),
        (1e9, BYTES_A_SECOND, 1_000_000_000),
        ("1e9", BYTES_A_SECOND, 1_000_000_000),
        ("16GB", BYTES, 16_000_000_000),
        ("16GiB", BYTES, 17_179_869_184),
        ("4kB", BYTES, 4000),
        (" .5 KiB ", BYTES, 512),
        ("5us", SECONDS, 5e-6),
        ("5µs", SECONDS, 5e-6),
        ("0.5ms", SECONDS, 5e-4),
        (2, SECONDS, 2),
        ("-3s", SECONDS, -3),
    ],
)
def test_a_quantity_is_read_in_base_units(text: str | float, units: Mapping[str, Decimal], value: float) -> None:
    assert parse_quantity(text, units) == value


@pytest.mark.parametrize(
    ("text", "units", "message"),
    [
        ("25Gigs", BYTES_A_SECOND, r"'25Gigs' has the unknown unit 'Gigs'.*known are B/s, .*Gbps"),
        ("16Gbps", BYTES, "unknown unit 'Gbps'.*known are B, .*GiB"),
        ("5 min", SECONDS, "unknown unit 'min'.*known are s, ms, us"),
        ("10gbps", BYTES_A_SECOND, r"unknown unit 'gbps' \(did you mean 'Gbps'\?\)"),
        ("fast", BYTES_A_SECOND, "'fast' is not a number with a unit such as 5"),
        ("", SECONDS, "'' is not a number"),
        ("nan", SECONDS, "'nan' is not a number"),
        ("1e99999999s", SECONDS, "'1e99999999s' is too large or too small"),
    ],
)
def test_text_that_is_no_quantity_is_refused(text: str, units: Mapping[str, Decimal], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        parse_quantity(text, units)


@pytest.mark.parametrize(
    ("value", "units", "text"),
    [(3.125e9, BYTES_A_SECOND, "25Gbps"), (16e9, BYTES, "16GB"), (2.0**34, BYTES, "16GiB"), (5e-6, SECONDS, "5us")],
)
def test_a_quantity_is_printed_in_its_shortest_form(value: float, units: Mapping[str, Decimal], text: str) -> None:
    assert format_quantity(value, units) == text


@given(value=st.floats(0, 1e30), units=st.sampled_from([BYTES, BYTES_A_SECOND, SECONDS]))
def test_a_printed_quantity_is_exact(value: float, units: Mapping[str, Decimal]) -> None:
    assert parse_quantity(format_quantity(value, units), units) == value


@pytest.mark.parametrize(
    ("seconds", "wanted"), [(0, (1, "s")), (90, (1, "s")), (1, (1, "s")), (0.5, (1e3, "ms")), (9e-4, (1e6, "µs"))]
)
def test_the_unit_for_a_time(seconds: float, wanted: tuple[float, str]) -> None:
    assert scale_time(seconds) == wanted


@pytest.mark.parametrize(
    ("most", "wanted"), [(0, (1, "B")), (999, (1, "B")), (1e3, (1e3, "kB")), (5e8, (1e6, "MB")), (16e9, (1e9, "GB"))]
)
def test_the_unit_for_bytes(most: float, wanted: tuple[float, str]) -> None:
    assert scale_bytes(most) == wanted


@pytest.mark.parametrize(
    ("seconds", "text", "fixed"),
    [
        (0.0, "0 s", "0.0 ms"),
        (13.7, "13.7 s", "13.700 s"),
        (0.01234567, "12.35 ms", "12.3 ms"),
        (5e-6, "5 µs", "5.0 µs"),
    ],
)
def test_seconds_are_written_with_their_unit(seconds: float, text: str, fixed: str) -> None:
    assert format_seconds(seconds) == text
    assert format_seconds_fixed(seconds) == fixed


def test_seconds_that_are_compared_have_one_unit() -> None:
    found = [format_seconds_fixed(*pair) for pair in ((46.2e-6, 0.0), (0.0, 46.2e-6), (0.0012, 3.5), (3.5, 0.0012))]
    assert found == ["46.2 µs", "0.0 µs", "0.001 s", "3.500 s"]


def test_a_difference_that_would_be_rounded_to_none_is_told_in_words() -> None:
    differences = (0.013, -0.013, 0.0005, 0.0004, -1e-9, 0.0)
    assert [*map(format_difference, differences)] == ["1.3%", "1.3%", "0.1%", *2 * ["less than 0.1%"], "0.0%"]


def test_bytes_are_written_with_their_unit_and_the_digits_asked_for() -> None:
    assert [format_bytes(count) for count in (0, 52, 15.23e9)] == ["0 B", "52 B", "15.2 GB"]
    assert format_bytes(15.234e9, 4) == "15.23 GB"


@pytest.mark.parametrize(
    "text",
    [
        "1" * 2000 + " x y",
        "1" * 100_000,
        "1" * 900 + "." + "1" * 90 + " x y",
        "1" + " " * 100_000 + "x y",
        "1e" + "9" * 900,
    ],
)
def test_a_long_text_is_refused_at_once(text: str) -> None:
    """Two thousand digits once took 20 s."""
    with (
        at_most(0.5),
        pytest.raises(ClusterError, match=r"is not a number with a unit|is too large or too small") as caught,
    ):
        parse_quantity(text, SECONDS)
    assert len(str(caught.value)) < 300


def test_a_number_of_samples_has_the_noun_in_its_form() -> None:
    assert [format_samples(n) for n in (0, 1, 2)] == ["0 samples", "1 sample", "2 samples"]


def test_what_takes_more_than_twice_as_long_has_no_percentage() -> None:
    assert [*map(format_slower, (1.013, 1.996, 2.0, 14.529))] == [
        "1.3% slower",
        "99.6% slower",
        "2.0 times as long",
        "14.5 times as long",
    ]
