"""Analytic profiles of AutoPipe's models at sub-layer grain, and Megatron-LM's even stages of them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from dapple_tf.plans import StagePlan
from dapple_tf.profiler.profile import LayerCost, Profile

_FLOPS_A_SECOND = 35e12  # about what an RTX 3090 reaches in half precision; all stages are alike, so ratios keep
_BYTES = 2  # of a half-precision number


@dataclass(frozen=True)
class Transformer:
    """A model of AutoPipe's Table I: its layers, hidden size, vocabulary and tokens of a sample."""

    title: str
    layers: int
    hidden: int
    vocabulary: int
    tokens: int


GPT2_345M = Transformer("GPT-2 345M", 24, 1024, 50257, 1024)
GPT2_762M = Transformer("GPT-2 762M", 36, 1280, 50257, 1024)
BERT_LARGE = Transformer("BERT-large", 24, 1024, 30522, 512)


def transformer_profile(model: Transformer, batch_size: int, head_rate: float = 1.0) -> Profile:
    """Return the profile: embedding, attention and FFN of each layer, and the head with the loss.

    Operations of a token: attention 8 h^2 for its four products with weights and 4 s h for those of s tokens, FFN 16
    h^2, head 2 h V. Backward takes twice as long as forward; the embedding's seconds are left out. ``head_rate``: how
    many times as fast as the other products the head's is, which is larger.
    """
    h, s, v, rows = model.hidden, model.tokens, model.vocabulary, batch_size * model.tokens
    stream = float(rows * h * _BYTES)
    weights = {"attention": 4 * h * h, "ffn": 8 * h * h}
    operations = {"attention": 8 * h * h + 4 * s * h, "ffn": 16 * h * h}

    def layer(name: str, of_token: float, sent: float, parameters: float) -> LayerCost:
        seconds = of_token * rows / _FLOPS_A_SECOND
        return LayerCost(name, seconds, 2 * seconds, sent, 4 * stream, parameters * _BYTES)

    found = [layer("embedding", 0.0, stream, (v + s) * h)]
    for index, kind in itertools.product(range(model.layers), operations):
        found.append(layer(f"layer_{index}/{kind}", operations[kind], stream, weights[kind]))
    found.append(layer("head", 2 * h * v / head_rate, 0.0, v * h))
    return Profile(model.title, batch_size, "analytic", tuple(found))


def stages_of_halves(halves: tuple[int, ...]) -> tuple[StagePlan, ...]:
    """Return a plan's stages, one device each, with these numbers of half layers (attention or FFN).

    The first stage also has the embedding, the last one the head.
    """
    starts = [0, *(1 + total for total in itertools.accumulate(halves))]
    starts[-1] += 1
    return tuple(StagePlan(a, b - 1, (n,)) for n, (a, b) in enumerate(itertools.pairwise(starts)))


def megatron_stages(model: Transformer, stages: int) -> tuple[StagePlan, ...]:
    """Return Megatron-LM's stages: equally many transformer layers each; ``stages`` must divide them."""
    assert model.layers % stages == 0, "Megatron-LM divides the layers evenly"
    return stages_of_halves((2 * model.layers // stages,) * stages)
