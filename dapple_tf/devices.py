"""Which devices there are, and ``dapple.init``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

import tensorflow as tf

from dapple_tf.distributed import membership
from dapple_tf.distributed.exit_reporting import guard
from dapple_tf.errors import DeviceError, UsageError

DEFAULT_DEVICES = 8


def init(devices: int | None = None) -> None:
    """Make devices to pipeline over; call it before TensorFlow runs anything.

    A process that mpirun or horovodrun started joins their job, with one device: its GPU, or the CPU. Else, on a
    machine with GPUs, these are the devices; elsewhere the CPU is divided into ``devices`` logical ones (default 8);
    where that is one for each core or more, ops are not split over cores. Calling it again with the
    same number is fine. Raises UsageError when TensorFlow has already started with another number, DeviceError
    for a number below 1 or above the GPUs.

    The ranks of a job watch each other from here on (see ``distributed.watchdog``), which starts TensorFlow: its own
    settings (threads, memory growth) come before.
    """
    if devices is not None and devices < 1:
        raise DeviceError(f"devices={devices}: at least one is needed")
    job = membership.join()
    _make_devices(devices, job)
    if job is not None:
        guard(job)


def _make_devices(devices: int | None, job: membership.Job | None) -> None:
    gpus = tf.config.list_physical_devices("GPU")
    if job is not None:
        devices = 1
        if gpus:
            tf.config.set_visible_devices(gpus[job.local_rank], "GPU")
            return
    if gpus:
        if devices is not None and devices > len(gpus):
            raise DeviceError(f"devices={devices}, but this machine has {len(gpus)} GPUs")
        return
    cpu = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(cpu)
    count = DEFAULT_DEVICES if devices is None else devices
    # A rank's second one is for the op that tells whether a step has failed: see ``distributed.hang_detector``.
    count = count if job is None else 2
    if configured is not None and (devices is None or count == len(configured)):
        return
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
        _one_core_an_op(count if job is None else job.local_size)
        if job is not None:
            _free_thread_for_exchanges()
    except RuntimeError as error:
        have = len(tf.config.list_logical_devices("CPU"))
        if devices is None or have == count or job is not None:
            return
        raise UsageError(
            f"TensorFlow has already started with {have} devices: call dapple.init(devices={count}) before any tensor, "
            "variable or model is made"
        ) from error


def _one_core_an_op(devices: int) -> None:
    """Let each op run on one core, where there is a device for every core and the user has not chosen.

    Devices share the cores: ops split over cores that other stages work on cost more than they gain (two
    stages on two cores took 10% longer).
    """
    if devices >= len(os.sched_getaffinity(0)) and not tf.config.threading.get_intra_op_parallelism_threads():
        tf.config.threading.set_intra_op_parallelism_threads(1)


def _free_thread_for_exchanges() -> None:
    """Have a thread start exchanges while another computes, where the user has not chosen.

    A rank of one core has one thread by default: what a micro-batch sends then waits until the next one is computed,
    and two ranks may take turns (1.00 s a step in place of 0.61 s).
    """
    if not tf.config.threading.get_inter_op_parallelism_threads() and len(os.sched_getaffinity(0)) < 2:
        tf.config.threading.set_inter_op_parallelism_threads(2)


def list_devices(wanted: Sequence[str | int] | None = None) -> tuple[str, ...]:
    """Names of the devices to pipeline over: GPUs where there are any, else logical CPUs; or those ``wanted``.

    Raises DeviceError naming a device that does not exist, and those that do.
    """
    gpus = tf.config.list_logical_devices("GPU")
    found = tuple(device.name for device in gpus or tf.config.list_logical_devices("CPU"))
    if membership.current() is not None:
        found = found[:1]
    if wanted is None:
        return found
    if isinstance(wanted, str | int):
        raise DeviceError(f"devices={wanted!r}: give a list of names or indices, such as ['CPU:0', 'CPU:1']")
    every = [device.name for device in tf.config.list_logical_devices()]
    known: dict[str | int, str] = {**dict(enumerate(found)), **{_short(name): name for name in every}}
    chosen = []
    for name in wanted:
        key = _short(name) if isinstance(name, str) else name
        if key not in known:
            raise DeviceError(f"there is no device {name!r}; there are {', '.join(every)}")
        chosen.append(known[key])
    return tuple(chosen)


def _short(name: str) -> str:
    """Type and index, ``cpu:1``, of a device's name in any of its spellings."""
    return name.lower().rpartition("device:")[2].removeprefix("/")


def home_device() -> str:
    """Where arguments arrive, and the loss and what no stage owns live: the host."""
    return str(tf.config.list_logical_devices("CPU")[0].name)


@contextlib.contextmanager
def scope() -> Iterator[None]:
    """Variables made inside live on the host, so a model larger than one device can be built."""
    with tf.device(home_device()):
        yield
