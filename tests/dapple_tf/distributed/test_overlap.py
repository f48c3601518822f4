"""AllReduce during the last backward, seen from within: what is reduced when, and that each step reduces everything."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.processes import needs_horovod, run_ranks

pytestmark = needs_horovod


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[str]], str]:
    """What each rank saw reduced during its last backward, and Horovod's own record of what it ran."""
    record = tmp_path_factory.mktemp("overlap") / "timeline.json"
    ranks = run_ranks(
        ["-m", "tests.dapple_tf.distributed.programs.overlap_ranks"], 2, environment={"HOROVOD_TIMELINE": str(record)}
    )
    lines = [line for rank in ranks for line in rank.stdout.splitlines() if line.startswith("{")]
    return [json.loads(line)["seen"] for line in lines], Path(record).read_text(encoding="utf-8")


def test_gradients_are_reduced_while_backward_still_runs(launched: tuple[list[list[str]], str]) -> None:
    """Backward waits before its first layer until a bucket is there, which it would not be before backward's end."""
    seen, _ = launched
    assert [len(rank) for rank in seen] == [1, 1]
    for (reduced,) in seen:
        assert re.fullmatch(r"stage0/allreduce/bucket[0-3]", reduced), reduced


def test_a_gradient_that_is_a_constant_is_reduced_in_every_step(launched: tuple[list[list[str]], str]) -> None:
    """TensorFlow would reduce it once, while it optimises the graph, where other ranks may not have come to."""
    _, record = launched
    (lane,) = re.findall(r'"pid": (\d+), "args": {"name": "stage0/allreduce/bucket0/sum_float32_1of\d"}', record)
    begins = re.findall(rf'"name": "NEGOTIATE_ALLREDUCE", "ts": \d+, "pid": {lane}}}', record)
    assert len(begins) == 3
