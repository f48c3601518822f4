"""``dapple train`` as the ranks of a job, on a small model in float64."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.dapple_tf.builders import step_of
from tests.dapple_tf.distributed.programs.checkpoint_model import chain
from tests.processes import Rank

MODEL = "tests/dapple_tf/distributed/programs/checkpoint_model.py:chain"


def train_arguments(layout: str, steps: int, *options: object) -> list[str]:
    """Return Python's arguments for ``dapple train``; ``layout``: the replicas of each stage ("2,1")."""
    stages = str(layout.count(",") + 1)
    words = ["-m", "dapple_tf", "train", MODEL, "--stages", stages, "--replicas", layout, "--micro-batches", "2"]
    return [*words, "--steps", str(steps), "--json", *map(str, options)]


WINDOW_MODEL = MODEL.replace(":chain", ":straight")
LAYERS = {"1": "1", "1,1": "layer2", "2,1": "layer2", "1,1,1": "layer1,layer3"}
"""The stages of the model of windows, by layout: their number, or the layers that start all but the first."""


def window_arguments(layout: str, steps: int, *options: object) -> list[str]:
    """Return Python's arguments for ``dapple train`` in windows of four minibatches."""
    words = ["-m", "dapple_tf", "train", WINDOW_MODEL, "--stages", LAYERS[layout], "--replicas", layout]
    return [*words, "--async", "--minibatches", "4", "--steps", str(steps), "--json", *map(str, options)]


def saving_in(folder: Path, every: int = 3) -> list[str]:
    """Return the options that save checkpoints in ``folder``."""
    return ["--checkpoint-dir", str(folder), "--checkpoint-every", str(every)]


def model_options(**options: object) -> list[str]:
    """Return the options that call the model's function with these arguments."""
    return [word for name, value in options.items() for word in ("--set", f"{name}={value}")]


def printed_result(ranks: Sequence[Rank]) -> dict[str, Any]:
    """Return the JSON object that rank 0 printed last; the others must have printed nothing."""
    assert [rank.stdout for rank in ranks[1:]] == [""] * (len(ranks) - 1)
    assert not any("training" in rank.stderr for rank in ranks[1:])
    found = json.loads(ranks[0].stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder."""
    names = [path.name for path in folder.glob("checkpoint-*.safetensors")]
    return sorted(int(name.removeprefix("checkpoint-").removesuffix(".safetensors")) for name in names)


@functools.cache
def losses_of_one_process(steps: int) -> tuple[float, ...]:
    """Return the losses of an uninterrupted run on one device."""
    workload = chain()
    step = step_of(workload.loss_fn, optimizer=workload.optimizer, stages=1)
    return tuple(float(step(*batch)) for batch in itertools.islice(workload.dataset, steps))
