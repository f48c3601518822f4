"""The training loop of the guide to checkpoints resumes where it stopped, in one process and as ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import dapple_tf as dapple
from tests.dapple_tf.distributed.programs.checkpoint_guide import run
from tests.processes import needs_horovod, run_ranks


@needs_horovod
def test_the_loop_of_the_guide_resumes_alone_and_as_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dapple.init()
    for name in ("whole", "alone", "ranks"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    done, wanted = run(10)
    assert done == 0
    monkeypatch.chdir(tmp_path / "alone")
    assert run(7)[0] == 0
    done, trained = run(10)
    assert done == 20
    np.testing.assert_array_equal(trained, wanted)
    for rank in run_ranks(["-m", "tests.dapple_tf.distributed.programs.checkpoint_guide", str(tmp_path / "ranks")], 2):
        done, trained = json.loads(rank.stdout)
        assert done == 20
        np.testing.assert_allclose(trained, wanted, rtol=1e-5, atol=1e-7)
    assert (tmp_path / "ranks" / "run1" / "checkpoint-40.safetensors").exists()
