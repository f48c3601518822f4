"""Stages of a cut graph, and the balanced choice of where to cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.errors import PartitionError
from dapple_tf.graph_passes.analysis.layers import find_layers
from dapple_tf.graph_passes.passes.partition import StageGraph, balance, partition
from tests.graph_passes.builders import graph, refused, value

SKIP = """
    inputs %x
    %x = arg() -> (float32[?,4])
    %two = Const() -> (float32[])
    %a = Mul(%x:0, %two:0) -> (float32[?,4])
    %b = Mul(%a:0, %two:0) -> (float32[?,4])
    %c = Exp(%b:0) -> (float32[?,4])
    %d = Add(%c:0, %a:0) -> (float32[?,4])
    outputs %d:0
"""


def cut(text: str, *starts: int) -> StageGraph:
    """The graph of ``text``, cut before these layers."""
    captured = graph(text)
    return partition(find_layers(captured), starts)


def test_a_skip_is_routed_through_the_stages_between() -> None:
    stages = cut(SKIP, 1, 2, 3).stages
    assert [(stage.index, stage.first_layer, stage.last_layer, stage.nodes) for stage in stages] == [
        (0, 0, 0, ("a",)),
        (1, 1, 1, ("b",)),
        (2, 2, 2, ("c",)),
        (3, 3, 3, ("d",)),
    ]
    a, b, c = value("a"), value("b"), value("c")
    assert [stage.inputs for stage in stages] == [(), (a,), (a, b), (a, c)]
    assert [stage.outputs for stage in stages] == [(a,), (a, b), (a, c), ()]


def test_a_stage_has_whole_layers_and_no_floating_nodes() -> None:
    stages = cut(SKIP, 2)
    assert [stage.nodes for stage in stages.stages] == [("a", "b"), ("c", "d")]
    assert [(stage.first_layer, stage.last_layer) for stage in stages.stages] == [(0, 1), (2, 3)]
    assert {name: stages.stage_of(name) for name in ("a", "d", "two", "x")} == {"a": 0, "d": 1, "two": None, "x": None}


def test_without_cuts_there_is_one_stage() -> None:
    (stage,) = cut(SKIP).stages
    assert (stage.nodes, stage.inputs, stage.outputs) == (("a", "b", "c", "d"), (), ())


@pytest.mark.parametrize("starts", [(2, 1), (1, 1)])
def test_starts_that_do_not_ascend_are_refused(starts: tuple[int, ...]) -> None:
    with refused(PartitionError, f"stages must start at ascending layers, not {list(starts)}"):
        cut(SKIP, *starts)


@pytest.mark.parametrize("start", [-1, 0, 4])
def test_a_start_out_of_range_is_refused(start: int) -> None:
    with refused(PartitionError, f"a stage cannot start at layer {start}: the layers are 0 to 3"):
        cut(SKIP, start)


BARRED = """
    inputs %x
    %x = arg() -> (float32[?])
    %a = Neg(%x:0) -> (float32[?])
    %list = TensorListFromTensor(%a:0) -> (variant[])
    %b = TensorListStack(%list:0) -> (float32[?])
    %c = Exp(%b:0) -> (float32[?])
    outputs %c:0
"""


def test_an_impossible_cut_names_the_layer_the_tensor_and_the_places_nearby() -> None:
    with refused(
        PartitionError,
        "no stage can start at layer 'b': %list:0 crosses here, and a variant tensor cannot leave its device",
        ". Possible nearby: 'list', 'c'",
    ):
        cut(BARRED, 2)


def test_an_impossible_cut_of_a_graph_without_any_names_no_others() -> None:
    both = "inputs %x\n%x = arg() -> (float32[?])\n%a = Neg(%x:0) -> (float32[?])\n%print = Print(%x:0) !side"
    with pytest.raises(PartitionError) as caught:
        cut(f"{both}\noutputs %a:0", 1)
    assert str(caught.value).endswith("layer 'print': no tensor crosses here, so the parts are not a pipeline")


# --- balance


@pytest.mark.parametrize(
    ("costs", "stages", "starts"),
    [
        ([1, 1, 1, 1], 1, []),
        ([1, 1, 1, 1], 2, [2]),
        ([1, 1, 1, 1], 4, [1, 2, 3]),
        ([5, 1, 1, 1], 2, [1]),
        ([1, 1, 1, 5], 2, [3]),
        ([2, 3, 4, 5, 6], 3, [2, 4]),  # 5, 9, 6
        ([4, 1, 1, 1, 1], 3, [1, 3]),  # the largest is 4 however; the rest is even
    ],
)
def test_the_largest_stage_is_as_small_as_can_be(costs: list[float], stages: int, starts: list[int]) -> None:
    positions = range(1, len(costs))
    assert balance(costs, positions, [0] * len(positions), stages) == starts


def test_only_allowed_positions_are_cut() -> None:
    assert balance([1, 1, 1, 1], [1, 3], [0, 0], 2) == [1]
    assert balance([2, 1, 1, 1, 1, 5], [1, 5], [0, 0], 2) == [5]


def test_the_cost_of_sending_is_added_to_the_stage_that_sends() -> None:
    assert balance([2, 2, 2, 2], [1, 2, 3], [0, 9, 0], 2) == [1]


def test_equal_maxima_are_decided_by_the_sum_of_squares() -> None:
    # The last stage costs 10 wherever the first two are cut: (5, 5, 10), or (6, 1, 10) which sends less.
    assert balance([2, 4, 1, 10], [1, 2, 3], [3, 0, 0], 3) == [2, 3]


def test_more_stages_than_cuts_allow_are_refused() -> None:
    with refused(
        PartitionError,
        "4 stages are wanted, but the model can be cut in 2 places only (5 layers): ask for at most 3 stages",
    ):
        balance([1] * 5, [1, 3], [0, 0], 4)


def test_an_impossible_number_of_stages_is_refused_with_the_reasons() -> None:
    problems = ["no tensor crosses", "a list crosses", "no tensor crosses", "a state", "a resource", "a table"]
    said = "elsewhere: no tensor crosses; a list crosses; a state; and 2 more reasons"
    with refused(PartitionError, said):
        balance([1] * 7, [1], [0], 3, problems)


@given(st.data())
def test_the_largest_stage_equals_brute_force(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=7))
    positions = sorted(data.draw(st.sets(st.sampled_from(range(1, len(costs)))))) if len(costs) > 1 else []
    crossing = dict(zip(positions, data.draw(st.lists(st.integers(0, 9), min_size=6, max_size=6)), strict=False))
    stages = data.draw(st.integers(1, len(positions) + 1))

    def largest(starts: tuple[int, ...]) -> float:
        bounds = [0, *starts, len(costs)]
        return max(sum(costs[a:b]) + crossing.get(b, 0) for a, b in itertools.pairwise(bounds))

    chosen = tuple(balance(costs, positions, list(crossing.values()), stages))
    assert chosen in set(itertools.combinations(positions, stages - 1))
    assert largest(chosen) == min(map(largest, itertools.combinations(positions, stages - 1)))
