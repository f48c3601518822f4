"""Plans: validation, files, and the messages for wrong files."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.errors import PlanError
from dapple_tf.graph_passes.analysis.row_bounds import micro_batch_bounds
from dapple_tf.graph_passes.schedules.slicer import slice_sizes, sliced_1f1b
from dapple_tf.plans import Plan, StagePlan
from tests.dapple_tf.builders import make_plan
from tests.quick import at_most

VALID = {
    "format": "dapple-plan/1",
    "model": "loss",
    "planner": "dapple",
    "global_batch_size": 32,
    "micro_batch_size": 8,
    "micro_batches": 4,
    "schedule": "dapple-b:D=3",
    "recompute": False,
    "stages": [
        {"first_layer": 0, "last_layer": 2, "devices": [0, 1]},
        {"first_layer": 3, "last_layer": 3, "devices": [5]},
    ],
    "predicted": {"step_seconds": 0.5},
}


def written(folder: Path, data: Any) -> Path:
    path = folder / "plan.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_a_plan_file_is_read_field_by_field(tmp_path: Path) -> None:
    plan = Plan.load(written(tmp_path, VALID))
    assert plan == Plan(
        model="loss",
        planner="dapple",
        global_batch_size=32,
        micro_batch_size=8,
        micro_batches=4,
        schedule="dapple-b:D=3",
        recompute=False,
        stages=(StagePlan(0, 2, (0, 1)), StagePlan(3, 3, (5,))),
        predicted={"step_seconds": 0.5},
    )
    assert plan.starts == (3,)
    assert plan.replicas == (2, 1)


SIZED = {**VALID, "micro_batch_size": 11, "micro_batch_sizes": [2, 9, 10, 11]}


def test_given_sizes_are_a_field_of_the_file_only_where_there_are_any(tmp_path: Path) -> None:
    plan = Plan.load(written(tmp_path, SIZED))
    assert plan.micro_batch_sizes == plan.sizes == (2, 9, 10, 11)
    plan.save(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == SIZED
    plain = Plan.load(written(tmp_path, VALID))
    assert (plain.micro_batch_sizes, plain.sizes) == (None, ())
    assert "micro_batch_sizes" not in plain.to_json()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"micro_batches": 3, "global_batch_size": 8}, "3 micro-batches of 2 or 3 samples"),
        ({"micro_batches": 4, "global_batch_size": 8}, "4 micro-batches of 2 samples"),
        ({"micro_batches": 1, "global_batch_size": 1}, "1 micro-batch of 1 sample"),
        ({"micro_batch_sizes": (2, 2, 4)}, "3 micro-batches of 2, 2 and 4 samples"),
        ({"micro_batch_sizes": (4, 4)}, "2 micro-batches of 4 samples"),
        ({"micro_batch_sizes": (*range(1, 18),)}, "17 micro-batches of 1 to 17 samples"),
    ],
)
def test_micro_batches_are_described_with_their_samples(change: dict[str, Any], text: str) -> None:
    if sizes := change.get("micro_batch_sizes"):
        change |= {"micro_batches": len(sizes), "global_batch_size": sum(sizes), "micro_batch_size": max(sizes)}
    assert make_plan((0, 1, (0,)), **change).describe_micro_batches() == text


@pytest.mark.parametrize(
    ("samples", "sliced", "text"),
    [
        (16, 2, "4 micro-batches of 4 samples, the first 2 in two halves"),
        (16, 1, "4 micro-batches of 4 samples, the first one in two halves"),
        (18, 1, "4 micro-batches of 4, 5, 4 and 5 samples, the first one in two halves"),
    ],
)
def test_sliced_micro_batches_are_counted_whole(samples: int, sliced: int, text: str) -> None:
    rows = [end - begin for begin, end in (micro_batch_bounds(samples, m, 4) for m in range(4))]
    sizes = slice_sizes(rows, sliced)
    plan = make_plan(
        *((stage, stage, (stage,)) for stage in range(3)),
        global_batch_size=samples,
        micro_batches=4 + sliced,
        micro_batch_size=max(sizes),
        micro_batch_sizes=sizes,
        schedule=str(sliced_1f1b(3, 4, sliced)),
    )
    assert (plan.sliced, plan.whole_micro_batches, plan.short_schedule) == (sliced, 4, "dapple-a, sliced")
    assert plan.describe_micro_batches() == text
    assert plan.headline == f"plan straight, layers 1:1:1, {text}, schedule dapple-a, sliced"


def test_results_that_travel_together_in_another_order_are_not_called_sliced() -> None:
    text = "0F0 0F1 0B0 0B1; 1F0 1F1 1B0+ 1B1"
    plan = make_plan((0, 0, (0,)), (1, 1, (1,)), global_batch_size=8, micro_batches=2, schedule=text)
    assert (plan.sliced, plan.whole_micro_batches) == (0, 2)
    assert plan.describe_micro_batches() == "2 micro-batches of 4 samples"


def test_a_plan_is_saved_in_the_documented_format(tmp_path: Path) -> None:
    Plan.load(written(tmp_path, VALID)).save(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == VALID


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    stages, first = [], 0
    for _ in range(draw(st.integers(1, 4))):
        last = first + draw(st.integers(0, 5))
        devices = draw(st.lists(st.integers(0, 15), min_size=1, max_size=4, unique=True))
        stages.append((first, last, tuple(devices)))
        first = last + 1
    text = st.text(max_size=9)
    sizes = draw(st.none() | st.lists(st.integers(1, 9), min_size=1, max_size=6).map(tuple))
    cut = {"micro_batches": draw(st.integers(1, 99))}
    if sizes:
        cut = {"micro_batches": len(sizes), "global_batch_size": sum(sizes), "micro_batch_size": max(sizes)}
    return make_plan(
        *stages,
        **cut,
        micro_batch_sizes=sizes,
        model=draw(text),
        schedule=draw(st.sampled_from(["gpipe", "dapple-a", "dapple-b:D=3", "1f1b-so", "zb-h1"])),
        recompute=draw(st.booleans() | st.sets(st.integers(0, first - 1)).map(sorted).map(tuple)),
        predicted=draw(st.none() | st.dictionaries(text, st.integers() | st.lists(st.floats(0, 1)), max_size=3)),
    )


@given(plan=plans())
def test_every_plan_can_be_saved_and_loaded(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> None:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan


def test_a_saved_plan_has_the_usual_permissions(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("")
    make_plan((0, 1, (0,))).save(tmp_path / "plan.json")
    assert stat.S_IMODE(os.stat(tmp_path / "plan.json").st_mode) == stat.S_IMODE(os.stat(other).st_mode)


def test_optional_fields_may_be_absent(tmp_path: Path) -> None:
    data = {key: value for key, value in VALID.items() if key not in ("recompute", "predicted")}
    plan = Plan.load(written(tmp_path, data))
    assert (plan.recompute, plan.predicted) == (False, None)


STAGE = {"first_layer": 0, "last_layer": 2, "devices": [0]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "dapple-plan/2"}, "format is 'dapple-plan/2', not 'dapple-plan/1'$"),
        (
            {"format": "other/1", "window": {"size": 4}},
            "format is 'other/1', not 'dapple-plan/1': give a plan, which `dapple plan",
        ),
        ({"micro_batches": True}, "micro_batches is True, not a whole number"),
        ({"micro_batches": 0}, "micro_batches is 0; it must be at least 1"),
        ({"schedule": "zigzag"}, "schedule: no schedule is called 'zigzag'"),
        ({"schedule": "auto"}, "schedule: no schedule is called 'auto'"),
        ({"schedule": "K=9"}, "schedule: K=9 gives K of 1 stage, but there are 2"),
        ({"schedule": "0F0 0X0"}, "schedule: '0X0' is not an action such as 2F0"),
        ({"schedule": "0B0 0F0"}, "schedule: the schedule deadlocks"),
        ({"schedule": "0F0 0B0; 1F0 1B0; 2F0 2B0"}, "schedule: the schedule's text is for 3 stages x 1 micro-batch,"),
        ({"recompute": "no"}, "recompute is 'no', not true or false, or a list"),
        ({"recompute": [0, "1"]}, r"recompute\[1\] is '1', not a whole number"),
        ({"recompute": [0, 99]}, r"recompute\[1\] is layer 99, but the layers are 0 to "),
        ({"recompute": [1, 1]}, r"recompute\[1\] is layer 1 after 1: name each layer once, ascending"),
        ({"micro_batch_sizes": [8, 8, 0, 16]}, r"micro_batch_sizes\[2\] is 0; a micro-batch has at least 1 sample"),
        ({"micro_batch_sizes": []}, "micro_batch_sizes has 0 sizes, but micro_batches is 4"),
        ({"micro_batch_sizes": [8, 24]}, "micro_batch_sizes has 2 sizes, but micro_batches is 4"),
        ({"micro_batch_sizes": [8, 8, 8, 9]}, "micro_batch_sizes add up to 33, but global_batch_size is 32"),
        ({"micro_batch_sizes": [8, 8, 7, 9]}, "the largest of micro_batch_sizes is 9, but micro_batch_size is 8"),
        ({"stages": []}, "a plan needs at least one stage"),
        ({"shedule": "gpipe"}, "shedule is not a field of this file; did you mean 'schedule'?"),
        (
            {"stages": [{**STAGE, "device": 1}]},
            r"stages\[0\].device is not a field of this file; did you mean",
        ),
        ({"stages": [{**STAGE, "devices": []}]}, r"stages\[0\].devices is \[\]: name at least one device, each once"),
        ({"stages": [{**STAGE, "devices": [1, 1]}]}, r"stages\[0\].devices is \[1, 1\]: name at least one device"),
        ({"stages": [{**STAGE, "first_layer": 1}]}, r"stages\[0\] holds layers 1 to 2, but must start at 0"),
        ({"stages": [STAGE, {**STAGE, "first_layer": 2}]}, r"stages\[1\] holds layers 2 to 2, but must start at 3"),
        (
            {"stages": [STAGE, {"first_layer": 3, "last_layer": 2, "devices": [0]}]},
            r"stages\[1\]: last_layer 2 is before first_layer 3",
        ),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = written(tmp_path, {**VALID, **change})
    with pytest.raises(PlanError, match=f"^{path}: {message}"):
        Plan.load(path)


TOP = ["model", "planner", "global_batch_size", "micro_batch_size", "schedule", "stages"]


@pytest.mark.parametrize("field", [*TOP, *STAGE])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    stage = {key: value for key, value in STAGE.items() if key != field}
    path = written(tmp_path, {key: value for key, value in {**VALID, "stages": [stage]}.items() if key != field})
    where = field if field in TOP else rf"stages\[0\].{field}"
    with pytest.raises(PlanError, match=f"^{path}: {where} is missing"):
        Plan.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": None}, "window.weights is missing"),
        ({"weights": "newest"}, "window.weights is 'newest'; known are stash, vertical-sync, 2bw, latest"),
        ({"minibatches": 0}, "minibatches=0: give a whole number from 1 on"),
    ],
)
def test_a_wrong_field_of_a_window_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = written(tmp_path, {**VALID, "window": {"minibatches": 4, "weights": "stash", **change}})
    with pytest.raises(PlanError, match=f"^{path}: {message}"):
        Plan.load(path)


@pytest.mark.parametrize("text", ["", "{", "not json", '{"format": 1, "format": 2}', '{"format": NaN}', "[" * 100_000])
def test_a_file_that_is_not_json_is_refused(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(PlanError, match=f"^{path}: not a readable JSON file: "):
        Plan.load(path)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"nothing\.json: there is no such file"):
        Plan.load(tmp_path / "nothing.json")


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="not a readable JSON file"):
        Plan.load(tmp_path / "plan.json")


def test_a_path_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"absent/plan.json: the plan cannot be written: No such file or directory"):
        make_plan((0, 1, (0,))).save(tmp_path / "absent" / "plan.json")


def test_negative_devices_are_refused() -> None:
    with pytest.raises(PlanError, match=r"stages\[0\].devices is \[-1\]: name at least one device, each once, from 0"):
        make_plan((0, 1, (-1,)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"micro_batches": 10**6}, "micro_batches is 1000000; a plan has at most 100000"),
        ({"micro_batches": 10**400}, "larger than is plausible"),
        ({"micro_batches": 10**5, "schedule": "K=7,9"}, "schedule: the schedule deadlocks: after K_0 = 7 forwards"),
        ({"micro_batches": 10**5, "schedule": "K=100001,1"}, "schedule: K_0 = 100001 is not between 1 and M = 100000"),
        ({"schedule": "K=" + "9" * 5000}, "schedule: 'K=9+' is not a schedule such as"),
        ({"schedule": "dapple-a:D=" + "9" * 5000}, "is not a schedule such as"),
        ({"schedule": "0F0 0B" + "9" * 5000}, "schedule: '0B9+' is not an action"),
        ({"schedule": "0F0 " * 2_000_000}, "schedule has 8000000 characters"),
        ({"model": "m" * 3000}, "model has 3000 characters; at most 2000 are read"),
        ({"stages": [{"first_layer": 0, "last_layer": 10**7, "devices": [0]}]}, "the stages hold 10000001 layers"),
        ({"recompute": {"a": list(range(10**5))}}, "recompute is .*, not true or false, or a list"),
        ({"predicted": [[[[{"a": 1}]]]] * 10**5}, "predicted is .*, not an object"),
    ],
)
def test_a_file_beyond_the_limits_is_refused_at_once(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """A million micro-batches once took over 10 s: the schedule was built."""
    with at_most(2), pytest.raises(PlanError, match=message) as caught:
        Plan.load(written(tmp_path, json.dumps({**VALID, **change})))
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("schedule", ["gpipe", "dapple-b", "zb-h1", "K=100000,1"])
def test_the_schedule_of_a_plan_is_not_built_to_read_it(tmp_path: Path, schedule: str) -> None:
    with at_most(0.5):
        plan = Plan.load(written(tmp_path, {**VALID, "micro_batches": 10**5, "schedule": schedule}))
    assert plan.micro_batches == 10**5


def test_a_number_of_thousands_of_digits_in_a_file_is_refused(tmp_path: Path) -> None:
    text = json.dumps({**VALID, "micro_batches": 4}).replace('"micro_batches": 4', '"micro_batches": ' + "9" * 5000)
    with pytest.raises(PlanError, match="not a readable JSON file: a number of 5000 digits"):
        Plan.load(written(tmp_path, text))


@pytest.mark.parametrize(
    ("samples", "micro_batches", "text"),
    [
        (8, 4, "4 micro-batches of 2 samples"),
        (8, 3, "3 micro-batches of 2 or 3 samples"),
        (4, 4, "4 micro-batches of 1 sample"),
        (5, 1, "1 micro-batch of 5 samples"),
    ],
)
def test_micro_batches_are_described(samples: int, micro_batches: int, text: str) -> None:
    plan = make_plan((0, 0, (0,)), global_batch_size=samples, micro_batches=micro_batches)
    assert plan.describe_micro_batches() == text
