"""A recorded step of a job: every rank finds the times of all, by one clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dapple_tf.commands.run_file import read_run
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec
from dapple_tf.timeline.trace_file import read_recording
from tests.dapple_tf.commands.test_tensorboard import read_curves
from tests.dapple_tf.distributed.launches import Launches
from tests.dapple_tf.timeline.test_trace import Viewer
from tests.processes import RanksError, needs_horovod, run_ranks

pytestmark = needs_horovod


@pytest.fixture
def ranks(launches: Launches) -> list[dict[str, Any]]:
    return launches.results("three ranks", "record_ranks")


def test_every_rank_finds_the_same_times(ranks: list[dict[str, Any]]) -> None:
    for what in ("events", "transfers", "stages"):
        assert ranks[0][what] == ranks[1][what] == ranks[2][what]


def test_a_recorded_step_trains_as_any_other(ranks: list[dict[str, Any]]) -> None:
    plain, recorded = ranks[0]["losses"]
    assert recorded == plain


def test_every_rank_ran_its_actions_in_the_schedules_order(ranks: list[dict[str, Any]]) -> None:
    schedule = ScheduleSpec.parse("dapple-b").build(2, 2)  # what "auto" is in a job
    for stage, replica, device in ((0, 0, "rank:0"), (1, 0, "rank:1"), (1, 1, "rank:2")):
        ran = [e[0] for e in ranks[0]["events"] if e[2] == device]
        assert ran == [str(action) for action in schedule.stages[stage]]
        assert {e[1] for e in ranks[0]["events"] if e[2] == device} == {replica}


def test_what_is_sent_comes_between_what_makes_it_and_what_takes_it(ranks: list[dict[str, Any]]) -> None:
    """Of the ranks' clocks too: they would be told apart by more than a step takes."""
    times = {(action, device): (start, end) for action, _, device, start, end in ranks[0]["events"]}
    sent = {(source, target, m): (start, end) for source, target, m, start, end in ranks[0]["transfers"]}
    assert set(sent) == {(0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1)}
    for m in (0, 1):
        start, end = sent[0, 1, m]
        assert times[f"0F{m}", "rank:0"][1] <= start <= end
        for device in ("rank:1", "rank:2"):
            assert start <= times[f"1F{m}", device][0]
            assert times[f"1B{m}", device][1] <= sent[1, 0, m][0]
        assert sent[1, 0, m][0] <= times[f"0B{m}", "rank:0"][0]


def test_results_that_travel_together_are_in_one_transfer(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]["together"]
    assert found == ranks[1]["together"] == ranks[2]["together"]
    times = {(action, device): (start, end) for action, device, start, end in found["events"]}
    sent = {name: (start, end) for name, start, end in found["transfers"]}
    assert sorted(sent) == ["0>1 F0+F1", "1>0 B0+B1"]
    assert times["0F1", "rank:0"][1] <= sent["0>1 F0+F1"][0]
    for device in ("rank:1", "rank:2"):
        assert sent["0>1 F0+F1"][0] <= times["1F0", device][0]
        assert times["1B1", device][1] <= sent["1>0 B0+B1"][0]
    assert sent["1>0 B0+B1"][0] <= times["0B0", "rank:0"][0]


def test_allreduce_and_updates_come_last(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]["stages"]
    reduced = [(stage, device) for kind, stage, device, _, _ in found if kind == "allreduce"]
    assert sorted(reduced) == [(1, "rank:1"), (1, "rank:2")]
    updated = [(stage, device) for kind, stage, device, _, _ in found if kind == "update" and stage is not None]
    assert sorted(updated) == [(0, "rank:0"), (1, "rank:1"), (1, "rank:2")]
    last_action = max(end for *_, end in ranks[0]["events"])
    assert all(start >= last_action for kind, _, _, start, _ in found if kind == "update")


def test_ranks_of_one_host_read_one_clock(ranks: list[dict[str, Any]]) -> None:
    assert [rank["offsets"] for rank in ranks] == [[0.0, 0.0, 0.0]] * 3
    assert ranks[2]["gathered"] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


def test_the_picture_is_saved(ranks: list[dict[str, Any]], launches: Launches) -> None:
    assert (launches.folder("three ranks") / "t.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


# --- dapple train

MODEL = "tests/dapple_tf/distributed/programs/checkpoint_model.py:chain"


@pytest.mark.filterwarnings("ignore")  # TensorFlow calls its only reader of events deprecated
def test_rank_0_writes_curves_and_a_trace_for_all(tmp_path: Path) -> None:
    options = ["--stages", "2", "--micro-batches", "2", "--steps", "6", "--json"]
    options += ["--trace", str(tmp_path / "t.json"), "--trace-ops", "--tensorboard", str(tmp_path / "curves")]
    options += ["--record", str(tmp_path / "r.jsonl")]
    first, second = run_ranks(["-m", "dapple_tf", "train", MODEL, *options], 2)
    assert second.stdout == ""
    found = json.loads(first.stdout.splitlines()[-1])
    recording = read_recording(tmp_path / "t.json")
    assert recording.measured is not None
    assert {event.device for event in recording.measured.events} == {"rank:0", "rank:1"}
    assert {(t.source, t.target, t.micro_batch) for t in recording.measured.transfers} == {
        *((0, 1, m) for m in range(2)),
        *((1, 0, m) for m in range(2)),
    }
    assert recording.to_json() == found["timeline"]
    assert [curve.device for curve in recording.measured.memory_curves] == ["rank:0", "rank:1"]
    assert {(op.stage, op.kind) for op in recording.measured.ops} == {(s, kind) for s in range(2) for kind in "FB"}
    viewer = Viewer(json.loads((tmp_path / "t.json").read_text()))
    assert {first for first, _ in viewer.flows} >= {"0F0", "0>1 F0", "1B1", "1>0 B1"}
    run = read_run(tmp_path / "r.jsonl")
    assert [step.loss for step in run.steps] == found["losses"]
    assert (run.start.processes, set(run.start.versions) >= {"Horovod"}) == (2, True)
    assert all(run.end.measured), "each rank measures its own stage"
    curves = read_curves(tmp_path / "curves")
    assert [number for number, _ in curves["loss"]] == list(range(1, 7))
    assert [loss for _, loss in curves["loss"]] == pytest.approx(found["losses"])
    recorded = [number for number, _ in curves["bubble"]]
    assert recorded[:4] == [1, 2, 3, 4], "these show what recording costs"
    assert recorded[-1] == 6, "the last one is recorded for the trace"


def test_a_folder_that_rank_0_cannot_write_ends_all_before_the_model_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RanksError) as caught:
        run_ranks(
            [
                "-m",
                "dapple_tf",
                "train",
                "models/gpt.py:gpt",
                "--set",
                "absent=1",
                "--tensorboard",
                str(tmp_path / "file"),
            ],
            2,
        )
    assert caught.value.exit_code == 2
    told = [rank.stderr for rank in caught.value.ranks]
    assert f"--tensorboard: {tmp_path}/file cannot hold TensorBoard's events: it is a file, not a folder" in told[0]
    assert not any("absent" in text for text in told)
