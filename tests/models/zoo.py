"""The models of ``dapple_tf.examples`` at their scale "tiny", and their parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

import dapple_tf as dapple
from dapple_tf import examples
from tests.paths import ROOT

TEXTS = ("bert", "gpt2", "llama", "moe", "xlnet")
OTHERS = ("amoebanet", "gnmt", "t5", "vit")
NAMES = (*TEXTS, *OTHERS)
"""Those models that have a scale "tiny" and no tests elsewhere."""

CORPUS = ROOT / "docs" / "glossary.md"  # quicker to read than the default


def tiny(name: str, **options: Any) -> dapple.Workload:
    """Return the workload of a model at scale "tiny", in batches of six; without dropout unless it is asked for."""
    build: Callable[..., dapple.Workload] = getattr(examples, name)
    given = {"scale": "tiny", "batch_size": 6, **options}
    if name in TEXTS:
        given.setdefault("corpus", CORPUS)
    if name not in ("llama", "moe"):
        given.setdefault("dropout", 0.0)
    return build(**given)


def model_of(workload: dapple.Workload) -> keras.Model:
    """Return the model that the workload's loss closes over."""
    cells = (cell.cell_contents for cell in workload.loss_fn.__closure__ or ())
    return next(value for value in cells if isinstance(value, keras.Model))
