"""BaPipe's Table 1 and Table 2: time, bubble and memory of a mini-batch of balanced stages, by its formulas.

1F1B-SNO and 1F1B-SO (Table 2) are schedules here. 1F1B-AS (Table 1) has transfers that begin while their producer
still computes and hide wholly: here it is 1F1B-SNO without transfers. FBP-AS runs forwards and backwards on one device
at the same time, which no schedule here does.
"""

from __future__ import annotations

from math import ceil

import pytest

from dapple_tf.simulator.simulate import simulate
from dapple_tf.timeline.timeline import Timeline
from tests.dapple_tf.simulator.builders import cost, make_cluster, make_plan, make_profile, make_timeline, step_of

F, B, SR = 1.0, 2.0, 0.25  # of every stage; SR is the time to send or to receive
SHAPES = [(n, m) for n in (2, 3, 4) for m in (4, 8, 9, 12)]


@pytest.mark.parametrize(("n", "m"), SHAPES)
def test_table_1_time_and_bubble(n: int, m: int) -> None:
    timeline = even("1f1b-sno", n, m, 0.0)
    assert timeline.step_seconds == (m + n - 1) * (F + B)
    assert timeline.bubble == pytest.approx((n - 1) / (m + n - 1))


@pytest.mark.parametrize(("n", "m"), SHAPES)
def test_table_2(n: int, m: int) -> None:
    compute = (m + n - 1) * (F + B)
    extra = {"1f1b-sno": (n + m - 2 - ceil((m - 1) / n)) * 2 * SR, "1f1b-so": (n - 1) * 2 * SR}
    idle = {"1f1b-sno": (m - 1 - ceil((m - 1) / n)) * 2 * SR, "1f1b-so": 0.0}
    for name in extra:
        assert seconds(name, n, m) == pytest.approx(compute + extra[name])
        bubble = ((n - 1) * (F + B + 2 * SR) + idle[name]) / (compute + extra[name])
        assert even(name, n, m, SR).bubble == pytest.approx(bubble)
    assert seconds("dapple-b", n, m) == seconds("1f1b-so", n, m)  # as fast, with one micro-batch less


@pytest.mark.parametrize(("n", "m"), SHAPES)
def test_table_2_bandwidth(n: int, m: int) -> None:
    """1F1B-SO hides transfers over links that pass a stage's outputs (a) in a forward's time: a / F, and no slower."""
    wanted = (m + n - 1) * (F + B)
    assert seconds("1f1b-so", n, m, F) == wanted + (n - 1) * 2 * F
    assert seconds("1f1b-so", n, m, 1.5 * F) > wanted + (n - 1) * 2 * 1.5 * F


@pytest.mark.parametrize(
    ("schedule", "held"),
    # (N - i + 1) a and 2 (N - i + 1) a of features, 2 w of weights and their gradients: N = 3, w = 10, a = 6 bytes.
    [("1f1b-sno", (20 + 18, 20 + 12, 20 + 6)), ("1f1b-so", (20 + 36, 20 + 24, 20 + 12))],
)
def test_tables_1_and_2_memory(schedule: str, held: tuple[int, ...]) -> None:
    plan = make_plan(
        *((i, i, (i,)) for i in range(3)),
        schedule=schedule,
        global_batch_size=32,
        micro_batch_size=4,
        micro_batches=8,
    )
    timeline = simulate(plan, make_profile(*[(F, B)] * 3), make_cluster(3), optimizer_slots=0)
    working = (8, 8 + 8, 8 + 8)  # which the paper leaves out: gradients of what a stage sends and receives
    assert timeline.peak_memory_bytes == tuple(a + b for a, b in zip(held, working, strict=True))


def even(schedule: str, stages: int, micro_batches: int, sent: float) -> Timeline:
    return make_timeline(schedule, micro_batches, [cost(F, B, sent)] * stages)


def seconds(schedule: str, stages: int, micro_batches: int, sent: float = SR) -> float:
    return step_of(schedule, micro_batches, [cost(F, B, sent)] * stages)
