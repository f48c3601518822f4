"""Table IV of the paper: the speed-up of policy B over policy A, which rises with the ACR.

Two emulated hosts of one device (network namespaces with a shaped link) run a pipeline whose stages sleep instead of
computing, so that both really work at the same time, and during their transfers. The tensor at the boundary is made
wider from case to case; both policies are timed in turn. In a fifth case, of uneven stages in one process, policy A is
faster. The simulator predicts the steps, and chooses "auto" among gpipe and both policies, from the seconds of the
sleeps and the link as shaped.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.common import Row, available_cores, median, print_on_rank_0, run_on_cores, time_interleaved
from benchmarks.emulated_hosts import emulated_hosts
from benchmarks.hosts import LATENCY
from benchmarks.policies import POLICIES, Case, overlapped_share
from dapple_tf.profiler.cluster import Link

RATE, WIRE = "100mbit", Link(100e6 / 8, LATENCY)
LINKED = tuple(Case((1, 1), 0.02, 0.04, 8, WIRE, ratio) for ratio in (0.03, 0.1, 0.3, 0.6))
UNEVEN = Case((2, 1, 1, 1), 0.02, 0.02, 4, Link(1e12, 0.0))  # in one process transfers take no time
ROUNDS = 7
TIE = 0.01  # share of a step's time; smaller differences cannot be measured
CLOSE = 0.05  # of the predicted ratio


def run() -> Iterator[Row]:
    """Yield for each case both policies, measured and predicted, and the choice of auto; then the gains by ACR."""
    with emulated_hosts(2, RATE, burst=0.001) as hosts:
        found = json.loads(
            hosts.mpirun(["-m", "benchmarks.papers.table4", "linked"], timeout=300).strip().splitlines()[-1]
        )
    text = f"{found['overlapped']:.0%}"
    yield Row(
        "time of the exchanges, ACR 0.6, in which both hosts compute", "more than half", text, found["overlapped"] > 0.5
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
    (uneven,) = run_on_cores("benchmarks.papers.table4", available_cores()[:2], "uneven")["seconds"]
    yield from compare("stages of 2, 1, 1, 1 layers, one process", UNEVEN, uneven)


def compare(title: str, case: Case, measured: Mapping[str, float]) -> Iterator[Row]:
    """Yield the speedup of B over A, and whether auto chooses the faster one."""
    predicted = {policy: case.predict(policy) for policy in POLICIES}
    figure = f"{title}, ACR {predicted['dapple-a'].acr:.2f}"
    gain = measured["dapple-a"] / measured["dapple-b"]
    wanted = predicted["dapple-a"].step_seconds / predicted["dapple-b"].step_seconds
    text = ", ".join(
        f"{policy} {measured[policy] * 1e3:.0f} ms (predicted {predicted[policy].step_seconds * 1e3:.0f})"
        for policy in POLICIES
    )
    yield Row(
        f"{figure}: speedup of B over A",
        f"within {CLOSE:.0%} of the simulator's {wanted:.2f}",
        f"{gain:.2f}; {text}",
        abs(gain / wanted - 1) <= CLOSE,
    )
    taken = case.choose().schedule
    (other,) = set(POLICIES) - {taken}
    more = measured[taken] / measured[other] - 1
    text = f"{taken}, {abs(more):.1%} {'slower' if more > 0 else 'faster'} than {other}"
    if abs(more) <= TIE:
        text += f": a tie, within {TIE:.0%}"
    yield Row(f"{figure}: what auto takes", "the faster", text, more <= TIE)


def measure(cases: Sequence[Case]) -> list[dict[str, float]]:
    """Return the median seconds of a step of each case under each policy, all timed in turn."""
    steps = {(i, policy): step for i, case in enumerate(cases) for policy, step in case.make_steps().items()}
    calls = {str(key): partial(step, False) for key, step in steps.items()}
    time_interleaved(calls, 2)
    taken = time_interleaved(calls, ROUNDS)
    return [{policy: median(taken[str((i, policy))]) for policy in POLICIES} for i in range(len(cases))]


def measure_linked() -> dict[str, Any]:
    """Measure the linked cases as one rank of the job, and the widest one's overlap of transfers and compute."""
    seconds = measure(LINKED)
    step = LINKED[-1].make_steps()["dapple-b"]
    step(True)  # once for TensorFlow to optimise the graph
    timeline = step(True)
    assert timeline is not None
    return {"seconds": seconds, "overlapped": overlapped_share(timeline)}


if __name__ == "__main__":
    import tensorflow as tf

    import dapple_tf as dapple
    from benchmarks.waits import start_waiting

    if sys.argv[1] == "uneven":
        start_waiting(len(UNEVEN.layer_counts))
        print(json.dumps({"seconds": measure([UNEVEN])}))
    else:
        tf.config.threading.set_inter_op_parallelism_threads(8)
        dapple.init()
        print_on_rank_0(measure_linked())
