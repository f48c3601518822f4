"""Training steps of several phases, as a job of two ranks, beside one device."""

from __future__ import annotations

import pytest
import tensorflow as tf

from dapple_tf.distributed.rank_programs import check_writers
from dapple_tf.distributed.variable_locations import VariableNeeds
from dapple_tf.errors import PlanError
from tests.dapple_tf.distributed.failing_jobs import assert_ended
from tests.graph_passes.builders import refused
from tests.processes import RanksError, needs_horovod, run_ranks

PROGRAM = "tests.dapple_tf.distributed.programs.phases"
FIRST, SECOND, BOTH = frozenset({0}), frozenset({1}), frozenset({0, 1})


@needs_horovod
@pytest.mark.timeout(900)
def test_phases_on_two_ranks_train_as_one_device() -> None:
    run_ranks(["-m", PROGRAM, "2", "1,1", "3", "gan", "sam", "pcgrad"], 2, timeout_seconds=400)


@needs_horovod
@pytest.mark.timeout(900)
def test_phases_on_two_replicas_train_as_one_device() -> None:
    run_ranks(["-m", PROGRAM, "1", "2", "4", "gan", "sam", "pcgrad"], 2, timeout_seconds=400)


@needs_horovod
@pytest.mark.timeout(900)
def test_all_steps_on_two_ranks_train_as_one_device() -> None:
    run_ranks(["-m", PROGRAM, "2", "1,1", "3"], 2, timeout_seconds=800)


@needs_horovod
@pytest.mark.timeout(400)
def test_a_phase_that_fails_on_a_rank_is_named_by_all() -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(["-m", "tests.dapple_tf.distributed.programs.failing_phase"], 2, timeout_seconds=300)
    assert_ended(caught.value)
    failed = (
        "StepError: SOME VARIABLES HAVE CHANGED, by phase 1 of 2: go back to the last checkpoint. "
        "The step failed: phase 2 of 2: a logarithm : Tensor had NaN"
    )
    assert failed in caught.value.ranks[1].stderr
    assert f"stops: rank 1 (stage 1), in step 1, raised {failed}" in caught.value.ranks[0].stderr


def test_a_rank_holds_what_any_phase_of_the_step_needs() -> None:
    weights, slot, unused = (tf.Variable(0.0, name=name) for name in ("weights", "slot", "unused"))
    first = VariableNeeds([(weights, FIRST), (unused, frozenset())])
    joined = first.joined(VariableNeeds([(slot, SECOND), (weights, SECOND)]))
    assert [ranks for _, ranks in joined.ranks] == [BOTH, frozenset(), SECOND]
    assert [variable is known for (variable, _), known in zip(joined.ranks, (weights, unused, slot), strict=True)]


def test_a_variable_that_a_phase_writes_on_another_rank_than_needs_it_is_refused() -> None:
    """Both phases run at once, so it cannot be sent between them."""
    weights = tf.Variable(0.0, name="weights")
    writers = [{id(weights): FIRST}, {}]
    check_writers(VariableNeeds([(weights, FIRST)]), writers)
    check_writers(VariableNeeds([(weights, BOTH)]), [{id(weights): BOTH}, {}])
    with refused(PlanError, "phase 1 of the step writes it on rank 0 and rank 1 needs it in another phase", "stages=1"):
        check_writers(VariableNeeds([(weights, BOTH)]), writers)
