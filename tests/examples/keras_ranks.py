"""Run a script of ``examples/keras/`` as a rank of a job: ``keras_ranks FOLDER PROGRAM``; write its history."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import dapple_tf as dapple


def main(folder: Path, program: str) -> None:
    """Train over the ranks of the job."""
    dapple.init()
    history = runpy.run_path(f"examples/keras/{program}.py")["train"](pipelined=True)
    (folder / f"{os.environ['OMPI_COMM_WORLD_RANK']}.json").write_text(json.dumps(history), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
