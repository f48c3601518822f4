"""Replicas that take unequal shares of the rows equal one device."""

from __future__ import annotations

import keras
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dapple_tf as dapple
from dapple_tf.errors import PlanError
from dapple_tf.graph_passes.ir.names import nodes_of
from dapple_tf.plans import Plan, StagePlan
from tests.dapple_tf.distributed.programs.cases import CASES, Chain, batches, normalized, overlapped, with_shares
from tests.equality.one_device import Problem, compare
from tests.equality.small_models import chain, data, sgd, weights

UNEQUAL = [name for name in CASES if name.startswith("unequal shares")]


@pytest.mark.parametrize("name", UNEQUAL)
def test_unequal_shares_equal_one_device(name: str) -> None:
    case = CASES[name]
    comparison = compare(case.make_problem(), case.batches(), **case.options)
    comparison.check(case.tolerance)
    assert any(node.has("shares") for node in nodes_of(comparison.step.graph, "forward"))


def test_batch_norm_over_replicas_with_unequal_shares_equals_the_micro_batches_in_turn() -> None:
    options = with_shares(overlapped(2, micro_batches=2, ends=[9], samples=12), (3.0, 1.0))
    comparison = compare(normalized(), batches((12, 12))(), in_turn=2, batch_norm="sync", **options)
    comparison.check(1e-12)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """One to three stages of a chain of four matrices, with shares or without."""
    starts = sorted(draw(st.sets(st.sampled_from([2, 4, 6]), max_size=2)))
    stages, device = [], 0
    for first, end in zip([0, *starts], [*starts, 12], strict=True):
        shares = draw(st.none() | st.lists(st.integers(1, 3).map(float), min_size=1, max_size=3).map(tuple))
        count = len(shares) if shares else draw(st.integers(1, 2))
        stages.append(StagePlan(first, end - 1, tuple(range(device, device + count)), shares))
        device += count
    m, size = draw(st.integers(1, 2)), 9
    return Plan("net", "test", m * size, size, m, draw(st.sampled_from(["gpipe", "dapple-a"])), False, tuple(stages))


@settings(max_examples=15)
@given(plan=plans())
def test_any_shares_equal_one_device(plan: Plan) -> None:
    matrices = weights(4)
    problem = Problem(chain(matrices), {f"w{i}": matrix for i, matrix in enumerate(matrices)}, sgd)
    sizes = plan.global_batch_size, plan.global_batch_size - 1, 2
    compare(problem, [data(size) for size in sizes], plan=plan).check(1e-12)


def test_a_batch_too_small_for_the_shares_is_shared_equally() -> None:
    """Of shares 1 and 4 a micro-batch of four rows would leave the first replica without one."""
    case = CASES["unequal shares, 2:1"]
    comparison = compare(case.make_problem(), batches((11, 4, 1))(), **case.options)
    comparison.check(case.tolerance)


def test_one_micro_batch_too_small_for_the_shares_is_not_run_by_the_program_of_larger_ones() -> None:
    """Replicas and the number of micro-batches stay, so only the shares tell the two programs apart."""
    matrices = weights(2)
    problem = Problem(chain(matrices), {f"w{i}": matrix for i, matrix in enumerate(matrices)}, sgd)
    plan = Plan("net", "test", 9, 9, 1, "gpipe", False, (StagePlan(0, 7, (0, 1), (1.0, 2.0)),))
    compare(problem, [data(9), data(2)], plan=plan).check(1e-12)


def test_shares_too_small_for_the_first_batch_are_named() -> None:
    options = with_shares(overlapped(2, micro_batches=3, ends=[11]), (1.0, 4.0))
    problem = Chain()()
    step = dapple.pipeline(problem.loss_fn, optimizer=keras.optimizers.SGD(), **options)
    with pytest.raises(PlanError, match=r"stage 0: device 0 has the share 0.2 of the rows, and would get none of a"):
        step(*batches()()[0])
