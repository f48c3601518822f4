"""The ops inside of recorded actions: attributed to them, drawn below their device, and the reason of a slow action."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.errors import TraceError, UsageError
from dapple_tf.runtime.op_profile import attribute_ops
from dapple_tf.timeline.describe import explain_slow, find_slowest
from dapple_tf.timeline.events import OpRun
from dapple_tf.timeline.picture import save_recording
from dapple_tf.timeline.recording import Recording
from dapple_tf.timeline.stamps import fill_stamps, name_stamps
from dapple_tf.timeline.timeline import Timeline
from dapple_tf.timeline.trace_file import read_recording
from tests.dapple_tf.builders import X, chain, step_of
from tests.dapple_tf.timeline.test_timeline import TWO, event, events
from tests.dapple_tf.timeline.test_trace import Viewer


def test_recorded_ops_are_in_the_actions_that_ran_them() -> None:
    _, loss = chain(3, width=64)
    step = step_of(loss, stages=2, micro_batches=2)
    assert float(step.record(X, ops=True)) == pytest.approx(float(step_of(chain(3, width=64)[1])(X)), rel=1e-6)
    timeline = step.timeline
    events = {(e.action, e.replica): e for e in timeline.events}
    for op in timeline.ops:
        run = events[op.action, op.replica]
        assert 0 <= op.start <= op.start + op.seconds <= run.end - run.start + 1e-9
    products = {(op.stage, op.kind) for op in timeline.ops if "MatMul" in op.op}
    assert products == {(stage, kind) for stage in range(2) for kind in "FB"}
    assert all("gradients" in op.name for op in timeline.ops if op.kind == "B" and "MatMul" in op.op)
    step.record(X)
    assert step.timeline.ops == ()
    assert step.timeline.earlier[0].timeline.ops == timeline.ops


def test_an_op_is_attributed_by_its_function_and_its_time() -> None:
    _, loss = chain(2)
    step = step_of(loss, stages=2, micro_batches=2)
    step.record(X)
    graph = step.graph
    names = name_stamps(graph)
    calls = [stamp.name for stamp in names]
    times = np.zeros(2 * len(names))
    spans = {"stage0/replica0/mb0/forward": (10, 11), "stage0/replica0/mb1/forward": (11, 12)}
    for name, (start, end) in spans.items():
        times[2 * calls.index(name)], times[2 * calls.index(name) + 1] = start, end
    (forward,) = [f for f in graph.functions if f.name == "stage0/forward"]
    product = next(node.name for node in forward.graph.nodes if node.op == "MatMul")
    runs = [
        (f"body/{product}:MatMul", 10.2, 10.4),
        (f"body/{product}:MatMul", 10.9999, 11.4),  # by a clock that is a little behind
        (f"body/{product}:MatMul", 10.8, 11.2),  # of which action?
        (f"body/{product}:MatMul", 13.0, 13.1),  # of none
        (f"body/{product}:MatMul", 10.2, 10.2 + 1e-7),  # too short
        ("body/another:MatMul", 10.2, 10.4),
    ]
    found = attribute_ops(graph, fill_stamps(names, times), runs)
    assert [(str(op.action), op.name, op.op) for op in found] == [(f"0F{m}", product, "MatMul") for m in range(2)]
    assert [time for op in found for time in (op.start, op.seconds)] == pytest.approx([0.2, 0.2, 0.0, 0.4])


def test_a_second_profiler_is_refused(tmp_path: Path) -> None:
    _, loss = chain(2)
    step = step_of(loss)
    step.record(X)
    tf.profiler.experimental.start(str(tmp_path))
    try:
        with pytest.raises(UsageError, match="a profiler of TensorFlow runs already"):
            step.record(X, ops=True)
    finally:
        tf.profiler.experimental.stop()
    step.record(X, ops=True)


# Three forwards of a second, of which the last is four times as long: its product takes 2 s more, and it waits 1 s.
FORWARDS = events("0F0 0-1, 0F1 1-2, 0F2 2-6")
BACKWARDS = tuple(event(f"0B{m}", 0, 6.0 + m, 7.0 + m) for m in range(3))


def op(micro_batch: int, name: str, start: float, seconds: float) -> OpRun:
    return OpRun(0, "F", micro_batch, 0, name, name.capitalize(), start, seconds)


OPS = (
    op(0, "product", 0.0, 0.5),
    op(0, "sum", 0.5, 0.5),
    op(1, "product", 0.0, 0.5),
    op(1, "sum", 0.25, 0.75),  # beside the product
    op(2, "product", 0.0, 2.5),
    op(2, "sum", 2.5, 0.5),
)
SLOW = Timeline((*FORWARDS, *BACKWARDS), ops=OPS)


def test_the_ops_that_made_an_action_slow_are_named_with_what_is_usual() -> None:
    slow, *others = find_slowest(SLOW)
    assert str(slow) == "0F2 4 s (4x the median)"
    assert list(map(str, explain_slow(SLOW, slow))) == [
        "Product product 2.5 s (usually 500 ms)",
        "waiting between ops 1 s (usually 0 s)",
    ]
    backward = next(other for other in others if other.event.action.kind == "B")
    assert explain_slow(SLOW, backward) == ()
    assert explain_slow(Timeline(SLOW.events), slow) == ()


def test_the_json_of_a_recording_has_the_ops_of_slow_actions() -> None:
    slowest = Recording("", SLOW).to_json()["slowest"]
    assert slowest[0]["ops"] == [
        {"name": "product", "op": "Product", "seconds": 2.5, "usual": 0.5},
        {"name": "", "op": "", "seconds": 1.0, "usual": 0.0},
    ]
    assert "ops" not in slowest[-1]


def test_a_trace_has_the_ops_below_their_device_and_is_read_again(tmp_path: Path) -> None:
    save_recording(Recording("", SLOW), tmp_path / "t.json")
    viewer = Viewer(json.loads((tmp_path / "t.json").read_text()))
    assert list(viewer.threads.values()) == [
        "stage 0 (/device:CPU:0)",
        "ops of stage 0 (/device:CPU:0)",
        "ops of stage 0 (/device:CPU:0) (2)",
    ]
    rows = [[(start / 1e9, name) for start, _, name in spans] for _, spans in sorted(viewer.spans.items())]
    assert rows[1] == [
        (0, "Product product"),
        (0.5, "Sum sum"),
        (1, "Product product"),
        (2, "Product product"),
        (4.5, "Sum sum"),
    ]
    assert rows[2] == [(1.25, "Sum sum")]
    found = read_recording(tmp_path / "t.json").measured
    assert found.ops == OPS


def test_arrows_keep_their_spans_above_rows_of_ops(tmp_path: Path) -> None:
    ops = (OpRun(0, "F", 0, 0, "a", "A", 0.0, 0.5), OpRun(1, "B", 0, 0, "b", "B", 0.0, 0.5))
    save_recording(Recording("", Timeline(TWO.events, ops=ops)), tmp_path / "t.json")
    viewer = Viewer(json.loads((tmp_path / "t.json").read_text()))
    assert sorted(viewer.flows) == [("0F0", "1F0"), ("1B0", "0B0")]
    assert len(viewer.threads) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_batch": 7}, r"measured\.ops\[0\] is of 0F7 of replica 0, which is no action of the step"),
        ({"seconds": 1e12}, r"measured\.ops\[0\] ends after more than 1e\+09 seconds"),
        ({"start": -1.0}, r"measured\.ops\[0\]\.start is -1\.0, not a finite number"),
    ],
)
def test_the_error_for_damaged_ops_names_the_field(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    changed = dataclasses.replace(OPS[0], **changes)
    save_recording(Recording("", Timeline(FORWARDS)), tmp_path / "t.json")
    data = json.loads((tmp_path / "t.json").read_text())
    data["dapple"]["measured"]["ops"] = [dataclasses.asdict(changed)]
    (tmp_path / "t.json").write_text(json.dumps(data))
    with pytest.raises(TraceError, match=message):
        read_recording(tmp_path / "t.json")
