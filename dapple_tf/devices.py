"""Initialize and list the devices that a pipeline runs on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from dapple_tf import variable_values
from dapple_tf.distributed import membership
from dapple_tf.distributed.exchange_network import start_exchanges
from dapple_tf.distributed.exit_reporting import report_uncaught_exceptions, start_exit_reporting
from dapple_tf.distributed.startup_watch import watching_start
from dapple_tf.errors import DeviceError, UsageError, warn_user
from dapple_tf.launcher.restart import VARIABLE, first_start, is_driven, read_start, starts_again
from dapple_tf.memory.meter import resident_bytes
from dapple_tf.profiler.detect import count_cores, job_rank, job_size
from dapple_tf.wording import format_count

DEFAULT_DEVICES = 8


def init(devices: int | None = None) -> None:
    """Configure the devices to pipeline over; call this before TensorFlow runs anything.

    A process that mpirun or horovodrun started joins the job, with one device: its GPU, or the CPU. Where a server has
    more processes than GPUs, some share one. Otherwise the devices are the machine's GPUs; without GPUs, the CPU is
    divided into ``devices`` logical devices (default 8), and if that is one per core or more, TensorFlow does not split
    ops over cores. A second call with the same number does nothing. Raises UsageError if TensorFlow has already started
    with another number of devices, DeviceError for a number below 1 or above the number of GPUs.

    In a job this starts the watchdog (see ``distributed.watchdog``) and TensorFlow: set TensorFlow's own options
    (threads, memory growth) before. DAPPLE_EXCHANGE chooses how the ranks exchange tensors (see
    ``distributed.exchange_network``).
    """
    if devices is not None and devices < 1:
        raise DeviceError(f"devices={devices}: at least one is needed")
    if starts_again():
        report_uncaught_exceptions()
    with watching_start():
        job = membership.join()
        _make_devices(devices, job)
        _share_start(job)
        if not job.is_alone:
            start_exit_reporting(job)
            start_exchanges(job)
            job.base_bytes = resident_bytes()


def _share_start(job: membership.Job) -> None:
    """Note which start of the job this is where Horovod's driver does not: rank 0 has been there from the first on."""
    if is_driven() and job.watchdog is None:
        os.environ[VARIABLE] = job.run_on_rank_0(lambda: (read_start() or first_start()).to_text())


def _make_devices(devices: int | None, job: membership.Job) -> None:
    gpus = tf.config.list_physical_devices("GPU")
    if not job.is_alone:
        devices = 1
        if gpus:
            _choose_gpu(gpus, job)
            return
    if gpus:
        if devices is not None and devices > len(gpus):
            raise DeviceError(f"devices={devices}, but this machine has {format_count(len(gpus), 'GPU')}")
        return
    cpu = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(cpu)
    count = DEFAULT_DEVICES if devices is None else devices
    # A rank's second device is for the op that detects a failed step: see ``distributed.progress``.
    count = count if job.is_alone else 2
    if configured is not None and (devices is None or count == len(configured)):
        return
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
        _run_ops_on_one_core(count if job.is_alone else job.local_size)
        if not job.is_alone:
            _reserve_thread_for_exchanges()
    except RuntimeError as error:
        have = len(tf.config.list_logical_devices("CPU"))
        if have == count or not job.is_alone:
            return
        if devices is None:
            warn_user(
                f"dapple.init() came too late to make {format_count(count, 'device')}: TensorFlow has started with "
                f"{have}. Call it before any tensor, variable or model is made"
            )
            return
        raise UsageError(
            f"TensorFlow has already started with {format_count(have, 'device')}: call dapple.init(devices={count}) "
            "before any tensor, variable or model is made"
        ) from error


def _choose_gpu(gpus: Sequence[Any], job: membership.Job) -> None:
    """Let this rank see one GPU only. Where the server has more ranks than GPUs, ranks share one, in equal numbers.

    TensorFlow takes the whole memory of a GPU unless the user has limited it; ranks that share one let it grow.
    """
    gpu = gpus[job.local_rank % len(gpus)]
    tf.config.set_visible_devices(gpu, "GPU")
    if job.local_size > len(gpus) and tf.config.get_logical_device_configuration(gpu) is None:
        tf.config.experimental.set_memory_growth(gpu, True)


def _run_ops_on_one_core(devices: int) -> None:
    """Run each op on one core if there is a device for every core and the user has not set the number of threads.

    Devices share the cores: splitting an op over cores on which other stages compute costs more than it gains (two
    stages on two cores took 10% longer).
    """
    if devices >= count_cores() and not tf.config.threading.get_intra_op_parallelism_threads():
        tf.config.threading.set_intra_op_parallelism_threads(1)


def _reserve_thread_for_exchanges() -> None:
    """Let one thread start exchanges while another computes, if the user has not set the number of threads.

    A rank of one core has one thread by default: a micro-batch's tensors are then sent only after the next micro-batch
    is computed, and two ranks may compute in alternation (1.00 s a step in place of 0.61 s).
    """
    if not tf.config.threading.get_inter_op_parallelism_threads() and count_cores() < 2:
        tf.config.threading.set_inter_op_parallelism_threads(2)


def rank() -> int:
    """Return the number of this process in its job, from 0; 0 for a process that no launcher has started."""
    return job_rank(os.environ)


def size() -> int:
    """Return how many processes (ranks) the job has; 1 for a process that no launcher has started.

    Raises ClusterError where the launcher's variables contradict each other.
    """
    return job_size(os.environ)


def list_devices(wanted: Sequence[str | int] | None = None) -> tuple[str, ...]:
    """Return the names of the devices to pipeline over: the ``wanted`` ones, else the GPUs, else the logical CPUs.

    ``wanted``: names in any of TensorFlow's spellings, or indices. Raises DeviceError naming a device that does not
    exist, and those that do.
    """
    gpus = tf.config.list_logical_devices("GPU")
    found = tuple(device.name for device in gpus or tf.config.list_logical_devices("CPU"))
    if not membership.current().is_alone:
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
    """Return type and index, such as ``cpu:1``, of a device name in any of its spellings."""
    return name.lower().rpartition("device:")[2].removeprefix("/")


def home_device() -> str:
    """Return the name of the host's device, for arguments, the loss and all that belongs to no stage."""
    return str(tf.config.list_logical_devices("CPU")[0].name)


@contextlib.contextmanager
def scope() -> Iterator[None]:
    """Create variables without values in this context, so that a model may be larger than one device or process.

    A variable whose first value a function makes (every layer of Keras has such) gets it when a step is built, on the
    device of its stage; in a job only the ranks that hold the stage make it. It is the value that the variable would
    have got at once. Asking for it earlier (``numpy()``, a call of the model) makes it here. Variables that are made
    from arrays, from a generator's state or from other variables get their values at once, on the host.

    A DappleWarning says so where nothing is created: the model was made before, or its layers make their variables at
    their first call.
    """
    created = 0

    def count(next_creator: Callable[..., tf.Variable], **settings: Any) -> tf.Variable:
        nonlocal created
        created += 1
        return next_creator(**settings)

    with deferred_on_host(), tf.variable_creator_scope(count):
        yield
    if not created:
        warn_user(
            "no variable was created in dapple.scope(): those that exist already keep their memory on every rank. Make "
            "the model inside, and build it there (keras.Input, or model.build) if its layers do so at their first call"
        )


@contextlib.contextmanager
def deferred_on_host() -> Iterator[None]:
    """Create variables as in ``scope``; nothing is said where none are."""
    with tf.device(home_device()), variable_values.deferring_variables():
        yield
