"""Table IV of the paper: policy B over policy A, which rises with the activation communication ratio (ACR).

Two hosts of one device, network namespaces whose link is shaped, run a pipeline whose work is waiting, so that both
really compute at the same time, beside their exchanges. What crosses the boundary is made wider and wider; both
policies take turns. A fifth case, of uneven stages in one process, has policy A ahead. Predictions are the simulator's,
from the waits and the link as it is shaped, and so is what "auto" takes of gpipe and both policies.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.common import Row, cores, median, pinned, seconds_in_turn
from benchmarks.emulated_hosts import emulated_hosts
from benchmarks.hosts import LATENCY
from benchmarks.policies import POLICIES, Case, beside
from profiler.cluster import Link

RATE, WIRE = "100mbit", Link(100e6 / 8, LATENCY)
LINKED = tuple(Case((1, 1), 0.02, 0.04, 8, WIRE, ratio) for ratio in (0.03, 0.1, 0.3, 0.6))
UNEVEN = Case((2, 1, 1, 1), 0.02, 0.02, 4, Link(1e12, 0.0))  # in one process nothing is sent
ROUNDS = 7
TIE = 0.01  # of a step's time: what is closer cannot be told apart
CLOSE = 0.05  # of the predicted ratio


def run() -> Iterator[Row]:
    """For each case both policies, measured and predicted, and what auto takes; and how the gain rises."""
    with emulated_hosts(2, RATE, burst=0.001) as hosts:
        found = json.loads(hosts.mpirun(["-m", "benchmarks.table4", "linked"], timeout=300).strip().splitlines()[-1])
    told = f"{found['beside']:.0%}"
    yield Row(
        "time of the exchanges, ACR 0.6, in which both hosts compute", "more than half", told, found["beside"] > 0.5
    )
    gains = []
    for case, measured in zip(LINKED, found["seconds"], strict=True):
        gains.append(measured["dapple-a"] / measured["dapple-b"])
        yield from compare("two hosts", case, measured)
    yield Row(
        "B over A rises with the ACR",
        "rising; paper: 1.02 (ACR 0.03), 1.0 (0.06), 1.31 (0.10), 1.1 (0.16)",
        ", ".join(f"{gain:.2f} ({case.ratio:g})" for gain, case in zip(gains, LINKED, strict=True)),
        all(b > a - TIE for a, b in itertools.pairwise(gains)) and gains[-1] > gains[0] + TIE,
    )
    (uneven,) = pinned("benchmarks.table4", cores()[:2], "uneven")["seconds"]
    yield from compare("stages of 2, 1, 1, 1 layers, one process", UNEVEN, uneven)


def compare(title: str, case: Case, measured: Mapping[str, float]) -> Iterator[Row]:
    """The speedup of B over A, and whether auto takes the faster."""
    predicted = {policy: case.predict(policy) for policy in POLICIES}
    figure = f"{title}, ACR {predicted['dapple-a'].acr:.2f}"
    gain = measured["dapple-a"] / measured["dapple-b"]
    wanted = predicted["dapple-a"].step_seconds / predicted["dapple-b"].step_seconds
    told = ", ".join(
        f"{policy} {measured[policy] * 1e3:.0f} ms (predicted {predicted[policy].step_seconds * 1e3:.0f})"
        for policy in POLICIES
    )
    yield Row(
        f"{figure}: speedup of B over A",
        f"within {CLOSE:.0%} of the simulator's {wanted:.2f}",
        f"{gain:.2f}; {told}",
        abs(gain / wanted - 1) <= CLOSE,
    )
    taken = case.choose().schedule
    (other,) = set(POLICIES) - {taken}
    more = measured[taken] / measured[other] - 1
    told = f"{taken}, {abs(more):.1%} {'slower' if more > 0 else 'faster'} than {other}"
    if abs(more) <= TIE:
        told += f": a tie, within {TIE:.0%}"
    yield Row(f"{figure}: what auto takes", "the faster", told, more <= TIE)


def measure(cases: Sequence[Case]) -> list[dict[str, float]]:
    """Median seconds of a step of each case under each policy, all in turn."""
    steps = {(i, policy): step for i, case in enumerate(cases) for policy, step in case.make_steps().items()}
    calls = {str(key): partial(step, False) for key, step in steps.items()}
    seconds_in_turn(calls, 2)
    taken = seconds_in_turn(calls, ROUNDS)
    return [{policy: median(taken[str((i, policy))]) for policy in POLICIES} for i in range(len(cases))]


def measure_linked() -> dict[str, Any]:
    """The linked cases as one rank of the job, and how the widest one's exchanges lie beside compute."""
    seconds = measure(LINKED)
    step = LINKED[-1].make_steps()["dapple-b"]
    step(True)  # once for TensorFlow to optimise the graph
    timeline = step(True)
    assert timeline is not None
    return {"seconds": seconds, "beside": beside(timeline)}


if __name__ == "__main__":
    import tensorflow as tf

    import dapple_tf as dapple
    from benchmarks.waits import start_waiting

    if sys.argv[1] == "uneven":
        start_waiting(len(UNEVEN.loads))
        print(json.dumps({"seconds": measure([UNEVEN])}))
    else:
        tf.config.threading.set_inter_op_parallelism_threads(8)
        dapple.init()
        found = measure_linked()
        if os.environ.get("OMPI_COMM_WORLD_RANK") == "0":
            print(json.dumps(found))
