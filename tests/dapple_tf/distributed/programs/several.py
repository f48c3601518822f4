"""Run several programs of this folder one after the other, as a rank of one job, for a process takes seconds to start.

``python -m tests.dapple_tf.distributed.programs.several '[["PROGRAM", ["ARGUMENT", ...]], ...]'`` calls the function
``run`` of each program and prints its result as a line of JSON.
"""

from __future__ import annotations

import importlib
import json
import sys

import keras

import dapple_tf as dapple


def main(text: str) -> None:
    """Run the programs that the JSON ``text`` lists; every rank must be called with the same text."""
    dapple.init()
    from dapple_tf.distributed.membership import current

    job = current()
    assert not job.is_alone, "start it with mpirun or horovodrun"
    for number, (name, arguments) in enumerate(json.loads(text)):
        program = importlib.import_module(f"tests.dapple_tf.distributed.programs.{name}")
        # Keras numbers optimizers; if ranks made different numbers, names would differ.
        keras.utils.clear_session()
        result = program.run(*arguments)
        print(json.dumps({"program": number, "result": result}, default=str), flush=True)  # complex numbers
    job.gather(None)  # a rank that leaves early ends Horovod on all ranks


if __name__ == "__main__":
    main(sys.argv[1])
