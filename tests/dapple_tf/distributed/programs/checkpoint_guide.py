"""Run the training loop of the guide to checkpoints, interrupted and resumed, alone or as ranks.

Usage: ``checkpoint_guide.py FOLDER``.
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

import keras

import dapple_tf as dapple
from tests.equality.small_models import chain, data, values, weights
from tests.paths import ROOT

GUIDE = ROOT / "docs" / "guide" / "checkpoints.md"


def example() -> str:
    """Return the program that the guide shows."""
    blocks: list[str] = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    (found,) = (block for block in blocks if "dapple.Checkpoints(" in block)
    return found


def run(batches: int) -> tuple[int, list[Any]]:
    """Run it on ``batches`` batches in this folder; return the steps that it found done, and the weights at the end."""
    matrices = weights(3)
    names: dict[str, Any] = {
        "dapple": dapple,
        "loss_fn": chain(matrices),
        "optimizer": keras.optimizers.Adam(0.01),
        "batches": [data(8, seed) for seed in range(batches)],
    }
    exec(example(), names)
    names["step"].gather()
    return names["done"].steps, values(matrices)


def main(folder: str) -> None:
    """Run twice in ``folder``; print the step at which the second run began, and the weights at its end."""
    dapple.init()
    os.chdir(folder)
    run(130)
    done, trained = run(160)
    print(json.dumps([done, [value.tolist() for value in trained]]))


if __name__ == "__main__":
    main(sys.argv[1])
