"""Programs about time: handwriting, speech, video, weather, series of sensors."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from benchmarks.exactness_cases.case import Expected, Training
from benchmarks.program_cases.program import BATCH, ROWS, Fit, Program, batches

STEPS, CHANNELS = 6, 4


def series(rows: int = ROWS, steps: int = STEPS, channels: int = CHANNELS, seed: int = 0) -> Any:
    """Return floats [rows, steps, channels]."""
    return np.random.default_rng(seed).normal(size=(rows, steps, channels))


class CTCCost(layers.Layer):
    """Adds a CTC loss to the model, as OCR programs do: labels are an input of the model."""

    def call(self, labels: Any, probabilities: Any) -> Any:
        rows, steps = ops.shape(probabilities)[0], ops.shape(probabilities)[1]
        lengths = ops.sum(ops.cast(ops.greater(labels, 0), "int32"), 1)
        cost = ops.ctc_loss(labels, probabilities, lengths, ops.full((rows,), steps, "int32"), 0)
        self.add_loss(ops.mean(cost))
        return probabilities


def captchas() -> Fit:
    """OCR: convolutions, two bidirectional LSTMs with dropout, and a CTC loss that a layer adds."""
    image, labels = keras.Input((24, 8, 1), name="image"), keras.Input((3,), dtype="int32", name="label")
    x = image
    for filters in (4, 6):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu", kernel_initializer="he_normal")(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Reshape((6, 12))(x)
    x = layers.Dropout(0.2)(layers.Dense(8, "relu")(x))
    for units in (6, 4):
        x = layers.Bidirectional(layers.LSTM(units, return_sequences=True, dropout=0.25))(x)
    x = CTCCost()(labels, layers.Dense(6)(x))
    model = keras.Model([image, labels], x)
    model.compile(optimizer=keras.optimizers.Adam())
    rng = np.random.default_rng(0)
    inputs = {"image": rng.random((ROWS, 24, 8, 1)), "label": rng.integers(1, 6, (ROWS, 3)).astype("int32")}
    return Fit(model, tf.data.Dataset.from_tensor_slices(inputs).batch(BATCH), None, {"epochs": 2})


def handwriting() -> Fit:
    """Lines of handwriting with labels of unequal lengths, padded, and Keras's CTC as the compiled loss."""
    entry = keras.Input((32, 8, 1))
    x = layers.Conv2D(4, 3, padding="same", activation="relu")(entry)
    x = layers.MaxPooling2D((2, 2))(x)
    x = layers.Reshape((16, 16))(x)
    x = layers.Dense(8, "relu")(x)
    x = layers.Bidirectional(layers.LSTM(5, return_sequences=True))(x)
    model = keras.Model(entry, layers.Dense(9)(x))
    model.compile(keras.optimizers.Adam(0.01), keras.losses.CTC())
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 5, (ROWS, 1))
    labels = np.where(np.arange(4) < lengths, rng.integers(1, 9, (ROWS, 4)), 0)
    return Fit(model, rng.random((ROWS, 32, 8, 1)), labels, {"batch_size": BATCH, "epochs": 2})


class Spectrogram(layers.Layer):
    """Computes the logarithm of a short-time Fourier transform's magnitude, of each sample normalised."""

    def call(self, wave: Any) -> Any:
        magnitude = tf.abs(tf.signal.stft(wave, frame_length=32, frame_step=16, fft_length=32))
        mean, variance = tf.nn.moments(magnitude, [1, 2], keepdims=True)
        return tf.math.log1p((magnitude - mean) / tf.sqrt(variance + 1e-9) + 4.0)


def speech_to_text() -> Fit:
    """Speech recognition from waves: a spectrogram inside the model, strided convolutions, GRUs, CTC of TensorFlow."""

    def ctc(labels: Any, logits: Any) -> Any:
        labels, rows = tf.cast(labels, tf.int32), tf.shape(labels)[0]
        lengths = tf.reduce_sum(tf.cast(labels > 0, tf.int32), 1)
        steps = tf.fill([rows], tf.shape(logits)[1])
        return tf.nn.ctc_loss(labels, logits, lengths, steps, logits_time_major=False, blank_index=0)

    entry = keras.Input((256,))
    x = layers.Reshape((-1, 17, 1))(Spectrogram()(entry))
    x = layers.Conv2D(4, (5, 5), (1, 2), padding="same", use_bias=False)(x)
    x = layers.ReLU()(layers.GroupNormalization(2)(x))
    x = layers.Reshape((-1, 9 * 4))(x)
    for _ in range(2):
        x = layers.Bidirectional(layers.GRU(4, return_sequences=True))(x)
        x = layers.Dropout(0.5)(x)
    model = keras.Model(entry, layers.Dense(7)(x))
    model.compile(keras.optimizers.Adam(0.01), ctc)
    rng = np.random.default_rng(0)
    return Fit(
        model, rng.normal(size=(ROWS, 256)), rng.integers(1, 7, (ROWS, 3)).astype("int32"), {"batch_size": BATCH}
    )


def speech_by_transformer() -> Fit:
    """Convolutions that halve the time, a transformer over it with given relative places, and words of one of five."""
    entry = keras.Input((24, 6))
    x = entry
    for _ in range(2):
        x = layers.Conv1D(8, 5, strides=2, padding="same", activation="relu")(x)
    for _ in range(2):
        x = x + layers.MultiHeadAttention(2, 4, dropout=0.1)(layers.LayerNormalization()(x), x)
        x = x + layers.Dense(8)(layers.Dense(16, "relu")(x))
    model = keras.Model(entry, layers.Dense(5, "softmax")(layers.GlobalMaxPooling1D()(x)))
    model.compile("nadam", "categorical_crossentropy", metrics=["accuracy"])
    return Fit(model, series(steps=24, channels=6), np.eye(5)[np.arange(ROWS) % 5], {"batch_size": BATCH, "epochs": 2})


def video_classes() -> Fit:
    """A frozen image network on every frame, GRUs over the frames with a mask of those that exist."""
    frames, mask = keras.Input((5, 12, 12, 3)), keras.Input((5,), dtype="bool")
    image = keras.Sequential(
        [keras.Input((12, 12, 3)), layers.Conv2D(6, 3, 2, activation="relu"), layers.GlobalAveragePooling2D()]
    )
    image.trainable = False
    x = layers.TimeDistributed(image)(frames)
    x = layers.GRU(6, return_sequences=True)(x, mask=mask)
    x = layers.Dropout(0.4)(layers.GRU(4)(x))
    model = keras.Model([frames, mask], layers.Dense(3, "softmax")(layers.Dense(4, "relu")(x)))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    rng = np.random.default_rng(0)
    seen = np.arange(5) < rng.integers(1, 6, (ROWS, 1))
    x = [rng.random((ROWS, 5, 12, 12, 3)), seen]
    return Fit(model, x, np.arange(ROWS) % 3, {"batch_size": BATCH, "epochs": 2, "validation_split": 0.3})


def video_in_three_dimensions() -> Fit:
    """Convolutions over time and space, with the mean over both."""
    entry = keras.Input((4, 8, 8, 1))
    x = layers.Conv3D(4, 3, padding="same", activation="relu")(entry)
    x = layers.MaxPooling3D(2)(x)
    x = layers.LayerNormalization()(layers.Conv3D(6, 2, activation="relu")(x))
    x = layers.Dropout(0.3)(layers.Dense(8, "relu")(layers.GlobalAveragePooling3D()(x)))
    model = keras.Model(entry, layers.Dense(1, "sigmoid")(x))
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["acc"])
    x = np.random.default_rng(0).random((ROWS, 4, 8, 8, 1))
    return Fit(model, x, np.arange(ROWS) % 2, {"batch_size": BATCH, "epochs": 2})


def next_frames() -> Fit:
    """ConvLSTMs that predict every next frame of a video of unknown length."""
    entry = keras.Input((None, 6, 6, 1))
    x = layers.ConvLSTM2D(3, 3, padding="same", return_sequences=True, activation="relu")(entry)
    x = layers.LayerNormalization()(x)
    x = layers.ConvLSTM2D(3, 1, padding="same", return_sequences=True, dropout=0.1)(x)
    model = keras.Model(entry, layers.Conv3D(1, 3, activation="sigmoid", padding="same")(x))
    model.compile("adam", "binary_crossentropy")
    video = np.random.default_rng(0).random((ROWS, 4, 6, 6, 1))
    callbacks = [keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0), keras.callbacks.EarlyStopping("loss")]
    return Fit(model, video[:, :-1], video[:, 1:], {"batch_size": BATCH, "epochs": 3, "callbacks": callbacks})


def weather() -> Fit:
    """The last values of a series, by Keras's own windows, an LSTM and a dense layer; checkpoints by callback."""
    values = series(1, 40)[0]
    data = keras.utils.timeseries_dataset_from_array(values[:-4], values[4:, :1], 5, batch_size=BATCH, sampling_rate=2)
    model = keras.Sequential([keras.Input((5, CHANNELS)), layers.LSTM(6), layers.Dropout(0.2), layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.001), "mse", metrics=["mae"])
    stop = keras.callbacks.EarlyStopping("val_loss", min_delta=10, patience=1, restore_best_weights=True)
    return Fit(model, data, None, {"epochs": 4, "validation_data": data.take(2), "callbacks": [stop]})


def traffic() -> Training:
    """Roads as a graph: a product with its adjacency at each hour, then an LSTM over time for each road."""
    rng = np.random.default_rng(0)
    roads = 5
    adjacency = tf.constant((rng.random((roads, roads)) < 0.4) / 2.0)
    weight = tf.Variable(rng.normal(size=(2, 4)), name="graph_weight")
    lstm, head = layers.LSTM(6), layers.Dense(3)
    lstm.build((None, STEPS, 8))
    head.build((None, 6))

    @tf.function
    def loss_fn(x: Any, y: Any) -> Any:
        x = tf.transpose(x, [2, 0, 1, 3])  # road, sample, hour, feature
        near = tf.einsum("pq,qbtf->pbtf", adjacency, x @ weight)
        x = tf.nn.relu(tf.concat([x @ weight, near], -1))
        shape = tf.shape(x)
        x = lstm(tf.reshape(x, [roads * shape[1], STEPS, 8]))
        x = tf.transpose(tf.reshape(head(x), [roads, shape[1], 3]), [1, 2, 0])
        return tf.reduce_mean(tf.square(x - y))

    data = batches(rng.normal(size=(3 * BATCH, STEPS, roads, 2)), rng.normal(size=(3 * BATCH, 3, roads)))
    trained = [weight, *lstm.trainable_variables, *head.trainable_variables]
    return Training(loss_fn, keras.optimizers.RMSprop(0.001), trained, data)


def anomalies_of_sensors() -> Fit:
    """A convolutional autoencoder of windows; it is trained to give its input back."""
    model = keras.Sequential(
        [
            keras.Input((16, 1)),
            layers.Conv1D(6, 5, 2, padding="same", activation="relu"),
            layers.Dropout(0.2),
            layers.Conv1D(4, 5, 2, padding="same", activation="relu"),
            layers.Conv1DTranspose(4, 5, 2, padding="same", activation="relu"),
            layers.Dropout(0.2),
            layers.Conv1DTranspose(6, 5, 2, padding="same", activation="relu"),
            layers.Conv1DTranspose(1, 5, padding="same"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.001), "mse")
    x = series(steps=16, channels=1)
    return Fit(model, x, x, {"batch_size": BATCH, "epochs": 2, "validation_split": 0.1})


def dilated_waves() -> Fit:
    """Causal dilated convolutions with gates and skip connections that write the next of 16 levels."""
    entry = keras.Input((20,), dtype="int32")
    x = layers.Embedding(16, 6)(entry)
    skips = []
    for i in range(4):
        gate = layers.Conv1D(6, 2, padding="causal", dilation_rate=2**i, activation="sigmoid")(x)
        y = layers.Conv1D(6, 2, padding="causal", dilation_rate=2**i, activation="tanh")(x) * gate
        skips.append(layers.Conv1D(6, 1)(y))
        x = layers.Add()([x, layers.Conv1D(6, 1)(y)])
    model = keras.Model(
        entry, layers.Conv1D(16, 1)(layers.Conv1D(6, 1, activation="relu")(layers.ReLU()(layers.Add()(skips))))
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    wave = np.random.default_rng(0).integers(0, 16, (ROWS, 21))
    return Fit(model, wave[:, :-1], wave[:, 1:], {"batch_size": BATCH, "epochs": 2, "steps_per_epoch": 2})


class Cell(layers.Layer):
    """A recurrent cell of the user's own: a gate between the last state and a candidate, with normalisation."""

    def __init__(self, units: int, **options: Any) -> None:
        super().__init__(**options)
        self.units = self.state_size = self.output_size = units
        self.both, self.norm = layers.Dense(2 * units), layers.LayerNormalization()

    def build(self, shape: Any) -> None:
        self.both.build((None, shape[-1] + self.units))
        self.norm.build((None, self.units))

    def call(self, x: Any, states: Any) -> Any:
        gate, candidate = ops.split(self.both(ops.concatenate([x, states[0]], -1)), 2, -1)
        gate = ops.sigmoid(gate)
        state = self.norm(gate * states[0] + (1 - gate) * ops.tanh(candidate))
        return state, [state]


def cells_of_ones_own() -> Fit:
    """A recurrent layer over a cell of the user's own and stacked LSTM cells, over sequences of unequal lengths."""
    entry = keras.Input((None, CHANNELS))
    x = layers.Masking(-1.0)(entry)
    x = layers.RNN(Cell(6), return_sequences=True)(x)
    x = layers.RNN([layers.LSTMCell(5), layers.GRUCell(4)])(x)
    x = layers.Dropout(0.3)(x)
    model = keras.Model(entry, layers.Dense(2)(x))
    model.compile(keras.optimizers.Adam(0.01), "huber")
    x = series()
    x[np.arange(STEPS) >= np.random.default_rng(1).integers(2, STEPS + 1, (ROWS, 1))] = -1.0
    return Fit(model, x, series(steps=2, channels=1)[..., 0], {"batch_size": BATCH, "epochs": 2})


def remembered_between_batches() -> Fit:
    """A stateful LSTM: each batch goes on where the one before ended, row by row."""
    entry = keras.Input(batch_shape=(BATCH, STEPS, CHANNELS))
    x = layers.LSTM(5, stateful=True)(entry)
    model = keras.Model(entry, layers.Dense(1)(x))
    model.compile("rmsprop", "mse")
    return Fit(model, tf.data.Dataset.from_tensor_slices((series(3 * BATCH), series(3 * BATCH)[:, 0, :1])).batch(BATCH))


def online_forecasts() -> Training:
    """A decoder that is fed its own predictions or, by a mask of draws, the true values: a loop over hours."""
    cell, head = layers.GRUCell(6), layers.Dense(1)
    cell.build((None, 1))
    head.build((None, 6))

    @tf.function
    def loss_fn(x: Any, y: Any, forced: Any) -> Any:
        state = tf.zeros([tf.shape(x)[0], 6], x.dtype)
        for t in range(4):
            _, (state,) = cell(x[:, t], [state])
        value, total = x[:, -1], tf.zeros([tf.shape(x)[0]], x.dtype)
        for t in tf.range(3):
            hidden, (state,) = cell(value, [state])
            guess = head(hidden)
            total += tf.reduce_sum(tf.square(guess - y[:, t]), 1)
            value = tf.where(forced[:, t, None], y[:, t], guess)
            value = tf.ensure_shape(value, [None, 1])
            state = tf.ensure_shape(state, [None, 6])
        return tf.reduce_mean(total)

    rng = np.random.default_rng(0)
    data = batches(series(3 * BATCH, 4, 1), series(3 * BATCH, 3, 1, seed=1), rng.random((3 * BATCH, 3)) < 0.5)
    return Training(loss_fn, keras.optimizers.Adam(0.01), [*cell.trainable_variables, *head.trainable_variables], data)


def times_to_the_next_event() -> Training:
    """A survival model: the likelihood of the time to the next event, partly censored, as a Weibull distribution."""
    entry = keras.Input((STEPS, CHANNELS))
    x = layers.SimpleRNN(6, return_sequences=True)(entry)
    x = layers.Dropout(0.2)(x)
    model = keras.Model(entry, layers.Dense(2, "softplus")(x))

    @tf.function
    def loss_fn(x: Any, time: Any, seen: Any) -> Any:
        scale, shape = tf.unstack(model(x, training=True) + 1e-3, axis=-1)
        ratio = time / scale
        hazard = tf.math.log(shape) + (shape - 1) * tf.math.log(ratio) - tf.math.log(scale)
        likelihood = seen * hazard - tf.pow(ratio, shape)
        return -tf.reduce_mean(tf.clip_by_value(likelihood, -20.0, 20.0))

    rng = np.random.default_rng(0)
    shape = (3 * BATCH, STEPS)
    data = batches(series(3 * BATCH), rng.exponential(size=shape) + 0.1, (rng.random(shape) < 0.6) * 1.0)
    return Training(loss_fn, keras.optimizers.Adam(0.01), model.trainable_variables, data)


PROGRAMS = (
    Program(captchas, ranks=True, dtype="float32"),
    Program(handwriting, ranks=True, dtype="float32"),
    Program(speech_to_text, ranks=True, dtype="float32"),
    Program(speech_by_transformer),
    Program(video_classes, ranks=True),
    Program(video_in_three_dimensions, dtype="float32"),
    Program(next_frames, ranks=True),
    Program(weather, ranks=True),
    Program(traffic),
    Program(anomalies_of_sensors),
    Program(dilated_waves),
    Program(cells_of_ones_own, ranks=True),
    Program(remembered_between_batches, Expected.REFUSED, "its state has a row for each sample of the whole batch"),
    Program(online_forecasts),
    Program(times_to_the_next_event),
)
