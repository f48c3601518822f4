"""The options of a plan as the user gave them: each given, or left to "auto"."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from dapple_tf.autoplan.batch_fit import check_batch_size
from dapple_tf.autoplan.recompute_option import Recompute, check_recompute
from dapple_tf.autoplan.slice_option import Slice, check_slice
from dapple_tf.autoplan.window_option import check_window_options
from dapple_tf.errors import PlanError, ScheduleError
from dapple_tf.exactness import BatchLoss, BatchNorm, Inexact, check_batch_loss, check_batch_norm, check_inexact
from dapple_tf.plan import Plan
from dapple_tf.simulator.named_orders import check_plannable
from dapple_tf.window_plan import WindowPlan
from graph_passes.schedules.policies import check_schedule, check_schedule_name, worker_map_of
from graph_passes.schedules.text import is_text, parse_schedule
from profiler.cluster import Cluster
from profiler.units import format_samples

# --- ``micro_batches=[2, 2, 4]`` or ``[0.25, 0.25, 0.5]``: micro-batches of given sizes, counts or shares of samples

# Shares such as 1/3 are rounded; they are divided by their sum.
_SUM_TOLERANCE = 1e-6

_GivenSizes = Sequence[int] | Sequence[float]
"""Of each micro-batch the samples (whole numbers), or the share of the samples (floats)."""


def check_given_sizes(given: Sequence[object]) -> None:
    """Raise PlanError unless ``given`` are counts of samples (whole numbers), or shares (floats) that add up to 1."""
    shown = f"micro_batches={list(given)}"
    if not given:
        raise PlanError(f"{shown}: name the samples, or the share, of at least one micro-batch")
    if any(isinstance(item, bool) for item in given) or not (_are_counts(given) or _are_all(float, given)):
        raise PlanError(
            f"{shown}: give samples of each micro-batch (all whole numbers, such as [2, 2, 4]) or shares (all floats, "
            "such as [0.25, 0.25, 0.5])"
        )
    sizes = cast(_GivenSizes, given)
    for index, item in enumerate(sizes):
        if not 0 < item < math.inf:
            raise PlanError(f"{shown}: micro-batch {index} is {item}; every one must be larger than 0")
    if not _are_counts(given) and abs(math.fsum(sizes) - 1) > _SUM_TOLERANCE:
        raise PlanError(f"{shown}: the shares add up to {math.fsum(sizes):g}, not to 1")


def _are_counts(given: Sequence[object]) -> bool:
    """Return whether ``given`` are counts of samples, not shares."""
    return _are_all(numbers.Integral, given)


def _are_all(kind: type, given: Sequence[object]) -> bool:
    return all(isinstance(item, kind) for item in given)


def count_samples(given: _GivenSizes, samples: int) -> tuple[int, ...]:
    """Return the samples of each micro-batch of a batch of ``samples``.

    Of shares, their sums times the samples are rounded, so that each is within one sample of its share. Raises
    PlanError where counts do not add up to ``samples``, or a share is less than a sample.
    """
    if _are_counts(given):
        sizes = tuple(map(int, given))
        if sum(sizes) != samples:
            raise PlanError(
                f"micro_batches={list(given)} add up to {format_samples(sum(sizes))}, but the first batch has "
                f"{samples}: give sizes that add up to {samples}, or shares (floats that add up to 1)"
            )
        return sizes
    sums = [0.0, *itertools.accumulate(given)]
    rows = [round(samples * each / sums[-1]) for each in sums]
    found = tuple(end - first for first, end in itertools.pairwise(rows))
    if min(found) < 1:
        index = found.index(0)
        raise PlanError(
            f"micro_batches={list(given)}: share {given[index]} of {format_samples(samples)} is no sample for "
            f"micro-batch {index}: use larger shares, or a larger batch"
        )
    return found


# --- The options of a plan as the user gave them: each given, or left to "auto"


# M of a batch that has the samples, before the simulator has chosen it.
_USUAL_MICRO_BATCHES = 8
_SPARSE_GRADIENTS = ("exact", "dense")


MicroBatches = int | str | _GivenSizes
"""M, "auto", or for each micro-batch its samples or its share of the samples."""


@dataclass(frozen=True)
class Request:
    """The options of ``dapple.pipeline`` that shape its plan.

    ``stages``: a number, the names of the layers that start a stage, or "auto". With ``replicas`` (devices of each
    worker), "auto" means one worker per entry; without, a planner chooses both. ``micro_batches``: M, or "auto", or
    for each micro-batch its samples (of the first batch) or its share of the samples; see ``given_sizes``.
    ``schedule``: a name, or "auto". ``recompute``: see ``recompute_option``. ``sparse_gradients``: "exact" or "dense".
    ``inexact``, ``batch_loss`` and ``batch_norm``: see ``exactness``. ``jit_compile``: whether XLA compiles stage
    functions; None follows the loss function. ``slice``: see ``slice_option``. ``window``: for asynchronous training;
    then ``micro_batches`` is 1. Raises PlanError for a value of the
    wrong type and for options that contradict a window, ScheduleError for an unknown schedule, and UsageError for what
    does not exist yet.
    """

    stages: int | Sequence[str] | str = "auto"
    replicas: Sequence[int] | None = None
    micro_batches: MicroBatches = 8
    schedule: str = "auto"
    recompute: Recompute = False
    sparse_gradients: str = "exact"
    inexact: Inexact = "error"
    batch_loss: BatchLoss = False
    batch_norm: BatchNorm = "micro-batch"
    jit_compile: bool | None = None
    slice: Slice = None
    window: WindowPlan | None = None

    def __post_init__(self) -> None:
        self._check_micro_batches()
        if not isinstance(self.schedule, str):
            raise PlanError(f"schedule={self.schedule!r}: give a name, such as 'dapple-a'")
        if not self.schedule_is_auto:
            check_schedule_name(self.schedule_name)
            if self.stages_are_auto or self.micro_batches_are_auto:
                check_plannable(self.schedule_name)
        if self.replicas is not None and not _is_list_of(int, self.replicas):
            raise PlanError(f"replicas={self.replicas!r}: give one whole number for each stage, such as [2, 1]")
        if not isinstance(self.stages, int) and self.stages != "auto" and not _is_list_of(str, self.stages):
            raise PlanError(f"stages={self.stages!r}: give a number, a list of layer names, or 'auto'")
        if self.given_sizes:
            self._check_sizes_fit()
        if isinstance(self.stages, int) and self.stages > 0 and not self.schedule_is_auto:
            self._check_stages_fit(self.stages)
        check_recompute(self.recompute)
        check_inexact(self.inexact)
        check_batch_loss(self.batch_loss)
        check_batch_norm(self.batch_norm)
        if self.window is not None:
            others = {
                "schedule": (self.schedule, "auto"),
                "slice": (self.slice, None),
                "batch_loss": (self.batch_loss, False),
                "batch_norm": (self.batch_norm, "micro-batch"),
            }
            check_window_options(self.window, self.replicas, others)
        check_slice(self.slice, self.schedule, self.micro_batches, self.batch_loss)
        if self.jit_compile not in (None, True, False):
            raise PlanError(f"jit_compile={self.jit_compile!r}: give True, False, or None to follow the loss function")
        if self.sparse_gradients not in _SPARSE_GRADIENTS:
            raise PlanError(
                f"sparse_gradients={self.sparse_gradients!r}: give 'exact' (the optimizer gets an embedding's gradient "
                "as on one device) or 'dense' (it gets a dense tensor)"
            )

    def _check_micro_batches(self) -> None:
        """Raise PlanError unless ``micro_batches`` is a number, "auto", or sizes."""
        given = self.micro_batches
        if isinstance(given, Sequence) and not isinstance(given, str):
            check_given_sizes(given)
        elif type(given) is not int and not (isinstance(given, str) and given == "auto"):
            raise PlanError(
                f"micro_batches={given!r}: give a whole number, 'auto', or a list of the samples or shares of each "
                "micro-batch"
            )

    def _check_sizes_fit(self) -> None:
        """Raise PlanError, or ScheduleError, where the given sizes contradict the replicas or the schedule."""
        given, count = self.given_sizes, len(self.given_sizes)
        if self.replicas and _are_counts(given):
            sizes = tuple(map(int, given))
            check_batch_size(sum(sizes), count, self.replicas, sizes)
        if not self.schedule_is_auto and is_text(self.schedule):
            found = parse_schedule(self.schedule).micro_batches
            if found != count:
                raise ScheduleError(
                    f"the schedule's text is for {found} micro-batches, but micro_batches={list(given)} are {count}: "
                    "give a size for each, or another schedule"
                )

    def _check_stages_fit(self, stages: int) -> None:
        """Raise ScheduleError, or PlanError, where the schedule is not for these stages, M or workers."""
        if not self.micro_batches_are_auto:
            check_schedule(self.schedule_name, stages, self.count_micro_batches(0))
        workers = worker_map_of(self.schedule_name, stages).workers
        if self.replicas is not None:
            check_worker_count(self.replicas, stages, workers)

    @property
    def stages_are_auto(self) -> bool:
        """Whether a planner chooses stages and replicas."""
        return self.stages == "auto" and self.replicas is None

    @property
    def micro_batches_are_auto(self) -> bool:
        """Whether the simulator chooses M."""
        return self.micro_batches == "auto"

    @property
    def schedule_is_auto(self) -> bool:
        """Whether the simulator chooses the schedule."""
        return self.schedule_name == "auto"

    @property
    def schedule_name(self) -> str:
        """The name of the schedule as given, or "auto"; with ``slice``, "auto" is 1F1B, which the Slicer slices."""
        return "dapple-a" if self.schedule == "auto" and self.slice is not None else self.schedule

    @property
    def runs_whole_minibatches(self) -> bool:
        """Whether every step is computed from one micro-batch on one replica, as one device does it."""
        return self.window is not None and self.window.in_turn

    @property
    def can_run_uncut(self) -> bool:
        """Whether each batch is one micro-batch on one replica, or may be because M or the replicas are left open.

        M is not left open where the user allows inexact steps, or gives a schedule for some M.
        """
        left_open = self.micro_batches_are_auto and self.inexact == "error" and not is_text(self.schedule)
        one = left_open or self.micro_batches == 1 or len(self.given_sizes) == 1
        return self.window is None and one and max(self.replicas or (1,)) == 1

    @property
    def keeps_slices(self) -> bool:
        """Whether the gradients of embeddings stay sparse."""
        return self.sparse_gradients == "exact"

    def count_micro_batches(self, samples: int, replicas: int = 1) -> int:
        """Return M for a batch of ``samples``; where M is "auto", 8, or fewer if the batch is too small for 8.

        ``replicas``: the largest number of replicas of a stage, each of which needs a sample.
        """
        if self.given_sizes:
            return len(self.given_sizes)
        if isinstance(self.micro_batches, int):
            return self.micro_batches
        return max(1, min(_USUAL_MICRO_BATCHES, samples // replicas))

    @property
    def given_sizes(self) -> _GivenSizes:
        """The samples or shares of each micro-batch; empty where ``micro_batches`` is a number or "auto"."""
        return () if isinstance(self.micro_batches, int | str) else self.micro_batches

    def sizes(self, samples: int) -> tuple[int, ...]:
        """Return the samples of each micro-batch of a first batch of ``samples``; empty for equal ones.

        Raises PlanError where given sizes do not add up to ``samples``.
        """
        found = count_samples(self.given_sizes, samples) if self.given_sizes else ()
        return found if len(set(found)) > 1 else ()

    def largest_micro_batch(self, samples: int) -> int:
        """Return about how many samples the largest micro-batch of a batch of ``samples`` has."""
        if self.given_sizes:
            return math.ceil(samples * max(self.given_sizes) / math.fsum(self.given_sizes))
        count = self.count_micro_batches(samples)
        if self.window is not None:
            count = self.window.minibatches * (self.window.micro_batches or 1)
        return samples // max(1, count)


def check_worker_count(replicas: Sequence[int], stages: int, workers: int) -> None:
    """Raise PlanError unless there is a number of replicas for each worker."""
    if len(replicas) != workers:
        what = "stages" if workers == stages else f"workers for the {stages} stages"
        raise PlanError(f"replicas={list(replicas)} names {len(replicas)} {what}, but there are {workers}")


def check_conflicts(request: Request, plan: Plan | None, cluster: Cluster | None) -> None:
    """Raise PlanError where ``plan`` is no Plan, or where a plan, a cluster and the request contradict each other."""
    if plan is not None and not isinstance(plan, Plan):
        raise PlanError(f"plan is a {type(plan).__name__}, not a dapple.Plan: read a file with dapple.Plan.load(path)")
    if plan is not None and (request.stages != "auto" or request.replicas is not None):
        raise PlanError("give a plan, or stages and replicas, not both")
    if plan is not None and request.recompute:
        raise PlanError(
            "give a plan, or recompute, not both: a plan's field recompute says which layers are re-computed"
        )
    if plan is not None and request.slice is not None:
        raise PlanError("give a plan, or slice, not both: a plan's schedule and micro_batch_sizes say what is sliced")
    if plan is None and request.slice is not None and request.stages_are_auto:
        raise PlanError(f"slice={request.slice!r} with stages='auto': give a number, or the layers that start a stage")
    if plan is not None and plan.virtual_workers:
        raise PlanError(
            f"the plan has {len(plan.virtual_workers)} virtual workers, which cut the model each in its own way: a "
            "layer would have its weights in several stages, which is simulated but does not run; make a plan with "
            "planner 'best', or with planner 'hetpipe' and policy='ED', whose virtual workers may be equal"
        )
    if plan is not None and plan.window is not None and request.window is None:
        raise PlanError(
            f"the plan is for asynchronous windows of {plan.window.minibatches} minibatches: give mode='async' (on the "
            "command line --async) to train in them, or another plan"
        )
    recompute = request.recompute or (plan is not None and plan.recompute)
    if request.window is not None and request.window.weights == "latest" and recompute:
        raise PlanError(
            "weights='latest' with recompute: backward would compute the activations again with newer weights than "
            "forward used; leave recompute out, or use weights='stash'"
        )
    given = request.given_sizes
    if given and plan is not None:
        raise PlanError(
            "give a plan, or the sizes of micro-batches, not both: a plan's field micro_batch_sizes says how many "
            "samples each micro-batch has"
        )
    if given and request.stages_are_auto:
        raise PlanError(
            f"micro_batches={list(given)} with stages='auto': planners know micro-batches of equal sizes only, so give "
            "stages (and replicas), or M as a number"
        )
    has_order = request.window is not None or not (request.micro_batches_are_auto or request.schedule_is_auto)
    if cluster is not None and (plan is not None or (has_order and not request.stages_are_auto)):
        raise PlanError(
            "a cluster is used for planning, but everything is given: leave the cluster out, or set stages, "
            'micro_batches or schedule to "auto"'
        )


def _is_list_of(kind: type, items: object) -> bool:
    return isinstance(items, Sequence) and not isinstance(items, str) and all(isinstance(item, kind) for item in items)
