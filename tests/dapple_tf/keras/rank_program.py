"""Run the scripts as one rank of a job: ``rank_program FOLDER SCRIPT ...``; write what each returned."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import keras

import dapple_tf as dapple
from tests.dapple_tf.keras.scripts import run_script


def main(folder: Path, scripts: list[str]) -> None:
    """Run the scripts over two stages, one a rank."""
    dapple.init()
    keras.backend.set_floatx("float64")
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])

    def wrap(model: keras.Model) -> None:
        stages = ["dropout"] if name == "dropout" else 2
        dapple.keras.pipeline(model, stages=stages, micro_batches=3)

    found = {}
    for name in scripts:
        (folder / name).mkdir(exist_ok=True)
        os.chdir(folder / name)
        found[name] = run_script(name, folder / name, wrap)
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
