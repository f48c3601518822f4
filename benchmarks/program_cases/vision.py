"""Programs about images: classes, segments, depth, larger images, and layers that their users wrote for them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from benchmarks.exactness_cases.case import Expected, Training
from benchmarks.program_cases.program import BATCH, ONCE, ROWS, Fit, Program, batches


def images(size: int = 8, channels: int = 3, rows: int = ROWS, seed: int = 0) -> Any:
    """Return floats [rows, size, size, channels] between 0 and 1."""
    return np.random.default_rng(seed).random((rows, size, size, channels))


def digits() -> Fit:
    """A small convolutional network with augmentation, checkpoints of its weights and a schedule by callback."""
    model = keras.Sequential(
        [
            keras.Input((10, 10, 1)),
            layers.Rescaling(1 / 255.0),
            layers.RandomFlip("horizontal", seed=1),
            layers.RandomTranslation(0.1, 0.1, seed=2),
            layers.Conv2D(4, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(6, 3, activation="relu"),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(10, "softmax"),
        ]
    )
    model.compile("adam", "categorical_crossentropy", metrics=["accuracy"])
    decay = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
    x, y = images(10, 1) * 255, np.eye(10)[np.arange(ROWS) % 10]
    return Fit(model, x, y, {"batch_size": BATCH, "epochs": 2, "validation_split": 0.1, "callbacks": [decay]})


@keras.saving.register_keras_serializable()
class Patches(layers.Layer):
    """Cuts images into patches by ``tf.image.extract_patches``."""

    def __init__(self, size: int, **options: Any) -> None:
        super().__init__(**options)
        self.size = size

    def call(self, x: Any) -> Any:
        window = [1, self.size, self.size, 1]
        patches = tf.image.extract_patches(x, window, window, [1, 1, 1, 1], "VALID")
        return tf.reshape(patches, [tf.shape(x)[0], patches.shape[1] * patches.shape[2], patches.shape[3]])

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "size": self.size}


@keras.saving.register_keras_serializable()
class Places(layers.Layer):
    """Projects patches and adds an embedding of their places."""

    def __init__(self, number: int, width: int, **options: Any) -> None:
        super().__init__(**options)
        self.number, self.width = number, width
        self.project, self.place = layers.Dense(width), layers.Embedding(number, width)

    def build(self, shape: Any) -> None:
        self.project.build(shape)
        self.place.build(None)

    def call(self, patches: Any) -> Any:
        return self.project(patches) + self.place(ops.expand_dims(ops.arange(self.number), 0))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "number": self.number, "width": self.width}


def vision_transformer() -> Fit:
    """Patches, an embedding of places, transformer blocks, and a head with dropout."""
    entry = keras.Input((12, 12, 3))
    x = Places(9, 8)(Patches(4)(layers.RandomFlip(seed=3)(entry)))
    for _ in range(2):
        y = layers.LayerNormalization(epsilon=1e-6)(x)
        x = layers.Add()([layers.MultiHeadAttention(2, 8, dropout=0.1)(y, y), x])
        y = layers.LayerNormalization(epsilon=1e-6)(x)
        x = layers.Add()([layers.Dropout(0.1)(layers.Dense(8, "gelu")(y)), x])
    x = layers.Dropout(0.5)(layers.Flatten()(layers.LayerNormalization(epsilon=1e-6)(x)))
    model = keras.Model(entry, layers.Dense(4)(layers.Dense(8, "gelu")(x)))
    optimizer = keras.optimizers.AdamW(0.001, weight_decay=0.0001)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return Fit(model, images(12), np.arange(ROWS) % 4, {"batch_size": BATCH, "epochs": 2, "validation_split": 0.1})


class StochasticDepth(layers.Layer):
    """Leaves out a whole branch for some samples."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.draws = keras.random.SeedGenerator(1337)

    def call(self, x: Any, training: bool = False) -> Any:
        if not training:
            return x
        kept = 1 - self.rate
        shape = (ops.shape(x)[0],) + (1,) * (len(x.shape) - 1)
        noise = ops.floor(kept + keras.random.uniform(shape, 0, 1, seed=self.draws, dtype=x.dtype))
        return x / kept * noise


def compact_transformer() -> Fit:
    """CCT: convolutions make the tokens, branches are left out at random, attention pools the sequence."""
    entry = keras.Input((12, 12, 3))
    x = entry
    for filters in (6, 8):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False, activation="relu")(x)
        x = layers.MaxPooling2D(3, 2, "same")(layers.ZeroPadding2D(1)(x))
    x = layers.Reshape((-1, 8))(x)
    for i in range(2):
        attended = layers.MultiHeadAttention(2, 8, dropout=0.1)(*[layers.LayerNormalization(epsilon=1e-5)(x)] * 2)
        x = layers.Add()([StochasticDepth(0.1 * i)(attended), x])
        y = layers.Dropout(0.1)(layers.Dense(8, "gelu")(layers.LayerNormalization(epsilon=1e-5)(x)))
        x = layers.Add()([StochasticDepth(0.1 * i)(y), x])
    weights = ops.softmax(layers.Dense(1)(x), axis=1)
    x = ops.squeeze(ops.matmul(ops.transpose(weights, (0, 2, 1)), x), -2)
    model = keras.Model(entry, layers.Dense(3)(x))
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    model.compile(keras.optimizers.AdamW(0.001, weight_decay=0.0001), loss, metrics=["accuracy"])
    return Fit(model, images(12), np.eye(3)[np.arange(ROWS) % 3], {"batch_size": BATCH, "epochs": 2})


class ShiftedWindows(layers.Layer):
    """Attention inside windows that are shifted by half of their size; the image is padded to whole windows."""

    def __init__(self, width: int, window: int, shift: int) -> None:
        super().__init__()
        self.width, self.window, self.shift = width, window, shift
        self.qkv, self.out, self.norm = layers.Dense(3 * width), layers.Dense(width), layers.LayerNormalization()

    def build(self, shape: Any) -> None:
        number = (2 * self.window - 1) ** 2
        self.table = self.add_weight(shape=(number, 2), initializer="random_normal", name="table")
        place = np.stack(np.meshgrid(*[np.arange(self.window)] * 2, indexing="ij")).reshape(2, -1)
        offset = place[:, :, None] - place[:, None, :] + self.window - 1
        self.index = tf.constant(offset[0] * (2 * self.window - 1) + offset[1])
        self.norm.build(shape)
        self.qkv.build(shape)
        self.out.build(shape)

    def call(self, x: Any) -> Any:
        height, window, number = x.shape[1], self.window, self.window**2
        pad = tf.math.floormod(-tf.shape(x)[1], window)
        y = tf.pad(self.norm(x), [[0, 0], [0, pad], [0, pad], [0, 0]])
        if self.shift:
            y = tf.roll(y, [-self.shift, -self.shift], [1, 2])
        n = (height + window - 1) // window
        y = tf.reshape(y, [-1, n, window, n, window, self.width])
        y = tf.reshape(tf.transpose(y, [0, 1, 3, 2, 4, 5]), [-1, number, self.width])
        q, k, v = tf.unstack(tf.reshape(self.qkv(y), [-1, number, 3, 2, self.width // 2]), axis=2)
        scores = tf.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(self.width / 2)
        scores += tf.transpose(tf.gather(self.table, self.index), [2, 0, 1])[None]
        if self.shift:
            scores = tf.reshape(scores, [-1, n * n, 2, number, number]) + self._mask(n, scores.dtype)
            scores = tf.reshape(scores, [-1, 2, number, number])
        y = self.out(tf.reshape(tf.einsum("bhqk,bkhd->bqhd", tf.nn.softmax(scores), v), [-1, number, self.width]))
        y = tf.transpose(tf.reshape(y, [-1, n, n, window, window, self.width]), [0, 1, 3, 2, 4, 5])
        y = tf.reshape(y, [-1, n * window, n * window, self.width])
        if self.shift:
            y = tf.roll(y, [self.shift, self.shift], [1, 2])
        return x + y[:, :height, :height]

    def _mask(self, n: int, dtype: Any) -> Any:
        part = np.repeat(np.arange(n), self.window)
        part[-self.shift :] = n
        part = (part[:, None] * (n + 1) + part[None]).reshape(n, self.window, n, self.window)
        part = part.transpose(0, 2, 1, 3).reshape(n * n, -1)
        return tf.constant(np.where(part[:, :, None] == part[:, None, :], 0.0, -100.0)[None, :, None], dtype)


def swin() -> Fit:
    """Shifted windows over images that are no multiple of the window, merged once."""
    entry = keras.Input((10, 10, 3))
    x = layers.Conv2D(8, 2, 2)(entry)
    for shift in (0, 1):
        x = ShiftedWindows(8, 3, shift)(x)
        x = x + layers.Dense(8)(layers.Dense(16, "gelu")(layers.LayerNormalization()(x)))
    x = layers.GlobalAveragePooling2D()(layers.LayerNormalization()(x))
    model = keras.Model(entry, layers.Dense(3, "softmax")(layers.Dropout(0.1)(x)))
    model.compile("adamw", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return Fit(model, images(10), np.arange(ROWS) % 3, {"batch_size": BATCH, "epochs": 2})


def segments_of_images() -> Fit:
    """A U-Net: convolutions down and up, with connections between equal sizes, and a class for each pixel."""
    entry = keras.Input((12, 12, 3))
    x, skips = entry, []
    for filters in (4, 6):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = layers.GroupNormalization(2)(layers.Conv2D(filters, 3, padding="same", activation="relu")(x))
        skips.append(x)
        x = layers.SpatialDropout2D(0.1)(layers.MaxPooling2D()(x))
    x = layers.SeparableConv2D(8, 3, padding="same", activation="relu")(x)
    for skip in reversed(skips):
        x = layers.Conv2DTranspose(skip.shape[-1], 3, 2, padding="same")(x)
        x = layers.Conv2D(skip.shape[-1], 3, padding="same", activation="relu")(layers.Concatenate()([x, skip]))
    model = keras.Model(entry, layers.Conv2D(3, 1, activation="softmax")(x))
    mean_iou = keras.metrics.MeanIoU(3, sparse_y_pred=False, name="iou")
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy", mean_iou])
    classes = np.random.default_rng(1).integers(0, 3, (ROWS, 12, 12, 1))
    return Fit(model, images(12), classes, {"batch_size": BATCH, "epochs": 2})


def dice_of_segments() -> Fit:
    """Segmentation by Dice's loss over all pixels of the batch, which is no mean over samples."""

    def dice(y_true: Any, y_pred: Any) -> Any:
        y_true = ops.cast(y_true, y_pred.dtype)
        both = 2.0 * ops.sum(y_true * y_pred) + 1.0
        return 1.0 - both / (ops.sum(y_true) + ops.sum(y_pred) + 1.0)

    entry = keras.Input((8, 8, 1))
    x = layers.Conv2D(4, 3, padding="same", activation="relu")(entry)
    x = layers.UpSampling2D(2, interpolation="bilinear")(layers.AveragePooling2D(2)(x))
    model = keras.Model(entry, layers.Conv2D(1, 3, padding="same", activation="sigmoid")(x))
    model.compile("adam", dice)
    mask = (images(8, 1, seed=1) > 0.6).astype("float32")
    return Fit(model, images(8, 1), mask, {"batch_size": BATCH, "epochs": 2})


def super_resolution() -> Fit:
    """Four times as many pixels from channels (sub-pixel), judged by the signal to noise ratio as a metric."""

    def signal_to_noise(y_true: Any, y_pred: Any) -> Any:
        return tf.image.psnr(tf.cast(y_true, y_pred.dtype), y_pred, max_val=1.0)

    entry = keras.Input((None, None, 1))
    x = layers.Conv2D(6, 5, padding="same", activation="relu", kernel_initializer="orthogonal")(entry)
    x = layers.Conv2D(4, 3, padding="same", kernel_initializer="orthogonal")(x)
    model = keras.Model(entry, layers.Lambda(lambda t: tf.nn.depth_to_space(t, 2))(x))
    model.compile(keras.optimizers.Adam(0.001), "mse", metrics=[signal_to_noise])
    return Fit(model, images(6, 1), images(12, 1, seed=1), {"batch_size": BATCH, "epochs": 2})


def low_light() -> Training:
    """Curves that brighten dark images, without labels: losses of colours, exposure, smoothness and contrast."""
    entry = keras.Input((16, 16, 3))
    x = layers.Conv2D(4, 3, padding="same", activation="relu")(entry)
    y = layers.Conv2D(4, 3, padding="same", activation="relu")(x)
    curves = layers.Conv2D(6, 3, padding="same", activation="tanh")(layers.Concatenate()([x, y]))
    model = keras.Model(entry, curves)

    @tf.function
    def loss_fn(image: Any) -> Any:
        curves = model(image, training=True)
        bright = image
        for curve in tf.split(curves, 2, axis=-1):
            bright = bright + curve * (tf.square(bright) - bright)
        red, green, blue = tf.unstack(tf.reduce_mean(bright, [1, 2]), axis=-1)
        colour = tf.reduce_mean(tf.sqrt((red - green) ** 2 + (red - blue) ** 2 + (blue - green) ** 2 + 1e-12))
        light = tf.nn.avg_pool2d(tf.reduce_mean(bright, 3, keepdims=True), 4, 4, "VALID")
        exposure = tf.reduce_mean(tf.square(light - 0.6))
        kernel = tf.constant([[0.0, 1, 0], [1, -4, 1], [0, 1, 0]], bright.dtype)[:, :, None, None]
        before, after = (
            tf.nn.conv2d(tf.nn.avg_pool2d(tf.reduce_mean(t, 3, keepdims=True), 4, 4, "VALID"), kernel, 1, "SAME")
            for t in (image, bright)
        )
        contrast = tf.reduce_mean(tf.square(before - after))
        smooth = tf.reduce_sum(tf.square(curves[:, 1:] - curves[:, :-1])) / tf.cast(tf.size(curves), curves.dtype)
        return 5.0 * colour + 10.0 * exposure + contrast + 20.0 * smooth

    return Training(
        loss_fn, keras.optimizers.Adam(0.001), model.trainable_variables, batches(images(16, rows=3 * BATCH) / 4)
    )


class Deformable(layers.Layer):
    """A convolution whose taps are moved by learned offsets; values between pixels are interpolated."""

    def __init__(self, filters: int) -> None:
        super().__init__()
        self.offsets = layers.Conv2D(18, 3, padding="same", kernel_initializer="random_normal")
        self.mix = layers.Dense(filters)

    def build(self, shape: Any) -> None:
        self.offsets.build(shape)
        self.mix.build((None, None, None, 9 * shape[-1]))

    def call(self, x: Any) -> Any:
        rows, height, width, channels = tf.shape(x)[0], x.shape[1], x.shape[2], x.shape[3]
        offset = tf.reshape(self.offsets(x), [rows, height, width, 9, 2])
        taps = tf.constant([[i, j] for i in (-1.0, 0, 1) for j in (-1.0, 0, 1)], x.dtype)
        pixel = tf.stack(tf.meshgrid(tf.range(height), tf.range(width), indexing="ij"), -1)
        place = tf.cast(pixel, x.dtype)[None, :, :, None] + taps + offset
        place = tf.clip_by_value(place, 0.0, tf.constant([height - 1.0, width - 1.0], x.dtype))
        low = tf.floor(place)
        share = place - low
        low = tf.cast(low, tf.int32)
        high = tf.minimum(low + 1, [height - 1, width - 1])
        total = 0.0
        for i, weight_i in ((low[..., 0], 1 - share[..., 0]), (high[..., 0], share[..., 0])):
            for j, weight_j in ((low[..., 1], 1 - share[..., 1]), (high[..., 1], share[..., 1])):
                picked = tf.gather_nd(x, tf.stack([i, j], -1), batch_dims=1)
                total += picked * (weight_i * weight_j)[..., None]
        return self.mix(tf.reshape(total, [rows, height, width, 9 * channels]))


def deformable_convolutions() -> Fit:
    """A convolution with learned offsets between two of the usual kind."""
    entry = keras.Input((7, 7, 2))
    x = layers.Conv2D(3, 3, padding="same", activation="relu")(entry)
    x = layers.ReLU()(Deformable(4)(x))
    model = keras.Model(entry, layers.Dense(2)(layers.GlobalAveragePooling2D()(x)))
    model.compile("sgd", "mse")
    return Fit(model, images(7, 2), images(1, 2)[:, 0, 0], {"batch_size": BATCH, "epochs": 2})


def turned_by_a_network() -> Fit:
    """A spatial transformer: a small network gives each image's affine map, and the image is sampled by it."""
    entry = keras.Input((8, 8, 1))
    theta = layers.Dense(6, kernel_initializer="random_normal")(layers.Flatten()(layers.AveragePooling2D(2)(entry)))

    def sample(inputs: Any) -> Any:
        image, theta = inputs
        rows = tf.shape(image)[0]
        theta = tf.reshape(theta, [rows, 2, 3]) + tf.eye(2, 3, dtype=image.dtype)
        line = tf.linspace(tf.constant(-1.0, image.dtype), 1.0, 8)
        x, y = tf.meshgrid(line, line)
        grid = tf.stack([tf.reshape(x, [-1]), tf.reshape(y, [-1]), tf.ones([64], image.dtype)])
        place = (tf.matmul(theta, tf.tile(grid[None], [rows, 1, 1])) + 1.0) * 3.5
        x, y = place[:, 0], place[:, 1]
        x0, y0 = tf.floor(x), tf.floor(y)
        flat, total = tf.reshape(image, [rows, 64, 1]), 0.0
        for dx in (0.0, 1.0):
            for dy in (0.0, 1.0):
                weight = (1 - tf.abs(x - x0 - dx)) * (1 - tf.abs(y - y0 - dy))
                column = tf.cast(tf.clip_by_value(x0 + dx, 0.0, 7.0), tf.int32)
                row = tf.cast(tf.clip_by_value(y0 + dy, 0.0, 7.0), tf.int32)
                total += weight[..., None] * tf.gather(flat, row * 8 + column, batch_dims=1)
        return tf.reshape(total, [rows, 8, 8, 1])

    x = layers.Lambda(sample, output_shape=(8, 8, 1))([entry, theta])
    x = layers.Flatten()(layers.Conv2D(3, 3, activation="relu")(x))
    model = keras.Model(entry, layers.Dense(4, "softmax")(x))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return Fit(model, images(8, 1), np.arange(ROWS) % 4, {"batch_size": BATCH, "epochs": 2})


class Squash(layers.Layer):
    """Capsules: votes of the lower for the higher ones are agreed on in three rounds of routing."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.number, self.width = number, width

    def build(self, shape: Any) -> None:
        self.matrix = self.add_weight(shape=(shape[1], self.number, shape[2], self.width), name="matrix")

    def call(self, lower: Any) -> Any:
        votes = tf.einsum("bid,ijde->bije", lower, self.matrix)
        logits = tf.zeros_like(votes[..., 0])
        for _ in range(3):
            total = tf.reduce_sum(tf.nn.softmax(logits, 2)[..., None] * votes, 1)
            square = tf.reduce_sum(tf.square(total), -1, keepdims=True)
            higher = total * square / (1 + square) / tf.sqrt(square + 1e-9)
            logits += tf.reduce_sum(votes * higher[:, None], -1)
        return higher


def capsules() -> Fit:
    """Routing between capsules and the margin loss of their lengths."""

    def margin(y_true: Any, y_pred: Any) -> Any:
        y_true = ops.cast(y_true, y_pred.dtype)
        present = y_true * ops.square(ops.maximum(0.0, 0.9 - y_pred))
        return ops.sum(present + 0.5 * (1 - y_true) * ops.square(ops.maximum(0.0, y_pred - 0.1)), axis=-1)

    entry = keras.Input((8, 8, 1))
    x = layers.Conv2D(8, 3, 2, activation="relu")(entry)
    x = layers.Reshape((-1, 4))(layers.Conv2D(8, 2)(x))
    x = Squash(3, 5)(x)
    model = keras.Model(entry, ops.norm(x + 1e-7, axis=-1))
    model.compile(keras.optimizers.Adam(0.01), margin, metrics=["accuracy"])
    return Fit(model, images(8, 1), np.eye(3)[np.arange(ROWS) % 3], {"batch_size": BATCH, "epochs": 2})


def style_of_images() -> Training:
    """Style transfer by a network: Gram matrices of a frozen network's features, per sample, and a variation loss."""
    draw = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(4, 3, padding="same", activation="relu"),
            layers.Conv2D(3, 3, padding="same"),
        ]
    )
    judge = keras.Sequential(
        [keras.Input((8, 8, 3)), layers.Conv2D(4, 3, activation="relu"), layers.Conv2D(5, 3, activation="relu")]
    )
    features = keras.Model(judge.inputs, [layer.output for layer in judge.layers])
    features.trainable = False
    painting = tf.constant(images(8, rows=1, seed=9))

    def gram(t: Any) -> Any:
        size = tf.cast(t.shape[1] * t.shape[2], t.dtype)
        return tf.einsum("bijc,bijd->bcd", t, t) / size

    @tf.function
    def loss_fn(photo: Any) -> Any:
        drawn = draw(photo, training=True)
        ours, style, content = features(drawn), features(painting), features(photo)
        loss = tf.reduce_mean(tf.square(ours[1] - content[1]))
        for a, b in zip(ours, style, strict=True):
            loss += tf.reduce_mean(tf.square(gram(a) - gram(b)))
        return loss + 1e-3 * tf.reduce_mean(tf.image.total_variation(drawn))

    return Training(loss_fn, keras.optimizers.Adam(0.01), draw.trainable_variables, batches(images(8, rows=3 * BATCH)))


def mixer() -> Fit:
    """An MLP-Mixer: dense layers over patches and over features, by turns, with gates as of gMLP."""
    entry = keras.Input((12, 12, 3))
    x = layers.Dense(8)(Patches(3)(entry))
    for _ in range(2):
        y = layers.Permute((2, 1))(layers.LayerNormalization()(x))
        y = layers.Permute((2, 1))(layers.Dense(16, "gelu")(y))
        x = x + y
        u, v = ops.split(layers.Dense(16, "gelu")(layers.LayerNormalization()(x)), 2, axis=-1)
        x = x + layers.Dropout(0.2)(layers.Dense(8)(u * v))
    model = keras.Model(entry, layers.Dense(5)(layers.GlobalAveragePooling1D()(x)))
    model.compile(
        keras.optimizers.Adam(0.005),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="acc")],
    )
    return Fit(model, images(12), np.arange(ROWS) % 5, {"batch_size": BATCH, "epochs": 2})


def depth_of_scenes() -> Fit:
    """Depth maps by a loss of edges, structural similarity and differences, which a layer adds."""
    entry = keras.Input((12, 12, 3))
    x = layers.Conv2D(4, 3, 2, padding="same")(entry)
    x = layers.LeakyReLU(negative_slope=0.2)(x)
    x = layers.UpSampling2D()(layers.Conv2D(6, 3, padding="same", activation="swish")(x))
    model = keras.Model(entry, layers.Conv2D(1, 3, padding="same", activation="tanh")(x))

    def loss(target: Any, found: Any) -> Any:
        target = tf.cast(target, found.dtype)
        dy, dx = tf.image.image_gradients(target)
        ey, ex = tf.image.image_gradients(found)
        edges = tf.reduce_mean(tf.abs(ey) * tf.exp(-tf.abs(dy))) + tf.reduce_mean(tf.abs(ex) * tf.exp(-tf.abs(dx)))
        alike = tf.reduce_mean(1 - tf.image.ssim(target, found, max_val=2.0, filter_size=5))
        return 0.85 * alike + 0.1 * tf.reduce_mean(tf.abs(target - found)) + 0.9 * edges

    model.compile(keras.optimizers.Adam(0.002), loss)
    return Fit(model, images(12), images(12, 1, seed=1), {"batch_size": BATCH, "epochs": 2})


def fine_tuning() -> Fit:
    """A network of keras.applications, its batch norm frozen, between augmentation and a new head."""
    base = keras.applications.MobileNetV2(input_shape=(32, 32, 3), alpha=0.35, include_top=False, weights=None)
    for i, layer in enumerate(base.layers):
        layer.trainable = i >= len(base.layers) - 6 and not isinstance(layer, layers.BatchNormalization)
    entry = keras.Input((32, 32, 3))
    x = layers.RandomRotation(0.1, seed=4)(layers.RandomFlip("horizontal", seed=3)(entry))
    x = base(layers.Rescaling(2.0, offset=-1)(x), training=False)
    x = layers.Dropout(0.2)(layers.GlobalAveragePooling2D()(x))
    model = keras.Model(entry, layers.Dense(1)(x))
    model.compile(
        keras.optimizers.Adam(1e-4),
        keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.BinaryAccuracy()],
    )
    return Fit(model, images(32), np.arange(ROWS) % 2, {"batch_size": BATCH})


def residual_network() -> Fit:
    """Residual blocks with batch norm in training mode."""
    entry = keras.Input((8, 8, 3))
    x = layers.Conv2D(6, 3, padding="same")(entry)
    for _ in range(2):
        y = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(6, 3, padding="same", use_bias=False)(x)))
        x = layers.Add()([x, layers.BatchNormalization()(layers.Conv2D(6, 3, padding="same", use_bias=False)(y))])
    model = keras.Model(entry, layers.Dense(4, "softmax")(layers.GlobalAveragePooling2D()(x)))
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return Fit(model, images(), np.arange(ROWS) % 4, {"batch_size": BATCH, "epochs": 2})


def attention_of_many_patches() -> Fit:
    """Multiple instances: a bag of images has one label, and attention with gates weighs its images."""
    bag = keras.Input((4, 6, 6, 1))
    x = layers.TimeDistributed(layers.Flatten())(bag)
    x = layers.Dense(8, "relu")(x)
    gate = layers.Dense(6, "tanh")(x) * layers.Dense(6, "sigmoid")(x)
    weights = layers.Softmax(axis=1)(layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.01))(gate))
    x = layers.Flatten()(layers.Multiply()([weights, x]))
    model = keras.Model(bag, layers.Dense(2, "softmax")(x))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    x = np.random.default_rng(0).random((ROWS, 4, 6, 6, 1))
    return Fit(model, x, np.arange(ROWS) % 2, {"batch_size": BATCH, "epochs": 2, "class_weight": {0: 0.4, 1: 1.7}})


def boxes_and_classes() -> Training:
    """A detector's losses: of all anchors by weight, of boxes by a mask, divided by the batch's positives."""
    entry = keras.Input((12, 12, 3))
    x = layers.Conv2D(6, 3, 2, padding="same", activation="relu")(entry)
    x = layers.Conv2D(6, 3, 2, padding="same", activation="relu")(x)
    classes = layers.Reshape((-1, 4))(layers.Conv2D(8, 3, padding="same")(x))
    boxes = layers.Reshape((-1, 4))(layers.Conv2D(8, 3, padding="same")(x))
    model = keras.Model(entry, [classes, boxes])

    @tf.function
    def loss_fn(image: Any, label: Any, box: Any) -> Any:
        logits, found = model(image, training=True)
        positive = tf.cast(label > 0, logits.dtype)
        number = tf.maximum(tf.reduce_sum(positive), 1.0)
        target = tf.one_hot(label - 1, 4, dtype=logits.dtype)
        each = tf.nn.sigmoid_cross_entropy_with_logits(target, logits)
        chance = tf.nn.sigmoid(logits)
        right = target * chance + (1 - target) * (1 - chance)
        focal = tf.reduce_sum((0.25 * target + 0.75 * (1 - target)) * tf.pow(1 - right, 2.0) * each)
        difference = tf.abs(found - box)
        smooth = tf.where(difference < 1.0, 0.5 * difference**2, difference - 0.5)
        return (focal + tf.reduce_sum(smooth * positive[..., None])) / number

    rng = np.random.default_rng(0)
    label = np.where(rng.random((3 * BATCH, 18)) < 0.2, rng.integers(1, 5, (3 * BATCH, 18)), 0)
    data = batches(images(12, rows=3 * BATCH), label, rng.normal(size=(3 * BATCH, 18, 4)))
    return Training(loss_fn, keras.optimizers.SGD(0.01, momentum=0.9), model.trainable_variables, data)


PROGRAMS = (
    Program(digits, ranks=True),
    Program(vision_transformer, ranks=True),
    Program(compact_transformer),
    Program(swin, ranks=True),
    Program(segments_of_images),
    Program(dice_of_segments, options=ONCE, ranks=True),
    Program(super_resolution),
    Program(low_light),
    Program(deformable_convolutions, ranks=True),
    Program(turned_by_a_network),
    Program(capsules),
    Program(style_of_images, ranks=True),
    Program(mixer),
    Program(depth_of_scenes, dtype="float32"),
    Program(fine_tuning, dtype="float32"),
    Program(residual_network, Expected.DOCUMENTED, "batch norm in training mode", ranks=True),
    Program(attention_of_many_patches),
    Program(boxes_and_classes, ranks=True),
)
