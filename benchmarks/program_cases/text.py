"""Programs about text: from strings or token ids to classes, tags, answers, other text."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from benchmarks.exactness_cases.case import Training
from benchmarks.program_cases.program import BATCH, ONCE, ROWS, Fit, Program, batches

VOCABULARY, LENGTH, WIDTH = 24, 7, 8
WORDS = ["a", "film", "plot", "is", "dull", "great", "slow", "fun", "never", "always", "and", "but", "seen", "made"]


def sentences(rows: int = ROWS) -> Any:
    """Return strings of three to seven words, with marks and capitals."""
    rng = np.random.default_rng(3)
    return np.array(
        [" ".join(rng.choice(WORDS, rng.integers(3, LENGTH + 1))).capitalize() + "!<br />" for _ in range(rows)]
    )


def tokens(rows: int = ROWS, seed: int = 0, length: int = LENGTH) -> Any:
    """Return token ids [rows, length] that end with zeros."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, length + 1, (rows, 1))
    return np.where(np.arange(length) < lengths, rng.integers(1, VOCABULARY, (rows, length)), 0).astype("int32")


def sentiment_from_strings() -> Fit:
    """Reviews as strings, cleaned and split inside the model, read by a bidirectional LSTM."""
    text = sentences()
    vectorize = layers.TextVectorization(max_tokens=VOCABULARY, output_sequence_length=LENGTH)
    vectorize.adapt(text)
    model = keras.Sequential(
        [
            keras.Input((1,), dtype="string"),
            vectorize,
            layers.Embedding(VOCABULARY, WIDTH, mask_zero=True),
            layers.Bidirectional(layers.LSTM(4)),
            layers.Dropout(0.3),
            layers.Dense(1, "sigmoid"),
        ]
    )
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    labels = np.random.default_rng(1).integers(0, 2, (ROWS, 1))
    return Fit(model, tf.constant(text[:, None]), labels, {"batch_size": BATCH, "epochs": 2})


def topics_from_bags_of_words() -> Fit:
    """A bag of pairs of words, weighted by TF-IDF, and two dense layers; the data set holds strings and labels."""
    text = sentences()
    vectorize = layers.TextVectorization(max_tokens=40, output_mode="tf_idf", ngrams=2)
    vectorize.adapt(text)
    entry = keras.Input((), dtype="string")
    x = layers.Dense(WIDTH, "relu")(vectorize(entry))
    x = layers.Dropout(0.5)(x)
    model = keras.Model(entry, layers.Dense(3, "softmax")(x))
    model.compile("rmsprop", "sparse_categorical_crossentropy", metrics=["accuracy"])
    labels = np.random.default_rng(1).integers(0, 3, ROWS)
    return Fit(model, tf.data.Dataset.from_tensor_slices((text, labels)).batch(BATCH), None, {"epochs": 2})


def many_labels_of_papers() -> Fit:
    """Titles with several labels each, as multi-hot vectors of words."""
    text = sentences()
    vectorize = layers.TextVectorization(max_tokens=VOCABULARY, output_mode="multi_hot")
    vectorize.adapt(text)
    model = keras.Sequential(
        [keras.Input((1,), dtype="string"), vectorize, layers.Dense(WIDTH, "relu"), layers.Dense(5, "sigmoid")]
    )
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["binary_accuracy"])
    labels = np.random.default_rng(1).integers(0, 2, (ROWS, 5))
    return Fit(model, tf.constant(text[:, None]), labels, {"batch_size": BATCH, "epochs": 2})


def characters_by_convolutions() -> Fit:
    """Convolutions of several widths over embedded characters, and the largest value of each over time."""
    entry = keras.Input((None,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH)(entry)
    x = layers.SpatialDropout1D(0.2)(x)
    heads = [layers.GlobalMaxPooling1D()(layers.Conv1D(6, k, padding="same", activation="relu")(x)) for k in (2, 3, 4)]
    x = layers.Dropout(0.5)(layers.Concatenate()(heads))
    model = keras.Model(entry, layers.Dense(4)(x))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (ROWS, 12))
    return Fit(model, ids, np.arange(ROWS) % 4, {"batch_size": BATCH, "epochs": 2})


def translation_with_attention() -> Fit:
    """An LSTM encoder, an LSTM decoder that starts from its state and attends to it, with masks."""
    source, target = keras.Input((None,), dtype="int32"), keras.Input((None,), dtype="int32")
    encoded, h, c = layers.LSTM(WIDTH, return_sequences=True, return_state=True)(
        layers.Embedding(VOCABULARY, WIDTH, mask_zero=True)(source)
    )
    decoded = layers.LSTM(WIDTH, return_sequences=True)(
        layers.Embedding(VOCABULARY, WIDTH, mask_zero=True)(target), initial_state=[h, c]
    )
    context = layers.Attention(use_scale=True)([decoded, encoded])
    x = layers.Dropout(0.1)(layers.Concatenate()([decoded, context]))
    model = keras.Model([source, target], layers.TimeDistributed(layers.Dense(VOCABULARY, "softmax"))(x))
    model.compile("rmsprop", "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
    spoken = tokens(seed=1)
    return Fit(
        model, [tokens(), spoken[:, :-1]], spoken[:, 1:], {"batch_size": BATCH, "epochs": 2, "validation_split": 0.2}
    )


def sums_as_characters() -> Fit:
    """A sum read character by character and repeated to write the result, one-hot on both sides."""
    model = keras.Sequential(
        [
            keras.Input((LENGTH, 12)),
            layers.LSTM(WIDTH),
            layers.RepeatVector(4),
            layers.LSTM(WIDTH, return_sequences=True),
            layers.Dense(12, "softmax"),
        ]
    )
    model.compile("adam", "categorical_crossentropy", metrics=["accuracy"])
    rng = np.random.default_rng(0)
    x, y = np.eye(12)[rng.integers(0, 12, (ROWS, LENGTH))], np.eye(12)[rng.integers(0, 12, (ROWS, 4))]
    return Fit(model, x, y, {"batch_size": BATCH, "epochs": 2, "validation_data": (x[:7], y[:7])})


@keras.saving.register_keras_serializable()
class PositionEmbedding(layers.Layer):
    """Adds an embedding of its place to the embedding of each token."""

    def __init__(self, length: int, vocabulary: int, width: int, **options: Any) -> None:
        super().__init__(**options)
        self.length, self.vocabulary, self.width = length, vocabulary, width
        self.of_token = layers.Embedding(vocabulary, width, mask_zero=True)
        self.of_place = layers.Embedding(length, width)

    def build(self, shape: Any) -> None:
        self.of_token.build(shape)
        self.of_place.build((self.length,))

    def call(self, ids: Any) -> Any:
        return self.of_token(ids) + self.of_place(ops.arange(ops.shape(ids)[1]))

    def compute_mask(self, ids: Any, mask: Any = None) -> Any:
        return self.of_token.compute_mask(ids)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "length": self.length, "vocabulary": self.vocabulary, "width": self.width}


@keras.saving.register_keras_serializable()
class Block(layers.Layer):
    """A transformer block with dropout; ``causal``: a token sees those before it."""

    def __init__(self, width: int, heads: int = 2, causal: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.width, self.heads, self.causal = width, heads, causal
        self.supports_masking = True
        self.attention = layers.MultiHeadAttention(heads, width // heads, dropout=0.1)
        self.hidden, self.out = layers.Dense(2 * width, "gelu"), layers.Dense(width)
        self.norms = [layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]
        self.drop = layers.Dropout(0.1)

    def build(self, shape: Any) -> None:
        self.attention.build(shape, shape)
        self.hidden.build(shape)
        self.out.build((*shape[:-1], 2 * self.width))
        for norm in self.norms:
            norm.build(shape)

    def call(self, x: Any, training: bool = False) -> Any:
        attended = self.attention(x, x, use_causal_mask=self.causal, training=training)
        x = self.norms[0](x + self.drop(attended, training=training))
        return self.norms[1](x + self.drop(self.out(self.hidden(x)), training=training))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "width": self.width, "heads": self.heads, "causal": self.causal}


def transformer_classifier() -> Fit:
    """A transformer encoder, the mean over time, and classes with weights."""
    entry = keras.Input((LENGTH,), dtype="int32")
    x = PositionEmbedding(LENGTH, VOCABULARY, WIDTH)(entry)
    x = Block(WIDTH)(x)
    x = layers.GlobalAveragePooling1D()(x)
    x = layers.Dropout(0.1)(layers.Dense(6, "relu")(layers.Dropout(0.1)(x)))
    model = keras.Model(entry, layers.Dense(2, "softmax")(x))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    options = {"batch_size": BATCH, "epochs": 2, "class_weight": {0: 1.0, 1: 3.0}}
    return Fit(model, tokens(), np.arange(ROWS) % 3 // 2, options)


@keras.saving.register_keras_serializable()
class Perplexity(keras.metrics.Metric):
    """The exponential of the mean cross-entropy of tokens that are not padding."""

    def __init__(self, name: str = "perplexity", **options: Any) -> None:
        super().__init__(name=name, **options)
        self.total = self.add_weight(name="total", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        kept = ops.cast(ops.not_equal(y_true, 0), y_pred.dtype)
        each = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
        self.total.assign_add(ops.sum(each * kept))
        self.count.assign_add(ops.sum(kept))

    def result(self) -> Any:
        return ops.exp(self.total / ops.maximum(self.count, 1.0))


def small_gpt() -> Fit:
    """A causal language model from a shuffled, prefetched data set, with a schedule and clipping."""
    entry = keras.Input((None,), dtype="int32")
    x = PositionEmbedding(LENGTH, VOCABULARY, WIDTH)(entry)
    for _ in range(2):
        x = Block(WIDTH, causal=True)(x)
    model = keras.Model(entry, layers.Dense(VOCABULARY)(x))
    rate = keras.optimizers.schedules.CosineDecay(0.01, 6, warmup_target=0.02, warmup_steps=2)
    optimizer = keras.optimizers.AdamW(rate, weight_decay=0.01, global_clipnorm=1.0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    model.compile(optimizer, loss, metrics=[Perplexity()])
    ids = tokens(length=LENGTH + 1)
    data = tf.data.Dataset.from_tensor_slices(ids).map(lambda line: (line[:-1], line[1:]))
    return Fit(model, data.batch(BATCH).prefetch(2), None, {"epochs": 2})


def transformer_translation() -> Fit:
    """A transformer encoder and a decoder with causal self-attention and attention to the encoder."""
    source, target = keras.Input((None,), dtype="int64"), keras.Input((None,), dtype="int64")
    encoded = Block(WIDTH)(PositionEmbedding(LENGTH, VOCABULARY, WIDTH)(source))
    x = PositionEmbedding(LENGTH, VOCABULARY, WIDTH)(target)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True))
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, encoded))
    x = layers.Dropout(0.5)(x)
    model = keras.Model({"source": source, "target": target}, layers.Dense(VOCABULARY, "softmax")(x))
    model.compile("rmsprop", keras.losses.SparseCategoricalCrossentropy(ignore_class=0), metrics=["accuracy"])
    spoken = tokens(seed=2, length=LENGTH + 1).astype("int64")
    pairs = {"source": tokens().astype("int64"), "target": spoken[:, :-1]}
    data = tf.data.Dataset.from_tensor_slices((pairs, spoken[:, 1:])).batch(BATCH).cache()
    return Fit(model, data, None, {"epochs": 2})


class Tagger(keras.Model):
    """A subclassed model of tags for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = PositionEmbedding(LENGTH, VOCABULARY, WIDTH)
        self.block = Block(WIDTH)
        self.drop = layers.Dropout(0.1)
        self.head = layers.Dense(5, "softmax")

    def call(self, ids: Any, training: bool = False) -> Any:
        return self.head(self.drop(self.block(self.embed(ids), training=training), training=training))


def named_entities() -> Fit:
    """Tags of tokens, with a loss of the user's own that leaves out padding and divides by what is left."""

    def loss(y_true: Any, y_pred: Any) -> Any:
        each = keras.losses.sparse_categorical_crossentropy(y_true, y_pred)
        kept = ops.cast(ops.greater(y_true, 0), each.dtype)
        return ops.sum(each * kept) / ops.sum(kept)

    model = Tagger()
    model.compile("adam", loss)
    ids = tokens()
    data = tf.data.Dataset.from_tensor_slices((ids, np.where(ids > 0, ids % 4 + 1, 0)))
    return Fit(model, data.padded_batch(BATCH), None, {"epochs": 2})


def masked_words() -> Training:
    """BERT's objective in a loop of one's own: words are hidden by given draws, weights say which count."""
    entry = keras.Input((LENGTH,), dtype="int32")
    x = PositionEmbedding(LENGTH, VOCABULARY, WIDTH)(entry)
    x = Block(WIDTH)(x)
    model = keras.Model(entry, layers.Dense(VOCABULARY)(x))

    @tf.function
    def loss_fn(ids: Any, hidden: Any) -> Any:
        logits = model(tf.where(hidden, VOCABULARY - 1, ids), training=True)
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(ids, logits)
        weights = tf.cast(hidden, each.dtype)
        right = tf.cast(tf.argmax(logits, -1, tf.int32) == ids, each.dtype) * weights
        return tf.math.divide_no_nan(tf.reduce_sum(each * weights), tf.reduce_sum(weights)), {
            "accuracy": tf.reduce_sum(right) / tf.reduce_sum(weights)
        }

    hidden = np.random.default_rng(5).random((3 * BATCH, LENGTH)) < 0.3
    data = batches(tokens(3 * BATCH), hidden)
    return Training(loss_fn, keras.optimizers.Adam(0.01), model.trainable_variables, data)


def word_vectors() -> Training:
    """Skip-grams with negative samples: two tables, read by ids, and a product of each pair."""
    rng = np.random.default_rng(0)
    words = tf.Variable(rng.normal(size=(50, WIDTH)), name="words")
    contexts = tf.Variable(rng.normal(size=(50, WIDTH)), name="contexts")

    @tf.function
    def loss_fn(target: Any, context: Any, label: Any) -> Any:
        t = tf.nn.embedding_lookup(words, target)
        c = tf.nn.embedding_lookup(contexts, context)
        logits = tf.einsum("be,bce->bc", t, c)
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(label, logits))

    label = np.tile([1.0, 0, 0, 0, 0], (3 * BATCH, 1))
    data = batches(rng.integers(0, 50, 3 * BATCH), rng.integers(0, 50, (3 * BATCH, 5)), label)
    return Training(loss_fn, keras.optimizers.Adagrad(0.1), [words, contexts], data)


def pointer_generator() -> Training:
    """A decoder that either writes a word or copies one of the source: attention is scattered over the vocabulary."""
    embed = layers.Embedding(VOCABULARY, WIDTH, mask_zero=True)
    encoder, decoder = (
        layers.GRU(WIDTH, return_sequences=True, return_state=True),
        layers.GRU(WIDTH, return_sequences=True),
    )
    write, copy = layers.Dense(VOCABULARY, "softmax"), layers.Dense(1, "sigmoid")
    source = keras.Input((LENGTH,), dtype="int32")
    target = keras.Input((LENGTH,), dtype="int32")
    encoded, state = encoder(embed(source))
    decoded = decoder(embed(target), initial_state=state)
    scores = layers.Dot(2)([decoded, encoded])
    model = keras.Model([source, target], [write(decoded), copy(decoded), layers.Softmax()(scores)])

    @tf.function
    def loss_fn(source: Any, target: Any, label: Any) -> Any:
        words, share, attention = model([source, target], training=True)
        rows = tf.shape(source)[0]
        one_hot = tf.one_hot(source, VOCABULARY, dtype=words.dtype)
        copied = tf.matmul(attention, one_hot)
        mixed = share * words + (1 - share) * copied
        index = tf.stack(
            [tf.repeat(tf.range(rows), LENGTH), tf.tile(tf.range(LENGTH), [rows]), tf.reshape(label, [-1])], 1
        )
        likelihood = tf.reshape(tf.gather_nd(mixed, index), [rows, LENGTH])
        kept = tf.cast(label > 0, words.dtype)
        return -tf.reduce_sum(tf.math.log(likelihood + 1e-9) * kept) / tf.reduce_sum(kept)

    spoken = tokens(3 * BATCH, seed=4, length=LENGTH + 1)
    data = batches(tokens(3 * BATCH), spoken[:, :-1], spoken[:, 1:])
    return Training(loss_fn, keras.optimizers.Adam(0.01), model.trainable_variables, data)


def mixing_by_fourier() -> Fit:
    """FNet: tokens are mixed by a Fourier transform over time and features."""
    entry = keras.Input((LENGTH,), dtype="int32")
    x = PositionEmbedding(LENGTH, VOCABULARY, WIDTH)(entry)
    for _ in range(2):
        mixed = ops.fft2((x, ops.zeros_like(x)))[0]
        x = layers.LayerNormalization()(x + mixed)
        x = layers.LayerNormalization()(x + layers.Dense(WIDTH)(layers.Dense(16, "gelu")(x)))
    x = layers.Dropout(0.2)(layers.GlobalAveragePooling1D()(x))
    model = keras.Model(entry, layers.Dense(1, "sigmoid")(x))
    model.compile("adam", "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC()])
    return Fit(model, tokens(), np.arange(ROWS) % 2, {"batch_size": BATCH, "epochs": 2})


def answers_in_a_passage() -> Fit:
    """Two outputs, the first and the last token of an answer, with a loss each; padding gets no probability."""
    entry = keras.Input((LENGTH,), dtype="int32", name="ids")
    kinds = keras.Input((LENGTH,), dtype="int32", name="kinds")
    x = PositionEmbedding(LENGTH, VOCABULARY, WIDTH)(entry) + layers.Embedding(2, WIDTH)(kinds)
    x = Block(WIDTH)(x)
    padding = ops.cast(ops.equal(entry, 0), x.dtype) * -1e9
    outputs = {
        name: layers.Softmax(name=name)(layers.Flatten()(layers.Dense(1, use_bias=False)(x)) + padding)
        for name in ("begin", "end")
    }
    model = keras.Model({"ids": entry, "kinds": kinds}, outputs)
    losses = dict.fromkeys(outputs, "sparse_categorical_crossentropy")
    model.compile(
        keras.optimizers.Adam(0.005), losses, metrics={"begin": "accuracy"}, loss_weights={"begin": 2, "end": 1}
    )
    x = {"ids": tokens(), "kinds": np.tile(np.arange(LENGTH) > 3, (ROWS, 1)).astype("int32")}
    y = {"begin": np.zeros(ROWS, "int32"), "end": np.ones(ROWS, "int32")}
    return Fit(model, x, y, {"batch_size": BATCH, "epochs": 2})


PROGRAMS = (
    Program(sentiment_from_strings, ranks=True),
    Program(topics_from_bags_of_words),
    Program(many_labels_of_papers, ranks=True),
    Program(characters_by_convolutions),
    Program(translation_with_attention, ranks=True),
    Program(sums_as_characters),
    Program(transformer_classifier),
    Program(small_gpt, ranks=True),
    Program(transformer_translation),
    Program(named_entities, options=ONCE, ranks=True),
    Program(masked_words, ranks=True),
    Program(word_vectors, ranks=True),
    Program(pointer_generator),
    Program(mixing_by_fourier, ranks=True),
    Program(answers_in_a_passage),
)
