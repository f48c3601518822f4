"""Find the processes of this job in the launcher's environment, and the devices and memory of this machine."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from dapple_tf.errors import ClusterError
from dapple_tf.wording import format_count

# The variables with the number of processes, in all and on this server: of Open MPI, and of horovodrun with Gloo.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE"),
)
_RANKS = ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK")
# Set by srun for the processes it starts (an allocation alone sets SLURM_NTASKS): 2(x3),1 means 2, 2, 2 and 1.
_SLURM = "SLURM_STEP_TASKS_PER_NODE"
_SLURM_COUNT = re.compile(r"([1-9]\d*)(?:\(x([1-9]\d*)\))?")


def job_size(environment: Mapping[str, str]) -> int:
    """Return how many processes the launcher started, also where hosts run different numbers; 1 without a launcher.

    Raises ClusterError if a variable of the launcher does not hold a whole number of at least 1.
    """
    for size_name, _ in _LAUNCHERS:
        if size_name in environment:
            return _count(environment, size_name)
    return max(1, sum(processes_per_server(environment)))


def job_rank(environment: Mapping[str, str]) -> int:
    """Return the rank of this process in its job; 0 without a launcher, or where it sets no rank."""
    return next((int(environment[name]) for name in _RANKS if environment.get(name, "").isdigit()), 0)


def processes_per_server(environment: Mapping[str, str]) -> tuple[int, ...]:
    """Return the job's processes on each server; empty without a launcher.

    Raises ClusterError where the launcher's variables are missing or contradict each other.
    """
    for size_name, local_name in _LAUNCHERS:
        if size_name in environment:
            size, local = (_count(environment, name) for name in (size_name, local_name))
            if size % local:
                raise ClusterError(
                    f"{size_name}={size} is no multiple of {local_name}={local}: the servers run different numbers of "
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
        raise ClusterError(f"{name}={text!r} is not a whole number of at least 1")
    return int(text)


def local_devices(devices: int | None) -> tuple[int, float | None]:
    """Return how many devices this process has (``devices`` if given), and a GPU's memory in bytes, None without GPUs.

    Raises ClusterError where there are fewer GPUs than ``devices``.
    """
    import tensorflow as tf  # not at the top: planning from files must not start TensorFlow

    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        if devices is not None and devices > len(gpus):
            raise ClusterError(f"devices={devices}, but this machine has {format_count(len(gpus), 'GPU')}")
        return devices or len(gpus), _gpu_memory()
    # Listing the logical devices would fix their number; this does not.
    cpu = tf.config.list_physical_devices("CPU")[0]
    return devices or len(tf.config.get_logical_device_configuration(cpu) or [None]), None


def _gpu_memory() -> float:
    """Return the bytes that TensorFlow can use of the smallest GPU."""
    from tensorflow.python.client import device_lib

    return float(min(d.memory_limit for d in device_lib.list_local_devices() if d.device_type == "GPU"))


def host_memory(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> float:
    """Return the bytes of the machine's memory, or of the container's (its cgroup's ``limit``) where that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return float(min(machine, int(text)) if text.isdigit() else machine)


# --- The processor's cores that this process may run on: count them, or limit the process to a few of them


_THREADS = Path("/proc/self/task")


def count_cores() -> int:
    """Return the number of cores that this process may run on; the machine's where the system cannot limit a process.

    ``mpirun --bind-to`` and ``taskset`` limit processes on Linux.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def limit_to_cores(count: int) -> Iterator[None]:
    """Run all threads of this process on ``count`` of its cores inside the block (on Linux; elsewhere do nothing).

    A device that shares the machine with others has only a few cores.

    The affinity of each thread is restored afterwards; threads started inside the block get this thread's.
    """
    if not _THREADS.is_dir():
        yield
        return
    own = os.sched_getaffinity(0)
    few = set(sorted(own)[:count])
    before: dict[int, set[int]] = {}
    for thread in _threads():
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            before[thread] = os.sched_getaffinity(thread)
            os.sched_setaffinity(thread, few)
    try:
        yield
    finally:
        for thread in _threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, before.get(thread, own))


def _threads() -> list[int]:
    return sorted(int(path.name) for path in _THREADS.iterdir())
