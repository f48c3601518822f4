"""``micro_batches="auto"``, or a cluster, for given stages: M and the schedule from a profile taken now."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import dapple_tf as dapple
from dapple_tf.errors import PlanError
from dapple_tf.profiler.cluster import Link, config
from tests.equality.small_models import chain, data, sgd, weights

# Tiny models measure badly, which is not what these tests are about.


def test_given_stages_get_their_schedule_from_a_cluster() -> None:
    """Over a link of 1 kB/s transfers take longer than any computing.

    A micro-batch is under way for four of them, and policy A has three in flight, too few to keep the link busy.
    """
    slow = replace(config("c", 3), inter_server=Link(bandwidth=1e3, latency=0.0))
    matrices, batch = weights(4), data(16)
    step = dapple.pipeline(chain(matrices), optimizer=sgd(), stages=3, micro_batches=8, cluster=slow)
    loss = chain(matrices)(*batch)
    np.testing.assert_allclose(step(*batch), loss, rtol=1e-12)
    assert step.plan.schedule == step.choice.schedule == "dapple-b"
    assert step.choice.acr > 10
    assert (step.plan.planner, len(step.plan.stages), step.plan.micro_batches) == ("requested", 3, 8)


def test_the_simulator_chooses_the_number_of_micro_batches() -> None:
    matrices, batch = weights(4), data(12)
    loss = chain(matrices)(*batch)
    step = dapple.pipeline(chain(matrices), optimizer=sgd(), stages=2, replicas=[2, 1], micro_batches="auto")
    np.testing.assert_allclose(step(*batch), loss, rtol=1e-12)
    assert step.plan.micro_batches == step.choice.micro_batches
    assert step.plan.micro_batches in (1, 2, 3, 4, 6)  # divides 12 samples, and leaves each replica one
    assert step.plan.micro_batch_size * step.plan.micro_batches == 12


def test_a_memory_that_no_schedule_fits_is_an_error() -> None:
    small = replace(config("a", 2), device_memory=700.0)
    with pytest.raises(PlanError, match=r"no schedule fits: with M = 2 .* stage . needs .* and lacks"):
        dapple.pipeline(
            chain(weights(4)), optimizer=sgd(), stages=2, micro_batches=2, example_batch=data(8), cluster=small
        )
