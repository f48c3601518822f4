"""Random small models, cut, replicated and scheduled at random, compute what one device computes (float64)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dapple_tf.errors import PartitionError, ScheduleError
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec
from tests.dapple_tf.simulator.builders import draw_order, draw_split
from tests.equality.one_device import TOLERANCE, compare
from tests.equality.random_models import KINDS, Model, batch, build, models
from tests.graph_passes.schedules.mixed import mixed

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.05),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True, global_clipnorm=0.1),
    "adam": lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.01, 1, 0.5)),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.1),
}

# Every kind of operation is in some test's models: many small models, or (for quick tests) a few larger ones.
GROUPS = [tuple(KINDS)[i::8] for i in range(8)]
LARGE_GROUPS = [tuple(KINDS)[i::4] for i in range(4)]


@dataclass(frozen=True)
class Case:
    """A model and the way it is pipelined.

    ``recompute``: as ``dapple.pipeline`` takes it; ``replicas``: of workers; ``cut``: M, or the ``given_sizes``, or
    their shares.
    """

    model: Model
    stages: int | tuple[str, ...]
    replicas: tuple[int, ...]
    given_sizes: tuple[int, ...]
    schedule: str
    optimizer: str
    sizes: tuple[int, int]
    recompute: bool | tuple[str, ...]
    cut: int | tuple[int, ...] | tuple[float, ...]

    @property
    def micro_batches(self) -> int:
        return len(self.given_sizes)


@st.composite
def cases(draw: st.DrawFn, kinds: Sequence[str]) -> Case:
    model = draw(models(kinds))
    count = draw(st.integers(2, 4))
    stages: int | tuple[str, ...] = count
    if draw(st.booleans()):
        starts = draw(st.sets(st.integers(1, len(model.ops) - 1), min_size=1, max_size=count - 1))
        stages, count = tuple(model.layer(i) for i in sorted(starts)), len(starts) + 1
    micro_batches = draw(st.integers(1, 6))
    names = [
        "gpipe",
        "dapple-a",
        "dapple-b",
        "zb-h1",
        "zb-h2",
        "dapple-a:D=n",
        "dapple-b:D=n",
        "zb-h1:D=n",
        "any",
        "any W",
        "any mixed",
    ]
    schedule = draw(st.sampled_from([*names, "interleaved-1f1b:v=c", "looped-bfs:v=c"]))
    schedule = schedule.replace("=n", f"={draw(st.integers(1, 6))}")
    schedule = schedule.replace("=c", f"={draw(st.sampled_from([c for c in range(1, count + 1) if count % c == 0]))}")
    if schedule.startswith("any"):
        schedule = str(draw_order(draw, count, micro_batches, draw_split(draw, schedule, count, micro_batches)))
    if draw(st.booleans()):  # each backward is whole or split
        schedule = str(draw(mixed(ScheduleSpec.parse(schedule).build(count, micro_batches))))
    workers = ScheduleSpec.parse(schedule).worker_map(count).workers
    replicas = draw(st.one_of(st.just([1] * workers), st.lists(st.integers(1, 3), min_size=workers, max_size=workers)))
    while sum(replicas) > 8:
        replicas[replicas.index(max(replicas))] -= 1
    more = draw(st.lists(st.integers(0, 3), min_size=micro_batches, max_size=micro_batches))
    given_sizes = tuple(max(replicas) + each for each in more)
    size = sum(given_sizes)
    cut = draw(st.sampled_from([micro_batches, given_sizes, tuple(each / size for each in given_sizes)]))
    second = draw(st.one_of(st.just(size), st.integers(1, size)))  # an ordinary batch, or a short last one
    optimizer = draw(st.sampled_from(sorted(OPTIMIZERS)))
    names = st.sets(st.sampled_from([model.layer(i) for i in range(len(model.ops))]), min_size=1)
    recompute = draw(st.one_of(st.booleans(), st.builds(tuple, st.builds(sorted, names))))
    return Case(model, stages, tuple(replicas), given_sizes, schedule, optimizer, (size, second), recompute, cut)


@pytest.mark.timeout(1200)  # Hypothesis may spend five minutes to make a failure small
@pytest.mark.parametrize("kinds", LARGE_GROUPS, ids=range(4))
def test_a_few_random_models_equal_one_device(kinds: Sequence[str]) -> None:
    check_random_models(kinds, 1)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kinds", GROUPS, ids="-".join)
def test_random_models_equal_one_device(kinds: Sequence[str]) -> None:
    check_random_models(kinds, max(4, settings.default.max_examples // 5))


def check_random_models(kinds: Sequence[str], examples: int) -> None:
    """Compare random models that have an operation of each of these kinds with one device."""
    ran: list[Case] = []
    refused: list[str] = []

    @settings(max_examples=examples)
    @given(cases(kinds))
    def check(case: Case) -> None:
        try:
            comparison = compare(
                build(case.model, OPTIMIZERS[case.optimizer]),
                [batch(i, size) for i, size in enumerate(case.sizes)],
                stages=list(case.stages) if isinstance(case.stages, tuple) else case.stages,
                replicas=case.replicas,
                micro_batches=case.cut,
                schedule=case.schedule,
                recompute=case.recompute,
            )
        except (PartitionError, ScheduleError) as error:  # a cut or an order that is impossible, as the message says
            if isinstance(error, ScheduleError) and "writes" not in str(error):
                raise
            refused.append(str(error))
            assume(False)
        plan = comparison.step.plan
        assert plan.worker_map.workers == len(case.replicas)
        assert plan.micro_batches == case.micro_batches
        assert not plan.sizes or plan.sizes == case.given_sizes
        comparison.check(TOLERANCE["float64"])
        ran.append(case)

    check()
    assert len(ran) >= len(refused), f"most draws were refused: {refused}"
