"""Random programs of ruled ops train as plain TensorFlow does, or are refused; and a wrong rule is found."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st

from benchmarks.op_census import ops_to_try, run
from benchmarks.op_programs.applications import BY_HAND
from benchmarks.op_programs.check import Outcome, check
from benchmarks.op_programs.pipelines import SETTINGS, check_parts, check_pipeline
from benchmarks.op_programs.program import Program
from dapple_tf.frontend.dependence import analyse
from tests.draws import draw

NO_FAULT = (Outcome.EQUAL, Outcome.REFUSED, Outcome.INVALID)
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
NUMBERS = st.lists(st.integers(0, 720719), min_size=10, max_size=60).map(tuple)


@pytest.mark.timeout(1200)
def test_programs_of_ruled_ops_are_equal_to_plain_tensorflow_or_refused() -> None:
    @draw(few=8, many=200, phases=PHASES)
    @given(st.sampled_from(ops_to_try()), st.lists(st.sampled_from(sorted(BY_HAND)), max_size=3), NUMBERS)
    def try_program(op: str, others: list[str], numbers: tuple[int, ...]) -> None:
        found = check_parts(Program((op, *others), numbers))
        assert found.outcome in NO_FAULT, found

    try_program()


@pytest.mark.timeout(1200)
def test_pipelines_of_ruled_ops_are_equal_to_plain_tensorflow_or_refused() -> None:
    @draw(few=2, many=40, phases=PHASES)
    @given(st.sampled_from(ops_to_try()), NUMBERS, st.sampled_from(SETTINGS))
    def try_pipeline(op: str, numbers: tuple[int, ...], setting: object) -> None:
        program = Program((op,), numbers)
        if check(program).outcome is Outcome.EQUAL:
            found = check_pipeline(program, setting)  # type: ignore[arg-type]  # a Setting
            assert found.outcome in NO_FAULT, found

    try_pipeline()


def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_rows_on_axis_0, weighted_by_sample = (0, 0, 0, 0, 0, 0), (0, 2)
    program = Program(("ReverseV2",), (*plain_rows_on_axis_0, *weighted_by_sample))
    assert check(program).outcome is Outcome.REFUSED
    monkeypatch.setattr(analyse, "_RULES", {**analyse._RULES, "ReverseV2": lambda scope, node, kinds: kinds[0]})
    assert check(program).outcome is Outcome.WRONG


@pytest.mark.parametrize("op", ["Transpose", "Exp", "GatherV2", "Conv2D"])
def test_the_first_choices_give_a_program_that_is_equal(op: str) -> None:
    assert check(Program((op,), ())).outcome is Outcome.EQUAL


def test_the_table_has_a_row_for_each_class_and_op() -> None:
    rows = list(run(programs=1, pipelines=0, only=["Exp"]))
    assert [row.figure for row in rows][-2:] == ["Exp", "all programs"]
    assert all(row.ok for row in rows)
