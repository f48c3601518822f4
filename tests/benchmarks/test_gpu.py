"""The table of a machine with GPUs: its parts on logical CPU devices, and every place that asks for a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.client import device_lib

from benchmarks import gpu
from benchmarks.common import Row
from benchmarks.gpu import SIZES, find_questions, list_ways, measure_recorded
from dapple_tf import devices
from dapple_tf.autoplan import measured_problem
from dapple_tf.distributed import exchange_network
from dapple_tf.distributed.membership import Job
from dapple_tf.graph_passes.ir.graph import Graph
from dapple_tf.memory import meter, room
from dapple_tf.memory.meter import MeasuredMemory
from dapple_tf.profiler import detect
from dapple_tf.profiling import measured
from tests.dapple_tf.builders import X, chain, step_of
from tests.dapple_tf.distributed.native.peers import needs_library
from tests.processes import needs_horovod

# --- every place in the source that asks for a GPU, reached with the answer yes

GPUS = [SimpleNamespace(name=f"/device:GPU:{i}", device_type="GPU") for i in range(2)]


@pytest.fixture
def answer_yes(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Makes TensorFlow and Horovod tell the functions of a module that there are GPUs; returns which have asked."""

    def prepare(module: str) -> list[str]:
        asked: list[str] = []

        def caller() -> bool:
            frame = sys._getframe(2)
            if frame.f_globals["__name__"] == module:
                asked.append(f"{module}.{frame.f_code.co_name}")
            return frame.f_globals["__name__"] == module

        def listing(real: Callable[..., Any]) -> Callable[..., Any]:
            return lambda kind=None: GPUS if kind == "GPU" and caller() else real(kind)

        for name in ("list_physical_devices", "list_logical_devices"):
            monkeypatch.setattr(tf.config, name, listing(getattr(tf.config, name)))
        monkeypatch.setattr(tf.config, "set_visible_devices", lambda device, kind: caller())
        listed = [SimpleNamespace(device_type=kind, memory_limit=limit) for kind, limit in (("CPU", 1), ("GPU", 2**34))]
        monkeypatch.setattr(device_lib, "list_local_devices", lambda: listed)
        monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda device: {"device_name": "NVIDIA A100"})
        if module == exchange_network.__name__:
            import horovod.tensorflow as hvd

            monkeypatch.setattr(hvd, "nccl_built", lambda: caller())
        return asked

    return prepare


def record_by_ops() -> None:
    _, loss = chain(3, width=64)
    step = step_of(loss, stages=2, micro_batches=4)
    step.record(X, ops=True)
    assert tuple(summary.order for summary in step.timeline.stages) == step.plan.build_schedule().stages


def share_of_one_device() -> None:
    with measured._limit_to_one_device() as share:
        assert share == 0.0


def find_no_need() -> None:
    assert room.find_need(Graph("empty", ()), {}, (), "this process", lambda: 0) is None


def offer_nothing() -> None:
    assert "NCCL moves tensors" in exchange_network._offer("auto")[1].obstacle


def equals(function: Callable[..., Any], wanted: Any, *arguments: Any) -> Callable[[], None]:
    def check() -> None:
        assert function(*arguments) == wanted

    return check


REACHED: Mapping[str, Callable[[], None]] = {
    "dapple_tf.autoplan.measured_problem.usable_devices": equals(measured_problem.usable_devices, 64, 64),
    "dapple_tf.devices._make_devices": equals(devices._make_devices, None, 2, Job()),
    "dapple_tf.devices._choose_gpu": equals(devices._make_devices, None, None, Job(2, 1, 1, 2)),
    "dapple_tf.devices.list_devices": equals(devices.list_devices, tuple(device.name for device in GPUS)),
    "dapple_tf.distributed.exchange_network._has_nccl": offer_nothing,
    "dapple_tf.distributed.exchange_network._offer": offer_nothing,
    "dapple_tf.memory.meter.packs_operands": equals(meter.packs_operands, False),
    "dapple_tf.memory.room.find_need": find_no_need,
    "dapple_tf.profiler.detect.local_devices": equals(detect.local_devices, (2, 2.0**34), None),
    "dapple_tf.profiler.detect._gpu_memory": equals(detect.local_devices, (1, 2.0**34), 1),
    "dapple_tf.profiling.measured._limit_to_one_device": share_of_one_device,
    "dapple_tf.profiling.measured._roofline_of_device": lambda: equals(
        lambda: measured._roofline_of_device().name, "H100"
    )(),
    "dapple_tf.profiling.measured.describe_device": equals(measured.describe_device, "NVIDIA A100"),
    "dapple_tf.runtime.recorder.keep": record_by_ops,
}


def test_every_place_that_asks_for_a_gpu_is_reached_here() -> None:
    assert sorted(map(str, find_questions())) == sorted(REACHED)


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(place, marks=[needs_horovod, needs_library] if "exchange_network" in place else [])
        for place in REACHED
    ],
)
def test_a_place_that_asks_for_a_gpu_goes_on_with_the_answer_yes(
    place: str, answer_yes: Callable[[str], list[str]]
) -> None:
    asked = answer_yes(place.rpartition(".")[0])
    REACHED[place]()
    assert place in asked or place == "dapple_tf.profiler.detect._gpu_memory"  # which is asked where there are GPUs


# --- the parts, on logical CPU devices


def check(rows: list[Row], wanted: Mapping[str, str]) -> None:
    for (figure, text), row in zip(wanted.items(), rows, strict=True):
        assert figure in row.figure
        assert text in row.measured


TINY = SIZES["tiny"]


def test_a_recorded_step_has_memory_timeline_and_bubble() -> None:
    check(
        list(measure_recorded(TINY)),
        {
            "memory per stage": "left out: logical CPU devices share one allocator",
            "memory of all stages": "allocator and heap",
            "the timeline's step, by the host's clock": "ops in its actions",
            "the bubble": "of the step",
        },
    )


def test_memory_of_each_stage_is_compared_where_an_allocator_counts_it() -> None:
    _, loss = chain(3, width=64)
    step = step_of(loss, stages=2, micro_batches=2)
    step.record(X)
    sizes = [stage.predicted.in_step for stage in step.report.stages]
    counted = [MeasuredMemory(f"GPU:{i}", "allocator", 7, 7 + size * (1 + i)) for i, size in enumerate(sizes)]
    stages = [replace(stage, measured=own) for stage, own in zip(step.report.stages, counted, strict=True)]
    rows = list(gpu.compare_memory(replace(step.report, stages=tuple(stages), predicted=None, measured=None)))
    check(rows, {"memory of stage 0 in a step": "+0%", "memory of stage 1 in a step": "-50%"})
    assert [row.ok for row in rows] == [True, False]
    check(
        list(gpu.compare_memory(replace(step.report, predicted=None, measured=None))),
        {"memory per stage": "left out: neither TensorFlow nor the C library counts it"},
    )


# --- what is left out, and why


def test_the_devices_of_the_stages_are_described() -> None:
    assert gpu.describe_devices(0, 2) == "left out: this machine has no GPU; 2 logical CPU devices in their place"
    assert gpu.describe_devices(1, 2) == "1 GPUs, 2 stages, several logical GPUs a card"
    assert gpu.describe_devices(4, 4) == "4 GPUs, 4 stages, a card each"


@needs_horovod
def test_horovod_is_left_out_without_nccl_or_with_a_gpu_for_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    import horovod.tensorflow as hvd

    assert list_ways(0, 2)["horovod"] is None
    monkeypatch.setattr(hvd, "nccl_built", lambda: False)
    assert "built without NCCL" in str(list_ways(2, 2)["horovod"])
    monkeypatch.setattr(hvd, "nccl_built", lambda: True)
    assert "NCCL needs a GPU for each rank: there are 1 for 2" in str(list_ways(1, 2)["horovod"])
    assert list_ways(2, 2)["horovod"] is None


def test_a_part_that_fails_is_a_row_of_the_table() -> None:
    def fail() -> list[dict[str, object]]:
        raise RuntimeError("out of\n memory")

    assert list(gpu.run_part("speed", fail)) == [Row("speed", "runs", "failed: out of memory", ok=False)]


@needs_horovod
@needs_library
@pytest.mark.timeout(1200)  # six processes and jobs
def test_the_whole_table_at_a_tiny_size() -> None:
    rows = list(gpu.run("tiny"))
    assert [row.figure for row in rows if row.measured.startswith("failed")] == []
    assert sum("asks for GPUs" in row.figure for row in rows) == len(REACHED)
    equality = [row for row in rows if row.figure.startswith("one process, equality: ")]
    assert ["float16, the loss scaled" in row.figure for row in equality] == [False, False, True, False]
    assert "by XLA" in equality[3].figure
    assert [row.figure for row in rows if ", equality: " in row.figure and not row.ok] == []
    check(
        [row for row in rows if row.figure.startswith("one process, speed: ")],
        {
            "one device": "1.00x",
            "the pipeline,": "on each of 2",
            "the pipeline by XLA": "TFLOP/s",
            "share of the peak (MFU)": "left out: the peak of CPU",
        },
    )
    assert sum("2 ranks, native exchanges" in row.figure for row in rows) == 8
