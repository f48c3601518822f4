"""Asynchronous windows in jobs, one process a device: the formulas of PipeDream, and the order of 1F1B-RR."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dapple_tf.distributed.launches import LAUNCHES, Launches
from tests.dapple_tf.distributed.programs.asynchronous import MINIBATCHES
from tests.processes import needs_horovod

pytestmark = needs_horovod
IN_WINDOWS = [
    pytest.param(launch, name, marks=pytest.mark.slow if "other" in launch else ())
    for launch, made in LAUNCHES.items()
    for program, names in made.programs
    if program == "asynchronous"
    for name in names
]


@pytest.mark.parametrize(("launch", "name"), IN_WINDOWS)
def test_ranks_train_as_the_formulas_say(launches: Launches, launch: str, name: str) -> None:
    results: list[dict[str, Any]] = [found[name] for found in launches.results(launch, "asynchronous")]
    for rank, result in enumerate(results):
        worst = max(result["errors"], key=lambda what: result["errors"][what])
        assert result["errors"][worst] <= 1e-12, f"{worst} on rank {rank} differs by {result['errors'][worst]:.1e}"
        assert result["iterations"] == 3 * MINIBATCHES


def test_replicas_take_minibatches_in_turn(launches: Launches) -> None:
    """K = 2 and 1: of six minibatches the ranks of stage 0 take the even and the odd ones."""
    events = launches.results("three ranks", "asynchronous")[0]["2:1"]["events"]
    ran = {rank: " ".join(action for action, device in events if device == f"rank:{rank}") for rank in range(3)}
    assert ran == {
        0: "0F0 0F2 0B0 0F4 0B2 0B4",
        1: "0F1 0F3 0B1 0F5 0B3 0B5",
        2: "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4 1F5 1B5",
    }


def test_the_other_members_of_a_step_work_on_all_ranks_or_are_refused_on_all(launches: Launches) -> None:
    """SGD: no update reads the step counter, which each rank of a window keeps all the same."""
    for found in launches.results("two ranks", "window_members"):
        worst = max(found["errors"], key=lambda what: found["errors"][what])
        assert found["errors"][worst] <= 1e-12, f"{worst} differs by {found['errors'][worst]:.1e}"
        assert found["rows"] == {"0": [[0, 8]], "1": [[0, 8]]}
        assert found["iterations"] == 4 + 4 + 1 + 4
        refused = found["refused"]
        assert refused["gradients"].startswith("UsageError: the gradients of a step with mode='async'")
        assert refused["numbers"].startswith("UsageError: check_numerics with mode='async'")
        assert refused["small"].startswith("PlanError: a window of 3 samples is cut into 4 minibatches")
        assert refused["small, local"] == refused["small"]
