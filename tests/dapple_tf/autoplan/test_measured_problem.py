"""The planning problem: devices that can run at the same time, optimizer slots, and checks before profiling."""

from __future__ import annotations

from typing import Any

import keras
import pytest

import dapple_tf as dapple
from dapple_tf.autoplan.measured_problem import count_slots, usable_devices
from dapple_tf.profiler.cluster import config
from tests.equality.small_models import chain, data, sgd, weights


def test_usable_cpu_devices_are_at_most_as_many_as_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    assert [usable_devices(n) for n in (1, 3, 8)] == [1, 3, 3]


@pytest.mark.parametrize(
    ("make", "slots"),
    [(keras.optimizers.Adam, 2), (keras.optimizers.SGD, 0), (lambda: keras.optimizers.SGD(0.1, momentum=0.9), 1)],
)
def test_slots_of_the_optimizer_are_counted(make: type[keras.optimizers.Optimizer], slots: int) -> None:
    optimizer, trained = make(), weights(3)
    assert count_slots(optimizer, trained) == 2, "as Adam, before it is built"
    optimizer.build(trained)
    assert count_slots(optimizer, trained) == slots


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "K=3,2,1"}, r"'K=3,2,1' is for 3 stages, but the cluster has 2 devices"),
        ({"schedule": "0F0 0F1 0B0 0B1", "micro_batches": 4}, "for 1 stage x 2 micro-batches, but there are 1 x 4"),
        (
            {"schedule": "K=1,2", "stages": 2, "micro_batches": "auto", "cluster": config("a", 2)},
            "the schedule deadlocks",
        ),
    ],
)
def test_an_impossible_schedule_is_refused_before_the_model_is_profiled(options: dict[str, Any], message: str) -> None:
    traced: list[None] = []
    loss_fn = chain(weights(3))

    def counted(x: Any, y: Any) -> Any:
        traced.append(None)
        return loss_fn(x, y)

    options = {"micro_batches": 2, "cluster": config("a", 2), **options}
    with pytest.raises(ValueError, match=message):
        dapple.pipeline(counted, optimizer=sgd(), example_batch=data(8), **options)
    assert len(traced) == 1  # profiling would trace it again
