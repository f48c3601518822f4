"""AutoPipe's Slicer: sliced steps compute what one device computes; plans and refusals say what is sliced."""

from __future__ import annotations

from typing import Any

import keras
import pytest

import dapple_tf as dapple
from dapple_tf.errors import DappleWarning, PlanError
from dapple_tf.graph_passes.schedules.slicer import sliced_1f1b
from dapple_tf.plans import Plan
from tests.equality.one_device import Problem, compare
from tests.equality.small_models import chain, data, sgd, weights

STARTS = ["layer1", "layer2", "layer3"]


def problem() -> Problem:
    matrices = weights(4)
    return Problem(
        chain(matrices), {f"w{i}": matrix for i, matrix in enumerate(matrices)}, lambda: keras.optimizers.Adam(0.01)
    )


def built(**options: Any) -> Any:
    return dapple.pipeline(
        chain(weights(4)),
        optimizer=sgd(),
        **{"stages": STARTS, "micro_batches": 4, "example_batch": data(9), **options},
    )


@pytest.mark.parametrize(
    ("sliced", "options"),
    [
        (1, {}),
        (4, {}),
        ("auto", {}),
        (3, {"replicas": (1, 2, 2, 1)}),
        (2, {"replicas": (2, 1, 1, 1), "recompute": True}),
        (2, {"micro_batches": [4, 3, 9]}),
    ],
)
def test_a_sliced_step_equals_one_device(sliced: Any, options: dict[str, Any]) -> None:
    comparison = compare(
        problem(),
        [data(16), data(16, 2), data(11), data(3)],
        stages=STARTS,
        slice=sliced,
        **{"micro_batches": 4, **options},
    )
    comparison.check(1e-12)


def test_the_plan_says_what_is_sliced(tmp_path: Any) -> None:
    step = built(slice=2)
    plan = step.plan
    assert plan.micro_batch_sizes == (1, 1, 1, 1, 2, 3)
    assert plan.schedule == str(sliced_1f1b(4, 4, 2))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert built(slice="auto").plan.micro_batches == 5  # Algorithm 2: one of four equal stages
    assert built(slice=0).plan.schedule == "dapple-a"


def test_two_stages_are_told_to_be_unsuited() -> None:
    with pytest.warns(DappleWarning, match=r"slice='auto': 2 stages are unsuited: with a start-up that short"):
        assert built(stages=["layer2"], slice="auto").plan.micro_batch_sizes is None
    with pytest.warns(DappleWarning, match="slice=1: 2 stages are unsuited"):
        assert built(stages=["layer2"], slice=1).plan.micro_batches == 5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"slice": -1}, "slice=-1: give the number of micro-batches to slice, or 'auto'"),
        ({"slice": True}, "slice=True: give the number"),
        ({"slice": "all"}, "slice='all': give the number"),
        ({"slice": 1, "batch_loss": True}, "slice=1 with batch_loss=True, which needs schedule 'gpipe'"),
        ({"slice": 1, "schedule": "gpipe"}, "slice=1 with schedule 'gpipe': only the forwards of 1F1B"),
        ({"slice": 1, "micro_batches": "auto"}, "slice=1 with micro_batches='auto': give a number"),
        ({"slice": 1, "stages": "auto"}, "slice=1 with stages='auto': give a number, or the layers"),
        ({"slice": 5}, "slice=5: stage 0 runs 4 micro-batches before its first backward"),
        ({"slice": 4, "micro_batches": 9}, "slice=4: micro-batch 0 has 1 sample, which cannot be halved"),
        (
            {"slice": 1, "replicas": (2, 1, 1, 1), "micro_batches": 3},
            "slice=1: half a micro-batch has 1 sample, too few for 2 replicas",
        ),
    ],
)
def test_what_cannot_be_sliced_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as error:
        built(**options)
    assert said in str(error.value)


def test_samples_that_cannot_be_halved_are_not_sliced_by_auto() -> None:
    with pytest.warns(DappleWarning, match="slice='auto': half of micro-batch 0, which has 1 sample, is too small"):
        assert built(micro_batches=9, slice="auto").plan.schedule == "dapple-a"


def test_forward_may_run_before_the_first_step_of_training() -> None:
    step = built(slice=2, example_batch=None)
    loss = float(step.forward(*data(9)))
    assert loss == pytest.approx(float(chain(weights(4))(*data(9))), rel=1e-12)
    step(*data(9))
    assert step.plan.micro_batches == 6


def test_a_plan_is_not_sliced_again() -> None:
    plan = built(slice=1).plan
    with pytest.raises(PlanError, match="give a plan, or slice, not both"):
        dapple.pipeline(chain(weights(4)), optimizer=sgd(), plan=plan, slice=1)
