"""Losses and models that people train, as they write them; ``benchmarks.exactness`` compares each with plain Keras."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from benchmarks.exactness_cases import (
    contrastive,
    control_flow,
    divisors,
    embeddings,
    generative,
    layers,
    masked,
    random_layers,
    regularised,
    seq2seq,
    supervised,
    teachers,
    weights,
    whole_batch,
)
from benchmarks.exactness_cases.case import Case

_FAMILIES = (
    masked,
    seq2seq,
    weights,
    supervised,
    divisors,
    regularised,
    teachers,
    generative,
    random_layers,
    layers,
    embeddings,
    control_flow,
    contrastive,
    whole_batch,
)


def _by_name() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for case in itertools.chain.from_iterable(module.CASES for module in _FAMILIES):
        assert case.name not in found, f"two cases are called {case.name}"
        found[case.name] = case
    return found


CASES: Mapping[str, Case] = _by_name()
"""Every case by its name."""
