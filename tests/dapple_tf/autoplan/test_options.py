"""Options: the kinds of values that each option takes, and options that contradict each other."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import keras
import numpy as np
import pytest

import dapple_tf as dapple
from dapple_tf.autoplan.options import Options, OptionTypes, check_contradictions
from dapple_tf.commands.train import train
from dapple_tf.errors import PlanError, ScheduleError
from dapple_tf.profiler.cluster import config
from tests.dapple_tf.builders import make_plan


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": "two"}, "stages='two': give a number, a list of layer names, or 'auto'"),
        ({"stages": None}, "stages=None: give a number"),
        ({"stages": True}, "stages=True: give a number, a list of layer names, or 'auto'"),
        ({"stages": 2.0}, "stages=2.0: give a number"),
        ({"stages": [1, 2]}, r"stages=\[1, 2\]: give a number"),
        ({"replicas": 2}, r"replicas=2: give one whole number for each stage, such as \[2, 1\]"),
        ({"replicas": "21"}, "replicas='21': give one whole number"),
        ({"replicas": [2, 1.0]}, r"replicas=\[2, 1.0\]: give one whole number"),
        ({"micro_batches": 2.5}, "micro_batches=2.5: give a whole number"),
        ({"micro_batches": True}, "micro_batches=True: give a whole number"),
        ({"micro_batches": "8"}, "micro_batches='8': give a whole number, 'auto', or a list of the samples or shares"),
        ({"micro_batches": []}, r"micro_batches=\[\]: name the samples, or the share, of at least one micro-batch"),
        ({"micro_batches": [2, 0]}, r"micro_batches=\[2, 0\]: micro-batch 1 is 0; every one must be larger than 0"),
        ({"micro_batches": [-2, 4]}, r"micro-batch 0 is -2; every one must be larger than 0"),
        ({"micro_batches": [0.5, float("nan")]}, "micro-batch 1 is nan; every one must be larger than 0"),
        ({"micro_batches": [1.5, -0.5]}, r"micro-batch 1 is -0.5; every one must be larger than 0"),
        ({"micro_batches": [2, 0.5]}, r"micro_batches=\[2, 0.5\]: give samples of each micro-batch \(all whole num"),
        ({"micro_batches": [True, 2]}, r"micro_batches=\[True, 2\]: give samples of each micro-batch"),
        ({"micro_batches": ["2", 2]}, r"micro_batches=\['2', 2\]: give samples of each micro-batch"),
        ({"micro_batches": [0.5, 0.25]}, r"micro_batches=\[0.5, 0.25\]: the shares add up to 0.75, not to 1"),
        (
            {"micro_batches": [2, 1, 5], "replicas": [2, 1]},
            "micro-batch 1 has 1 sample, too few for 2 replicas: make it larger, or use fewer replicas",
        ),
        ({"schedule": None}, "schedule=None: give a name, such as 'dapple-a'"),
        (
            {"recompute": "block"},
            r"recompute='block': give True \('all'\) or False \('none'\), one flag for each stage",
        ),
        ({"recompute": 1}, "recompute=1: give True"),
        ({"recompute": [1, 0]}, r"recompute=\[1, 0\]: give True"),
        ({"sparse_gradients": "sparse"}, r"sparse_gradients='sparse': give 'exact' \(.*\) or 'dense' \("),
        ({"jit_compile": "auto"}, "jit_compile='auto': give True, False, or None to follow the loss function"),
        ({"sparse_gradients": True}, "sparse_gradients=True: give 'exact'"),
        ({"recompute": [True, "a"]}, r"recompute=\[True, 'a'\]: .* or layer names, such as \['block_2'\]"),
    ],
)
def test_values_of_other_types_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Options(**options)


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ScheduleError, match="no schedule is called 'zigzag'"):
        Options(schedule="zigzag")


@pytest.mark.parametrize(
    ("options", "samples", "replicas", "wanted"),
    [
        ({"micro_batches": 3}, 100, 1, 3),
        ({"micro_batches": [2, 2, 4]}, 100, 1, 3),
        ({"micro_batches": [0.5, 0.5]}, 100, 1, 2),
        ({"micro_batches": "auto"}, 100, 1, 8),
        ({"micro_batches": "auto"}, 5, 1, 5),
        ({"micro_batches": "auto"}, 12, 3, 4),
        ({"micro_batches": "auto"}, 1, 2, 1),
    ],
)
def test_auto_is_eight_micro_batches_until_the_simulator_has_chosen(
    options: dict[str, Any], samples: int, replicas: int, wanted: int
) -> None:
    assert Options(**options).count_micro_batches(samples, replicas) == wanted


def test_a_schedule_for_another_number_of_micro_batches_than_sizes_is_refused() -> None:
    Options(stages=1, micro_batches=[1, 3], schedule="0F0 0B0 0F1 0B1")
    message = r"the schedule's text is for 2 micro-batches, but micro_batches=\[1, 3, 4\] are 3: give a size for each"
    with pytest.raises(ScheduleError, match=message):
        Options(stages=1, micro_batches=[1, 3, 4], schedule="0F0 0B0 0F1 0B1")


def test_sizes_exclude_planners_and_plans() -> None:
    message = r"micro_batches=\[2, 6\] with stages='auto': planners know micro-batches of equal sizes only, so give sta"
    with pytest.raises(PlanError, match=message):
        check_contradictions(Options(micro_batches=[2, 6]))
    check_contradictions(Options(micro_batches=[2, 6], replicas=[1, 1]))
    with pytest.raises(PlanError, match="give a plan, or the sizes of micro-batches, not both: a plan's field"):
        check_contradictions(Options(micro_batches=[2, 6], plan=make_plan((0, 4, (0,)))))


@pytest.mark.parametrize(
    ("given", "samples", "largest"), [(8, 64, 8), ("auto", 64, 8), ([2, 6], 64, 48), ([0.25, 0.75], 9, 7), ([5], 5, 5)]
)
def test_the_largest_micro_batch_of_a_batch(given: Any, samples: int, largest: int) -> None:
    assert Options(micro_batches=given).largest_micro_batch(samples) == largest


@pytest.mark.parametrize(("word", "flag"), [("all", True), ("none", False)])
def test_recompute_takes_the_words_of_the_command_line(word: str, flag: bool) -> None:
    assert Options(recompute=word) == Options(recompute=flag)


def test_a_plan_excludes_stages_replicas_recompute_and_a_cluster() -> None:
    plan = make_plan((0, 4, (0,)))
    for options, message in (
        ({"stages": 2}, "give a plan, or stages and replicas"),
        ({"replicas": [1]}, "give a plan, or stages and replicas"),
        ({"recompute": True}, "give a plan, or recompute"),
    ):
        with pytest.raises(PlanError, match=message):
            check_contradictions(Options(**options, plan=plan))
    with pytest.raises(PlanError, match="a cluster is used for planning, but everything is given"):
        check_contradictions(Options(plan=plan, cluster=config("a", 2)))
    check_contradictions(Options(plan=plan))


def test_a_cluster_needs_something_to_plan() -> None:
    with pytest.raises(PlanError, match="a cluster is used for planning, but everything is given"):
        check_contradictions(Options(stages=2, schedule="gpipe", cluster=config("a", 2)))
    for options in ({}, {"stages": 2}, {"stages": 2, "schedule": "gpipe", "micro_batches": "auto"}):
        check_contradictions(Options(**options, cluster=config("a", 2)))


TOGETHER = "0F0+ 0F1 0B0 0B1; 1F0 1F1 1B0+ 1B1"


@pytest.mark.parametrize("options", [{"stages": 2, "micro_batches": "auto"}, {"micro_batches": 2}])
def test_results_that_travel_together_are_refused_where_something_is_planned(options: dict[str, Any]) -> None:
    message = (
        r"planners do not simulate schedules in which results travel together \(0F0\+\): leave out the '\+', or give"
    )
    with pytest.raises(ScheduleError, match=message):
        Options(schedule=TOGETHER, **options)


@pytest.mark.parametrize("options", [{"stages": 2}, {"stages": "auto", "replicas": [1, 1]}])
def test_results_may_travel_together_where_nothing_is_planned(options: dict[str, Any]) -> None:
    assert Options(schedule=TOGETHER, micro_batches=2, **options).schedule == TOGETHER


def test_the_schedule_of_sliced_micro_batches_is_not_to_be_chosen() -> None:
    sliced = Options(stages=3, slice=1)
    assert (sliced.schedule, str(sliced.spec)) == ("auto", "dapple-a")
    assert dataclasses.replace(sliced, slice=None).spec is None
    assert str(Options(stages=3, slice=1, schedule="1f1b").spec) == "1f1b"
    assert str(Options(stages=3, slice=1, schedule="1f1b-sno").spec) == "1f1b-sno"


@pytest.mark.parametrize(
    ("options", "possible"),
    [
        ({"micro_batches": 1}, True),
        ({"micro_batches": 1, "replicas": [1, 1], "inexact": "allow"}, True),
        ({"micro_batches": [8]}, True),
        ({"micro_batches": "auto"}, True),
        ({"micro_batches": "auto", "inexact": "allow"}, False),
        ({"micro_batches": 1, "replicas": [1, 2]}, False),
        ({"micro_batches": 2}, False),
    ],
)
def test_a_batch_can_be_one_micro_batch_on_one_replica_where_nothing_else_is_asked_for(
    options: dict[str, Any], possible: bool
) -> None:
    assert Options(**options).can_run_uncut == possible


def test_the_types_for_type_checkers_are_those_of_the_options() -> None:
    declared = {option.name: option.type for option in dataclasses.fields(Options)}
    assert {name: str(kind.__forward_arg__) for name, kind in OptionTypes.__annotations__.items()} == declared


def test_numbers_of_numpy_are_numbers() -> None:
    options = Options(stages=np.int64(2), micro_batches=np.int32(4), slice=np.int8(0), replicas=[np.int64(2), 1])
    assert options == Options(stages=2, micro_batches=4, slice=0, replicas=[2, 1])
    assert type(options.micro_batches) is int
    assert Options(replicas=(np.int64(1), 1), micro_batches=[np.int32(2), 4]).given_sizes == [2, 4]


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(TypeError, match=r"dapple.pipeline\(\) got an unexpected .* 'stage'. Did you mean 'stages'?"):
        dapple.pipeline(optimizer="sgd", stage=2)
    with pytest.raises(TypeError, match=r"dapple.train_step\(\) got an unexpected keyword argument 'optimizer'$"):
        dapple.train_step(optimizer="sgd")


@pytest.mark.parametrize("function", [dapple.pipeline, dapple.keras.pipeline, dapple.verify])
def test_help_shows_every_option_with_its_default_and_meaning(function: Any) -> None:
    parameters = inspect.signature(function).parameters
    for option in dataclasses.fields(Options):
        if option.name in parameters:
            assert parameters[option.name].default == option.default
            assert f"{option.name}: {option.metadata['meaning']}" in " ".join(function.__doc__.split())
    left_out = {option.name for option in dataclasses.fields(Options)} - set(parameters)
    assert left_out == ({"mode", "minibatches", "weights", "depth"} if function is dapple.verify else set())
    assert "{options}" not in function.__doc__


def test_windows_are_not_verified() -> None:
    with pytest.raises(PlanError, match="mode='async': an asynchronous window uses weights that are some updates old"):
        dapple.verify(lambda x: x, optimizer="sgd", batch=(), mode="async")


def test_every_option_with_a_flag_is_one_of_the_command_line() -> None:
    flags = {flag for option in dataclasses.fields(Options) for flag in option.metadata["flag"].split("/") if flag}
    assert flags <= {flag for parameter in train.params for flag in (*parameter.opts, *parameter.secondary_opts)}


def test_a_step_shows_the_optimizer_that_was_given_by_its_name() -> None:
    assert isinstance(dapple.pipeline(lambda x: x, optimizer="sgd", stages=1).optimizer, keras.optimizers.SGD)


def test_planning_anew_keeps_what_results_depend_on() -> None:
    given = Options(stages=4, replicas=[2, 1, 1, 1], schedule="zb-h1", recompute=[True, False, False, False])
    assert given.open_to_new_plan() == Options(micro_batches=8)
    sizes = Options(stages=2, micro_batches=[2, 6], recompute=["a"])
    assert sizes.open_to_new_plan() == Options(micro_batches=2, recompute=["a"])
    windows = Options(stages=2, mode="async", minibatches=6, weights="2bw", micro_batches=3, depth=None)
    assert windows.open_to_new_plan() == dataclasses.replace(windows, stages="auto")


def test_elastic_is_true_or_false() -> None:
    with pytest.raises(PlanError, match=r"elastic='yes': give True or False"):
        Options(elastic="yes")  # type: ignore[arg-type]
