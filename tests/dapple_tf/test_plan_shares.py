"""Plans whose stages share the rows of a micro-batch unequally: validation, files and checks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dapple_tf.errors import PlanError
from dapple_tf.plan_check import check_plan
from dapple_tf.plans import Plan, StagePlan, check_workers
from dapple_tf.window_plan import WindowPlan
from tests.dapple_tf.simulator.builders import make_cluster, make_plan, make_profile

SHARED = replace(
    make_plan((0, 0, (0, 1)), (1, 1, (2,)), micro_batch_size=8, global_batch_size=16),
    stages=(StagePlan(0, 0, (0, 1), (3.0, 1.0)), StagePlan(1, 1, (2,))),
)


def with_shares(*shares: tuple[float, ...] | None, **changes: Any) -> Plan:
    stages = tuple(replace(stage, shares=own) for stage, own in zip(SHARED.stages, shares, strict=True))
    return replace(SHARED, stages=stages, **changes)


def test_shares_are_a_field_of_the_file_only_where_there_are_any(tmp_path: Path) -> None:
    SHARED.save(tmp_path / "plan.json")
    stages = json.loads((tmp_path / "plan.json").read_text())["stages"]
    assert stages == [
        {"first_layer": 0, "last_layer": 0, "devices": [0, 1], "shares": [3.0, 1.0]},
        {"first_layer": 1, "last_layer": 1, "devices": [2]},
    ]
    assert Plan.load(tmp_path / "plan.json") == SHARED


def test_a_stage_without_shares_has_equal_ones() -> None:
    assert (SHARED.stages[0].row_shares, SHARED.stages[0].fractions) == ((3, 1), (0.75, 0.25))
    assert (SHARED.stages[1].row_shares, SHARED.stages[1].fractions) == ((), (1.0,))
    assert SHARED.shares == ((3, 1), ())
    equal = with_shares((2.0, 2.0), (7.0,))
    assert (equal.shares, equal.stages[0].fractions) == ((), (0.5, 0.5))


def test_the_least_samples_give_every_replica_one() -> None:
    assert SHARED.least_samples == 4
    assert with_shares(None, None).least_samples == 2


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([1], r"stages\[0\].shares has 1 number, but the stage has 2 devices: give one for each, or none"),
        ([1, 0], r"stages\[0\].shares\[1\] is 0.0, not a finite number above 0: leave a device that is to take no"),
    ],
)
def test_wrong_shares_are_named(tmp_path: Path, shares: Any, message: str) -> None:
    data = SHARED.to_json()
    data["stages"][0]["shares"] = shares
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(PlanError, match=f"^{path}: {message}"):
        Plan.load(path)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ("ab", r"stages\[0\].shares is 'ab', not a list of numbers; None is equal shares"),
        (3, r"stages\[0\].shares is 3, not a list of numbers; None is equal shares"),
        ((1.0, None), r"stages\[0\].shares\[1\] is None, not a finite number above 0"),
    ],
)
def test_shares_of_wrong_types_are_told(shares: Any, message: str) -> None:
    with pytest.raises(PlanError, match=f"^{message}"):
        replace(SHARED, stages=(replace(SHARED.stages[0], shares=shares), *SHARED.stages[1:]))


def test_stages_of_one_worker_have_the_same_shares() -> None:
    stages = StagePlan(0, 0, (0, 1), (3.0, 1.0)), StagePlan(1, 1, (0, 1))
    plan = replace(SHARED, stages=stages, schedule="interleaved-1f1b:v=2")
    message = r"runs stages \[0, 1\] on one worker, but stages 0 and 1 have unequal shares"
    with pytest.raises(PlanError, match=message):
        check_workers(plan)
    check_workers(replace(plan, stages=(stages[0], replace(stages[1], shares=(6.0, 2.0)))))


def test_replicas_that_take_minibatches_in_turn_have_no_shares() -> None:
    with pytest.raises(PlanError, match="replicas take whole minibatches of an asynchronous window in turn: leave out"):
        replace(SHARED, window=WindowPlan(4), micro_batches=4)


PROFILE = make_profile((1, 2), (2, 3), unsplittable=(1,))


def test_a_device_without_a_row_is_named() -> None:
    message = (
        "stage 0: device 1 has the share 0.1 of the rows, and would get none of a micro-batch of 8 samples: use "
        "micro-batches of at least 10, or leave the device out"
    )
    with pytest.raises(PlanError, match=message):
        check_plan(with_shares((9.0, 1.0), None), make_profile((1, 2), (2, 3)), make_cluster(3))


def test_unequal_shares_cannot_meet_where_the_model_cannot_be_split() -> None:
    stages = StagePlan(0, 0, (0, 1), (3.0, 1.0)), StagePlan(1, 1, (2, 3), (1.0, 3.0))
    plan = replace(SHARED, stages=stages)
    with pytest.raises(PlanError, match=r"stages 0 and 1 have unequal shares, but what crosses the cut at layer 1"):
        check_plan(plan, PROFILE, make_cluster(4))
    check_plan(replace(plan, stages=(stages[0], replace(stages[1], shares=(3.0, 1.0)))), PROFILE, make_cluster(4))
