"""The training steps of ``examples/steps/``, run as users run them, equal one device; see also tests/equality."""

from __future__ import annotations

import re

import pytest

from tests.processes import run_python

HELPER = "beside_one_device"  # which the programs below import
NAMES = (
    "actor_critic",
    "adversarial",
    "cyclegan",
    "dcgan",
    "distillation",
    "gan",
    "gradnorm",
    "masked_lm",
    "pcgrad",
    "sam",
    "vae",
    "wgan",
    "wgan_gp",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_prints_that_it_equals_one_device(name: str) -> None:
    done = run_python(f"examples/steps/{name}.py", timeout_seconds=400)
    found = re.findall(r"^3 steps in \d phases differ from one device by at most (\S+)$", done.stdout, re.MULTILINE)
    assert float(found[0]) < 1e-12
