"""The options of ``dapple.pipeline``, declared once: their types, defaults, meanings, checks and command-line names.

The parameters of ``pipeline``, ``verify`` and ``dapple.keras.pipeline``, the command-line options, and the table in the
documentation are made from the fields of ``Options`` (see ``option_help``). ``OptionTypes`` repeats the types for type
checkers and editors; a test checks that the two agree.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from typing import Any, Literal, get_args

import numpy as np
from typing_extensions import TypedDict

from dapple_tf.autoplan.batch_fit import GivenSizes, are_counts, check_batch_size, check_given_sizes, count_samples
from dapple_tf.autoplan.recompute_option import Recompute, StageNumbers, is_recompute
from dapple_tf.autoplan.slice_option import SLICED_SCHEDULES, Slice, is_slice
from dapple_tf.errors import PlanError, ScheduleError
from dapple_tf.exactness import BatchLoss, BatchNorm, Inexact
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec
from dapple_tf.graph_passes.schedules.weight_versions import WeightPolicy
from dapple_tf.plan_check import check_inputs
from dapple_tf.plans import Plan, as_flag
from dapple_tf.profiler.cluster import Cluster
from dapple_tf.simulator.order import check_plannable
from dapple_tf.window_plan import USUAL_MINIBATCHES, Synchronous, Training, WindowPlan
from dapple_tf.wording import format_count

WINDOW_NOT_VERIFIED = (
    "an asynchronous window uses weights that are some updates old, so no step on one device equals it. Verify the "
    "same stages in a step, without this option: a window runs the same functions, and its order and the weights that "
    "it uses are proved before it runs"
)
"""Why asynchronous windows are not compared with one device, and what to do instead."""

_USUAL_MICRO_BATCHES = 8
"""The number of micro-batches if none is given; "auto" counts as this many, or fewer for a small batch."""

Mode = Literal["sync", "async"]
"""Synchronous training updates the weights once a step, asynchronous training after each minibatch of a window."""

SparseGradients = Literal["exact", "dense"]
"""The form in which the optimizer gets the gradient of a variable whose rows are looked up, such as an embedding."""

# Options that are only for asynchronous windows.
_WINDOW_OPTIONS = ("minibatches", "weights", "depth")
# Options that are only for synchronous steps.
_STEP_OPTIONS = ("schedule", "slice", "batch_loss", "batch_norm", "shard_optimizer")

Stages = int | Sequence[str] | Literal["auto"]
"""The number of stages, the names of the layers that start one, or "auto"."""

MicroBatches = int | GivenSizes | Literal["auto"]
"""M, "auto", or a list with the number of samples, or the share of the samples, of each micro-batch."""


class OptionTypes(TypedDict, total=False):
    """The types of the options, for functions that take them by name: ``**options: Unpack[OptionTypes]``."""

    stages: Stages
    replicas: Sequence[int] | None
    micro_batches: MicroBatches | None
    schedule: str
    recompute: Recompute
    plan: Plan | None
    inexact: Inexact
    batch_loss: BatchLoss
    batch_norm: BatchNorm
    jit_compile: bool | None
    slice: Slice
    mode: Mode
    minibatches: int | None
    weights: WeightPolicy | None
    depth: int | None
    sparse_gradients: SparseGradients
    elastic: bool
    snapshot_every: int | None
    shard_optimizer: bool
    devices: Sequence[str | int] | None
    cluster: Cluster | None


def _option(
    default: object,
    meaning: str,
    *,
    more: str = "",
    page: str = "",
    flag: str = "",
    accepts: Callable[[Any], bool] = lambda given: True,
    advice: str = "",
    repr: bool = True,
) -> Any:
    """Return the dataclass field that declares an option.

    ``meaning``: a sentence for ``--help`` and tables. ``more``: text that follows the sentence in docstrings. ``page``:
    the page and section of the guide about the option. ``flag``: its name on the command line, or "" if it has none.
    ``accepts``: a function that returns whether a value is valid, or raises an error that says why it is not.
    ``advice``: what the error message says to give instead of an invalid value. ``repr``: see ``dataclasses.field``.
    """
    about = {"meaning": meaning, "more": more, "page": page, "flag": flag, "accepts": accepts, "advice": advice}
    return field(default=default, metadata=about, repr=repr)


def _is_flag(given: object) -> bool:
    return isinstance(given, bool)


def _is_interval(given: object) -> bool:
    return given is None or (isinstance(given, int) and not isinstance(given, bool) and given >= 1)


def _is_stages(given: object) -> bool:
    return not isinstance(given, bool) and (isinstance(given, int) or given == "auto" or _is_list_of(str, given))


def _is_replicas(given: object) -> bool:
    return given is None or _is_list_of(int, given)


def _is_micro_batches(given: object) -> bool:
    if isinstance(given, Sequence) and not isinstance(given, str):
        check_given_sizes(given)
        return True
    return given is None or type(given) is int or (isinstance(given, str) and given == "auto")


def _is_schedule(given: object) -> bool:
    if isinstance(given, str) and given != "auto":
        ScheduleSpec.parse(given)
    return isinstance(given, str)


def _is_input(name: str, given: object) -> bool:
    """Return True if the option ``name`` is None or has the right type; else raise PlanError (see ``check_inputs``)."""
    if given is not None:
        check_inputs(**{name: given})
    return True


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a pipelined step, each given or left to its default.

    Raises PlanError for an invalid value, and ScheduleError for an unknown schedule or one that does not suit the given
    stages, replicas or micro-batches. ``check_contradictions`` finds options that cannot be given together.
    """

    stages: Stages = _option(
        "auto",
        'The number of stages, the names of the layers that start one, or "auto": a planner chooses.',
        more='With "auto" the model is profiled, and planned for ``cluster`` or the devices at hand.',
        page="wrap.md#stages",
        flag="--stages",
        accepts=_is_stages,
        advice="give a number, a list of layer names, or 'auto'",
    )
    replicas: Sequence[int] | None = _option(
        None,
        "How many devices share each stage; where devices run several stages, how many share each group of stages.",
        more="Such as [2, 1].",
        page="wrap.md#replicas",
        flag="--replicas",
        accepts=_is_replicas,
        advice="give one whole number for each stage, such as [2, 1]",
    )
    micro_batches: MicroBatches | None = _option(
        None,
        'Into how many micro-batches, M, each batch is cut, or "auto" (the default where the stages are "auto", '
        "else 8); or how many samples each has, or its share of them.",
        more="Such as [2, 2, 4] of a first batch of 8, or [0.25, 0.25, 0.5]. Batches of another size are cut in "
        "the same proportion, or into equal micro-batches where one would be too small. Sizes need ``stages`` (or "
        '``replicas``). With ``mode="async"`` only for "2bw": how many a minibatch is cut into, by default the '
        "number of stages.",
        page="schedules.md#micro-batches-of-given-sizes",
        flag="--micro-batches",
        accepts=_is_micro_batches,
        advice="give a whole number, 'auto', or a list of the samples or shares of each micro-batch",
    )
    schedule: str = _option(
        "auto",
        'The schedule by name, the actions of every device, or "auto": a simulator chooses.',
        more='"gpipe", "dapple-a" (or "1f1b"), "dapple-b", "zb-h1", "zb-h2" (each with ":D=n": memory holds n '
        'micro-batches); "interleaved-1f1b", "interleaved-zb" and "looped-bfs", whose devices run two stages each '
        '(or n, with ":v=n"); "zb-v", "dualpipe-v" and "hanayo:w=n", whose stages go over the devices and back; '
        '"zb-auto", searched for; "K=3,2,1", the warm-up of each stage; or actions such as "0F0 0F1 0B0 0B1; 1F0 '
        '1B0 1F1 1B1".',
        page="schedules.md",
        flag="--schedule",
        accepts=_is_schedule,
        advice="give a name, such as 'dapple-a'",
    )
    recompute: Recompute = _option(
        False,
        "Layers whose activations are not kept: backward computes them again, which saves memory and takes time.",
        more='Give True or "all", one flag for each stage, or the names of layers.',
        page="memory.md",
        flag="--recompute",
        accepts=is_recompute,
        advice="give True ('all') or False ('none'), one flag for each stage, such as [True, False], or layer names, "
        "such as ['block_2']",
    )
    plan: Plan | None = _option(
        None,
        "A plan that a planner made, in place of stages, replicas, micro_batches, schedule and recompute.",
        page="plan.md",
        flag="--plan",
        accepts=partial(_is_input, "plan"),
        repr=False,
    )
    inexact: Inexact = _option(
        "error",
        'What to do where a step would differ from one device\'s: "error", "warn" (train on, with a warning '
        'that says why) or "allow".',
        more="See ``step.exactness``.",
        page="exactness.md#what-couples-samples",
        accepts=get_args(Inexact).__contains__,
        advice="give one of 'error', 'warn', 'allow'",
    )
    batch_loss: BatchLoss = _option(
        False,
        "Whether a loss that is no sum or mean over samples (contrastive, Dice, a correlation) is computed once, "
        'on the whole batch: True, False, or "auto", where the loss does not add up and the schedule allows it.',
        more="The model is then cut after the last tensors that hold a row for each sample; what follows runs "
        "once a step on the rows of all micro-batches, and backward starts when it has. That needs the schedule "
        '"gpipe", and memory for the activations of all micro-batches.',
        page="exactness.md#losses-that-do-not-add-up",
        accepts=(False, True, "auto").__contains__,
        advice="give False, True or 'auto'",
    )
    batch_norm: BatchNorm = _option(
        "micro-batch",
        "Over which samples batch norm takes statistics in training: those of a micro-batch on one replica "
        "(micro-batch); the same, with moving statistics of the whole batch (deferred); those of a micro-batch on "
        "all replicas (sync).",
        more='With "micro-batch" each micro-batch moves the moving statistics in turn, and replicas are averaged; '
        'with "deferred" they move once a step, by mean and variance over the whole batch.',
        page="exactness.md#batch-norm",
        flag="--batch-norm",
        accepts=get_args(BatchNorm).__contains__,
        advice="give one of 'micro-batch', 'deferred', 'sync'",
    )
    jit_compile: bool | None = _option(
        None,
        "Whether XLA compiles the functions of the stages, as far as it can; by default if the loss is a "
        "tf.function with jit_compile=True.",
        more="A warning names the functions that run without it.",
        page="wrap.md#xla",
        flag="--jit-compile/--no-jit-compile",
        accepts=(None, True, False).__contains__,
        advice="give True, False, or None to follow the loss function",
    )
    slice: Slice = _option(
        None,
        "How many of the first micro-batches of 1F1B run their forwards in two halves, so that the last stage "
        'starts in half the time (AutoPipe\'s Slicer): a number, or "auto".',
        more='For 1F1B ("dapple-a") with three stages or more.',
        page="schedules.md#sliced-micro-batches",
        flag="--slice",
        accepts=is_slice,
        advice="give the number of micro-batches to slice, or 'auto'",
    )
    mode: Mode = _option(
        "sync",
        '"sync": weights change once a step, as on one device; "async": a call takes a window of minibatches, '
        "each of which updates the weights, and the pipeline is not flushed between them (PipeDream).",
        more="Replicas of a stage take minibatches in turn. The call returns the mean of the minibatches' losses, "
        "which are in ``step.losses``.",
        page="asynchronous.md",
        flag="--async",
        accepts=get_args(Mode).__contains__,
        advice="give 'sync' or 'async'",
    )
    minibatches: int | None = _option(
        None,
        f"How many minibatches, W, a window has (by default {USUAL_MINIBATCHES}): each has N / W of its N samples.",
        more="Minibatch m has the rows [N m / W, N (m + 1) / W). A multiple of each stage's replicas.",
        page="asynchronous.md",
        flag="--minibatches",
    )
    weights: WeightPolicy | None = _option(
        None,
        "Which version of the weights a minibatch uses: on each stage the newest at its forward, in backward too "
        "(stash, the default); on all stages the one that the first stage had (vertical-sync); one of two "
        "versions, with minibatches cut into micro-batches (2bw); the newest at any time, which gives no valid "
        "gradient (latest).",
        page="asynchronous.md",
        flag="--weights",
    )
    depth: int | None = _option(
        None,
        "Minibatches in flight on the first stage of a window, without replicas; by default as many as keep all "
        "stages busy.",
        page="asynchronous.md",
        flag="--depth",
    )
    sparse_gradients: SparseGradients = _option(
        "exact",
        "What the optimizer gets of a variable that is used by its rows, such as an embedding: the "
        'tf.IndexedSlices of one device ("exact"), or a tensor of the variable\'s shape ("dense").',
        page="exactness.md#sparse-gradients",
        accepts=get_args(SparseGradients).__contains__,
        advice="give 'exact' (the optimizer gets an embedding's gradient as on one device) or 'dense' (it gets a "
        "dense tensor)",
    )
    elastic: bool = _option(
        False,
        "Whether to make a new plan if the job has another number of ranks than the stages or the plan need, instead "
        "of ending with an error.",
        more="For jobs that are started again with the ranks that are left.",
        page="elastic.md",
        flag="--elastic",
        accepts=_is_flag,
        advice="give True or False",
    )
    snapshot_every: int | None = _option(
        None,
        "After each N steps, copy the state of the run into the memory of its hosts, each stage's state to two "
        "hosts. The loss of one host then costs about N steps.",
        more="While further steps run. ``dapple.Checkpoints`` of the step takes the snapshots and restores them.",
        page="elastic.md#snapshots",
        flag="--snapshot-every",
        accepts=_is_interval,
        advice="give a number of steps, at least 1, or None",
    )
    shard_optimizer: bool = _option(
        False,
        "Whether the replicas of a stage share the optimizer's slots out among them: each updates some of the "
        "stage's variables, and the others get their new values (ZeRO, stage 1).",
        more="A step computes the same and moves the same bytes. Whole variables are shared out, so shares are as "
        "even as their sizes allow.",
        page="memory.md#sharded-optimizer",
        flag="--shard-optimizer",
        accepts=_is_flag,
        advice="give True or False",
    )
    devices: Sequence[str | int] | None = _option(
        None, 'Names or indices of the devices to use, such as ["GPU:0", "GPU:1"].', repr=False
    )
    cluster: Cluster | None = _option(
        None,
        'The servers and links to plan for, where stages, micro-batches or schedule are "auto".',
        more="The plan is made from a profile that is measured now; ``step.choice`` says why it was chosen.",
        page="plan.md",
        flag="--cluster",
        accepts=partial(_is_input, "cluster"),
        repr=False,
    )

    def __post_init__(self) -> None:
        for declared in fields(self):
            given = _as_python(getattr(self, declared.name))
            given = as_flag(given) if declared.name == "recompute" else given
            object.__setattr__(self, declared.name, given)
            if not declared.metadata["accepts"](given):
                raise PlanError(f"{declared.name}={given!r}: {declared.metadata['advice']}")
        if self.window is not None and self.replicas and min(self.replicas) > 0:  # 0 is refused later
            self.window.versions(self.replicas)
        if self.spec is not None and (self.stages_are_auto or self.micro_batches_are_auto):
            check_plannable(self.spec)
        if self.given_sizes:
            self._check_sizes_fit()
        if isinstance(self.stages, int) and self.stages > 0 and self.spec is not None:
            self._check_stages_fit(self.spec, self.stages)

    def _check_sizes_fit(self) -> None:
        """Raise PlanError or ScheduleError if the given micro-batch sizes contradict the replicas or the schedule."""
        given, count = self.given_sizes, len(self.given_sizes)
        if self.replicas and are_counts(given):
            sizes = tuple(map(int, given))
            check_batch_size(sum(sizes), count, self.replicas, sizes)
        own = self.spec.micro_batches if self.spec is not None else None
        if own not in (None, count):
            raise ScheduleError(
                f"the schedule's text is for {format_count(own, 'micro-batch')}, but micro_batches={list(given)} are "
                f"{count}: give a size for each, or another schedule"
            )

    def _check_stages_fit(self, spec: ScheduleSpec, stages: int) -> None:
        """Raise ScheduleError or PlanError if the schedule does not suit the number of stages, M or the replicas."""
        if not self.micro_batches_are_auto:
            spec.check(stages, self.count_micro_batches(0))
        workers = spec.worker_map(stages).workers
        if self.replicas is not None:
            check_worker_count(self.replicas, stages, workers)

    @property
    def stages_are_auto(self) -> bool:
        """Whether a planner chooses stages and replicas."""
        return self.stages == "auto" and self.replicas is None

    @property
    def micro_batches_are_auto(self) -> bool:
        """Whether the simulator chooses M."""
        return self.wanted_micro_batches == "auto"

    @property
    def spec(self) -> ScheduleSpec | None:
        """The schedule, or None if the simulator chooses it. With ``slice`` the schedule "auto" is 1F1B."""
        if self.schedule == "auto":
            return None if self.slice is None else ScheduleSpec.parse("dapple-a")
        return ScheduleSpec.parse(self.schedule)

    @property
    def wanted_micro_batches(self) -> MicroBatches:
        """M, "auto" or sizes; by default "auto" if the stages are "auto", else 8. In asynchronous windows 1."""
        if self.window is not None:
            return 1
        if self.micro_batches is None:
            return "auto" if self.stages_are_auto and self.plan is None else _USUAL_MICRO_BATCHES
        return self.micro_batches

    @cached_property
    def window(self) -> WindowPlan | None:
        """The settings of asynchronous windows, or None for synchronous training.

        Options that were not given are taken from the window of ``plan``, if it has one.
        """
        if self.mode == "sync":
            return None
        names = ("minibatches", "weights", "depth", "micro_batches")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        planned = self.plan.window if self.plan is not None else None
        return dataclasses.replace(planned or WindowPlan(USUAL_MINIBATCHES), **given)

    @property
    def training(self) -> Training:
        """The training mode: ``Synchronous``, or the ``WindowPlan`` of asynchronous windows."""
        return self.window or Synchronous()

    def open_to_new_plan(self) -> Options:
        """Return these options without stages, replicas and schedule, so that a planner chooses them again.

        M is kept, since results may depend on it: batch norm takes statistics of each micro-batch. The settings of
        windows are kept too, except the depth.
        """
        wanted: MicroBatches | None = self.plan.micro_batches if self.plan is not None else self.wanted_micro_batches
        settings: dict[str, Any] = {"micro_batches": len(self.given_sizes) if self.given_sizes else wanted}
        if (window := self.window) is not None:
            names = ("micro_batches", "minibatches", "weights")
            settings = {name: getattr(window, name) for name in names} | {"depth": None}
        recompute = bool(self.plan.recompute) if self.plan is not None else self.recompute
        if isinstance(recompute, StageNumbers) or (not isinstance(recompute, bool) and not _is_list_of(str, recompute)):
            recompute = False  # it is for given stages, which the new plan may not have
        return dataclasses.replace(
            self, stages="auto", replicas=None, plan=None, schedule="auto", slice=None, recompute=recompute, **settings
        )

    def forward_only(self) -> Options:
        """Return these options for a function that only runs forward, without those for training and planning."""
        return dataclasses.replace(
            self,
            plan=None,
            cluster=None,
            micro_batches=self.wanted_micro_batches,
            slice=None,
            mode="sync",
            minibatches=None,
            weights=None,
            depth=None,
        )

    @property
    def can_run_uncut(self) -> bool:
        """Whether each batch may be one micro-batch on one replica: the options say so, or leave M and replicas open.

        M does not count as open if inexact steps are allowed, or if the given schedule is for a certain M.
        """
        left_open = (
            self.micro_batches_are_auto and self.inexact == "error" and not (self.spec and self.spec.micro_batches)
        )
        one = left_open or self.wanted_micro_batches == 1 or len(self.given_sizes) == 1
        return self.window is None and one and max(self.replicas or (1,)) == 1

    @property
    def keeps_sparse_gradients(self) -> bool:
        """Whether the optimizer gets sparse gradients of embeddings, as on one device."""
        return self.sparse_gradients == "exact"

    def count_micro_batches(self, samples: int, replicas: int = 1) -> int:
        """Return M for a batch of ``samples``; if M is "auto", 8, or fewer for a small batch.

        ``replicas``: the largest number of replicas of a stage; each replica needs a sample.
        """
        if self.given_sizes:
            return len(self.given_sizes)
        if isinstance(self.wanted_micro_batches, int):
            return self.wanted_micro_batches
        return max(1, min(_USUAL_MICRO_BATCHES, samples // replicas))

    @property
    def given_sizes(self) -> GivenSizes:
        """The samples or shares of each micro-batch; empty where ``micro_batches`` is a number or "auto"."""
        wanted = self.wanted_micro_batches
        return () if isinstance(wanted, int | str) else wanted

    def sizes(self, samples: int) -> tuple[int, ...]:
        """Return the samples of each micro-batch of a first batch of ``samples``; empty if micro-batches are equal.

        Raises PlanError if given sizes do not add up to ``samples``.
        """
        found = count_samples(self.given_sizes, samples) if self.given_sizes else ()
        return found if len(set(found)) > 1 else ()

    def largest_micro_batch(self, samples: int) -> int:
        """Return approximately the samples of the largest micro-batch of a batch of ``samples``."""
        if self.given_sizes:
            return math.ceil(samples * max(self.given_sizes) / math.fsum(self.given_sizes))
        return samples // max(1, self.count_micro_batches(samples) * self.training.parts)


# --- Refuse options that contradict each other


def _recomputes_with_newer_weights(options: Options) -> bool:
    recompute = options.recompute or (options.plan is not None and options.plan.recompute)
    return options.window is not None and options.window.weights == "latest" and bool(recompute)


def _leaves_nothing_to_plan(options: Options) -> bool:
    has_order = options.window is not None or not (options.micro_batches_are_auto or options.spec is None)
    return options.plan is not None or (has_order and not options.stages_are_auto)


_CONTRADICTIONS: tuple[tuple[Callable[[Options], bool], str], ...] = (
    (
        lambda o: o.slice is not None and o.schedule not in SLICED_SCHEDULES,
        "slice={0.slice!r} with schedule {0.schedule!r:.62}: only the forwards of 1F1B ('dapple-a') are sliced; leave "
        "one of them out",
    ),
    (
        lambda o: o.slice is not None and o.batch_loss is True,
        "slice={0.slice!r} with batch_loss=True, which needs schedule 'gpipe': leave one of them out",
    ),
    (
        lambda o: o.slice is not None and o.micro_batches_are_auto,
        "slice={0.slice!r} with micro_batches='auto': give a number, of which some are sliced",
    ),
    (
        lambda o: o.plan is not None and (o.stages != "auto" or o.replicas is not None),
        "give a plan, or stages and replicas, not both",
    ),
    (
        lambda o: o.plan is not None and bool(o.recompute),
        "give a plan, or recompute, not both: a plan's field recompute says which layers are re-computed",
    ),
    (
        lambda o: o.plan is not None and o.slice is not None,
        "give a plan, or slice, not both: a plan's schedule and micro_batch_sizes say what is sliced",
    ),
    (
        lambda o: o.slice is not None and o.stages_are_auto,
        "slice={0.slice!r} with stages='auto': give a number, or the layers that start a stage",
    ),
    (
        lambda o: o.plan is not None and bool(o.plan.virtual_workers),
        "the plan has virtual workers, each of which cuts the model in its own way: a "
        "layer would have its weights in several stages, which is simulated but does not run; make a plan with "
        "planner 'best', or with planner 'hetpipe' and policy='ED', whose virtual workers may be equal",
    ),
    (
        lambda o: o.plan is not None and o.plan.window is not None and o.window is None,
        "the plan is for asynchronous windows of {0.plan.window.minibatches} minibatches: give mode='async' (on the "
        "command line --async) to train in them, or another plan",
    ),
    (
        _recomputes_with_newer_weights,
        "weights='latest' with recompute: backward would compute the activations again with newer weights than "
        "forward used; leave recompute out, or use weights='stash'",
    ),
    (
        lambda o: bool(o.given_sizes) and o.plan is not None,
        "give a plan, or the sizes of micro-batches, not both: a plan's field micro_batch_sizes says how many samples "
        "each micro-batch has",
    ),
    (
        lambda o: bool(o.given_sizes) and o.stages_are_auto,
        "micro_batches={0.micro_batches} with stages='auto': planners know micro-batches of equal sizes only, so give "
        "stages (and replicas), or M as a number",
    ),
    (
        lambda o: o.cluster is not None and not o.elastic and _leaves_nothing_to_plan(o),
        "a cluster is used for planning, but everything is given: leave the cluster out, or set stages, micro_batches "
        'or schedule to "auto"',
    ),
)
"""Pairs of a function that returns whether options contradict each other, and a message: a format string of them."""


def check_contradictions(options: Options) -> None:
    """Raise PlanError if some of the options cannot be given together."""
    for name in _WINDOW_OPTIONS:
        if options.mode == "sync" and (given := getattr(options, name)) is not None:
            raise PlanError(f"{name}={given!r} is for asynchronous windows: give mode='async' too, or leave it out")
    for name in _STEP_OPTIONS:
        default = Options.__dataclass_fields__[name].default
        if options.mode == "async" and (given := getattr(options, name)) != default:
            raise PlanError(f"{name}={given!r} with mode='async': windows have an order of their own; leave it out")
    for contradicts, message in _CONTRADICTIONS:
        if contradicts(options):
            raise PlanError(message.format(options))


def check_worker_count(replicas: Sequence[int], stages: int, workers: int) -> None:
    """Raise PlanError unless there is a number of replicas for each worker."""
    if len(replicas) != workers:
        names = format_count(len(replicas), "stage" if workers == stages else "worker")
        of = "" if workers == stages else f" for {format_count(stages, 'stage')}"
        raise PlanError(f"replicas={list(replicas)} names {names}{of}, but there are {workers}")


def _as_python(given: Any) -> Any:
    """Return the value of an option with NumPy's numbers converted to Python's, also in lists and tuples."""
    if isinstance(given, list):
        return [_as_python(item) for item in given]
    if isinstance(given, tuple):
        return tuple(_as_python(item) for item in given)
    return given.item() if isinstance(given, np.number) else given


def _is_list_of(kind: type, items: object) -> bool:
    return isinstance(items, Sequence) and not isinstance(items, str) and all(isinstance(item, kind) for item in items)
