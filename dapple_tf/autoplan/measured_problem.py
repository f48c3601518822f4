"""State the planning problem for the devices at hand, with a profile of the model measured now."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from dapple_tf.autoplan.batch_fit import check_batch_size
from dapple_tf.autoplan.options import Options
from dapple_tf.errors import ClusterError, PlanError
from dapple_tf.frontend.batch import batch_size
from dapple_tf.frontend.captured import Traced
from dapple_tf.planner.api import check_schedule, make_problem
from dapple_tf.planner.planning_problem import PlanningProblem, list_micro_batch_sizes
from dapple_tf.plans import MORE_DEVICES
from dapple_tf.profiler.cluster import Cluster
from dapple_tf.profiler.detect import count_cores
from dapple_tf.profiling.measured import profile_layers
from dapple_tf.wording import format_count

# Where M is "auto", times are measured at the micro-batch sizes of these M.
_MEASURED_MICRO_BATCHES = (2, 8, 32)


@dataclass(frozen=True)
class PlanningInputs:
    """The model to plan, and what it runs on.

    ``batch``: an example, which is profiled. ``optimizer_slots``: values that the optimizer keeps per weight.
    ``devices``: of this process, or the ranks of the job. ``cluster``: given by the user, else None. ``replicable``:
    False where the result depends on how samples are divided (random numbers, batch norm), so that stages get one
    device each. ``ranks``: whether the devices are the processes of a job, all of which the plan must use.
    """

    loss_fn: Traced
    batch: Sequence[Any]
    options: Options
    optimizer_slots: int
    devices: int
    cluster: Cluster | None = None
    replicable: bool = True
    ranks: bool = False

    @property
    def samples(self) -> int:
        """Samples of the batch."""
        return batch_size(self.batch)


def choose_cluster(inputs: PlanningInputs, devices: int) -> Cluster:
    """Return the cluster that is given, else that of the job's ranks, else that of ``devices`` devices of this process.

    Raises PlanError unless it has as many devices as the job has ranks, or at most those of this process, and where the
    links between the job's servers are unknown.
    """
    cluster = inputs.cluster or (_detect_job_cluster() if inputs.ranks else Cluster.detect(devices))
    if inputs.ranks and cluster.devices != inputs.devices:
        raise PlanError(
            f"the cluster has {format_count(cluster.devices, 'device')}, but the job has "
            f"{format_count(inputs.devices, 'rank')}, a device each: start one process per device of the cluster, or "
            "describe the servers that the job runs on"
        )
    if cluster.devices > inputs.devices:
        raise PlanError(
            f"the cluster has {format_count(cluster.devices, 'device')}, but this process has {inputs.devices}: "
            f"{MORE_DEVICES}, or plan for a smaller cluster (cluster=, --cluster)"
        )
    return cluster


def _detect_job_cluster() -> Cluster:
    try:
        return Cluster.detect()
    except ClusterError as error:
        raise PlanError(
            f'stages="auto" must know the links between the ranks: {error}. Give dapple.pipeline(cluster=...), or a '
            "plan made for the cluster (dapple plan)"
        ) from error


def measure_problem(inputs: PlanningInputs, cluster: Cluster, replicas: Sequence[int]) -> PlanningProblem:
    """Profile the model, and return the planning problem of the options on ``cluster``.

    Times are measured at the size of a micro-batch (of given sizes the largest) and of a replica's share of one, for
    each of ``replicas``. Raises PlanError for a batch that is too small for the micro-batches, or a schedule that
    cannot run; both before profiling.
    """
    options, samples = inputs.options, inputs.samples
    micro_batches = options.count_micro_batches(samples) * options.training.minibatches
    check_batch_size(samples, micro_batches, (1,))
    size = max(options.sizes(samples), default=samples // micro_batches)
    any_size = options.micro_batches_are_auto
    if options.spec is not None:
        sizes = list_micro_batch_sizes(samples, None) if any_size else (size,)
        check_schedule(options.spec, cluster.devices, [samples // each for each in sizes])
    measured = {max(1, samples // m) for m in _MEASURED_MICRO_BATCHES} if any_size else {size}
    shares = {max(1, each // r) for each in measured for r in replicas}
    rows = tf.nest.map_structure(lambda leaf: tf.convert_to_tensor(leaf)[:size], tuple(inputs.batch))
    return make_problem(
        profile_layers(inputs.loss_fn, rows, sorted((measured | shares) - {size}), options.batch_loss),
        cluster,
        global_batch_size=samples if any_size else micro_batches * size,
        micro_batch_size=None if any_size else size,
        schedule="auto" if options.spec is None else str(options.spec),
        recompute=options.recompute is True,
        optimizer_slots=inputs.optimizer_slots,
        shard_optimizer=options.shard_optimizer,
    )


def usable_devices(devices: int) -> int:
    """Return how many devices can run at the same time: all GPUs; of logical CPU devices as many as there are cores."""
    if tf.config.list_logical_devices("GPU"):
        return devices
    return max(1, min(devices, count_cores()))


def count_slots(optimizer: Any, trained: Sequence[tf.Variable]) -> int:
    """Return how many values the optimizer keeps per ``trained`` weight; before it is built 2, as Adam does."""
    weights = sum(math.prod(variable.shape) for variable in trained)
    if not weights or not getattr(optimizer, "built", False):
        return 2
    slots = sum(math.prod(variable.shape) for variable in optimizer.variables)  # and a few scalars, such as the rate
    return round(float(slots) / float(weights))
