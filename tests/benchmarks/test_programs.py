"""The harness of the programs: what it compares, how it names what came out, and how it is called."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest

from benchmarks import programs
from benchmarks.exactness_cases.case import Expected
from benchmarks.exactness_check import Found, Outcome
from benchmarks.program_cases import PROGRAMS
from benchmarks.program_cases.program import BATCH, ROWS, Fit, Program
from benchmarks.programs_check import CONFIGURATIONS, FEW, WHOLE, ProgramChecker, compare


def regression() -> Fit:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    rng = np.random.default_rng(0)
    return Fit(model, rng.normal(size=(ROWS, 3)), rng.normal(size=(ROWS, 1)), {"batch_size": BATCH})


def without_data() -> Fit:
    raise ZeroDivisionError


PROGRAM = Program(regression)


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_a_model_that_is_trained_by_fit_is_equal(configuration: Any) -> None:
    found = ProgramChecker(PROGRAM).check(configuration)
    assert (found.outcome, found.detail) == (Outcome.EQUAL, "")


def test_refusals_and_crashes_are_told_apart() -> None:
    refused = ProgramChecker(replace(PROGRAM, options={"stages": 50})).check(FEW)
    assert refused.outcome is Outcome.REFUSED
    crashed = ProgramChecker(replace(PROGRAM, options={"no_such_option": 1})).check(FEW)
    assert crashed.outcome is Outcome.CRASHED
    assert "no_such_option" in crashed.detail


def test_an_error_of_the_plain_program_is_named_as_such() -> None:
    found = ProgramChecker(Program(without_data)).check(WHOLE)
    assert found.outcome is Outcome.CRASHED
    assert found.detail == "plain Keras: ZeroDivisionError in without_data: "


def test_values_that_differ_or_are_missing_are_named() -> None:
    wanted = {"history": {"loss/0": 1.0}, "variable": {"w": np.array([1.0, 2.0]), "b": np.array([0.0, 1e-17])}}
    assert not list(compare(wanted, wanted, 1e-9))
    rounded = {**wanted, "variable": {"w": np.array([1.0, 2.0]), "b": np.array([1e-18, 0.0])}}
    assert not list(compare(rounded, wanted, 1e-9))
    other = {"history": {"loss/0": 1.1}, "variable": {"w": np.array([1.0, 2.0])}}
    assert [name for name, _ in compare(other, wanted, 1e-9)] == ["history loss/0", "variable b"]


def test_the_row_of_a_program_says_where_it_came_out_how() -> None:
    program = replace(PROGRAM, options={"batch_loss": "auto"})
    equal, wrong = Found(WHOLE, Outcome.EQUAL), Found(FEW, Outcome.WRONG, "history loss/0 differs by 1.0e-01")
    row = programs.to_row(program, [equal, wrong, wrong, equal])
    assert not row.ok
    assert row.measured == (
        "M = 1, two ranks: EQUAL; M = 4, M = 8: WRONG; batch_loss='auto'; history loss/0 differs by 1.0e-01"
    )
    missing = replace(PROGRAM, needs="no_such_package")
    assert programs.to_row(missing, []).measured == "left out: it needs no_such_package"


def test_the_summary_counts_programs_by_their_worst_outcome() -> None:
    equal, refused = Found(WHOLE, Outcome.EQUAL), Found(FEW, Outcome.REFUSED)
    by_nature = replace(PROGRAM, expected=Expected.REFUSED)
    assert programs.summarise(
        [(PROGRAM, [equal]), (PROGRAM, [equal, refused]), (by_nature, [refused]), (PROGRAM, [])]
    ) == ("4 programs: 1 equal, 0 differ as documented, 2 refused (1 by nature), 0 raw errors, 0 wrong, 1 not run")


def test_an_unknown_program_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert programs.main(["--only", "no_such_program"]) == 2
    assert "there are sentiment_from_strings, " in capsys.readouterr().out


def test_a_program_is_chosen_by_name_and_printed_as_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert programs.main(["--only", "word_vectors", "--one-process"]) == 0
    printed = capsys.readouterr().out
    assert "| text: word_vectors | equal | M = 1, M = 4, M = 8: EQUAL | ok |" in printed
    assert "1 programs: 1 equal" in printed


def test_what_is_refused_or_differs_has_a_reason() -> None:
    assert all(bool(p.reason) == (p.expected is not Expected.EQUAL) for p in PROGRAMS.values())
