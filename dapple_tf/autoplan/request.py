"""The options of a plan as the user gave them: each given, or left to "auto"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dapple_tf.autoplan.recompute_option import Recompute, check_recompute
from dapple_tf.errors import PlanError
from dapple_tf.exactness import BatchLoss, BatchNorm, Inexact, check_batch_loss, check_batch_norm, check_inexact
from dapple_tf.plan import Plan
from graph_passes.schedules.policies import abbreviate_schedule, check_schedule_name, runs_several_stages
from profiler.cluster import Cluster

# M of a batch that has the samples, before the simulator has chosen it.
_USUAL_MICRO_BATCHES = 8
_SPARSE_GRADIENTS = ("exact", "dense")


@dataclass(frozen=True)
class Request:
    """The options of ``dapple.pipeline`` that shape its plan.

    ``stages``: a number, the names of the layers that start a stage, or "auto". With ``replicas`` (devices of each
    stage), "auto" means one stage per entry; without, a planner chooses both. ``micro_batches``: M, or "auto".
    ``schedule``: a name, or "auto". ``recompute``: see ``recompute_option``. ``sparse_gradients``: "exact" or
    "dense". ``inexact``, ``batch_loss`` and ``batch_norm``: see ``exactness``. ``jit_compile``: whether XLA compiles
    stage functions; None follows the loss function. Raises PlanError for a value of the wrong type, ScheduleError for
    an unknown schedule, and UsageError for what does not exist yet.
    """

    stages: int | Sequence[str] | str = "auto"
    replicas: Sequence[int] | None = None
    micro_batches: int | str = 8
    schedule: str = "auto"
    recompute: Recompute = False
    sparse_gradients: str = "exact"
    inexact: Inexact = "error"
    batch_loss: BatchLoss = False
    batch_norm: BatchNorm = "micro-batch"
    jit_compile: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.micro_batches, int) and self.micro_batches != "auto":
            raise PlanError(f"micro_batches={self.micro_batches!r}: give a whole number, or 'auto'")
        if not isinstance(self.schedule, str):
            raise PlanError(f"schedule={self.schedule!r}: give a name, such as 'dapple-a'")
        if not self.schedule_is_auto:
            check_schedule_name(self.schedule)
        if self.replicas is not None and not _is_list_of(int, self.replicas):
            raise PlanError(f"replicas={self.replicas!r}: give one whole number for each stage, such as [2, 1]")
        if not isinstance(self.stages, int) and self.stages != "auto" and not _is_list_of(str, self.stages):
            raise PlanError(f"stages={self.stages!r}: give a number, a list of layer names, or 'auto'")
        if not self.schedule_is_auto and runs_several_stages(self.schedule):
            self._check_several_stages()
        check_recompute(self.recompute)
        check_inexact(self.inexact)
        check_batch_loss(self.batch_loss)
        check_batch_norm(self.batch_norm)
        if self.jit_compile not in (None, True, False):
            raise PlanError(f"jit_compile={self.jit_compile!r}: give True, False, or None to follow the loss function")
        if self.sparse_gradients not in _SPARSE_GRADIENTS:
            raise PlanError(
                f"sparse_gradients={self.sparse_gradients!r}: give 'exact' (the optimizer gets an embedding's gradient "
                "as on one device) or 'dense' (it gets a dense tensor)"
            )

    def _check_several_stages(self) -> None:
        """Raise PlanError for what cannot be chosen under a schedule with several stages per device."""
        for name, what in (("stages", "the number of stages, or their layers"), ("micro_batches", "a number")):
            if getattr(self, name) == "auto":
                raise PlanError(
                    f"{name}='auto' with schedule {abbreviate_schedule(self.schedule)}, which runs several stages on a "
                    f"device: planners know one stage per device only, so give {what}"
                )

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
        return self.schedule == "auto"

    @property
    def keeps_slices(self) -> bool:
        """Whether the gradients of embeddings stay sparse."""
        return self.sparse_gradients == "exact"

    def count_micro_batches(self, samples: int, replicas: int = 1) -> int:
        """Return M for a batch of ``samples``; where M is "auto", 8, or fewer if the batch is too small for 8.

        ``replicas``: the largest number of replicas of a stage, each of which needs a sample.
        """
        if isinstance(self.micro_batches, int):
            return self.micro_batches
        return max(1, min(_USUAL_MICRO_BATCHES, samples // replicas))


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
    nothing_is_auto = not (request.stages_are_auto or request.micro_batches_are_auto or request.schedule_is_auto)
    if cluster is not None and (plan is not None or nothing_is_auto):
        raise PlanError(
            "a cluster is used for planning, but everything is given: leave the cluster out, or set stages, "
            'micro_batches or schedule to "auto"'
        )


def _is_list_of(kind: type, items: object) -> bool:
    return isinstance(items, Sequence) and not isinstance(items, str) and all(isinstance(item, kind) for item in items)
