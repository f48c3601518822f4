"""``fit`` with ``SaveAndResume`` under ``dapple launch``: a job that loses a rank ends as plain Keras does."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from tests.processes import MPIRUN, needs_horovod, run_python

pytestmark = needs_horovod

MODEL = """
import keras
import numpy as np


def make():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, "tanh", dtype="float64", name=f"hidden_{i}") for i in range(4)]
    head = keras.layers.Dense(1, dtype="float64", name="output")
    model = keras.Sequential([keras.Input([8], dtype="float64"), *layers, head], name="net")
    numbers = np.random.default_rng(0)
    data = numbers.normal(size=(60, 8)), numbers.normal(size=(60, 1))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model, data
"""

# Rank 1 kills itself in the second epoch of the job's first start.
PROGRAM = """
import json, os, signal, sys
import keras
import numpy as np
import dapple_tf as dapple
from model import make

dapple.init()
model, (x, y) = make()
options = {"elastic": True, "example_batch": (x[:12], y[:12]), **json.loads(sys.argv[1])}
dapple.keras.pipeline(model, stages=3, micro_batches=2, **options)
start = json.loads(os.environ["DAPPLE_LAUNCH"])["number"]


class Batches(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if start == 0 and dapple.rank() == 1 and [self.epoch, batch] == [1, 3]:
            os.kill(os.getpid(), signal.SIGKILL)


keras.utils.set_random_seed(5)  # the order of the rows
model.fit(x, y, batch_size=12, epochs=3, verbose=0, callbacks=[dapple.keras.SaveAndResume("saved", every=2), Batches()])
weights = model.get_weights()
if dapple.rank() == 0:
    np.savez("weights.npz", *weights)
"""


@pytest.mark.parametrize("options", ["{}", '{"snapshot_every": 1}'])
def test_a_fit_that_has_lost_a_rank_ends_as_plain_keras(tmp_path: Path, options: str) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "program.py").write_text(PROGRAM)
    hosts = tmp_path / "hosts"
    hosts.write_text(
        "#!/bin/sh\nif [ -e hosts-lost ]; then echo localhost:2; else echo localhost:3; fi\ntouch hosts-lost\n"
    )
    hosts.chmod(0o755)
    mpirun = " ".join(MPIRUN.command(tmp_path, 3)[1:-4])
    words = ["--hosts", str(hosts), "-np", "3", "--check-every", "600", "--mpirun", mpirun]
    words += ["--", sys.executable, "program.py", options]
    variables = {"DAPPLE_SNAPSHOT_DIR": str(tmp_path)}
    done = run_python("-m", "dapple_tf", "launch", *words, folder=tmp_path, variables=variables, timeout_seconds=400)
    assert "starts the job again (number 1) with 2 ranks on localhost:2" in done.stderr
    assert_trained_as_plain_keras(tmp_path)


def assert_trained_as_plain_keras(folder: Path) -> None:
    """Assert that the program's weights in ``folder`` are those of plain Keras."""
    model, (x, y) = runpy.run_path(str(folder / "model.py"))["make"]()
    keras.utils.set_random_seed(5)
    model.fit(x, y, batch_size=12, epochs=3, verbose=0)
    with np.load(folder / "weights.npz") as found:
        weights = [found[name] for name in found.files]
    for one, other in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-13)
