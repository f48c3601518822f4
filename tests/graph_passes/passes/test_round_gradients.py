"""Gradients that are cast from float16 are rounded to it after they are summed."""

from __future__ import annotations

import pytest

from dapple_tf.graph_passes.ir.graph import Value
from dapple_tf.graph_passes.passes.backward import StageGradients
from dapple_tf.graph_passes.passes.round_gradients import Narrow, RoundGradients, find_narrow
from tests.graph_passes.builders import assert_graph, graph

SUMS = """
    %stage0/forward = forward() {place, function='f', micro_batch=0}
    %stage0/gradients = gradients() {place, variables=['u', 'w']} -> (float32[4], float32[2])
    %stage1/gradients = gradients() {place, variables=['w']} -> (float32[2])
"""
TIED = """
    %stage0/tied_sum_0 = tied_sum({w0}, {w1}) {{place, variable='w'}} -> (float32[2])
    %stage0/reduced_gradients = reduced_gradients({u}, %stage0/tied_sum_0:0) {{place, variables=['u', 'w']}}
    | -> (float32[4], float32[2])
"""


def test_each_stage_s_part_of_a_sum_is_rounded_by_itself() -> None:
    before = SUMS + TIED.format(u="%stage0/gradients:0", w0="%stage0/gradients:1", w1="%stage1/gradients:0")
    narrow = (Narrow(0, "u", "float16"), Narrow(1, "w", "half"))
    after = TIED.format(u="%stage0/round:0", w0="%stage0/gradients:1", w1="%stage1/round:0")
    tied, reduced = after.strip().split("\n", 1)
    assert_graph(
        RoundGradients(narrow)(graph(before)),
        f"""
        {SUMS}
        %stage1/round = round(%stage1/gradients:0) {{place, dtypes=['half']}} -> (float32[2])
        {tied}
        %stage0/round = round(%stage0/gradients:0) {{place, dtypes=['float16']}} -> (float32[4])
        {reduced}
        """,
    )


def test_other_gradients_are_left_alone() -> None:
    before = SUMS + TIED.format(u="%stage0/gradients:0", w0="%stage0/gradients:1", w1="%stage1/gradients:0")
    assert_graph(RoundGradients((Narrow(1, "u", "float16"),))(graph(before)), before)


@pytest.mark.parametrize(("source", "narrow"), [("float16", True), ("half", True), ("bfloat16", False)])
def test_a_gradient_is_narrow_where_it_ends_with_a_cast_from_float16(source: str, narrow: bool) -> None:
    joint = graph(
        f"""
        %g = MatMul() -> ({source}[4])
        %cast = Cast(%g:0) -> (float32[4])
        %same = Identity(%cast:0) -> (float32[4])
        %sum = AddN(%cast:0, %cast:0) -> (float32[4])
        """
    )
    gradients = [
        StageGradients(variables=(("w", Value("same")), ("u", Value("sum")))),
        StageGradients(variables=(("w", Value("cast")),)),
    ]
    found = find_narrow(joint, gradients)
    assert found == ((Narrow(0, "w", source), Narrow(1, "w", source)) if narrow else ())
