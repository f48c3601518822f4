"""Random losses on a small model are equal to plain Keras, or refused; those that add up are equal."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st

from benchmarks.exactness_cases.case import BATCH_LOSS
from benchmarks.exactness_check import UNEVEN, Checker, Configuration, Outcome
from tests.draws import draw
from tests.equality.random_losses import Loss, as_case, losses


@st.composite
def configurations(draw: st.DrawFn) -> Configuration:
    stages = draw(st.integers(1, 3))
    return Configuration(
        stages,
        draw(st.integers(1, 6)),
        draw(st.sampled_from(["gpipe", "dapple-a", "zb-h1"])),
        draw(st.sampled_from([(16, 16, 16), UNEVEN])),
        draw(st.sampled_from([None, (2,) * stages])),
    )


@pytest.mark.always  # the only test of its kind
@pytest.mark.timeout(1200)
def test_random_losses_are_equal_to_plain_keras_or_refused() -> None:
    # A loss that fails is small as it is; to make it smaller would take minutes.
    @draw(few=3, phases=(Phase.explicit, Phase.reuse, Phase.generate), report_multiple_bugs=False)
    @given(losses(), configurations(), st.sampled_from([{}, BATCH_LOSS]))
    def check(loss: Loss, configuration: Configuration, options: Any) -> None:
        found = Checker(as_case(loss, options)).check(configuration)
        wanted = (Outcome.EQUAL,) if loss.adds_up else (Outcome.EQUAL, Outcome.REFUSED)
        assert found.outcome in wanted, found

    check()
