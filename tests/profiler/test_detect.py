"""Detection of the cluster, from each launcher's environment; a process alone has the eight devices of the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from dapple_tf.errors import ClusterError
from dapple_tf.profiler.cluster import Cluster, Link
from dapple_tf.profiler.detect import host_memory
from tests.processes import run_python

LINK = Link(1.25e9, 1e-4)
MPI = {"OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
SLURM = "SLURM_STEP_TASKS_PER_NODE"


def counts(cluster: Cluster) -> list[int]:
    return [server.devices for server in cluster.servers]


def machine_memory() -> int:
    """As the kernel tells it."""
    (line,) = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:")]
    return int(line.split()[1]) * 1024


def test_a_process_alone_has_tensorflows_devices() -> None:
    cluster = Cluster.detect(environment={})
    assert counts(cluster) == [8]
    assert cluster.intra_server.bandwidth == 1e12
    assert cluster.device_memory <= machine_memory() / 8


def test_a_process_that_has_not_called_init_has_one_device() -> None:
    program = "from dapple_tf.profiler.cluster import Cluster; print(Cluster.detect(environment={}).devices)"
    assert run_python("-c", program).stdout == "1\n"


def test_the_number_of_devices_can_be_given() -> None:
    assert counts(Cluster.detect(3, environment={})) == [3]


def test_by_default_the_environment_of_this_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_SIZE", SLURM):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOROVOD_SIZE", "4")
    monkeypatch.setenv("HOROVOD_LOCAL_SIZE", "2")
    cluster = Cluster.detect(inter_server=LINK)
    assert counts(cluster) == [2, 2]
    assert cluster.inter_server == LINK


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (MPI, [2, 2, 2]),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, [2]),
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, [8]),
        ({"HOROVOD_SIZE": "8", "HOROVOD_LOCAL_SIZE": "4", "HOROVOD_CROSS_SIZE": "2"}, [4, 4]),
        ({SLURM: "2(x3),1"}, [2, 2, 2, 1]),
        ({SLURM: "4"}, [4]),
        ({**MPI, SLURM: "1(x3)"}, [2, 2, 2]),  # mpirun inside srun: its daemons are srun's tasks
        ({"SLURM_NTASKS": "16", "SLURM_PROCID": "0"}, [8]),  # an allocation, but no srun
    ],
)
def test_the_servers_of_a_job_are_those_of_its_launcher(environment: dict[str, str], expected: list[int]) -> None:
    assert counts(Cluster.detect(environment=environment, inter_server=LINK)) == expected


def test_processes_of_a_host_divide_its_memory_and_have_slower_links() -> None:
    cluster = Cluster.detect(environment=MPI, inter_server=LINK)
    assert cluster.intra_server.bandwidth < 1e10
    assert cluster.device_memory == host_memory() / 2
    assert Cluster.detect(environment=MPI, intra_server=Link(7e9, 0.0), inter_server=LINK).intra_server == Link(
        7e9, 0.0
    )


@pytest.mark.parametrize(
    ("environment", "devices", "message"),
    [
        ({}, 0, "devices=0: a cluster needs at least one device"),
        (MPI, 4, "devices=4, but the launcher started 6 processes, a device each"),
        (MPI, None, r"the job runs on 3 servers, .*dapple_tf.profiler.links.probe.* or give inter_server"),
        ({**MPI, "OMPI_COMM_WORLD_SIZE": "5"}, None, "SIZE=5 is no multiple of OMPI_COMM_WORLD_LOCAL_SIZE=2"),
        ({"HOROVOD_SIZE": "2"}, None, "HOROVOD_LOCAL_SIZE is not set, though"),
        (
            {**MPI, "OMPI_COMM_WORLD_SIZE": "six"},
            None,
            "OMPI_COMM_WORLD_SIZE='six' is not a whole number of at least 1",
        ),
        ({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "0"}, None, "LOCAL_SIZE='0' is not a whole number of at least 1"),
        ({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "-2"}, None, "LOCAL_SIZE='-2' is not a whole number of at least 1"),
        ({SLURM: "2(x"}, None, r"SLURM_STEP_TASKS_PER_NODE='2\(x' is not of the form 2\(x3\),1"),
        ({SLURM: ""}, None, "SLURM_STEP_TASKS_PER_NODE='' is not of the form"),
        ({SLURM: "0(x2),2"}, None, r"SLURM_STEP_TASKS_PER_NODE='0\(x2\),2' is not of the form"),
    ],
)
def test_a_contradictory_environment_is_refused(environment: dict[str, str], devices: int | None, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Cluster.detect(devices, environment=environment)


def test_memory_is_that_of_the_machine_or_of_the_container(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    assert host_memory(limit) == machine_memory()
    limit.write_text("max\n")
    assert host_memory(limit) == machine_memory()
    limit.write_text("1048576\n")
    assert host_memory(limit) == 1048576
