"""``stages="auto"`` in a job: rank 0 profiles and plans for all ranks, and none is left out."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterator

import numpy as np
import pytest

from dapple_tf.autoplan.measured_problem import PlanningInputs
from dapple_tf.autoplan.request import Request
from dapple_tf.autoplan.stages_auto import choose_stages
from dapple_tf.errors import DappleWarning, PlanError
from dapple_tf.plan import Plan
from dapple_tf.timeline.recording import BY_PROFILE
from profiler.cluster import Cluster, Link, Server
from profiler.presets import config
from tests.dapple_tf.builders import step_of
from tests.dapple_tf.distributed.programs import auto_ranks, checkpoint_model
from tests.equality.small_models import chain, data, sgd, values, weights
from tests.processes import needs_horovod, run_ranks


@pytest.fixture
def busy_machines_are_no_failure() -> Iterator[None]:
    """The tiny models here measure badly, which is not what these tests are about."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the layers of", DappleWarning)
        yield


@needs_horovod
def test_all_ranks_carry_out_rank_0s_plan_and_equal_one_device() -> None:
    """Profiling takes longer than the ranks may be silent, which waiting for it is not."""
    ranks = run_ranks(
        ["-m", "tests.dapple_tf.distributed.programs.auto_ranks"], 2, environment={"DAPPLE_TIMEOUT_SECONDS": "2"}
    )
    first, second = (json.loads(rank.stdout) for rank in ranks)
    assert first == second
    assert first["planner"] == "best"
    assert sorted(device for stage in first["plan"] for device in stage) == [0, 1]
    assert first["predicted"] == [BY_PROFILE, first["planned"]], "the step that rank 0 simulated is beside the measured"
    matrices = weights(auto_ranks.LAYERS)
    step = step_of(chain(matrices), optimizer=sgd(), stages=1, micro_batches=1)
    losses = [float(step(*data(auto_ranks.SAMPLES))) for _ in range(auto_ranks.STEPS)]
    np.testing.assert_allclose(first["losses"], losses, rtol=1e-12)
    np.testing.assert_allclose(first["values"], values(matrices), rtol=1e-12)


@needs_horovod
@pytest.mark.slow
def test_the_command_line_plans_for_all_ranks() -> None:
    words = [
        "-m",
        "dapple_tf",
        "train",
        "tests/dapple_tf/distributed/programs/checkpoint_model.py:chain",
        "--micro-batches",
        "2",
        "--json",
    ]
    automatic = run_ranks([*words, "--steps", "3", "--stages", "auto"], 2)
    found = json.loads(automatic[0].stdout.splitlines()[-1])
    assert found["plan"]["planner"] == "best"
    assert sorted(device for stage in found["plan"]["stages"] for device in stage["devices"]) == [0, 1]
    workload = checkpoint_model.chain()
    step = step_of(workload.loss_fn, optimizer=workload.optimizer, stages=1, micro_batches=1)
    losses = [float(step(*batch)) for batch in itertools.islice(workload.dataset, 3)]
    np.testing.assert_allclose(found["losses"], losses, rtol=1e-12)
    assert automatic[1].stdout == ""


def plan(cluster: Cluster | None, *, ranks: int, layers: int = 4, replicable: bool = True, samples: int = 16) -> Plan:
    """As rank 0 of so many would plan."""
    batch = data(samples)
    request = Request(micro_batches=2)
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


@pytest.mark.usefixtures("busy_machines_are_no_failure")
def test_a_plan_uses_all_ranks_even_where_fewer_are_faster() -> None:
    """Over a link that takes seconds one device is fastest."""
    link = Link(bandwidth=1e6, latency=1.0)
    slow = Cluster((Server("one", 3),), 1e9, link, link)
    with pytest.warns(DappleWarning, match=r"1 of the job's 3 ranks would be faster, at .* s per step, than all"):
        found = plan(slow, ranks=3)
    assert sorted(device for stage in found.stages for device in stage.devices) == [0, 1, 2]


@pytest.mark.usefixtures("busy_machines_are_no_failure")
def test_ranks_that_nothing_can_use_are_an_error() -> None:
    with pytest.raises(
        PlanError, match=r"no plan that fits uses all 8 ranks of the job: the model's result depends on"
    ):
        plan(config("a", 8), ranks=8, layers=1, replicable=False)
    with pytest.raises(PlanError, match=r"all 8 ranks of the job: a micro-batch has 1 samples, and \d blocks of"):
        plan(config("a", 8), ranks=8, layers=1, samples=2)


def test_a_cluster_of_another_size_than_the_job_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"the cluster has 2 devices, but the job has 3 ranks, a device each: start one process per"
    ):
        plan(config("a", 2), ranks=3)


def test_servers_joined_by_nobody_knows_what_need_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SIZE", "4"), ("LOCAL_SIZE", "2"), ("RANK", "0")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    with pytest.raises(
        PlanError, match=r"the job runs on 2 servers, .*\. Give dapple\.pipeline\(cluster=\.\.\.\), or a"
    ):
        plan(None, ranks=4)
