"""AllReduce overlapped with the last backward, observed from within: what is reduced when, and in every step."""

from __future__ import annotations

import re

import pytest

from tests.dapple_tf.distributed.launches import Launches
from tests.processes import needs_horovod

pytestmark = needs_horovod


BY_HOROVOD = "2 ranks by Horovod"


@pytest.mark.parametrize("launch", ["two ranks", BY_HOROVOD])
def test_gradients_are_reduced_while_backward_still_runs(launches: Launches, launch: str) -> None:
    """Backward waits before its first layer until a bucket is reduced, which without overlap comes after backward."""
    results = launches.results(launch, "overlapped_allreduce")
    assert [len(reduced) for reduced in results] == [1, 1]
    for (reduced,) in results:
        assert re.fullmatch(r"stage0/allreduce/bucket[0-3]", reduced), reduced


def test_a_gradient_that_is_a_constant_is_reduced_in_every_step(launches: Launches) -> None:
    """TensorFlow could reduce it once, while it optimizes the graph, which other ranks may not have reached."""
    launches.results(BY_HOROVOD, "overlapped_allreduce")
    record = (launches.folder(BY_HOROVOD) / "horovod.json").read_text(encoding="utf-8")
    (lane,) = re.findall(r'"pid": (\d+), "args": {"name": "stage0/allreduce/bucket0/sum_float32_1of\d"}', record)
    begins = re.findall(rf'"name": "NEGOTIATE_ALLREDUCE", "ts": \d+, "pid": {lane}}}', record)
    assert len(begins) == 3
