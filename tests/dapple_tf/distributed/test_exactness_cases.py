"""Cases of ``benchmarks.exactness_cases`` as a job of two processes, in one launch, compared with plain Keras."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from benchmarks.exactness_cases import CASES
from benchmarks.exactness_check import Found, is_expected
from benchmarks.exactness_ranks import check_on_ranks
from tests.processes import needs_horovod

pytestmark = [needs_horovod, pytest.mark.timeout(1200)]

NAMES = (
    *("MeanSquaredError", "masked_lm", "sum", "pinball", "aux_several", "state_steps", "l2_in_masked_loss"),
    *("embedding_tied_to_head", "repeated_ids_adam", "dropout_0.5", "distillation_ema_teacher", "simclr"),
    *("simclr_batch_loss", "clip_batch_loss", "dice_batch_loss", "state_running_mean_of_loss_batch_loss"),
    "multi_task_compiled",
)


@pytest.fixture(scope="module")
def outcomes() -> Mapping[str, Sequence[Found]]:
    """The outcomes that the cases' job printed, by the case's name."""
    return {case.name: found for case, found in check_on_ranks([CASES[name] for name in NAMES])}


@pytest.mark.parametrize("name", NAMES)
def test_a_case_on_two_ranks_comes_out_as_it_must(outcomes: Mapping[str, Sequence[Found]], name: str) -> None:
    bad = [found for found in outcomes[name] if not is_expected(CASES[name], found)]
    assert not bad, f"{CASES[name].expected} is wanted, but {bad}"
