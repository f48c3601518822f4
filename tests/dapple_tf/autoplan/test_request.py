"""Requests: the kinds of values that each option takes, and options that contradict each other."""

from __future__ import annotations

from typing import Any

import pytest

from dapple_tf.autoplan.request import Request, check_conflicts
from dapple_tf.errors import PlanError, ScheduleError
from profiler.presets import config
from tests.dapple_tf.builders import make_plan


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": "two"}, "stages='two': give a number, a list of layer names, or 'auto'"),
        ({"stages": None}, "stages=None: give a number"),
        ({"stages": 2.0}, "stages=2.0: give a number"),
        ({"stages": [1, 2]}, r"stages=\[1, 2\]: give a number"),
        ({"replicas": 2}, r"replicas=2: give one whole number for each stage, such as \[2, 1\]"),
        ({"replicas": "21"}, "replicas='21': give one whole number"),
        ({"replicas": [2, 1.0]}, r"replicas=\[2, 1.0\]: give one whole number"),
        ({"micro_batches": 2.5}, "micro_batches=2.5: give a whole number"),
        ({"schedule": None}, "schedule=None: give a name, such as 'dapple-a'"),
        ({"recompute": "block"}, "recompute='block': give True or False, one of these for each stage, such as"),
        ({"recompute": 1}, "recompute=1: give True or False"),
        ({"recompute": [1, 0]}, r"recompute=\[1, 0\]: give True or False"),
        ({"sparse_gradients": "sparse"}, r"sparse_gradients='sparse': give 'exact' \(.*\) or 'dense' \("),
        ({"jit_compile": "auto"}, "jit_compile='auto': give True, False, or None to follow the loss function"),
        ({"sparse_gradients": True}, "sparse_gradients=True: give 'exact'"),
        ({"recompute": [True, "a"]}, r"recompute=\[True, 'a'\]: .* or layer names, such as \['block_2'\]"),
    ],
)
def test_values_of_other_types_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Request(**options)


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ScheduleError, match="no schedule is called 'zigzag'"):
        Request(schedule="zigzag")


@pytest.mark.parametrize(
    ("options", "samples", "replicas", "wanted"),
    [
        ({"micro_batches": 3}, 100, 1, 3),
        ({"micro_batches": "auto"}, 100, 1, 8),
        ({"micro_batches": "auto"}, 5, 1, 5),
        ({"micro_batches": "auto"}, 12, 3, 4),
        ({"micro_batches": "auto"}, 1, 2, 1),
    ],
)
def test_auto_is_eight_micro_batches_until_the_simulator_has_chosen(
    options: dict[str, Any], samples: int, replicas: int, wanted: int
) -> None:
    assert Request(**options).count_micro_batches(samples, replicas) == wanted


def test_a_plan_excludes_stages_replicas_recompute_and_a_cluster() -> None:
    plan = make_plan((0, 4, (0,)))
    for options, message in (
        ({"stages": 2}, "give a plan, or stages and replicas"),
        ({"replicas": [1]}, "give a plan, or stages and replicas"),
        ({"recompute": True}, "give a plan, or recompute"),
    ):
        with pytest.raises(PlanError, match=message):
            check_conflicts(Request(**options), plan, None)
    with pytest.raises(PlanError, match="a cluster is used for planning, but everything is given"):
        check_conflicts(Request(), plan, config("a", 2))
    check_conflicts(Request(), plan, None)


def test_a_cluster_needs_something_to_plan() -> None:
    with pytest.raises(PlanError, match="a cluster is used for planning, but everything is given"):
        check_conflicts(Request(stages=2, schedule="gpipe"), None, config("a", 2))
    for options in ({}, {"stages": 2}, {"stages": 2, "schedule": "gpipe", "micro_batches": "auto"}):
        check_conflicts(Request(**options), None, config("a", 2))
