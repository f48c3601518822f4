"""Run the training loop of the guide to checkpoints, interrupted and resumed, alone or as ranks.

Usage: ``checkpoint_guide.py FOLDER``.
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

import numpy as np

import dapple_tf as dapple
from tests.paths import ROOT

GUIDE = ROOT / "docs" / "guide" / "checkpoints.md"


def example() -> str:
    """Return the program that the guide shows."""
    blocks: list[str] = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    (found,) = (block for block in blocks if "dapple.Checkpoints(" in block)
    return found


def run(repeats: int) -> tuple[int, Any]:
    """Run it on its batches, repeated so often, in this folder.

    Return the steps that it found done, and the weights at the end.
    """
    program = example()
    assert program.count("] * 10\n") == 1
    names: dict[str, Any] = {}
    exec(program.replace("] * 10\n", f"] * {repeats}\n"), names)
    names["step"].gather()
    return names["done"].steps, np.concatenate([np.ravel(weight) for weight in names["model"].get_weights()])


def main(folder: str) -> None:
    """Run twice in ``folder``; print the step at which the second run began, and the weights at its end."""
    dapple.init()
    os.chdir(folder)
    run(7)
    done, trained = run(10)
    print(json.dumps([done, trained.tolist()]))


if __name__ == "__main__":
    main(sys.argv[1])
