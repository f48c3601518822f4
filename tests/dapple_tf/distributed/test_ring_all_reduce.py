"""Sums over ranks by a ring of native messages: of any shape and dtype, in real jobs, with equal bits on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.dapple_tf.distributed.launches import Launches
from tests.dapple_tf.distributed.native.peers import needs_library
from tests.dapple_tf.distributed.programs.ring_sums import DTYPES, SHAPES, STEPS, draw, to_numbers
from tests.processes import needs_horovod

pytestmark = [needs_horovod, needs_library]

LAUNCHES = {2: "two ranks", 3: "three ranks"}
# Two roundings of a sum of three; of a sum in float32 that is rounded once.
TOLERANCE = {"float32": 2**-22, "float64": 2**-51, "half": 2**-9, "bfloat16": 2**-8, "complex64": 2**-22}


def magnitude(values: Any) -> Any:
    return np.abs(values.real) + 1j * np.abs(values.imag) if np.iscomplexobj(values) else np.abs(values)


@pytest.fixture(params=[pytest.param(2, id="2 ranks"), pytest.param(3, id="3 ranks")])
def job(request: pytest.FixtureRequest, launches: Launches) -> list[dict[str, Any]]:
    """The results of the ranks of a job."""
    return launches.results(LAUNCHES[request.param], "ring_sums")


def test_all_ranks_have_the_same_bits(job: list[dict[str, Any]]) -> None:
    for result in job[1:]:
        assert result["sums"] == job[0]["sums"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_those_of_all_ranks(job: list[dict[str, Any]], dtype: str) -> None:
    begin = DTYPES.index(dtype) * len(SHAPES)
    for step in range(STEPS):
        drawn = [draw(rank, step)[begin : begin + len(SHAPES)] for rank in range(len(job))]
        exact: list[float] = []
        scale: list[float] = []
        for values in zip(*drawn, strict=True):
            parts = [tf.cast(tf.constant(value), dtype).numpy() for value in values]
            wide = [part.astype(np.complex128 if dtype.startswith("complex") else np.float64) for part in parts]
            exact += to_numbers(np.sum(wide, 0) > 0 if dtype == "bool" else np.sum(wide, 0))
            scale += to_numbers(np.sum([magnitude(part) for part in wide], 0))
        found = np.array(job[0]["sums"][dtype][step])
        assert len(found) == len(exact)
        error = np.abs(found - np.array(exact))
        assert (error <= TOLERANCE.get(dtype, 2**-51) * np.array(scale)).all()


def test_bfloat16_is_summed_in_float32_and_rounded_once(job: list[dict[str, Any]]) -> None:
    """As Horovod's sums are, which has no bfloat16."""
    begin = DTYPES.index("bfloat16") * len(SHAPES)
    drawn = [draw(rank, 0)[begin : begin + len(SHAPES)] for rank in range(len(job))]
    expected: list[float] = []
    for values in zip(*drawn, strict=True):
        # Sums of two or three bfloat16 are exact in float64, and float32 adds too little to change the rounding of
        # nearly all.
        total = sum(tf.cast(tf.cast(tf.constant(value), tf.bfloat16), tf.float64) for value in values)
        expected += to_numbers(tf.cast(total, tf.bfloat16).numpy())
    found = job[0]["sums"]["bfloat16"][0]
    assert np.mean(np.array(found) == np.array(expected)) > 0.99


def test_nothing_to_sum_needs_no_message(job: list[dict[str, Any]]) -> None:
    assert [result["nothing"] for result in job] == [[0, 3]] * len(job)


def test_a_rank_sends_and_receives_what_the_cost_model_says(job: list[dict[str, Any]]) -> None:
    """2 (r - 1) / r of 4000 bytes each way; chunks are not exactly equal. Every step has its own messages."""
    for result in job:
        for moved in result["bytes"]:
            assert moved == pytest.approx(2 * 2 * (len(job) - 1) / len(job) * 4000, rel=0.1)
