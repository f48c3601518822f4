"""Every case of ``benchmarks.exactness_cases`` comes out as it must: equal to plain Keras, refused, or documented."""

from __future__ import annotations

import pytest

from benchmarks.exactness_cases import CASES
from benchmarks.exactness_check import Checker, four_configurations, is_expected


def test_there_are_cases_of_many_kinds() -> None:
    assert len(CASES) >= 60


@pytest.mark.parametrize("name", CASES)
def test_a_case_comes_out_as_it_must(name: str) -> None:
    """Under one of its four configurations: sixteen cases in a row cover all."""
    number = list(CASES).index(name)
    found = Checker(CASES[name]).check(four_configurations(number)[number // 4 % 4])
    assert is_expected(CASES[name], found), f"{CASES[name].expected} is wanted, but {found}"
