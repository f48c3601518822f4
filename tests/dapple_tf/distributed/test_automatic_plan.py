"""``stages="auto"`` in a job: rank 0 profiles and plans for all ranks, and the plan uses every rank."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dapple_tf.autoplan.measured_problem import PlanningInputs
from dapple_tf.autoplan.options import Options
from dapple_tf.autoplan.stages_auto import choose_stages
from dapple_tf.errors import DappleWarning, PlanError
from dapple_tf.plans import Plan
from dapple_tf.profiler.cluster import Cluster, Link, Server, config
from dapple_tf.timeline.recording import BY_PROFILE
from tests.dapple_tf.builders import step_of
from tests.dapple_tf.distributed.launches import Launches
from tests.dapple_tf.distributed.programs import automatic_plan
from tests.dapple_tf.distributed.train_command import MODEL, losses_of_one_process
from tests.equality.small_models import chain, data, sgd, values, weights
from tests.processes import needs_horovod, run_ranks


@needs_horovod
@pytest.mark.parametrize("launch", ["two ranks", pytest.param("slow planning", marks=pytest.mark.slow)])
def test_all_ranks_run_the_plan_of_rank_0_and_equal_one_device(launches: Launches, launch: str) -> None:
    """Also if profiling takes longer than the timeout after which a silent rank has failed: waiting is not silence."""
    first, second = launches.results(launch, "automatic_plan")
    assert first == second
    assert first["planner"] == "best"
    assert sorted(device for stage in first["plan"] for device in stage) == [0, 1]
    assert first["predicted"] == [BY_PROFILE, first["planned"]], "the step that rank 0 simulated is recorded too"
    matrices = weights(automatic_plan.LAYERS)
    step = step_of(chain(matrices), optimizer=sgd(), stages=1, micro_batches=1)
    losses = [float(step(*data(automatic_plan.SAMPLES))) for _ in range(automatic_plan.STEPS)]
    np.testing.assert_allclose(first["losses"], losses, rtol=1e-12)
    np.testing.assert_allclose(first["values"], values(matrices), rtol=1e-12)


@needs_horovod
def test_the_command_line_plans_for_all_ranks() -> None:
    options = ["--micro-batches", "2", "--json", "--steps", "3", "--stages", "auto"]
    first, second = run_ranks(["-m", "dapple_tf", "train", MODEL, *options], 2)
    found = json.loads(first.stdout.splitlines()[-1])
    assert found["plan"]["planner"] == "best"
    assert sorted(device for stage in found["plan"]["stages"] for device in stage["devices"]) == [0, 1]
    np.testing.assert_allclose(found["losses"], losses_of_one_process(3), rtol=1e-12)
    assert second.stdout == ""


def plan(cluster: Cluster | None, *, ranks: int, layers: int = 4, replicable: bool = True, samples: int = 16) -> Plan:
    """Return the plan that rank 0 of a job of ``ranks`` ranks makes."""
    batch = data(samples)
    request = Options(micro_batches=2)
    inputs = PlanningInputs(
        chain(weights(layers)),
        batch,
        request,
        optimizer_slots=0,
        devices=ranks,
        cluster=cluster,
        replicable=replicable,
        ranks=True,
    )
    return choose_stages(inputs).plan


def test_a_plan_uses_all_ranks_even_where_fewer_are_faster() -> None:
    """Over a link that takes seconds one device is fastest."""
    link = Link(bandwidth=1e6, latency=1.0)
    slow = Cluster((Server("one", 3),), 1e9, link, link)
    with (
        pytest.warns(
            DappleWarning,
            match=r"1 of the job's 3 ranks would be faster, at .* per step, than all of them, at .*: start",
        ),
        pytest.warns(DappleWarning, match=r"the plan is one stage on 3 devices, at .*: \d stages would take"),
    ):
        found = plan(slow, ranks=3)
    assert sorted(device for stage in found.stages for device in stage.devices) == [0, 1, 2]


def test_more_ranks_than_a_plan_can_use_are_an_error() -> None:
    with pytest.raises(
        PlanError, match=r"no plan that fits uses all 8 ranks of the job: the model's result depends on"
    ):
        plan(config("a", 8), ranks=8, layers=1, replicable=False)
    with pytest.raises(PlanError, match=r"all 8 ranks of the job: a micro-batch has 1 sample, and \d blocks of"):
        plan(config("a", 8), ranks=8, layers=1, samples=2)


def test_a_cluster_of_another_size_than_the_job_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"the cluster has 2 devices, but the job has 3 ranks, a device each: start one process per"
    ):
        plan(config("a", 2), ranks=3)


def test_servers_with_unknown_links_need_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SIZE", "4"), ("LOCAL_SIZE", "2"), ("RANK", "0")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    with pytest.raises(
        PlanError, match=r"the job runs on 2 servers, .*\. Give dapple\.pipeline\(cluster=\.\.\.\), or a"
    ):
        plan(None, ranks=4)
