"""The cluster that a process finds itself on: the launcher's environment, else the devices of this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from profiler.cluster import IN_PROCESS, Cluster, Link, Server
from profiler.errors import ClusterError

# How many processes there are, and how many of them on this server, by launcher: Open MPI, horovodrun with Gloo.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE"),
)
_RANKS = ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK")
# Set by srun for the processes it starts (an allocation alone sets SLURM_NTASKS): 2(x3),1 is 2, 2, 2 and 1.
_SLURM = "SLURM_STEP_TASKS_PER_NODE"
_SLURM_COUNT = re.compile(r"([1-9]\d*)(?:\(x([1-9]\d*)\))?")

# What joins the devices of a server is not known before it is measured. GPUs: PCI Express 3.0 x16, as it is reached.
_PCI_EXPRESS = Link(bandwidth=12e9, latency=10e-6)
# Processes of one host without GPUs: Horovod's alltoall, measured on a small machine.
_BETWEEN_PROCESSES = Link(bandwidth=2.5e9, latency=0.5e-3)


def detect(
    devices: int | None,
    environment: Mapping[str, str],
    *,
    intra_server: Link | None = None,
    inter_server: Link | None = None,
) -> Cluster:
    """The servers of the job that ``environment`` tells of (one device a process), or this machine alone.

    Alone, its devices are ``devices``, or TensorFlow's GPUs, or the logical CPU devices that ``dapple.init`` made.
    Memory of a device: the GPU's, or its share of the host's. Links are as given; ``intra_server`` is else taken
    to be shared memory (devices of one process on a CPU), 2.5 GB/s and 0.5 ms (processes), or 12 GB/s and 10 us
    (GPUs). Raises ClusterError for an environment that contradicts itself or ``devices``, and for several servers
    without ``inter_server``.
    """
    if devices is not None and devices < 1:
        raise ClusterError(f"devices={devices}: a cluster needs at least one device")
    counts = _job(environment)
    if sum(counts) > 1:
        if devices not in (None, sum(counts)):
            raise ClusterError(f"devices={devices}, but the launcher started {sum(counts)} processes, a device each")
        if len(counts) > 1 and inter_server is None:
            raise ClusterError(
                f"the job runs on {len(counts)} servers, and nothing says what joins them: measure the link "
                "(profiler.links.probe) or give inter_server"
            )
    found, gpu_memory = _local_devices(devices)
    if sum(counts) <= 1:
        counts, assumed = (found,), IN_PROCESS if gpu_memory is None else _PCI_EXPRESS
    else:
        assumed = _BETWEEN_PROCESSES if gpu_memory is None else _PCI_EXPRESS
    inside = intra_server or assumed
    return Cluster(
        servers=tuple(Server(f"server{index}", count) for index, count in enumerate(counts)),
        device_memory=host_memory() / max(counts) if gpu_memory is None else gpu_memory,
        intra_server=inside,
        inter_server=inter_server or inside,
    )


def job_size(environment: Mapping[str, str]) -> int:
    """How many processes a launcher started; 1 where none did. Raises ClusterError for a contradictory environment."""
    return max(1, sum(_job(environment)))


def job_rank(environment: Mapping[str, str]) -> int:
    """Which of the processes that a launcher started this is; 0 where none did, or it does not say."""
    return next((int(environment[name]) for name in _RANKS if environment.get(name, "").isdigit()), 0)


def _job(environment: Mapping[str, str]) -> tuple[int, ...]:
    """Processes on each server; empty where no launcher started this one."""
    for size_name, local_name in _LAUNCHERS:
        if size_name in environment:
            size, local = (_count(environment, name) for name in (size_name, local_name))
            if size % local:
                raise ClusterError(
                    f"{size_name}={size} is no multiple of {local_name}={local}: the servers run unequally many "
                    "processes; describe them in a cluster file (Cluster.load)"
                )
            return (local,) * (size // local)
    if _SLURM not in environment:
        return ()
    counts: list[int] = []
    for part in environment[_SLURM].split(","):
        match = _SLURM_COUNT.fullmatch(part)
        if not match:
            raise ClusterError(f"{_SLURM}={environment[_SLURM]!r} is not of the form 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def _count(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name)
    if text is None:
        raise ClusterError(f"{name} is not set, though the launcher's other variables are")
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ClusterError(f"{name}={text!r} is not a whole number from 1")
    return int(text)


def _local_devices(devices: int | None) -> tuple[int, float | None]:
    """How many devices this process has, ``devices`` if given, and a GPU's memory in bytes, None without GPUs."""
    import tensorflow as tf  # not at the top: planning from files must not start it

    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        if devices is not None and devices > len(gpus):
            raise ClusterError(f"devices={devices}, but this machine has {len(gpus)} GPUs")
        return devices or len(gpus), _gpu_memory()
    # Listing the logical devices would fix their number: this only asks.
    cpu = tf.config.list_physical_devices("CPU")[0]
    return devices or len(tf.config.get_logical_device_configuration(cpu) or [None]), None


def _gpu_memory() -> float:
    """Bytes that TensorFlow can use of the smallest GPU."""
    from tensorflow.python.client import device_lib

    return float(min(d.memory_limit for d in device_lib.list_local_devices() if d.device_type == "GPU"))


def host_memory(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> float:
    """Bytes of the machine, or of the container (its cgroup's ``limit``) where that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return float(min(machine, int(text)) if text.isdigit() else machine)
