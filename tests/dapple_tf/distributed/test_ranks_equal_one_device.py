"""Ranks train as one device does: in any layout, and with any kind of value that crosses between ranks.

The cases of a number of ranks share a launch, for a process takes seconds to start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.dapple_tf.distributed.launches import HOROVOD_CASES, Launches, is_quick
from tests.dapple_tf.distributed.native.peers import needs_library
from tests.dapple_tf.distributed.programs.cases import CASES
from tests.processes import needs_horovod

pytestmark = needs_horovod


def marked(names: Iterable[str]) -> Sequence[Any]:
    """Return the names of cases as parameters, those that `make test` leaves out marked as slow."""
    return [pytest.param(name, marks=() if is_quick(name) else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", marked(CASES))
def test_ranks_equal_one_device(launches: Launches, name: str) -> None:
    assert_case(name, launches.case_results(name))


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        pytest.param(ranks, name, marks=() if ranks == 2 else pytest.mark.slow)
        for ranks, names in HOROVOD_CASES.items()
        for name in names
    ],
)
def test_exchanges_by_horovod_equal_one_device_too(launches: Launches, ranks: int, name: str) -> None:
    assert_case(name, launches.case_results(name, f"{ranks} ranks by Horovod"))


def assert_case(name: str, ranks: list[dict[str, Any]]) -> None:
    """Assert that the ranks found in a case what one device computes."""
    case = CASES[name]
    assert len(ranks) == case.ranks
    if not case.equals_one_device:
        assert_trains(ranks)
        return
    compared: set[str] = set()
    for rank, result in enumerate(ranks):
        errors = {what: e for what, e in result["errors"].items() if not any(word in what for word in case.not_equal)}
        worst = max(errors, key=lambda what: errors[what])
        assert errors[worst] <= case.tolerance, f"{worst} on rank {rank} differs by {errors[worst]:.1e}"
        compared |= {what.removeprefix("value of ") for what in result["errors"]}
    assert set(ranks[0]["expected"]) - case.unused <= compared  # every variable has a rank that trains it
    assert len({str(result["losses"]) for result in ranks}) == 1


def assert_trains(ranks: list[dict[str, Any]]) -> None:
    losses = [result["losses"] for result in ranks]
    assert losses == [losses[0]] * len(ranks)
    assert np.isfinite(losses[0]).all()
    assert len(set(losses[0])) == len(losses[0])


@pytest.mark.parametrize(
    "name", marked(["DP 2 float64", "2:2 float64", "DP 4 float64", "dropout, replicated", "batch norm, sync, DP"])
)
def test_replicas_end_with_the_same_values(launches: Launches, name: str) -> None:
    results = launches.case_results(name)
    for devices in results[0]["plan"]:
        values = [results[rank]["values"] for rank in devices]
        assert values[0]
        assert values == [values[0]] * len(devices)


@pytest.mark.parametrize(
    "name",
    marked(["regularized, 2:1", "1:1:1 float64", "1:2:1 float64", "straight 4 float64", "DP 4 float64"]),
)
def test_a_rank_holds_the_variables_of_its_stage_and_no_others(launches: Launches, name: str) -> None:
    results = launches.case_results(name)
    plan = results[0]["plan"]
    shared = {"slot iteration", "slot learning_rate"}
    seen: set[str] = set()
    for stage, devices in enumerate(plan):
        for rank in devices:
            functions = set(results[rank]["functions"]) - {"optimizer/after", "optimizer/before"}
            assert functions == {f"stage{stage}/{what}" for what in ("forward", "backward", "update")}
        held = [set(results[rank]["held"]) - shared for rank in devices]
        assert held == [held[0]] * len(devices)
        assert held[0]
        assert not held[0] & seen
        seen |= held[0]
    assert seen == set(results[0]["expected"]) - shared


@pytest.mark.parametrize("name", marked(["interleaved", "V-shaped"]))
def test_a_rank_of_several_stages_holds_their_variables_and_no_others(launches: Launches, name: str) -> None:
    """Layers 0 and 3 share w0, which stage 0 owns: stage 3 has a copy of it, unless it is on the same rank."""
    results = launches.case_results(name)
    plan = results[0]["plan"]
    for rank, result in enumerate(results):
        stages = [stage for stage, devices in enumerate(plan) if rank in devices]
        assert {held for held in result["held"] if not held.startswith("slot")} == {f"w{s}" for s in stages if s < 3}
        called = {function.partition("/")[0] for function in result["functions"] if "forward" in function}
        assert called == {f"stage{stage}" for stage in stages}
    refreshed = [name for result in results for name in result["nodes"] if "refresh" in name]
    assert bool(refreshed) == (plan[0] != plan[3])


@needs_library
@pytest.mark.parametrize("name", marked(name for name in CASES if name.startswith("many")))
def test_the_steady_state_of_many_micro_batches_is_a_loop_on_each_rank(launches: Launches, name: str) -> None:
    results = launches.case_results(name)
    assert [result["loops"] for result in results] == [True] * len(results)


@pytest.mark.slow
def test_exchanges_by_horovod_are_in_no_loop(launches: Launches) -> None:
    results = launches.case_results("many, 2:1, recompute", "3 ranks by Horovod")
    assert not any(result["loops"] for result in results)


# Of each stage: a layer multiplies once in forward and twice in backward, but the first needs no gradient of its input.
MULTIPLICATIONS = {
    "straight 4 float64": (2, 3, 3, 3),
    "1:2:1 float64": (2, 6, 3),
    "skips over two stages": (2, 6, 3),
    "DP 4 float64": (11,),
}


@pytest.mark.parametrize("name", marked(MULTIPLICATIONS))
def test_the_graph_of_a_rank_has_its_own_part_only(launches: Launches, name: str) -> None:
    results = launches.case_results(name)
    for stage, devices in enumerate(results[0]["plan"]):
        for replica, rank in enumerate(devices):
            names = [node.split("/") for node in results[rank]["nodes"]]
            assert {parts[0] for parts in names if parts[0].startswith("stage")} == {f"stage{stage}"}
            calls = {tuple(parts[1:3]) for parts in names if parts[0].startswith("stage") and len(parts) == 4}
            assert calls == {(f"replica{replica}", f"mb{i}") for i in range(2)}
            library = results[rank]["library"]
            # Forward, backward, and a sum for each micro-batch; the stage's update, and the optimizer's own after it.
            assert len(library) <= 6
            assert sum(function.count("MatMul") for function in library) == MULTIPLICATIONS[name][stage]


@pytest.mark.slow
def test_batch_norm_state_is_the_mean_of_the_replicas(launches: Launches) -> None:
    """Replica r has half r of each micro-batch of six: samples 0-2 and 6-8, or 3-5 and 9-11."""
    name = "batch norm, replicated"
    values = launches.case_results(name)[0]["values"]
    means = [np.zeros(4), np.zeros(4)]
    for x, _ in CASES[name].batches():
        means = [means[0] / 2 + means[1] / 2] * 2
        for replica in (0, 1):
            for begin in (3 * replica, 3 * replica + 6):
                means[replica] = 0.5 * means[replica] + 0.5 * x.numpy()[begin : begin + 3].mean(axis=0)
    expected = (means[0] + means[1]) / 2
    moving = next(value for key, value in values.items() if "first" in key and "moving_mean" in key)
    np.testing.assert_allclose(moving, expected, rtol=1e-12)


@pytest.mark.slow
def test_deferred_batch_norm_has_the_statistics_of_the_whole_batch(launches: Launches) -> None:
    name = "batch norm, deferred, replicated"
    results = launches.case_results(name)
    mean, variance = np.zeros(4), np.ones(4)
    for x, _ in CASES[name].batches():
        mean, variance = 0.5 * mean + 0.5 * x.numpy().mean(axis=0), 0.5 * variance + 0.5 * x.numpy().var(axis=0)
    for result in results:
        for statistic, expected in (("moving_mean", mean), ("moving_variance", variance)):
            found = next(value for key, value in result["values"].items() if "first" in key and statistic in key)
            np.testing.assert_allclose(found, expected, rtol=1e-12)
