"""``dapple plan`` and ``dapple simulate``: results, files and errors; neither starts TensorFlow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dapple_tf.plans import Plan
from tests.dapple_tf.commands.command_line import Run
from tests.dapple_tf.planner.builders import make_cluster, make_profile
from tests.processes import run_python

LAYER = "node{} -- {} -- forward_compute_time={}, backward_compute_time={}, activation_size=8.0, parameter_size={}\n"
GRAPH = (
    LAYER.format(1, "Input", 0.0, 0.0, 0.0)
    + LAYER.format(2, "Dense", 1000.0, 2000.0, 40.0)
    + LAYER.format(3, "Dense", 1000.0, 2000.0, 40.0)
    + "\tnode1 -- node2\n\tnode2 -- node3\n"
)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with a profile and a cluster, where the commands run."""
    monkeypatch.chdir(tmp_path)
    make_profile((1, 2, 4, 4, 10), (1, 2, 4, 4, 10), (2, 4, 4, 4, 10)).save("profile.json")
    make_cluster(2).save("cluster.yaml")
    return tmp_path


PLAN = ("plan", "profile.json", "--cluster", "cluster.yaml", "--global-batch-size", 8)
SIMULATE = ("simulate", "plan.json", "--profile", "profile.json", "--cluster", "cluster.yaml")


def test_a_plan_is_printed_saved_and_simulated(run_here: Run) -> None:
    run = run_here(*PLAN, "-o", "plan.json", "--json")
    result = run.json
    assert set(result) == {
        *("format", "model", "planner", "global_batch_size", "micro_batch_size", "micro_batches", "schedule"),
        *("recompute", "stages", "predicted"),
    }
    assert set(result["predicted"]) == {"step_seconds", "speedup", "bubble", "peak_memory_bytes"}
    assert [set(stage) for stage in result["stages"]] == [{"first_layer", "last_layer", "devices"}] * 2
    # Eight times 1.5 s in the last stage; 0.5 s and back 1 s in the first; 1 byte each way at 10 bytes a second.
    assert result["predicted"]["step_seconds"] == pytest.approx(12 + 1.5 + 0.2)
    assert "plan straight, layers 2:1, 8 micro-batches of 1 sample," in run.stdout
    assert "runner-up DP" in run.stdout
    assert json.loads(Path("plan.json").read_text()) == result
    assert Plan.load("plan.json").predicted == result["predicted"]

    timeline = run_here(*SIMULATE, "-o", "step.json", "--json").json
    assert {"step_seconds", "speedup", "bubble", "peak_memory_bytes", "stages"} <= set(timeline)
    for key in ("step_seconds", "speedup", "bubble", "peak_memory_bytes"):
        assert timeline[key] == result["predicted"][key]
    assert timeline["stages"][1]["actions"].startswith("1F0 1B0 1F1 1B1 ")
    assert set(timeline["stages"][0]) == {"forward_seconds", "backward_seconds", "allreduce_seconds", "actions"}
    names = {row["name"] for row in json.loads(Path("step.json").read_text())["traceEvents"]}
    assert {"0F0", "0B7", "1F3"} <= names


@pytest.mark.parametrize("suffix", ["png", "html"])
def test_a_timeline_is_saved_as_a_picture(run_here: Run, suffix: str) -> None:
    assert run_here(*PLAN, "-o", "plan.json").code == 0
    run = run_here(*SIMULATE, "-o", f"step.{suffix}")
    assert run.code == 0, run.stderr
    assert f"timeline: step.{suffix}" in run.stdout
    start = {"png": b"\x89PNG", "html": b"<!"}[suffix]
    assert Path(f"step.{suffix}").read_bytes().lower().startswith(start.lower())


def test_options_reach_the_planner(run_here: Run) -> None:
    options = ("--planner", "dp", "--micro-batch-size", 4, "--schedule", "gpipe", "--recompute", "--overlap", "--json")
    result = run_here(*PLAN, *options).json
    assert (result["planner"], result["micro_batch_size"], result["schedule"]) == ("dp", 4, "gpipe")
    assert (result["recompute"], result["overlap"]) == (True, True)
    plain = run_here(*PLAN, "--planner", "dp", "--optimizer-slots", 0, "--micro-batch-size", 8, "--json").json
    # 30 bytes of weights and of gradients; half of 2 x 12 stashed and of the working set of 2 x 8.
    assert plain["predicted"]["peak_memory_bytes"] == [60 + 12 + 8]


def test_pipedream_prints_and_saves_its_prediction(run_here: Run) -> None:
    run = run_here(*PLAN, "--planner", "pipedream", "-o", "plan.json", "--json")
    # One stage on both devices: max(12 s, 2 x 30 bytes at 10 bytes a second) / 2 for the profile's 4 samples. Two
    # stages of 6 s each are as fast.
    assert "by PipeDream's formulas: 6.000 s a minibatch of 4 samples, 0.6667 samples/s, NOAM 1" in run.stdout
    assert run.json["planner"] == "pipedream"
    assert run.json["predicted"]["pipedream"] == {"minibatch_seconds": 6.0, "minibatch_size": 4, "noam": 1}
    assert json.loads(Path("plan.json").read_text()) == run.json
    assert run_here(*SIMULATE, "--json").json["step_seconds"] == run.json["predicted"]["step_seconds"]


def test_a_schedule_may_be_a_file(run_here: Run, tmp_path: Path) -> None:
    (tmp_path / "order.txt").write_text("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n")
    options = ("--schedule", "order.txt", "--micro-batch-size", 4, "--json", "-o", "plan.json")
    result = run_here(*PLAN, *options).json
    assert result["schedule"] == "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
    assert [stage["actions"] for stage in run_here(*SIMULATE, "--json").json["stages"]] == [
        "0F0 0F1 0B0 0B1",
        "1F0 1B0 1F1 1B1",
    ]
    assert "schedule given (0F0 0F1 0B0 0B1 ...)" in run_here(*PLAN, *options).stdout


def test_contention_for_interfaces_can_be_left_out(run_here: Run) -> None:
    # Three servers of one device, F = 1 and B = 2 of a sample, and 2 s on the wire for its tensor at each boundary.
    make_profile(*[(4, 8, 8, 4, 1000)] * 3).save("profile.json")
    make_cluster(1, 1, 1).save("cluster.yaml")
    fixed = (*PLAN, "--planner", "gpipe", "--schedule", "dapple-a", "--micro-batch-size", 1, "--json")
    shared, alone = run_here(*fixed, "-o", "plan.json").json, run_here(*fixed, "--no-contention").json
    assert shared["stages"] == alone["stages"]
    assert len(shared["stages"]) == 3
    assert shared["predicted"]["step_seconds"] > alone["predicted"]["step_seconds"] * 1.01
    for options, planned in ((), shared), (("--no-contention",), alone):
        assert run_here(*SIMULATE, *options, "--json").json["step_seconds"] == planned["predicted"]["step_seconds"]


def test_a_plan_whose_results_travel_together_is_refused_but_one_made_by_hand_is_simulated(run_here: Run) -> None:
    schedule = "0F0+ 0F1 0B0 0B1; 1F0 1F1 1B0+ 1B1"
    run = run_here(*PLAN, "--schedule", schedule, "--micro-batch-size", 4)
    assert (run.code, run.stdout) == (2, "")
    assert "planners do not simulate schedules in which results travel together (0F0+): leave out the '+'" in run.stderr
    run_here(*PLAN, "--schedule", schedule.replace("+", ""), "--micro-batch-size", 4, "-o", "plan.json")
    plan = json.loads(Path("plan.json").read_text())
    Path("plan.json").write_text(json.dumps({**plan, "schedule": schedule}))
    run = run_here(*SIMULATE, "--json")
    assert run.json["critical_path_seconds"]["waiting"] == 0


def test_a_file_without_a_schedule_is_refused(run_here: Run, tmp_path: Path) -> None:
    (tmp_path / "order.txt").write_text("0F0 0F1 0B0\n1F0 1B0")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    for file, message in (
        ("order.txt", "order.txt: stage 0 must run F and B of each micro-batch once; missing or unexpected: 0B1"),
        ("bytes.txt", "bytes.txt cannot be read as text"),
        ("none.txt", "there is no file none.txt"),
    ):
        run = run_here(*PLAN, "--schedule", file)
        assert (run.code, run.stdout) == (2, "")
        assert message in run.stderr


def test_a_graph_file_and_a_preset_can_be_planned(run_here: Run) -> None:
    Path("two-pbs-4.txt").write_text(GRAPH)
    arguments = ("plan", "two-pbs-4.txt", "--cluster", "config-b:2", "--global-batch-size", 8, "--json")
    result = run_here(*arguments).json
    assert sorted(device for stage in result["stages"] for device in stage["devices"]) == [0, 1]
    Path("two.txt").write_text(GRAPH)
    assert run_here("plan", "two.txt", *arguments[2:]).code == 2
    assert run_here("plan", "two.txt", *arguments[2:], "--profile-batch-size", 4).json["stages"] == result["stages"]
    doubled = run_here(*arguments, "--size-scale", 2, "--planner", "dp", "--micro-batch-size", 8).json
    once = run_here(*arguments, "--planner", "dp", "--micro-batch-size", 8).json
    assert doubled["predicted"]["peak_memory_bytes"][0] == 2 * once["predicted"]["peak_memory_bytes"][0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "none.json", *PLAN[2:]), "error: none.json: "),
        (
            (*PLAN[:2], "--cluster", "none.yaml", *PLAN[4:]),
            "error: --cluster none.yaml: there is no such file; presets are such as config-a:8",
        ),
        ((*PLAN[:2], "--cluster", "config-z:4", *PLAN[4:]), "error: there is no config-z"),
        (
            (*PLAN, "--planner", "pipedream", "--schedule", "looped-bfs:v=2"),
            "error: schedule 'looped-bfs:v=2' runs several stages on a device, and planner 'pipedream'",
        ),
        ((*PLAN, "--micro-batch-size", 3), "error: micro_batch_size=3 does not divide global_batch_size=8"),
        ((*PLAN, "--schedule", "x"), "error: no schedule is called 'x'"),
        (("simulate", "none.json", *SIMULATE[2:]), "error: none.json: "),
        ((*SIMULATE[:3], "none.json", *SIMULATE[4:]), "error: none.json: "),
        ((*SIMULATE[:4], "--cluster", "config-b:1"), "error: stage 1 is on device 1, but the cluster has the devices"),
    ],
)
def test_a_failure_is_one_line_with_exit_code_2_and_leaves_no_file(
    run_here: Run, arguments: tuple[object, ...], message: str
) -> None:
    more = () if "-o" in arguments else ("-o", "new.json")
    stderr = refused_without_a_file(run_here, *arguments, *more, "-q")
    assert stderr.startswith(message)
    assert len(stderr.splitlines()) == 1


def refused_without_a_file(run_here: Run, *arguments: object) -> str:
    """Return what a command prints to stderr that ends with exit code 2, and leaves all files as they were."""
    assert run_here(*PLAN, "-o", "plan.json").code == 0
    before = {path.name: path.read_bytes() for path in Path().iterdir()}
    run = run_here(*arguments)
    assert (run.code, run.stdout) == (2, "")
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == before
    return run.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*PLAN, "--planner", "bets"), "'--planner': no planner is called 'bets' (did you mean 'best'?)"),
        ((*PLAN, "--planner", "pipdream"), "'--planner': no planner is called 'pipdream' (did you mean 'pipedream'?)"),
        ((*PLAN, "-o", "."), "error: --output: . is a folder"),
        ((*PLAN, "-o", ""), "error: --output: the path of the file to write is empty"),
        ((*PLAN, "-o", "plan.png"), "error: --output: plan.png: a plan is written as JSON; its picture is drawn by "),
        ((*PLAN, "-o", "p" * 300), "cannot be written: File name too long"),
        ((*PLAN, "--planner", "bets", "-o", "absent/plan.json"), "'--planner': no planner is called 'bets'"),
        ((*SIMULATE, "-o", ""), "error: --output: the path of the file to write is empty"),
        ((*SIMULATE, "-o", "step.txt"), "error: --output: step.txt: a timeline is saved as .png, .html or .json"),
    ],
)
def test_a_wrong_option_exits_with_2_and_leaves_no_file(
    run_here: Run, arguments: tuple[object, ...], message: str
) -> None:
    assert message in refused_without_a_file(run_here, *arguments)


def test_for_a_model_that_is_too_large_the_error_says_what_would_fit(run_here: Run) -> None:
    make_cluster(2, memory=60).save("cluster.yaml")
    run = run_here(*PLAN, "-o", "plan.json")
    assert (run.code, run.stdout) == (1, "")
    err = run.stderr
    # The two layers of a stage: 80 bytes fixed, (4 + 4 kept + 8 worked on) / 4.
    assert "'net' does not fit 2 devices of 60 B" in err
    assert "lacks 24 B. Re-computation of whole stages would not help: it saves nothing of a single micro-" in err
    assert "It would fit with 3 devices" in err
    assert not Path("plan.json").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "profile.json", "--global-batch-size", 8),
        ("plan", "profile.json", "--cluster", "cluster.yaml"),
        ("plan", "profile.json", "--cluster", "cluster.yaml", "--global-batch-size", 0),
        (*PLAN, "--micro-batch-size", "some"),
        (*PLAN, "--optimizer-slots", -1),
        (*PLAN, "--no-such-option"),
        ("simulate", "plan.json", "--cluster", "cluster.yaml"),
        ("simulate",),
    ],
)
def test_wrong_usage_exits_with_2(run_here: Run, arguments: tuple[object, ...]) -> None:
    run = run_here(*arguments)
    assert (run.code, run.stdout) == (2, "")
    assert "Usage: " in run.stderr


def test_plan_and_simulate_do_not_start_tensorflow(run_here: Run, tmp_path: Path) -> None:
    assert run_here(*PLAN, "-o", "plan.json").code == 0
    commands = [[str(word) for word in words] for words in (PLAN, (*SIMULATE, "-o", "step.html"))]
    program = f"""
import sys
from dapple_tf.cli import main

for words in {commands}:
    sys.argv = ["dapple", *words]
    main()
    print("heavy:", sorted({{"tensorflow", "keras", "horovod"}} & set(sys.modules)))
"""
    run = run_python("-c", program, folder=tmp_path)
    assert [line for line in run.stdout.splitlines() if line.startswith("heavy:")] == ["heavy: []"] * 2


def test_asynchronous_windows_are_planned_and_simulated(run_here: Run) -> None:
    run = run_here(*PLAN, "--async", "--minibatches", 4, "-o", "plan.json", "--json")
    assert run.json["window"] == {"minibatches": 4, "weights": "stash", "depth": None, "micro_batches": None}
    assert "4 minibatches of 2 samples" in run.stdout
    assert "window of 4 minibatches: start-up " in run.stdout
    simulated = run_here(*SIMULATE, "--json").json
    for key in ("step_seconds", "startup_seconds", "minibatch_seconds", "drain_seconds", "peak_memory_bytes"):
        assert simulated[key] == run.json["predicted"][key]
    refused = run_here(*PLAN, "--minibatches", 4)
    assert refused.code == 2
    assert "minibatches=4 is for asynchronous windows" in refused.stderr


def test_what_would_help_the_plan_is_printed(run_here: Run) -> None:
    lines = run_here(*PLAN).stdout.splitlines()
    assert "with links twice as fast these stages would take 13.600 s, 0.7% less" in lines
    assert any(line.startswith("with re-computation these stages would take ") for line in lines)


def test_control_characters_of_layer_names_are_written_out(run_here: Run) -> None:
    profile = json.loads(Path("profile.json").read_text())
    profile["layers"][0]["name"] = "dense\x1b]0;title\x07\r"
    Path("profile.json").write_text(json.dumps(profile))
    run = run_here(*PLAN)
    assert run.code == 0, run.stderr
    assert r"stage 0: dense\x1b]0;title\x07\r .. layer1" in run.stdout.splitlines()


def test_no_folder_is_made_for_the_plan(run_here: Run) -> None:
    run = run_here(*PLAN, "-o", "plnas/plan.json")
    assert (run.code, run.stdout) == (2, "")
    assert "--output: plnas/plan.json: its folder is missing: make plnas, or correct the path" in run.stderr
    assert not Path("plnas").exists()
