"""Costs, orders, profiles, plans and timelines for the tests of the simulator."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import numpy as np
from hypothesis import strategies as st

from dapple_tf.graph_passes.schedules.schedule import Action, Schedule
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec, early_backward
from dapple_tf.plans import Plan, StagePlan
from dapple_tf.profiler.cluster import Cluster, Link, Server
from dapple_tf.profiler.profile import LayerCost, Profile
from dapple_tf.simulator.execution import Execution, execute
from dapple_tf.simulator.order import Order, encode
from dapple_tf.simulator.simulated_step import SimulatedStep, execution_events
from dapple_tf.timeline.critical_path import Part, find_critical_path
from dapple_tf.timeline.recording import plan_title
from dapple_tf.timeline.stage_costs import StageCosts
from dapple_tf.timeline.timeline import SimulatedTimeline, Timeline
from tests.graph_passes.schedules.mixed import mixed


def cost(
    forward: float = 1, backward: float = 1, send: float = 0, back: float | None = None, **more: float
) -> StageCosts:
    """A stage's costs: the seconds given, nothing else unless said so."""
    fields: dict[str, float] = {
        "forward_seconds": forward,
        "backward_seconds": backward,
        "send_forward_seconds": send,
        "send_backward_seconds": send if back is None else back,
        "allreduce_seconds": 0,
        "exposed_seconds": 0,
        "fixed_bytes": 0,
        "stash_bytes": 0,
        "working_bytes": 0,
        **more,
    }
    return StageCosts(**{name: float(value) for name, value in fields.items()})


def arrays(costs: Sequence[StageCosts], weights: bool = False) -> tuple[Any, ...]:
    """Return the arguments of the compiled functions behind the order, exposed seconds last.

    ``weights``: whether the order has W.
    """
    names = ("forward", "backward", "weights", "send_forward", "send_backward", "exposed")
    found = {name: np.array([getattr(c, f"{name}_seconds") for c in costs]) for name in names}
    if not weights:
        found["weights"] = np.zeros(0)
    return tuple(found.values())


def order_of(name: str, stages: int, micro_batches: int) -> Order:
    """The order of the schedule called ``name``."""
    return encode(ScheduleSpec.parse(name).build(stages, micro_batches))


def step_of(name: str, micro_batches: int, costs: Sequence[StageCosts]) -> float:
    """The seconds of a step."""
    return execute(order_of(name, len(costs), micro_batches), costs).step_seconds


def path_of(execution: Execution) -> tuple[Part, ...]:
    """The critical path of an executed schedule, each worker on one device."""
    places = [(stage, 0, f"device:{worker}") for stage, worker in enumerate(execution.order.worker_of)]
    return find_critical_path(execution_events(execution, places))


def make_plan(*stages: tuple[int, int, tuple[int, ...]], **changes: Any) -> Plan:
    """A plan of (first layer, last layer, devices), two micro-batches of two samples."""
    fields: dict[str, Any] = {
        "model": "net",
        "planner": "test",
        "global_batch_size": 4,
        "micro_batch_size": 2,
        "micro_batches": 2,
        "schedule": "gpipe",
        "recompute": False,
    }
    return Plan(**{**fields, "stages": tuple(StagePlan(*stage) for stage in stages), **changes})


def make_profile(*layers: tuple[float, float], **changes: Any) -> Profile:
    """Layers of (forward, backward) seconds for 4 samples; each sends 8 bytes, keeps 6 and trains 10."""
    costs = tuple(LayerCost(f"layer{i}", f, b, 8, 6, 10) for i, (f, b) in enumerate(layers))
    return Profile(**{"model": "net", "batch_size": 4, "device": "test", "layers": costs, **changes})


def make_cluster(devices: int = 2, memory: float = 1000) -> Cluster:
    """One server whose devices exchange 4 bytes a second after half a second."""
    return Cluster((Server("a", devices),), memory, Link(4, 0.5), Link(1, 1))


def make_step(
    name: str, micro_batches: int, costs: Sequence[StageCosts], replicas: Sequence[int] | None = None
) -> SimulatedStep:
    """A step of these costs as ``simulate`` makes it; one device takes 100 s, and each has 1000 bytes."""
    stages, used = [], 0
    for index, r in enumerate(replicas or (1,) * len(costs)):
        stages.append((index, index, tuple(range(used, used + r))))
        used += r
    plan = make_plan(
        *stages, schedule=name, micro_batches=micro_batches, micro_batch_size=1, global_batch_size=micro_batches
    )
    return SimulatedStep(plan, execute(order_of(name, len(costs), micro_batches), costs), 100.0, 1000.0)


def make_timeline(
    name: str, micro_batches: int, costs: Sequence[StageCosts], replicas: Sequence[int] | None = None
) -> Timeline:
    """The timeline of ``make_step``."""
    step = make_step(name, micro_batches, costs, replicas)
    return SimulatedTimeline(step, title=plan_title(step.plan))


seconds = st.one_of(st.integers(0, 6).map(float), st.floats(0, 10, allow_subnormal=False))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """GPipe, policies A and B, zero bubble, other warm-ups, several stages per worker, and orders that no policy makes.

    Of any of them, some backwards may be whole, and others split.
    """
    schedule = draw(named_schedules())
    return draw(mixed(schedule)) if draw(st.booleans()) else schedule


@st.composite
def named_schedules(draw: st.DrawFn) -> Schedule:
    """As ``schedules``, where all or none of the backwards of a policy are split."""
    stages, micro_batches = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    one_stage = ["gpipe", "dapple-a", "dapple-b:D=2", "zb-h1", "zb-h1:D=2", "zb-h2", "K", "any", "any W", "any mixed"]
    kind = draw(st.sampled_from([*one_stage, "interleaved-1f1b", "looped-bfs"]))
    if kind in ("interleaved-1f1b", "looped-bfs"):
        workers, chunks = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        return ScheduleSpec.parse(f"{kind}:v={chunks}").build(workers * chunks, micro_batches)
    if kind == "K":
        k = draw(st.lists(st.integers(1, micro_batches), min_size=stages, max_size=stages))
        return early_backward(sorted(k, reverse=True), micro_batches)
    if kind.startswith("any"):
        return draw_order(draw, stages, micro_batches, draw_split(draw, kind, stages, micro_batches))
    return ScheduleSpec.parse(kind).build(stages, micro_batches)


def draw_split(draw: st.DrawFn, kind: str, stages: int, micro_batches: int) -> set[tuple[int, int]]:
    """Stage and micro-batch of each backward to split: none (kind "any"), all ("any W") or some ("any mixed")."""
    random, share = draw(st.randoms(use_true_random=False)), {"any": 0.0, "any W": 1.0, "any mixed": 0.5}[kind]
    return {(stage, m) for stage in range(stages) for m in range(micro_batches) if random.random() < share}


def draw_order(draw: st.DrawFn, stages: int, micro_batches: int, split: Set[tuple[int, int]]) -> Schedule:
    """Actions one by one, each any that could run then; a worker may have several stages.

    ``split``: stage and micro-batch of each backward that is two actions.
    """
    ran: list[Action] = []
    drawn = draw(st.lists(st.integers(0, stages - 1), min_size=stages, max_size=stages))
    workers = list(dict.fromkeys(drawn))
    random = draw(st.randoms(use_true_random=False))
    while len(ran) < 2 * stages * micro_batches + len(split):
        ready = []
        for stage in range(stages):
            for m in range(micro_batches):
                forward, backward = Action(stage, "F", m), _backward(stage, m, split)
                if forward not in ran:
                    if stage == 0 or Action(stage - 1, "F", m) in ran:
                        ready.append(forward)
                elif backward not in ran:
                    if stage == stages - 1 or _backward(stage + 1, m, split) in ran:
                        ready.append(backward)
                elif backward.kind == "I" and Action(stage, "W", m) not in ran:
                    ready.append(Action(stage, "W", m))
        ran.append(random.choice(ready))
    return Schedule(tuple(tuple(a for a in ran if drawn[a.stage] == worker) for worker in workers))


def _backward(stage: int, m: int, split: Set[tuple[int, int]]) -> Action:
    return Action(stage, "I" if (stage, m) in split else "B", m)


@st.composite
def stage_costs(draw: st.DrawFn, stages: int) -> tuple[StageCosts, ...]:
    """Seconds of everything, whole numbers (so that events tie) or not; a part of backward is gradients of weights."""
    found = []
    for _ in range(stages):
        forward, inputs, weights, send, back, exposed = (draw(seconds) for _ in range(6))
        more = {"exposed_seconds": exposed, "weights_seconds": weights}
        found.append(cost(forward, inputs + weights, send, back, **more))
    return tuple(found)


@st.composite
def runs(draw: st.DrawFn) -> tuple[Schedule, tuple[StageCosts, ...]]:
    """A schedule and the costs of its stages."""
    schedule = draw(schedules())
    return schedule, draw(stage_costs(len(schedule.stages)))
