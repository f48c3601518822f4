"""Backbones of keras_hub, made from small configurations, train unmodified and equal plain Keras on one device."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.equality.one_device import TOLERANCE, Problem, compare
from tests.requirements import needs_keras_hub

LOST_MASK = "Layer .* was passed an input with a mask"  # Keras warns of T5's attention, which does not support masks

pytestmark = [
    needs_keras_hub,
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy"),
    pytest.mark.filterwarnings(f"ignore:{LOST_MASK}"),
]

BATCH, LENGTH, VOCABULARY = 6, 8, 23
TEXT: Mapping[str, Any] = {"vocabulary_size": VOCABULARY, "num_layers": 2, "hidden_dim": 8, "intermediate_dim": 12}
HEADS: Mapping[str, Any] = {**TEXT, "num_heads": 2}
GROUPED: Mapping[str, Any] = {**TEXT, "num_query_heads": 4, "num_key_value_heads": 2}


def models() -> Any:
    import keras_hub

    return keras_hub.models


def clip(**options: Any) -> Any:
    width = {"hidden_dim": 8, "num_layers": 2, "num_heads": 2, "intermediate_dim": 12}
    vision = models().CLIPVisionEncoder(patch_size=4, image_shape=(8, 8, 3), **width, **options)
    text = models().CLIPTextEncoder(
        vocabulary_size=VOCABULARY, embedding_dim=8, max_sequence_length=LENGTH, **width, **options
    )
    return models().CLIPBackbone(vision, text, projection_dim=8, **options)


def stable_diffusion_3(**options: Any) -> Any:
    """The part that is trained: the diffusion transformer."""
    from keras_hub.src.models.stable_diffusion_3.mmdit import MMDiT

    shapes: Any = {"latent_shape": (4, 4, 4), "context_shape": (LENGTH, 8), "pooled_projection_shape": (8,)}
    return MMDiT(
        patch_size=2,
        hidden_dim=8,
        num_layers=2,
        num_heads=2,
        position_size=4,
        qk_norm=None,
        dual_attention_indices=None,
        **shapes,
        **options,
    )


BACKBONES: Mapping[str, Callable[..., Any]] = {
    "BERT": lambda **o: models().BertBackbone(**HEADS, max_sequence_length=LENGTH, **o),
    "RoBERTa": lambda **o: models().RobertaBackbone(**HEADS, max_sequence_length=LENGTH, **o),
    "DeBERTa": lambda **o: models().DebertaV3Backbone(**HEADS, max_sequence_length=LENGTH, bucket_size=4, **o),
    "GPT-2": lambda **o: models().GPT2Backbone(**HEADS, max_sequence_length=LENGTH, **o),
    "T5": lambda **o: models().T5Backbone(**HEADS, **o),
    "BART": lambda **o: models().BartBackbone(**HEADS, max_sequence_length=LENGTH, **o),
    "Llama": lambda **o: models().LlamaBackbone(**GROUPED, **o),
    "Mistral": lambda **o: models().MistralBackbone(**GROUPED, **o),
    "Mixtral": lambda **o: models().MixtralBackbone(**GROUPED, num_experts=3, **o),
    "Gemma": lambda **o: models().GemmaBackbone(**GROUPED, head_dim=4, **o),
    "Whisper": lambda **o: models().WhisperBackbone(
        **HEADS, num_mels=5, max_encoder_sequence_length=LENGTH, max_decoder_sequence_length=LENGTH, **o
    ),
    "ViT": lambda **o: models().ViTBackbone(
        (8, 8, 3), (4, 4), num_layers=2, num_heads=2, hidden_dim=8, mlp_dim=12, dropout_rate=0.1, **o
    ),
    "CLIP": clip,
    "SD3": stable_diffusion_3,
}


def inputs_of(model: keras.Model) -> dict[str, tf.Tensor]:
    """Return random data for each input of a functional model: tokens, masks that end early, or numbers."""
    random = np.random.default_rng(0)
    found = {}
    for name, spec in model.input.items() if isinstance(model.input, dict) else {"x": model.input}.items():
        shape = (BATCH, *(LENGTH if size is None else size for size in spec.shape[1:]))
        if "mask" in name:
            ends = random.integers(2, LENGTH + 1, BATCH)
            value = (np.arange(LENGTH) < ends[:, None]).astype(spec.dtype)
        elif "token" in name:
            value = random.integers(1, VOCABULARY, shape).astype(spec.dtype)
        elif "segment" in name:
            value = random.integers(0, 2, shape).astype(spec.dtype)
        else:
            value = random.normal(size=shape).astype(spec.dtype)
        found[name] = tf.constant(value)
    return found


def weigh(output: Any) -> Any:
    """Return a sum over the last axis; an equally weighted one of what a layer norm gives depends on no weight."""
    return tf.linalg.matvec(output, tf.cast(tf.sin(tf.range(1.0, output.shape[-1] + 1.0)), output.dtype))


# Mixtral's router fails in float64. Gemma computes norms in float32.
FLOAT32 = ("Mixtral", "Gemma")
# Its scores compare each image with the texts of all samples.
CONTRASTIVE = ("CLIP",)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", BACKBONES)
def test_a_backbone_equals_plain_keras(name: str) -> None:
    """Dropout is on: the masks are those of one device."""
    keras.utils.set_random_seed(1)
    dtype = "float32" if name in FLOAT32 else "float64"
    model = BACKBONES[name](dtype=dtype)

    def loss_fn(inputs: Mapping[str, Any]) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", LOST_MASK)
            outputs = tf.nest.flatten(model(inputs if isinstance(model.input, dict) else inputs["x"], training=True))
        return tf.add_n(
            [tf.reduce_mean(tf.tanh(output if name in CONTRASTIVE else weigh(output))) for output in outputs]
        )

    variables = {f"{v.path} {i}": v for i, v in enumerate(model.variables)}  # both encoders of CLIP have the same paths
    momentum = 0.0 if name in ("CLIP", "T5") else 0.9  # their slots have equal names too
    problem = Problem(loss_fn, variables, lambda: keras.optimizers.SGD(0.1, momentum=momentum))
    batch = inputs_of(model)
    found = compare(problem, [(batch,)] * 2, stages=2, micro_batches=3, batch_loss=name in CONTRASTIVE)
    # A bias of keys adds one number to all scores of a query, which softmax ignores: its gradient is rounding errors.
    errors = {name: error for name, error in found.errors.items() if not re.search("key.bias", name)}
    error, where = max((error, name) for name, error in errors.items())
    assert error <= TOLERANCE[dtype], f"{where} differs by {error:.1e}"
