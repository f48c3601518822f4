"""The README's example of checkpoints, interrupted and resumed, alone or as ranks: ``readme_example.py FOLDER``."""

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

README = ROOT / "README.md"


def example() -> str:
    """The program that the README shows."""
    blocks: list[str] = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (found,) = (block for block in blocks if "dapple.Checkpoints(" in block)
    return found


def run(batches: int) -> tuple[int, list[Any]]:
    """Run it on so many batches, in this folder: the steps it found done, and the weights at the end."""
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
    """Print what the second of two runs began and ended with."""
    dapple.init()
    os.chdir(folder)
    run(130)
    done, trained = run(160)
    print(json.dumps([done, [value.tolist() for value in trained]]))


if __name__ == "__main__":
    main(sys.argv[1])
