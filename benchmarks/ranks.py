"""Two ranks under mpirun, each on one core, against bounds measured with one rank on one core.

The single rank runs the same micro-batches as one stage. The two ranks exchange tensors natively, and by Horovod's
alltoall, in turn. There are two bounds on the speed-up: of equal stages (GPipe's bubble), and of the stages as they
are, whose schedule is executed with their own seconds and without transfers. There are three baselines: one rank; one
rank while another one computes on the other core, since cores share caches and memory; and the un-pipelined step.
"""

from __future__ import annotations

import sys

from benchmarks.own_core import run_on_own_core

if __name__ == "__main__":  # before any library counts the cores
    run_on_own_core("OMPI_COMM_WORLD_LOCAL_RANK")

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks.common import Row, available_cores, median, print_on_rank_0, run_on_cores, run_ranks, time_interleaved

STAGES, MICRO_BATCHES, SCHEDULE = 2, 8, "dapple-b"  # the schedule that "auto" chooses in a job
TURNS, STEPS, RECORDED = 5, 15, 9
WAYS = ("native", "horovod")


@dataclass(frozen=True)
class Turn:
    """Seconds of a step in one turn.

    ``alone``: of one rank; ``beside``: the mean of two single ranks at the same time; ``plain``: un-pipelined; ``two``:
    of two ranks, by their way of exchanging.
    """

    alone: float
    beside: float
    plain: float
    two: dict[str, float]


def run() -> Iterator[Row]:
    """Yield the dense stack and the gpt, exchanging each way: medians of the turns' ratios."""
    if len(available_cores()) < STAGES:
        yield Row("two ranks on two cores", "at least 95%", "this machine has one core", False)
        return
    from dapple_tf.distributed.native.library import find_obstacle

    ways = WAYS if not find_obstacle() else ("horovod",)
    for model in ("dense", "gpt"):
        balance = run_on_cores("benchmarks.ranks", available_cores()[:1], "balance", model)
        turns = [_take_turn(model, ways) for _ in range(TURNS)]
        for way in ways:
            yield from _rows(f"{model}, {way} exchanges", way, turns, balance)


def _take_turn(model: str, ways: tuple[str, ...]) -> Turn:
    """Measure everything once; the two single ranks at the same time."""
    first, second = available_cores()[:STAGES]
    alone = run_on_cores("benchmarks.ranks", [first], "steps", model, "1")
    with ThreadPoolExecutor() as pool:
        pair = list(pool.map(lambda core: _run_beside(model, core), (first, second)))
    plain = run_on_cores("benchmarks.pipelining", [first], model, "1")
    two = {
        way: run_ranks("benchmarks.ranks", STAGES, "steps", model, str(STAGES), variables={"DAPPLE_EXCHANGE": way})
        for way in ways
    }
    return Turn(alone, sum(pair) / len(pair), plain, two)


def _run_beside(model: str, core: int) -> float:
    return float(run_on_cores("benchmarks.ranks", [core], "steps", model, "1"))


def _rows(name: str, way: str, turns: list[Turn], balance: float) -> Iterator[Row]:
    """Yield the speed-ups as shares of the bounds; ``balance``: the bound of the stages as they are."""
    equal = STAGES * MICRO_BATCHES / (MICRO_BATCHES + STAGES - 1)
    setting = f"{name}: two ranks, M = {MICRO_BATCHES}, a core each"
    two = median([turn.two[way] for turn in turns])
    alone, beside = [turn.alone for turn in turns], [turn.beside for turn in turns]
    for stages, bound, base, ones, wanted in (
        ("these stages", balance, "one rank", alone, "at least 95%"),
        ("these stages", balance, "one rank beside another", beside, "-"),
        ("equal stages", equal, "one rank", alone, "-"),
    ):
        ratios = [one / turn.two[way] for one, turn in zip(ones, turns, strict=True)]
        share, one = median(ratios) / bound, median(ones)
        text = f"{share:.0%}: {median(ratios):.2f}x of {bound:.2f}x ({one * 1e3:.0f} ms, {two * 1e3:.0f} ms)"
        yield Row(f"{setting}: of the bound of {stages}, by {base}", wanted, text, wanted == "-" or share >= 0.95)
    ratio = median([turn.plain / turn.two[way] for turn in turns])
    plain = median([turn.plain for turn in turns])
    figure = f"{setting}: of the bound of equal stages, by the un-pipelined step"
    yield Row(figure, "-", f"{ratio / equal:.0%}: {ratio:.2f}x of {equal:.2f}x ({plain * 1e3:.0f} ms)", True)


def measure(model: str, stages: int) -> float:
    """Return the median seconds of a step of this job, or of one process with one stage."""
    from benchmarks.workloads import MODELS

    timed = MODELS[model]()
    step = timed.pipeline(stages=stages, micro_batches=MICRO_BATCHES)
    steps = {"step": lambda: float(step(*timed.batch))}
    time_interleaved(steps, 3)
    return median(time_interleaved(steps, STEPS)["step"])


def measure_balance(model: str) -> float:
    """Return the bound on the speed-up over one device that follows from the measured seconds of the stages.

    Both stages run a single micro-batch on one core, one action after the other, since each needs the one before it.
    Serial: M such micro-batches, and all updates. Pipelined: the schedule without transfers, then the longest update.
    """
    from dataclasses import replace

    from benchmarks.workloads import MODELS
    from dapple_tf.simulator.execution import execute
    from dapple_tf.simulator.order import named_order

    timed = MODELS[model]()
    batch = tuple(tensor[: len(tensor) // MICRO_BATCHES] for tensor in timed.batch)
    step = timed.pipeline(stages=STAGES, micro_batches=1, schedule="gpipe")
    recorded = []
    for number in range(3 + RECORDED):
        step.record(*batch)
        if number >= 3:
            recorded.append(step.timeline)
    costs = [
        replace(
            recorded[0].costs[stage],
            forward_seconds=median([timeline.costs[stage].forward_seconds for timeline in recorded]),
            backward_seconds=median([timeline.costs[stage].backward_seconds for timeline in recorded]),
            send_forward_seconds=0.0,
            send_backward_seconds=0.0,
        )
        for stage in range(STAGES)
    ]
    updates = [
        median(
            [
                sum(e.end - e.start for e in timeline.stage_events if (e.kind, e.stage) == ("update", stage))
                for timeline in recorded
            ]
        )
        for stage in range(STAGES)
    ]
    serial = MICRO_BATCHES * sum(cost.forward_seconds + cost.backward_seconds for cost in costs) + sum(updates)
    order = named_order(SCHEDULE, STAGES, MICRO_BATCHES).order
    return serial / (execute(order, costs).step_seconds + max(updates))


if __name__ == "__main__":
    import dapple_tf as dapple

    what, model, *rest = sys.argv[1:]
    dapple.init(STAGES if what == "balance" else None)
    print_on_rank_0(measure_balance(model) if what == "balance" else measure(model, int(rest[0])))
