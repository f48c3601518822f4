"""The harness of the exactness cases: what it builds, how it compares, and how it is called."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks import exactness
from benchmarks.exactness_cases import CASES
from benchmarks.exactness_cases.builders import FEATURES, batches, mlp, normal, train
from benchmarks.exactness_cases.case import Case, Expected, Training
from benchmarks.exactness_check import QUICK, Checker, Configuration, Found, Outcome, is_expected
from benchmarks.exactness_differences import differences
from benchmarks.exactness_plain import Results, build, double_precision, train_plainly
from benchmarks.exactness_table import REPRESENTATIVE

SIZES = (13, 13, 7)
WHOLE = Configuration(2, 1, "gpipe", SIZES)


def results(**changed: Any) -> Results:
    """Return results of a step, with some of them changed."""
    found = Results(
        losses=[np.float64(2.0)],
        aux=[None],
        gradients={"w": np.array([1.0, -4.0]), "b": np.array([1e-17, 0.0])},
        variables={"w": np.array([1.0, 2.0]), "steps": np.array(3)},
        slots={"sgd/w_momentum": np.array([1.0, -4.0]), "sgd/b_momentum": np.array([1e-17, 0.0])},
    )
    return replace(found, **changed)


def found(outcome: Outcome, configuration: Configuration = QUICK[0]) -> Found:
    return Found(configuration, outcome)


# --- building


@pytest.mark.parametrize("name", ["masked_lm", "dropout_0.5", "byol", "embedding_looked_up_twice"])
def test_a_case_built_twice_has_the_same_names_and_values(name: str) -> None:
    with double_precision():
        first, second = build(CASES[name], 7), build(CASES[name], 7)
    assert list(first.variables) == list(second.variables)
    for variable, again in zip(first.variables.values(), second.variables.values(), strict=True):
        assert variable is not again
        np.testing.assert_array_equal(variable.numpy(), again.numpy())
    for built in (first, second):
        built.training.optimizer.build(list(built.training.trained))
    slots = [[slot.path for slot in built.training.optimizer.variables] for built in (first, second)]
    assert slots[0] == slots[1]


def test_every_variable_of_a_case_is_known() -> None:
    with double_precision():
        built = build(CASES["dropout_0.5"], 7)
    states = [name for name, variable in built.variables.items() if "seed" in variable.name]
    assert len(states) == 3
    assert len(built.variables) == len(built.training.trained) + len(states)


def test_double_precision_is_left_behind() -> None:
    before = keras.config.floatx(), keras.config.dtype_policy()
    with double_precision():
        assert keras.layers.Dense(1).dtype == "float64"
    assert keras.config.floatx() == before[0]
    with pytest.raises(ZeroDivisionError), double_precision():
        raise ZeroDivisionError
    assert (keras.config.floatx(), keras.config.dtype_policy()) == before


def test_plain_training_is_deterministic_and_trains() -> None:
    with double_precision():
        first, second = (train_plainly(build(CASES["dropout_0.1"], 7), SIZES) for _ in range(2))
    assert not list(differences(first, second, 0.0))
    assert len({float(loss) for loss in first.losses}) == 3
    assert all(np.any(gradient) for gradient in first.gradients.values())


def test_a_case_whose_loss_is_not_finite_is_an_error() -> None:
    def make(seed: int) -> Training:
        model = mlp(1)
        return train(model, lambda x: tf.reduce_mean(model(x)) / 0.0, batches(seed, normal(FEATURES)))

    with pytest.raises(ValueError, match="the case is of no use"), double_precision():
        train_plainly(build(Case("nan", "test", make), 7), SIZES)


# --- comparing


def test_equal_results_do_not_differ() -> None:
    assert not list(differences(results(), results(), 1e-12))


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"losses": [np.float64(2.0 + 4e-12)]}, "loss of step 0"),
        ({"gradients": {"w": np.array([1.0, -4.0 + 8e-12]), "b": np.zeros(2)}}, "gradient of w"),
        ({"gradients": {"w": np.array([1.0, -4.0])}}, "gradient of b"),
        ({"variables": {"w": np.array([1.0, 2.0]), "steps": np.array(4)}}, "variable steps"),
        ({"variables": {"w": np.array([1.0, np.nan]), "steps": np.array(3)}}, "variable w"),
        ({"variables": {"w": np.array([1.0, 2.0], np.float32), "steps": np.array(3)}}, "variable w"),
        ({"slots": {"sgd/w_momentum": np.array([1.0, -4.0]), "sgd/b_momentum": np.ones(2)}}, "slot sgd/b_momentum"),
    ],
)
def test_the_first_tensor_that_differs_is_named(changed: dict[str, Any], name: str) -> None:
    assert next(differences(results(**changed), results(), 1e-12))[0] == name


def test_a_gradient_that_is_zero_apart_from_rounding_counts_by_the_largest() -> None:
    gradients = {"w": np.array([1.0, -4.0]), "b": np.array([-3e-16, 2e-16])}
    assert not list(differences(results(gradients=gradients), results(), 1e-12))


def test_an_error_is_relative_to_its_own_tensor() -> None:
    small = results(gradients={"w": np.array([1.0]), "b": np.array([1e-9])})
    other = results(gradients={"w": np.array([1.0]), "b": np.array([1.001e-9])})
    ((name, error),) = differences(other, small, 1e-12)
    assert name == "gradient of b"
    assert error == pytest.approx(1e-3)


def test_aux_outputs_are_compared_from_the_second_step_on() -> None:
    wanted = results(losses=[np.float64(1.0)] * 2, aux=[{"n": np.array(3)}, {"n": np.array(3), "z": np.array(1.0)}])
    other = results(losses=[np.float64(1.0)] * 2, aux=[None, {"n": np.array(6), "z": np.array(1.0)}])
    assert [name for name, _ in differences(other, wanted, 1e-12)] == ["aux n of step 1"]


# --- outcomes


@pytest.mark.parametrize(
    ("expected", "outcome", "ok"),
    [
        (Expected.EQUAL, Outcome.EQUAL, True),
        (Expected.EQUAL, Outcome.REFUSED, False),
        (Expected.EQUAL, Outcome.DOCUMENTED, False),
        (Expected.REFUSED, Outcome.REFUSED, True),
        (Expected.REFUSED, Outcome.EQUAL, False),
        (Expected.REFUSED, Outcome.WRONG, False),
        (Expected.REFUSED, Outcome.CRASHED, False),
        (Expected.DOCUMENTED, Outcome.DOCUMENTED, True),
        (Expected.DOCUMENTED, Outcome.WRONG, False),
    ],
)
def test_a_case_has_one_outcome_that_is_expected(expected: Expected, outcome: Outcome, ok: bool) -> None:
    case = Case("test", "test", lambda seed: pytest.fail("it is not built"), expected)
    assert is_expected(case, found(outcome)) is ok
    assert is_expected(case, found(outcome, WHOLE)) is (ok or outcome is Outcome.EQUAL)


def test_a_model_that_adds_up_is_equal() -> None:
    assert Checker(CASES["MeanSquaredError"]).check(QUICK[0]).outcome is Outcome.EQUAL


def test_an_error_of_the_project_refuses_and_any_other_crashes() -> None:
    refused = Checker(replace(CASES["MeanSquaredError"], options={"stages": 50})).check(QUICK[0])
    assert refused.outcome is Outcome.REFUSED
    assert refused.detail.startswith("P")
    crashed = Checker(replace(CASES["MeanSquaredError"], options={"no_such_option": 1})).check(QUICK[0])
    assert crashed.outcome is Outcome.CRASHED
    assert "no_such_option" in crashed.detail


# --- the command


def test_a_case_is_chosen_by_name_and_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert exactness.main(["--only", "MeanSquaredError", "--configurations", "two", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    printed = json.loads(line)
    assert (printed["case"], printed["expected"], printed["ok"]) == ("MeanSquaredError", "equal", True)
    assert [outcome["configuration"] for outcome in printed["outcomes"]] == [str(c) for c in QUICK]


def test_an_unknown_case_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert exactness.main(["--only", "no_such_case"]) == 2
    assert "there are masked_lm, " in capsys.readouterr().out


def test_the_table_names_cases_of_every_family_and_at_least_sixty() -> None:
    assert CASES.keys() >= REPRESENTATIVE
    assert len(REPRESENTATIVE) >= 60
    of_the_table = {CASES[name].family for name in REPRESENTATIVE}
    assert of_the_table == {case.family for case in CASES.values()}


def test_a_plan_of_unequal_replicas_may_be_refused() -> None:
    case = Case("test", "test", lambda seed: pytest.fail("it is not built"), Expected.EQUAL)
    refused = Found(QUICK[1], Outcome.REFUSED, "PlanError: such stages can meet only where")
    assert is_expected(case, refused)
    assert not is_expected(case, replace(refused, configuration=QUICK[0]))
    assert not is_expected(case, replace(refused, detail="ExactnessError: combines samples"))
