"""Published figures of the DAPPLE paper's models (Tables II, V and VII), and its layer counts on the profile files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from dapple_tf.planner.baselines import data_parallel, even_pipeline
from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.plans import StagePlan
from dapple_tf.profiler.importers import read_graph_file
from dapple_tf.profiler.profile import Profile

PROFILES = Path(__file__).parents[3] / "shared" / "profiles"


@dataclass(frozen=True)
class Model:
    """A model of the paper and its profile file.

    ``units``: a pattern for the names of the layers that the paper counts. ``global_batch``: samples (Table V).
    ``slots``: values that the optimizer keeps per weight. ``memory``: bytes of one device that trains one batch of the
    profile's size (Table II). ``size_scale``, ``batch``: see ``read_graph_file``.
    """

    title: str
    file: str
    units: str
    global_batch: int
    slots: int
    memory: float
    size_scale: float = 1.0
    batch: int | None = None

    @property
    def profile_batch(self) -> int:
        """Samples of the batch that the profile was measured with."""
        return read_profile(self).batch_size


VGG = Model("VGG-19", "vgg-19-pbs-32", r"Conv|FC|Prediction", 2048, 0, 5.6e9, size_scale=1.048576)
GNMT = Model("GNMT-16", "gnmt-16-pbs-64", r"(EmuBidir|node\d+ )?LSTM|RecurrentAttention", 1024, 2, 3.9e9)
BERT = Model("BERT-48", "bert-48-pbs-2", r"layer_", 64, 2, 11.4e9)
XLNET = Model("XLNet-36", "xlnet-36-pbs-1", r"Layer_", 128, 2, 12e9)
AMOEBA = Model("AmoebaNet-36", "amoeba-36-pbs-1", r"cell_\d", 128, 2, 20e9)
# DAPPLE's profiles have no ResNet-50; PipeDream's has one, with Table II's batch.
RESNET = Model("ResNet-50", "pipedream/resnet50", r"Conv2d|Linear", 2048, 1, 1e9, batch=128)
# Not in Table II, but its layers are BERT-48's: 5.4 GB of weights and slots, and as there 5.5 times the outputs.
BERT_LARGE = Model("BERT-Large", "bert-24-pbs-6", r"layer_", 128, 2, 7.2e9)

MODELS = (VGG, GNMT, BERT, XLNET, AMOEBA)


@dataclass(frozen=True)
class Published:
    """A row of Table V: the output plan, the split position (of two stages) and the ACR, as printed.

    ``units``: the counted layers of the first stage, where the split position does not say it.
    """

    model: Model
    config: str
    plan: str
    split: str = ""
    acr: float | None = None
    units: int | None = None

    @property
    def first_units(self) -> int:
        """The number of counted layers in the first of two stages."""
        return int(self.split.split(":")[0]) if self.units is None else self.units


TABLE_5 = (
    Published(VGG, "a", "DP"),
    Published(VGG, "b", "DP"),
    # By section VI.C the cut is between the 16 convolutions and the 3 fully connected layers, where 3 MB cross. In
    # weight layers that is 16:3, not the printed 13:6, where 13 MB would cross.
    Published(VGG, "c", "15:1", "13:6", 0.40, units=16),
    Published(GNMT, "a", "8:8", "9:7", 0.10),
    Published(GNMT, "b", "8:8", "9:7", 0.10),
    Published(GNMT, "c", "straight", "", 3.75),
    Published(BERT, "a", "8:8", "23:25", 0.06),
    Published(BERT, "b", "straight", "", 0.50),
    Published(BERT, "c", "straight", "", 1.25),
    Published(XLNET, "a", "8:8", "18:18", 0.03),
    Published(XLNET, "b", "8:8", "18:18", 0.03),
    Published(XLNET, "c", "straight", "", 0.67),
    Published(AMOEBA, "a", "8:8", "24:12", 0.18),
    Published(AMOEBA, "b", "11:5", "27:9", 0.14),
    Published(AMOEBA, "c", "11:5", "27:9", 0.35),
    Published(RESNET, "a", "DP"),
    Published(RESNET, "b", "DP"),
    Published(RESNET, "c", "DP"),
)


@dataclass(frozen=True)
class Strategies:
    """A row of Table VII, for two servers of Config A: DAPPLE's and PipeDream's plans.

    A plan is the layers that start a stage, and the replicas of each stage; ``pipedream`` None is a straight pipeline.
    ``renumbered``: an offset to the printed layers, since BERT-Large has 27 layers there (29 in the file: four before
    the encoder, not two), and XLNet-36 has 42 (43).
    """

    model: Model
    global_batch: int
    dapple: tuple[tuple[int, ...], tuple[int, ...]]
    pipedream: tuple[tuple[int, ...], tuple[int, ...]] | None
    renumbered: int = 0


TABLE_7 = (
    Strategies(VGG, 1024, ((17,), (14, 2)), ((11, 17, 19), (8, 6, 1, 1))),
    Strategies(AMOEBA, 128, ((31,), (8, 8)), None),
    Strategies(BERT_LARGE, 128, ((14,), (8, 8)), ((4, 13, 16, 19, 22), (2, 6, 2, 2, 2, 2)), renumbered=2),
    Strategies(XLNET, 128, ((23,), (8, 8)), None, renumbered=1),
)


def find_missing_profiles() -> str:
    """Return why the benchmarks on the published profiles cannot run here; "" if they can."""
    absent = [m.file for m in (*MODELS, BERT_LARGE, RESNET) if not (PROFILES / f"{m.file}.txt").is_file()]
    return f"skipped: ../shared/profiles lacks {', '.join(absent)}" if absent else ""


@cache
def read_profile(model: Model) -> Profile:
    """Return the profile in the model's file."""
    return read_graph_file(PROFILES / f"{model.file}.txt", model.batch, model.size_scale)


@cache
def read_calibrated(model: Model) -> Profile:
    """Return the profile with the stash that Table II implies."""
    return calibrate_stash(read_profile(model), model.memory, model.slots)


def calibrate_stash(profile: Profile, memory: float, slots: int) -> Profile:
    """Return the profile with its stash enlarged, so that one device with one batch of it holds ``memory`` bytes.

    The graph.txt files hold the outputs of layers, but not all that their backward keeps. The difference is added to
    the layers that have a backward, in proportion to their outputs. Where weights, slots and outputs exceed ``memory``
    already (GNMT-16 at 16 bytes per parameter), the stash is not changed.
    """
    fixed = sum(layer.parameter_bytes for layer in profile.layers) * (2 + slots)
    stash = sum(layer.stash_bytes for layer in profile.layers)
    lacking = max(0.0, memory - fixed - stash - float(profile.working_bytes().max()))
    growing = sum(layer.stash_bytes for layer in profile.layers if layer.backward_seconds)
    layers = tuple(
        replace(layer, stash_bytes=layer.stash_bytes * (1 + lacking / growing)) if layer.backward_seconds else layer
        for layer in profile.layers
    )
    return replace(profile, layers=layers)


def count_units(model: Model, profile: Profile, stages: Sequence[StagePlan]) -> tuple[int, ...]:
    """Return how many of the layers that the paper counts each stage holds."""
    places = _units(model, profile)
    return tuple(sum(stage.first_layer <= p <= stage.last_layer for p in places) for stage in stages)


def find_cut(model: Model, problem: PlanningProblem, units: int) -> int:
    """Return the layer that starts a stage after ``units`` of the layers that the paper counts.

    Of the cuts between that layer and the next counted one, it is the first that the fewest bytes cross.
    """
    places = _units(model, problem.profile)
    crossing = problem.profile.crossing_bytes()
    cuts = [p for p in problem.chain.positions if places[units - 1] < p <= places[units]]
    return min(cuts, key=lambda p: (crossing[p - 1], p))


def published_stages(row: Published, problem: PlanningProblem) -> tuple[StagePlan, ...]:
    """Return the plan of a row, on the devices in order.

    The split of a straight plan is not printed: GNMT-16 has one LSTM layer per stage (section VI.B); others are even.
    """
    devices = problem.cluster.devices
    if row.plan == "DP":
        return data_parallel(problem)
    if row.plan == "straight":
        if row.model is not GNMT:
            return even_pipeline(problem, devices)
        starts = [find_cut(row.model, problem, units) for units in range(1, devices)]
        return stages_of(problem, starts, [1] * devices)
    replicas = [int(r) for r in row.plan.split(":")]
    return stages_of(problem, [find_cut(row.model, problem, row.first_units)], replicas)


def stages_of(problem: PlanningProblem, starts: Sequence[int], replicas: Sequence[int]) -> tuple[StagePlan, ...]:
    """Return stages that start at layer 0 and ``starts``, with these replicas, on the devices in order."""
    bounds = [0, *starts, len(problem.profile.layers)]
    stages, device = [], 0
    for first, end, r in zip(bounds, bounds[1:], replicas, strict=False):
        stages.append(StagePlan(first, end - 1, tuple(range(device, device + r))))
        device += r
    return tuple(stages)


def _units(model: Model, profile: Profile) -> list[int]:
    return [i for i, layer in enumerate(profile.layers) if re.match(model.units, layer.name)]
